"""`gpuckpt recover`: what it finishes or undoes, what it leaves alone, and what it says of either."""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING, Any

from gpuckpt.local import LocalWorld
from gpuckpt.model import Call
from gpuckpt.recovery import recover_all
from tests.simulated_machine import eventually
from tests.test_cli_concurrent import held, waits_for
from tests.test_cli_interrupted import SIGNALS

if TYPE_CHECKING:
    import pytest

    from tests.simulated_machine import Machine


@SIGNALS
def test_recover_while_it_waits_for_a_call(machine: Machine, signum: int, code: int) -> None:
    """The driver goes on with it, and so does the record: nothing is to be undone."""
    target = machine.target("--gib", "2")
    machine.slow(5.0)
    suspend = machine.begin("suspend", target.pid)
    eventually(lambda: target.under_way(Call.CHECKPOINT), "the checkpoint")
    suspend.signal(9)
    suspend.end()
    recover = machine.begin("recover")
    eventually(lambda: waits_for(recover, target), "it waits")
    recover.signal(signum)
    result = recover.end()
    assert (result.code, result.error["code"], result.error["hint"]) == (code, "interrupted", "gpuckpt recover")
    assert target.under_way(Call.CHECKPOINT), "it did not wait for the end of it"
    assert [r["status"] for r in machine.records()] == ["suspending"]


def test_a_signal_while_it_asks_for_its_processes(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    target = machine.target()
    assert machine.gpuckpt("suspend", target.pid).code == 0
    machine.rewrite(status="suspending")
    wait_for = LocalWorld._wait_for

    def signalled(world: LocalWorld, *asked: Any) -> None:
        world.interruptions.append(signal.SIGTERM)
        wait_for(world, *asked)

    monkeypatch.setattr(LocalWorld, "_wait_for", signalled)
    with held(target), LocalWorld(machine.environ) as world:
        (report,) = recover_all(world)
    assert report.error is not None
    assert (report.error["code"], report.error["hint"]) == ("interrupted", "gpuckpt recover")
    assert [r["status"] for r in machine.records()] == ["suspending"]


def test_recover_of_several_says_the_worst(machine: Machine) -> None:
    """One is refused, of another a process is not as it was found: 3, though 6 is more."""
    stopped, blocked = machine.target(), machine.target("--gib", "40")
    for target in (stopped, blocked):
        machine.gpuckpt("suspend", target.pid)
    for path in (machine.state_dir / "groups").glob("[!.]*.json"):
        record = json.loads(path.read_text())
        path.write_text(json.dumps({**record, "status": "undoing"}))
    machine.target("--gib", "60")
    stopped.stop()
    result = machine.gpuckpt("recover")
    assert sorted(p["state"] for p in result.document["processes"]) == ["suspended"]
    assert (result.code, result.error["code"]) == (3, "not-as-found")


def test_recover_in_words(machine: Machine) -> None:
    target = machine.target()
    machine.gpuckpt("suspend", target.pid)
    machine.rewrite(status="resuming")
    result = machine.gpuckpt("recover", json=False)
    assert result.code == 0
    assert f"pid {target.pid}" in result.stdout
    assert "the resume was undone" in result.stdout
    assert machine.gpuckpt("is-suspended", target.pid).code == 0


def test_recover_without_room(machine: Machine) -> None:
    one, two = machine.target("--gib", "40"), machine.target()
    machine.gpuckpt("suspend", one.pid, two.pid)
    with machine.world.transaction() as world:
        world.rules.restore(two.pid, {})
    machine.rewrite(status="resuming")
    filler = machine.target("--gib", "60")
    result = machine.gpuckpt("recover")
    assert (result.code, result.error["code"]) == (3, "not-as-found")
    assert f"pid {filler.pid}" in result.error["message"]
    assert "undone" not in result.document["recovered"][0]
    assert "finished" not in result.document["recovered"][0]
    filler.kill()
    assert machine.gpuckpt("recover").states == {one.pid: "running", two.pid: "running"}
    assert one.unharmed()


def test_a_group_that_recover_cannot_bring_back_yet_is_suspended(machine: Machine) -> None:
    """It is said to be, and what is to be typed brings it back: to `recover` nothing is left in the middle then."""
    stopped, other = machine.target("--gib", "1"), machine.target("--gib", "1")
    for target in (stopped, other):
        machine.gpuckpt("suspend", target.pid)
    for path in (machine.state_dir / "groups").glob("[!.]*.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "status": "undoing"}))
    os.kill(stopped.pid, signal.SIGSTOP)
    result = machine.gpuckpt("recover")
    os.kill(stopped.pid, signal.SIGCONT)
    assert (result.code, result.error["code"]) == (3, "not-as-found"), "it waits for the room of the one that is stopped"
    said = " ".join(result.document["recovered"])
    assert said.count("stays in the middle") == said.count("suspended; it stays so for now") == 1
    assert machine.gpuckpt("recover").states == {stopped.pid: "running"}
    back = result.error["hint"].partition("gpuckpt ")[2].split()
    assert (back, machine.gpuckpt(*back).states) == (["resume", str(other.pid)], {other.pid: "running"})
