"""What `gpuckpt run` makes of a command before it starts it: vLLM or not, each change, refusals, the dry run; where its sockets lie."""

from __future__ import annotations

import errno
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpuckpt import errors
from gpuckpt.image import preload
from gpuckpt.supervisor import places, swept, vllm
from tests.simulated_machine import COMMAND

if TYPE_CHECKING:
    from tests.simulated_machine import Machine

SERVE = ["vllm", "serve", "Qwen/Qwen3-8B"]


def prepare(*words: str, without: tuple[str, ...] = (), **environ: str) -> vllm.Prepared:
    return vllm.prepare([*SERVE, *words], environ, "/s", without)


@pytest.mark.parametrize(
    ("words", "certain"),
    [
        ("vllm serve m", True),
        ("/opt/venv/bin/vllm serve m", True),
        ("uv run vllm serve m", True),
        ("python3 /usr/bin/vllm serve m", True),
        ("python -m vllm.entrypoints.openai.api_server --model m", True),
        ("python -m vllm.entrypoints.cli.main serve m", True),
        ("vllm bench serve", False),
        ("vllm", False),
        ("bash -c vllm", False),
        ("python serve.py", False),
        ("python -m vllm", False),
        ("python -m http.server", False),
        ("python", False),
        ("uv run", False),
    ],
)
def test_it_is_vllm_only_where_that_is_certain(words: str, certain: bool) -> None:
    assert vllm.recognise(words.split()) is certain


def test_all_changes() -> None:
    made = prepare("--port", "9000", "--host=0.0.0.0", "--max-model-len", "4096")
    assert made.command == (
        *SERVE,
        *("--max-model-len", "4096", "--uds", "/s", "--enable-sleep-mode", "--disable-custom-all-reduce"),
    )
    assert made.environ == {"VLLM_SERVER_DEV_MODE": "1"}
    assert (made.host, made.port, made.sleeps, made.hidden) == ("0.0.0.0", 9000, True, True)
    assert set(made.changes) == set(vllm.CHANGES) - {"nccl", "agent", "fusion"}, "one GPU has no communicators"
    assert made.warnings == ()


@pytest.mark.parametrize("words", [("-tp", "2"), ("--tensor-parallel-size=2",), ("-pp=2",), ("--data_parallel_size", "2"), ("-pcp", "2")])
def test_several_gpus(words: tuple[str, ...]) -> None:
    made = prepare(*words, NCCL_NVLS_ENABLE="1")
    assert set(made.changes) == set(vllm.CHANGES)
    assert made.gpu_count == 2
    assert made.environ["GPUCKPT_AGENT"] == made.environ["NCCL_CUMEM_ENABLE"] == "1"
    assert made.environ["VLLM_ALLREDUCE_USE_SYMM_MEM"] == "0"
    assert "NCCL_NVLS_ENABLE" not in made.environ
    assert [w for w in made.warnings if "NCCL_NVLS_ENABLE=1" in w]
    assert made.command[-2:] == ("--compilation-config", vllm.FUSION_OFF)
    for given in (("--compilation-config", "{}"), ("--compilation_config.mode", "3"), ("-cc.mode=3",)):
        assert "--compilation-config was set by you" in prepare(*words, *given).warnings[-1]
    assert "GPUCKPT_AGENT" not in prepare(*words, without=("agent",)).environ
    made = prepare(*words, without=("nccl", "agent", "fusion"))
    assert made.environ == {"VLLM_SERVER_DEV_MODE": "1"}
    assert set(words) <= set(made.command)


@pytest.mark.parametrize("change", vllm.CHANGES)
def test_each_change_can_be_refused_alone(change: str) -> None:
    made = prepare("--port", "9000", without=(change,))
    assert change not in made.changes
    assert made.gpu_count == 1
    assert ("--uds" in made.command) == (change != "gate")
    assert ("--port" in made.command) == (change == "gate")
    assert ("--enable-sleep-mode" in made.command) == (change != "sleep-mode")
    assert ("--disable-custom-all-reduce" in made.command) == (change != "custom-all-reduce")
    assert (made.environ == {}) == (change in ("dev-mode", "gate"))
    assert made.sleeps == (change not in ("gate", "dev-mode", "sleep-mode"))


