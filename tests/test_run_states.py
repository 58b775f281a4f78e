"""A run in each of its states: signals, kill -9, orders and requests."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gpuckpt.model import Call
from tests.serving import Serving, Stage, descendants, stage
from tests.simulated_machine import eventually

__all__ = ["stage"]

STATES = ["starting", "awake", "draining", "sleeping", "suspending", "suspended", "resuming", "waking"]


def slow_in(state: str, slow_s: int) -> tuple[str, ...]:
    option = {"starting": "--slow-load", "rehearsing": "--slow-wake", "sleeping": "--slow-sleep", "waking": "--slow-wake"}.get(state)
    return ("--engine", option, f"{slow_s}") if option else ("--engine",)


def bring_to(stage: Stage, state: str, *options: str, slow_s: int = 20) -> Serving:
    """A run in *state*, in which it stays for a while."""
    if state == "rehearsing":
        options = (*options, "--rehearse")
    run = stage.run("--drain", "20s", *options, fake=slow_in(state, slow_s))
    if state in ("starting", "rehearsing"):
        eventually(lambda: run.port, "the gate listens")
        if state == "rehearsing":
            eventually(lambda: any(n["path"] == "/wake_up" for n in run.notes("begin")), "it wakes up")
        return run
    run.awake()
    eventually(lambda: len(run_tree(run)) >= 2, "the engine is there")
    if state == "draining":
        run.begin(seconds=20)
        eventually(lambda: run.facts["requests_running"] == 1, "a request runs")
    if state == "suspending":
        stage.machine.slow(0.25)
    if state not in ("awake",):
        order = run.order("suspend")
        if state == "draining":
            run.until("draining")
        elif state == "sleeping":
            eventually(lambda: run.notes("sleep"), "it goes to sleep")
        elif state == "suspending":
            eventually(lambda: under_way(stage, run, Call.CHECKPOINT), "the checkpoint runs")
        else:
            run.until("suspended")
            order.join(20)
    if state in ("resuming", "waking"):
        if state == "resuming":
            stage.machine.slow(0.25)
        run.begin(id=1)
        run.until("resuming")
        if state == "resuming":
            eventually(lambda: under_way(stage, run, Call.RESTORE), "the restore runs")
        else:
            eventually(lambda: run.notes("begin")[-1]["path"] == "/wake_up", "it wakes up")
    return run


def run_tree(run: Serving) -> list[int]:
    run.tree = descendants(run.process.pid)
    return run.tree


def under_way(stage: Stage, run: Serving, call: Call) -> bool:
    return any(o.call == call for o in stage.machine.world.peek().under_way(run.child))


@pytest.mark.parametrize("state", STATES)
def test_sigterm_in_each_state_leaves_nothing(stage: Stage, state: str) -> None:
    """Held requests are told why."""
    run = bring_to(stage, state)
    run_tree(run)
    held = run.begin(id=2) if state == "waking" else None
    if held is not None:
        eventually(lambda: run.facts["requests_waiting"] == 2, "it waits")
        assert [run.get(p).status for p in ("/health", "/ready", "/awake")] == [200, 200, 503], "it can serve, and is not awake"
    run.signal(signal.SIGTERM)
    if held is not None:
        answer = held.result()
        assert (answer.status, answer.error["code"]) == (503, "run-not-ready")
    code = run.end()
    assert code in (0, 143), run.stderr
    if state in ("awake", "draining", "sleeping"):
        assert code == 0, "it ended by itself, in order"
    if state == "suspended":
        assert code == 143
        assert not run.notes("terminated"), "it was not restored to be ended"
    run.nothing_left()
    assert list(stage.runtime.glob("m.*")) == [stage.runtime / "m.lock"]


@pytest.mark.parametrize("state", STATES)
def test_kill_9_of_the_supervisor_ends_the_tree(stage: Stage, state: str) -> None:
    """Case 21: dryvist/nix-ai#1182"""
    run = bring_to(stage, state)
    run_tree(run)
    run.process.kill()
    run.nothing_left()


