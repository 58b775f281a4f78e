"""vLLM servers whose data-parallel engines step together, as those of a mixture of experts do: all stand after one step, or none."""

from __future__ import annotations

import functools
import itertools
import os
import runpy
import select
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from gpuckpt.agent import protocol, vllm_together
from gpuckpt.agent.client import Agents
from gpuckpt.inspect import processes
from gpuckpt.model import Call, State
from tests.simulated_machine import eventually
from tests.test_agent_vllm import TREE, serve

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuckpt.agent.client import AgentPending
    from tests.simulated_machine import Machine
    from tests.test_agent_vllm import Server


def serve_together(machine: Machine, *options: str, **more: str) -> Server:
    """Two engines, of one worker each unless *options* say more."""
    return serve(machine, "-tp", "1", "-dp", "2", "--enable-expert-parallel", *options, **{"FAKE_STEP_S": "0.0005", **more})


def quiesce(controller: Agents, pid: int, seconds: float = 20.0) -> AgentPending:
    """Ask one agent alone, as no command does."""
    process = processes.read(pid)
    assert process is not None
    return controller.start(Call.QUIESCE, [process.id], "one by one", seconds)[process.id]


@pytest.fixture
def controller() -> Iterator[Agents]:
    made = Agents()
    yield made
    made.close()


@pytest.fixture
def onlooker() -> Iterator[Agents]:
    made = Agents()
    yield made
    made.close()


def stage(onlooker: Agents, pid: int) -> State:
    process = processes.read(pid)
    assert process is not None
    hello = onlooker.hello(process.id)
    assert hello is not None
    return hello.stage


def result(pending: AgentPending) -> str:
    if pending.outcome is None:
        answer = pending.link.wait_for_answer(time.monotonic() + 20, pending.number)
        assert answer is not None, "the agent does not answer"
        return str(answer["result"])
    return pending.outcome.result


def all_answer(server: Server, name: str, reference: list[list[int]]) -> None:
    """One after the other: each wakes the engines anew."""
    assert [server.ask(f"{name}-{i}", len(reference[i]), engine=i) for i in range(len(reference))] == reference


def references(server: Server, tokens: int = 8) -> list[list[int]]:
    return [server.ask(f"reference-{i}", tokens, engine=i) for i in range(2)]


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_idle_engines_and_back(machine2: Machine, method: str) -> None:
    """Case 44: an answer for all of them; requests that come meanwhile wait, on each engine."""
    server = serve_together(machine2, method=method)
    reference = references(server)
    down = server.suspend()
    assert down.code == 0, down
    assert down.states == dict.fromkeys(server.workers, "suspended")
    assert [machine2.used(0), machine2.used(1)] == [0, 0]
    waiting = [server.send(f"meanwhile-{i}", engine=i) for i in range(2)]
    assert server.resume().code == 0
    assert [server.tokens(name) for name in waiting] == reference
    all_answer(server, "after", reference)


@pytest.mark.parametrize(("busy", "options", "version"), [((0,), (), ""), ((0,), (), "newer"), ((0, 1), ("--enable-sleep-mode",), "")])
def test_a_wave_under_way_stands_and_goes_on(machine2: Machine, busy: tuple[int, ...], options: tuple[str, ...], version: str) -> None:
    """With sleep mode what is in the KV caches is forgotten by all engines, and computed anew. vLLM 0.33 adds up in another way."""
    server = serve_together(machine2, *options, FAKE_VLLM=version)
    reference = references(server, 100)
    stuck = machine2.world.path / "stuck"
    stuck.write_text(str(server.workers[1]))
    names = [server.send(f"r{i}", 100, engine=i) for i in busy]
    command = machine2.begin("suspend", server.pid)
    eventually(lambda: _asked(machine2, server.workers), "both are asked")
    stuck.unlink()  # the engines agree within 32 steps, and the requests take a hundred
    down = command.end()
    assert down.code == 0, down
    assert ("offload" in [s["name"] for s in down.document["steps"]]) == bool(options)
    assert _done(server) == set()
    assert server.resume().code == 0
    assert [server.tokens(name) for name in names] == [reference[i] for i in busy]
    all_answer(server, "after", reference)


