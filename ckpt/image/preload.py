"""The preload library from outside: starts programs with it, announces an operation to a process that has it, reads what it did.

What the two say to each other lies in a page of the library's (:mod:`gpuckpt.image.page`).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from gpuckpt.image import keeper, page, paths
from gpuckpt.image.page import NAME, VARIABLE, Unavailable
from gpuckpt.inspect import host
from gpuckpt.model import ProcessId

__all__ = ["NAME", "VARIABLE", "Image", "Result", "Unavailable", "Verdict"]

MOST_THREADS = 16
MADV_POPULATE_WRITE = 23  # Linux 5.14

#: How long an announcement holds whose gpuckpt died, in seconds. A checkpoint maps its image when it begins.
HOLDS_S = 120.0


class Verdict(IntEnum):
    """What became of a large populated mapping that the process made while an operation was announced."""

    NOTHING = 0  # there was none
    EXPIRED = 1
    OTHER_THREAD = 2  # not made by the restore thread
    OTHER_CALLER = 3  # not made by libcuda
    NO_MAPPING = 4  # it failed, without MAP_POPULATE too
    NO_POPULATE = 5  # it could not be populated in parallel: made again as the program asked
    FAST = 6


@dataclass(frozen=True, slots=True)
class Image:
    """A mapping of libcuda's that the library took in hand. ``address`` is 0 where even the program's own call failed,
    ``error`` the errno for which it did not become a fast one."""

    address: int
    nbytes: int
    verdict: Verdict
    error: int


@dataclass(frozen=True, slots=True)
class Result:
    """What the library did since the last announcement. ``count``: images, of which it notes 16 at most. ``seen`` counts the large
    populated mappings that it looked at; the last one's fate, thread (as the process sees it), caller and size follow. ``populate_s`` is
    the time of all ``images``, mapping included; ``threads`` populated the last of them. ``huge_pages``: whether the kernel took the
    advice. ``copied`` bytes went into images, or out of them, in ``copies`` that ``copy_threads`` threads made together.
    ``from_reserve`` bytes were ready before (:mod:`gpuckpt.image.reserve`)."""

    operation: int
    images: tuple[Image, ...]
    count: int
    seen: int
    last: Verdict
    last_tid: int
    last_caller: int
    last_nbytes: int
    populate_s: float
    threads: int
    huge_pages: bool
    copied: int
    copies: int
    copy_threads: int
    from_reserve: int

    def why_not(self) -> str:
        """Why an image took the driver's own path; "" if all took ours."""
        slow = next((i for i in self.images if i.verdict is not Verdict.FAST), None)
        if self.images and slow is None:
            return ""
        verdict, error = (slow.verdict, slow.error) if slow else (self.last, 0)
        return _WHY[verdict] + (f": {os.strerror(error)}" if error else "")


_WHY = {
    Verdict.NOTHING: "the preload library was told of no checkpoint, or saw no mapping large enough",
    Verdict.EXPIRED: "the preload library was told of the checkpoint too long before",
    Verdict.OTHER_THREAD: "the image was not mapped by the driver's restore thread",
    Verdict.OTHER_CALLER: "the image was not mapped by libcuda itself (does another library interpose mmap?)",
    Verdict.NO_MAPPING: "no memory could be mapped",
    Verdict.NO_POPULATE: "memory could not be populated by several threads",
    Verdict.FAST: "the preload library did not note what it did",
}


# Starting programs.


def library() -> Path | None:
    """The library of this installation; None where it was installed without a compiler."""
    return next(iter(sorted(Path(__file__).parent.glob(f"{NAME}*.so"))), None)


