"""Bad days of jobs with agents and real processes: ranks that die or hang at a step, two commands at once, programs that let nobody in."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import TYPE_CHECKING

from gpuckpt.model import State
from tests.simulated_machine import eventually
from tests.test_agent import job, stages, states, whole

if TYPE_CHECKING:
    from tests.simulated_machine import Machine


def three_come(machine: Machine, meeting: str) -> None:
    """Wait until three ranks are inside NCCL, where they wait for the fourth."""
    place = machine.world.path / "comms" / meeting
    eventually(lambda: place.exists() and len(list(place.iterdir())) == 3, "three ranks have come to their communicator")


def test_a_rank_that_dies_before_anything_is_lost(machine4: Machine) -> None:
    ranks = job(machine4)
    others = [r for r in ranks if r is not ranks[2]]
    with machine4.in_call(ranks[2]):
        running = machine4.begin("suspend", ranks[0].pid)
        eventually(lambda: stages(others) == {"quiesced"}, "the others stand at their safe point")
        ranks[2].kill()
    result = running.end()
    assert (result.code, result.error["pid"], result.error["step"]) == (1, ranks[2].pid, "quiesce"), result
    assert whole(others)
    assert not machine4.records()


def test_a_communicator_that_breaks_on_one_rank(machine4: Machine) -> None:
    """That rank is named, not one that waits for it; and the job is never suspended once more: it could not come back."""
    ranks = job(machine4)
    machine4.world.add_fault("comms", pid=ranks[2].pid, result="INTERNAL_ERROR")
    result = machine4.gpuckpt("suspend", ranks[0].pid, "--timeout", "2s")
    assert (result.code, result.error["code"], result.error["pid"]) == (3, "lost", ranks[2].pid), result
    assert "INTERNAL_ERROR" in result.error["message"]
    ranks[0].kill()  # who waits for it inside NCCL would be named first
    ranks[1].kill()
    ranks[3].kill()
    again = machine4.gpuckpt("suspend", ranks[2].pid)
    assert (again.code, again.error["code"], again.error["pid"]) == (3, "lost", ranks[2].pid), again
    assert states(machine4, [ranks[2]]) == {State.RUNNING}


def test_a_rank_that_dies_in_the_way_back_of_its_communicators(machine4: Machine) -> None:
    """Nobody waits until the deadline for peers that wait inside NCCL for the dead."""
    ranks = job(machine4)
    assert machine4.gpuckpt("suspend", ranks[0].pid).code == 0
    machine4.world.add_fault("comms-resume", pid=ranks[2].pid, hang=True)
    running = machine4.begin("resume", ranks[0].pid, "--timeout", "10m")
    three_come(machine4, "tp-2-resume")
    ranks[2].kill()
    result = running.end()
    assert (result.code, result.error["code"], result.error["step"]) == (3, "in-flight", "comms-resume"), result
    assert f"pid {ranks[2].pid} of its group ended, for whom it waits" in result.error["message"]
    assert result.states[ranks[2].pid] == "gone"


def test_a_rank_that_is_stopped_in_its_communicators(machine4: Machine) -> None:
    """The others wait for it inside NCCL; it is named, with the way on, and that way leads back."""
    ranks = job(machine4)
    machine4.world.add_fault("comms", pid=ranks[2].pid, hang=True)
    running = machine4.begin("suspend", ranks[0].pid, "--timeout", "2s")
    three_come(machine4, "tp-1-suspend")
    ranks[2].stop()
    result = running.end()
    assert (result.code, result.error["code"]) == (3, "in-flight"), result
    assert f"pid {ranks[2].pid} is stopped" in result.error["message"]
    assert result.error["hint"] == f"kill -CONT {ranks[2].pid}; when it has answered, or been ended: gpuckpt recover"
    ranks[2].signal(signal.SIGCONT)


def test_an_old_nccl_is_advised_against(machine4: Machine) -> None:
    ranks = machine4.job(*(("--gpu", str(r), "--nccl-socket", "--nccl", "2.29.7", "--agent", "tp", str(r), "2") for r in range(2)))
    plan = machine4.gpuckpt("suspend", "--dry-run", ranks[0].pid)
    assert plan.code == 0
    (said,) = plan.document["warnings"]
    assert said.startswith(f"NCCL 2.29.7 in pid {ranks[0].pid}, {ranks[1].pid}: 2.30.7 or newer is advised"), said


def test_each_operation_looks_afresh(machine4: Machine) -> None:
    """Ranks of an elastic job come and go between two of them."""
    first, second = job(machine4, 2), machine4.job(("--gpu", "2", "--agent", "own", "0", "1"))
    pids = [first[0].pid, second[0].pid]
    assert set(machine4.gpuckpt("suspend", *pids).states) == {t.pid for t in (*first, *second)}
    assert machine4.gpuckpt("resume", pids[0]).code == 0
    second[0].kill()
    third = machine4.job(("--gpu", "3", "--agent", "new", "0", "1"))
    assert set(machine4.gpuckpt("suspend", pids[0], third[0].pid).states) == {t.pid for t in (*first, *third)}
    assert machine4.gpuckpt("resume", third[0].pid).code == 0
    assert whole([*first, *third])


FORKED = """
import os, time
import gpuckpt.agent
from gpuckpt.agent import protocol
gpuckpt.agent.install()
path = gpuckpt.agent._agent.path
ready, go = os.pipe(), os.pipe()
if os.fork() == 0:
    os.close(go[1])
    os.read(go[0], 1)  # until the parent ends: the kernel closes what it had in no order
    until = time.monotonic() + 10
    while path.exists() and time.monotonic() < until:
        protocol.sweep(path.parent)
    print(path.exists(), flush=True)
    os._exit(0)
assert path.exists()
os._exit(0)
"""


def test_a_forked_child_keeps_no_agent_alive() -> None:
    """Nobody listens on its parent's socket once that has ended, so it is swept away, and its number is free."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False"
