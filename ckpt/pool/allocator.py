"""The pool's C library: loaded, called, and its answers in words. Nothing of torch is here.

A tag is a slot of the library, which has a malloc for each; see ``_cumem.c`` for what a block is and what always holds of it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpuckpt.inspect import host

NAME = "libgpuckpt_pool"
TAGS = 16
FREE = "gpuckpt_pool_free"
WHERE = ("gpu", "host", "discarded")

_DONE, _NO_DRIVER, _FORKED, _NO_HOST_MEMORY, _NO_GPU_MEMORY, _DRIVER_FAILED, _LEAVING = range(7)
_LEAVE, _OFFLOAD, _DISCARD = range(3)
_MARGIN_BYTES = 256 << 20  # of host memory, that a sleep leaves
_GIB = 1 << 30


class PoolError(RuntimeError):
    """The pool could not do it. Every block is wholly awake or wholly asleep, no byte is lost, and the call can be made again."""


class NoHostMemory(PoolError):
    """Host memory is short for the copies of a sleep: all that was awake is awake."""


class NoGpuMemory(PoolError):
    """GPU memory is short for a wake, or for what a sleep copies with: all is as it was. Free some, and call again."""


@dataclass(frozen=True, slots=True)
class Moved:
    """What a sleep or wake did. ``tags``: bytes that changed place, by tag. ``bytes_unchanged`` were in host memory already;
    ``bytes_discarded`` left no copy (a wake gives them memory with undefined content). ``phases``: seconds of each part of it."""

    seconds: float
    bytes_copied: int
    bytes_discarded: int
    bytes_unchanged: int
    tags: dict[str, int] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    bytes_pageable: int = 0


@dataclass(frozen=True, slots=True)
class TagStats:
    """Memory of one tag on one device, in one place (``where``: "gpu", "host", "discarded"), in bytes. ``host_bytes``: its copies in host
    memory, which are kept while it is awake."""

    tag: str
    device: int
    bytes: int
    where: str
    host_bytes: int


class _CMoved(ctypes.Structure):
    _fields_ = (
        *((n, ctypes.c_uint64) for n in ("copied", "discarded", "unchanged")),
        ("by_tag", ctypes.c_uint64 * TAGS),
        *((n + "_ns", ctypes.c_uint64) for n in ("sync", "host", "print", "map", "copy", "unmap")),
        ("pageable", ctypes.c_uint64),
        *((n, ctypes.c_int32) for n in ("failure", "result", "device")),
        ("blocks", ctypes.c_uint32),
        ("wanted", ctypes.c_uint64),
        ("call", ctypes.c_char * 48),
    )


class _Row(ctypes.Structure):
    _fields_ = (
        *((n, ctypes.c_uint64) for n in ("address", "nbytes", "host_bytes")),
        ("device", ctypes.c_int32),
        *((n, ctypes.c_uint32) for n in ("tag", "where", "dead")),
    )


def library() -> Path | None:
    """The C library of this installation; None where it was installed without a compiler."""
    return next(iter(sorted(Path(__file__).parent.glob(f"{NAME}*.so"))), None)


class Allocator:
    """The library at *path*, on the driver *libcuda*. One a process: its blocks are the process's.

    Raises:
        PoolError: the library or the driver cannot be loaded, or lacks something; the message names it.
    """

    def __init__(self, path: Path, libcuda: str = "libcuda.so.1") -> None:
        self.path = path
        try:
            self._c = ctypes.CDLL(str(path))
        except OSError as error:
            raise PoolError(f"the pool's library cannot be loaded: {error}") from error
        self._c.gpuckpt_pool_rows.restype = ctypes.c_size_t
        self._c.gpuckpt_pool_trim.restype = ctypes.c_uint64
        missing = ctypes.create_string_buffer(48)
        if self._c.gpuckpt_pool_open(libcuda.encode(), missing):
            raise PoolError(f"the pool needs {missing.value.decode()}, which is not there: no NVIDIA driver, or one older than 11.2")
        self._tags: list[str] = []
        self._threads = min(len(os.sched_getaffinity(0)), host.cpu_quota("self"))
        self.tune()

    # Tags.

    @property
    def tags(self) -> tuple[str, ...]:
        return tuple(self._tags)

    def slot(self, tag: str) -> int:
        """The slot of *tag*, from now on if it had none."""
        if tag not in self._tags:
            if len(self._tags) == TAGS:
                raise ValueError(f"no tag {tag!r}: a process has {TAGS} at most, and these are they: {', '.join(self._tags)}")
            self._tags.append(tag)
        return self._tags.index(tag)

    def malloc_name(self, tag: str) -> str:
        """The function that allocates under *tag*, as torch's pluggable allocator wants it."""
        return f"gpuckpt_pool_malloc_{self.slot(tag)}"

    def prepare(self, device: int) -> None:
        """Load what a sleep computes on *device*: the driver compiles it at its first use by a user."""
        self._c.gpuckpt_pool_prepare(device)

    def capturing(self, begun: bool) -> None:
        """A graph's capture begins, or has ended: meanwhile nothing that is freed waits for the GPU."""
        self._c.gpuckpt_pool_capturing(int(begun))

    # Looking.

    def rows(self) -> list[_Row]:
        room = 64
        while True:
            rows = (_Row * room)()
            count: int = self._c.gpuckpt_pool_rows(rows, ctypes.c_size_t(room))
            if count <= room:
                return [r for r in rows[:count] if not r.dead]
            room = count + 64

    def stats(self) -> tuple[TagStats, ...]:
        """By tag, device and place, in that order."""
        sums: dict[tuple[str, int, int], list[int]] = {}
        for row in self.rows():
            entry = sums.setdefault((self._tags[row.tag], row.device, row.where), [0, 0])
            entry[0] += row.nbytes
            entry[1] += row.host_bytes
        return tuple(TagStats(tag, device, b, WHERE[where], h) for (tag, device, where), (b, h) in sorted(sums.items()))

    # Moving.

    def sleep(self, actions: Mapping[str, str]) -> Moved:
        """Put the tags of *actions* to sleep: "offload" or "discard" each. What sleeps already stays as it is.

        Raises:
            NoHostMemory, PoolError
        """
        numbers = {"offload": _OFFLOAD, "discard": _DISCARD}
        self._refuse_without_host_memory({t for t, a in actions.items() if a == "offload"})
        wanted = (ctypes.c_uint8 * TAGS)(*[numbers[actions[t]] if t in actions else _LEAVE for t in self._tags])
        return self._move(self._c.gpuckpt_pool_sleep, wanted, "sleep")

    def wake(self, tags: Collection[str]) -> Moved:
        """Wake *tags*, all of them or none.

        Raises:
            NoGpuMemory, PoolError
        """
        return self._move(self._c.gpuckpt_pool_wake, (ctypes.c_uint8 * TAGS)(*[t in tags for t in self._tags]), "wake")

    def trim(self) -> int:
        """Give the host copies of awake memory back; the next sleep makes them anew. Returns bytes."""
        given: int = self._c.gpuckpt_pool_trim()
        return given

    def tune(self, threads: int = 0, piece: int = 0, part: int = 0) -> None:
        """How copies are made, to measure it: by so many threads, in pieces and through stages of so many bytes; 0: as by
        default, which is a thread for each CPU that this process may use, 16 at most."""
        self._c.gpuckpt_pool_tune(threads or self._threads, ctypes.c_size_t(piece), ctypes.c_size_t(part))

    def _refuse_without_host_memory(self, tags: Collection[str]) -> None:
        """The budget of a run is over all that it holds: here it bounds what this process has by itself, by whomever it is put to sleep."""
        rows = self.rows()
        wanted = sum(r.nbytes for r in rows if self._tags[r.tag] in tags and r.where == 0 and not r.host_bytes)
        if not wanted:
            return
        room, held, budget = host.host_room("self"), sum(r.host_bytes for r in rows), os.environ.get(host.BUDGET_VARIABLE, "")
        short = ""
        if wanted + _MARGIN_BYTES > room.available_bytes:
            short = f"there are {room.available_bytes / _GIB:.2f} GiB ({room.limit})"
        elif budget.isdigit() and held + wanted > int(budget):
            short = (
                f"beside the {held / _GIB:.2f} GiB that it holds that is more than {int(budget) / _GIB:.2f} GiB ({host.BUDGET_VARIABLE})"
            )
        if short:
            raise NoHostMemory(
                f"pid {os.getpid()}: a sleep takes {wanted / _GIB:.2f} GiB of host memory more, and {short}. "
                "What was awake is awake. Discard more tags, or give memory back, and call again"
            )

    def _move(self, call: ctypes._NamedFuncPointer, tags: ctypes.Array[ctypes.c_uint8], verb: str) -> Moved:
        moved = _CMoved()
        call(tags, ctypes.byref(moved))
        if moved.failure:
            raise self._error(moved, verb)
        phases = {n: getattr(moved, n + "_ns") / 1e9 for n in ("sync", "host", "print", "map", "copy", "unmap")}
        return Moved(
            seconds=sum(phases.values()),
            bytes_copied=moved.copied,
            bytes_discarded=moved.discarded,
            bytes_unchanged=moved.unchanged,
            tags={t: moved.by_tag[i] for i, t in enumerate(self._tags) if moved.by_tag[i]},
            phases=phases,
            bytes_pageable=moved.pageable,
        )

    def _error(self, moved: _CMoved, verb: str) -> PoolError:
        me, call, gib = f"pid {os.getpid()}", moved.call.decode(), moved.wanted / _GIB
        gpu = f"GPU {moved.device}" if moved.device >= 0 else "the GPU"
        if moved.failure == _FORKED:
            return PoolError(f"{me} is a forked child: the pool's memory is its parent's, which alone can make it {verb}")
        as_it_was, less = (
            ("What was awake is awake", ", or discard more tags")
            if verb == "sleep"
            else ("All that slept sleeps, its bytes in host memory", "")
        )
        if moved.failure == _NO_GPU_MEMORY:
            what = f"a block of {gib:.2f} GiB" if moved.wanted else "what copying takes"
            return NoGpuMemory(f"{me}: {gpu} has no room for {what} ({call}). {as_it_was}. Free GPU memory, and {verb} again")
        if moved.failure == _NO_HOST_MEMORY:
            what = f"{gib:.2f} GiB" if moved.wanted else "the list of what moves"
            why = os.strerror(moved.result) if moved.result else "refused"
            return NoHostMemory(f"{me}: no host memory for {what} ({call}: {why}). {as_it_was}. Free host memory{less}, and {verb} again")
        if moved.failure == _LEAVING:
            return PoolError(f"{me} is ending: its pool does not {verb} any more")
        return PoolError(
            f"{me}: {call} on {gpu} failed with CUDA error {moved.result} during {verb}. Each block is wholly awake or wholly asleep, "
            f"its bytes kept; gpuckpt.pool.stats() tells which. Call {verb} again"
        )
