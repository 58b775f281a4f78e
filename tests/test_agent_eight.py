"""Bad days of a job of eight real processes, each with an agent, one of which has forked a child: at least one test for each.

| bad day | here | and |
|---|---|---|
| a rank dies at each step | test_a_rank_dies_in_its_communicators | test_agent_bad_days.py, test_properties.py |
| a rank hangs in suspend, resume or verify | test_a_rank_hangs_on_the_way_back | test_a_rank_that_hangs_in_its_communicators |
| an agent is missing on one rank | test_a_rank_without_an_agent | test_agent_reached.py |
| ranks on different NCCL versions | test_ranks_of_different_nccl | test_communicators_are_looked_at_over_all_hosts |
| the controller is killed, before lock | test_a_controller_killed_in_the_comms | test_a_controller_killed_in_the_quiesce_is_not_missed |
| the controller is killed, after lock | test_a_controller_killed_in_the_checkpoint | test_properties.py |
| the host of the store is gone | | test_the_host_that_serves_the_store_is_killed, test_the_host_of_the_store_is_gone |
| a stale operation's messages | test_what_a_dead_controller_sent | test_a_late_answer_answers_no_other_question |
| two operations on overlapping ranks | test_two_operations_on_overlapping_ranks | test_cli_concurrent.py |
| resume with one rank's GPU occupied | test_no_room_for_one_rank | test_no_room_on_one_host_restores_none |
| verify fails after resume | test_communicators_that_do_not_come_back | test_nccl_verify.py |
| a forked child of an agent's process | test_down_and_up | test_a_forked_child_keeps_no_agent_alive |
| a thread holds the GIL for ever | test_a_rank_keeps_the_interpreter_for_ever | |
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpuckpt.agent import client
from gpuckpt.agent.client import Agents
from gpuckpt.inspect import processes
from gpuckpt.local import LocalWorld
from gpuckpt.model import Call, State
from tests.simulated_machine import SIMTARGET, eventually, make_machine
from tests.test_agent import done, stages, states, whole

if TYPE_CHECKING:
    from tests.simulated_machine import Machine

SIZE = 8
#: A rank that forks once it has its agent, and says so by a file. The child lives as long as it does.
FORKS = """
import os, sys
from pathlib import Path
from gpuckpt.driver import simtarget

def install(world, options):
    installed(world, options)
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    Path(sys.argv[0]).with_suffix(".child").write_text(str(child))

installed, simtarget._install_agent = simtarget._install_agent, install
sys.exit(simtarget.main(sys.argv[1:]))
"""


def options(rank: int) -> tuple[str, ...]:
    return ("--gpu", str(rank % 4), "--nccl-socket", "--agent", "tp", str(rank), str(SIZE))


class Job:
    """Eight ranks of one communicator. Handed on to the next test by who finds it ``as_found``."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.handed_on = machine, False
        script = machine.path / "forks.py"
        script.write_text(FORKS)
        programs = [SIMTARGET] * (SIZE - 1) + [(sys.executable, str(script))]
        self.ranks = machine.start(*((*program, *options(r)) for r, program in enumerate(programs)))
        self.child = int(script.with_suffix(".child").read_text())

    def gpuckpt(self, command: str, rank: int = 0, *words: str) -> tuple[int, dict[int, str]]:
        result = self.machine.gpuckpt(command, self.ranks[rank].pid, *words)
        return result.code, result.states

    def as_found(self) -> bool:
        self.handed_on = whole(self.ranks) and not self.machine.records()
        return self.handed_on

    def met(self, number: int, what: str, ranks: int) -> None:
        """Until *ranks* have come to that meeting of their communicator, counted from the newest on."""
        place = self.machine.world.path / "comms"
        eventually(lambda: any(len(list(p.iterdir())) == ranks for p in place.glob(f"tp-{number}-{what}")), f"{ranks} ranks have come")

    @property
    def meetings(self) -> int:
        """How many there have been."""
        return len(list((self.machine.world.path / "comms").glob("tp-*")))


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Job]]:
    made: list[tuple[Iterator[Machine], Job]] = []

    def end() -> None:
        for machine, _ in made:
            next(machine, None)
        made.clear()

    def job() -> Job:
        if not made or not made[0][1].handed_on:
            end()
            machine = make_machine(tmp_path_factory.mktemp("eight"), gpus=4)
            made.append((machine, Job(next(machine))))
        made[0][1].handed_on = False
        return made[0][1]

    yield job
    end()


@pytest.fixture
def job(jobs: Callable[[], Job]) -> Job:
    return jobs()


def test_the_table_names_tests() -> None:
    written = "".join(p.read_text() for p in Path(__file__).parent.glob("test_*.py"))
    for name in re.findall(r"test_\w+(?:\.py)?", str(__doc__)):
        assert (Path(__file__).with_name(name).exists()) if name.endswith(".py") else f"def {name}(" in written, name


