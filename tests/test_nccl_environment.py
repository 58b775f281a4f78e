"""The settings that a child starts with: what the user set stays, and is warned of once where it breaks suspension."""

from __future__ import annotations

import os
import pwd
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpuckpt.nccl.environment import SETTINGS, VLLM_OPTION, Configured, configuration, merged, problems, settings

GOOD = {
    "NCCL_CUMEM_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_CUMEM_HOST_ENABLE": "0",
    "NCCL_GRAPH_REGISTER": "0",
    "NCCL_LOCAL_REGISTER": "0",
    "NCCL_WIN_ENABLE": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
VLLM = {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0", "VLLM_USE_NCCL_SYMM_MEM": "0", "GPUCKPT_AGENT": "1"}
DOCUMENT = Path(__file__).parent.parent / "docs/multi-gpu.md"


def test_the_settings() -> None:
    assert settings() == GOOD
    assert settings(for_vllm=True) == GOOD | VLLM
    assert all(s.why for s in SETTINGS)


def test_nothing_is_changed_but_a_copy() -> None:
    before = dict(os.environ)
    given = {"PATH": "/bin"}
    environ, warnings = merged(given, conf={})
    assert (environ, warnings) == ({"PATH": "/bin", **GOOD}, [])
    assert given == {"PATH": "/bin"}
    assert dict(os.environ) == before


def test_merging_twice_is_merging_once() -> None:
    once, _ = merged({}, for_vllm=True, conf={})
    assert merged(once, for_vllm=True, conf={}) == (once, [])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_CUMEM_ENABLE", "0"),
        ("NCCL_CUMEM_ENABLE", "true"),  # NCCL reads a word as 0
        ("NCCL_NVLS_ENABLE", "1"),
        ("NCCL_NVLS_ENABLE", "2"),
        ("NCCL_NVLS_ENABLE", ""),  # NCCL takes its default then, which is on
        ("NCCL_CUMEM_HOST_ENABLE", "1"),
        ("NCCL_GRAPH_REGISTER", "0x1"),
        ("NCCL_P2P_DISABLE", "1"),
        ("NCCL_DISABLE_MEM_MANAGER", "1"),
        ("NCCL_COMM_SPLIT_SHARE_RESOURCES", "1"),
        ("TORCH_NCCL_ENABLE_MONITORING", "true"),
        ("VLLM_ALLREDUCE_USE_SYMM_MEM", "1"),
    ],
)
def test_what_the_user_set_stays_and_is_warned_of(name: str, value: str) -> None:
    environ, warnings = merged({name: value}, for_vllm=True, conf={})
    assert environ[name] == value
    (warning,) = warnings
    why = next(s.why for s in SETTINGS if s.name == name)
    assert f"{name}={value}" in warning
    assert why in warning
    assert "To mend it, " in warning


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_CUMEM_ENABLE", "1"),
        ("NCCL_CUMEM_ENABLE", "-2"),
        ("NCCL_NVLS_ENABLE", "0"),
        ("NCCL_P2P_DISABLE", "0"),
        ("TORCH_NCCL_ENABLE_MONITORING", "no"),
        ("NCCL_DEBUG", "INFO"),
    ],
)
def test_what_does_no_harm_is_not_warned_of(name: str, value: str) -> None:
    environ, warnings = merged({name: value}, conf={})
    assert (environ[name], warnings) == (value, [])


def test_vllm_s_variables_are_no_concern_of_others() -> None:
    environ, warnings = merged({"VLLM_ALLREDUCE_USE_SYMM_MEM": "1"}, conf={})
    assert warnings == []
    assert "VLLM_USE_NCCL_SYMM_MEM" not in environ


def test_a_configuration_file_is_the_user_s_word(tmp_path: Path) -> None:
    """A variable would hide the file, so none is set."""
    file = tmp_path / "conf"
    file.write_text("NCCL_NVLS_ENABLE=1\nNCCL_CUMEM_ENABLE=1\nVLLM_USE_NCCL_SYMM_MEM=1\n")
    environ, warnings = merged({"NCCL_CONF_FILE": str(file)}, for_vllm=True)
    assert "NCCL_NVLS_ENABLE" not in environ
    assert "NCCL_CUMEM_ENABLE" not in environ
    assert environ["NCCL_WIN_ENABLE"] == "0"
    assert environ["VLLM_USE_NCCL_SYMM_MEM"] == "0", "vLLM does not read it"
    (warning,) = warnings
    assert f"NCCL_NVLS_ENABLE=1 (from {file})" in warning


