"""``gpuckpt.agent.idle()``: a program that waits for something else than its GPU is suspended and resumed meanwhile."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from gpuckpt.driver.simulated import SimulatedDriver
from gpuckpt.model import State
from tests.simulated_machine import eventually
from tests.test_agent import stages

if TYPE_CHECKING:
    from tests.simulated_machine import Machine, Target

#: A rank that comes to no safe point but where it waits for its next command, in an idle block of its own thread.
PROGRAM = """
import sys
import gpuckpt.agent
from gpuckpt.driver import simtarget

def next_line(_):
    with gpuckpt.agent.idle():
        return sys.stdin.readline()

simtarget._next_line = next_line
sys.exit(simtarget.main(sys.argv[1:]))
"""


@pytest.fixture
def ranks(machine4: Machine) -> list[Target]:
    script = machine4.path / "waits.py"
    script.write_text(PROGRAM)
    command = (sys.executable, str(script), "--nccl-socket", "--agent", "tp")
    return machine4.start(*((*command, str(r), "2", "--gpu", str(r)) for r in range(2)))


def test_suspended_and_resumed_while_it_waits(machine4: Machine, ranks: list[Target]) -> None:
    for _ in range(2):
        assert machine4.gpuckpt("suspend", ranks[0].pid).code == 0
        assert machine4.gpuckpt("resume", ranks[1].pid).code == 0
        assert all(r.unharmed() for r in ranks)


def test_what_comes_while_it_is_suspended_waits_for_the_resume(machine4: Machine, ranks: list[Target]) -> None:
    assert machine4.gpuckpt("suspend", ranks[0].pid).code == 0
    for r in ranks:
        r.tell("check")
    eventually(lambda: all(r.has_taken() for r in ranks), "they have read it, and leave their idle block")
    driver = SimulatedDriver(machine4.world.path)
    assert {driver.state(r.pid) for r in ranks} == {State.CHECKPOINTED}
    assert machine4.gpuckpt("resume", ranks[0].pid).code == 0
    assert all(r._line()["sum"] == r.sum for r in ranks)


def test_a_controller_that_is_killed_is_not_missed(machine4: Machine, ranks: list[Target]) -> None:
    with machine4.in_call(ranks[1]):
        running = machine4.begin("suspend", ranks[0].pid)
        eventually(lambda: "quiesced" in stages(ranks), "one stands still")
        running.process.kill()
        running.end()
    eventually(lambda: stages(ranks) == {"running"}, "they go back by themselves")
    assert all(r.unharmed() for r in ranks)


INSIDE = """
import threading
import gpuckpt.agent as agent
with agent.idle():
    pass  # without an agent: nothing
agent.install()
with agent.idle(), agent.idle():
    assert threading.active_count() == 2
    agent.checkpoint_here()
assert agent._agent.place.rest is None
try:
    with agent.idle():
        raise KeyError
except KeyError:
    assert agent._agent.place.rest is None
place = agent._agent.place
def interrupted(_):
    raise KeyboardInterrupt
place.wanted, type(place)._stand_in = True, interrupted  # a signal comes while a thread is started
try:
    with agent.idle():
        raise AssertionError
except KeyboardInterrupt:
    assert place.rest is None
"""


def test_it_costs_no_thread_while_nobody_asks() -> None:
    subprocess.run([sys.executable, "-c", INSIDE], check=True, timeout=60)


#: A program whose device is not the first, on which a thread begins. A controller asks it while it rests.
DEVICE = """
import os, sys, threading, types
import gpuckpt.agent
from gpuckpt.agent.client import Agents
from gpuckpt.inspect import processes
from gpuckpt.model import Call
here, done = threading.local(), []
torch = types.ModuleType("torch")
torch.cuda = types.SimpleNamespace(
    is_initialized=lambda: True,
    current_device=lambda: getattr(here, "index", 0),
    set_device=lambda index: setattr(here, "index", index),
)
sys.modules["torch"] = torch
class Communicators:
    def sockets(self): return 1
    def obstacles(self): return []
    def __getattr__(self, name):
        def work():
            done.append((name, threading.current_thread().name, torch.cuda.current_device()))
            return [{"name": "a", "rank": 0, "size": 1}] if name == "describe" else []
        return work
gpuckpt.agent.install(Communicators())
torch.cuda.set_device(3)
me, agents = processes.read(os.getpid()).id, Agents()
with gpuckpt.agent.idle():
    assert agents.looks(agents.hellos([me]), 20.0)[me].communicators
    for step in (Call.QUIESCE, Call.COMMS, Call.DISARM, Call.ARM, Call.COMMS_RESUME, Call.UNQUIESCE):
        (asked,) = agents.start(step, [me], "raw", 20.0).values()
        while asked.outcome is None:
            asked.receive()
        assert asked.outcome.ok, asked.outcome
agents.close()
assert {name for name, _, _ in done} == {"describe", "hazards", "synchronise", "suspend", "resume"}, done
assert {(thread, device) for _, thread, device in done} == {("gpuckpt-stand-in", 3)}, done
"""


def test_who_stands_in_is_on_the_programs_device() -> None:
    subprocess.run([sys.executable, "-c", DEVICE], check=True, timeout=60)
