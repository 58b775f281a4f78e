"""The control socket of a run, from outside: ``gpuckpt suspend NAME`` and its like ask, :mod:`gpuckpt.supervisor.answering` answers.

One JSON line each way, then the connection ends; whoever had a run held keeps it open until that shall end. Only the run's own user
and root are answered. Nothing of the answering side is imported: each ``gpuckpt suspend PID`` comes by here.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpuckpt import errors
from gpuckpt.inspect import processes
from gpuckpt.supervisor import places

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