@pytest.mark.parametrize(
    ("words", "environ", "kept"),
    [
        (["--no-enable-sleep-mode"], {}, "--no-enable-sleep-mode"),
        (["--no-enable_sleep_mode"], {}, "--no-enable-sleep-mode"),
        (["--no-disable-custom-all-reduce"], {}, "--no-disable-custom-all-reduce"),
        ([], {"VLLM_SERVER_DEV_MODE": "0"}, "VLLM_SERVER_DEV_MODE=0"),
    ],
)
def test_what_the_user_set_is_kept_with_a_warning(words: list[str], environ: dict[str, str], kept: str) -> None:
    made = prepare(*words, **environ)
    assert [w for w in made.warnings if kept in w]
    assert "--enable-sleep-mode" not in made.command or kept != "--no-enable-sleep-mode"
    assert "VLLM_SERVER_DEV_MODE" not in made.environ or "VLLM" not in kept
    assert made.sleeps == (kept == "--no-disable-custom-all-reduce")


def test_what_is_there_already_is_not_added_twice() -> None:
    made = prepare("--enable_sleep_mode", "--disable-custom-all-reduce", VLLM_SERVER_DEV_MODE="1")
    assert "--enable-sleep-mode" not in made.command
    assert made.command.count("--disable-custom-all-reduce") == 1
    assert made.sleeps
    assert made.hidden


def test_keys_of_the_command_and_of_the_environment() -> None:
    """vLLM takes those of the option alone, where there are any."""
    assert prepare("--api-key", "a", "b", "-O3", "--port", "1", VLLM_API_KEY="c").keys == ("a", "b")
    assert prepare("--api-key=a").keys == ("a",)
    assert prepare(VLLM_API_KEY="c").keys == ("c",)
    assert prepare().keys == ()


def test_an_option_by_its_beginning() -> None:
    """vLLM's parser takes it for the option, so it is one here."""
    made = prepare("--api-k", "a", "--por", "9000", "--hos=0.0.0.0", "--tensor-par", "2", "--enable-sleep")
    assert (made.keys, made.host, made.port, made.gpu_count) == (("a",), "0.0.0.0", 9000, 2)
    assert not {"--por", "9000", "--hos=0.0.0.0", "--enable-sleep-mode"} & set(made.command)
    for option in ("--ssl-keyf", "--ud", "--headl"):
        with pytest.raises(errors.Usage, match="gate"):
            prepare(option, "x")


def test_the_last_value_counts() -> None:
    made = prepare("--port", "1", "--port=2")
    assert made.port == 2
    assert not {"1", "--port", "--port=2"} & set(made.command)


@pytest.mark.parametrize("option", ["--ssl-keyfile", "--ssl_certfile", "--uds", "--headless"])
def test_what_the_gate_cannot_take_over_is_refused(option: str) -> None:
    with pytest.raises(errors.Usage, match="gate"):
        prepare(option, "x")
    assert option in prepare(option, "x", without=("gate",)).command


@pytest.mark.parametrize("words", [["--root-path", "/v1"], ["--root-path=/v1"], ["--root_path", "/v1"], ["--root_path=/"], ["--root=/v1"]])
def test_a_prefix_that_vllm_takes_off_paths_is_refused(words: list[str]) -> None:
    """Else POST /v1/sleep is POST /sleep to it."""
    with pytest.raises(errors.Usage, match="--root-path cannot be used behind the gate") as e:
        prepare(*words)
    assert "--without gate" in e.value.hint
    assert words[0] in prepare(*words, without=("gate",)).command


def test_a_file_of_options_may_have_several_gpus() -> None:
    """What does no harm on one is done; what would take the place of an option in the file is not."""
    made = prepare("--config", "x.yaml")
    assert made.gpu_count is None
    assert set(vllm.CHANGES) - set(made.changes) == {"fusion"}
    assert prepare("--config", "x.yaml", "-tp", "2").gpu_count == 2
    assert "fusion" in prepare("--config", "x.yaml", "-tp", "2").changes


