"""Processes without which a server cannot go on: their death is noticed behind a front that still answers, and nothing else is."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from gpuckpt.inspect import processes
from gpuckpt.model import ProcessId
from gpuckpt.supervisor.engines import Engines
from tests.serving import Serving, Stage, free_port, make_stage
from tests.simulated_machine import eventually


def upstream(place: Stage, *options: str, name: str = "m", fake: tuple[str, ...] = ()) -> Serving:
    """A server that is no vLLM, with a worker that holds GPU memory."""
    port = free_port()
    words = ("--upstream", f"http://127.0.0.1:{port}", "--listen", "0", *options)
    return place.run(*words, name=name, fake=("--port", port, "--workers", "1", *fake)).awake()


def worker(run: Serving) -> int:
    """What holds GPU memory beside the front."""
    return next(p for p in run.stage.machine.world.peek().rules.processes if p in run.tree and p != run.child)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    yield from make_stage(tmp_path_factory.mktemp("watch"))


def test_a_worker_that_dies_ends_the_run_or_starts_it_again(place: Stage) -> None:
    """It was never suspended, and is not vLLM's. With several CUDA processes it was rehearsed, too, though no option told of them: here
    the rehearsal is refused, since nobody vouches for the two, and it serves on."""
    run = upstream(place, "--restart", "on-failure")
    assert "rehearsing: one suspend and resume" in run.stderr
    assert "it cannot be suspended, and will not be" in run.stderr
    dead = worker(run)
    os.kill(dead, signal.SIGKILL)
    eventually(lambda: run.became("awake", 2), "it was started again")
    assert f"pid {dead}, a CUDA process of the server, died of SIGKILL, and the server went on without it" in run.stderr
    assert run.complete(id=1).status == 200
    run.signal(signal.SIGTERM)
    assert run.end() == 0
    run.nothing_left()


def test_whoever_meant_to_end_or_was_replaced_is_not_missed(place: Stage) -> None:
    run = upstream(place, "--no-rehearse")
    first = worker(run)
    os.kill(run.child, signal.SIGUSR1)
    eventually(lambda: f"pid {first}, a CUDA process of the server, ended with 0" in run.stderr, "it has ended")
    run.signal(signal.SIGTERM)
    run.end()
    run = upstream(place, "--no-rehearse", name="n")
    first = worker(run)
    os.kill(first, signal.SIGKILL)
    eventually(lambda: f"pid {first}, a CUDA process of the server, has died of SIGKILL" in run.stderr, "that is seen")
    os.kill(run.child, signal.SIGUSR1)
    eventually(lambda: "in the place of pid" in run.stderr, "another was started")
    (another,) = run.notes("another")
    assert f"in the place of pid {first} the server has started pid {another['pid']}" in run.stderr
    assert run.complete(id=1).status == 200
    run.close()


def test_who_has_a_pid_by_now_is_not_followed() -> None:
    """Neither where it was found before its pid was another's, nor where that came about just before it could be held on to."""

    async def follow(found: ProcessId) -> bool:
        run: Any = SimpleNamespace(changed=[], child=SimpleNamespace(pid=0))
        engines = Engines(run)
        engines.follow([found])
        followed = found.pid in engines._followed
        engines.close()
        return followed

    with subprocess.Popen(["sleep", "60"]) as other:
        proc = processes.read(other.pid)
        assert proc is not None
        assert asyncio.run(follow(proc.id))
        assert not asyncio.run(follow(ProcessId(other.pid, proc.start_ticks - 1)))
        other.kill()
