"""Keeping an image on disk: written to a file and proven to be there, given back, and later read back and verified.

At every instruction the content is whole in one place at least, and where it is can be told from the process itself:

- ``write``    changes nothing in the process. When it returns the file is whole and on disk.
- ``drop``     gives the pages back. Before the first one goes the process has a mark that its memory is not whole (``Memory.dropped``).
- ``load``     gets pages, fills them from the file, and takes the mark off when all of it was found to be what was written.

A process with the mark is never restored (:mod:`gpuckpt.driver.caller`). The file is private anonymous memory's copy, never mapped: a full
disk or a failing one is an error here, and no signal there.

The process holds the file open where it can, and then the file loses its name at once: it ends with the process, or when that is restored,
whoever was killed. Where the process cannot open it (another container's file system) it keeps its name.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gpuckpt import errors, plan
from gpuckpt.image import file
from gpuckpt.image.file import Corrupted, Region
from gpuckpt.image.memory import Memory, Unanswered, Unavailable
from gpuckpt.model import MIB, Call, HostRoom, ProcessId
from gpuckpt.words import size

#: Pages are got and filled by so much at a time, and room is looked for before each: with what a checkpoint takes beside its image, too. A
#: process that is short of memory while it gets them is ended by the kernel, and the only copy with it.
RANGE_BYTES = 256 * MIB


def serve(call: Call, memory: Memory, process: ProcessId, spec: Mapping[str, Any], check: Callable[[], None]) -> dict[str, Any]:
    """Carry out *call*; *check* raises when nobody waits for it any more. Raises :class:`gpuckpt.errors.GpuckptError`."""
    if call is Call.STORE:
        return write(memory, process, Path(spec["directory"]), spec["operation"], check)
    if call is Call.DROP:
        return drop(memory, process, spec)
    return load(memory, process, spec, check)


def write(memory: Memory, process: ProcessId, directory: Path, operation: str, check: Callable[[], None]) -> dict[str, Any]:
    """Write the image to a file in *directory*. Returns what :func:`load` needs; nothing has changed in the process.

    Raises:
        errors.ImageNotStored: there is no file of ours then.
    """
    path = directory / file.name(process, operation)
    made = asked = False
    try:
        memory.settle()
    except (OSError, Unanswered) as error:
        raise not_stored(process, directory, error) from error
    if memory.dropped:
        raise errors.ImageNotStored(
            f"pid {process} is suspended, and its image is on disk already", hint=f"gpuckpt resume {process}", pid=process.pid
        )
    try:
        regions = memory.regions()
        _prove_pages_come(memory, regions[0])
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with file.directly(path, flags) as fd:
            made = True
            uid, gid = memory.owner()
            if os.geteuid() == 0 and uid != 0:
                os.fchown(fd, uid, gid)  # its memory on disk is its owner's as it was in RAM, and only so can it hold it
            asked = True
            held = memory.hold(path, os.fstat(fd))
            if held:
                path.unlink()
                made = False
            file.write(fd, regions, {"process": [process.pid, process.start_ticks], "operation": operation}, memory.read, check)
            if not held:
                _sync(directory)
            check()  # a disk may take longer to flush than anybody waits, and who has gone knows of no file
            status = os.fstat(fd)
    except BaseException as error:
        if made:
            with contextlib.suppress(OSError):
                path.unlink()
        if asked:
            with contextlib.suppress(Exception):
                memory.let_go()
        if not isinstance(error, OSError | Unavailable | Unanswered):
            raise
        raise not_stored(process, directory, error) from error
    return {
        "path": str(path),
        "operation": operation,
        "held": held,
        "nbytes": sum(r.nbytes for r in regions),
        "inode": [status.st_dev, status.st_ino],
    }


def drop(memory: Memory, process: ProcessId, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Give the pages back of an image that :func:`write` has written. Whole in the file, whatever happens."""
    try:
        with _opened(memory, spec) as fd:
            header = _header(fd, process, spec)
        regions = memory.regions()
        if [[r.address, r.nbytes] for r in regions] != header["regions"]:
            raise Corrupted("it is of other memory")
        for region in regions:
            memory.drop(region)
    except (OSError, Unavailable, Unanswered, Corrupted) as error:
        raise errors.ImageNotStored(
            f"pid {process} is suspended, and its image is in a file, but its memory was not given back: {_words(error)}",
            hint=f"nothing is lost: gpuckpt resume {process} as ever",
            pid=process.pid,
            step=str(Call.DROP),
        ) from error
    return {}