@pytest.mark.parametrize("state", ["starting", "rehearsing", "draining", "sleeping", "waking"])
def test_kill_9_of_the_supervisor_of_a_kept_child(stage: Stage, state: str) -> None:
    """The next one takes it as it is, whatever the server was in the middle of. (The other states: ``test_a_kept_child_is_adopted``.)"""
    run = bring_to(stage, state, "--keep-child", slow_s=1)
    stage.machine.slow(0.0)
    run.process.kill()
    run.process.wait()
    second = stage.run("--keep-child", fake=slow_in(state, 1))
    assert second.complete_when_it_listens(id=1).status == 200, second.stderr
    assert "adopted pid" in second.stderr
    assert len(second.notes("ready")) == 1, "no other was started"
    if state in ("rehearsing", "waking"):
        assert second.suspended().complete(id=2).status == 200
    assert not second.notes("computed asleep")
    run_tree(second)
    second.signal(signal.SIGTERM)
    assert second.end() == 0
    second.nothing_left()


def test_kill_9_of_the_keeper_ends_the_run(stage: Stage) -> None:
    """And an engine, though that has a session of its own and no parent any more."""
    run = bring_to(stage, "suspended")
    run_tree(run)
    keeper = next(p for p in run.tree if Path(f"/proc/{p}/comm").read_text().strip() == "gpuckpt-keeper")
    os.kill(keeper, signal.SIGKILL)
    assert run.end() == 137
    assert f"somebody killed the keeper of the command, pid {keeper}" in run.stderr
    run.nothing_left()


def test_requests_at_every_moment_of_a_suspend_and_resume(stage: Stage) -> None:
    stage.machine.slow(0.02)
    run = stage.run(fake=("--slow-sleep", "0.1", "--slow-wake", "0.1")).awake()
    for n in range(0, 10, 2):
        with ThreadPoolExecutor(1) as pool:
            order = pool.submit(run.ask, "suspend")
            clients = []
            for k in range(6):
                time.sleep(0.02 * n)
                clients.append(run.begin(id=f"{n}.{k}"))
            assert [c.result().json["id"] for c in clients] == [f"{n}.{k}" for k in range(6)]
            assert order.result()["ok"]
    assert not run.notes("computed asleep")


def test_orders_in_every_state(stage: Stage) -> None:
    run = stage.run(fake=("--slow-load", "1"))
    eventually(lambda: run.port, "the gate listens")
    assert [run.ask(command)["error"]["code"] for command in ("suspend", "resume")] == ["run-not-ready"] * 2
    run.awake()
    assert stage.gpuckpt("resume", "m").document["already"]
    run.suspended()
    assert stage.gpuckpt("suspend", "m").document["already"]
    assert stage.gpuckpt("is-suspended", "m").code == 0
    assert stage.gpuckpt("status", "m", json=False).stdout.startswith("suspended: run m ")
    assert stage.gpuckpt("resume", "m", json=False).stdout.startswith("awake: run m ")
    assert stage.gpuckpt("is-suspended", "m").code == 1
    run.suspended()
    result = stage.gpuckpt("stop", "m")
    assert (result.code, run.end()) == (0, 143), "as it was: it was not restored for that"
    assert not run.notes("terminated")
    result = stage.gpuckpt("stop", "m")
    assert (result.code, result.error["code"]) == (2, "usage")
    assert stage.gpuckpt("suspend", "m", "1").code == 2


def test_a_second_sigterm_does_not_wait(stage: Stage) -> None:
    run = stage.run("--grace", "60s", fake=("--stubborn",)).awake()
    run.signal(signal.SIGTERM)
    run.until("stopping")
    run.signal(signal.SIGTERM)
    assert run.end() == 137
    run.nothing_left()


@pytest.mark.parametrize("told", ["SIGTERM", "stop"])
def test_slow_clients_do_not_keep_the_end(stage: Stage, told: str) -> None:
    """One that does not read its answer, one that never sends the rest of its request, one that has asked the control socket nothing."""
    run = stage.run().awake()
    body = json.dumps({"stream": True, "chunks": 200_000, "id": 1})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    silent = socket.socket(socket.AF_UNIX)
    with run.dial(head + body), run.dial("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc"), silent:
        silent.connect(str(stage.runtime / "m.sock"))
        eventually(lambda: any(n["path"] == "/v1/completions" for n in run.notes("begin")), "it is being answered")
        if told == "stop":
            assert run.ask("stop")["ok"]
        else:
            run.signal(signal.SIGTERM)
        run.process.wait(15)
    run.nothing_left()
