"""A run that has no child, since it waits to start, or its command has ended: it answers, and can be told to end, all the same."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Any, TypeVar

from gpuckpt import errors
from gpuckpt.model import Report
from gpuckpt.supervisor.answering import Peer

T = TypeVar("T")


class Childless:
    """What it answers on its control socket meanwhile. *signals* are those that the run gets; those in *ending* tell it to end."""

    def __init__(self, signals: asyncio.Queue[int], ending: Collection[int]) -> None:
        self._signals, self._ending = signals, ending
        self._told = asyncio.Event()
        self.words: Callable[[], str] = lambda: "the run is starting"

    @property
    def told_to_stop(self) -> bool:
        """By ``gpuckpt stop``."""
        return self._told.is_set()

    async def answer(self, order: dict[str, Any], _: Peer) -> dict[str, Any]:
        match order["command"]:
            case "stop":
                self._told.set()
                return {**Report("stop", True, False).as_dict(), "acted": True}
            case "hold":  # it is on no GPU
                return {**Report("hold", True, False, details={"held": False}).as_dict(), "acted": True}
            case _:
                raise errors.RunNotReady(self.words(), hint="gpuckpt stop NAME")

    async def told_to_end(self, within_s: float) -> str:
        """Wait for *within_s* seconds. What told it to end, at once, in words; "" if nothing did."""
        told: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._ending_signal()), asyncio.ensure_future(self._told.wait())]
        try:
            await asyncio.wait(told, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
            by_signal, by_command = told
            return f"signal {by_signal.result()}" if by_signal.done() else "gpuckpt stop" if by_command.done() else ""
        finally:
            for task in told:
                task.cancel()
            await asyncio.gather(*told, return_exceptions=True)

    async def until_again(self, code: int, within_s: float) -> bool:
        """Wait before the command, which ended with *code*, is started again. True if it shall not be."""
        until = time.monotonic() + within_s
        self.words = lambda: f"the command ended with {code}, and is started again in {max(0.0, until - time.monotonic()):.0f} s"
        return bool(await self.told_to_end(within_s))

    async def unless_told_to_end(self, waiting: Awaitable[T], every_s: float, tell: Callable[[], None]) -> T:
        """What *waiting* gives; *tell* is called each *every_s* seconds. Raises :class:`gpuckpt.errors.CannotStart` when told to end."""
        self.words = lambda: "the run waits for its GPU, and has started nothing yet"
        task = asyncio.ensure_future(waiting)
        while True:
            tell()
            told = asyncio.ensure_future(self.told_to_end(every_s))
            await asyncio.wait({task, told}, return_when=asyncio.FIRST_COMPLETED)
            if not told.done():
                told.cancel()
                await asyncio.gather(told, return_exceptions=True)
                return task.result()
            if why := told.result():
                task.cancel()
                error = errors.CannotStart(f"told to end by {why} while it waited for its GPU; nothing was started")
                error.status = 128 + int(why.split()[-1]) if why.startswith("signal") else 128 + 15
                raise error

    async def _ending_signal(self) -> int:
        while (signum := await self._signals.get()) not in self._ending:
            pass
        return signum