def test_a_prefix_in_a_file_of_options_does_not_count() -> None:
    """vLLM puts the file's options before those of the command line."""
    assert "--root-path=" in prepare("--config", "x.yaml").command
    assert "--root-path=" not in prepare("--config", "x.yaml", without=("gate",)).command
    assert "--root-path=" not in prepare().command


@pytest.mark.parametrize("port", ["x", "70000", "-1"])
def test_a_bad_port(port: str) -> None:
    with pytest.raises(errors.Usage):
        prepare(f"--port={port}")


def test_the_dry_run_starts_nothing(machine: Machine) -> None:
    runtime = machine.path / "runtime"
    words = ("run", "--dry-run", "--", "vllm", "serve", "Qwen/Qwen3-8B", "--port", "8123")
    result = machine.gpuckpt(*words, json=False, GPUCKPT_RUNTIME_DIR=str(runtime), GPUCKPT_PRELOAD="0")
    assert result.code == 0
    assert "VLLM_SERVER_DEV_MODE=1\nvllm serve Qwen/Qwen3-8B --uds " in result.stdout
    assert "name Qwen3-8B, adapter vllm, gate on " in result.stdout
    assert result.stdout.endswith("the command is taken for vllm serve\n")
    assert ":8123" in result.stdout
    assert not runtime.exists()
    document = machine.gpuckpt("run", "--json", *words[1:], json=False, GPUCKPT_RUNTIME_DIR=str(runtime), GPUCKPT_PRELOAD="0").document
    assert document["command_line"][:3] == ["vllm", "serve", "Qwen/Qwen3-8B"]
    assert (document["dry_run"], document["adapter"], document["environment"]) == (True, "vllm", {"VLLM_SERVER_DEV_MODE": "1"})


def test_what_a_run_needs_and_is_not_installed(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "aiohttp.py").write_text("raise ModuleNotFoundError(name='aiohttp')")
    environ = {**machine.environ, "PYTHONPATH": str(tmp_path)}
    result = subprocess.run([COMMAND, "run", "--", "true"], env=environ, capture_output=True, text=True, check=False)
    assert result.returncode == 125
    assert "aiohttp is not installed, and a run needs it\n  try: pip install 'gpuckpt[serve]'" in result.stderr


@pytest.mark.skipif(bool(preload.problem()), reason="installed without a compiler")
def test_the_preload_library(machine: Machine) -> None:
    """Any command gets it, before what the user preloads; it can be left out."""

    def environment(*options: str) -> dict[str, str]:
        runtime = {"GPUCKPT_RUNTIME_DIR": str(machine.path / "r"), "LD_PRELOAD": ""}
        document = machine.gpuckpt("run", "--json", "--dry-run", *options, "--", "true", json=False, **runtime).document
        assert ("preload" in document["changes"]) == ("LD_PRELOAD" in document["environment"])
        return document["environment"]

    assert environment() == {"LD_PRELOAD": str(preload.library())}
    assert environment("--without", "preload") == {}
    said = machine.gpuckpt("run", "--dry-run", "--reserve", "1GiB", "--", "true", json=False, LD_PRELOAD="").stdout
    assert "(leave out with --without preload)" in said
    assert "--without reserve" not in said, "it is given, or not"
    assert "the command is not taken for a server: no gate" in said


