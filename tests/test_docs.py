"""The documents say what the program does: every error code, hazard, command and exit code, and only figures that were measured."""

from __future__ import annotations

import copy
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from gpuckpt import errors
from gpuckpt.cli.main import COMMANDS
from gpuckpt.group import ERRORS_OF_HAZARDS
from gpuckpt.model import ACCEPTABLE_HAZARDS
from tests.test_vllm_versions import OTHERWISE, VERSIONS

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "tests/gpu/README.md"]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FAILURES = (ROOT / "docs/failures.md").read_text(encoding="utf-8")
#: heading `## `code`` -> the text below it
SECTIONS = {m[1]: m[2] for m in re.finditer(r"^## `([^`]+)`\n(.*?)(?=^#|\Z)", FAILURES, re.MULTILINE | re.DOTALL)}


def test_every_error_code_has_a_section_and_no_other() -> None:
    assert sorted(SECTIONS) == sorted(errors.by_code())
    assert FAILURES.count("\n## ") == len(SECTIONS), "a section twice, or a heading of another form"


@pytest.mark.parametrize("code", sorted(errors.by_code()))
def test_a_section_begins_with_its_exit_code(code: str) -> None:
    assert SECTIONS[code].strip().startswith(f"Exit {errors.by_code()[code].exit_code}")


def test_every_hazard_has_a_section_and_its_way_out() -> None:
    for kind in {*ERRORS_OF_HAZARDS, *ACCEPTABLE_HAZARDS}:
        accepted = f"--accept-loss {kind}" in SECTIONS[kind]
        assert accepted == (kind in ACCEPTABLE_HAZARDS), kind


def test_every_command_is_in_the_readme() -> None:
    rows = set(re.findall(r"^\| `gpuckpt ([a-z-]+)", README, re.MULTILINE))
    assert rows == set(COMMANDS)


def test_every_exit_code_is_in_the_readme() -> None:
    rows = {int(n) for row in re.findall(r"^\| ([0-9, ]+) \|", README, re.MULTILINE) for n in row.split(",")}
    assert {0, 1, 2, 3, 4, 5, 6, 124, 130, 143} <= rows
    assert {cls.exit_code for cls in errors.by_code().values()} <= rows


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_resolve(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = (document.parent / name) if name else document
        assert path.exists(), target
        if anchor:
            assert anchor in {_anchor(h) for h in re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)}, target


