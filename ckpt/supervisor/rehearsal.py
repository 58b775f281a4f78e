"""What is done once before a run is ready: see what it holds, learn its golden answers, and one suspend and resume.

What cannot be proven beforehand is tried while a loss costs only a start.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from gpuckpt import errors
from gpuckpt.model import Report
from gpuckpt.supervisor.holdings import Holdings
from gpuckpt.supervisor.mishaps import known
from gpuckpt.supervisor.model import Server
from gpuckpt.supervisor.operate import Worker
from gpuckpt.supervisor.probe import Probe

log = logging.getLogger("gpuckpt.run")

#: How long a look at what it holds may take, in seconds: a driver that does not answer keeps nobody from being served.
LOOK_S = 30.0
#: How long the restore of a rehearsal waits for room that it has just given up, in seconds.
ROOM_S = 30.0
#: How long a server may take to answer that it is healthy after it was woken, and how often it is asked, in seconds.
HEALTHY_AGAIN_S = 60.0
HEALTH_POLL_S = 0.1


async def woken(server: Server, *, gone: bool = False) -> None:
    """Have it wake up, as :meth:`gpuckpt.supervisor.model.Server.wake` does; returns once it is healthy.

    Raises :class:`gpuckpt.errors.ServerRefused`.
    """
    await server.wake(gone=gone)
    until = time.monotonic() + HEALTHY_AGAIN_S
    while not await server.healthy():
        if time.monotonic() >= until:
            raise errors.ServerRefused(f"the server was not healthy {HEALTHY_AGAIN_S:.0f} s after it was woken")
        await asyncio.sleep(HEALTH_POLL_S)


class Rehearsal:
    """Of one run, which serves nobody yet. *over*: it is being stopped."""

    def __init__(self, holdings: Holdings, server: Server, probe: Probe | None, over: Callable[[], bool]) -> None:
        self._holdings, self._server, self._probe, self._over = holdings, server, probe, over

    async def hold(self, wanted: bool | None, *, probes: bool) -> Report:
        """See what it holds; learn the golden answers, if they will be asked for (*probes*: after each resume); and rehearse if *wanted*,
        or, where that is None, if several CUDA processes serve together.

        Where a suspend is refused the server serves on, never suspended, and the log says so. Raises for a server that was not the same
        after its resume.
        """
        several = await self._processes() > 1
        wanted = several if wanted is None else wanted
        if self._probe is not None and (wanted or probes):
            await self._probe.learn()
        if not wanted:
            return Report("rehearse", True, False)
        self._go_on()
        log.info("rehearsing: one suspend and resume before it is ready")
        begun = asyncio.get_running_loop().time()
        if not await self._down():
            return Report("rehearse", True, False)
        try:
            report = await self._holdings.resume(ROOM_S, Worker())
            await woken(self._server)
        finally:
            await self._holdings.let_go()
        if self._probe is not None:
            await self._probe.check()
        log.info("rehearsed in %.1f s", asyncio.get_running_loop().time() - begun)
        return report

    async def _processes(self) -> int:
        """How many CUDA processes it has; 0 where that is not known, or it holds nothing yet."""
        try:
            await asyncio.wait_for(self._holdings.look(), LOOK_S)
        except TimeoutError:
            log.warning("what it holds on its GPUs is not known: no answer within %g s", LOOK_S)
        except (errors.NoCudaState, errors.NoSuchProcess):
            pass  # not yet, or not any more
        except Exception as e:
            if (error := known(e)).exit_code in (130, 143):
                raise
            if not self._over():  # a command that is soon done takes the look along with it
                log.warning("what it holds on its GPUs is not known: %s", error.message)
        return len(self._holdings.holders)

    def _go_on(self) -> None:
        if self._over():
            raise errors.Interrupted("the run is being stopped")

    async def _down(self) -> bool:
        try:
            await self._holdings.check()
            self._go_on()
            await self._holdings.sleep(self._server)
            await self._holdings.suspend()
        except errors.GpuckptError as e:
            if self._holdings.down or e.exit_code in (3, 130, 143):
                raise
            log.warning("it cannot be suspended, and will not be: %s%s", e.message, f" (try: {e.hint})" if e.hint else "")
            if isinstance(e, errors.ServerRefused):  # it may sleep all the same
                await self._holdings.room(ROOM_S)
            await woken(self._server, gone=self._holdings.gone)
            await self._holdings.let_go()
            return False
        return True
