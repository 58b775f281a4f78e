"""Clients that stop half-way: heads without a body, bodies that stall, answers that nobody takes. None keeps a run from going to sleep.

Most of it with the gate in this very process, in front of a server of a few lines.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from gpuckpt.supervisor import body, gate
from gpuckpt.supervisor.model import RunState
from gpuckpt.supervisor.traffic import Traffic
from gpuckpt.supervisor.upstream import Upstream
from tests.serving import Stage, stage

__all__ = ["stage"]

HEAD = "POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


def test_a_head_without_a_body_wakes_nothing_and_keeps_nothing_awake(stage: Stage) -> None:
    run = stage.run("--idle", "300ms", "--hold-comments", "1s").awake()
    heads = [
        f"{HEAD}Content-Length: 100\r\n\r\n",
        f"{HEAD}Content-Length: 100\r\n\r\n{{",
        f"{HEAD}Content-Length: 1000000\r\n\r\n",
        f"{HEAD}Transfer-Encoding: chunked\r\n\r\n",
        f"{HEAD}Content-Length: 100\r\nExpect: 100-continue\r\n\r\n",
        HEAD,
    ]
    sockets = [run.dial(head) for head in heads]
    run.until("suspended")
    sockets += [run.dial(head) for head in heads]
    for s in sockets[4], sockets[10]:
        assert s.recv(100).startswith(b"HTTP/1.1 100 ")
    facts = run.facts
    assert (facts["requests_running"], facts["requests_waiting"], facts["state"]) == (0, 0, "suspended")
    assert not run.became("resuming")
    text = json.dumps({"id": "late"})
    late = sockets[6]
    late.sendall(text.ljust(100).encode())
    assert late.makefile("rb").readline().startswith(b"HTTP/1.1 200 ")
    for s in sockets:
        s.close()
    run.until("suspended")


Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


class Front:
    """A gate in this process, before a server that does what *answer* does."""

    def __init__(self) -> None:
        self.traffic = Traffic(hold_s=5.0, max_waiting=2)
        self.traffic.open()
        self.run: Any = SimpleNamespace(traffic=self.traffic, state=RunState.AWAKE, resume_s=0.0, holds={})

    @asynccontextmanager
    async def before(self, answer: Answer) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A connection to it."""
        import aiohttp

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            upstream = Upstream(f"http://127.0.0.1:{port}", aiohttp.TCPConnector(force_close=True))
            metrics: Any = SimpleNamespace(answered=SimpleNamespace(labels=lambda _: SimpleNamespace(inc=lambda: None)))
            made = gate.Gate(self.run, upstream, metrics)
            await made.listen("127.0.0.1", 0)
            reader, writer = await asyncio.open_connection(*made.address, limit=1 << 12)
            try:
                yield reader, writer
            finally:
                writer.transport.abort()
                await made.close()
                await upstream.close()

    async def quiet(self) -> None:
        while self.traffic.running:
            await asyncio.sleep(0.01)


async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Takes whatever comes, and never answers."""
    await reader.read()
    writer.close()


@pytest.mark.parametrize(
    ("sent", "runs"),
    [
        ("Content-Length: 5\r\n\r\nab", False),
        ("Content-Length: 100000\r\n\r\nab", True),
        ("Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n", True),
    ],
)
def test_a_body_that_stalls_is_given_up(monkeypatch: pytest.MonkeyPatch, sent: str, runs: bool) -> None:
    """A short one has not counted yet; a longer one ran, and does not any more."""
    monkeypatch.setattr(body, "SILENT_S", 0.2)
    ran = []

    async def play() -> None:
        front = Front()

        async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            ran.append(front.traffic.running)
            await swallow(reader, writer)

        async with front.before(server) as (reader, writer):
            writer.write(f"{HEAD}{sent}".encode())
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            assert head.startswith("HTTP/1.1 408 ")
            length = int(next(x for x in head.splitlines() if x.lower().startswith("content-length")).split()[1])
            assert json.loads(await reader.readexactly(length))["error"]["code"] == "request-timeout"
            await front.quiet()

    asyncio.run(asyncio.wait_for(play(), 20))
    assert bool(ran) == runs


def test_a_client_that_takes_nothing_of_its_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel, which knows it from one that takes little."""
    monkeypatch.setattr(gate, "READER_S", 1)

    async def play() -> None:
        front = Front()

        async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000000\r\n\r\n")
            try:
                while True:
                    writer.write(b"x" * 65536)
                    await writer.drain()
            except ConnectionError:
                writer.close()

        async with front.before(server) as (reader, writer):
            writer.write(f"{HEAD}Content-Length: 2\r\n\r\n{{}}".encode())
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
            assert front.traffic.running == 1
            await front.quiet()

    asyncio.run(asyncio.wait_for(play(), 20))


