"""What nobody has thought of goes wrong in a suspend or a resume, or on the control socket: the run is in a state that has a way out."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp.http_exceptions import BadHttpMessage

from gpuckpt import errors
from gpuckpt.model import Report
from gpuckpt.supervisor import logs, operate
from gpuckpt.supervisor.between import Childless
from gpuckpt.supervisor.child import Child
from gpuckpt.supervisor.model import Policy, RunState
from gpuckpt.supervisor.operate import Worker
from gpuckpt.supervisor.state import Run
from gpuckpt.supervisor.traffic import Traffic
from tests.serving import Stage, stage

__all__ = ["stage"]

SHORT = OSError(errno.EMFILE, "Too many open files")


class Rehearsed:
    """A run whose operations succeed, but for those named in ``fails``: these raise what is no error of ours."""

    def __init__(self) -> None:
        self.fails: dict[str, Exception] = {}
        child = SimpleNamespace(pid=os.getpid(), exited=asyncio.get_running_loop().create_future())
        self.run = run = Run(cast("Child", child), cast("Any", self), Traffic(hold_s=10.0, max_waiting=10), Policy(timeout_s=1.0))
        run.holdings = cast("Any", self)
        self.down = False
        self.holders: list[int] = []

    def __getattr__(self, name: str) -> Any:
        async def act(*_: object, **__: object) -> Any:
            if name in self.fails:
                raise self.fails[name]
            if name in ("suspend", "resume"):
                self.down = name == "suspend"
            return True if name == "healthy" else Report(name, True, True)

        return act

    async def sleep(self, *_: object) -> None:
        if "sleep" in self.fails:
            raise self.fails["sleep"]

    def interrupt(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("fails", "order", "left"),
    [
        ("check", "suspend", RunState.AWAKE),
        ("quiet", "suspend", RunState.AWAKE),
        ("quiet wake", "suspend", RunState.SUSPENDED),
        ("sleep", "suspend", RunState.AWAKE),
        ("suspend", "suspend", RunState.AWAKE),
        ("suspend room", "suspend", RunState.SUSPENDED),
        ("suspend wake", "suspend", RunState.SUSPENDED),
        ("suspend healthy", "suspend", RunState.SUSPENDED),
        ("resume", "resume", RunState.SUSPENDED),
        ("wake", "resume", RunState.SUSPENDED),
        ("healthy", "resume", RunState.SUSPENDED),
    ],
)
def test_whatever_is_raised_leaves_a_way_out(fails: str, order: str, left: RunState) -> None:
    async def play() -> None:
        made = Rehearsed()
        run = made.run
        run.changed.append(lambda _: 1 // 0)  # who cannot be told is no reason either
        await asyncio.wait_for(run.until(RunState.AWAKE), 10)
        if order == "resume":
            await run.suspend("command")
        made.fails = dict.fromkeys(fails.split(), SHORT)
        with pytest.raises(errors.GpuckptError, match="Too many open files"):
            await asyncio.wait_for(run.suspend("command") if order == "suspend" else run.resume("command"), 10)
        assert run.state is left
        assert run.traffic.is_open == (left is RunState.AWAKE)
        made.fails = {}
        begun = await asyncio.wait_for(run.traffic.enter(), 10)
        assert run.state is RunState.AWAKE, "a request finds it awake, or wakes it"
        run.traffic.leave(begun)
        await asyncio.wait_for(run.suspend("command"), 10)
        assert not run.lost.done()
        await run.close()

    asyncio.run(play())


def test_an_operation_whose_process_cannot_be_started_has_begun_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def none() -> None:
        raise SHORT

    monkeypatch.setattr(operate, "ready", none)
    with pytest.raises(errors.GpuckptError, match="Too many open files; nothing was begun") as e:
        asyncio.run(Worker().run("suspend", [1]))
    assert e.value.exit_code != 3


def test_a_client_that_speaks_no_http_is_worth_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Case 24: reticlehq/reticle#319. Whoever looks for open ports would fill the log."""
    error = BadHttpMessage("Missing\n 'Host'")
    record = logging.LogRecord(
        "aiohttp.server", logging.ERROR, "", 0, "Error handling request from %s", ("::1",), (BadHttpMessage, error, None)
    )
    logs.handler("m", "text").handle(record)
    assert capsys.readouterr().err == "gpuckpt run m: Error handling request from ::1: 400, message: Missing 'Host'\n"


