"""The HTTP front of a run: a reverse proxy that holds the requests that need the GPU while the server is away, and wakes it for them.

It copies bytes as they come, in both directions, and sets no limit on how many or how long. What it answers by itself is JSON
of the form that OpenAI clients understand.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import math
import socket
from collections.abc import Collection, Sequence
from contextlib import AbstractAsyncContextManager
from http import HTTPStatus

import aiohttp
from aiohttp import hdrs, web
from aiohttp.web_protocol import RequestPayloadError
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from gpuckpt.supervisor import body, paths
from gpuckpt.supervisor.body import Body, Stalled
from gpuckpt.supervisor.exchange import Answer, Exchange
from gpuckpt.supervisor.held_stream import HeldStream
from gpuckpt.supervisor.listening import where
from gpuckpt.supervisor.metrics import Metrics
from gpuckpt.supervisor.mishaps import words_of
from gpuckpt.supervisor.model import CLOSING_S, RunState
from gpuckpt.supervisor.state import Run
from gpuckpt.supervisor.traffic import Expired, Full, Unavailable
from gpuckpt.supervisor.upstream import Upstream
from gpuckpt.supervisor.websocket import asks_for_websocket, is_handshake, tunnel

log = logging.getLogger("gpuckpt.gate")

HOP_BY_HOP = frozenset(
    "connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding upgrade expect".split()
)
_HOP_BY_HOP_RAW = frozenset(name.encode() for name in HOP_BY_HOP)
#: Longest wait that a client is told, in seconds: the OpenAI clients ignore a longer one.
RETRY_AFTER_MOST_S = 120
RETRY_AFTER_UNKNOWN_S = 10
METRICS_S = 2.0
SHORT_BYTES = 1 << 16
#: A client that takes nothing of its answer, or whose machine is gone, is given up after so long, in seconds: until then its request runs.
#: The kernel counts, and only while nothing at all is taken. Whether a silent client is there it asks after the second, then each third.
READER_S, PROBES_AFTER_S, PROBE_EACH_S = 300, 60, 15


class Gate:
    """Answers requests for one run."""

    def __init__(
        self,
        run: Run,
        upstream: Upstream,
        metrics: Metrics,
        *,
        keys: Sequence[str] = (),
        hidden: bool = False,
        websockets: Collection[str] | None = None,
        comments_s: float | None = None,
    ) -> None:
        self.run, self.upstream, self.metrics = run, upstream, metrics
        self._keys, self._hidden = [k.encode() for k in keys], hidden
        self._websockets = websockets  # the paths that have one; None: not known
        self._comments_s = comments_s
        self._last_metrics = b""
        self._runner: web.ServerRunner | None = None
        self._listening: asyncio.Server | None = None
        self.address: tuple[str, int] = ("", 0)

    async def listen(self, host: str, port: int) -> None:
        """Raises ``OSError`` where the port is taken."""
        server = web.Server(
            self.handle, handler_cancellation=True, access_log=None, auto_decompress=False, max_line_size=65536, max_field_size=65536
        )
        self._runner = web.ServerRunner(server, shutdown_timeout=CLOSING_S)
        await self._runner.setup()
        self._listening = await asyncio.get_running_loop().create_server(server, host or None, port, backlog=4096)
        for each in self._listening.sockets:  # what is accepted has this from here
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, READER_S * 1000)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBES_AFTER_S)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_EACH_S)
        self.address = self._listening.sockets[0].getsockname()[:2]

    async def close(self) -> None:
        if self._listening is not None:
            self._listening.close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await self._answer(request)
        except Exception as e:
            if request.writer.output_size:
                raise  # some of an answer is out: it is cut short
            log.exception("%s %s", request.method, request.path)
            return self._refuse(502, "gate-failed", f"the gate could not pass it on: {words_of(e)}")

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        target = paths.origin_form(request.raw_path)
        path = paths.plain(target.partition("?")[0])
        if path is None or request.method == hdrs.METH_CONNECT:
            return self._refuse(404, "not-found", "there is no such path")
        if request.method in ("GET", "HEAD") and path in ("/health", "/ready", "/awake", "/metrics"):
            return await self._own(path)
        if not paths.may_pass(path, hidden=self._hidden):
            return self._refuse(404, "not-found", f"there is no {path} here")
        upgrade = asks_for_websocket(request)
        if upgrade and self._websockets is not None and path not in self._websockets:
            return self._no_websocket(404, f"there is no WebSocket at {path}")
        if upgrade and not is_handshake(request):
            return self._no_websocket(400, "this is not the handshake of a WebSocket")
        if not paths.needs_gpu(request.method, path, websocket=upgrade):
            return await self._look(request, target)
        if not self._allowed(request):
            return self._refuse(401, "unauthorized", "the API key is missing or wrong", "invalid_request_error")
        held: HeldStream | None = None
        sent: Body | None = None
        try:
            self.run.traffic.check()  # who cannot come in is told before a body is read
            sent = await self._begun(request) if request.body_exists and not upgrade else None
            if self._comments_s is None or upgrade or self.run.traffic.is_open:
                begun = await self.run.traffic.enter()
            else:
                held = HeldStream(request, sent)
                begun = await self._enter_held(held, self._comments_s)
        except (Full, Expired, Unavailable, Stalled, RequestPayloadError, aiohttp.ClientError, OSError) as e:
            refusal = self._not_let_in(e)
            return await held.fail(refusal.text or "") if held is not None and held.begun else refusal
        try:
            return await (tunnel(request, self.upstream, target) if upgrade else self._forward(request, target, sent, held))
        except aiohttp.WSServerHandshakeError as e:
            status = e.status if e.status >= 400 else 502  # an answer that is none to a handshake, and must not look like success
            return self._no_websocket(status, f"the server refused the WebSocket with {e.status}: {e.message}")
        except (aiohttp.ClientError, OSError) as e:
            return self._stalled() if sent is not None and sent.stalled else self._unreachable(e)
        finally:
            self.run.traffic.leave(begun)

    async def _enter_held(self, held: HeldStream, every_s: float) -> float:
        place = asyncio.ensure_future(self.run.traffic.enter())
        try:
            await asyncio.sleep(0)  # if there is no place, that is known before the body is read
            if not place.done():
                await held.wait(place, every_s)
            return await place
        except BaseException:
            if place.done() and not place.cancelled() and place.exception() is None:
                self.run.traffic.leave(place.result())
            place.cancel()
            await asyncio.gather(place, return_exceptions=True)
            raise

    def _not_let_in(self, error: Exception) -> web.Response:
        traffic = self.run.traffic
        if isinstance(error, Stalled):
            return self._stalled()
        if isinstance(error, RequestPayloadError | aiohttp.ClientError | OSError):
            return self._refuse(400, "bad-request", f"the request's body cannot be read: {words_of(error)}")
        if isinstance(error, Full):
            words = f"{traffic.max_waiting} requests are waiting already, as many as may"
            return self._refuse(429, "too-many-waiting", words, "rate_limit_error", retry=True)
        if isinstance(error, Unavailable):
            ended = self.run.state is RunState.ENDED  # while it stops, another replica may be there: try again
            return self._refuse(502 if ended else 503, error.error.code, error.error.message, retry=not ended)
        why = next(iter(self.run.holds.values()), "")
        words = f"the model was not ready within {traffic.hold_s:g} s (it is {self.run.state}{f': {why}' if why else ''}); try again"
        return self._refuse(503, "waking", words, retry=True)

    def _stalled(self) -> web.Response:
        words = f"nothing more of the request's body came for {body.SILENT_S:g} s; what had come was not executed"
        response = self._refuse(408, "request-timeout", words, "invalid_request_error")
        response.force_close()
        return response

    # What the gate answers by itself.

    async def _own(self, path: str) -> web.StreamResponse:
        state = self.run.state
        if path == "/metrics":
            return web.Response(body=self.metrics.text() + await self._server_metrics(), content_type="text/plain", charset="utf-8")
        if path == "/awake":
            ok = state is RunState.AWAKE
        else:
            ok = state not in (RunState.STARTING, RunState.FAILED, RunState.STOPPING, RunState.ENDED)
            if state is RunState.AWAKE:
                ok = await self.upstream.healthy() or self.run.state is not RunState.AWAKE
        return web.json_response({"state": str(state)}, status=200 if ok else 503)

    async def _server_metrics(self) -> bytes:
        """The server's own, also while it is suspended; the last ones known where it does not answer."""
        with contextlib.suppress(Exception):
            status, body = await self.upstream.call("GET", "/metrics", within_s=METRICS_S)
            if status == 200:
                self._last_metrics = body
        return self._last_metrics

    def _refuse(self, status: int, code: str, words: str, kind: str = "", retry: bool = False) -> web.Response:
        self.metrics.answered.labels(code).inc()
        kind = kind or ("service_unavailable_error" if status >= 500 else "invalid_request_error")
        response = web.json_response({"error": {"message": words, "type": kind, "param": None, "code": code}}, status=status)
        if retry:
            response.headers[hdrs.RETRY_AFTER] = str(self._retry_after())
            response.headers["x-should-retry"] = "true"
        elif status >= 500:
            response.headers["x-should-retry"] = "false"
        return response

    def _no_websocket(self, status: int, words: str) -> web.Response:
        """What follows on this connection would not be read as a request: it ends."""
        response = self._refuse(status, "upgrade-refused", words)
        response.force_close()
        return response

    def _retry_after(self) -> int:
        seconds = math.ceil(self.run.resume_s) if self.run.resume_s else RETRY_AFTER_UNKNOWN_S
        return max(1, min(RETRY_AFTER_MOST_S, seconds))

    def _unreachable(self, error: Exception) -> web.Response:
        ended = f"; it is {self.run.state}" if self.run.state is not RunState.AWAKE else ""
        return self._refuse(502, "server-unreachable", f"the server did not answer: {words_of(error)}{ended}")

    def _allowed(self, request: web.BaseRequest) -> bool:
        """Whether the server would take its key. Asked before a request may wake it or take a place."""
        if not self._keys:
            return True
        scheme, _, given = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
        offered = given.encode("utf-8", "surrogateescape")
        return scheme.lower() == "bearer" and any([hmac.compare_digest(k, offered) for k in self._keys])  # noqa: C419 - all are compared, whichever fits

    # What the server answers.

    async def _look(self, request: web.BaseRequest, target: str) -> web.StreamResponse:
        """A request that needs no GPU: the server's front answers it, suspended or not."""
        if self.run.state is RunState.STARTING:
            return self._refuse(503, "starting", "the server is starting", retry=True)
        sent: Body | None = None
        try:
            sent = await self._begun(request) if request.body_exists else None
            return await self._forward(request, target, sent)
        except (Stalled, RequestPayloadError) as e:
            return self._not_let_in(e)
        except (aiohttp.ClientError, OSError) as e:
            return self._stalled() if sent is not None and sent.stalled else self._unreachable(e)

    @staticmethod
    async def _begun(request: web.BaseRequest) -> Body:
        sent = Body(request)
        await sent.begin()
        return sent

    async def _forward(
        self, request: web.BaseRequest, target: str, sent: Body | None, held: HeldStream | None = None
    ) -> web.StreamResponse:
        """Pass *request* on and its answer back. Raises only while nothing of an answer has been sent."""
        async with self._asked(request, target, sent) as answer:
            if held is not None and held.begun:
                return await self._fill(held, answer, request)
            nbytes = answer.content_length
            empty = request.method == hdrs.METH_HEAD or answer.status in (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED)
            if nbytes is not None and nbytes <= SHORT_BYTES and not empty:
                short = await answer.read()  # goes in one packet with its head
                return web.Response(status=answer.status, reason=answer.reason, headers=passed_on(answer.headers), body=short)
            response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=passed_on(answer.headers))
            await response.prepare(request)
            if empty:
                return response
            try:
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
            except (aiohttp.ClientError, OSError) as e:
                log.info("%s %s: cut short: %s", request.method, target, e)
                if request.transport is not None:
                    request.transport.abort()  # an answer that is cut short must not look whole
            return response

    def _asked(self, request: web.BaseRequest, target: str, sent: Body | None) -> AbstractAsyncContextManager[Answer]:
        connections = self.upstream.connections
        if connections is not None and (sent is None or sent.data is not None):
            return Exchange(connections, request.method, target, passed_on_raw(request), sent.data if sent is not None else None)
        url = URL(self.upstream.base + target, encoded=True)
        data = sent.to_send() if sent is not None else None
        return self.upstream.session.request(request.method, url, headers=passed_on(request.headers), data=data, allow_redirects=False)

    @staticmethod
    async def _fill(held: HeldStream, answer: Answer, request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await held.fill(answer)
        except (aiohttp.ClientError, OSError) as e:
            log.info("%s: cut short: %s", request.path, e)
            if request.transport is not None:
                request.transport.abort()
            return held.response


def passed_on(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """*headers* without those that belong to one connection."""
    drop = _of_the_connection(headers)
    return CIMultiDict((k, v) for k, v in headers.items() if k.lower() not in drop)


def passed_on_raw(request: web.BaseRequest) -> list[tuple[bytes, bytes]]:
    """The same of *request*, as they came, without the length of its body: whatever belongs to its connection, that is said anew."""
    drop = _HOP_BY_HOP_RAW
    if hdrs.CONNECTION in request.headers:
        drop = frozenset(name.encode("utf-8", "surrogateescape") for name in _of_the_connection(request.headers) - {"host"})
    found = [(name, value) for name, value in request.raw_headers if (low := name.lower()) not in drop and low != b"content-length"]
    return found if hdrs.HOST in request.headers else [(b"Host", b"vllm"), *found]


def _of_the_connection(headers: CIMultiDictProxy[str]) -> frozenset[str]:
    if hdrs.CONNECTION not in headers:
        return HOP_BY_HOP
    return HOP_BY_HOP | {name.strip().lower() for value in headers.getall(hdrs.CONNECTION) for name in value.split(",")}


async def announce(gate: Gate, host: str, port: int) -> None:
    """Listen, and say where; as soon as possible, so that clients are held and not refused while the server starts."""
    await gate.listen(host, port)
    log.info("listening on http://%s", where(gate.address))
