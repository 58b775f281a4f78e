"""The keeper: a thread that the preload library has in a checkpointed process, which gives pages back, gets them anew, and holds a file.

Requests are written into the library's page and numbered, by one gpuckpt at a time; a byte into the keeper's pipe wakes it. It answers in
the page. A request that is not answered in time may still be carried out later, when the process goes on after a stop; ``settle``
excludes that.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from gpuckpt.image import page
from gpuckpt.image.page import Unavailable
from gpuckpt.model import ProcessId

#: How long the keeper may take for an answer that is no work, in seconds. It takes well under a millisecond; a stopped process for ever.
ANSWER_S = 5.0
#: How long for one range of pages: the slowest rate of getting memory that was measured is 1.9 GiB/s, and a range is 1 GiB.
RANGE_S = 60.0


class Request(IntEnum):
    """As in _preload.h."""

    END = 1
    HOLD = 2
    LET_GO = 3
    DROP = 4
    FILL = 5
    LOADED = 6
    NONE = 7
    RESERVE = 8


class Unanswered(Exception):
    """The keeper did not answer in time."""


@dataclass(frozen=True, slots=True)
class Keeper:
    """The keeper of *process*. ``tid`` is its number here, ``memory`` the process's memory, opened, with the page at ``at``."""

    process: ProcessId
    tid: int
    memory: int
    at: int

    @property
    def dropped(self) -> bool:
        """Whether pages were given back whose content has not all returned."""
        return bool(self._words()[6])

    @property
    def holds(self) -> Path | None:
        """A path at which the file that it holds can be opened, by name or not; None if it holds none."""
        held = self._words()[3]
        path = Path(f"/proc/{self.process.pid}/task/{self.tid}/fd/{held}")
        with contextlib.suppress(OSError):
            if held >= 0 and stat.S_ISREG(path.stat().st_mode):
                return path
        return None

    def drop(self, begin: int, end: int) -> None:
        """Give back the pages from *begin* to *end*. Raises ``OSError`` as madvise does: the pages are there then."""
        self._ask(Request.DROP, begin, end, within_s=RANGE_S)

    def fill(self, begin: int, end: int) -> None:
        """Get pages for this range. Raises ``OSError`` if there are not enough."""
        self._ask(Request.FILL, begin, end, within_s=RANGE_S)

    def loaded(self) -> None:
        """All content is there again."""
        self._ask(Request.LOADED)

    def settle(self) -> None:
        """Afterwards no earlier request can act any more."""
        self._ask(Request.NONE)

    def hold(self, path: Path, is_file: os.stat_result) -> bool:
        """Have it open *path* and hold it: a file held needs no name, and ends with the process. False where what it opened
        is not *is_file*, or it may not: a container sees other files, and other users' directories are closed."""
        encoded = os.fsencode(path)
        if len(encoded) >= page.PATH_BYTES:
            return False
        try:
            self._ask(Request.HOLD, path=encoded)
            found = self.holds
            if found is not None and os.path.samestat(found.stat(), is_file):
                return True
        except OSError:
            pass
        self._ask(Request.LET_GO)
        return False

    def let_go(self) -> None:
        self._ask(Request.LET_GO)

    def end(self) -> None:
        """Let go, and end, unless memory is kept ready in the process. When this returns another can be started."""
        self._ask(Request.END)
        if self.stays:
            return
        until = time.monotonic() + ANSWER_S
        while self._words()[0] and time.monotonic() < until:
            time.sleep(0.0002)

    @property
    def stays(self) -> bool:
        """Whether it lives as long as the process, since memory is kept ready there."""
        return bool(self.reserve()[0])

    def reserve(self) -> tuple[int, ...]:
        """What the library says of memory kept ready: as in :data:`page.RESERVE`."""
        return page.read(self.memory, page.RESERVE, self.at + page.RESERVE_AT)

    def have_ready(self, nbytes: int, *, auto: bool) -> None:
        """Keep *nbytes* ready from now on; *auto*: after the next image, as many as that took. Raises ``OSError``."""
        self._ask(Request.RESERVE, nbytes, int(auto))

    def _words(self) -> tuple[int, ...]:
        return page.read(self.memory, page.KEEPER, self.at + page.KEEPER_AT)

    def _ask(self, request: Request, begin: int = 0, end: int = 0, path: bytes = b"", within_s: float | None = None) -> None:
        """Raises :class:`Unanswered`, or ``OSError`` with what the kernel said to the keeper."""
        within_s = ANSWER_S if within_s is None else within_s
        with self._alone(within_s):
            self._ask_alone(request, begin, end, path, within_s)

    @contextlib.contextmanager
    def _alone(self, within_s: float) -> Iterator[None]:
        """Nobody else asks meanwhile: who follows the program, or a person, may order memory while an image is moved."""
        until = time.monotonic() + within_s
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self.memory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if time.monotonic() >= until:
                raise Unanswered(f"another gpuckpt has had the keeper of pid {self.process} at work for {within_s:g} s")
            time.sleep(0.001)
        try:
            yield
        finally:
            fcntl.flock(self.memory, fcntl.LOCK_UN)

    def _ask_alone(self, request: Request, begin: int, end: int, path: bytes, within_s: float) -> None:
        (last,) = page.read(self.memory, page.ASKED, self.at + page.ASKED_AT)
        number = (last + 1) & 0xFFFFFFFF
        if path:
            os.pwrite(self.memory, path.ljust(page.PATH_BYTES, b"\0"), self.at + page.PATH_AT)
        os.pwrite(self.memory, page.REQUEST.pack(request, begin, end), self.at + page.REQUEST_AT)
        os.pwrite(self.memory, page.ASKED.pack(number), self.at + page.ASKED_AT)  # last: it makes the rest count
        until, pause_s = time.monotonic() + within_s, 0.0002
        self._wake()
        while True:
            words = self._words()
            if words[4] == number:
                break
            if time.monotonic() >= until:
                raise Unanswered(f"the keeper of pid {self.process} has not answered within {within_s:g} s; is the process stopped?")
            time.sleep(pause_s)
            pause_s = min(0.01, pause_s * 1.5)
        if words[5]:
            raise OSError(words[5], os.strerror(words[5]))

    def _wake(self) -> None:
        wake = self._words()[2]
        path = f"/proc/{self.process.pid}/task/{self.tid}/fd/{wake}"
        try:
            if wake < 0 or not stat.S_ISFIFO(os.stat(path).st_mode):  # nothing that a program has put there instead
                raise Unanswered(f"the keeper of pid {self.process} cannot be woken")
            fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise Unanswered(f"the keeper of pid {self.process} cannot be woken ({error.strerror})") from error
        try:
            with contextlib.suppress(BlockingIOError):  # a full pipe wakes as well
                os.write(fd, b"x")
        finally:
            os.close(fd)


