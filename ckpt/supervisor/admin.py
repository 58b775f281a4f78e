"""The admin listener: vLLM's ``/sleep``, ``/wake_up`` and ``/is_sleeping`` for routers, on an address and with a token of its own.

What they do is a suspend and a resume of the whole run; vLLM's own endpoints stay hidden behind the gate.
"""

from __future__ import annotations

import hmac
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import hdrs, web

from gpuckpt import errors
from gpuckpt.supervisor.model import CLOSING_S, RunState
from gpuckpt.supervisor.state import Run


def read_token(path: str) -> str:
    """The token in the file at *path*. Raises :class:`gpuckpt.errors.Usage` for a file that others may read, or an empty one."""
    try:
        mode, token = Path(path).stat().st_mode, Path(path).read_text().strip()
    except OSError as e:
        raise errors.Usage(f"--admin-token-file {path}: {e.strerror}") from e
    except UnicodeDecodeError:
        raise errors.Usage(f"--admin-token-file {path} is no text") from None
    if stat.S_IMODE(mode) & 0o077:
        raise errors.Usage(f"--admin-token-file {path}: others may read it", hint=f"chmod 600 {path}")
    if not token:
        raise errors.Usage(f"--admin-token-file {path} is empty")
    return token


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Admin:
    """Answers for *run* whoever has *token*."""

    def __init__(self, run: Run, token: str) -> None:
        self._run, self._token = run, token.encode()
        self._runner: web.AppRunner | None = None
        self.address: tuple[str, int] = ("", 0)

    async def listen(self, host: str, port: int) -> None:
        """Raises ``OSError`` where the port is taken."""

        @web.middleware
        async def checked(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._checked(request, handler)

        app = web.Application(middlewares=[checked])
        app.add_routes([web.post("/sleep", self._sleep), web.post("/wake_up", self._wake_up), web.get("/is_sleeping", self._is_sleeping)])
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=CLOSING_S)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        self.address = self._runner.addresses[0][:2]

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _checked(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get(hdrs.AUTHORIZATION, "").removeprefix("Bearer ").strip().encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, self._token):
            return _error(401, "unauthorized", "the admin token is missing or wrong")
        try:
            return await handler(request)
        except web.HTTPException as e:
            return _error(e.status, "not-found", f"there is no {request.method} {request.path} here")
        except errors.GpuckptError as e:
            return _error(503 if isinstance(e, errors.Deadline) else 409, e.code, e.message)

    async def _sleep(self, _: web.Request) -> web.StreamResponse:
        await self._run.suspend("command")
        return web.Response()

    async def _wake_up(self, _: web.Request) -> web.StreamResponse:
        await self._run.resume("command")
        return web.Response()

    async def _is_sleeping(self, _: web.Request) -> web.StreamResponse:
        return web.json_response({"is_sleeping": self._run.state is RunState.SUSPENDED})


def _error(status: int, code: str, words: str) -> web.Response:
    return web.json_response({"error": {"message": words, "type": "admin_error", "param": None, "code": code}}, status=status)
