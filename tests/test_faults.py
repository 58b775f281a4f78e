"""The fault campaign in CI: nothing ends as none may, and docs/faults.md says how each fault ended."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from gpuckpt import room
from tests import campaign

ROOT = Path(__file__).parent.parent
REPORT = runpy.run_path(str(ROOT / "benchmarks/faults.py"))
RECORDED: list[dict[str, Any]] = json.loads((ROOT / "benchmarks/results/faults.json").read_text())["rows"]
TYPE_THIS = "not what is recorded: python benchmarks/faults.py"


def ends(rows: list[dict[str, Any]], command: str) -> dict[tuple[str, str], set[str]]:
    """How the faults in each step of *command* ended; the numbers change with every look that a command takes."""
    return {(r["step"], r["fault"]): set(r["ends"]) for r in rows if r["command"] == command}


@pytest.mark.parametrize("way", campaign.WAYS, ids=lambda w: w.name)
def test_every_fault_at_every_moment(way: campaign.Way) -> None:
    cases = campaign.campaign(way)
    no_driver_calls = {"kill -9 of a caller"} if "pool" in way.name else set()
    assert {c.fault for c in cases} == set(campaign.FAULTS) - {"store lost"} - no_driver_calls
    assert ends(REPORT["counted"](cases), way.name) == ends(RECORDED, way.name), TYPE_THIS


@pytest.mark.parametrize("command", ["suspend", "resume"])
def test_the_store_of_two_hosts_is_lost(command: str) -> None:
    """At every fourth of its calls; the script does all."""
    name = f"{command} on two hosts"
    seen, recorded = ends(REPORT["counted"](campaign.store_campaign(command, every=4)), name), ends(RECORDED, name)
    assert all(found <= recorded.get(step, set()) for step, found in seen.items()), TYPE_THIS
    assert len(seen) >= len(recorded) - 1


def test_the_document_is_written_from_the_results() -> None:
    assert REPORT["main"](["--check"]) == 0


def test_a_loss_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The campaign can fail: a resume that does not look for room."""
    monkeypatch.setattr(room, "shortages", lambda *_: [])
    with pytest.raises(AssertionError, match="lost by gpuckpt"):
        campaign.campaign(next(w for w in campaign.WAYS if w.name == "resume"))
