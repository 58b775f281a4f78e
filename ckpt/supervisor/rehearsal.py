"""One suspend and resume before a run is ready: what cannot be proven beforehand is tried while a loss costs only a start."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from gpuckpt import errors
from gpuckpt.model import Report
from gpuckpt.supervisor.holdings import Holdings
from gpuckpt.supervisor.model import Server
from gpuckpt.supervisor.operate import Worker
from gpuckpt.supervisor.probe import Probe

log = logging.getLogger("gpuckpt.run")

#: How long the restore of a rehearsal waits for room that it has just given up, in seconds.
ROOM_S = 30.0


class Rehearsal:
    """Of one run, which serves nobody yet. *woken* has its server wake up, and returns once it is healthy."""

    def __init__(self, holdings: Holdings, server: Server, probe: Probe | None, woken: Callable[[], Awaitable[None]]) -> None:
        self._holdings, self._server, self._probe, self._woken = holdings, server, probe, woken

    async def hold(self, wanted: bool) -> Report:
        """Learn the golden answers and, if *wanted*, rehearse.

        Where a suspend is refused the server serves on, never suspended, and the log says so. Raises for a server that was not the same
        after its resume.
        """
        if self._probe is not None:
            await self._probe.learn()
        if not wanted:
            return Report("rehearse", True, False)
        log.info("rehearsing: one suspend and resume before it is ready")
        begun = asyncio.get_running_loop().time()
        if not await self._down():
            return Report("rehearse", True, False)
        try:
            report = await self._holdings.resume(ROOM_S, Worker())
            await self._woken()
        finally:
            await self._holdings.let_go()
        if self._probe is not None:
            await self._probe.check()
        log.info("rehearsed in %.1f s", asyncio.get_running_loop().time() - begun)
        return report

    async def _down(self) -> bool:
        try:
            await self._holdings.check()
            await self._holdings.sleep(self._server)
            await self._holdings.suspend()
        except errors.GpuckptError as e:
            if self._holdings.down or e.exit_code in (3, 130, 143):
                raise
            log.warning("it cannot be suspended, and will not be: %s%s", e.message, f" (try: {e.hint})" if e.hint else "")
            await self._holdings.let_go()
            await self._woken()
            return False
        return True
