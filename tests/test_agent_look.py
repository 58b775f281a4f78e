"""What an agent tells of communicators: the program's own thread has looked at them, and no command waits for it for ever."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from gpuckpt.agent.client import Agents, Hello, Link
from gpuckpt.agent.server import Agent
from gpuckpt.inspect import processes
from gpuckpt.model import State
from tests.simulated_machine import eventually
from tests.test_agent import job, whole

if TYPE_CHECKING:
    from pathlib import Path

    from tests.simulated_machine import Machine, Target

Run = Callable[..., Any]

#: Every call of the fake NCCL is noted with its thread. The agent is asked by another thread of this program, as a controller does.
THREADS = """
import threading, time
import gpuckpt.agent
import gpuckpt.nccl.verify as v
from gpuckpt.agent import nccl
from gpuckpt.agent.client import Agents
from gpuckpt.inspect import processes
from gpuckpt.model import Call
from gpuckpt.nccl.communicators import register

v.verify = lambda communicators, deadline_s: None
new = opened("new/libnccl.so.2")
c = communicator(new, "a", carried=True)
register(c.pointer, c.library.path, name="a", carried=True)
threads, call = set(), library.Library._call
def noted(self, *args):
    threads.add(threading.current_thread().name)
    return call(self, *args)
library.Library._call = noted
nccl.NcclCommunicators.sockets = lambda self: 1  # as the real one has, and the fake does not
gpuckpt.agent.install()
me = processes.read(os.getpid()).id

def control():
    agents = Agents()
    out["never came"] = vars_of(agents.looks(agents.hellos([me]), 0.05)[me]), sorted(threads)
    go.set()
    out["came"] = vars_of(agents.looks(agents.hellos([me]), 20.0)[me])
    for step in "QUIESCE COMMS DISARM ARM COMMS_RESUME UNQUIESCE".split():
        (asked,) = agents.start(Call[step], [me], "raw", 20.0, accept=True).values()
        while asked.outcome is None:
            asked.receive()
        assert asked.outcome.ok, (step, asked.outcome)
        agents.hellos([me])
    agents.close()
    over.set()

def vars_of(h):
    return [c["name"] for c in h.communicators], h.unseen, h.blind

go, over = threading.Event(), threading.Event()
threading.Thread(target=control, name="controller").start()
go.wait()
while not over.is_set():
    gpuckpt.agent.checkpoint_here()
    time.sleep(0.001)
out["threads"] = sorted(threads)
"""


def test_nccl_is_called_on_the_programs_thread_alone(nccl_run: Run) -> None:
    out = nccl_run(THREADS)
    assert out["never came"] == [[[], "the program never came to its safe point (gpuckpt.agent.checkpoint_here())", True], []]
    assert out["came"] == [["registered:a"], "", False]
    assert out["threads"] == ["MainThread"]


@contextmanager
def busy(machine: Machine, target: Target) -> Iterator[None]:
    """Meanwhile it is in a step of its own, and comes to no safe point."""
    with machine.in_call(target):
        target.tell("check")
        eventually(target.has_taken, "it is in its step")
        yield
    assert target._line()["sum"] == target.sum


def test_a_program_that_does_not_come_is_told_of_in_words(machine4: Machine) -> None:
    """status and a dry run answer, though it comes to no safe point; a suspend waits for it, and says so at its deadline."""
    ranks = job(machine4)
    with busy(machine4, ranks[2]):
        plan = machine4.gpuckpt("suspend", "--dry-run", ranks[0].pid)
        assert plan.code == 0, plan
        (said,) = [w for w in plan.document["warnings"] if "safe point" in w]
        assert said.startswith(f"pid {ranks[2].pid} (")
        assert "its communicators are not known, and are looked at when it stands there" in said
        assert machine4.gpuckpt("status", ranks[2].pid).code == 0
    assert not machine4.gpuckpt("suspend", "--dry-run", ranks[0].pid).document["warnings"]
    assert machine4.gpuckpt("suspend", ranks[0].pid).code == 0
    assert machine4.gpuckpt("resume", ranks[0].pid).code == 0
    assert whole(ranks)


class Double:
    """Communicators that a test makes and breaks."""

    def __init__(self) -> None:
        self.names, self.found = ["a"], list[str]()

    def sockets(self) -> int:
        return len(self.names)

    def obstacles(self) -> list[str]:
        return []

    def describe(self) -> list[dict[str, Any]]:
        return [{"name": name, "rank": 0, "size": 2, "nccl": "2.30.7"} for name in self.names]

    def hazards(self) -> list[str]:
        return list(self.found)

    def synchronise(self) -> None: ...

    def suspend(self) -> None: ...

    def held_bytes(self) -> int:
        return 0

    def resume(self) -> None: ...


class Program:
    """An agent on *double*, and its one controller."""

    def __init__(self, double: Double, path: Path) -> None:
        self.agent = Agent(double, path)
        self.agent.start()
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(path))
        self.link = Link(self.sock)

    def hello(self, look_s: float = 0.0) -> dict[str, Any]:
        self.link.ask("hello", look_s=look_s)
        return self.answer()

    def quiesce(self, **more: bool) -> dict[str, Any]:
        self.link.ask("quiesce", operation="raw", seconds=20.0, **more)
        return self.answer()

    def unquiesce(self) -> dict[str, Any]:
        self.link.ask("unquiesce", operation="raw", seconds=20.0)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        answer = self.link.wait_for_answer(time.monotonic() + 20)
        assert answer is not None
        return answer

    @contextmanager
    def comes(self) -> Iterator[None]:
        """Meanwhile it comes to its safe point again and again."""
        over = threading.Event()

        def loop() -> None:
            while not over.wait(0.001):
                if self.agent.place.wanted:
                    self.agent.place.come()

        thread = threading.Thread(target=loop)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(20)
            assert not thread.is_alive()


@pytest.fixture
def double() -> Double:
    return Double()


@pytest.fixture
def program(double: Double, tmp_path: Path) -> Iterator[Program]:
    made = Program(double, tmp_path / "agent.sock")
    with made.sock:
        yield made


def test_what_was_seen_before_is_told_of_as_such(program: Program) -> None:
    with program.comes():
        program.hello(20.0)
    told = program.hello(0.05)
    assert [c["name"] for c in told["communicators"]] == ["a"]
    assert (told["unseen"] != "", told["blind"], told["looks"]) == (True, False, True)
    with program.comes():
        assert program.hello(20.0)["unseen"] == ""


def test_what_was_made_since_it_was_told_of_is_not_suspended(double: Double, program: Program) -> None:
    with program.comes():
        assert [c["name"] for c in program.hello(20.0)["communicators"]] == ["a"]
        double.names.append("weights")
        refused = program.quiesce()
        assert (refused["result"], refused["stage"]) == ("CHANGED", "running")
        assert "weights" in refused["message"]
        assert [c["name"] for c in program.hello()["communicators"]] == ["a", "weights"]  # asked again, it is known
        assert program.quiesce()["result"] == "SUCCESS"
        assert program.unquiesce()["stage"] == "running"


def test_a_hazard_at_the_safe_point_is_refused_unless_taken_on(double: Double, program: Program) -> None:
    with program.comes():
        program.hello(20.0)
        double.found.append("a maps the memory of its peers (start it without)")
        assert (program.quiesce()["result"], program.hello()["hazards"]) == ("REFUSED", double.found)
        for taken_on in ("accept", "keep"):
            assert program.quiesce(**{taken_on: True})["result"] == "SUCCESS"
            assert program.unquiesce()["stage"] == "running"


def test_a_look_that_fails_is_a_hazard_and_no_business_of_the_program(double: Double, program: Program) -> None:
    def broken() -> list[str]:
        raise RuntimeError("no driver here")

    double.hazards = broken  # type: ignore[method-assign]
    with program.comes():
        assert program.hello(20.0)["hazards"] == ["its communicators cannot be looked at: RuntimeError: no driver here"]


#: Ranks in which something comes up between two looks.
SHARES = """
import os, sys
from pathlib import Path
from gpuckpt.driver import simtarget
from gpuckpt.driver.simulated_comms import SimulatedCommunicator