def test_engines_of_two_workers_each(machine4: Machine) -> None:
    server = serve_together(machine4, "-tp", "2")
    reference = references(server)
    down = server.suspend()
    assert down.code == 0, down
    assert [machine4.used(i) for i in range(4)] == [0] * 4
    waiting = server.send("meanwhile", engine=1)
    assert server.resume().code == 0
    assert server.tokens(waiting) == reference[1]
    all_answer(server, "after", reference)


def test_one_that_waits_for_the_others_steps_along_and_serves(machine2: Machine, controller: Agents, onlooker: Agents) -> None:
    """The window between the first that is asked and the last: requests come to both, and nobody waits for somebody who stands."""
    server = serve_together(machine2)
    reference = references(server)
    first, second = server.workers
    waiting = quiesce(controller, first)
    all_answer(server, "in-the-window", reference)
    assert stage(onlooker, first) is State.RUNNING
    assert [result(p) for p in (quiesce(controller, second), waiting)] == ["SUCCESS", "SUCCESS"]
    late = [server.send(f"late-{i}", engine=i) for i in range(2)]
    assert [stage(onlooker, pid) for pid in server.workers] == [State.QUIESCED] * 2
    controller.close()  # as at the end of a controller
    assert [server.tokens(name) for name in late] == reference


@pytest.mark.parametrize("without", ["", "engine1"])
def test_one_alone_never_stands(machine2: Machine, controller: Agents, without: str) -> None:
    """The other is not asked, or has no agent that could be: it takes what the first says for work. At the deadline all is as before."""
    server = serve_together(machine2, method="spawn" if without else "fork", FAKE_NO_PLUGIN=without)
    reference = references(server)
    if without:
        refused = server.suspend()
        assert (refused.code, str(server.workers[1]) in refused.error["message"]) == (6, True), refused
    waiting = quiesce(controller, server.workers[0], seconds=0.4)
    all_answer(server, "meanwhile", reference)
    assert result(waiting) == "NOT_READY"
    all_answer(server, "after", reference)
    if not without:
        assert server.suspend().code == 0
        assert server.resume().code == 0
        all_answer(server, "again", reference)


def test_a_controller_that_dies_in_the_quiesce(machine2: Machine) -> None:
    server = serve_together(machine2)
    reference = references(server)
    stuck = machine2.world.path / "stuck"
    stuck.write_text(str(server.workers[1]))
    name = server.send("slow", engine=0)
    command = machine2.begin("suspend", server.pid)
    eventually(lambda: _asked(machine2, server.workers), "both are asked")
    command.process.kill()
    command.end()
    stuck.unlink()
    assert server.tokens(name) == reference[0]
    assert machine2.gpuckpt("recover").code == 0
    assert server.suspend().code == 0
    assert server.resume().code == 0
    all_answer(server, "after", reference)


def test_an_engine_that_dies_in_the_quiesce(machine2: Machine) -> None:
    server = serve_together(machine2)
    references(server)
    first, second = server.workers
    (machine2.world.path / "stuck").write_text(str(second))
    server.send("slow", engine=0)
    command = machine2.begin("suspend", server.pid, "--timeout", "3s")
    eventually(lambda: _asked(machine2, [first, second]), "both are asked")
    os.kill(second, signal.SIGKILL)
    ended = command.end()
    assert ended.code == 1, ended
    assert str(second) in ended.error["message"]
    assert machine2.world.peek().rules.processes[first].state is State.RUNNING
    assert machine2.records() == []


def test_engines_that_their_own_call_has_paused(machine2: Machine, controller: Agents) -> None:
    """They take no step, so none is waited for. A pause that comes while one of them waits for the other waits as well."""
    server = serve_together(machine2)
    reference = references(server)
    server.ask_of_the_engine("pause_scheduler")
    held = [server.send(f"held-{i}", engine=i) for i in range(2)]
    assert server.suspend().code == 0
    assert server.resume().code == 0
    assert _done(server) == {"pause_scheduler"}
    server.ask_of_the_engine("resume_scheduler")
    assert [server.tokens(name) for name in held] == reference
    waiting = quiesce(controller, server.workers[0], seconds=0.4)
    server.ask_of_the_engine("pause_scheduler")
    assert result(waiting) == "NOT_READY"
    server.ask_of_the_engine("resume_scheduler")
    all_answer(server, "after", reference)


