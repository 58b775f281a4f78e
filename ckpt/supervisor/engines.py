"""Notices the death of a process that a server cannot do without, behind a front that goes on answering as if all were well.

Those are vLLM's engines and workers, by their titles; the CUDA processes that there were when the server became healthy, whatever it is;
and, while it is suspended, each that is. A helper that computes for a moment later is none of them. One that ends with 0 meant to, and one
in whose place its parent starts another at once is not missed.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gpuckpt.errors import GpuckptError
from gpuckpt.inspect import processes
from gpuckpt.model import ProcessId
from gpuckpt.supervisor.model import RunState
from gpuckpt.supervisor.state import Run

log = logging.getLogger("gpuckpt.run")

#: How vLLM calls its engine and its workers on their command lines.
TITLE = b"VLLM::"
#: How long the command may take to end by itself after one of these has died, or to start another, in seconds. vLLM mostly ends.
GRACE_S = 5.0
_PIDFD_GET_INFO, _PIDFD_INFO_BYTES, _PIDFD_INFO_EXIT = 0xC040FF0B, 64, 1 << 3  # linux/pidfd.h, from Linux 6.15 on


@dataclass(frozen=True)
class _Followed:
    pid: int
    pidfd: int
    parent: int
    program: str  # its executable
    titled: bool  # vLLM calls it an engine or a worker

    @property
    def name(self) -> str:
        return f"pid {self.pid}, {'an engine' if self.titled else 'a CUDA process'} of the server,"


class Engines:
    """Follows such processes of *run* by pidfd."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._followed: dict[int, _Followed] = {}
        self._own: set[int] | None = None  # those that it had when it became healthy; None: it never was
        run.changed.append(self._changed)

    def close(self) -> None:
        for pid in list(self._followed):
            self._forget(pid)

    def kill(self) -> None:
        """End those that are followed: nobody else will."""
        for one in self._followed.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(one.pidfd, signal.SIGKILL)

    def _changed(self, state: RunState) -> None:
        if state is RunState.AWAKE:
            tree = {p.pid: p for p in self._run.child.tree()}
            if self._own is None:
                self._own = set(self._run.holdings.holders)
            self._own = {p for p in tree if p in self._own or _title(p).startswith(TITLE)}  # who has ended leaves its pid to others
            for pid in self._followed.keys() - self._own:
                self._forget(pid)
            self.follow(tree[pid] for pid in self._own)
        elif state is RunState.SUSPENDED:
            self.follow(proc.id for pid in self._run.holdings.pids if (proc := processes.read(pid)) is not None)

    def follow(self, found: Iterable[ProcessId]) -> None:
        """Notice the death of those who were *found*, if they still live: a pid that somebody else has by now is not followed."""
        for pid, process in {p.pid: p for p in found}.items():
            if pid in self._followed or pid == self._run.child.pid:  # the command's own end is told by its keeper
                continue
            try:
                pidfd = os.pidfd_open(pid)
            except OSError:
                continue  # it has gone already: the next resume tells
            proc = processes.read(pid)
            if proc is None or proc.id != process:
                os.close(pidfd)
                continue
            program = ""
            with contextlib.suppress(OSError):
                program = os.readlink(f"/proc/{pid}/exe")
            self._followed[pid] = _Followed(pid, pidfd, proc.ppid, program, _title(pid).startswith(TITLE))
            asyncio.get_running_loop().add_reader(pidfd, self._died, pid)

    def _died(self, pid: int) -> None:
        one = self._followed[pid]
        status = exit_status(one.pidfd, pid)
        self._forget(pid)
        if self._own is not None:
            self._own.discard(pid)
        if self._run.over:
            return
        if status == 0 and not one.titled and not self._run.holdings.down:
            log.info("%s ended with 0", one.name)
            return
        log.error("%s has died%s", one.name, _words(status))
        self._run.stand_by(self._end(one, status, time.clock_gettime(time.CLOCK_BOOTTIME)))

    async def _end(self, one: _Followed, status: int | None, died: float) -> None:
        await asyncio.wait({self._run.child.exited}, timeout=GRACE_S)
        if self._run.over:
            return
        if not self._run.holdings.down and (others := self._instead_of(one, died)):
            log.warning("in the place of pid %d the server has started pid %s", one.pid, ", ".join(map(str, others)))
            self._own = (self._own or set()) | {p.pid for p in others}
            self.follow(others)
            return
        self._run.give_up(GpuckptError(f"{one.name} died{_words(status)}, and the server went on without it"))

    def _instead_of(self, one: _Followed, died: float) -> list[ProcessId]:
        """What its parent has started since it *died* (seconds since boot), of the same program."""
        since = died * os.sysconf("SC_CLK_TCK") - 1
        found = []
        for process in self._run.child.tree():
            proc = processes.read(process.pid)
            if proc is not None and proc.ppid == one.parent and proc.start_ticks >= since:
                with contextlib.suppress(OSError):
                    found += [process] if os.readlink(f"/proc/{process.pid}/exe") == one.program else []
        return found

    def _forget(self, pid: int) -> None:
        pidfd = self._followed.pop(pid).pidfd
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)


def exit_status(pidfd: int, pid: int) -> int | None:
    """With what a process that has ended did so, -N for signal N; None where that cannot be known: it is another's child, which has
    reaped it, and before Linux 6.15 nothing is left of it then."""
    waited: int | None = None
    with contextlib.suppress(OSError, ValueError, IndexError):  # not reaped yet: proc_pid_stat(5), exit_code
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        waited = int(stat[49]) if stat[0] == "Z" else None
    if waited is None:
        with contextlib.suppress(OSError):
            info = bytearray(struct.pack("=Q", _PIDFD_INFO_EXIT).ljust(_PIDFD_INFO_BYTES, b"\0"))
            fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
            mask, *_, code = struct.unpack("=QQ11Ii", info)
            waited = code if mask & _PIDFD_INFO_EXIT else None
    return None if waited is None else os.waitstatus_to_exitcode(waited)


def _words(status: int | None) -> str:
    if status is None:
        return ""
    return f" of {signal.Signals(-status).name}" if -status in set(signal.Signals) else f" with {status}"


def _title(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