def test_a_listener_without_descriptors_does_not_flood_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def play() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(logs.of_the_loop())
        await asyncio.start_server(lambda _r, w: w.close(), sock=listening, backlog=1000)
        with socket.create_connection(listening.getsockname()[:2]):
            for _ in range(3):
                await asyncio.sleep(0)

    with caplog.at_level("WARNING"), Short() as listening:
        listening.bind(("127.0.0.1", 0))
        asyncio.run(play())
    assert [r.getMessage() for r in caplog.records] == [
        "no connection can be accepted now, so clients wait: [Errno 24] Too many open files"
    ]


class Short(socket.socket):
    """A socket of a process that may open no more files."""

    def accept(self) -> Any:
        raise SHORT


def test_what_tells_a_run_without_a_child_to_end() -> None:
    """A signal that ends, or the command."""

    async def play() -> list[int]:
        statuses = []
        for told in ("signal", "stop"):
            signals: asyncio.Queue[int] = asyncio.Queue()
            run = Childless(signals, (signal.SIGTERM,))
            ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            again: list[int] = []
            waiting = asyncio.create_task(run.unless_told_to_end(ready, 0.01, lambda again=again: again.append(1)))
            while len(again) < 3:
                await asyncio.sleep(0)
            with pytest.raises(errors.RunNotReady, match="waits for its GPU"):
                await run.answer({"command": "status"}, cast("Any", None))
            if told == "stop":
                await run.answer({"command": "stop"}, cast("Any", None))
            else:
                signals.put_nowait(signal.SIGUSR1)
                signals.put_nowait(signal.SIGTERM)
            with pytest.raises(errors.CannotStart) as ended:
                await asyncio.wait_for(waiting, 10)
            statuses.append(ended.value.status)
        return statuses

    assert asyncio.run(play()) == [143, 143]


def test_a_server_that_sleeps_and_says_that_it_cannot(stage: Stage) -> None:
    """Another program took more of the GPU in that moment than vLLM gave up: its workers sleep, and its executor does not know."""
    run = stage.run(fake=("--sleep-frees", "6", "--denies-sleep", "1")).awake()
    before = stage.machine.used()
    refused = stage.gpuckpt("suspend", "m").error
    assert refused["code"] == "server-refused"
    assert "/sleep?level=1&mode=wait with 500" in refused["message"]
    assert run.state == "awake"
    assert stage.machine.used() == before, "it has its memory back"
    assert [n["method"] for n in run.notes("collective_rpc")] == ["wake_up"]
    assert run.complete(id=1).status == 200
    stage.gpuckpt("suspend", "m", json=False)
    assert run.state == "suspended"
    assert run.complete(id=2).status == 200
    assert len(run.notes("collective_rpc")) == 1, "its executor knew that time"


def test_a_server_that_cannot_sleep_and_does_not(stage: Stage) -> None:
    run = stage.run(fake=("--status", "/sleep=500")).awake()
    assert stage.gpuckpt("suspend", "m").error["code"] == "server-refused"
    assert run.state == "awake"
    assert not run.notes("collective_rpc")
    assert run.complete(id=1).status == 200


def test_a_rehearsal_of_one_that_sleeps_and_says_that_it_cannot(stage: Stage) -> None:
    run = stage.run("--rehearse", fake=("--sleep-frees", "6", "--denies-sleep", "1")).awake()
    assert "it cannot be suspended, and will not be" in run.stderr
    assert stage.machine.used() == 8 << 30
    assert run.complete(id=1).status == 200