def test_configuration_files_as_nccl_reads_them(tmp_path: Path) -> None:
    home = pwd.getpwuid(os.getuid()).pw_dir.lstrip("/")
    (tmp_path / "etc").mkdir()
    (tmp_path / home).mkdir(parents=True, exist_ok=True)
    (tmp_path / "etc/nccl.conf").write_text("# NCCL_A=1\nNCCL_A=etc\nNCCL_B=etc=x \n NCCL_C=1\nnothing\n\nNCCL_A=again\n")
    (tmp_path / home / ".nccl.conf").write_text("NCCL_A=home")
    (tmp_path / "named").write_text("NCCL_D=named\n")
    assert configuration({}, root=tmp_path) == {
        "NCCL_A": Configured("home", f"/{home}/.nccl.conf"),
        "NCCL_B": Configured("etc=x ", "/etc/nccl.conf"),
        " NCCL_C": Configured("1", "/etc/nccl.conf"),
    }
    named = configuration({"NCCL_CONF_FILE": "/named", "HOME": "/elsewhere"}, root=tmp_path)
    assert named["NCCL_D"] == Configured("named", "/named")
    assert named["NCCL_A"].value == "etc", "in place of the home's file"
    assert configuration({"NCCL_CONF_FILE": ""}, root=tmp_path)["NCCL_A"].value == "home"
    assert configuration({}, root=tmp_path / "empty", uid=4_000_000) == {}


def test_problems_of_a_running_process() -> None:
    good, _ = merged({}, for_vllm=True, conf={})
    assert problems(good, {}, for_torch=True, for_vllm=True) == []
    bad = problems({**good, "NCCL_NVLS_ENABLE": "1"}, {}, pid=42)
    assert [(h.kind, h.pid, h.acceptable) for h in bad] == [("nccl-communicator", 42, True)]
    assert "NCCL_NVLS_ENABLE=1 in pid 42" in bad[0].message
    assert "gpuckpt env" in bad[0].hint


def test_a_default_that_breaks_is_a_problem_and_one_that_does_not_is_none() -> None:
    names = {h.message.split()[0] for h in problems({}, {}, for_torch=True, for_vllm=True)}
    assert names == {*GOOD, "VLLM_ALLREDUCE_USE_SYMM_MEM", "GPUCKPT_AGENT"} - {"NCCL_CUMEM_ENABLE"}


def test_a_problem_in_a_file_names_it() -> None:
    good, _ = merged({}, conf={})
    del good["NCCL_NVLS_ENABLE"]
    (hazard,) = problems(good, {"NCCL_NVLS_ENABLE": Configured("1", "/etc/nccl.conf")})
    assert "(from /etc/nccl.conf)" in hazard.message
    assert "in /etc/nccl.conf" in hazard.hint


def shell(script: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("NCCL_", "TORCH_", "VLLM_"))}
    path = f"{Path(sys.executable).parent}:{clean['PATH']}"
    return subprocess.run(
        ["sh", "-c", script],
        env={**clean, "PATH": path, "NCCL_CONF_FILE": "/dev/null", **environ},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command_s_lines_are_for_a_shell() -> None:
    done = shell('eval "$(gpuckpt env)"; env')
    assert done.returncode == 0
    assert done.stderr == ""
    assert {line.partition("=")[0]: line.partition("=")[2] for line in done.stdout.splitlines()}.items() >= GOOD.items()


def test_a_value_of_the_user_s_is_quoted_and_kept(tmp_path: Path) -> None:
    done = shell(f'eval "$(gpuckpt env)"; echo "$NCCL_NVLS_ENABLE"; ls {tmp_path}', NCCL_NVLS_ENABLE=f"1; touch {tmp_path}/harm")
    assert done.stdout == f"1; touch {tmp_path}/harm\n"
    assert done.stderr.startswith("warning: NCCL_NVLS_ENABLE=1; touch")


def test_the_command_for_vllm_names_the_option_that_has_no_variable() -> None:
    done = shell("gpuckpt env --vllm")
    assert all(f"export {k}={v}" in done.stdout.splitlines() for k, v in (GOOD | VLLM).items())
    assert VLLM_OPTION in done.stderr


def test_the_document_of_the_command(machine: Any) -> None:
    result = machine.gpuckpt("env", NCCL_CONF_FILE="/dev/null")
    assert (result.code, result.document["environment"], result.document["warnings"]) == (0, GOOD, [])
    bad = machine.gpuckpt("env", "--no-such-option")
    assert set(bad.document) == set(result.document)


def table() -> str:
    """The table of the document, as the settings are."""
    rows = ["| variable | set to | why |", "|---|---|---|"]
    rows += [f"| `{s.name}` | {f'`{s.value}`' if s.value else 'must not be 1'} | {s.why} |" for s in SETTINGS if s.scope != "vllm"]
    rows += [f"| `{s.name}` (vLLM) | `{s.value}` | {s.why} |" for s in SETTINGS if s.scope == "vllm"]
    return "\n".join(rows)


def test_the_document_has_the_settings() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    found = re.search(r"<!-- settings: .*? -->\n(.*?)\n<!-- end -->", text, re.DOTALL)
    assert found
    assert found[1].strip() == table(), f"put this between the marks of {DOCUMENT.name}:\n\n{table()}"
    assert VLLM_OPTION in text