def load(memory: Memory, process: ProcessId, spec: Mapping[str, Any], check: Callable[[], None]) -> dict[str, Any]:
    """Bring the image back into memory; does nothing where all of it is there. *spec*: what :func:`write` gave; {} where that is lost: then
    it is the file that the process holds.

    Raises:
        errors.HostMemory: there is no room for it. errors.ImageUnreadable: the file cannot be read, or is not what was written.
            The image is on disk as before, and nothing of it in memory.
    """
    begun = False
    regions: list[Region] = []
    try:
        memory.settle()  # a drop that was asked for before a stop acts now, or never
        if not memory.dropped:
            return {"loaded_bytes": 0}
        if not spec and memory.holds is None:
            raise unknown(process)
        with _opened(memory, spec) as fd:
            header = _header(fd, process, spec)
            regions = [Region(*r) for r in header["regions"]]
            memory.prove(regions)
            parts = file.pieces(regions)
            begun = True
            left = sum(r.nbytes for r in regions)
            for part in _ranges(regions):
                if (room := memory.room()).available_bytes < (needed := left + left // 64 + plan.IMAGE_MARGIN_BYTES):
                    raise _no_room(process, needed, room)
                memory.fill(part)
                left -= part.nbytes
                inside = [p for p in parts if part.address <= p.address < part.end]
                file.read(fd, inside, header["sums"], memory.write, check)
        memory.loaded()
    except BaseException as error:
        if begun:
            with contextlib.suppress(Exception):
                for region in regions:
                    memory.drop(region)
        if not isinstance(error, OSError | Unavailable | Unanswered | Corrupted):
            raise
        damaged = isinstance(error, Corrupted)
        raise errors.ImageUnreadable(
            f"the image of pid {process} cannot be brought back from {spec.get('path', 'the file that it holds')}: {_words(error)}. "
            "Nothing was restored; it stays suspended, its image where it was",
            hint=f"when that is mended: gpuckpt resume {process}" + (f"; if it is truly damaged: kill {process}" if damaged else ""),
            pid=process.pid,
            step=str(Call.LOAD),
        ) from error
    return {"loaded_bytes": sum(r.nbytes for r in regions)}


def unknown(process: ProcessId) -> errors.ImageUnreadable:
    return errors.ImageUnreadable(
        f"the image of pid {process} is on disk, and this journal does not say where; nothing was restored, it stays suspended",
        hint="resume it as the user and with the GPUCKPT_STATE_DIR that it was suspended with",
        pid=process.pid,
        step=str(Call.LOAD),
    )


def not_stored(process: ProcessId, directory: Path, error: Exception) -> errors.GpuckptError:
    elsewhere = f"gpuckpt suspend {process} --keep-in another directory; or " if isinstance(error, OSError) else ""
    return errors.ImageNotStored(
        f"pid {process} is suspended, but its image stays in host memory: it could not be written to {directory}: {_words(error)}",
        hint=f"{elsewhere}gpuckpt resume {process} as ever",
        pid=process.pid,
        step=str(Call.STORE),
    )


def _prove_pages_come(memory: Memory, region: Region) -> None:
    """Get a page that is there, which changes nothing. Where that cannot be, an image on disk would stay there for ever."""
    try:
        memory.fill(Region(region.address, mmap.PAGESIZE))
    except OSError as error:
        raise Unavailable(
            f"its pages could not be got again ({error.strerror}): that takes Linux 5.14, and no seccomp filter on MADV_POPULATE_WRITE"
        ) from error


def _no_room(process: ProcessId, nbytes: int, room: HostRoom) -> errors.GpuckptError:
    return errors.HostMemory(
        f"the image of pid {process} takes {size(nbytes)} of host memory on its way back, and {room.limit} leaves "
        f"{size(room.available_bytes)}; nothing was restored, and it stays suspended, its image on disk",
        hint=f"free host memory, then gpuckpt resume {process}",
        pid=process.pid,
        step=str(Call.LOAD),
    )


def _ranges(regions: list[Region]) -> Iterator[Region]:
    for region in regions:
        for address in range(region.address, region.end, RANGE_BYTES):
            yield Region(address, min(RANGE_BYTES, region.end - address))


@contextlib.contextmanager
def _opened(memory: Memory, spec: Mapping[str, Any]) -> Iterator[int]:
    """The file, as the process holds it, else by its name."""
    held = memory.holds
    path = held or Path(spec["path"])
    status = os.stat(path) if held else os.lstat(path)
    if not stat.S_ISREG(status.st_mode) or (spec and [status.st_dev, status.st_ino] != list(spec["inode"])):
        raise Corrupted("it is not the file that was written")
    with file.directly(path, os.O_RDONLY) as fd:
        yield fd


def _header(fd: int, process: ProcessId, spec: Mapping[str, Any]) -> dict[str, Any]:
    header: dict[str, Any] = file.header(fd)
    if header["process"] != [process.pid, process.start_ticks] or (spec and header["operation"] != spec["operation"]):
        raise Corrupted("it is the image of another process")
    return header


def _words(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
