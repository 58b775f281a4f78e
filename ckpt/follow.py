"""Follows a program and all that it starts, and has memory kept ready in each of its processes that uses a GPU.

A process of its own (``python -m gpuckpt.follow``), since `gpuckpt exec` becomes the program: it ends with that, and holds nothing of it.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from gpuckpt import early, errors
from gpuckpt.image import reserve
from gpuckpt.image.keeper import Unanswered
from gpuckpt.image.page import Unavailable
from gpuckpt.inspect import host, processes
from gpuckpt.model import MIB, ProcessId

#: Between two looks, in seconds: at first, then ever longer.
FIRST_S, POLL_S, LONGER = 0.1, 3.0, 1.2
#: After this long memory that could not be had is asked for again, in seconds.
AGAIN_S = 60.0
#: So much stays when memory gets short: none means that somebody gave it back and wants none.
LEAST_BYTES = 2 * MIB

Held = Callable[[], Mapping[int, Mapping[str, int | None]]]


class Follower:
    """*nbytes* for each process, None for what each holds on its GPUs (*held*)."""

    def __init__(self, root: ProcessId, nbytes: int | None, held: Held, files: Path = host.ROOT) -> None:
        self._root, self._nbytes, self._held, self._files = root, nbytes, held, files
        self._served: set[ProcessId] = set()
        self._before: dict[ProcessId, int] = {}
        self._not_before: dict[ProcessId, float] = {}

    def look(self) -> bool:
        """Order what is missing. Returns whether the program lives."""
        if not processes.is_same(self._root):
            return False
        held = self._held() if self._nbytes is None else {}
        for process in family(self._root):
            with contextlib.suppress(Unavailable, Unanswered, OSError):
                self._serve(process, held.get(process.pid, {}))
        return True

    def _serve(self, process: ProcessId, held: Mapping[str, int | None]) -> None:
        now = reserve.look(process)
        if now.taken or time.monotonic() < self._not_before.get(process, 0.0):
            return
        if process in self._served and not now.wanted:
            return  # given back: that was meant
        if now.ready > LEAST_BYTES and (too_much := reserve.too_much(process, self._files)):
            self._not_before[process] = time.monotonic() + AGAIN_S
            reserve.order(process, max(LEAST_BYTES, now.ready - too_much), auto=now.auto, root=self._files)
            return
        wanted = max(self._wanted(process, now, held), now.wanted)
        if wanted <= now.ready:
            return
        outcome = reserve.order(process, wanted, auto=self._nbytes is None, root=self._files, goes_on=lambda: processes.is_same(self._root))
        if outcome.ready:
            self._served.add(process)
        if outcome.why:
            self._not_before[process] = time.monotonic() + AGAIN_S

    def _wanted(self, process: ProcessId, now: reserve.Reserve, held: Mapping[str, int | None]) -> int:
        """Of what it holds on its GPUs, once that has not changed between two looks; after an image, what that took is known better."""
        if self._nbytes is not None:
            return self._nbytes
        nbytes = reserve.image_bytes(held)
        before, self._before[process] = self._before.get(process), nbytes
        return nbytes if nbytes == before and not now.returned else 0


def family(root: ProcessId) -> list[ProcessId]:
    """*root*, if it lives, and all that descends from it now."""
    below = processes.below(root.pid)
    return [root, *below] if processes.is_same(root) else below


def ready_bytes(root: int) -> int:
    """Memory that is ready for the next images of the program *root* and all that descends from it."""
    found = processes.read(root)
    return sum(reserve.ready_bytes(p) for p in family(found.id)) if found else 0


def start(nbytes: int | None, environ: Mapping[str, str] = os.environ) -> None:
    """Follow this very process from now on, and what it becomes. No child of it that it would ever hear of; call it while there is one
    thread. Never raises: without it no memory is kept ready."""
    us = processes.read(os.getpid())
    if us is None:
        return
    if us.pid == 1:
        _start_unheard([str(us.pid), str(us.start_ticks), reserve.AUTO if nbytes is None else str(nbytes)])
        return
    words = [
        sys.executable,
        "-P",
        "-m",
        "gpuckpt.follow",
        str(us.pid),
        str(us.start_ticks),
        reserve.AUTO if nbytes is None else str(nbytes),
    ]
    with contextlib.suppress(OSError):
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            return
        try:
            os.setsid()
            if os.fork() == 0:
                null = os.open(os.devnull, os.O_RDWR)
                for fd in (0, 1, 2):
                    os.dup2(null, fd)
                os.closerange(3, 1 << 16)
                os.execve(sys.executable, words, dict(environ))  # noqa: S606
        finally:
            os._exit(0)


def _start_unheard(words: list[str]) -> None:
    """From the first process of a pid namespace, which becomes the parent of all who lose theirs. A child that was made without a signal
    for its end is none that a wait finds, as long as it executes no other program."""
    import ctypes  # needed here alone

    number = {"x86_64": 56, "aarch64": 220}.get(os.uname().machine)
    if number is None or ctypes.CDLL(None).syscall(number, 0, 0, 0, 0, 0) != 0:
        return
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        os.closerange(3, 1 << 16)
        main(*words)
    finally:
        os._exit(0)


def main(pid: str, start_ticks: str, amount: str) -> None:
    os.chdir("/")
    root = ProcessId(int(pid), int(start_ticks))
    found = early.devices()

    def held() -> Mapping[int, Mapping[str, int | None]]:
        try:
            return found.processes()
        except errors.GpuckptError:
            return {}

    follower = Follower(root, None if amount == reserve.AUTO else int(amount), held)
    try:
        ends = os.pidfd_open(root.pid)
    except OSError:
        return
    poll = select.poll()
    poll.register(ends, select.POLLIN)
    pause_s = FIRST_S
    while follower.look() and not poll.poll(pause_s * 1000):
        pause_s = min(POLL_S, pause_s * LONGER)


if __name__ == "__main__":
    main(*sys.argv[1:])
