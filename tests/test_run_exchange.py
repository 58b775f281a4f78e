"""A request with a short body to a server on a unix socket, as the gate sends it, and every way in which an answer may come."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.client_proto import ResponseHandler

from gpuckpt.supervisor.exchange import Connections, Exchange

Body = Callable[[Connections], Awaitable[Any]]
PAIRS = [(b"Host", b"x"), (b"X-Name", "M\u00fcnchen".encode())]


class Server:
    """Answers each request with the next of *answers*, as it is; "" ends the connection. It has no idea of HTTP."""

    def __init__(self, *answers: str) -> None:
        self.answers, self.requests, self.connections, self.open = list(answers), list[bytes](), 0, 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        try:
            while data := await reader.read(1 << 16):
                self.requests.append(data)
                answer = self.answers.pop(0)
                writer.write(answer.removesuffix("<end>").encode())
                if answer.endswith("<end>"):
                    break
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            self.open -= 1


def during(tmp_path: Path, server: Server, body: Body, keep_s: float = 2.0) -> Any:
    """What *body* returns, with connections to *server*."""

    async def run() -> Any:
        listening = await asyncio.start_unix_server(server.serve, tmp_path / "s")
        loop = asyncio.get_running_loop()

        async def connect() -> ResponseHandler:
            return (await loop.create_unix_connection(lambda: ResponseHandler(loop), str(tmp_path / "s")))[1]

        connections = Connections(connect, keep_s)
        try:
            return await body(connections)
        finally:
            connections.close()
            listening.close()
            while server.open:  # a loop of Python 3.12 that ends before them leaves their sockets open
                await asyncio.sleep(0.001)

    return asyncio.run(asyncio.wait_for(run(), 20))


async def ask(connections: Connections, method: str = "POST", data: bytes = b"{}") -> tuple[int, bytes]:
    async with Exchange(connections, method, "/v1/x?y=1", PAIRS, data) as answer:
        return answer.status, await answer.read()


def answer_of(text: str, head: str = "") -> str:
    return f"HTTP/1.1 200 OK\r\n{head}Content-Length: {len(text)}\r\n\r\n{text}"


def test_what_is_sent_and_what_comes(tmp_path: Path) -> None:
    server = Server(answer_of("hello", "X-A: 1\r\nX-A: 2\r\n"), answer_of(""))

    async def body(connections: Connections) -> None:
        async with Exchange(connections, "POST", "/v1/x?y=%20", PAIRS, b"{}") as answer:
            assert (answer.status, answer.reason, answer.content_length) == (200, "OK", 5)
            assert answer.headers.getall("x-a") == ["1", "2"]
            assert await answer.read() == b"hello"
        assert await ask(connections) == (200, b"")

    during(tmp_path, server, body)
    assert server.requests[0] == "POST /v1/x?y=%20 HTTP/1.1\r\nHost: x\r\nX-Name: M\u00fcnchen\r\nContent-Length: 2\r\n\r\n{}".encode()
    assert server.connections == 1, "the connection was kept"


@pytest.mark.parametrize(
    ("method", "sent", "status", "text"),
    [
        ("GET", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n", 200, b"abc"),
        ("GET", "HTTP/1.1 200 OK\r\n\r\nuntil the end<end>", 200, b"until the end"),
        ("GET", "HTTP/1.0 200 OK\r\n\r\nold<end>", 200, b"old"),
        ("HEAD", "HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n", 200, b""),
        ("GET", "HTTP/1.1 204 No Content\r\n\r\n", 204, b""),
        ("GET", "HTTP/1.1 304 Not Modified\r\nContent-Length: 7\r\n\r\n", 304, b""),
        ("GET", f"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n{answer_of('late')}", 200, b"late"),
    ],
)
def test_answers(tmp_path: Path, method: str, sent: str, status: int, text: bytes) -> None:
    server = Server(sent, answer_of("next"))

    async def body(connections: Connections) -> None:
        assert await ask(connections, method, b"") == (status, text)
        assert await ask(connections) == (200, b"next"), "nothing is left over"

    during(tmp_path, server, body)


@pytest.mark.parametrize(
    "sent", ["<end>", "HTTP/1.1 2", "nonsense\r\n\r\n", "HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n"]
)
def test_what_is_no_answer(tmp_path: Path, sent: str) -> None:
    server = Server(sent.removesuffix("<end>") + "<end>", answer_of("next"))

    async def body(connections: Connections) -> None:
        with pytest.raises((aiohttp.ClientError, OSError)):
            await ask(connections)
        assert await ask(connections) == (200, b"next")

    during(tmp_path, server, body)
    assert server.connections == 2


def test_an_answer_that_is_cut_short(tmp_path: Path) -> None:
    server = Server("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort<end>")

    async def body(connections: Connections) -> None:
        with pytest.raises(aiohttp.ClientError):
            await ask(connections)

    during(tmp_path, server, body)


@pytest.mark.parametrize("left", ["before the answer", "within the answer"])
def test_whoever_leaves_ends_the_work(tmp_path: Path, left: str) -> None:
    server = Server("" if left == "before the answer" else "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort")

    async def body(connections: Connections) -> None:
        task = asyncio.create_task(ask(connections))
        while not server.requests:
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        while server.open:
            await asyncio.sleep(0.001)

    during(tmp_path, server, body)


def test_a_connection_is_not_used_once_it_is_old_or_closed(tmp_path: Path) -> None:
    server = Server(answer_of("1"), answer_of("2"), answer_of("3", "Connection: close\r\n"), answer_of("4") + "<end>", answer_of("5"))

    async def body(connections: Connections) -> None:
        for n in range(1, 6):
            assert await ask(connections) == (200, str(n).encode())
            await asyncio.sleep(0.05 if n == 4 else 0)

    during(tmp_path, server, body)
    assert server.connections == 3
    server = Server(answer_of("1"), answer_of("2"))

    async def aged(connections: Connections) -> None:
        for n in range(1, 3):
            assert await ask(connections) == (200, str(n).encode())
            await asyncio.sleep(0.01)

    (tmp_path / "s").unlink(missing_ok=True)  # asyncio does it from Python 3.13 on
    during(tmp_path, server, aged, keep_s=0.001)
    assert server.connections == 2
