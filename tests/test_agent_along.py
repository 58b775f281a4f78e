"""``suspend --with``: a process outside of the group gives up the communicators that it shares with it, and stands still meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

import gpuckpt
from gpuckpt import plan
from gpuckpt.driver.simulated import SimulatedDriver
from gpuckpt.errors import GpuckptError
from gpuckpt.model import GIB, Call, GpuBytes, GpuProcess, ProcessId, State
from gpuckpt.operation import Operation
from gpuckpt.recovery import recover_all
from tests.hosts import Cluster
from tests.memory_agents import Agent
from tests.memory_machine import Machine as MemoryMachine
from tests.memory_world import Crash, MemoryWorld
from tests.simulated_machine import eventually
from tests.test_agent import stages

if TYPE_CHECKING:
    from pathlib import Path

    from tests.simulated_machine import Machine, Target

RUNNING, CHECKPOINTED, DISARMED = State.RUNNING, State.CHECKPOINTED, State.DISARMED


@dataclass
class Job:
    """A server of two ranks, and in a session of its own a trainer that syncs weights with it: a communicator of each two, one of all."""

    machine: Machine
    server: list[Target]
    trainer: Target

    @property
    def all(self) -> list[Target]:
        return [*self.server, self.trainer]

    def states(self) -> list[State]:
        driver = SimulatedDriver(self.machine.world.path)
        return [driver.state(t.pid) for t in self.all]

    def whole(self) -> bool:
        return all(t.unharmed() for t in self.all)

    def suspend(self, *options: object) -> tuple[object, ...]:
        return ("suspend", self.server[0].pid, "--with", self.trainer.pid, *options)


@pytest.fixture
def job(machine4: Machine) -> Job:
    ranks = [("--gpu", str(r), "--nccl-socket", "--agent", "tp", str(r), "2", "--agent", "sync", str(r), "3") for r in range(2)]
    server = machine4.job(*ranks)
    (trainer,) = machine4.job(("--gpu", "2", "--gib", "3", "--nccl-socket", "--agent", "sync", "2", "3"))
    return Job(machine4, server, trainer)


def test_the_backups_of_nccl_take_host_memory_where_no_image_has_them() -> None:
    """Of what is taken along, and by the pool alone, they are what is needed beside the pool's own copies."""
    process = GpuProcess(ProcessId(1, 1), "p", 0, RUNNING, (GpuBytes("GPU-0", GIB),), agent=True, comms_bytes=5)
    assert plan.host_need_bytes(process._replace(along=True), "auto") == 5
    assert plan.host_need_bytes(process, "pool") == 5
    assert plan.host_need_bytes(process, "driver") == plan.image_need_bytes(process.gpus), "its image, or NCCL in its place"


def test_a_communicator_that_reaches_a_trainer(job: Job) -> None:
    """Case 42: refused, naming the trainer with pid and host; with it taken along all three verify after the resume."""
    machine, (w0, w1), t = job.machine, job.server, job.trainer
    refused = machine.gpuckpt("suspend", w0.pid)
    assert (refused.code, refused.error["code"]) == (6, "nccl-communicator")
    assert f"rank 2 of 3 is pid {t.pid} (" in refused.error["message"]
    assert f" on {os.uname().nodename}" in refused.error["message"]
    assert f"--with {t.pid}" in refused.error["hint"]
    assert job.states() == [RUNNING] * 3

    planned = machine.gpuckpt(*job.suspend("--dry-run")).document["plan"]
    assert planned["refused"] is None
    assert {s["name"]: len(s["pids"]) for s in planned["steps"]} == {"quiesce": 3, "comms": 3, "disarm": 3, "lock": 2, "checkpoint": 2}
    assert planned["host_bytes_needed"] < 3 * GIB

    down = machine.gpuckpt(*job.suspend())
    assert down.code == 0, down
    assert down.states == {w0.pid: "suspended", w1.pid: "suspended", t.pid: "held"}
    kept = next(p for p in down.document["processes"] if p["pid"] == t.pid)
    assert [(g["bytes_before"], g["bytes_after"]) for g in kept["gpus"]] == [(3 * GIB, 3 * GIB)]
    assert job.states() == [CHECKPOINTED, CHECKPOINTED, RUNNING]
    assert stages([t]) == {"disarmed"}
    t.tell("check")

    status = machine.gpuckpt("status", w0.pid)
    assert status.states == {w0.pid: "suspended", w1.pid: "suspended", t.pid: "held"}
    assert machine.gpuckpt("is-suspended", w1.pid).code == 0
    assert machine.gpuckpt("recover").document["recovered"] == []
    said = machine.gpuckpt(*job.suspend(), json=False)
    assert f"already held: pid {t.pid}" in said.stdout
    for pid in (w1.pid, t.pid):  # whoever is named: it is known who was taken along
        again = machine.gpuckpt("suspend", pid)
        assert (again.code, again.document["already"]) == (0, True), again

    up = machine.gpuckpt("resume", t.pid)
    assert up.code == 0, up
    assert set(up.states.values()) == {"running"}
    assert t._line()["sum"] == t.sum
    assert job.whole()
    assert not machine.records()
    met = {p.name for p in (machine.world.path / "comms").iterdir()}
    assert met == {"tp-1-suspend", "tp-2-resume", "sync-1-suspend", "sync-2-resume"}


