"""The host image of a simulated process: lies in files, and is moved to and from disk as a real one is.

The process must have the preload library, as a real one must: nothing else could give its pages back. What it holds ends with it.
"""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from gpuckpt.image import preload
from gpuckpt.image.file import Region
from gpuckpt.image.memory import Unanswered, Unavailable
from gpuckpt.inspect import host
from gpuckpt.model import GIB, HostRoom, ProcessId

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuckpt.driver.simulated_store import SimulatedWorldDir


class SimulatedImage:
    """Implements :class:`gpuckpt.image.memory.Memory`. Each GPU's content is a region of one page."""

    def __init__(self, world: SimulatedWorldDir, process: ProcessId) -> None:
        preload.refuse_missing(process)
        self._world, self._process = world, process
        self._files = sorted((world.path / "host" / f"{process.pid}-{process.start_ticks}").glob("*"), key=lambda p: int(p.name))
        self._kept = world.kept(process.pid, process.start_ticks)

    @property
    def dropped(self) -> bool:
        return (self._kept / "dropped").exists()

    @property
    def holds(self) -> Path | None:
        held = self._kept / "held"
        return held if held.exists() else None

    def regions(self) -> list[Region]:
        if not self._files:
            raise Unavailable(f"pid {self._process} has no image")
        return [Region((n + 1) * GIB, len(path.read_bytes())) for n, path in enumerate(self._files)]

    def prove(self, regions: Sequence[Region]) -> None:
        if list(regions) != self.regions():
            raise Unavailable(f"what is in pid {self._process} is not its image")

    def read(self, buffer: memoryview, address: int) -> None:
        buffer[:] = self._file(address).read_bytes()

    def write(self, buffer: memoryview, address: int) -> None:
        self._file(address).write_bytes(buffer)

    def drop(self, region: Region) -> None:
        self._answer("drop")
        self._kept.mkdir(parents=True, exist_ok=True)
        (self._kept / "dropped").touch()
        self._file(region.address).write_bytes(bytes(region.nbytes))

    def fill(self, region: Region) -> None:  # noqa: ARG002 - its files are there
        self._answer("fill")

    def loaded(self) -> None:
        (self._kept / "dropped").unlink(missing_ok=True)

    def settle(self) -> None:
        self._answer("settle")

    def hold(self, path: Path, is_file: os.stat_result) -> bool:  # noqa: ARG002 - a link is the file
        self._answer("hold")
        self._kept.mkdir(parents=True, exist_ok=True)
        (self._kept / "held").unlink(missing_ok=True)
        try:
            self._answer("link")
            os.link(path, self._kept / "held")  # in place of a descriptor
        except OSError:
            return False
        return True

    def let_go(self) -> None:
        (self._kept / "held").unlink(missing_ok=True)

    def room(self) -> HostRoom:
        root = self._world.path / "root"
        return host.host_room(self._process.pid, root if root.is_dir() else host.ROOT)

    def owner(self) -> tuple[int, int]:
        status = os.stat(f"/proc/{self._process.pid}")
        return status.st_uid, status.st_gid

    def _file(self, address: int) -> Path:
        return self._files[address // GIB - 1]

    def _answer(self, request: str) -> None:
        fault = self._world.take_fault(request, self._process.pid)
        if fault is not None and fault.delay_s:
            time.sleep(fault.delay_s)
            return
        if fault is not None and fault.hang:
            raise Unanswered(f"the keeper of pid {self._process} has not answered")
        if fault is not None:
            number = getattr(errno, fault.result or "EIO")
            raise OSError(number, os.strerror(number))
