"""vLLM servers on several simulated GPUs: a front, an engine and its workers, suspended by the pid of the front.

The server is a stand-in in vLLM's shapes (``vllm_tree``); it loads gpuckpt's plugin as vLLM does, by its entry point.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpuckpt.inspect import processes
from gpuckpt.model import State
from tests.simulated_machine import eventually

if TYPE_CHECKING:
    from tests.simulated_machine import Machine, Result, Target

TREE = Path(__file__).parent / "vllm_tree"
SERVE = (sys.executable, "-W", "ignore", "-m", "vllm.serve")


@dataclass
class Server:
    machine: Machine
    front: Target
    done: dict[str, list[int]] = field(default_factory=dict)
    begun: set[str] = field(default_factory=set)

    @property
    def pid(self) -> int:
        return self.front.pid

    @property
    def engine(self) -> int:
        return self.front.forked[0]

    @property
    def workers(self) -> list[int]:
        return self.front.children

    def send(self, name: str, tokens: int = 8, engine: int = 0) -> str:
        self.front.tell(f"generate {name} {tokens} {engine}")
        return name

    def tokens(self, name: str) -> list[int]:
        """The answer to a request that was sent; fails if it does not come."""
        while name not in self.done:
            self._take()
        return self.done[name]

    def until_begun(self, name: str) -> None:
        while name not in self.begun:
            self._take()

    def ask(self, name: str, tokens: int = 8, engine: int = 0) -> list[int]:
        return self.tokens(self.send(name, tokens, engine))

    def ask_of_the_engine(self, what: str) -> None:
        """Its own "sleep" or "wake_up", or "wake_up=TAG"."""
        self.front.tell(what)
        self.done.pop(what, None)
        self.tokens(what)

    def states(self) -> set[State]:
        known = self.machine.world.peek().rules.processes
        return {known[pid].state for pid in self.workers}

    def suspend(self, *options: str) -> Result:
        return self.machine.gpuckpt("suspend", self.pid, *options)

    def resume(self) -> Result:
        return self.machine.gpuckpt("resume", self.pid)

    def _take(self) -> None:
        said = self.front._line()
        if "done" in said:
            self.done[said["done"]] = said["tokens"]
        else:
            self.begun.add(said["begun"])


def serve(machine: Machine, *options: str, method: str = "fork", agent: str = "1", **environ: str) -> Server:
    path = {"PYTHONPATH": str(TREE), "VLLM_WORKER_MULTIPROC_METHOD": method, "GPUCKPT_AGENT": agent}
    return Server(machine, machine.start((*SERVE, *options), **path, **environ)[0])


def test_the_stand_in_has_what_is_relied_upon_in_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``tests/gpu/vllm_contract.py`` asks of the real one."""
    monkeypatch.syspath_prepend(TREE.parent / "gpu")  # its own folder, as when it is run
    contract = runpy.run_path(str(TREE.parent / "gpu/vllm_contract.py"))
    assert [what for what, ok in contract["checks"](TREE / "vllm").items() if not ok] == []
    together = contract["checks_of_together"](TREE / "vllm")
    missing = ["its module has torch and ReduceOp", "enable_elastic_ep, enable_eplb, eplb_config.use_async"]  # doubles of its own
    assert [what for what, ok in together.items() if not ok] == missing


def test_a_server_of_two_workers_and_back(machine2: Machine) -> None:
    server = serve(machine2, method="spawn")
    reference = server.ask("first")
    for cycle in range(2):
        down = server.suspend()
        assert down.code == 0, down
        assert [s["name"] for s in down.document["steps"]] == [
            "inspect", "quiesce", "comms", "disarm", "lock", "re-inspect", "checkpoint", "verify",
        ]  # fmt: skip
        assert down.states == dict.fromkeys(server.workers, "suspended")
        assert [machine2.used(0), machine2.used(1)] == [0, 0]
        waiting = server.send(f"while suspended {cycle}".replace(" ", "-"))
        assert server.resume().code == 0
        assert server.tokens(waiting) == reference
        assert server.ask(f"after-{cycle}") == reference


def test_requests_in_flight_wait_and_none_is_lost(machine2: Machine) -> None:
    server = serve(machine2)
    reference = server.ask("alone", 150)
    names = [server.send(f"r{i}", 150) for i in range(5)]
    server.until_begun(names[-1])
    assert server.suspend().code == 0
    late = server.send("late", 150)
    assert server.done.keys() == {"alone"}
    assert server.resume().code == 0
    assert all(server.tokens(name) == reference for name in (*names, late))


def test_a_busy_server_is_held_between_two_steps(machine2: Machine) -> None:
    """Its workers meet in every step: held at different ones, they would wait for one another for ever."""
    server = serve(machine2, FAKE_STEP_S="0.0001")
    reference = server.ask("alone", 40)
    names = []
    for i in range(4):
        names += [server.send(f"r{i}-{j}", 40) for j in range(3)]
        assert server.suspend().code == 0
        assert server.resume().code == 0
    assert all(server.tokens(name) == reference for name in names)


