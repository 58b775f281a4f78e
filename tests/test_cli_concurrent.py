"""Several gpuckpt at once: one waits, or says who is at it; never both."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psutil
import pytest

from gpuckpt.driver.caller import Callers
from gpuckpt.driver.simulated import SimulatedDriver
from gpuckpt.local import LocalWorld
from gpuckpt.model import GIB, Call, GpuBytes, State
from gpuckpt.operation import Operation
from gpuckpt.overview import overview
from tests.simulated_machine import SIMTARGET, eventually

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuckpt.claims import FileClaim
    from gpuckpt.model import ProcessId
    from tests.simulated_machine import Machine, Running, Target


@contextmanager
def held(target: Target) -> Iterator[None]:
    """As if another gpuckpt were at work on *target*."""
    fd = os.open(f"/proc/{target.pid}", os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(fd)


def waits_for(command: Running, target: Target) -> bool:
    """Whether *command* has got as far as to ask for *target*."""
    return f"/proc/{target.pid}" in command.open_files()


def test_two_suspends_of_one_target(machine: Machine) -> None:
    target = machine.target("--gib", "2")
    machine.slow(0.2)
    results = [c.end() for c in [machine.begin("suspend", target.pid) for _ in range(2)]]
    assert [(r.code, r.states) for r in results] == [(0, {target.pid: "suspended"})] * 2
    assert sorted(r.document["already"] for r in results) == [False, True]
    assert len(machine.records()) == 1


def test_no_time_to_wait_for_the_other(machine: Machine) -> None:
    target = machine.target()
    with held(target):
        for command in ("suspend", "resume"):
            if command == "resume":
                with machine.world.transaction() as world:
                    world.rules.lock(target.pid)
            result = machine.gpuckpt(command, target.pid, "--timeout", "500ms")
            assert (result.code, result.error["code"], result.error["pid"]) == (124, "concurrent-operation", os.getpid())
            assert f"pid {os.getpid()}" in result.error["message"]
            assert f"at work on pid {target.pid}" in result.error["message"]
    assert machine.gpuckpt("resume", target.pid).code == 0
    assert target.unharmed()


def test_another_pid_namespace_is_at_work(machine: Machine) -> None:
    """Its ``/proc`` is another file system than ours; the process is the same."""
    target = machine.target()
    here, there = os.pidfd_open(os.getpid()), os.pidfd_open(target.pid)
    try:
        if os.fstat(here).st_ino == os.fstat(there).st_ino:
            pytest.skip("pidfds are of one file before Linux 6.9")
        fcntl.flock(there, fcntl.LOCK_EX)
        result = machine.gpuckpt("suspend", target.pid, "--timeout", "500ms")
        assert (result.code, result.error["code"]) == (124, "concurrent-operation")
        assert f"pid {os.getpid()}" in result.error["message"]
    finally:
        os.close(here)
        os.close(there)
    assert machine.gpuckpt("suspend", target.pid).code == 0


def test_groups_that_overlap(machine: Machine) -> None:
    one, two, three = (machine.target() for _ in range(3))
    machine.slow(0.2)
    commands = [machine.begin("suspend", one.pid, two.pid), machine.begin("suspend", two.pid, three.pid)]
    results = [c.end() for c in commands]
    assert [r.code for r in results] == [0, 0]
    assert {t.state for t in (one, two, three)} == {State.CHECKPOINTED}
    members = [m["id"]["pid"] for r in machine.records() for m in r["members"]]
    assert len(members) == len(set(members)), "no process is in two groups"
    assert set(members) == {one.pid, two.pid, three.pid}
    assert machine.gpuckpt("resume", one.pid, three.pid).code == 0
    assert all(t.unharmed() for t in (one, two, three))
    assert machine.records() == []


def test_two_resumes_on_one_gpu(machine: Machine) -> None:
    """Each has room alone; both together would lose one."""
    one = machine.target("--gib", "50")
    assert machine.gpuckpt("suspend", one.pid).code == 0
    two = machine.target("--gib", "50")
    assert machine.gpuckpt("suspend", two.pid).code == 0
    machine.slow(0.01)
    results = [c.end() for c in [machine.begin("resume", t.pid) for t in (one, two)]]
    assert sorted(r.code for r in results) == [0, 6]
    (refused,) = [r for r in results if r.code]
    assert refused.error["code"] == "gpu-memory"
    up, down = sorted((one, two), key=lambda t: t.state is State.CHECKPOINTED)
    assert f"pid {up.pid}" in refused.error["message"]
    assert up.unharmed()
    up.kill()
    assert machine.gpuckpt("resume", down.pid).code == 0
    assert down.unharmed()


def front_and_worker(machine: Machine) -> tuple[int, Target]:
    """A program without CUDA state, by its pid, and its child with some: as a server and its engine."""
    (worker,) = machine.start(("sh", "-c", "'exec 3<&0; \"$@\" <&3 & wait'", "sh", *SIMTARGET, "--gib", "2"))
    return psutil.Process(worker.pid).ppid(), worker


def test_two_resumes_by_the_pid_of_a_parent(machine: Machine) -> None:
    """The one that waited finds another journal than when it looked."""
    front, worker = front_and_worker(machine)
    assert machine.gpuckpt("suspend", front).states == {worker.pid: "suspended"}
    with held(worker):
        resumes = [machine.begin("resume", front) for _ in range(2)]
        eventually(lambda: all(waits_for(r, worker) for r in resumes), "both wait")
    results = [r.end() for r in resumes]
    assert [(r.code, r.states) for r in results] == [(0, {worker.pid: "running"})] * 2
    assert sorted(r.document["already"] for r in results) == [False, True]
    assert worker.unharmed()


def test_a_suspend_between_the_look_and_the_claim_of_a_resume(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group is inspected once more only where the driver's answer and the journal's do not tell it all."""
    front, worker = front_and_worker(machine)
    assert machine.gpuckpt("suspend", front).code == 0
    looks: list[int] = []
    inspect, claim = LocalWorld.inspect, LocalWorld.claim
    between: list[tuple[str, ...]] = []

    def claimed(world: LocalWorld, processes: Sequence[ProcessId], until: float) -> FileClaim:
        for command in between:
            assert machine.gpuckpt(*command).code == 0
        between.clear()
        return claim(world, processes, until)

    monkeypatch.setattr(LocalWorld, "inspect", lambda world, *a, **k: looks.append(1) or inspect(world, *a, **k))
    monkeypatch.setattr(LocalWorld, "claim", claimed)

    def resume() -> tuple[int, bool, str]:
        looks.clear()
        with LocalWorld(machine.environ, command="resume") as world:
            report = Operation(world, "resume").resume([front])
        return len(looks), report.already, str(worker.state)

    assert resume() == (1, False, "running")
    assert machine.gpuckpt("suspend", front).code == 0
    between.append(("resume", str(front)))
    assert resume() == (2, True, "running")
    assert machine.gpuckpt("suspend", front).code == 0
    between += [("resume", str(front)), ("suspend", str(front))]
    assert resume() == (1, False, "running")
    assert worker.unharmed()
    assert machine.records() == []


