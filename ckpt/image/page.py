"""The page of the preload library, seen from outside: where it lies in a process, and how it is laid out.

The library (``_preload.h``) keeps it in its own data, and it begins with a magic. It is found in the process's mappings, and read and
written through ``/proc/PID/mem``: that takes the right to trace the process, as the driver's calls do. Nothing lies in a file, so nothing
is left behind, a chroot or a container hides nothing, and no other user can put a word in.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from gpuckpt.inspect import host, processes
from gpuckpt.model import ProcessId

VARIABLE = "GPUCKPT_PRELOAD"
NAME = "libgpuckpt_preload"

T = TypeVar("T", bytes, int)

# The layout, as in _preload.h.
HEAD = struct.Struct("=16sII8x")
OPERATION = struct.Struct("=Q")
ANNOUNCEMENT = struct.Struct("=IIQQQQI4x")
RESULT = struct.Struct("=IIIIQQQIIQIIQ")
IMAGE = struct.Struct("=QQII")
MOST_IMAGES = 16
OPERATION_AT = HEAD.size
ANNOUNCEMENT_AT = OPERATION_AT + OPERATION.size
RESULT_AT = ANNOUNCEMENT_AT + ANNOUNCEMENT.size
IMAGES_AT = RESULT_AT + RESULT.size
KEEPER_AT = IMAGES_AT + MOST_IMAGES * IMAGE.size
KEEPER = struct.Struct("=iIiiIiII")
ASKED_AT = KEEPER_AT + KEEPER.size
ASKED = struct.Struct("=I")
REQUEST_AT = ASKED_AT + ASKED.size
REQUEST = struct.Struct("=IQQ40x")
PATH_AT = REQUEST_AT + REQUEST.size
PATH_BYTES = 960
RESERVE_AT = PATH_AT + PATH_BYTES
RESERVE = struct.Struct("=IIiIQQQQQ8x")
PAGE_BYTES = RESERVE_AT + RESERVE.size

_MAGIC = b"gpuckpt-preload\0"
_VERSION = 4
_FIRST_VERSION = 4  # from which on HEAD, KEEPER, ASKED and the beginning of REQUEST are where they are: a process may outlive a gpuckpt
_READY, _OFF = 1, 2
_ALIGNMENT = 64
_MOST_DATA_BYTES = 1 << 16  # what a program maps under our name is its own affair, and may be large

#: Where the page of each process was found last.
_known: dict[ProcessId, int] = {}
_MOST_KNOWN = 256

# addresses, permissions, offset, device, inode, path
_MAPPING = re.compile(rb"([0-9a-f]+)-([0-9a-f]+) (\S{4}) [0-9a-f]+ \S+ \d+\s*(.*)")


class Unavailable(Exception):
    """The library cannot be used in this process, or not now; the message says why. The driver's own path serves."""


@contextlib.contextmanager
def opened(process: ProcessId, *, any_version: bool = False) -> Iterator[tuple[int, int]]:
    """The memory of *process*, opened, and where in it the library's page begins. *any_version*: of a library of another gpuckpt, too, of
    which is known what ``KEEPER`` has, whether an image is whole above all, and the request.

    Raises:
        Unavailable: *process* is gone, has no library, or we may not look.
    """
    try:
        memory = os.open(f"/proc/{process.pid}/mem", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise Unavailable(f"the memory of pid {process.pid} is not ours to write ({error.strerror})") from error
    try:
        if not processes.is_same(process):  # asked when its memory was open already: a pid that is reused later does no harm
            raise Unavailable(f"pid {process.pid} is gone")
        yield memory, _where(memory, process, any_version)
    except OSError as error:
        raise Unavailable(f"the memory of pid {process.pid} cannot be used ({error.strerror})") from error
    finally:
        os.close(memory)


def there(process: ProcessId) -> bool:
    """Whether there is one, of whatever version, that can be used."""
    with contextlib.suppress(Unavailable), opened(process, any_version=True):
        return True
    return False


def read(memory: int, layout: struct.Struct, at: int) -> tuple[Any, ...]:
    """What lies at the address *at* of an opened memory. Raises ``OSError``, also where the process has ended meanwhile."""
    return layout.unpack(some(os.pread(memory, layout.size, at)))


def some(moved: T) -> T:
    """What a read of a memory gave, or how many bytes a write took. That of the dead gives and takes nothing, without an error: raises
    ``OSError`` then."""
    if not moved:
        raise OSError(errno.ESRCH, os.strerror(errno.ESRCH))
    return moved


def mappings(pid: int, of: bytes) -> list[tuple[int, int, bytes, bytes]]:
    """Begin, end, permissions and path of each mapping of *pid* with *of* in its path; none where we may not look. A program that uses
    a GPU has thousands: only those that are asked for are taken apart."""
    try:
        with open(f"/proc/{pid}/maps", "rb", buffering=0) as file:
            whole = file.read()
    except OSError:
        return []
    found = (_MAPPING.fullmatch(line) for line in (whole.splitlines() if of in whole else ()) if of in line)
    return [(int(m[1], 16), int(m[2], 16), m[3], m[4]) for m in found if m]


def ours(pid: int) -> list[tuple[int, int, bytes, bytes]]:
    """Those of a preload library, by its file's name."""
    name = NAME.encode()
    return [mapping for mapping in mappings(pid, name) if mapping[3].rpartition(b"/")[2].startswith(name)]


def inside(pid: int, tid: int) -> int:
    """The number that the thread *tid* of *pid* has in its own pid namespace."""
    status = host.read(Path(f"/proc/{pid}/task/{tid}/status"))
    found = re.search(r"^NSpid:.*\s(\d+)$", status, re.MULTILINE)
    if found is None:
        raise Unavailable(f"pid {pid} has no thread {tid}")
    return int(found[1])


def _where(memory: int, process: ProcessId, any_version: bool) -> int:
    """The address of the page: where it was before, if it still is, since a search reads all of the program's mappings."""
    at = _known.get(process)
    if at is None or not _is_there(memory, at):
        _known.pop(process, None)
        at = _find(memory, process.pid, any_version)
        if len(_known) >= _MOST_KNOWN:  # most of them have ended
            _known.clear()
        _known[process] = at
    return at


def _is_there(memory: int, at: int) -> bool:
    """Whether a page of ours, ready, begins there. The program may have become another one by ``execve``."""
    with contextlib.suppress(OSError, struct.error):
        return HEAD.unpack(os.pread(memory, HEAD.size, at)) == (_MAGIC, _VERSION, _READY)
    return False


def _find(memory: int, pid: int, any_version: bool) -> int:
    """The address of a page that is of our version, or of any, and ready."""
    found, mapped = False, ours(pid)
    for start, end, permissions, _ in mapped:
        if permissions == b"rw-p":
            found = True
            content = os.pread(memory, min(end - start, _MOST_DATA_BYTES), start)
            for at in range(0, len(content) - PAGE_BYTES + 1, _ALIGNMENT):
                if content.startswith(_MAGIC, at):
                    _, version, state = HEAD.unpack_from(content, at)
                    if version != _VERSION and not (any_version and version >= _FIRST_VERSION):
                        raise Unavailable(f"pid {pid} was started with the preload library of another gpuckpt (version {version})")
                    if state != _READY:
                        raise Unavailable(f"{VARIABLE}=0 in pid {pid}" if state == _OFF else f"pid {pid} is just starting")
                    return start + at
    if not mapped:
        raise Unavailable(f"no preload library in pid {pid}")
    raise Unavailable(f"the preload library in pid {pid} is not one of gpuckpt's" if found else f"pid {pid} is just starting")
