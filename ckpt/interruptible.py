"""Signals that ask a command to stop: they are noted, and heard between its steps."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from types import FrameType


class Interruptible:
    """Notes signals while it is :meth:`interruptible`, and wakes who waits on :attr:`waker` by them."""

    def __init__(self) -> None:
        self._signals: list[int] = []
        self.waker, self._woken = socket.socketpair()

    @property
    def interruptions(self) -> Sequence[int]:
        """As in :class:`gpuckpt.world.World`; it grows."""
        return self._signals

    @contextlib.contextmanager
    def interruptible(self, *, restore: bool = False) -> Iterator[None]:
        """Turn SIGINT, SIGTERM and SIGHUP into :attr:`interruptions` (in the main thread; elsewhere signals are not ours).

        Afterwards a command ignores them until it exits: a signal that comes when all is done must not turn the exit status into
        "interrupted, as it was found". A program that lives on gets its handlers back (*restore*).
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(signum: int, _: FrameType | None) -> None:
            if not self.heeds(signum):
                return
            self._signals.append(signum)
            with contextlib.suppress(OSError):
                self._woken.send(b"x")

        before = {}
        for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(s) is not signal.SIG_IGN:
                before[s] = signal.signal(s, note)
        try:
            yield
        finally:
            for s, handler in before.items():
                signal.signal(s, handler if restore else signal.SIG_IGN)

    def heeds(self, signum: int) -> bool:  # noqa: ARG002
        """Whether a signal counts. Of a person a second one means: leave it."""
        return True

    def heard(self) -> None:
        """Who waited looks at the :attr:`interruptions` now; signals that come later wake them again."""
        with contextlib.suppress(OSError):
            self.waker.recv(64, socket.MSG_DONTWAIT)

    def close(self) -> None:
        self.waker.close()
        self._woken.close()