def hazards(c):
    first, then = (Path(os.environ["GPUCKPT_SIMULATE"], f"{when}-{c.rank}") for when in ("first", "then"))
    found = [then.read_text()] if then.exists() else []
    if first.exists():
        first.rename(then)
    return found

SimulatedCommunicator.hazards = hazards
sys.exit(simtarget.main(sys.argv[1:]))
"""


def test_a_hazard_at_the_safe_point_ends_a_suspend_with_everything_back(machine4: Machine) -> None:
    """It came up after the group had been looked at: the job goes on, and the next suspend is refused before anybody stands still."""
    script = machine4.path / "shares.py"
    script.write_text(SHARES)
    command = (sys.executable, str(script), "--nccl-socket", "--agent", "tp")
    ranks = machine4.start(*((*command, str(r), "2", "--gpu", str(r)) for r in range(2)))
    (machine4.world.path / "first-1").write_text("symmetric memory maps that of the peers")
    for step in ("quiesce", "inspect"):
        result = machine4.gpuckpt("suspend", ranks[0].pid)
        found = (result.code, result.error["code"], result.error["pid"], result.error["step"])
        assert found == (6, "possible-import", ranks[1].pid, step), result
        assert "symmetric memory" in result.error["message"]
        assert not machine4.records()
    (machine4.world.path / "then-1").unlink()
    assert machine4.gpuckpt("suspend", ranks[0].pid).code == 0
    assert machine4.gpuckpt("resume", ranks[0].pid).code == 0
    assert whole(ranks)


def test_who_would_not_wait_for_a_look_has_what_was_seen_before(machine4: Machine) -> None:
    (rank,) = machine4.job(("--agent", "tp", "0", "2"))
    me, agents = processes.read(rank.pid), Agents()
    assert me is not None
    with busy(machine4, rank):
        before = agents.hellos([me.id])
        assert agents.looks(before, 600.0, lambda: True) == before
    agents.close()


def test_a_stranger_is_not_asked_to_look(machine4: Machine) -> None:
    """A process whose agent knows of nothing to look at answers at once, wherever it is."""
    (pool,) = machine4.job(("--pool", "weights=1"))
    me, agents = processes.read(pool.pid), Agents()
    assert me is not None
    with busy(machine4, pool):
        hello = agents.hellos([me.id])[me.id]
    agents.close()
    assert hello == Hello(State.RUNNING, (), (), hello.movable)
    assert os.getpid() != pool.pid
