"""The preload library from outside: starts programs with it, announces an operation to a process that has it, reads what it did.

The library (``_preload.c``) keeps a page in its own data, which begins with a magic. It is found in the process's mappings, and read and
written through ``/proc/PID/mem``: that takes the right to trace the process, as the driver's calls do. Nothing lies in a file, so nothing
is left behind, a chroot or a container hides nothing, and no other user can put a word in.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from gpuckpt.inspect import host, processes
from gpuckpt.model import ProcessId

VARIABLE = "GPUCKPT_PRELOAD"
NAME = "libgpuckpt_preload"
MOST_THREADS = 16

#: How long an announcement holds whose gpuckpt died, in seconds. A checkpoint maps its image when it begins.
HOLDS_S = 120.0

_MAGIC = b"gpuckpt-preload\0"
_VERSION = 1
_READY, _OFF = 1, 2
_ALIGNMENT = 64
_MOST_DATA_BYTES = 1 << 16  # what a program maps under our name is its own affair, and may be large
# The page, as in _preload.c.
_HEAD = struct.Struct("=16sII8x")
_OPERATION = struct.Struct("=Q")
_ANNOUNCEMENT = struct.Struct("=IIQQQI4x")
_RESULT = struct.Struct("=IIIIQQQII")
_IMAGE = struct.Struct("=QQII")
_MOST_IMAGES = 16
_RESULT_AT = _HEAD.size + _OPERATION.size + _ANNOUNCEMENT.size
_IMAGES_AT = _RESULT_AT + _RESULT.size
_PAGE_BYTES = _IMAGES_AT + _MOST_IMAGES * _IMAGE.size

# addresses, permissions, offset, device, inode, path
_MAPPING = re.compile(rb"([0-9a-f]+)-([0-9a-f]+) (\S{4}) [0-9a-f]+ \S+ \d+\s*(.*)")


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
    """What the library did since the last announcement. ``seen`` counts the large populated mappings that it looked at; the last one's
    fate, thread (as the process sees it), caller and size follow. ``populate_s`` is the time of all ``images``, mapping included;
    ``threads`` populated the last of them. ``huge_pages``: whether the kernel took the advice."""

    operation: int
    images: tuple[Image, ...]
    seen: int
    last: Verdict
    last_tid: int
    last_caller: int
    last_nbytes: int
    populate_s: float
    threads: int
    huge_pages: bool


class Unavailable(Exception):
    """The library cannot be used in this process, or not now; the message says why. The driver's own path serves."""


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


def loaded(pid: int) -> bool:
    """Whether *pid* has the library mapped; False where we may not look or *pid* is gone."""
    return any(Path(os.fsdecode(path)).name.startswith(NAME) for _, _, _, path in _mappings(pid))


# Operations.


def announce(process: ProcessId, restore_tid: int, seconds: float = HOLDS_S) -> int:
    """Let the library in *process* act on what libcuda maps in the thread *restore_tid*, for so long. Returns the operation's number.

    What it did before is forgotten. Raises:
        Unavailable: and nothing will be done; what was announced before is withdrawn where it could be.
    """
    with _page(process) as (memory, at):
        os.pwrite(memory, _OPERATION.pack(0), at + _HEAD.size)
        start, end = _libcuda(process.pid)
        expires_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) + int(seconds * 1e9)
        pid, tid = _inside(process.pid, process.pid), _inside(process.pid, restore_tid)
        words = _ANNOUNCEMENT.pack(pid, tid, expires_ns, start, end, threads(process.pid))
        body = words + bytes(_PAGE_BYTES - _RESULT_AT)
        operation = int.from_bytes(os.urandom(8), "little") or 1
        os.pwrite(memory, body, at + _HEAD.size + _OPERATION.size)
        os.pwrite(memory, _OPERATION.pack(operation), at + _HEAD.size)  # last: it makes the rest count
        return operation


def withdraw(process: ProcessId, operation: int) -> None:
    """End the announcement, if *operation* is still the one announced. What the library did stays to be read. Never raises for a
    process that is gone."""
    with contextlib.suppress(Unavailable), _page(process) as (memory, at):
        if os.pread(memory, _OPERATION.size, at + _HEAD.size) == _OPERATION.pack(operation):
            os.pwrite(memory, _OPERATION.pack(0), at + _HEAD.size)