def problem(environ: Mapping[str, str] = os.environ) -> str:
    """Why a program that is started with *environ* would do without the library; "" if nothing speaks against it."""
    path = library()
    if environ.get(VARIABLE) == "0":
        return f"{VARIABLE}=0"
    if path is None:
        return "it was not built when gpuckpt was installed: that takes a C compiler"
    if re.search(r"[\s:]", str(path)):
        return f"its path has a space or a colon in it, which the loader takes for an end: {path}"
    import ctypes

    try:
        ctypes.CDLL(str(path))  # as a library like any other: what it defines is not preferred here
    except OSError as error:
        return str(error)
    return ""


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """*environ* for a program that shall have the library: first in ``LD_PRELOAD``, before all that was there. Unchanged where
    :func:`problem` has an answer."""
    changed = dict(environ)
    if problem(environ):
        return changed
    ours = str(library())
    others = [p for p in re.split(r"[\s:]+", environ.get("LD_PRELOAD", "")) if p and p != ours]
    changed["LD_PRELOAD"] = ":".join([ours, *others])
    return changed


def populates() -> bool:
    """Whether the kernel can populate memory and say so if it cannot."""
    with mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        try:
            memory.madvise(MADV_POPULATE_WRITE)
        except OSError:
            return False
    return True


def loaded(pid: int) -> bool:
    """Whether *pid* has the library mapped; False where we may not look or *pid* is gone."""
    return bool(page.ours(pid))


# Operations.


def announce(process: ProcessId, restore_tid: int, seconds: float = HOLDS_S) -> int:
    """Let the library in *process* act on what libcuda maps, and copies into that, in the thread *restore_tid*, for so long. Returns
    the operation's number.

    What it did before is forgotten. Raises:
        Unavailable: and nothing will be done; what was announced before is withdrawn where it could be.
    """
    with page.opened(process) as (memory, at):
        os.pwrite(memory, page.OPERATION.pack(0), at + page.OPERATION_AT)
        if keeper.dropped(process):
            raise Unavailable(f"the image of pid {process} is on disk")
        keeper.end(process)  # of an image that some other tool has restored
        os.pwrite(memory, bytes(page.KEEPER_AT - page.RESULT_AT), at + page.RESULT_AT)
        return _announce(memory, at, process, restore_tid, seconds, _libcuda(process.pid))


def announce_restore(process: ProcessId, restore_tid: int, seconds: float = HOLDS_S) -> int:
    """The same of what is copied out of the images that it has made; nothing that is mapped now is one. Returns the operation's number.

    Raises:
        Unavailable: as ``announce``.
    """
    with page.opened(process) as (memory, at):
        os.pwrite(memory, page.OPERATION.pack(0), at + page.OPERATION_AT)
        return _announce(memory, at, process, restore_tid, seconds, (0, 0, 0))


def _announce(memory: int, at: int, process: ProcessId, restore_tid: int, seconds: float, libcuda: tuple[int, int, int]) -> int:
    expires_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) + int(seconds * 1e9)
    pid, tid = page.inside(process.pid, process.pid), page.inside(process.pid, restore_tid)
    os.pwrite(memory, page.ANNOUNCEMENT.pack(pid, tid, expires_ns, *libcuda, threads(process.pid)), at + page.ANNOUNCEMENT_AT)
    operation = int.from_bytes(os.urandom(8), "little") or 1
    os.pwrite(memory, page.OPERATION.pack(operation), at + page.OPERATION_AT)  # last: it makes the rest count
    return operation


def withdraw(process: ProcessId, operation: int) -> None:
    """End the announcement, if *operation* is still the one announced. What the library did stays to be read. Never raises for a
    process that is gone."""
    with contextlib.suppress(Unavailable), page.opened(process) as (memory, at):
        if os.pread(memory, page.OPERATION.size, at + page.OPERATION_AT) == page.OPERATION.pack(operation):
            os.pwrite(memory, page.OPERATION.pack(0), at + page.OPERATION_AT)


def forget(process: ProcessId) -> None:
    """*process* was restored, or not checkpointed: there is no image in its memory any more, and its keeper may go. Does nothing while the
    only copy of an image is on disk. Never raises for a process that is gone."""
    if keeper.dropped(process):
        return
    with contextlib.suppress(Unavailable), page.opened(process) as (memory, at):
        os.pwrite(memory, bytes(page.KEEPER_AT - page.RESULT_AT), at + page.RESULT_AT)
    keeper.end(process)


