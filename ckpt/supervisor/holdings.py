"""What the processes of a run hold, on their GPUs or in host memory, and the operations that move it, one at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from asyncio.subprocess import Process
from collections.abc import Collection

from gpuckpt import errors
from gpuckpt.errors import GpuckptError
from gpuckpt.model import Report
from gpuckpt.supervisor.budget import Budget
from gpuckpt.supervisor.model import HOST_MEMORY_HINT, Server
from gpuckpt.supervisor.operate import Worker, dismiss, held_bytes, ready
from gpuckpt.words import RAM

log = logging.getLogger("gpuckpt.run")

#: How often a suspend that finds no host memory has others make room for it: somebody else may be quicker to take that.
MAKE_ROOM = 2


class Holdings:
    """Of the tree of *child* (a pid).

    ``down`` says whether its GPU state may be elsewhere than on its GPUs. The GPUs of a resume are held until :meth:`let_go`.
    """

    def __init__(self, child: int, *, timeout_s: float | None, accept: Collection[str], keep_in: str = RAM, method: str = "auto") -> None:
        self._child, self._timeout_s, self._accept, self._keep_in, self._method = child, timeout_s, accept, keep_in, method
        self.budget = Budget()
        self.down = False
        self.holders: list[int] = []  # its CUDA processes when it was looked at last
        self.pids: list[int] = []  # that the last suspend took off their GPUs
        self.gpu_bytes: dict[str, int] = {}  # on each GPU while the server is awake; {} until that is known
        self.asleep_bytes: dict[str, int] = {}  # what of it the server takes by itself when it is woken
        self.host_bytes = 0  # in host memory while it is suspended, or is going to be
        self.disk_bytes = 0  # on disk while it is suspended
        self._slept_bytes = 0  # of these, what the server itself moved there when it went to sleep
        self.dropped_bytes = 0  # what the server gave up when it went to sleep, and kept nowhere
        self._needed_bytes = 0  # what the last suspend took, or would have taken
        self._worker: Worker | None = None
        self._ready: Process | None = None  # waits for the next suspend or resume

    async def look(self) -> None:
        """Learn what it holds, awake, and which of its processes do."""
        report = await self._run("look")
        self.gpu_bytes, self.holders = held_bytes(report), [p.pid for p in report.processes]

    async def check(self) -> None:
        """Raise what a suspend would be refused for in any case. Host memory is judged later: asleep, the server needs less."""
        self.gpu_bytes = held_bytes(await self._run("check", accept={*self._accept, "host-memory"}))
        if "host-memory" not in self._accept:
            await self.budget.check(self._needed_bytes)

    async def sleep(self, server: Server) -> None:
        """Have the server go to sleep, and note what that takes of the host's memory. It may keep it when it wakes."""
        before = self.budget.available_bytes()
        await server.sleep()
        taken = min(before - self.budget.available_bytes(), sum(self.gpu_bytes.values()))
        self._slept_bytes = max(self._slept_bytes, taken)

    @property
    def image_bytes(self) -> int:
        """Of ``host_bytes`` what lies in images."""
        return max(0, self.host_bytes - self._slept_bytes)

    @property
    def gone(self) -> bool:
        """Whether most of what it held awake was not on its GPUs when it was looked at last, though nothing is suspended."""
        return not self.down and 2 * sum(self.asleep_bytes.values()) > sum(self.gpu_bytes.values())

    async def suspend(self) -> Report:
        """Where host memory is short, other runs that may do so move theirs to disk first."""
        for _ in range(MAKE_ROOM):
            try:
                return await self._suspend()
            except errors.HostMemory:
                if not await self.budget.make_room(self._needed_bytes - self._slept_bytes, self._slept_bytes):
                    raise
        return await self._suspend()

    async def _suspend(self) -> Report:
        """An image that cannot be moved to disk stays in host memory: it is suspended all the same."""
        async with self.budget.deciding() as decided:

            def told(step: str, text: str) -> None:
                if step == "host-memory":
                    self.host_bytes = self._needed_bytes = int(text) + self._slept_bytes
                    decided()

            left = await self.budget.left(self._slept_bytes)
            try:
                report = await self._move("suspend", [self._child], worker=Worker(told), host_left=left)
            except errors.ImageNotStored as e:
                if e.report is None:
                    raise
                log.warning("%s", e.message)
                report = dataclasses.replace(e.report, ok=True, error=None, warnings=(*e.report.warnings, e.message))
            except GpuckptError as e:
                self.host_bytes = self.host_bytes if self.down else 0
                if isinstance(e, errors.HostMemory) and not e.hint.endswith(HOST_MEMORY_HINT):
                    e.hint = f"{e.hint}; or {HOST_MEMORY_HINT}"
                raise
        self._asleep(report)
        self.dropped_bytes = max(0, sum(self.asleep_bytes.values()) - self._slept_bytes)
        self.pids = [p.pid for p in report.processes]
        self.lies(report)
        self._needed_bytes = self.host_bytes
        return report

    def lies(self, report: Report) -> None:
        """Where its images are now."""
        self.host_bytes = sum(p.host_bytes for p in report.processes) + self._slept_bytes
        self.disk_bytes = sum(p.disk_bytes for p in report.processes)

    async def resume(self, wait_s: float, worker: Worker) -> Report:
        """Once each GPU has room for what the driver puts back and for what the server takes when it wakes up. Images on disk come by
        way of host memory: where that is short, other runs that may do so move theirs to disk first."""
        pids = self.pids or [self._child]
        try:
            report = await self._move("resume", pids, wait_s, worker)
        except errors.HostMemory:
            if not await self.budget.make_room(self.disk_bytes, whatever_the_limit=True):
                raise
            report = await self._move("resume", pids, wait_s, worker)
        self.host_bytes = self.disk_bytes = 0
        if gone := [p for p in report.processes if p.state == "gone"]:
            raise errors.Lost(f"pid {gone[0].pid} ({gone[0].name}) ended while it was suspended", pid=gone[0].pid, report=report)
        return report

    async def room(self, wait_s: float = 0.0, worker: Worker | None = None) -> Report:
        """Nothing to restore, but the server sleeps: hold its GPUs, once they have room for what it takes when it wakes up."""
        self._asleep(await self._run("look"))
        return await self._run("room", wait_s=wait_s, worker=worker)

    async def get_ready(self) -> None:
        """Start what the next suspend or resume will take, so that who then waits for it need not wait for that."""
        if self._ready is None or self._ready.returncode is not None:
            with contextlib.suppress(OSError):  # then it starts its own
                self._ready = await ready()

    async def close(self) -> None:
        """Nothing is moved any more."""
        await self.let_go()
        if self._ready is not None:
            await dismiss(self._ready)

    def interrupt(self) -> bool:
        """Have the operation under way go back. False if there is none."""
        if self._worker is None or not self._worker.busy:
            return False
        self._worker.interrupt()
        return True

    async def let_go(self) -> None:
        """End what holds the GPUs."""
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.finish()

    def _asleep(self, report: Report) -> None:
        left = held_bytes(report)
        self.asleep_bytes = {u: max(0, n - left.get(u, 0)) for u, n in self.gpu_bytes.items()}

    async def _move(
        self, command: str, pids: list[int], wait_s: float = 0.0, worker: Worker | None = None, host_left: tuple[int, str] | None = None
    ) -> Report:
        was, self.down = self.down, True
        try:
            report = await self._run(command, pids, self._accept, wait_s, worker, host_left)
        except GpuckptError as e:
            if e.exit_code != 3:
                self.down = was  # everything is as it was found
            raise
        self.down = command == "suspend"
        return report

    async def _run(
        self,
        command: str,
        pids: list[int] | None = None,
        accept: Collection[str] = (),
        wait_s: float = 0.0,
        worker: Worker | None = None,
        host_left: tuple[int, str] | None = None,
    ) -> Report:
        await self.let_go()
        self._worker = mine = worker or Worker()
        if command in ("suspend", "resume") and self._ready is not None and self._ready.returncode is None:
            mine.process, self._ready = self._ready, None
        try:
            return await mine.run(
                command,
                pids or [self._child],
                timeout_s=self._timeout_s,
                wait_s=wait_s,
                accept=accept,
                reserved=self.asleep_bytes if command in ("resume", "room") else {},
                host_left=host_left,
                keep_in=self._keep_in,
                method=self._method,
            )
        finally:
            if command in ("look", "check"):
                await self.let_go()
