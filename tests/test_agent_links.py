"""Agents as a controller meets them: who may ask, who answers, how soon, and what is left of the dead."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from gpuckpt.agent import protocol
from gpuckpt.agent.client import Agents, Hello, Link
from gpuckpt.agent.server import Agent
from gpuckpt.inspect import processes
from gpuckpt.local import LocalWorld
from gpuckpt.model import ProcessId, State
from tests.simulated_machine import eventually
from tests.test_agent import job, stages, whole

if TYPE_CHECKING:
    from tests.simulated_machine import Machine


def test_nobody_else_answers_for_a_process(machine4: Machine) -> None:
    """A socket in the agent's place, listened on by another process, is not its agent."""
    target = machine4.target()
    place = protocol.make_directory(os.geteuid())
    ticks = processes.read(target.pid).start_ticks
    with socket.socket(socket.AF_UNIX) as impostor:
        path = place / protocol.socket_name(target.pid, ticks)
        impostor.bind(str(path))
        impostor.listen()
        try:
            plan = machine4.gpuckpt("suspend", "--dry-run", target.pid).document["plan"]
        finally:
            path.unlink()
    assert [s["name"] for s in plan["steps"]] == ["lock", "checkpoint"]


def test_the_sockets_of_the_dead_are_taken_away(machine4: Machine) -> None:
    first, _ = job(machine4, 2)
    place = protocol.directory(os.geteuid())
    left = place / protocol.socket_name(first.pid, processes.read(first.pid).start_ticks)
    assert left.exists()
    first.kill()
    job(machine4, 1)
    assert not left.exists()


PROGRAM = """
import os, sys, threading
import gpuckpt.agent
before = dict(os.environ), threading.active_count()
gpuckpt.agent.checkpoint_here()  # without an agent: nothing
assert (dict(os.environ), threading.active_count()) == before
gpuckpt.agent.install()
gpuckpt.agent.install()
assert threading.active_count() == 2
if os.fork() == 0:
    gpuckpt.agent.checkpoint_here()
    os._exit(0 if gpuckpt.agent._agent is None else 1)
assert os.wait()[1] == 0
assert not {"torch", "cuda", "pynvml"} & set(sys.modules)
"""


def test_a_stopped_agent_keeps_nobody_waiting(machine4: Machine) -> None:
    """Its socket takes so many callers and no more; neither a command nor another agent may wait there."""
    (stopped,) = job(machine4, 1)
    me = processes.read(stopped.pid).id
    os.kill(stopped.pid, signal.SIGSTOP)
    eventually(lambda: processes.read(stopped.pid).state == "T", "it is stopped")
    callers = [Agents() for _ in range(20)]
    assert [a._connect(me) is not None for a in callers].count(False) > 5
    (other,) = job(machine4, 1)
    assert other.unharmed()
    os.kill(stopped.pid, signal.SIGCONT)
    for a in callers:
        a.close()
    eventually(lambda: stages([stopped]) == {"running"}, "it answers again")


def test_an_agent_is_one_thread_and_stays_behind_at_a_fork() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM], check=True)


OTHER_USER = ("unshare", "--user", "--map-user=1234")
INSTALLED = "import gpuckpt.agent, os, sys; gpuckpt.agent.install(); print(os.geteuid(), flush=True); sys.stdin.read()"