@contextlib.contextmanager
def announced(process: ProcessId, restore_tid: int, how: Callable[[ProcessId, int], int] = announce) -> Iterator[int]:
    """Announced meanwhile; 0 where it cannot be, or is not wanted (``GPUCKPT_PRELOAD=0`` here, beside the program's own)."""
    try:
        if os.environ.get(VARIABLE) == "0":
            raise Unavailable(f"{VARIABLE}=0")
        operation = how(process, restore_tid)
    except Unavailable:
        yield 0
        return
    try:
        yield operation
    finally:
        withdraw(process, operation)


def result(process: ProcessId) -> Result:
    """What the library in *process* did since the last announcement, which may still hold (``operation`` is then its number, else 0).

    Raises:
        Unavailable: *process* is gone, has no library, or we may not look.
    """
    with page.opened(process) as (memory, at):
        content = page.some(os.pread(memory, page.PAGE_BYTES, at))
    (operation,) = page.OPERATION.unpack_from(content, page.OPERATION_AT)
    seen, last, tid, count, caller, nbytes, populate_ns, used, huge, copied, copies, copiers, ready = page.RESULT.unpack_from(
        content, page.RESULT_AT
    )
    rows = [page.IMAGE.unpack_from(content, page.IMAGES_AT + i * page.IMAGE.size) for i in range(min(count, page.MOST_IMAGES))]
    try:
        images = tuple(Image(address, size, Verdict(verdict), error) for address, size, verdict, error in rows)
        how = (populate_ns / 1e9, used, bool(huge), copied, copies, copiers, ready)
        return Result(operation, images, count, seen, Verdict(last), tid, caller, nbytes, *how)
    except ValueError as error:  # the program may have overwritten it
        raise Unavailable(f"what the preload library in pid {process.pid} says makes no sense ({error})") from error


def refuse_missing(process: ProcessId) -> None:
    """Raise :class:`Unavailable` where the library could not act in *process*, or is not wanted (``GPUCKPT_PRELOAD=0`` here)."""
    if os.environ.get(VARIABLE) == "0":
        raise Unavailable(f"{VARIABLE}=0 is set here")
    if not populates():
        raise Unavailable("this kernel is older than Linux 5.14, and could not get its pages back")
    with page.opened(process):
        pass


def described(process: ProcessId) -> dict[str, Any]:
    """How the image of a checkpointed *process* was made, for a report: by the driver alone, and ``why``, or with the library's help
    (``path``), which took ``populate_s``, ``threads`` and ``huge_pages``, how much of it ``copy_threads`` threads copied, and how much was
    ready before; its ``bytes``, where the library saw it made; and whether memory of it was given back (``dropped``)."""
    try:
        seen = result(process)
    except Unavailable as error:
        return {"path": paths.DRIVER, "why": str(error), "dropped": False}
    nbytes = sum(i.nbytes for i in seen.images)
    if why := seen.why_not():
        return {"path": paths.DRIVER, "why": why, "bytes": nbytes, "dropped": keeper.dropped(process)}
    return {
        "path": paths.PRELOAD,
        "populate_s": round(seen.populate_s, 4),
        "threads": seen.threads,
        "huge_pages": seen.huge_pages,
        "copied_bytes": seen.copied,
        "copy_threads": seen.copy_threads,
        "from_reserve_bytes": seen.from_reserve,
        "bytes": nbytes,
        "dropped": keeper.dropped(process),
    }


def threads(pid: int) -> int:
    """How many threads may populate memory for *pid*: by its affinity and its cgroups' CPU quota, at most 16."""
    try:
        allowed = len(os.sched_getaffinity(pid))
    except OSError:
        allowed = 1
    return max(1, min(MOST_THREADS, allowed, host.cpu_quota(pid)))


def _libcuda(pid: int) -> tuple[int, int, int]:
    """From where to where libcuda's code lies in *pid*, and where its file begins."""
    parts = page.mappings(pid, b"/libcuda.so")
    code = [(start, end, path) for start, end, permissions, path in parts if b"x" in permissions]
    if not code or len({path for _, _, path in code}) > 1:
        raise Unavailable(f"pid {pid} has {'two kinds of' if code else 'no'} libcuda loaded")
    return code[0][0], code[-1][1], next(start for start, _, _, path in parts if path == code[0][2])
