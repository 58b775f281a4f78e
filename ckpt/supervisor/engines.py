"""Notices the death of a process that a server cannot do without, behind a front that goes on answering as if all were well."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

from gpuckpt.errors import GpuckptError
from gpuckpt.supervisor.model import RunState
from gpuckpt.supervisor.state import Run

log = logging.getLogger("gpuckpt.run")

#: How vLLM calls its engine and its workers on their command lines.
TITLE = b"VLLM::"
#: How long the command may take to end by itself after one of these has died, in seconds. vLLM mostly does.
GRACE_S = 5.0


class Engines:
    """Follows the processes of *run* by pidfd: those that call themselves an engine, and those that were suspended."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._followed: dict[int, int] = {}  # pid -> pidfd
        run.changed.append(self._changed)

    def close(self) -> None:
        for pid in list(self._followed):
            self._forget(pid)

    def _changed(self, state: RunState) -> None:
        if state is RunState.AWAKE:
            self.follow([p for p in self._run.child.tree() if _title(p).startswith(TITLE)])
        elif state is RunState.SUSPENDED:
            self.follow(self._run.holdings.pids)

    def follow(self, pids: list[int]) -> None:
        for pid in pids:
            if pid in self._followed or pid == self._run.child.pid:
                continue
            try:
                self._followed[pid] = os.pidfd_open(pid)
            except OSError:
                continue  # it has gone already: the next resume tells
            asyncio.get_running_loop().add_reader(self._followed[pid], self._died, pid)

    def _died(self, pid: int) -> None:
        self._forget(pid)
        if not self._run.over:
            log.error("pid %d, an engine of the server, has died", pid)
            self._run.stand_by(self._end(pid))

    async def _end(self, pid: int) -> None:
        await asyncio.wait({self._run.child.exited}, timeout=GRACE_S)
        if not self._run.over:
            self._run.give_up(GpuckptError(f"pid {pid}, an engine of the server, died, and the server went on without it"))

    def _forget(self, pid: int) -> None:
        fd = self._followed.pop(pid)
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)


def _title(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