def test_a_worker_without_an_agent_is_named(machine2: Machine) -> None:
    server = serve(machine2, method="spawn", FAKE_NO_PLUGIN="worker1")
    server.ask("first")  # all are in their loops
    result = server.suspend()
    assert result.code == 6
    assert str(server.workers[1]) in result.error["message"]
    assert server.states() == {State.RUNNING}
    assert server.ask("a") == server.ask("b")


def test_an_engine_that_would_not_hold_them_is_named(machine2: Machine) -> None:
    server = serve(machine2, method="spawn", FAKE_NO_PLUGIN="engine")
    server.ask("first")  # all are in their loops
    result = server.suspend()
    assert (result.code, result.error["code"]) == (6, "possible-import")
    assert f"its engine (pid {server.engine}) is still starting, or has no agent" in result.error["message"]
    assert server.ask("a") == server.ask("b")


@pytest.mark.parametrize("agent", ["", "0", "yes"])
def test_a_server_that_did_not_ask_for_agents_is_refused_as_ever(machine2: Machine, agent: str) -> None:
    server = serve(machine2, agent=agent)
    result = server.suspend()
    assert (result.code, result.error["code"]) == (6, "nccl-communicator")
    assert server.ask("a") == server.ask("b")


def test_a_worker_stuck_in_its_step_ends_the_suspend(machine2: Machine) -> None:
    server = serve(machine2)
    reference = server.ask("alone")
    stuck = machine2.world.path / "stuck"
    stuck.write_text(str(server.workers[1]))
    name = server.send("slow")
    result = server.suspend("--timeout", "2s")
    assert result.code == 124, result
    assert "between two steps of its engine" in result.error["message"]
    stuck.unlink()
    assert server.tokens(name) == reference
    assert server.suspend().code == 0
    assert server.resume().code == 0
    assert server.ask("after") == reference


def test_data_parallel_engines_all_or_none(machine2: Machine) -> None:
    """Case 44: two engines with an agent each, one of them in the middle of a step."""
    server = serve(machine2, "-tp", "1", "-dp", "2")
    reference = [server.ask(f"alone-{i}", engine=i) for i in range(2)]
    stuck = machine2.world.path / "stuck"
    stuck.write_text(str(server.workers[1]))
    name = server.send("slow", engine=1)
    assert server.suspend("--timeout", "2s").code == 124
    assert server.states() == {State.RUNNING}
    assert server.ask("other", engine=0) == reference[0]
    stuck.unlink()
    assert server.tokens(name) == reference[1]
    assert server.suspend().code == 0
    assert server.states() == {State.CHECKPOINTED}
    assert server.resume().code == 0
    assert [server.ask(f"after-{i}", engine=i) for i in range(2)] == reference


def test_one_gpu_has_nothing_to_suspend_but_itself(machine: Machine) -> None:
    server = serve(machine, "-tp", "1")
    reference = server.ask("alone")
    assert server.suspend().code == 0
    assert server.resume().code == 0
    assert server.ask("after") == reference


def test_a_controller_killed_at_any_step(machine2: Machine) -> None:
    server = serve(machine2)
    reference = server.ask("alone")
    world, second = machine2.world, server.workers[1]
    meeting = world.path / "comms"
    for i, call in enumerate(("comms", "lock", "checkpoint", "restore", "unlock", "comms-resume")):
        going_up = call in ("restore", "unlock", "comms-resume")
        if going_up:
            assert server.suspend().code == 0, call
        world.add_fault(call, pid=second, delay_s=0.4)
        command = machine2.begin("resume" if going_up else "suspend", server.pid)
        name = server.send(f"meanwhile-{i}")
        if call.startswith("comms"):  # every rank has been asked: the other one waits for the slow one
            eventually(lambda: not machine2.faults_left() and _waits(meeting), f"{call} begins")
        else:
            eventually(lambda: not machine2.faults_left(), f"{call} begins")
        command.process.kill()
        command.end()
        machine2.kill_callers()
        eventually(lambda: machine2.gpuckpt("recover").code == 0, "recovered")
        if State.CHECKPOINTED in server.states():
            assert server.resume().code == 0, call
        assert server.tokens(name) == reference, call
        assert server.ask(f"after-{i}") == reference, call


def test_an_engine_that_ends_takes_its_suspended_workers_along(machine2: Machine) -> None:
    server = serve(machine2)
    server.ask("alone")
    assert server.suspend().code == 0
    os.kill(server.engine, signal.SIGKILL)
    eventually(lambda: not any(processes.read(pid) for pid in server.workers), "no worker stays behind")
    assert machine2.gpuckpt("recover").code == 0
    assert machine2.gpuckpt("resume", server.workers[0]).code == 4


