"""A WebSocket through the gate: message by message, until either side closes."""

from __future__ import annotations

import asyncio
import contextlib

from aiohttp import ClientWebSocketResponse, WSMsgType, hdrs, web
from multidict import CIMultiDict
from yarl import URL

from gpuckpt.supervisor.upstream import Upstream

_OF_HANDSHAKE = frozenset(
    "connection upgrade sec-websocket-key sec-websocket-version sec-websocket-extensions sec-websocket-protocol content-length".split()
)
Side = ClientWebSocketResponse | web.WebSocketResponse


def asks_for_websocket(request: web.BaseRequest) -> bool:
    """Whether a server would take it for the handshake of a WebSocket; without ``Connection: upgrade`` it is a request like others."""
    if request.headers.get(hdrs.UPGRADE, "").strip().lower() != "websocket":
        return False
    return any(word.strip().lower() == "upgrade" for v in request.headers.getall(hdrs.CONNECTION, ()) for word in v.split(","))


def is_handshake(request: web.BaseRequest) -> bool:
    """Whether it is a complete one."""
    return request.method == hdrs.METH_GET and web.WebSocketResponse(protocols=_offered(request)).can_prepare(request).ok


def _offered(request: web.BaseRequest) -> list[str]:
    return [p.strip() for p in request.headers.get(hdrs.SEC_WEBSOCKET_PROTOCOL, "").split(",") if p.strip()]


async def tunnel(request: web.BaseRequest, upstream: Upstream, target: str) -> web.StreamResponse:
    """Connect to the server first, so that its refusal is an answer; then to the client."""
    headers = CIMultiDict((k, v) for k, v in request.headers.items() if k.lower() not in _OF_HANDSHAKE)
    url = URL(upstream.base + target, encoded=True)
    async with upstream.session.ws_connect(
        url, protocols=_offered(request), headers=headers, autoping=False, autoclose=False, max_msg_size=0
    ) as server:
        client = web.WebSocketResponse(
            protocols=[server.protocol] if server.protocol else (), autoping=False, autoclose=False, max_msg_size=0, compress=False
        )
        await client.prepare(request)
        pumps = {asyncio.create_task(_pump(client, server)), asyncio.create_task(_pump(server, client))}
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
        return client


async def _pump(source: Side, sink: Side) -> None:
    """Copy until *source* closes, and pass its close code on."""
    with contextlib.suppress(ConnectionError):
        while True:
            message = await source.receive()
            match message.type:
                case WSMsgType.TEXT:
                    await sink.send_str(message.data)
                case WSMsgType.BINARY:
                    await sink.send_bytes(message.data)
                case WSMsgType.PING:
                    await sink.ping(message.data)
                case WSMsgType.PONG:
                    await sink.pong(message.data)
                case WSMsgType.CLOSE:
                    await sink.close(code=message.data or 1000, message=(message.extra or "").encode())
                    return
                case _:
                    await sink.close()
                    return
