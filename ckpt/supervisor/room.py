"""What a run does while its resume finds no room on a GPU: it asks whoever it shares it with, and gives up once nobody wants it awake."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from gpuckpt import errors
from gpuckpt.supervisor.mishaps import words_of
from gpuckpt.supervisor.operate import Worker

log = logging.getLogger("gpuckpt.run")

POLL_S = 0.05


async def nothing_to_ask() -> None:
    """Of a run that shares with nobody: room comes by itself, or does not."""
    await asyncio.sleep(POLL_S)


class Finder:
    """Stands beside one resume. *worker* tells it where the resume is; use as an asynchronous context manager around that."""

    def __init__(self, unwanted: Callable[[], str], make_room: Callable[[], Awaitable[None]]) -> None:
        self._unwanted, self._make_room = unwanted, make_room
        self._short = asyncio.Event()
        self.waits = ""  # for what, if it ever had to
        self.worker = Worker(self._told)

    async def come_to_turn(self, turn: Callable[[], Awaitable[bool]] | None) -> None:
        """Return when nobody with whom it shares its GPUs has waited longer for them. Raises :class:`gpuckpt.errors.Leased` once
        nobody wants it awake."""
        while True:
            if why := self._unwanted():
                raise errors.Leased(f"not resumed: {why}", hint="the next request tries again; gpuckpt status NAME")
            if turn is None or await turn():
                return
            await asyncio.sleep(POLL_S)

    def _told(self, step: str, waits: str) -> None:
        if step == "room" and waits:
            self.waits = waits
            self._short.set()

    async def __aenter__(self) -> Finder:
        self._task = asyncio.create_task(self._find())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _find(self) -> None:
        while True:
            self._short.clear()  # an answer from now on: what was asked for before may have come
            await self._short.wait()
            asking = asyncio.ensure_future(self._make_room())
            try:
                while not asking.done():
                    if self._unwanted():
                        self.worker.interrupt()
                        return
                    await asyncio.wait({asking}, timeout=POLL_S)
                if error := asking.exception():
                    log.warning("asking for room: %s", words_of(error))
                    await asyncio.sleep(1.0)
            finally:
                asking.cancel()
