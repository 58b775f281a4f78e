"""Jobs of several ranks with agents, on simulated GPUs: all steps on all ranks, and every way that one of them can fail."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from typing import TYPE_CHECKING

import pytest

from gpuckpt.agent import client
from gpuckpt.agent.client import Agents
from gpuckpt.driver.simulated import SimulatedDriver
from gpuckpt.inspect import hazards, processes
from gpuckpt.inspect import ranks as ranks_of
from gpuckpt.model import Call, GpuProcess, Rank, State
from tests.simulated_machine import eventually

if TYPE_CHECKING:
    from tests.simulated_machine import Machine, Target


def job(machine: Machine, ranks: int = 4, agents: int | None = None) -> list[Target]:
    """*ranks* processes with one communicator, the first *agents* of them with an agent."""
    with_agent = ranks if agents is None else agents
    return machine.job(
        *(("--gpu", str(r % 4), "--nccl-socket", *(("--agent", "tp", str(r), str(ranks)) if r < with_agent else ())) for r in range(ranks))
    )


def states(machine: Machine, targets: list[Target]) -> set[State]:
    driver = SimulatedDriver(machine.world.path)
    return {driver.state(t.pid) for t in targets}


def stages(targets: list[Target]) -> set[str]:
    """What the agents say of themselves, asked as anybody may."""
    agents = Agents()
    try:
        hellos = [agents.hello(processes.read(t.pid).id) for t in targets]
    finally:
        agents.close()
    return {h.stage for h in hellos if h}


def whole(targets: list[Target]) -> bool:
    return all(t.unharmed() for t in targets)


def test_one_rank_alone_is_refused(machine4: Machine) -> None:
    """Case 43: one of two ranks was checkpointed alone and could not be restored (NVIDIA/cuda-checkpoint#47). Its siblings are named."""
    ranks = job(machine4)
    result = machine4.gpuckpt("suspend", "--no-tree", ranks[1].pid)
    assert (result.code, result.error["code"]) == (6, "nccl-communicator")
    for r in (0, 2, 3):
        assert f"rank {r} of 4 is pid {ranks[r].pid} (" in result.error["message"]
    assert f"gpuckpt suspend {ranks[0].pid}" in result.error["hint"]
    assert states(machine4, ranks) == {State.RUNNING}


def test_a_program_that_never_comes_to_its_safe_point(machine4: Machine) -> None:
    ranks = job(machine4)
    with machine4.in_call(ranks[2]):
        result = machine4.gpuckpt("suspend", ranks[0].pid, "--timeout", "2s")
    assert (result.code, result.error["pid"], result.error["step"]) == (124, ranks[2].pid, "quiesce"), result
    assert "safe point" in result.error["message"]
    assert whole(ranks)
    assert machine4.gpuckpt("suspend", ranks[0].pid).code == 0


def test_ctrl_c_does_not_wait_for_a_program_to_come(machine4: Machine) -> None:
    ranks = job(machine4)
    with machine4.in_call(ranks[2]):
        suspend = machine4.begin("suspend", ranks[0].pid, "--timeout", "10m")
        eventually(lambda: "quiesced" in stages(ranks), "the others stand")
        suspend.signal(signal.SIGINT)
        result = suspend.end()
        assert (result.code, result.error["code"]) == (130, "interrupted"), result
        assert set(result.states.values()) == {"running"}
        assert stages(ranks) == {"running"}
    assert whole(ranks)
    assert not machine4.records()


def test_communicators_that_break_are_named_lost(machine4: Machine) -> None:
    ranks = job(machine4)
    for r in ranks:
        machine4.world.add_fault("comms", pid=r.pid, result="INTERNAL_ERROR")
    result = machine4.gpuckpt("suspend", ranks[0].pid)
    assert (result.code, result.error["code"]) == (3, "lost"), result
    assert "communicators" in result.error["message"]
    assert "lost" in {p["state"] for p in result.document["processes"]}


def test_a_rank_that_hangs_in_its_communicators(machine4: Machine) -> None:
    ranks = job(machine4)
    machine4.world.add_fault("comms", pid=ranks[1].pid, hang=True)
    result = machine4.gpuckpt("suspend", ranks[0].pid, "--timeout", "2s")
    assert (result.code, result.error["code"]) == (3, "in-flight"), result
    assert states(machine4, ranks) == {State.RUNNING}


@pytest.mark.parametrize("call", ["lock", "checkpoint"])
def test_a_failure_after_disarm_takes_the_whole_job_back(machine4: Machine, call: str) -> None:
    ranks = job(machine4)
    machine4.world.add_fault(call, pid=ranks[3].pid, result="UNKNOWN")
    result = machine4.gpuckpt("suspend", ranks[0].pid)
    assert result.code == 1, result
    assert whole(ranks)
    assert machine4.gpuckpt("suspend", ranks[0].pid).code == 0


def test_a_controller_killed_in_the_quiesce_is_not_missed(machine4: Machine) -> None:
    ranks = job(machine4)
    with machine4.in_call(ranks[2]):
        running = machine4.begin("suspend", ranks[0].pid)
        eventually(lambda: "quiesced" in stages(ranks), "an agent has begun")
        running.process.kill()
        running.end()
    eventually(lambda: stages(ranks) == {"running"}, "every rank goes back by itself")
    assert machine4.gpuckpt("recover").code == 0
    assert whole(ranks)


def done(agents: Agents, call: Call, targets: list[Target]) -> set[str]:
    """How *call* ended on each, asked by a controller without an operation round it."""
    calls = agents.start(call, [processes.read(t.pid).id for t in targets], "raw", 5.0)
    for c in calls.values():
        while c.outcome is None:
            c.receive()
    return {c.outcome.result for c in calls.values()}


def prepare(agents: Agents, call: Call, targets: list[Target]) -> int:
    """Ask *targets*, and say nothing more: the end of the pipe that the word would go into."""
    ours, theirs = os.pipe()
    calls = [agents._ask(call, processes.read(t.pid).id, "raw", 5.0, ours) for t in targets]
    os.close(ours)
    assert all(c.ready(time.monotonic() + 5) for c in calls)
    return theirs


@pytest.mark.parametrize("asked", [2, 4])
def test_a_controller_killed_while_it_asks_has_begun_nothing(machine4: Machine, asked: int) -> None:
    ranks, agents = job(machine4), Agents()
    assert done(agents, Call.QUIESCE, ranks) == {"SUCCESS"}
    theirs = prepare(agents, Call.COMMS, ranks[:asked])
    assert stages(ranks) == {"quiesced"}
    agents.close()
    os.close(theirs)
    eventually(lambda: stages(ranks) == {"running"}, "every rank goes back by itself")
    assert not (machine4.world.path / "comms" / "tp-1-suspend").exists()
    assert whole(ranks)


def test_a_controller_killed_after_its_word_is_obeyed_by_all(machine4: Machine) -> None:
    ranks, agents = job(machine4), Agents()
    assert done(agents, Call.QUIESCE, ranks) == {"SUCCESS"}
    assert done(agents, Call.COMMS, ranks) == {"SUCCESS"}
    theirs = prepare(agents, Call.DISARM, ranks)
    os.write(theirs, b"!")
    agents.close()
    os.close(theirs)
    eventually(lambda: stages(ranks) == {"disarmed"}, "every rank waits for the next controller")
    assert machine4.gpuckpt("suspend", ranks[0].pid).code == 0
    assert machine4.gpuckpt("resume", ranks[0].pid).code == 0
    assert whole(ranks)


def test_one_rank_that_is_not_ready_keeps_the_others(machine4: Machine) -> None:
    ranks, agents = job(machine4), Agents()
    assert done(agents, Call.QUIESCE, ranks[:3]) == {"SUCCESS"}
    assert done(agents, Call.COMMS, ranks) == {"agent:DROPPED", "agent:ILLEGAL_STATE"}
    assert stages(ranks[:3]) == {"quiesced"}
    agents.close()
    eventually(lambda: stages(ranks) == {"running"}, "every rank goes back by itself")
    assert whole(ranks)


def test_a_rank_whose_agent_is_silent_is_named(machine4: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that keeps the interpreter to itself lets its agent say nothing."""
    monkeypatch.setattr(client, "HELLO_DEADLINE_S", 0.5)
    ranks, agents = job(machine4), Agents()
    assert done(agents, Call.QUIESCE, ranks) == {"SUCCESS"}
    ranks[1].stop()
    calls = agents.start(Call.COMMS, [processes.read(t.pid).id for t in ranks], "raw", 5.0)
    for c in calls.values():
        while c.outcome is None:
            c.receive()
    assert [c.outcome.result for c in calls.values()].count("agent:SILENT") == 1
    assert calls[processes.read(ranks[1].pid).id].outcome.result == "agent:SILENT"
    os.kill(ranks[1].pid, signal.SIGCONT)
    agents.close()
    eventually(lambda: stages(ranks) == {"running"}, "every rank goes back by itself")
    assert whole(ranks)


def test_a_rank_that_dies_while_suspended(machine4: Machine) -> None:
    ranks = job(machine4)
    assert machine4.gpuckpt("suspend", ranks[0].pid).code == 0
    ranks[2].kill()
    result = machine4.gpuckpt("resume", ranks[0].pid, "--timeout", "2s")
    assert (result.code, result.error["code"]) == (3, "lost")
    assert f"rank 2 of its communicator tp (rank 0 of 4) ended while it was suspended (pid {ranks[2].pid} (" in result.error["message"]
    assert states(machine4, [r for r in ranks if r is not ranks[2]]) == {State.CHECKPOINTED}, "on their GPUs they could only wait for it"
    named = {p["pid"]: p["state"] for p in result.document["processes"]}
    assert named[ranks[2].pid] == "gone"


def test_a_communicator_of_a_single_rank_is_no_stranger(machine: Machine) -> None:
    (alone,) = machine.job(("--nccl-socket", "--agent", "own", "0", "1"))
    assert machine.gpuckpt("suspend", alone.pid).states == {alone.pid: "suspended"}
    assert machine.gpuckpt("resume", alone.pid).code == 0
    assert alone.unharmed()


def test_each_socket_belongs_to_a_communicator() -> None:
    """A process has the same rank in several as a rule."""
    me = processes.read(os.getpid())
    process = GpuProcess(me.id, "python", 0, State.RUNNING, ())
    with contextlib.ExitStack() as ends:
        for _ in range(2):
            ends.enter_context(socket.socket(socket.AF_UNIX)).bind(f"\0tmp/nccl-socket-3-{os.urandom(8).hex()}")
        assert not hazards.of_process(process, me, communicators=[3, 3])
        for known in ([3], [3, 2], []):
            (found,) = hazards.of_process(process, me, communicators=known)
            assert "(rank 3) that its agent does not know" in found.message


def test_who_shares_no_communicator_with_the_dead_comes_back(machine4: Machine) -> None:
    pair = machine4.job(*(("--gpu", str(r), "--nccl-socket", "--agent", "tp", str(r), "2") for r in range(2)))
    (other,) = machine4.job(("--gpu", "2", "--agent", "own", "0", "1"))
    assert machine4.gpuckpt("suspend", pair[0].pid, other.pid).code == 0
    pair[1].kill()
    result = machine4.gpuckpt("resume", other.pid)
    assert (result.code, result.error["code"], result.error["pid"]) == (3, "lost", pair[0].pid)
    assert result.states == {pair[0].pid: "lost", pair[1].pid: "gone", other.pid: "running"}
    assert other.unharmed()
    assert machine4.gpuckpt("recover").document["recovered"] == []
    status = machine4.gpuckpt("status", pair[0].pid).document["processes"]
    assert {p["pid"]: p["state"] for p in status}[pair[0].pid] == "lost"


def test_the_bereft() -> None:
    """Engines of one name: if one loses a rank nobody can tell whose peer it was."""
    tp = [Rank(10 + r, "tp", r, 2) for r in range(2)]
    assert ranks_of.bereft(tp) == {}
    assert set(ranks_of.bereft([*tp, Rank(10, "dp", 0, 3), Rank(11, "dp", 2, 3)])) == {10, 11}
    assert ranks_of.bereft([*tp, Rank(20, "tp", 0, 2)]) == {}
