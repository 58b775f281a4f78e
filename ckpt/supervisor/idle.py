"""The idle clock: suspends a run when no request has needed the GPU for long enough.

It counts from the moment the server became healthy or was resumed, or from the last byte of the last request, on a monotonic clock.
"""

from __future__ import annotations

import asyncio
import logging
import time

from gpuckpt import errors
from gpuckpt.supervisor.model import RunState
from gpuckpt.supervisor.state import Run

log = logging.getLogger("gpuckpt.run")

#: A suspend that fails is tried again after so many times the idle time, at most.
PATIENCE_MOST = 32


async def watch(run: Run, idle_s: float) -> None:
    """Suspend *run* whenever it has been idle for *idle_s*. Ends with the task."""
    patience = 1
    tried = 0.0
    while True:
        await run.until(RunState.AWAKE)
        await run.traffic.quiet()
        due = max(run.since + idle_s, run.traffic.last_end + idle_s, tried + idle_s * patience if patience > 1 else 0.0)
        if (delay := due - time.monotonic()) > 0:
            await asyncio.sleep(delay)
            continue  # somebody may have come and gone meanwhile
        if run.state is not RunState.AWAKE or run.traffic.running:
            continue
        try:
            await run.suspend("idle", 0.001)
            patience = 1
        except errors.RunNotReady:
            continue
        except errors.GpuckptError as e:
            tried = time.monotonic()
            patience = min(PATIENCE_MOST, patience * 2)
            log.warning("idle, but not suspended: %s; next try in %g s", e.message, idle_s * patience)
