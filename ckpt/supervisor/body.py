"""The body of a request as it comes to the gate: a short one whole, of a longer one its beginning, before the request counts for anything.

So a client that sends a head and no more wakes nothing, takes no place, and keeps nothing from going to sleep.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from aiohttp import hdrs, web

SHORT_BYTES = 1 << 16
#: A body of which nothing came for so long is not waited for any longer, in seconds. However long all of it takes is the client's affair.
SILENT_S = 60.0


class Stalled(Exception):
    """Nothing more of it came in time."""


class Body:
    """Of *request*, which has one. ``data`` is all of it, if it is short and :meth:`begin` has returned."""

    def __init__(self, request: web.BaseRequest) -> None:
        self._request, self._first = request, b""
        self.data: bytes | None = None
        self.stalled = False

    async def begin(self) -> None:
        """Return when a short body is there, or the beginning of a longer one, or of one whose length is not known. Raises
        :class:`Stalled`, and what the client's leaving raises."""
        request = self._request
        if request.headers.get(hdrs.EXPECT, "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0
        length, content = request.content_length, request.content
        if length is None or length > SHORT_BYTES:
            self._first = await self._more()
        elif content.is_eof():
            self.data = content.read_nowait()
        else:
            self.data = b"".join([piece async for piece in self])

    async def read(self) -> bytes:
        """All of it."""
        if self.data is None:
            self.data = b"".join([piece async for piece in self])
        return self.data

    def to_send(self) -> bytes | AsyncIterator[bytes]:
        """Whole, which goes in one packet with its head; or as it comes."""
        return self.data if self.data is not None else aiter(self)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if first := self._first:
            self._first = b""
            yield first
        while piece := await self._more():
            yield piece

    async def _more(self) -> bytes:
        content = self._request.content
        try:
            return await asyncio.wait_for(content.readany(), SILENT_S)
        except TimeoutError:
            self.stalled = True
            raise Stalled from None