@pytest.mark.parametrize("command", ["run", "exec", "lease"])
def test_bad_usage_of_what_runs_another_program(machine: Machine, command: str) -> None:
    """It has a status of its own, as with ``timeout`` and ``docker run``, and the documents say so."""
    for words in (("--no-such-option", "--", "true"), ()):
        result = machine.gpuckpt(command, *words, json=False)
        assert (result.code, result.stderr.splitlines()[0].split()[:3]) == (125, ["Usage:", "gpuckpt", command])
    if command != "exec":
        result = machine.gpuckpt(command, "--json", "--no-such-option", "--", "true", json=False)
        assert (result.code, result.error["code"]) == (125, "usage")
    for said in (machine.gpuckpt(command, "--help", json=False).stdout, Path(__file__).parent.with_name("README.md").read_text()):
        assert "125" in said
        assert "bad usage included" in " ".join(said.split())
    assert machine.gpuckpt("suspend", "--no-such-option", "1").code == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--name", "123", "--", "true"], "cannot be a name"),
        (["--name", "a/b", "--", "true"], "cannot be a name"),
        (["--", "sudo", "docker", "run", "x"], "run gpuckpt inside"),
        (["--keep", "kv_cache", "--", "true"], "vLLM's cache"),
        (["--upstream", "https://x", "--", "true"], "http://"),
        (["--upstream", "http://x", "--adapter", "vllm", "--", "true"], "leave one"),
        (["--upstream", "http://x", "--listen", "x:y", "--", "true"], "--listen"),
        (["--upstream", "http://x:y", "--", "true"], "is no URL"),
        (["--upstream", "http://:80", "--", "true"], "is no URL"),
        (
            ["--idle", "1s", "--", "nice", "vllm", "serve", "m"],
            "--idle goes by the requests that come, and here none would come by gpuckpt",
        ),
        (["--idle", "1s", "--without", "gate", "--", "vllm", "serve", "m"], "its gate was left out"),
        (["--listen", "8000", "--", "true"], "the command is not taken for a server"),
        (["--share", "--", "true"], "--adapter vllm, if it is"),
        (["--", "vllm", "serve", "m", "--uds", "/x"], "behind the gate"),
    ],
)
def test_refusals_before_anything_is_started(machine: Machine, words: list[str], said: str) -> None:
    result = machine.gpuckpt("run", *words, json=False, GPUCKPT_RUNTIME_DIR=str(machine.path / "r"))
    assert result.code == 125
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_names() -> None:
    assert places.name_for(SERVE) == "Qwen3-8B"
    assert places.name_for(["vllm", "serve", "/models/x/"]) == "x"
    assert places.name_for(["/usr/bin/python3", "train.py"]) == "python3"
    assert places.name_for(["vllm", "serve"]) == "vllm"
    assert places.name_for(["vllm", "serve", "123"]) == "run"
    assert [n for n in ("a", "a.b-c_d", "1a", "x" * 32) if not places.is_name(n)] == []
    assert [n for n in ("", "1", "123", "-a", ".a", "a/b", "x" * 33, "a b", "é", "a\n") if places.is_name(n)] == []


def test_the_runtime_directory_is_ours_alone(tmp_path: Path) -> None:
    made = swept.private(tmp_path / "r")
    assert made.stat().st_mode & 0o777 == 0o700
    made.chmod(0o755)
    assert swept.private(made).stat().st_mode & 0o777 == 0o700
    (tmp_path / "link").symlink_to(made)
    (tmp_path / "file").write_text("")
    for name in ("link", "file"):
        with pytest.raises(errors.PermissionDenied):
            swept.private(tmp_path / name)
    with pytest.raises(errors.Usage, match="too long"):
        places.Place("a", {"GPUCKPT_RUNTIME_DIR": str(tmp_path / ("x" * 100))})


def test_the_runtime_directory_is_the_same_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert places.runtime_directory({"GPUCKPT_RUNTIME_DIR": "r"}) == tmp_path / "r"


def test_where_nothing_can_be_made_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "file").write_text("")
    with pytest.raises(errors.PermissionDenied, match="cannot be made"):
        places.Place("a", {"GPUCKPT_RUNTIME_DIR": str(tmp_path / "file" / "r")})
    monkeypatch.setattr(places.tempfile, "mkdtemp", full)
    with pytest.raises(errors.CannotListen, match="No space left on device; nothing was started"):
        places.Place("a", {"GPUCKPT_RUNTIME_DIR": str(tmp_path / "r")})
