"""The image of a checkpointed process, where it lies in memory: read, written, given back and got anew, from outside.

The driver keeps it in private anonymous memory of the process (docs/driver-path.md). Reading and writing takes ``/proc/PID/mem``; giving
pages back and getting them takes the process itself, in which the preload library has a thread for it.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from gpuckpt.image import keeper, page, preload
from gpuckpt.image.file import Region
from gpuckpt.image.keeper import Unanswered
from gpuckpt.image.page import Unavailable
from gpuckpt.inspect import host
from gpuckpt.model import HostRoom, ProcessId

__all__ = ["Memory", "Preloaded", "Unanswered", "Unavailable"]

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Memory(Protocol):
    """An image in the memory of a checkpointed process. Raises :class:`Unanswered` where the process does not answer, else ``OSError``."""

    @property
    def dropped(self) -> bool:
        """Whether pages were given back whose content has not all returned: to restore now would lose the process."""
        ...

    def regions(self) -> list[Region]:
        """Where it lies. Raises :class:`Unavailable` unless that is certain."""
        ...

    def prove(self, regions: Sequence[Region]) -> None:
        """Raise :class:`Unavailable` unless all that lies in *regions* is certainly the image."""
        ...

    def read(self, buffer: memoryview, address: int) -> None: ...

    def write(self, buffer: memoryview, address: int) -> None: ...

    def drop(self, region: Region) -> None:
        """Give its pages back."""
        ...

    def fill(self, region: Region) -> None:
        """Get pages for it. A shortage is an ``OSError``."""
        ...

    def loaded(self) -> None:
        """All content is there again."""
        ...

    def settle(self) -> None:
        """Afterwards nothing that was asked before can act any more."""
        ...

    def hold(self, path: Path, is_file: os.stat_result) -> bool:
        """Have the process hold the file, so that it needs no name and ends with the process; whether it does."""
        ...

    def let_go(self) -> None: ...

    @property
    def holds(self) -> Path | None:
        """Where the file that the process holds can be opened."""
        ...

    def room(self) -> HostRoom:
        """Host memory that the process may still take."""
        ...

    def owner(self) -> tuple[int, int]:
        """uid and gid of the process."""
        ...


class Preloaded:
    """The image of a process that has the preload library: implements :class:`Memory`."""

    def __init__(self, process: ProcessId, keeper_: keeper.Keeper) -> None:
        self.process = process
        self._keeper = keeper_

    @property
    def dropped(self) -> bool:
        return self._keeper.dropped

    @property
    def holds(self) -> Path | None:
        return self._keeper.holds

    def regions(self) -> list[Region]:
        seen = preload.result(self.process)
        found = [Region(i.address, -(-i.nbytes // _PAGE_BYTES) * _PAGE_BYTES) for i in seen.images if i.address]
        if not found or seen.count != len(found):
            raise Unavailable(f"the preload library in pid {self.process} did not see the driver make the image")
        self.prove(found)
        return found

    def prove(self, regions: Sequence[Region]) -> None:
        ours = list(_marked(self.process.pid))
        for region in regions:
            at = region.address
            for begin, end in ours:
                if begin <= at < end:
                    at = end
            if at < region.end:
                raise Unavailable(f"what lies at {region.address:#x} in pid {self.process} is not for certain its image")

    def read(self, buffer: memoryview, address: int) -> None:
        at = 0
        while at < len(buffer):
            at += page.some(os.preadv(self._keeper.memory, [buffer[at:]], address + at))

    def write(self, buffer: memoryview, address: int) -> None:
        at = 0
        while at < len(buffer):
            at += page.some(os.pwrite(self._keeper.memory, buffer[at:], address + at))

    def drop(self, region: Region) -> None:
        self._keeper.drop(region.address, region.end)

    def fill(self, region: Region) -> None:
        self._keeper.fill(region.address, region.end)

    def loaded(self) -> None:
        self._keeper.loaded()

    def settle(self) -> None:
        self._keeper.settle()

    def hold(self, path: Path, is_file: os.stat_result) -> bool:
        return self._keeper.hold(path, is_file)

    def let_go(self) -> None:
        self._keeper.let_go()

    def room(self) -> HostRoom:
        return host.host_room(self.process.pid)

    def owner(self) -> tuple[int, int]:
        status = os.stat(f"/proc/{self.process.pid}")
        return status.st_uid, status.st_gid


@contextlib.contextmanager
def of(process: ProcessId) -> Iterator[Preloaded]:
    """The image of *process*. Raises :class:`Unavailable` where there is no library, or it has no keeper there."""
    with keeper.of(process) as found:
        yield Preloaded(process, found)


def _marked(pid: int) -> Iterator[tuple[int, int]]:
    """Mappings of *pid* that the library marked as an image: by name, or where the kernel has none, by the advice that it gave: memory
    that is only kept ready for an image is not for children either (``dc``)."""
    begin = end = 0
    private = named = False
    with open(f"/proc/{pid}/smaps", "rb") as file:
        for line in file:
            if header := re.match(rb"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ 0\s*(.*)$", line):
                begin, end = int(header[1], 16), int(header[2], 16)
                private = header[3] == b"rw-p" and (not header[4] or header[4].startswith(b"[anon:"))
                named = header[4].startswith(b"[anon:gpuckpt-image-")
            elif line.startswith(b"VmFlags:") and private and (named or {b"dd", b"dc"} & set(line.split()) == {b"dd"}):
                yield begin, end
                private = False