@contextlib.contextmanager
def of(process: ProcessId) -> Iterator[Keeper]:
    """The keeper of *process*. Raises :class:`Unavailable` where there is none."""
    with page.opened(process) as (memory, at):
        until = time.monotonic() + ANSWER_S
        while True:
            inside, pid, wake, *_ = page.read(memory, page.KEEPER, at + page.KEEPER_AT)
            if not inside or wake >= 0 or time.monotonic() >= until:
                break
            time.sleep(0.001)  # it was started this moment
        if not inside or pid != page.inside(process.pid, process.pid) or wake < 0:
            raise Unavailable(f"pid {process} has no keeper of its image: the library saw none, or its kernel is older than 5.9")
        yield Keeper(process, _outside(process.pid, inside), memory, at)


def end(process: ProcessId) -> None:
    """Have the keeper end, if there is one; it refuses while it holds the only copy of an image. Never raises."""
    with contextlib.suppress(Unavailable, Unanswered, OSError), of(process) as keeper:
        keeper.end()


def let_go(process: ProcessId) -> bool:
    """Have the keeper close the file that it holds; it refuses while that is the only copy. Whether it held one, and closed it. Never
    raises."""
    with contextlib.suppress(Unavailable, Unanswered, OSError), of(process) as keeper:
        held = keeper.holds is not None
        keeper.let_go()
        return held
    return False


def open_held(process: ProcessId) -> int | None:
    """The file that the keeper holds, opened here too. Whoever closes a file without a name last waits for its removal, a second for some
    GiB: that should be nobody who stands still. Never raises."""
    with contextlib.suppress(Unavailable, Unanswered, OSError), of(process) as keeper:
        if path := keeper.holds:
            return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    return None


def dropped(process: ProcessId) -> bool:
    """Whether memory of the image of *process* was given back and has not all returned, or may be so any moment: it was asked for, and
    there was no answer. False where no library is, or we may not look."""
    with contextlib.suppress(Unavailable), page.opened(process, any_version=True) as (memory, at):
        words = page.read(memory, page.KEEPER, at + page.KEEPER_AT)
        if words[6]:
            return True
        (asked,) = page.read(memory, page.ASKED, at + page.ASKED_AT)
        request, *_ = page.read(memory, page.REQUEST, at + page.REQUEST_AT)
        if not words[0] or asked == words[4] or request != Request.DROP:
            return False
        try:
            with of(process) as keeper:
                keeper.settle()
                return keeper.dropped
        except (Unavailable, Unanswered, OSError):
            return True
    return False


def void(process: ProcessId) -> None:
    """*process* runs although its image was not whole: another tool restored it. What the keeper has counts no more. Never raises."""
    with contextlib.suppress(Unavailable), page.opened(process) as (memory, at):
        os.pwrite(memory, bytes(4), at + page.KEEPER_AT + 24)
    end(process)


def _outside(pid: int, inside: int) -> int:
    """The number here of the thread that has the number *inside* in the pid namespace of *pid*."""
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(Unavailable):
                if page.inside(pid, int(name)) == inside:
                    return int(name)
    raise Unavailable(f"the keeper of pid {pid} is gone")
