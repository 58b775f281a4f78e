"""The processes that carry out the suspends and resumes of a run: ready beforehand, asked again, dead."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpuckpt.supervisor import operate
from gpuckpt.supervisor.keeper import descendants
from gpuckpt.supervisor.operate import Worker
from tests.conftest import COMMAND, Machine, eventually
from tests.serving import Serving, Stage, alive, stage

__all__ = ["stage"]


def test_what_stands_ready_for_the_resume_may_die(stage: Stage) -> None:
    run = stage.run().awake().suspended()
    ready = eventually(lambda: operations(run), "something stands ready")
    for pid in ready:
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not any(alive(p) for p in ready), "it is dead")
    assert run.complete(id=1).status == 200
    eventually(lambda: not operations(run), "nothing stands by while it is awake")
    run.suspended()
    ready = eventually(lambda: operations(run), "something stands ready")
    run.process.kill()
    eventually(lambda: not any(alive(p) for p in ready), "it ends with its supervisor")


def test_what_suspends_stands_ready_while_the_server_goes_to_sleep(stage: Stage) -> None:
    run = stage.run(fake=("--slow-sleep", "1")).awake()
    with subprocess.Popen([COMMAND, "suspend", "m"], env=stage.environ, stdout=subprocess.DEVNULL) as order:
        eventually(lambda: run.notes("sleep"), "the server is told to sleep")
        (ready,) = operations(run)
        assert not run.became("suspended")
        assert order.wait(20) == 0
    eventually(lambda: not alive(ready) and len(operations(run)) == 1, "it did that, and another stands ready for the resume")


def test_a_worker_can_be_asked_again(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a resume is that had others make room first."""
    monkeypatch.setenv("GPUCKPT_SIMULATE", str(machine.world.path))

    async def body() -> list[Any]:
        worker, found = Worker(), []
        for _ in range(2):
            found.append((await worker.run("gpus")).details["gpus"])
            await worker.finish()
        await worker.finish()
        return found

    first, second = asyncio.run(asyncio.wait_for(body(), 20))
    assert first == second != []


def test_one_that_stood_ready_and_died_has_begun_nothing(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its death may not be known yet when it gets its order: another one carries it out."""
    monkeypatch.setenv("GPUCKPT_SIMULATE", str(machine.world.path))

    async def body() -> Any:
        worker = Worker()
        worker.process = dead = await operate.ready()
        os.kill(dead.pid, signal.SIGKILL)
        try:
            return (await worker.run("gpus")).details["gpus"]
        finally:
            await worker.finish()

    assert asyncio.run(asyncio.wait_for(body(), 20)) != []


def operations(run: Serving) -> list[int]:
    """The processes that carry out its suspends and resumes."""
    found = []
    for pid in descendants(run.process.pid):
        with contextlib.suppress(FileNotFoundError):
            if b"gpuckpt.supervisor.operate" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                found.append(pid)
    return found
