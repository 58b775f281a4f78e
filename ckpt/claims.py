"""Exclusive holds on processes and GPUs, by ``flock``: they need no file of ours, cross users, and end with their last holder."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpuckpt.errors import Busy
from gpuckpt.inspect import processes


@dataclass(slots=True)
class FileClaim:
    """Held on ``/proc/PID`` for a process and on a pidfd of it, on its device node for a GPU. It ends when all who have the descriptors
    have closed them: we, and the callers that we started."""

    fds: list[int] = field(default_factory=list)

    def release(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()


def take(names: Mapping[str, str], wait: Callable[[int, str], None]) -> FileClaim:
    """Lock every path of *names* (path -> what to call it) in this order. While one is taken *wait* is called with its descriptor
    and name, again and again; what *wait* raises ends it, with nothing held. A path that is not there needs no hold."""
    claim = FileClaim()
    try:
        for path, name in names.items():
            for fd in _opened(path):  # none: the process died, or there is no device node here
                claim.fds.append(fd)
                while not _locked(fd, fcntl.LOCK_EX):
                    wait(fd, name)
    except BaseException:
        claim.release()
        raise
    return claim


def taken(path: str) -> bool:
    """Whether somebody holds *path*. Asked with a lock that all who ask can have at once: they must not see one another."""
    fds = _opened(path)
    try:
        return not all(_locked(fd, fcntl.LOCK_SH) for fd in fds)
    finally:
        for fd in fds:
            os.close(fd)


def left_behind(path: str) -> bool | None:
    """Whether who took *path* has ended, and a caller of its holds on; None if nobody is seen here to have taken it."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        taker = holder(fd)
    finally:
        os.close(fd)
    return None if taker is None else processes.read(taker) is None


def busy(fd: int, name: str, describe: Callable[[int], str]) -> Busy:
    """Words for who holds *fd*'s file, which stands for *name*; *describe* words a pid."""
    taker = holder(fd)
    if taker is not None and processes.read(taker) is not None:
        what = f"{describe(taker)} is at work on {name}"
    else:
        taker, what = None, f"a driver call that an earlier gpuckpt began is still under way on {name}"
    hint = "wait for it, or give a longer --timeout (gpuckpt status shows what it does)"
    return Busy(f"{what}; nothing was touched by us", hint=hint, pid=taker)


def holder(fd: int) -> int | None:
    """The pid that took the lock on *fd*'s file, by ``/proc/locks``; it may have ended, and a caller of its hold on."""
    status = os.fstat(fd)
    key = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if "FLOCK" in words and "->" not in words and key in words:
                return int(words[words.index(key) - 1])
    return None


def _opened(path: str) -> list[int]:
    """Descriptors of what is locked for *path*. ``/proc`` of a container is another one than the host's; a pidfd is of the process itself,
    from Linux 6.9 on. Before, all pidfds are of one file."""
    try:
        fds = [os.open(path, os.O_RDONLY | os.O_CLOEXEC)]
    except OSError:
        return []
    number = path.removeprefix("/proc/")
    if number.isdecimal() and int(number) != os.getpid():
        with contextlib.suppress(OSError):
            fds.append(os.pidfd_open(int(number)))
            if os.fstat(fds[1]).st_ino == _own_inode():
                os.close(fds.pop())
    return fds


def _own_inode() -> int:
    fd = os.pidfd_open(os.getpid())
    try:
        return os.fstat(fd).st_ino
    finally:
        os.close(fd)


def _locked(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
