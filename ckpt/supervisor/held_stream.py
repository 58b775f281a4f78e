"""A streamed request while it is held: comments keep its connection alive, so that no proxy in front takes the wait for a dead server.

Once the first comment is out the answer has its headers. Whatever goes wrong after that is told as an event, and the connection is
closed without its proper end, so that it does not look whole.
"""

from __future__ import annotations

import asyncio
import json

from aiohttp import hdrs, web

from gpuckpt.supervisor.body import Body
from gpuckpt.supervisor.exchange import Answer

COMMENT = b": waiting for the model\n\n"
#: A longer body is not looked into.
BODY_BYTES = 4 << 20


class HeldStream:
    """The answer to *request*, begun before there is one."""

    def __init__(self, request: web.BaseRequest, body: Body | None) -> None:
        self._request, self._body = request, body
        self._response: web.StreamResponse | None = None

    @property
    def begun(self) -> bool:
        return self._response is not None

    @property
    def response(self) -> web.StreamResponse:
        assert self._response is not None, "no comment was sent"
        return self._response

    async def wait(self, place: asyncio.Future[float], every_s: float) -> None:
        """Until *place* is done; a comment each *every_s* meanwhile if the client asked for a stream."""
        length = self._request.content_length
        if self._body is None or length is None or length > BODY_BYTES:
            await asyncio.wait({place})
            return
        streams = _asks_for_stream(await self._body.read())
        while not place.done():
            await asyncio.wait({place}, timeout=every_s if streams else None)
            if not place.done():
                await self._comment()

    async def _comment(self) -> None:
        if self._response is None:
            self._response = web.StreamResponse(
                headers={hdrs.CONTENT_TYPE: "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
            )
            await self._response.prepare(self._request)
        await self._response.write(COMMENT)

    async def fill(self, answer: Answer) -> web.StreamResponse:
        """Pass on what the server streams; what is no stream becomes an error event."""
        response = self.response
        if answer.status != 200 or not answer.headers.get(hdrs.CONTENT_TYPE, "").startswith("text/event-stream"):
            return await self.fail((await answer.read()).decode(errors="replace"))
        async for chunk in answer.content.iter_any():
            await response.write(chunk)
        await response.write_eof()
        return response

    async def fail(self, text: str) -> web.StreamResponse:
        """End it with *text* as an error event, JSON or not."""
        try:
            document = json.loads(text)
        except ValueError:
            document = {"error": {"message": text, "type": "server_error", "param": None, "code": None}}
        await self.response.write(f"data: {json.dumps(document)}\n\n".encode())
        if self._request.transport is not None:
            self._request.transport.close()  # what was written goes out; the end of the stream does not
        return self.response


def _asks_for_stream(body: bytes) -> bool:
    try:
        document = json.loads(body)
    except ValueError:
        return False
    return isinstance(document, dict) and document.get("stream") is True