def test_resumes_on_two_gpus_do_not_wait_for_each_other(machine2: Machine) -> None:
    one, two = machine2.target("--gpu", "0"), machine2.target("--gpu", "1")
    machine2.gpuckpt("suspend", one.pid)
    machine2.gpuckpt("suspend", two.pid)
    with open(machine2.world.path / f"gpu-{machine2.uuids[0]}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert machine2.gpuckpt("resume", two.pid).code == 0
        busy = machine2.gpuckpt("resume", one.pid, "--timeout", "1s")
        assert (busy.code, busy.error["code"]) == (124, "concurrent-operation")
        assert machine2.uuids[0] in busy.error["message"]
    assert machine2.gpuckpt("resume", one.pid).code == 0


def test_a_resume_waits_for_the_suspend_under_way(machine: Machine) -> None:
    target = machine.target("--gib", "2")
    machine.slow(0.3)
    suspend = machine.begin("suspend", target.pid)
    eventually(lambda: target.under_way(Call.CHECKPOINT), "the checkpoint")
    resume = machine.begin("resume", target.pid)
    eventually(lambda: waits_for(resume, target), "the resume waits")
    assert suspend.end().code == 0
    result = resume.end()
    assert (result.code, result.document["already"], result.states) == (0, False, {target.pid: "running"})
    assert target.unharmed()


def test_recover_leaves_alone_what_somebody_works_on(machine: Machine) -> None:
    target = machine.target("--gib", "2")
    machine.slow(2.5)
    suspend = machine.begin("suspend", target.pid)
    eventually(lambda: target.under_way(Call.CHECKPOINT), "the checkpoint")
    result = machine.gpuckpt("recover")
    assert target.under_way(Call.CHECKPOINT)
    assert result.code == 0, "nothing was left in the middle"
    assert "at work" in " ".join(result.document["recovered"])
    assert suspend.end().code == 0
    assert machine.gpuckpt("is-suspended", target.pid).code == 0


def test_the_way_back_waits_for_room(machine: Machine) -> None:
    """One is down when the other fails, and somebody took its room."""
    one, two = machine.target("--gib", "40"), machine.target("--gib", "1")
    machine.world.add_fault("checkpoint", pid=two.pid, result="UNKNOWN", delay_s=1.5)
    suspend = machine.begin("suspend", one.pid, two.pid)
    eventually(lambda: one.state is State.CHECKPOINTED, "one is down")
    filler = machine.target("--gib", "60")
    eventually(lambda: machine.holds_gpu(0), "it looks for room")
    filler.kill()
    result = suspend.end()
    assert (result.code, result.error["code"]) == (1, "driver-error")
    assert result.states == {one.pid: "running", two.pid: "running"}
    assert one.unharmed()
    assert two.unharmed()


def test_the_way_back_is_blocked(machine: Machine) -> None:
    one, two = machine.target("--gib", "40"), machine.target("--gib", "1")
    machine.world.add_fault("checkpoint", pid=two.pid, result="UNKNOWN", delay_s=1.5)
    suspend = machine.begin("suspend", one.pid, two.pid)
    eventually(lambda: one.state is State.CHECKPOINTED, "one is down")
    filler = machine.target("--gib", "60")
    eventually(lambda: machine.holds_gpu(0), "it looks for room")
    suspend.signal(2)
    result = suspend.end()
    assert (result.code, result.error["code"]) == (3, "not-as-found")
    assert result.states == {one.pid: "suspended", two.pid: "running"}
    assert f"gpuckpt resume {one.pid}" in result.error["hint"]
    assert "UNKNOWN" in result.error["message"], "what went wrong first"
    refused = machine.gpuckpt("resume", one.pid)
    assert (refused.code, refused.error["code"]) == (6, "gpu-memory")
    filler.kill()
    assert machine.gpuckpt("resume", one.pid).states == {one.pid: "running", two.pid: "running"}
    assert one.unharmed()
    assert machine.records() == []


@pytest.mark.parametrize("gpu", ["0", "1"])
def test_a_resume_beside_a_suspend(machine2: Machine, gpu: str) -> None:
    """The driver does not answer for who is in the middle of a checkpoint: no other one waits for that, on its own GPU or on another."""
    one, two = machine2.target("--gib", "2"), machine2.target("--gib", "2", "--gpu", gpu)
    machine2.gpuckpt("suspend", one.pid)
    machine2.world.add_fault("checkpoint", pid=two.pid, hang=True)
    suspend = machine2.begin("suspend", two.pid, "--timeout", "5s")
    eventually(lambda: machine2.faults_left() == 0, "the checkpoint hangs")
    assert machine2.gpuckpt("resume", one.pid, "--timeout", "1500ms").code == 0, "less than a state is waited for"
    assert one.unharmed()
    assert suspend.process.poll() is None
    suspend.signal(9)


def test_a_resume_waits_for_a_pool_on_its_way(machine: Machine) -> None:
    """Its agent would bring its memory back, unasked, if its suspend broke off. The way back of that suspend is not in the resume's way."""
    one, two = machine.target("--gib", "50"), machine.target("--gib", "1", "--pool", "weights=10")
    machine.gpuckpt("suspend", one.pid)
    machine.world.add_fault("lock", pid=two.pid, result="UNKNOWN", delay_s=1.0)
    suspend = machine.begin("suspend", two.pid)
    eventually(lambda: machine.faults_left() == 0, "its pool is away")
    resume = machine.begin("resume", one.pid)
    assert suspend.end().error["code"] == "driver-error"
    assert two.unharmed()
    assert resume.end().code == 0
    assert one.unharmed()


def test_a_restore_that_was_left_onto_another_card(machine2: Machine) -> None:
    """What it has yet to take looks free on the card that it goes to, and is not."""
    moved, other = machine2.target("--gib", "50"), machine2.target("--gib", "50", "--gpu", "1")
    for t in (moved, other):
        machine2.gpuckpt("suspend", t.pid)
    machine2.slow(0.03)
    resume = machine2.begin("resume", moved.pid, "--gpu", machine2.uuids[1])
    eventually(lambda: moved.under_way(Call.RESTORE), "the restore")
    resume.signal(9)
    machine2.kill_callers()
    refused = machine2.gpuckpt("resume", other.pid)
    assert refused.code in (6, 124), "while it is under way, or when it has ended"
    assert other.state is State.CHECKPOINTED
    machine2.gpuckpt("recover")
    assert moved.unharmed()
    moved.kill()
    assert machine2.gpuckpt("resume", other.pid).code == 0
    assert other.unharmed()


@pytest.mark.parametrize("under_way", [Call.CHECKPOINT, Call.RESTORE])
def test_a_call_of_another_that_ends_while_the_state_is_asked_for(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, under_way: Call
) -> None:
    """GetState waits for the end of a call, and what had been on the GPU before is of another state: it would count as memory that stayed
    there, or the process as one without CUDA."""
    target = machine.target("--gib", "2")
    driver = SimulatedDriver(machine.world.path)
    driver.lock(target.pid, 1.0)
    if under_way is Call.RESTORE:
        driver.checkpoint(target.pid)

    def ends() -> None:
        if under_way is Call.CHECKPOINT and target.state is State.LOCKED:
            driver.checkpoint(target.pid)
        elif under_way is Call.RESTORE and target.state is State.CHECKPOINTED:
            driver.restore(target.pid, {}, initialise=False)
            driver.unlock(target.pid)

    start = Callers.start
    monkeypatch.setattr(Callers, "start", lambda *a, **k: (ends(), start(*a, **k))[1])
    with LocalWorld(machine.environ) as world:
        if under_way is Call.CHECKPOINT:
            (found,) = world.inspect([target.pid], tree=True).processes
            assert (found.state, found.gpus) == (State.CHECKPOINTED, ())
        else:
            assert [r.state for r in overview(world, [target.pid]).rows] == ["running"]
            driver.lock(target.pid, 1.0)
            driver.checkpoint(target.pid)
            (found,) = world.inspect([target.pid], tree=True).processes
            assert (found.state, found.gpus) == (State.RUNNING, (GpuBytes(machine.uuids[0], 2 * GIB),))
