"""A request with a short body, or none, to the supervised server over its unix socket: what nearly all requests are.

It does what aiohttp's client session does for these, with its parser and connections, and without what a gate does not need of it
(redirects, cookies, timers, headers of its own), which is most of the time that a request took. Bodies that come in pieces and
WebSockets go through the session.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from types import TracebackType
from typing import Self

from aiohttp import ClientPayloadError, ClientResponse, hdrs
from aiohttp.client_exceptions import ServerDisconnectedError
from aiohttp.client_proto import ResponseHandler
from aiohttp.http import HttpProcessingError, RawResponseMessage
from aiohttp.streams import EofStream, StreamReader
from multidict import CIMultiDictProxy

LINE_BYTES = 65536
_WITH_BODY = frozenset({hdrs.METH_POST, hdrs.METH_PUT, hdrs.METH_PATCH})  # of these one that has no body says so


class Connections:
    """Connections that *connect* makes, each kept for *keep_s* seconds after it was used."""

    def __init__(self, connect: Callable[[], Awaitable[ResponseHandler]], keep_s: float) -> None:
        self._connect, self._keep_s = connect, keep_s
        self._free: deque[tuple[float, ResponseHandler]] = deque()

    async def take(self) -> ResponseHandler:
        """One that nobody uses. Raises what *connect* does."""
        self._drop_old()
        while self._free:
            _, connection = self._free.pop()
            if connection.is_connected() and not connection.should_close:
                return connection
            connection.close()
        return await self._connect()

    def give_back(self, connection: ResponseHandler) -> None:
        """It was used, and is kept if it can be used again."""
        if not connection.is_connected() or connection.should_close:
            connection.close()
            return
        self._free.append((time.monotonic(), connection))
        self._drop_old()

    def close(self) -> None:
        while self._free:
            self._free.pop()[1].close()

    def _drop_old(self) -> None:
        oldest = time.monotonic() - self._keep_s
        while self._free and self._free[0][0] < oldest:
            self._free.popleft()[1].close()


class Exchange:
    """One request and its answer; an asynchronous context manager, at whose end a connection with an answer that was not read is cut."""

    status: int
    reason: str
    headers: CIMultiDictProxy[str]
    content: StreamReader

    def __init__(
        self, connections: Connections, method: str, target: str, headers: Collection[tuple[bytes, bytes]], body: bytes | None
    ) -> None:
        """*headers* say nothing of the body: its length is told here, so that no other reading of where it ends is possible."""
        self._connections, self._method = connections, method
        head = [f"{method} {target} HTTP/1.1\r\n".encode("utf-8", "surrogateescape")]
        head += [b"%b: %b\r\n" % pair for pair in headers]
        if body is not None or method in _WITH_BODY:
            head.append(b"Content-Length: %d\r\n" % len(body or b""))
        self._bytes = b"%b\r\n%b" % (b"".join(head), body or b"")

    async def __aenter__(self) -> Self:
        """Raises ``OSError`` or :class:`aiohttp.ClientError` where no answer comes."""
        self._connection = connection = await self._connections.take()
        try:
            connection.set_response_params(
                skip_payload=self._method == hdrs.METH_HEAD,
                read_until_eof=True,
                auto_decompress=False,
                max_line_size=LINE_BYTES,
                max_field_size=LINE_BYTES,
            )
            if connection.transport is None:
                raise ServerDisconnectedError
            connection.transport.write(self._bytes)
            message = await self._message()
        except BaseException:
            connection.abort()
            raise
        self.status, self.reason, self.headers = message.code, message.reason, message.headers
        return self

    async def _message(self) -> RawResponseMessage:
        """The head of its answer, after those that only say that it is coming."""
        while True:
            try:
                message, self.content = await self._connection.read()
            except (HttpProcessingError, EofStream) as e:
                raise ClientPayloadError(f"the server's answer is not HTTP: {e}") from e
            if message.code >= 200:
                return message
            if message.code == 101:
                raise ClientPayloadError("the server changed the protocol, which nobody had asked for")

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.content.is_eof() and kind is None:
            self._connections.give_back(self._connection)
        else:
            self._connection.abort()

    @property
    def content_length(self) -> int | None:
        length = self.headers.get(hdrs.CONTENT_LENGTH)
        return int(length) if length is not None and length.isdecimal() else None

    async def read(self) -> bytes:
        return self.content.read_nowait() if self.content.is_eof() else await self.content.read()


#: What the gate passes on, however it was asked for.
Answer = Exchange | ClientResponse