@pytest.mark.skipif(subprocess.run([*OTHER_USER, "true"], capture_output=True, check=False).returncode != 0, reason="needs user namespaces")
def test_an_agent_in_a_container_has_another_user_there() -> None:
    with subprocess.Popen(
        [*OTHER_USER, sys.executable, "-c", INSTALLED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as inside:
        assert inside.stdout.readline() == "1234\n"
        me, agents = processes.read(inside.pid).id, Agents()
        hello = agents.hello(me)
        agents.close()
        inside.stdin.close()
    shutil.rmtree(protocol.directory(1234))
    assert hello is not None
    assert hello.stage == "running"


def test_a_script_runs_under_an_agent_as_it_would_alone(tmp_path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys, gpuckpt.agent as a; print(__name__, sys.argv[1:], sys.path[0], a._agent is not None)")
    out = subprocess.run(
        [sys.executable, "-m", "gpuckpt.agent", str(script), "--lr", "1"], check=True, capture_output=True, text=True
    ).stdout
    assert out.strip() == f"__main__ ['--lr', '1'] {tmp_path} True"


def count_greetings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The pid of each agent that is said hello to from now on."""
    greeted: list[int] = []
    hellos = Agents.hellos

    def counted(agents: Agents, asked: Iterable[ProcessId]) -> dict[ProcessId, Hello]:
        asked = list(asked)
        greeted.extend(p.pid for p in asked)
        return hellos(agents, asked)

    monkeypatch.setattr(Agents, "hellos", counted)
    return greeted


def test_a_stopped_rank_is_refused_without_waiting_for_its_agent(machine4: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It could not answer; what it is asked for is counted, since the answer would be waited for."""
    ranks = job(machine4, 3)
    ranks[1].stop()
    for name, value in machine4.environ.items():
        monkeypatch.setenv(name, value)
    greeted = count_greetings(monkeypatch)
    with LocalWorld() as world:
        world.inspect([ranks[0].pid], tree=True)
    assert sorted(greeted) == sorted((ranks[0].pid, ranks[2].pid))
    result = machine4.gpuckpt("suspend", ranks[0].pid)
    assert (result.code, result.error["code"]) == (6, "stopped")
    ranks[1].signal(signal.SIGCONT)
    assert whole(ranks)


def test_each_rank_is_looked_at_once(machine4: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = job(machine4, 5)
    for name, value in machine4.environ.items():
        monkeypatch.setenv(name, value)
    looked_at: list[int] = []
    states = LocalWorld.states

    def counted(world: LocalWorld, asked: Iterable[ProcessId]) -> dict[ProcessId, State]:
        asked = list(asked)
        looked_at.extend(p.pid for p in asked)
        return states(world, asked)

    monkeypatch.setattr(LocalWorld, "states", counted)
    greeted = count_greetings(monkeypatch)
    with LocalWorld() as world:
        found = world.inspect([ranks[0].pid], tree=True)
    assert [p.pid for p in found.processes] == sorted(r.pid for r in ranks)
    assert sorted(looked_at) == sorted(greeted) == sorted(r.pid for r in ranks)


def test_a_late_answer_answers_no_other_question() -> None:
    """The answer to a call that was given up at its deadline may come at any time, with or before that to the next question."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        link = Link(ours)
        given_up, asked = link.ask("comms"), link.ask("hello")
        late = {"number": given_up, "result": "FAILED", "message": "late", "stage": "running"}
        theirs.send(protocol.encode(late))
        assert link.wait_for_answer(time.monotonic() + 0.05) is None
        theirs.send(protocol.encode(late) + protocol.encode({"number": asked, "result": "SUCCESS", "message": "", "stage": "quiesced"}))
        answer = link.wait_for_answer(time.monotonic() + 5)
    assert (answer or {})["stage"] == "quiesced"


class NoCommunicators:
    def sockets(self) -> int:
        return 0

    def obstacles(self) -> list[str]:
        return []

    def describe(self) -> list[dict[str, Any]]:
        return []

    def hazards(self) -> list[str]:
        return []

    def synchronise(self) -> None: ...

    def suspend(self) -> None: ...

    def held_bytes(self) -> int:
        return 0

    def resume(self) -> None: ...


def test_a_greeting_does_not_hide_the_end_of_a_call(tmp_path: Path) -> None:
    agent = Agent(NoCommunicators(), tmp_path / "agent.sock")
    agent.start()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(agent.path))
        link, until = Link(sock), time.monotonic() + 20
        quiesce = link.ask("quiesce", operation="raw", seconds=20.0)
        link.ask("hello")
        assert (link.wait_for_answer(until) or {})["stage"] == "running"
        program = threading.Thread(target=agent.place.come)
        program.start()
        assert (link.wait_for_answer(until, quiesce) or {})["result"] == "SUCCESS"
    program.join(20)
    assert not program.is_alive()
