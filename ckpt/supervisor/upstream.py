"""Connections to the supervised server: a unix socket whose other end is checked to be in our own tree, or a URL."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp.client_exceptions import UnixClientConnectorError
from aiohttp.client_proto import ResponseHandler

from gpuckpt import errors
from gpuckpt.inspect import processes
from gpuckpt.supervisor.exchange import Connections
from gpuckpt.supervisor.mishaps import words_of
from gpuckpt.supervisor.swept import Way

#: How many connections are being made at once. A server's backlog may be short; the rest wait here, in their order.
CONNECTING = 16
#: How long a server that listens may refuse a connection before the request fails, in seconds.
CONNECT_S = 10.0
#: An idle connection is kept this long, in seconds: less than the 5 that uvicorn keeps it, so that a POST never meets its end.
KEEP_S = 2.0
HEALTH_S = 5.0


class Connector(aiohttp.UnixConnector):
    """Connects to a unix socket. *ours* says whether the pid that listens there may be spoken to. *fd*: a descriptor (``O_PATH``) of the
    socket that was seen there before.

    Once it was seen it is reached also where its path is gone (:mod:`gpuckpt.supervisor.swept`).
    """

    def __init__(self, path: str, ours: Callable[[int], bool], fd: int | None = None) -> None:
        super().__init__(path, limit=0, keepalive_timeout=KEEP_S)
        self._is_ours = ours
        self.way = Way(Path(path), fd)
        self._known: set[int] = set()
        self._turn = asyncio.Semaphore(CONNECTING)

    async def _create_connection(self, req: Any, traces: Any, timeout: Any) -> Any:  # noqa: ARG002
        try:
            return await self.dial()
        except OSError as e:
            raise UnixClientConnectorError(self.path, req.connection_key, e) from e

    async def dial(self) -> ResponseHandler:
        """A connection of its own. Raises ``OSError``."""
        async with self._turn:
            sock = await self._connect()
            _, protocol = await self._loop.create_unix_connection(self._factory, sock=sock)
        return protocol

    async def _connect(self) -> socket.socket:
        """A full backlog answers EAGAIN, which asyncio takes for a connection in progress: so this is done by hand."""
        until = time.monotonic() + CONNECT_S
        if self.way.fd is None:
            self.way.look()
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            try:
                sock.connect(self.path if self.way.fd is None else f"/proc/self/fd/{self.way.fd}")
                self._check(sock)
            except (BlockingIOError, ConnectionRefusedError):
                sock.close()
                self.way.look()
                if time.monotonic() >= until:
                    raise
            except BaseException:
                sock.close()
                raise
            else:
                return sock
            await asyncio.sleep(0.005)

    def _check(self, sock: socket.socket) -> None:
        pid, _ = processes.peer_of(sock)
        if pid in self._known:
            return
        if not self._is_ours(pid):
            raise PermissionError(errno.EACCES, f"pid {pid}, which is not part of this run, listens on its socket")
        self._known.add(pid)


class Upstream:
    """A server and the session that speaks to it."""

    def __init__(self, base: str, connector: aiohttp.BaseConnector, *, health: str = "/health", key: str = "") -> None:
        self.base = base.rstrip("/")
        self.health = health
        self.key = key
        self._connector = connector if isinstance(connector, Connector) else None
        self.connections = Connections(self._connector.dial, KEEP_S) if self._connector is not None else None
        self.session = aiohttp.ClientSession(
            connector=connector,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),  # a client's are passed on as they are
            max_line_size=65536,
            max_field_size=65536,
        )

    async def close(self) -> None:
        if self.connections is not None:
            self.connections.close()
        await self.session.close()
        if self._connector is not None:
            self._connector.way.forget()

    async def call(self, method: str, path: str, *, within_s: float, body: object = None) -> tuple[int, bytes]:
        """A call of our own. Raises :class:`gpuckpt.errors.ServerRefused` where no answer comes."""
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            async with self.session.request(
                method,
                self.base + path,
                headers=headers,
                json=body,
                timeout=aiohttp.ClientTimeout(total=within_s),
                allow_redirects=False,
            ) as answer:
                return answer.status, await answer.read()
        except TimeoutError as e:
            words = f"the server did not answer {method} {path} within {within_s:g} s"
            raise errors.ServerRefused(words, hint="see what the server logged") from e
        except (aiohttp.ClientError, OSError) as e:
            raise errors.ServerRefused(f"{method} {path}: {words_of(e)}", hint="see what the server logged") from e

    async def healthy(self) -> bool:
        with contextlib.suppress(errors.ServerRefused):
            return (await self.call("GET", self.health, within_s=HEALTH_S))[0] == 200
        return False

    # A server of which nothing is known but where it listens.

    async def asleep(self) -> bool:
        return False

    async def quiet(self, within_s: float) -> bool:  # noqa: ARG002
        return True

    async def sleep(self) -> None:
        """The driver takes all of it."""

    async def wake(self, *, gone: bool = False) -> None:
        """It has been asleep without knowing."""


class Silent:
    """A command without a server: nothing to ask, always healthy."""

    async def healthy(self) -> bool:
        return True

    async def asleep(self) -> bool:
        return False

    async def quiet(self, within_s: float) -> bool:  # noqa: ARG002
        return True

    async def sleep(self) -> None: ...

    async def wake(self, *, gone: bool = False) -> None: ...
