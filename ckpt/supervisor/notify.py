"""What systemd is told of a run whose unit has ``Type=notify``: ready, stopping, and its state in words."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

from gpuckpt.supervisor.model import RunState
from gpuckpt.supervisor.state import Run

#: How much longer an operation may take than systemd would wait, in seconds, and how often it is told so while that lasts.
EXTEND_S = 120
AGAIN_S = 30.0
_SLOW = (RunState.STARTING, RunState.SUSPENDING, RunState.RESUMING, RunState.STOPPING)
_EXTEND = f"EXTEND_TIMEOUT_USEC={EXTEND_S * 10**6}"


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


def still(what: str) -> None:
    """Tell that *what* goes on: to be called again within :data:`EXTEND_S`."""
    notify(f"STATUS={what}\n{_EXTEND}")


class Notifier:
    """Passes on the states of *run*, those that last again and again."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._ready = False
        still("starting")
        run.stand_by(self._go_on())

    def changed(self, state: RunState) -> None:
        lines = [f"STATUS={state}"]
        if state in (RunState.AWAKE, RunState.SUSPENDED) and not self._ready:  # suspended: it was adopted so, and wakes when it is wanted
            self._ready = True
            lines.append("READY=1")
        if state is RunState.STOPPING:
            lines.append("STOPPING=1")
        if state in _SLOW:
            lines.append(_EXTEND)
        notify("\n".join(lines))

    async def _go_on(self) -> None:
        while True:
            await asyncio.sleep(AGAIN_S)
            if self._run.state in _SLOW:
                still(self._run.state)