def test_the_sockets_of_clients_that_are_gone_are_looked_after() -> None:
    """What is accepted has what the listener was given."""

    async def play() -> list[int]:
        front = Front()
        found: list[int] = []

        async def handle(request: Any) -> Any:
            from aiohttp import web

            s = request.transport.get_extra_info("socket")
            found.append(s.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))
            found.extend(s.getsockopt(socket.IPPROTO_TCP, o) for o in (socket.TCP_USER_TIMEOUT, socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL))
            return web.Response()

        monkey = pytest.MonkeyPatch()
        with monkey.context() as m:
            m.setattr(gate.Gate, "handle", lambda _, request: handle(request))
            async with front.before(swallow) as (reader, writer):
                writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                await reader.readline()
        return found

    assert asyncio.run(asyncio.wait_for(play(), 20)) == [1, gate.READER_S * 1000, gate.PROBES_AFTER_S, gate.PROBE_EACH_S]


def test_who_cannot_come_in_is_told_before_a_body_is_read() -> None:
    """429 where as many wait as may, 503 where waiting is in vain."""
    from gpuckpt import errors

    async def play() -> None:
        front = Front()
        front.traffic.close()
        waiting = [asyncio.create_task(front.traffic.enter()) for _ in range(2)]
        await asyncio.sleep(0)
        for status in (b"429", b"503"):
            async with front.before(swallow) as (reader, writer):
                writer.write(f"{HEAD}Content-Length: 1000000\r\nExpect: 100-continue\r\n\r\n".encode())
                assert (await reader.readline()).split()[1] == status
            front.traffic.fail(errors.RunNotReady("it is being stopped"), for_good=True)
        await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(asyncio.wait_for(play(), 20))


def test_what_nobody_has_thought_of_is_told_as_other_errors_are(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        front = Front()
        monkeypatch.setattr(front.traffic, "check", lambda: 1 // 0)
        async with front.before(swallow) as (reader, writer):
            writer.write(f"{HEAD}Content-Length: 2\r\nConnection: close\r\n\r\n{{}}".encode())
            head, _, text = (await reader.read()).partition(b"\r\n\r\n")
        assert head.split()[1] == b"502"
        error = json.loads(text)["error"]
        assert (error["code"], error["message"]) == (
            "gate-failed",
            "the gate could not pass it on: ZeroDivisionError: integer division or modulo by zero",
        )

    asyncio.run(asyncio.wait_for(play(), 20))


@pytest.mark.parametrize(("resume_s", "told"), [(0.0, 10), (0.2, 1), (7.1, 8), (500.0, 120)])
def test_when_to_come_back_is_what_the_last_resume_took(resume_s: float, told: int) -> None:
    """Whole seconds, and no longer than OpenAI clients take notice of."""

    async def play() -> None:
        front = Front()
        front.traffic.close()
        front.traffic.hold_s, front.run.resume_s, front.run.state = 0.01, resume_s, RunState.RESUMING
        async with front.before(swallow) as (reader, writer):
            writer.write(f"{HEAD}Content-Length: 2\r\n\r\n{{}}".encode())
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower().splitlines()
        assert head[0].startswith("http/1.1 503 ")
        assert {f"retry-after: {told}", "x-should-retry: true"} <= set(head)

    asyncio.run(asyncio.wait_for(play(), 20))
