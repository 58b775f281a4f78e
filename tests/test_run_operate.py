"""The processes that carry out the suspends and resumes of a run: ready beforehand, asked again, dead."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpuckpt import errors
from gpuckpt.model import State
from gpuckpt.supervisor import operate
from gpuckpt.supervisor.child import Child
from gpuckpt.supervisor.operate import Worker
from tests.serving import Serving, Stage, alive, descendants, stage
from tests.simulated_machine import Machine, eventually

__all__ = ["stage"]


def test_what_stands_ready_and_may_die(stage: Stage) -> None:
    """For the resume from when it is suspended on; for the suspend from when the server is told to sleep."""
    run = stage.run().awake().suspended()
    ready = eventually(lambda: operations(run), "something stands ready")
    for pid in ready:
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not any(alive(p) for p in ready), "it is dead")
    assert run.complete(id=1).status == 200
    eventually(lambda: not operations(run), "nothing stands by while it is awake")
    run.set(slow_sleep=2.0)
    order = run.order("suspend")
    eventually(lambda: len(run.notes("sleep")) == 2, "the server is told to sleep")
    (suspends,) = eventually(lambda: operations(run), "something stands ready")
    assert not run.became("suspended", 2)
    order.join(20)
    eventually(lambda: not alive(suspends) and len(operations(run)) == 1, "it did that, and another stands ready for the resume")
    ready = eventually(lambda: operations(run), "something stands ready")
    run.process.kill()
    eventually(lambda: not any(alive(p) for p in ready), "it ends with its supervisor")


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


def test_a_deadline_that_was_asked_for_is_waited_for(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUCKPT_SIMULATE", str(machine.world.path))
    monkeypatch.setattr(operate, "LIMIT_S", 0.001)

    async def body(timeout_s: float | None) -> Any:
        worker = Worker()
        try:
            return (await worker.run("gpus", timeout_s=timeout_s)).details["gpus"]
        finally:
            await worker.finish()

    assert asyncio.run(body(20.0)) != []
    with pytest.raises(errors.InFlight, match="within 0 s"):
        asyncio.run(body(None))


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


def test_one_that_cannot_even_start_has_begun_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where gpuckpt was removed, or replaced, under a run that lives: the run is as it was."""
    monkeypatch.setattr(sys, "executable", "/bin/false")

    async def body() -> None:
        worker = Worker()
        try:
            await worker.run("suspend", [os.getpid()])
        finally:
            await worker.finish()

    with pytest.raises(errors.GpuckptError, match="nothing was begun") as caught:
        asyncio.run(asyncio.wait_for(body(), 20))
    assert caught.value.exit_code == 1


def test_no_order_is_carried_out_whose_supervisor_died_before_it_was_read(machine: Machine) -> None:
    """The order lies in the pipe, and no signal tells of the death: whoever adopts the child would work on it at the same time."""
    target = machine.target("--gib", "1")
    supervisor = f"""
import asyncio, os
from gpuckpt.supervisor.operate import Worker
async def main():
    worker = Worker()
    task = asyncio.create_task(worker.run("suspend", [{target.pid}]))
    while worker.process is None:
        await asyncio.sleep(0)
    await worker.process.stdin.drain()
    print(worker.process.pid, flush=True)
    os._exit(9)
asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", supervisor], env=machine.environ, stdout=subprocess.PIPE, text=True, timeout=30, check=False
    )
    assert done.returncode == 9
    worker = int(done.stdout)
    eventually(lambda: not alive(worker), "it has ended")
    assert target.state is State.RUNNING


@pytest.mark.parametrize(
    ("python", "words"), [("/no/such/python", "the keeper of true cannot be started: No such file"), ("/bin/false", "its keeper ended")]
)
def test_no_keeper_no_child(monkeypatch: pytest.MonkeyPatch, python: str, words: str) -> None:
    """As after an upgrade that took the interpreter along, or the package, when a command shall be started again."""
    monkeypatch.setattr(sys, "executable", python)
    with pytest.raises(errors.CannotStart, match=words) as caught:
        asyncio.run(Child.start(["true"], {}))
    assert caught.value.status == 125


def operations(run: Serving) -> list[int]:
    """The processes that carry out its suspends and resumes; not those that make their driver calls, which have names of their own."""
    found = []
    for pid in descendants(run.process.pid):
        with contextlib.suppress(FileNotFoundError):
            ours = b"gpuckpt.supervisor.worker" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if ours and not Path(f"/proc/{pid}/comm").read_text().startswith("gpuckpt-"):
                found.append(pid)
    return found