@contextlib.contextmanager
def announced(process: ProcessId, restore_tid: int) -> Iterator[int]:
    """Announced meanwhile; 0 where it cannot be, or is not wanted (``GPUCKPT_PRELOAD=0`` here, beside the program's own)."""
    try:
        if os.environ.get(VARIABLE) == "0":
            raise Unavailable(f"{VARIABLE}=0")
        operation = announce(process, restore_tid)
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
    with _page(process) as (memory, at):
        page = os.pread(memory, _PAGE_BYTES, at)
    (operation,) = _OPERATION.unpack_from(page, _HEAD.size)
    seen, last, tid, count, caller, nbytes, populate_ns, used, huge = _RESULT.unpack_from(page, _RESULT_AT)
    rows = [_IMAGE.unpack_from(page, _IMAGES_AT + i * _IMAGE.size) for i in range(min(count, _MOST_IMAGES))]
    try:
        images = tuple(Image(address, size, Verdict(verdict), error) for address, size, verdict, error in rows)
        return Result(operation, images, seen, Verdict(last), tid, caller, nbytes, populate_ns / 1e9, used, bool(huge))
    except ValueError as error:  # the program may have overwritten it
        raise Unavailable(f"what the preload library in pid {process.pid} says makes no sense ({error})") from error


def threads(pid: int) -> int:
    """How many threads may populate memory for *pid*: by its affinity and its cgroups' CPU quota, at most 16."""
    try:
        allowed = len(os.sched_getaffinity(pid))
    except OSError:
        allowed = 1
    return max(1, min(MOST_THREADS, allowed, host.cpu_quota(pid)))


# The page.


@contextlib.contextmanager
def _page(process: ProcessId) -> Iterator[tuple[int, int]]:
    """The memory of *process*, opened, and where in it the library's page begins."""
    try:
        memory = os.open(f"/proc/{process.pid}/mem", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise Unavailable(f"the memory of pid {process.pid} is not ours to write ({error.strerror})") from error
    try:
        if not processes.is_same(process):  # asked when its memory was open already: a pid that is reused later does no harm
            raise Unavailable(f"pid {process.pid} is gone")
        yield memory, _find(memory, process.pid)
    except OSError as error:
        raise Unavailable(f"the memory of pid {process.pid} cannot be used ({error.strerror})") from error
    finally:
        os.close(memory)


def _find(memory: int, pid: int) -> int:
    """The address of a page that is of our version, and ready."""
    found = False
    for start, end, permissions, path in _mappings(pid):
        if permissions == b"rw-p" and Path(os.fsdecode(path)).name.startswith(NAME):
            found = True
            content = os.pread(memory, min(end - start, _MOST_DATA_BYTES), start)
            for at in range(0, len(content) - _PAGE_BYTES + 1, _ALIGNMENT):
                if content.startswith(_MAGIC, at):
                    _, version, state = _HEAD.unpack_from(content, at)
                    if version != _VERSION:
                        raise Unavailable(f"pid {pid} was started with the preload library of another gpuckpt (version {version})")
                    if state != _READY:
                        raise Unavailable(f"{VARIABLE}=0 in pid {pid}" if state == _OFF else f"pid {pid} is just starting")
                    return start + at
    raise Unavailable(f"no preload library in pid {pid}" if not found else f"the preload library in pid {pid} is not one of gpuckpt's")


def _libcuda(pid: int) -> tuple[int, int]:
    """From where to where libcuda's code lies in *pid*."""
    code = [(start, end, path) for start, end, permissions, path in _mappings(pid) if b"x" in permissions and b"/libcuda.so" in path]
    if not code or len({path for _, _, path in code}) > 1:
        raise Unavailable(f"pid {pid} has {'two kinds of' if code else 'no'} libcuda loaded")
    return code[0][0], code[-1][1]


def _mappings(pid: int) -> list[tuple[int, int, bytes, bytes]]:
    """Begin, end, permissions and path of each mapping of *pid*; none where we may not look."""
    try:
        with open(f"/proc/{pid}/maps", "rb", buffering=0) as file:
            lines = file.read().splitlines()
    except OSError:
        return []
    found = (_MAPPING.fullmatch(line) for line in lines)
    return [(int(m[1], 16), int(m[2], 16), m[3], m[4]) for m in found if m]


def _inside(pid: int, tid: int) -> int:
    """The number that the thread *tid* of *pid* has in its own pid namespace."""
    status = host.read(Path(f"/proc/{pid}/task/{tid}/status"))
    inside = re.search(r"^NSpid:.*\s(\d+)$", status, re.MULTILINE)
    if inside is None:
        raise Unavailable(f"pid {pid} has no thread {tid}")
    return int(inside[1])
