"""What a report and the doctor say of the path that an image took, and of what another would have taken."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from gpuckpt.cli.suspend import show
from gpuckpt.image import paths
from gpuckpt.image.preload import Image, Result, Verdict
from gpuckpt.model import GIB, Report
from tests import schedules
from tests.memory_world import MemoryWorld
from tests.schedules import Player, Proc, Schedule
from tests.simulated_machine import Machine

SEEN = Result(0, (), 0, 0, Verdict.NOTHING, 0, 0, 0, 0.0, 0, False, 0, 0, 0, 0)


def test_the_ratios_are_those_that_were_measured() -> None:
    torch, plain = (json.loads((Path(__file__).parent.parent / source).read_text()) for source in paths.SOURCES)
    assert (torch["torch_ratio"]["checkpoint"], plain["plain_ratio"]["checkpoint"]) == paths.RATIOS
    ready = json.loads((Path(__file__).parent.parent / paths.READY_SOURCE).read_text())
    assert min(ready[f"torch_{turn}_ratio"]["reserve"]["checkpoint"] for turn in ("first", "later")) == pytest.approx(
        paths.READY_RATIO, rel=0.1
    )


def test_the_other_path() -> None:
    shorter = paths.other("driver", 16 * GIB, 10.0)
    few, many = sorted(paths.RATIOS)
    assert shorter == paths.Estimate("preload", round(10 * few, 2), round(10 * many, 2))
    longer = paths.other("preload", 16 * GIB, 5 * (few + many), shared=True)
    assert longer is not None
    assert (longer.path, longer.low_s < 10 < longer.high_s) == ("driver", True)
    ready = paths.other("preload", 16 * GIB, 5 * (few + many), shared=True, ready=True)
    assert ready is not None
    assert (ready.low_s, ready.high_s > longer.high_s, ready.source) == (longer.low_s, True, paths.READY_SOURCE)
    assert paths.other("preload", 16 * GIB, 2.0) is None, "the ratios are of a library whose threads share the copies"
    assert paths.other("driver", GIB, 1.0) is None, "mostly fixed cost"
    assert paths.other("driver", 16 * GIB, None) is None, "suspended by another command"


@pytest.mark.parametrize("verdict", list(Verdict))
def test_there_are_words_for_each_verdict(verdict: Verdict) -> None:
    assert dataclasses.replace(SEEN, last=verdict).why_not()
    failed = dataclasses.replace(SEEN, images=(Image(1, GIB, verdict, 12),)).why_not()
    assert (failed == "") == (verdict is Verdict.FAST)
    assert "Cannot allocate memory" in failed or not failed


def suspended(monkeypatch: pytest.MonkeyPatch, **image: object) -> Report:
    """The report of a suspend of 8 GiB that took a second, on GPUs that do not say that they are simulated."""
    monkeypatch.setattr(MemoryWorld, "simulated", False)
    monkeypatch.setattr(MemoryWorld, "image", lambda *_: {"dropped": False, **image})
    (report,) = Player.of(Schedule((Proc(gib=8),), ())).play(schedules.Step("suspend")).reports
    return report


def test_a_report_tells_the_path_why_and_what_the_other_would_have_taken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = suspended(monkeypatch, path="driver", why="no preload library in pid 1000")
    (p,) = report.processes
    few, many = sorted(paths.RATIOS)
    assert p.image is not None
    assert (p.image["path"], p.image["why"]) == ("driver", "no preload library in pid 1000")
    assert p.image["estimate"] == {"path": "preload", "low_s": round(few, 2), "high_s": round(many, 2), "source": paths.SOURCES[0]}
    show(report)
    said = capsys.readouterr().out
    assert (
        "by the driver alone: no preload library in pid 1000 (estimate with the preload library, 16 threads: about 0.1 s of checkpoint"
        in said
    )
    report = suspended(monkeypatch, path="preload", copy_threads=16)
    show(report)
    assert f"with the preload library (estimate without: about {1 / many:.1f}-{1 / few:.1f} s of checkpoint" in capsys.readouterr().out
    show(suspended(monkeypatch, path="preload", from_reserve_bytes=8 * GIB))
    assert "with the preload library, 8.0 GiB of it ready before\n" in capsys.readouterr().out


def test_nothing_is_made_up_of_simulated_times(machine: Machine) -> None:
    target = machine.target("--gib", "8")
    (p,) = machine.gpuckpt("suspend", target.pid).document["processes"]
    assert (p["image"]["path"], p["image"]["estimate"]) == ("driver", None)
    assert p["image"]["why"].startswith("no preload library")
    (p,) = machine.gpuckpt("suspend", target.pid).document["processes"]
    assert (p["image"]["path"], p["image"]["estimate"]) == ("driver", None), "asked for twice, too"
    assert "estimate" not in machine.gpuckpt("suspend", target.pid, json=False).stdout
