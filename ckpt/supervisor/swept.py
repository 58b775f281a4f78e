"""Files by which runs find each other, and what holds when they are swept away while a run lives.

A user logs out, and systemd removes ``/run/user/UID``; a cleaner comes to ``/tmp``. Whoever holds a name or listens looks now and then
whether what others look for is still there, and makes it anew. Meanwhile a name stays taken: a lock on a file that was deleted is found
through ``/proc``, by whoever wants that name next.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpuckpt import claims, errors
from gpuckpt.inspect.mark import Mark

#: How often whoever holds something looks whether it is still there, in seconds.
LOOK_S = 1.0
_POLL_S = 0.05
_FACTS_BYTES = 1 << 20


def private(directory: Path) -> Path:
    """*directory*, there, ours, and closed to others. Raises :class:`gpuckpt.errors.PermissionDenied` for anything else at its path,
    and where it cannot be made."""
    try:
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700, parents=True)
        found = directory.lstat()
    except OSError as e:
        raise errors.PermissionDenied(
            f"{directory}, where runs have their sockets, cannot be made ({e.strerror or e}); nothing was started",
            hint="log in again, which makes /run/user/UID, or set GPUCKPT_RUNTIME_DIR to another directory",
        ) from None
    if not _ours(found):
        raise errors.PermissionDenied(
            f"{directory} is not a directory of ours; nothing was started", hint="remove it, or set GPUCKPT_RUNTIME_DIR to another one"
        )
    if found.st_mode & 0o077:
        directory.chmod(0o700)
    return directory


def is_private(directory: Path) -> bool:
    """Whether *directory* is there, and what lies in it may be believed."""
    try:
        return _ours(directory.lstat())
    except OSError:
        return False


def _ours(found: os.stat_result) -> bool:
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


class Way:
    """To the socket at *path*, held by a descriptor (``O_PATH``), by which it is reached also where its path is gone. *fd*: that of another
    process, which has seen it there before."""

    def __init__(self, path: Path, fd: int | None = None) -> None:
        self.path, self.fd = path, fd
        self._mark: Mark | None = None

    def look(self) -> None:
        """Hold on to what lies at the path now; where nothing does that can be trusted, to what lay there last."""
        with contextlib.suppress(OSError):
            mark = Mark.of(self.path)
            if mark != self._mark and is_private(self.path.parent):
                fd = os.open(self.path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
                self.forget()
                self._mark, self.fd = mark, fd

    def forget(self) -> None:
        """It is not reached any more by a path that is gone."""
        fd, self.fd, self._mark = self.fd, None, None
        if fd is not None:
            os.close(fd)


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lock that was wanted: the pid that took it, if it can be seen, and what its file says."""

    pid: int | None
    text: str

    @classmethod
    def of(cls, fd: int) -> Holder:
        return cls(claims.holder(fd), os.pread(fd, _FACTS_BYTES, 0).decode(errors="replace"))


class Hold:
    """A ``flock`` on the file at *path*, for as long as any process has its descriptors. The first is kept, should its file be swept away,
    for all who had it before; the last is of the file that lies there now."""

    def __init__(self, path: Path, fds: list[int] | None = None) -> None:
        """*fds*: of a hold that another process has handed on."""
        self.path = path
        self.fds = fds or []

    def take(self, until: float) -> Holder | None:
        """Hold it; or, where that was not to be had *until* then (by the monotonic clock), nothing, and return who has it."""
        while True:
            fd = self._open()
            try:
                if (holder := lock(fd, until)) is None:
                    holder = self._elsewhere(until, fd)
                if holder is not None:
                    return holder
                if self._is(fd):
                    self.fds, fd = [fd], -1
                    return None
            finally:
                if fd >= 0:
                    os.close(fd)

    def _elsewhere(self, until: float, fd: int) -> Holder | None:
        """Who holds a file that was swept away from here. While that is waited for *fd* is let go: whoever it is may make its file anew."""
        for other in deleted(self.path):
            try:
                if lock(other) is None:
                    continue
                fcntl.flock(fd, fcntl.LOCK_UN)
                if (holder := lock(other, until) or lock(fd, until)) is not None:
                    return holder
            finally:
                os.close(other)
        return None

    @property
    def whole(self) -> bool:
        """Whether who looks for it at its path finds it."""
        return self._is(self.fds[-1])

    def again(self) -> None:
        """Hold the file that lies at its path now too, with what the last one says. Raises ``OSError`` where that cannot be, now."""
        fd = self._open()
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write(fd, os.pread(self.fds[-1], _FACTS_BYTES, 0))
        except OSError:
            os.close(fd)
            raise
        for old in self.fds[1:]:
            os.close(old)
        self.fds[1:] = [fd]

    def write(self, text: str) -> None:
        """What its file says from now on."""
        for fd in self.fds:
            _write(fd, text.encode())

    def read(self) -> str:
        return os.pread(self.fds[-1], _FACTS_BYTES, 0).decode(errors="replace")

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds = []

    def _open(self) -> int:
        return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def _is(self, fd: int) -> bool:
        found = os.fstat(fd)
        return Mark(self.path, found.st_dev, found.st_ino).there


def deleted(path: Path) -> Iterator[int]:
    """A descriptor, for the caller to close, of each file that a process of ours has open and that lay at *path*, before another did.

    A process in another container, which has its own file at a path of that name, is told by its seeing another directory there.
    """
    for pid in (int(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) != os.getpid()):
        with contextlib.suppress(OSError):  # it has ended, or we may not look
            if os.stat(f"/proc/{pid}").st_uid != os.geteuid():
                continue
            for number in os.listdir(f"/proc/{pid}/fd"):
                if (fd := _lay_at(path, pid, number)) is not None:
                    yield fd


def _lay_at(path: Path, pid: int, number: str) -> int | None:
    link = f"/proc/{pid}/fd/{number}"
    try:
        name = os.readlink(link).removesuffix(" (deleted)")
        # Of what lay on a file system that has been taken away, the kernel tells the end of the path alone.
        if not name.endswith(f"/{path.name}") or not str(path).endswith(name):
            return None
        found = os.stat(link)
        if Mark(path, found.st_dev, found.st_ino).there:
            return None
        if not os.path.samestat(os.stat(f"/proc/{pid}/root{path.parent}"), os.stat(path.parent)):
            return None
        return os.open(link, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None


def lock(fd: int, until: float = 0.0) -> Holder | None:
    """Lock *fd*; who has it, where that was not to be had *until* then, or at once."""
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return Holder.of(fd)
            time.sleep(_POLL_S)
        else:
            return None


def _write(fd: int, data: bytes) -> None:
    os.pwrite(fd, data.ljust(os.fstat(fd).st_size), 0)
