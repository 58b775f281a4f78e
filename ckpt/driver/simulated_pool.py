"""A simulated ``gpuckpt.pool``: what a simtarget has in it leaves its GPU and comes back by the program's own doing, not by the driver's.

It has that module's calls as far as an agent makes them, and stands in its place in ``sys.modules``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from gpuckpt.driver.api import CallError
from gpuckpt.driver.simulated_store import SimulatedWorldDir

CONTENT_BYTES = 64


class NoHostMemory(RuntimeError):
    pass


class NoGpuMemory(RuntimeError):
    pass


@dataclass(frozen=True, slots=True)
class TagStats:
    tag: str
    device: int
    bytes: int
    where: str
    host_bytes: int


@dataclass(frozen=True, slots=True)
class Moved:
    bytes_copied: int
    bytes_discarded: int = 0
    bytes_unchanged: int = 0


class SimulatedPool:
    """The tags of the process *pid*, bytes each, all on its first GPU."""

    def __init__(self, world: SimulatedWorldDir, pid: int, tags: Mapping[str, int]) -> None:
        self._world, self._pid, self._tags = world, pid, dict(tags)
        self._gpu = {tag: os.urandom(CONTENT_BYTES) for tag in tags}  # what is asleep is not here
        self._host: dict[str, bytes] = {}

    @property
    def content(self) -> bytes:
        """What the program sees in its tags; of one that is asleep it would fault."""
        return b"".join(self._gpu.get(tag, b"asleep") for tag in self._tags)

    def active(self) -> bool:
        return bool(self._tags)

    def asleep(self) -> frozenset[str]:
        return frozenset(self._tags) - frozenset(self._gpu)

    def stats(self) -> tuple[TagStats, ...]:
        where = {tag: "gpu" if tag in self._gpu else "host" if tag in self._host else "discarded" for tag in self._tags}
        return tuple(TagStats(t, 0, n, where[t], n if t in self._host else 0) for t, n in self._tags.items())

    def sleep(self, *, offload: Collection[str], discard: Collection[str] = ()) -> Moved:
        """Faults of the call "offload" act here: with ``before=False`` when the first tag has left."""
        fault = self._fault("offload")
        copied = discarded = 0
        for tag in [t for t in self._tags if t in self._gpu and t in (*offload, *discard)]:
            if fault and fault.result and (fault.before or copied):
                raise NoHostMemory(fault.result)
            content = self._gpu.pop(tag)
            if tag in offload:
                self._host[tag], copied = content, copied + self._tags[tag]
            else:
                discarded += self._tags[tag]
            with self._world.cuda_call(self._pid), self._world.transaction() as world:
                world.rules.release(self._pid, self._tags[tag])
        return Moved(copied, discarded)

    def wake(self, tags: Collection[str] | None = None) -> Moved:
        """Faults of the call "onload" act here, in the same way."""
        fault = self._fault("onload")
        copied = 0
        for tag in [t for t in self._tags if t not in self._gpu and (tags is None or t in tags)]:
            if fault and fault.result and (fault.before or copied):
                raise NoGpuMemory(fault.result)
            with self._world.cuda_call(self._pid), self._world.transaction() as world:
                try:
                    world.rules.alloc(self._pid, self._tags[tag])
                except CallError as error:
                    raise NoGpuMemory(f"{tag}: {error.result}") from error
            self._gpu[tag] = self._host.pop(tag, os.urandom(CONTENT_BYTES))
            copied += self._tags[tag]
        return Moved(copied)

    def _fault(self, call: str) -> Any:
        fault = self._world.take_fault(call, self._pid)
        if fault:
            time.sleep(fault.delay_s)
        while fault and fault.hang:
            time.sleep(3600)
        return fault
