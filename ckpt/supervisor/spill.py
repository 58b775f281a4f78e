"""A suspended run leaves its host memory to another: its image is moved to disk (``--keep-in ram,DIR``).

That is a suspend of what is suspended already, by a worker beside the run's own. It touches nothing that anybody waits for: as soon as the
run is wanted awake, or stopped, it is called off, and the image is where it was, or on disk, whole in either case.
"""

from __future__ import annotations

import logging
import time

from gpuckpt import errors
from gpuckpt.model import Report
from gpuckpt.supervisor.model import RunState
from gpuckpt.supervisor.operate import Worker
from gpuckpt.supervisor.state import Run
from gpuckpt.words import size

log = logging.getLogger("gpuckpt.run")


class Spill:
    """Of one run; *directory* "": it keeps to host memory."""

    def __init__(self, run: Run, directory: str) -> None:
        self._run, self._directory = run, directory
        self._worker: Worker | None = None
        run.changed.append(self._changed)

    @property
    def movable_bytes(self) -> int:
        """How much host memory it would leave to others."""
        run = self._run
        ready = self._directory and run.state is RunState.SUSPENDED and run.holdings.down and self._worker is None
        return run.holdings.image_bytes if ready and not run.traffic.waiting else 0

    async def to_disk(self, by: str) -> Report:
        """Move the image, for the run *by*. Raises :class:`gpuckpt.errors.RunNotReady` where there is none to move now."""
        run = self._run
        if not self.movable_bytes:
            raise errors.RunNotReady(f"the run is {run.state}, and has nothing in host memory that it may move to disk now")
        begun, nbytes = time.monotonic(), run.holdings.image_bytes
        worker = self._worker = Worker()
        policy = run.policy
        try:
            report = await worker.run(
                "suspend", run.holdings.pids, timeout_s=policy.timeout_s, accept=policy.accept, keep_in=self._directory
            )
        except errors.ImageNotStored as e:
            log.warning("%s", e.message)
            self._moved(e.report)
            raise
        finally:
            await worker.finish()
            self._worker = None
        self._moved(report)
        log.info("moved %s to %s for the run %s, in %.2f s", size(nbytes), self._directory, by, time.monotonic() - begun)
        return report

    def _moved(self, report: Report | None) -> None:
        if report is not None and self._run.state is RunState.SUSPENDED:
            self._run.holdings.lies(report)

    def _changed(self, state: RunState) -> None:
        if self._worker is not None and state is not RunState.SUSPENDED:
            self._worker.interrupt()