def test_one_of_the_same_tree_is_taken_along_all_the_same(machine4: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the library, as by the command."""
    ranks = machine4.job(*(("--gpu", str(r), "--nccl-socket", "--agent", "sync", str(r), "3") for r in range(3)))
    other = machine4.target("--gpu", "3")
    for name, value in machine4.environ.items():
        monkeypatch.setenv(name, value)
    pids = [r.pid for r in ranks]
    down = gpuckpt.suspend(pids[0], along=[pids[2]])
    assert {p.pid: p.state for p in down.processes} == dict(zip(pids, ("suspended", "suspended", "held"), strict=True))
    assert gpuckpt.suspend(pids[2]).already, "it stands for the group"
    assert machine4.gpuckpt("suspend", "--dry-run", pids[2]).document["already"]
    assert machine4.gpuckpt("suspend", pids[2], other.pid).states == dict(
        zip((*pids, other.pid), ("suspended", "suspended", "held", "suspended"), strict=True)
    )
    assert gpuckpt.resume(pids[0]).ok
    assert all(r.unharmed() for r in (*ranks, other))


def test_the_pool_of_one_that_is_taken_along_stays(machine4: Machine) -> None:
    options = [("--gpu", str(r), "--nccl-socket", "--agent", "sync", str(r), "2", "--pool", "weights=2") for r in range(2)]
    (server,), (trainer,) = (machine4.job(o) for o in options)
    down = machine4.gpuckpt("suspend", server.pid, "--with", trainer.pid)
    assert down.code == 0, down
    by_pid = {s["name"]: set(s["seconds_by_pid"]) for s in down.document["steps"]}
    assert by_pid["offload"] == by_pid["checkpoint"] == {str(server.pid)}
    assert by_pid["comms"] == {str(server.pid), str(trainer.pid)}
    assert machine4.used(1) == 3 * GIB
    assert machine4.gpuckpt("suspend", server.pid).document["already"]
    up = machine4.gpuckpt("resume", server.pid)
    assert up.code == 0, up
    assert server.unharmed()
    assert trainer.unharmed()


def test_who_cannot_be_taken_along(machine4: Machine, job: Job) -> None:
    without = machine4.target("--gpu", "3")
    w = job.server[0].pid
    result = machine4.gpuckpt("suspend", w, "--with", without.pid)
    assert (result.code, result.error["pid"]) == (6, without.pid)
    assert "no agent" in result.error["message"]
    assert machine4.gpuckpt("suspend", without.pid).code == 0
    result = machine4.gpuckpt("suspend", w, "--with", without.pid)
    assert (result.code, result.error["pid"]) == (6, without.pid)
    assert "is checkpointed itself" in result.error["message"]
    twice = machine4.gpuckpt("suspend", w, "--with", w)
    assert (twice.code, twice.error["code"]) == (2, "usage")
    none = machine4.gpuckpt("suspend", w, "--with", os.getpid())
    assert none.code in (2, 4), none
    assert job.states() == [RUNNING] * 3
    assert job.whole()


@pytest.mark.parametrize("step", ["quiesce", "comms", "lock", "checkpoint", "restore", "comms-resume"])
def test_kill_9_at_each_step(job: Job, step: str) -> None:
    """What was begun is undone or finished by ``recover``, on the trainer as on the others."""
    machine, w0 = job.machine, job.server[0]
    if step in ("restore", "comms-resume"):
        assert machine.gpuckpt(*job.suspend()).code == 0
    if step in ("comms", "comms-resume"):
        machine.world.add_fault(step, pid=job.trainer.pid, delay_s=0.7)
    if step == "lock":
        machine.world.add_fault(step, pid=job.server[1].pid, delay_s=0.7)
    if step in ("checkpoint", "restore"):
        machine.slow(0.5)
    begin = ("resume", w0.pid) if step in ("restore", "comms-resume") else job.suspend()
    entered = machine.world.path / "comms" / {"comms": "sync-1-suspend", "comms-resume": "sync-2-resume"}.get(step, "")
    reached: dict[str, Callable[[], bool]] = {
        "quiesce": lambda: "quiesced" in stages(job.all),
        "comms": lambda: entered.exists() and len(list(entered.iterdir())) == 2,
        "lock": lambda: State.LOCKED in job.states(),
        "checkpoint": lambda: w0.under_way(Call.CHECKPOINT),
        "restore": lambda: w0.under_way(Call.RESTORE),
        "comms-resume": lambda: entered.exists() and len(list(entered.iterdir())) == 2,
    }
    if step == "quiesce":
        with machine.in_call(job.trainer):
            killed(job, begin, reached[step])
    else:
        killed(job, begin, reached[step])
    eventually(lambda: not machine.world.peek().operations, "the driver ends what was begun")
    eventually(lambda: stages(job.all) <= {"running", "disarmed"}, "the agents do, too")
    eventually(lambda: machine.gpuckpt("recover").code == 0, "nothing is under way any more, and all is set right")
    held = [CHECKPOINTED, CHECKPOINTED, RUNNING]
    assert job.states() in ([RUNNING] * 3, held)
    if job.states() == held:
        assert stages([job.trainer]) == {"disarmed"}
        assert machine.gpuckpt("resume", w0.pid).code == 0
    assert stages(job.all) == {"running"}
    assert job.whole()
    assert not machine.records()


def killed(job: Job, words: tuple[object, ...], reached: Callable[[], bool]) -> None:
    running = job.machine.begin(*words)  # type: ignore[arg-type]
    eventually(reached, "the step is reached")
    running.process.kill()
    running.end()


def test_whom_it_was_taken_along_with_dies(job: Job) -> None:
    """Nobody is left that the communicator could be resumed with: as awake, only that it is said."""
    machine = job.machine
    assert machine.gpuckpt(*job.suspend()).code == 0
    for t in job.server:
        t.kill()
    result = machine.gpuckpt("resume", job.trainer.pid, "--timeout", "2s")
    assert (result.code, result.error["pid"]) == (3, job.trainer.pid), result


def test_over_several_hosts(tmp_path: Path) -> None:
    """A rank of the server on each of two hosts, and the trainer on the second."""
    c = Cluster.make(tmp_path, 2, gpus=2)
    try:
        meet = ("--nccl-socket", "--meet-in", str(c.path / "meet"))
        for h, machine in enumerate(c.machines):
            c.ranks.append(machine.job(("--gpu", "0", *meet, "--agent", "tp", str(h), "2", "--agent", "sync", str(h), "3")))
        (trainer,) = c.machines[1].job(("--gpu", "1", *meet, "--agent", "sync", "2", "3"))
        for refused in c.all("suspend"):
            assert (refused.code, refused.error["code"]) == (6, "nccl-communicator")
            assert f"rank 2 of 3 is pid {trainer.pid} (" in refused.error["message"]
            assert f"--with {trainer.pid} on its host" in refused.error["hint"]
        down = [r.end() for r in (c.begin(0, "suspend"), c.begin(1, "suspend", "--with", trainer.pid))]
        assert [r.code for r in down] == [0, 0], [r.error for r in down if r.code]
        assert down[1].states == {c.ranks[1][0].pid: "suspended", trainer.pid: "held"}
        assert [r.code for r in c.all("resume")] == [0, 0]
        assert c.whole()
        assert trainer.unharmed()
    finally:
        c.close()


# In memory, at every point.


def players() -> tuple[MemoryMachine, Callable[..., int | None]]:
    machine = MemoryMachine.of(3, 80)
    for n, pid in enumerate((101, 102, 103)):
        machine.rules.register(pid, 1, {f"GPU-{n}": 4 * GIB}, set())
        machine.groups[pid] = int(pid == 103)
        machine.agents[pid] = Agent(machine, pid)
        machine.busy_until[pid] = 0.0

    def play(command: str, crash_at: int | None = None) -> int | None:
        """The points that the command had; None if it was killed at one."""

        def on_point(world: MemoryWorld, number: int) -> None:
            if number == crash_at:
                world.kill()

        world = MemoryWorld(machine, (), on_point)
        try:
            if command == "recover":
                recover_all(world)
            else:
                operation = Operation(world, command, accept=frozenset({"possible-import"}))
                operation.suspend([101], along=[103]) if command == "suspend" else operation.resume([101])
        except Crash:
            return None
        finally:
            world.end()
            machine.run(float("inf"))
        return world.points

    return machine, play


@pytest.mark.parametrize("command", ["suspend", "resume"])
def test_killed_at_every_point(command: str) -> None:
    point, ended = 0, False
    while not ended:
        machine, play = players()
        if command == "resume":
            assert play("suspend")
        ended = play(command, crash_at=point) is not None
        assert play("recover")
        states = [machine.state(pid) for pid in (101, 102, 103)]
        assert states in ([RUNNING] * 3, [CHECKPOINTED, CHECKPOINTED, DISARMED]), (point, states)
        assert bool(machine.counting()) == (states[0] is CHECKPOINTED), point
        if states[0] is CHECKPOINTED:
            try:
                play("resume")
            except GpuckptError as e:
                pytest.fail(f"killed at {point}: {e.message}")
        assert [machine.state(pid) for pid in (101, 102, 103)] == [RUNNING] * 3
        assert not machine.wrongs, (point, machine.wrongs)
        point += 1
    assert point > 30
