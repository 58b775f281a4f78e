"""The pool's library on the fake driver, in this process: each with globals of its own."""

from __future__ import annotations

import ctypes
import functools
import itertools
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpuckpt.pool import allocator
from gpuckpt.pool.allocator import Allocator

KIB = 1 << 10
GRANULARITY = 256 * KIB
GARBAGE = 0xDB
OUT_OF_MEMORY, NOT_PERMITTED, UNKNOWN = 2, 800, 999
_numbers = itertools.count()


@dataclass(frozen=True)
class Held:
    """What the fake driver holds for the process."""

    used: tuple[int, int]
    memories: int
    handles: int
    reserved: int
    mapped: int
    registered: int
    streams: int
    pinned: int
    contexts: int


class Gpu:
    """The pool's library on two fake GPUs."""

    def __init__(self, directory: Path, driver: Path | None = None) -> None:
        built = allocator.library()
        assert built is not None, "the pool's library was not built"
        number = next(_numbers)  # the loader knows files by their inode
        self.libcuda, self.library = (Path(shutil.copy(p, directory / f"{number}-{p.name}")) for p in (driver or fake(), built))
        self.fake, self._copied = ctypes.CDLL(str(self.libcuda)), 0
        self.fake.fake_failed.restype = ctypes.c_char_p
        self.fake.fake_calls.restype = self.fake.fake_copied.restype = ctypes.c_long
        self.pool = Allocator(self.library, str(self.libcuda))
        self.c = ctypes.CDLL(str(self.library))
        self.c.gpuckpt_pool_free.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)

    def malloc(self, tag: str, nbytes: int = GRANULARITY, device: int = 0) -> int:
        """The address, 0 where there is no room."""
        function = getattr(self.c, self.pool.malloc_name(tag))
        function.restype, function.argtypes = ctypes.c_void_p, (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
        return function(nbytes, device, None) or 0

    def free(self, address: int) -> None:
        self.c.gpuckpt_pool_free(address, 0, 0, None)

    def write(self, address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))

    def read(self, address: int, nbytes: int = GRANULARITY) -> bytes:
        return ctypes.string_at(address, nbytes)

    def fail(self, nth: int, code: int = UNKNOWN) -> None:
        """The *nth* driver call from now fails; 0: none."""
        self.fail_in("", nth, code)

    @property
    def failed(self) -> str:
        """The call that failed, "" if none has."""
        return self.fake.fake_failed().decode()

    def fail_in(self, call: str, nth: int = 1, code: int = UNKNOWN) -> None:
        """The *nth* *call* from now fails."""
        self.fake.fake_fail(call.encode(), ctypes.c_long(nth), code)

    def hook_at(self, nth: int, act: Callable[[], object]) -> list[str]:
        """Let *act* run before the *nth* driver call from now, on the thread that makes it. Returns a list that has its name then."""
        seen = itertools.count(1)
        called: list[str] = []

        def hook(name: bytes) -> None:
            if next(seen) == nth:
                called.append(name.decode())
                act()

        self._hook = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(hook)
        self.fake.fake_hook(self._hook)
        return called

    def unhook(self) -> None:
        self.fake.fake_hook(None)

    @property
    def idle(self) -> bool:
        """Nothing is held but mapped blocks."""
        held = self.held
        return (held.handles, held.registered, held.streams, held.pinned, held.contexts, held.memories) == (0, 0, 0, 0, 0, held.mapped)

    @property
    def nothing_held(self) -> bool:
        return self.idle and (self.held.reserved, self.held.mapped, self.held.used) == (0, 0, (0, 0))

    def capacity(self, nbytes: int, device: int = 0) -> None:
        self.fake.fake_capacity(device, ctypes.c_size_t(nbytes))

    def copied(self) -> int:
        """Bytes copied since it was last asked."""
        before, self._copied = self._copied, self.fake.fake_copied()
        return self._copied - before

    @property
    def held(self) -> Held:
        seen = (ctypes.c_uint64 * 10)()
        self.fake.fake_look(seen)
        return Held((seen[0], seen[1]), *seen[2:])


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Until this process ends. One that is given its driver does without: it may end in a way that leaves it there."""
    return tempfile.TemporaryDirectory(prefix="gpuckpt-pool-")


@functools.cache
def fake() -> Path:
    """The fake driver, compiled."""
    out = Path(_folder().name) / "libcuda_pool.so"
    source = Path(__file__).with_name("pool_libcuda.c")
    subprocess.run(
        ["gcc", "-std=c11", "-O3", "-Wall", "-Wextra", "-Wno-unused-parameter", "-shared", "-fPIC", "-pthread", "-o", out, source],
        check=True,
    )
    return out