def test_down_and_up(job: Job) -> None:
    """The forked child has no part in it, and nothing answers in the name of its parent."""
    machine, pids = job.machine, {r.pid for r in job.ranks}
    down = machine.gpuckpt("suspend", job.ranks[3].pid)
    assert down.code == 0, down
    looks = ("inspect", "re-inspect", "verify", "room")
    assert [s["name"] for s in down.document["steps"] if s["name"] not in looks] == ["quiesce", "comms", "disarm", "lock", "checkpoint"]
    assert down.states == dict.fromkeys(pids, "suspended")
    by_pid = {s["name"]: set(s["seconds_by_pid"]) for s in down.document["steps"]}
    assert by_pid["comms"] == by_pid["checkpoint"] == {str(pid) for pid in pids}
    assert not by_pid["inspect"]
    up = machine.gpuckpt("resume", job.ranks[5].pid)
    assert up.code == 0, up
    assert [s["name"] for s in up.document["steps"] if s["name"] not in looks] == ["restore", "unlock", "arm", "comms-resume", "unquiesce"]
    assert job.as_found()
    child = processes.read(job.child)
    assert child is not None
    assert Agents().hello(child.id) is None


def test_a_controller_killed_in_the_comms(job: Job) -> None:
    slow, number = job.ranks[2], job.meetings + 1
    job.machine.world.add_fault("comms", pid=slow.pid, delay_s=1.0)
    running = job.machine.begin("suspend", job.ranks[0].pid)
    job.met(number, "suspend", SIZE - 1)  # they wait for the slow one: every rank has been asked
    running.process.kill()
    running.end()
    eventually(lambda: stages(job.ranks) == {"running"}, "every rank goes back by itself")
    assert job.machine.gpuckpt("recover").code == 0
    assert job.as_found()


def test_a_controller_killed_in_the_checkpoint(job: Job) -> None:
    """They are checkpointed side by side; the agents do nothing by themselves."""
    job.machine.slow(0.3)
    running = job.machine.begin("suspend", job.ranks[0].pid)
    eventually(lambda: [r.under_way(Call.CHECKPOINT) for r in job.ranks].count(True) > 1, "several checkpoints are under way")
    running.process.kill()
    running.end()
    job.machine.slow(0.0)
    eventually(lambda: not job.machine.world.peek().operations, "the driver completes what was begun")
    assert stages(job.ranks) == {State.DISARMED}
    assert job.machine.gpuckpt("recover").code == 0
    assert job.gpuckpt("resume")[0] == 0
    assert stages(job.ranks) == {State.RUNNING}
    assert job.as_found()


def test_what_a_dead_controller_sent(job: Job) -> None:
    """It is taken in before the next one is answered."""
    old, new = Agents(), Agents()
    ids = [processes.read(t.pid).id for t in job.ranks]
    assert all(new.hello(i) for i in ids)
    assert done(old, Call.QUIESCE, job.ranks) == {"SUCCESS"}
    assert done(old, Call.COMMS, job.ranks) == {"SUCCESS"}
    ours, theirs = os.pipe()
    for t in job.ranks:
        os.kill(t.pid, signal.SIGSTOP)
    for i in ids:
        new.links[i].ask("hello")
        old._ask(Call.DISARM, i, "raw", 5.0, ours)
    os.write(theirs, b"!")
    os.close(theirs)
    os.close(ours)
    old.close()
    for t in job.ranks:
        os.kill(t.pid, signal.SIGCONT)
    answers = [new.links[i].wait_for_answer(time.monotonic() + 5) for i in ids]
    new.close()
    assert [a["stage"] for a in answers] == ["disarmed"] * SIZE
    assert job.machine.gpuckpt("recover").code == 0
    assert job.gpuckpt("suspend")[0] == job.gpuckpt("resume")[0] == 0
    assert job.as_found()


def test_two_operations_on_overlapping_ranks(job: Job) -> None:
    """Each names some of the ranks, two of them both: it is done once, and both say so."""
    pids = [str(r.pid) for r in job.ranks]
    results = [r.end() for r in [job.machine.begin("suspend", *pids[:5]), job.machine.begin("suspend", *pids[3:])]]
    assert [r.code for r in results] == [0, 0], results
    assert sorted(r.document["already"] for r in results) == [False, True]
    assert len(job.machine.records()) == 1
    assert job.gpuckpt("resume", 1)[0] == 0
    assert job.as_found()


def test_no_room_for_one_rank(job: Job) -> None:
    """None is restored."""
    assert job.gpuckpt("suspend")[0] == 0
    filler = job.machine.target("--gpu", "3", "--gib", "78.5")
    result = job.machine.gpuckpt("resume", job.ranks[0].pid)
    assert (result.code, result.error["code"]) == (6, "gpu-memory")
    assert states(job.machine, job.ranks) == {State.CHECKPOINTED}
    filler.kill()
    assert job.gpuckpt("resume", 0, "--wait", "5s")[0] == 0
    assert job.as_found()


