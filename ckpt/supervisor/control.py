"""The control socket of a run, both ends: ``gpuckpt suspend NAME`` and its like ask, the supervisor answers.

One JSON line each way, then the connection ends; whoever had a run held keeps it open until that shall end. Only the run's own user
and root are answered. The asking side imports nothing of the serving one, so that a command starts as fast as ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuckpt import errors
from gpuckpt.inspect import processes
from gpuckpt.inspect.mark import Mark
from gpuckpt.supervisor import places
from gpuckpt.supervisor.mishaps import known

if TYPE_CHECKING:
    from gpuckpt.model import Report

log = logging.getLogger("gpuckpt.run")

SCHEMA = 1
#: What each command takes: "seconds" and "text", "gpus" (names, or null for all), "seconds?" that may be left out or null.
COMMANDS: dict[str, dict[str, str]] = {
    "suspend": {"drain_s": "seconds?"},
    "resume": {},
    "status": {},
    "stop": {},
    "give-way": {"within_s": "seconds"},
    "hold": {"gpus": "gpus", "by": "text", "within_s": "seconds"},
    "to-disk": {"by": "text"},
}
#: How often a run that takes its time is asked how it is, and how long it may take to say so, in seconds.
LOOK_S = 5.0
ANSWER_S = 5.0
_LINE_BYTES = 1 << 20
_MOST_S = 1e9  # of a time that is asked for: what is longer is a mistake


def exists(name: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether there is, or was, a run of that name."""
    return places.is_name(name) and places.control_path(name, environ).exists()


def ask(
    name: str, command: str, *, timeout_s: float | None = None, told: Callable[[str], None] = lambda _: None, **options: Any
) -> dict[str, Any]:
    """The answer of the run *name* to *command*, as a document of ``--json``. Without *timeout_s* it is waited for as long as the run says,
    when it is asked now and then, how it is: *told* hears that, in words.

    Raises :class:`gpuckpt.errors.Usage` where there is no such run, :class:`gpuckpt.errors.Deadline` where it does not answer in time, and
    :class:`gpuckpt.errors.RunSilent` where it does not even say how it is.
    """
    path = places.control_path(name)
    with socket.socket(socket.AF_UNIX) as s:
        s.settimeout(ANSWER_S if timeout_s is None else timeout_s)
        try:
            _check_owner(path)
            s.connect(str(path))
            s.sendall(json.dumps({"schema": SCHEMA, "command": command, **options}).encode() + b"\n")
            data = _receive(s) if timeout_s is not None else _receive_at_last(s, name, told)
        except (TimeoutError, BlockingIOError):  # or so many wait for its answer that it takes no more
            raise silent(name, s, timeout_s) from None
        except PermissionError as e:
            raise errors.PermissionDenied(
                f"the run {name!r} belongs to somebody else: {e}", hint=f"sudo gpuckpt {command} {name}"
            ) from None
        except OSError as e:
            left, child = places.orphan(name), places.child_of(name)
            words = f"the run {name!r} has ended: its gpuckpt run is gone, and so is the command that it had started ({e.strerror or e})"
            raise errors.Usage(
                left or words,
                hint=f"gpuckpt resume {child}, gpuckpt suspend {child} or kill {child}"
                if left
                else "start it again by gpuckpt run; gpuckpt ps tells what is still on the GPUs",
            ) from None
    if not data:
        raise errors.RunNotReady(f"the run {name!r} ended before it answered", hint="see what it logged")
    answer: dict[str, Any] = json.loads(data)
    return answer


def _receive(s: socket.socket, data: bytes = b"") -> bytes:
    while not data.endswith(b"\n") and (more := s.recv(65536)):
        data += more
    return data


def _receive_at_last(s: socket.socket, name: str, told: Callable[[str], None]) -> bytes:
    s.settimeout(LOOK_S)
    while True:
        try:
            first = s.recv(65536)
        except TimeoutError:
            try:
                document = ask(name, "status", timeout_s=ANSWER_S)
            except errors.Deadline:
                raise silent(name, s, None) from None
            except errors.Usage:
                continue  # it has ended, which is seen here too
            run, error = document.get("run"), document["error"]
            told(f"it is {run['state']}, requests running: {run['requests_running']}" if run else error["message"] if error else "")
        else:
            s.settimeout(ANSWER_S)
            return _receive(s, first) if first else b""


def silent(name: str, s: socket.socket, timeout_s: float | None) -> errors.GpuckptError:
    """Words for a supervisor that has not answered within *timeout_s*, at the other end of *s* if that came so far; None: nor has it said
    how it is."""
    pid = 0
    with contextlib.suppress(OSError):
        pid, _ = processes.peer_of(s)
    pid = pid or places.supervisor_of(name)
    supervisor = processes.read(pid) if pid > 0 else None
    words, hint = "what was asked of it goes on", f"gpuckpt status {name}"
    if supervisor is not None and supervisor.stopped:
        words, hint = f"its supervisor (pid {pid}) is stopped, and does what it was asked when it goes on", f"kill -CONT {pid}"
    elif timeout_s is None:
        words = f"its supervisor (pid {pid or 'unknown'}) may still do what it was asked"
        hint = f"see what it logged; kill -9 {pid} ends it, and with it, but for --keep-child, what it has started" if pid else hint
    if timeout_s is None:
        words = f"the run {name!r} does not answer, nor say within {ANSWER_S:g} s how it is; {words}"
        return errors.RunSilent(words, hint=hint, pid=pid or None)
    return errors.Deadline(f"the run {name!r} did not answer within {timeout_s:g} s; {words}", hint=hint, pid=pid or None)


def _check_owner(path: Path) -> None:
    found = path.lstat()
    if found.st_uid not in (0, os.geteuid()) and os.geteuid() != 0:
        raise PermissionError(f"{path} is not ours")


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
