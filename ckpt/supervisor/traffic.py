"""Which requests run, which wait, and in what order they go: the door between the gate and the server.

Everything here happens in one event loop without an ``await`` between a look and the act that rests on it, so a request is either
counted as running before a suspend looks, or it finds the door closed.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from gpuckpt.errors import GpuckptError


class Full(Exception):
    """As many requests wait as may."""


class Expired(Exception):
    """The server was not awake within the time that a request is held."""


class Unavailable(Exception):
    """The server cannot be had; ``error`` says why."""

    def __init__(self, error: GpuckptError) -> None:
        super().__init__(error.message)
        self.error = error


class Traffic:
    """The requests that need the GPU. ``wanted`` is called whenever one finds the door closed."""

    def __init__(self, *, hold_s: float, max_waiting: int, wanted: Callable[[], None] = lambda: None) -> None:
        self.hold_s, self.max_waiting, self.wanted = hold_s, max_waiting, wanted
        self.running = 0
        self.last_end = time.monotonic()  # of the last request that ran, up to its last byte
        self.is_open = False
        self._waiting: deque[asyncio.Future[float]] = deque()
        self._begun: list[float] = []  # of those that run, the oldest first
        self._over: GpuckptError | None = None
        self._quiet = asyncio.Event()
        self._quiet.set()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def longest_s(self) -> float:
        """For how long the oldest of the requests that run has been running, in seconds."""
        return time.monotonic() - self._begun[0] if self._begun else 0.0

    async def enter(self) -> float:
        """Return when the request may go to the server, where it counts as running until :meth:`leave` is given what this returns.

        Raises :class:`Full` at once, :class:`Expired` after the time to hold, :class:`Unavailable` when waiting is in vain.
        """
        self.check()
        if self.is_open:
            return self._begin()
        place: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        self.wanted()
        try:
            await asyncio.wait({place}, timeout=self.hold_s)
        except asyncio.CancelledError:
            if place.done() and place.exception() is None:
                self.leave(place.result())  # let in at the very moment that its client left
            raise
        finally:
            if not place.done():
                self._waiting.remove(place)
        if not place.done():
            raise Expired
        return place.result()

    def check(self) -> None:
        """Raise what :meth:`enter` would raise at once."""
        if self._over is not None:
            raise Unavailable(self._over)
        if not self.is_open and len(self._waiting) >= self.max_waiting:
            raise Full

    def leave(self, begun: float) -> None:
        """The last byte of a request has gone, or its client has."""
        self.running -= 1
        self._begun.remove(begun)
        self.last_end = time.monotonic()
        if self.running == 0:
            self._quiet.set()

    def open(self) -> None:
        """Let all in that wait, in their order, and all that come."""
        self.is_open = True
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(self._begin())

    def close(self) -> None:
        """From now on requests wait."""
        self.is_open = False

    def fail(self, error: GpuckptError, *, for_good: bool = False) -> None:
        """Those that wait need not any longer; with *for_good* nor does anybody who comes."""
        self.is_open = False
        if for_good:
            self._over = error
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_exception(Unavailable(error))

    async def quiet(self, within_s: float | None = None) -> bool:
        """Wait until no request runs. False if that takes longer than *within_s*."""
        try:
            await asyncio.wait_for(self._quiet.wait(), within_s)
        except TimeoutError:
            return False
        return True

    def _begin(self) -> float:
        self.running += 1
        self._quiet.clear()
        self._begun.append(time.monotonic())
        return self._begun[-1]