def test_a_rank_without_an_agent(machine4: Machine) -> None:
    ranks = machine4.job(*(options(r)[: 7 if r < SIZE - 1 else 3] for r in range(SIZE)))
    result = machine4.gpuckpt("suspend", ranks[0].pid)
    assert result.code == 6
    assert str(ranks[-1].pid) in result.error["message"]
    assert whole(ranks)


def test_ranks_of_different_nccl(machine4: Machine) -> None:
    ranks = machine4.job(*(("--nccl", "2.29.7" if r == 5 else "2.30.7", *options(r)) for r in range(SIZE)))
    result = machine4.gpuckpt("suspend", ranks[0].pid)
    assert (result.code, result.error["code"]) == (6, "nccl-communicator")
    assert f"2.29.7 in pid {ranks[5].pid}" in result.error["message"]
    assert f"2.30.7 in pid {ranks[0].pid}" in result.error["message"]
    assert whole(ranks)


#: A rank that holds Python's interpreter for ever from the first command on: a call into C that does not let go of it.
HOG = """
import ctypes, sys
from gpuckpt.driver import simtarget
simtarget.Target.check_ = simtarget.Target.check
def check(target):
    if target.asked:
        ctypes.PyDLL(None).pause()
    target.asked = True
    return target.check_()
simtarget.Target.asked, simtarget.Target.check = False, check
sys.exit(simtarget.main(sys.argv[1:]))
"""


def test_a_rank_keeps_the_interpreter_for_ever(machine4: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named, and keeps nobody waiting."""
    script = machine4.path / "hog.py"
    script.write_text(HOG)
    programs = [SIMTARGET] * (SIZE - 1) + [(sys.executable, str(script))]
    ranks = machine4.start(*((*program, *options(r)) for r, program in enumerate(programs)))
    hog = ranks[-1]
    hog.tell("check")
    eventually(lambda: hog.has_taken() and processes.read(hog.pid).state == "S", "it stands in its call")
    for name, value in machine4.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(client, "HELLO_DEADLINE_S", 0.5)
    with LocalWorld() as world:
        found = world.inspect([ranks[0].pid], tree=True, look_s=600.0)
    assert found.hazards[0].pid == hog.pid
    assert "does not answer" in found.hazards[0].message
    assert states(machine4, ranks) == {State.RUNNING}


def test_a_rank_dies_in_its_communicators(job: Job) -> None:
    """Its peers wait for it inside NCCL: nothing is checkpointed, and they are named."""
    dying, number = job.ranks[2], job.meetings + 1
    job.machine.world.add_fault("comms", pid=dying.pid, hang=True)
    running = job.machine.begin("suspend", job.ranks[0].pid, "--timeout", "3s")
    job.met(number, "suspend", SIZE - 1)
    dying.kill()
    result = running.end()
    assert result.code == 3, result
    assert f"has not done its comms: pid {dying.pid} of its group ended, for whom it waits" in result.error["message"]
    assert result.error["hint"] == f"end the job, and start it again: kill -9 {result.error['pid']}"
    assert result.states[dying.pid] == "gone"
    assert {result.states[r.pid] for r in job.ranks if r is not dying} <= {"in-flight", "quiesced", "lost"}
    assert not job.machine.world.peek().operations
    recovered = job.machine.gpuckpt("recover")
    assert (recovered.code, recovered.error["code"]) == (3, "lost"), recovered
    assert "is lost" in recovered.document["recovered"][0]
    assert job.machine.gpuckpt("recover").document["recovered"] == [], "it is known"


def test_a_rank_hangs_on_the_way_back(job: Job) -> None:
    """All are restored and unlocked; who hangs is said, and nobody is called lost who may still come."""
    assert job.gpuckpt("suspend")[0] == 0
    job.machine.world.add_fault("comms-resume", pid=job.ranks[1].pid, hang=True)
    result = job.machine.gpuckpt("resume", job.ranks[0].pid, "--timeout", "3s")
    assert (result.code, result.error["code"], result.error["step"]) == (3, "in-flight", "comms-resume"), result
    assert states(job.machine, job.ranks) == {State.RUNNING}
    (record,) = job.machine.records()
    assert record["status"] == "resuming"


def test_communicators_that_do_not_come_back(job: Job) -> None:
    """The sum that proves them is wrong on every rank: they are lost, and named so."""
    assert job.gpuckpt("suspend")[0] == 0
    for r in job.ranks:
        job.machine.world.add_fault("comms-resume", pid=r.pid, result="INTERNAL_ERROR")
    result = job.machine.gpuckpt("resume", job.ranks[0].pid)
    assert (result.code, result.error["code"]) == (3, "lost"), result
    assert "communicators" in result.error["message"]
    assert "lost" in result.states.values()