@pytest.mark.parametrize("script", ["readme.py", "pictures.py"])
def test_figures_are_those_of_the_result_files(script: str) -> None:
    done = subprocess.run([sys.executable, str(ROOT / "benchmarks" / script), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_result_of_a_gpu_is_of_a_simulated_one() -> None:
    """Scripts that were tried there have "simulated" in what they say of their machine. faults.json is none of these."""
    for path in (ROOT / "benchmarks/results").glob("*.json"):
        machine = json.loads(path.read_text()).get("machine")
        assert not (isinstance(machine, dict) and machine.get("simulated")), path.name


def test_what_has_not_run_on_a_gpu_is_called_so_and_nothing_else_is() -> None:
    """By a result file of the script's name, or of a name that begins with it."""
    table = (ROOT / "tests/gpu/README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)\.(?:py|sh)[^|]*\|(.*)\| ([^|]+) \|$", table, re.MULTILINE)
    scripts = {
        name: text for name, text, gpus in rows if gpus != "0" and name not in ("facts", "lane", "series")
    }  # driver-facts.json; the others start these
    assert len(scripts) > 25
    results = [p.stem for p in (ROOT / "benchmarks/results").glob("*.json")]
    for name, text in scripts.items():
        ran = any(r == name or r.startswith(f"{name}_") for r in results)
        assert ran != ("Not yet run on a GPU" in text), name


def test_the_picture_of_two_models_needs_no_result_to_be_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    draw = runpy.run_path(str(ROOT / "benchmarks/pictures.py"))["two_models"]
    seen = {"a": 118000, "b": 119000, "card": 143155}
    document = {
        "machine": {"gpu": "GPU", "driver": "1"},
        "checks": {"together they are more than the card": {"seen": seen}},
        "gpu_mib_over_time": [[s, 118000 if s % 20 < 10 else 0] for s in range(200, 300)],
        "events": [[0.0, "start both"], [210.5, "ask a"], [220.0, "ask b"], [230.0, "16 requests at once for both"], [299.0, "both ended"]],
    }
    words = "".join(ElementTree.fromstring(draw(document)).itertext())
    assert "a 115 GiB and b 116 GiB" in words
    assert "start both" not in words, "it begins when both are up"


def test_the_picture_of_a_run_is_of_these_commands_and_says_that_it_is_simulated() -> None:
    words = re.sub(r"<[^>]+>", "", (ROOT / "docs/img/run.svg").read_text(encoding="utf-8")).replace("&#160;", " ")
    for word in ("simulated", "gpuckpt ps", "gpuckpt suspend", "gpuckpt resume", "suspended", "running"):
        assert word in words


def test_the_timeline_by_rank_has_a_bar_for_each_step_of_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    pictures = runpy.run_path(str(ROOT / "benchmarks/pictures.py"))
    document = json.loads((ROOT / "benchmarks/results/vllm_tp2.json").read_text())
    for row in document["cycles"]:
        row["down_by_rank"] = {name: [] if name in ("inspect", "verify") else [s, s / 2] for name, s in row["down"].items()}
        row["up_by_rank"] = {name: [] if name in ("inspect", "room") else [s / 2, s] for name, s in row["up"].items()}
    assert pictures["has_ranks"](document)
    picture = pictures["ranks"](document)
    seen = [t.text or "" for t in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}title")]
    for rank in (0, 1):
        for step in ("quiesce", "comms", "lock", "checkpoint", "restore", "unlock", "comms-resume", "unquiesce"):
            assert any(words.startswith(f"rank {rank}, {step}:") for words in seen), (rank, step)
    for row in document["cycles"]:
        del row["down_by_rank"]
    assert not pictures["has_ranks"](document)


def test_the_table_of_what_stays_needs_no_result_to_be_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell is what a class adds to the one above it; a way that was not tried before counts from all that ran then."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    tables = runpy.run_path(str(ROOT / "benchmarks/tables.py"))

    def reading(mib: int, *, listed: bool = True) -> dict[str, int | None]:
        return {"process_mib": mib if listed else None, "card_mib": mib}

    steps = [
        {"step": "context", "running": reading(500), "driver": reading(0, listed=False)},
        {
            "step": "pool",
            "running": reading(1300),
            "empty_cache": reading(1290),
            "sleep": reading(520),
            "pool": reading(521),
            "driver": reading(0),
        },
        {
            "step": "graphs",
            "running": reading(1400),
            "empty_cache": reading(1390),
            "sleep": reading(600),
            "pool": {"error": {}},
            "driver": reading(0),
        },
    ]
    document = {
        "machine": {"gpu": "GPU", "driver": "1", "versions": {}},
        "steps": steps,
        "graphs": [64, 100],
        "checks": {"a": {"ok": True}, "b": {"ok": False}},
    }
    monkeypatch.setitem(tables["what_stays"].__globals__, "result", lambda _: document)
    lines = [[cell.strip() for cell in line.split("|")[2:-1]] for line in tables["what_stays"]().splitlines()[2:6]]
    assert lines == [
        ["500", "", "", "", "0"],
        ["800", "790", "20", "21", "0"],
        ["110", "100", "80", "", "0"],
        ["**1400**", "**1390**", "**600**", "", "**0**"],
    ]
    monkeypatch.setitem(tables["what_stays"].__globals__, "result", lambda _: None)
    assert "Not yet run on a GPU" in tables["what_stays"]()


def test_the_table_of_vllm_has_what_the_adapters_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """And says so where a version does not keep something; what nobody ran is never called run."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    tables = runpy.run_path(str(ROOT / "benchmarks/tables.py"))
    assert {f: otherwise for f, (_, otherwise, _) in tables["VLLM"].items() if f != "run"} == OTHERWISE
    versions = copy.deepcopy(VERSIONS)
    next(iter(versions.values()))["kept"]["hold"]["and what is not kept"] = False
    monkeypatch.setitem(tables["vllm_versions"].__globals__, "json", SimpleNamespace(loads=lambda _: versions))
    monkeypatch.setitem(tables["vllm_versions"].__globals__, "result", lambda _: None)
    rows = [
        [cell.strip() for cell in line.split("|")[2:-1]] for line in tables["vllm_versions"]().splitlines()[2 : 2 + len(tables["VLLM"])]
    ]
    assert rows == [["refused", *["read"] * (len(versions) - 1)], *[["read"] * len(versions)] * (len(tables["VLLM"]) - 1)]


def test_a_figure_of_another_run_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of the figures can fail."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    readme = runpy.run_path(str(ROOT / "benchmarks/readme.py"))
    torch = json.loads((ROOT / "benchmarks/results/preload_torch.json").read_text())
    for row in torch["torch_cycles"]["with"]:
        row["suspend_wall_s"] += 1
    for path in (ROOT / "benchmarks/results").glob("*.json"):
        (tmp_path / path.name).write_text(path.read_text())
    (tmp_path / "preload_torch.json").write_text(json.dumps(torch))
    monkeypatch.setitem(readme["result"].__globals__, "RESULTS", tmp_path)
    assert readme["filled"]("README.md", README) != README


def _anchor(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