def test_an_engine_that_ends_awake_ends_its_workers_as_ever(machine2: Machine) -> None:
    server = serve(machine2)
    server.ask("first")  # all are in their loops
    assert server.suspend().code == 0
    assert server.resume().code == 0
    server.ask("once")
    os.kill(server.engine, signal.SIGKILL)
    eventually(lambda: not any(processes.read(pid) for pid in server.workers), "the workers end by themselves")


INACTIVE = """
import os, sys
import vllm.v1.engine.core as core, vllm.v1.executor.multiproc_executor as executor
before = dict(os.environ), set(sys.modules), dict(vars(core.EngineCoreProc)), dict(vars(executor.WorkerProc))
from importlib.metadata import entry_points
(plugin,) = [p for p in entry_points(group="vllm.general_plugins") if p.name == "gpuckpt"]
plugin.load()(), plugin.load()()
new = {m for m in set(sys.modules) - before[1] if m.startswith("gpuckpt")}
assert not new - {"gpuckpt.agent.vllm"}, new
assert before[0] == dict(os.environ)
assert before[2:] == (dict(vars(core.EngineCoreProc)), dict(vars(executor.WorkerProc)))
"""


@pytest.mark.parametrize("value", [None, "0", "yes"])
def test_a_plugin_that_is_not_asked_for_changes_nothing(value: str | None) -> None:
    environ = {k: v for k, v in os.environ.items() if k != "GPUCKPT_AGENT"} | {"PYTHONPATH": str(TREE)}
    subprocess.run([sys.executable, "-c", INACTIVE], check=True, env=environ | ({"GPUCKPT_AGENT": value} if value else {}))


UNKNOWN = """
import sys, types, logging
sys.modules["vllm.v1.engine.core"] = types.ModuleType("vllm.v1.engine.core")
import gpuckpt.agent.vllm as v
v.plugin(), v.plugin()
assert not {"torch", "vllm"} & set(sys.modules)
"""


def test_an_unknown_vllm_is_left_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNKNOWN], check=True, env={**os.environ, "GPUCKPT_AGENT": "1"}, capture_output=True, text=True
    )
    assert "does not know this version of vLLM" in done.stderr


BELL = """
import os, threading
from gpuckpt.agent.bell import Bell, Ring
woken = threading.Semaphore(0)
ring, bell = Ring(os.getpid()), Bell(1, woken.release)
assert not ring.heard()
ring(3), ring(0)  # nobody hears it, and nothing comes of it
bell.start()
assert ring.heard() and bell.all_rung() is None
ring(4)
assert woken.acquire(timeout=10) and bell.all_rung() == {os.getpid(): 4}
ring(5)
assert woken.acquire(timeout=10) and bell.all_rung() == {os.getpid(): 5}
bell.wait_for_silence({os.getpid(): 4})
ring(0)
bell.wait_for_silence({os.getpid(): 5})
assert bell.all_rung() is None
two = Bell(2, woken.release)
two._rung.update({1: (7, 1), 2: (7, 2)})  # one worker's last visit and its next are not two workers
assert two.all_rung() is None
"""


def test_a_bell_hears_who_rings_and_for_which_visit() -> None:
    subprocess.run([sys.executable, "-c", BELL], check=True, timeout=60)


BROKEN = """
import os, sys, gpuckpt.agent
class Broken:
    def obstacles(self): raise RuntimeError("no driver here")
gpuckpt.agent.install(Broken())
from gpuckpt.agent.client import Agents
from gpuckpt.inspect import processes
for _ in range(2):
    print(*Agents().hello(processes.read(os.getpid()).id).hazards)
"""


def test_an_agent_that_cannot_look_says_why_and_lives() -> None:
    out = subprocess.run([sys.executable, "-c", BROKEN], check=True, timeout=60, capture_output=True, text=True).stdout
    assert out == "its agent cannot look at it: RuntimeError: no driver here\n" * 2


def test_plugins_that_leave_ours_out_are_warned_of(machine: Machine) -> None:
    (warning,) = machine.gpuckpt("env", "--vllm", VLLM_PLUGINS="lora,other", NCCL_CONF_FILE="/dev/null").document["warnings"]
    assert "VLLM_PLUGINS=lora,other keeps vLLM from loading gpuckpt's plugin" in warning
    assert machine.gpuckpt("env", "--vllm", VLLM_PLUGINS="lora,gpuckpt", NCCL_CONF_FILE="/dev/null").document["warnings"] == []


def _waits(meeting: Path) -> bool:
    """The last meeting of the communicator's ranks has one of them."""
    places = sorted(meeting.glob("*"), key=lambda p: int(p.name.split("-")[1]))
    return bool(places) and len(list(places[-1].iterdir())) == 1