def test_engines_without_a_coordinator_are_refused(machine2: Machine) -> None:
    """Of them nobody can be woken."""
    server = serve_together(machine2, FAKE_ENGINES="offline")
    ids = [processes.read(pid).id for pid in server.workers]
    eventually(lambda: all(protocol.find(i, os.geteuid()) for i in ids), "its engines have agents")
    refused = server.suspend()
    assert (refused.code, refused.error["code"]) == (6, "possible-import")
    assert "where it says there that gpuckpt cannot hold this engine, it says why" in refused.error["message"]


@pytest.mark.parametrize("option", ["--enable-elastic-ep", "--enable-eplb", "--enable-fault-tolerance"])
def test_what_no_engine_could_hold_is_refused(machine2: Machine, option: str) -> None:
    server = serve_together(machine2, option)
    references(server, 1)  # its engines are in their loops
    refused = server.suspend()
    assert (refused.code, refused.error["code"]) == (6, "possible-import")
    assert option.removeprefix("--enable-") in refused.error["message"]


Engine = tuple[bool, bool, bool]  # whether it has work, is to pause, and its workers have rung


@pytest.mark.parametrize("add", vllm_together.SUMS.values())
def test_the_sum_is_vllms_own_but_for_who_has_rung(monkeypatch: pytest.MonkeyPatch, add: Any) -> None:
    """Every state of three engines: they learn the same, with gpuckpt or without it, and all are held when all have rung."""
    module = SimpleNamespace(**runpy.run_path(str(TREE / "vllm/config/parallel.py")))
    monkeypatch.setitem(sys.modules, vllm_together.PARALLEL, module)  # type: ignore[arg-type]  # what is asked of it
    config, group, own = module.Newer(), SimpleNamespace(size=lambda: 3), module.ParallelConfig.sync_dp_state
    reduce = module.torch.distributed
    module.cpu_all_reduce_ = lambda tensor, group, timeout: reduce.all_reduce(tensor, op=sum, group=group)
    held: list[object] = []

    def ours(rung: bool) -> Any:
        bell = SimpleNamespace(all_rung=lambda: {1: 1} if rung else None)
        return functools.partial(vllm_together.Together(None, cast("Any", bell), held.append, add).sync, config)

    def learn(engines: tuple[Engine, ...], functions: list[Any]) -> list[tuple[bool, bool]]:
        said: list[list[int]] = []
        module.torch.distributed.all_reduce = lambda tensor, **_: said.append(list(tensor))
        for f, (work, pause, _) in zip(functions, engines, strict=True):
            f(group, has_unfinished=work, pending_pause=pause)
        total = [sum(column) for column in zip(*said, strict=True)]
        held.clear()
        module.torch.distributed.all_reduce = lambda tensor, **_: tensor.__setitem__(slice(None), total)
        return [f(group, has_unfinished=work, pending_pause=pause) for f, (work, pause, _) in zip(functions, engines, strict=True)]

    for engines in itertools.product(itertools.product([False, True], repeat=3), repeat=3):
        rung = [r for _, _, r in engines]
        (plain,) = set(learn(engines, [own] * 3))
        (learnt,) = set(learn(engines, [ours(r) for r in rung]))
        assert len(held) == (3 if all(rung) else 0)
        assert learnt == (plain if all(rung) else (plain[0] or any(rung), plain[1]))
        assert set(learn(engines, [ours(True) if r else own for r in rung])) == {learnt}  # those that have not rung may have no gpuckpt


def _done(server: Server) -> set[str]:
    """Requests whose answer is there."""
    while select.select([server.front._stdout], [], [], 0)[0] or b"\n" in server.front._read:
        server._take()
    return server.done.keys() - {"reference-0", "reference-1"}


def _asked(machine: Machine, workers: list[int]) -> bool:
    """Whether a command has asked all to quiesce: they ring, beside the engine's own end of the bell. Before that it only looks."""
    ends = Path("/proc/net/unix").read_text()
    return machine.records() != [] and all(ends.count(f"@gpuckpt-engine-{pid}-") > 1 for pid in workers)
