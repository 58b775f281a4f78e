"""The control socket of a run, from inside: the supervisor answers what :mod:`gpuckpt.supervisor.control` asks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuckpt import errors
from gpuckpt.inspect import processes
from gpuckpt.inspect.mark import Mark
from gpuckpt.supervisor.control import COMMANDS, SCHEMA
from gpuckpt.supervisor.mishaps import known

if TYPE_CHECKING:
    from gpuckpt.model import Report

_LINE_BYTES = 1 << 20
_MOST_S = 1e9  # of a time that is asked for: what is longer is a mistake


class Peer:
    """Whoever asked. ``then`` is done when it closes its end, and answered too; ``said`` is what it said last before that."""

    def __init__(self, pid: int, reader: asyncio.StreamReader) -> None:
        self.pid = pid
        self.said: dict[str, Any] = {}
        self.then: Callable[[], Awaitable[Report]] | None = None
        self._reader = reader

    async def left(self) -> None:
        """Wait until it has closed its end, or died."""
        with contextlib.suppress(OSError, ValueError, RecursionError):
            while line := await self._reader.readline():
                said = json.loads(line)
                self.said = said if isinstance(said, dict) else {}


class ControlServer:
    """Answers on the control socket, from before a run has a child until after its last: with what *answer* says, which may be changed."""

    def __init__(self, path: Path, answer: Callable[[dict[str, Any], Peer], Awaitable[dict[str, Any]]]) -> None:
        self._path, self.answer = path, answer
        self._server: asyncio.Server | None = None
        self._mark: Mark | None = None

    async def listen(self) -> None:
        """The directory is private already; the socket is too, for whoever copies it elsewhere. Again: where the last one was swept away;
        who had come to that one is answered. Raises ``OSError``."""
        await self.close()
        before = os.umask(0o177)
        try:
            self._server = await asyncio.start_unix_server(self._serve, str(self._path), limit=_LINE_BYTES)
        finally:
            os.umask(before)
        self._mark = Mark.of(self._path)

    @property
    def whole(self) -> bool:
        """Whether who looks for it at its path finds it."""
        return self._mark is not None and self._mark.there

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            sock: socket.socket = writer.get_extra_info("socket")
            line = await reader.readline()  # also of a stranger: closing on unread bytes would take the answer away
            pid, uid = processes.peer_of(sock)
            peer = Peer(pid, reader)
            if uid not in (0, os.geteuid()):
                error: errors.GpuckptError = errors.PermissionDenied(f"uid {uid} may not control this run", hint="sudo gpuckpt …")
                document = _failed("status", error)
            else:
                document = await self._document(line, peer)
            try:
                writer.write(json.dumps(document).encode() + b"\n")
                await writer.drain()
            finally:
                if peer.then is not None:
                    await peer.left()
                    document = await self._guarded("hold", lambda: _then(peer))
            if peer.then is not None:
                writer.write(json.dumps(document).encode() + b"\n")
                await writer.drain()
        except (OSError, ValueError, asyncio.LimitOverrunError):
            pass  # whoever asked has gone, or speaks something else
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _document(self, line: bytes, peer: Peer) -> dict[str, Any]:
        try:
            order = json.loads(line)
            command = order["command"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return _failed("status", errors.Usage("what was asked is not a command", hint="use gpuckpt of the same version"))
        if not isinstance(command, str) or command not in COMMANDS or order.get("schema") != SCHEMA:
            return _failed(str(command), errors.Usage(f"this run does not know the command {command!r}", hint="use gpuckpt of its version"))
        for name, kind in COMMANDS[command].items():
            if not (_fits(order[name], kind) if name in order else kind.endswith("?")):
                words = f"{command}: {name} is {order[name]!r:.40}, no {kind.strip('?')}" if name in order else f"{command} needs {name}"
                return _failed(command, errors.Usage(f"{words}; nothing was done", hint="use gpuckpt of its version"))
        return await self._guarded(command, lambda: self.answer(order, peer))

    @staticmethod
    async def _guarded(command: str, act: Callable[[], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
        """What *act* answers, or why there is nothing: whoever asked is told in any case."""
        try:
            return await act()
        except errors.GpuckptError as e:
            return _failed(command, e)
        except Exception as e:  # noqa: BLE001 - whoever asked is told
            return _failed(command, known(e))


async def _then(peer: Peer) -> dict[str, Any]:
    assert peer.then is not None
    return {**(await peer.then()).as_dict(), "acted": True}


def _fits(value: Any, kind: str) -> bool:
    if kind == "text":
        return isinstance(value, str)
    if kind == "gpus":
        return value is None or (isinstance(value, list) and all(isinstance(v, str) for v in value))
    if value is None:
        return kind == "seconds?"
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < _MOST_S


def _failed(command: str, error: errors.GpuckptError) -> dict[str, Any]:
    from gpuckpt.model import Report

    report = error.report or Report(command, False, bool(os.environ.get("GPUCKPT_SIMULATE")), error=error.as_dict())
    return {**report.as_dict(), "acted": error.report is not None}
