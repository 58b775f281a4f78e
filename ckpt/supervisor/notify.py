"""What systemd is told of a run whose unit has ``Type=notify``: ready, stopping, and its state in words."""

from __future__ import annotations

import contextlib
import os
import socket

from gpuckpt.supervisor.model import RunState
from gpuckpt.supervisor.state import Run

#: How much longer an operation may take than systemd would wait, in seconds.
EXTEND_S = 120
_SLOW = (RunState.STARTING, RunState.STOPPING)


def notify(text: str) -> None:
    """Send *text* (lines of ``KEY=VALUE``) to the socket that ``NOTIFY_SOCKET`` names, if any. See sd_notify(3).

    Where nobody reads there it is lost: a run does not wait for whoever watches it.
    """
    path = os.environ.get("NOTIFY_SOCKET", "")
    if path[:1] not in ("/", "@"):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as s:
        s.connect("\0" + path[1:] if path.startswith("@") else path)
        s.send(text.encode())


class Notifier:
    """Passes on the states of *run*."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._ready = False
        notify(f"STATUS=starting\nEXTEND_TIMEOUT_USEC={EXTEND_S * 10**6}")

    def changed(self, state: RunState) -> None:
        lines = [f"STATUS={state}"]
        if state is RunState.AWAKE and not self._ready:
            self._ready = True
            lines.append("READY=1")
        if state is RunState.STOPPING:
            lines.append("STOPPING=1")
        if state in _SLOW:
            lines.append(f"EXTEND_TIMEOUT_USEC={EXTEND_S * 10**6}")
        notify("\n".join(lines))
