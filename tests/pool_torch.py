"""As much of torch as the pool calls, on the fake driver: memory pools with allocators of others, captures, and a cache.

What it keeps to: of two pools that a thread is in, the outer one wins; unused segments are freed when nobody holds their pool any more;
a graph holds its pool; with expandable_segments a pool of others allocates nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import gpuckpt.pool as pool
from gpuckpt.pool import tags
from gpuckpt.pool.tags import Tags
from tests.pool_machine import GRANULARITY, Gpu


class Tensor:
    """Memory of a segment of its own; freed with it, to its pool's cache."""

    def __init__(self, torch: Torch, pool: Private | None, device: int, nbytes: int) -> None:
        self._torch, self._pool, self.nbytes = torch, pool, nbytes
        self.address = torch.take(pool, device, nbytes)

    def data_ptr(self) -> int:
        return self.address

    def copy_(self, source: bytes | Tensor) -> Tensor:
        data = ctypes.string_at(source.address, source.nbytes) if isinstance(source, Tensor) else source
        ctypes.memmove(self.address, data, len(data))
        return self

    def content(self) -> bytes:
        return ctypes.string_at(self.address, self.nbytes)

    def __del__(self) -> None:
        if self._pool is not None and hasattr(self, "address"):
            self._pool.unused.append((self.address, self.nbytes))


class Private:
    """A private pool of torch's caching allocator."""

    def __init__(self, malloc: Any, free: Any, device: int) -> None:
        self.malloc, self.free, self.device, self.uses = malloc, free, device, 1
        self.unused: list[tuple[int, int]] = []

    def release(self) -> None:
        for address, nbytes in self.unused:
            self.free(address, nbytes, self.device, None)
        self.unused.clear()


class Torch:
    """The fake module, and what it was asked."""

    def __init__(self) -> None:
        self.device, self.synchronised, self.caches_emptied = 0, 0, 0
        self.pools: dict[int, Private] = {}
        self.routes: list[tuple[int, int, int]] = []  # (thread, device, pool), the outermost first
        self.plain: list[Any] = []
        self.settings = {"expandable_segments": False}
        self.backend = "native"
        self.gpus = True
        self._ids = itertools.count(1)
        self.module = ModuleType("torch")
        memory = SimpleNamespace(
            CUDAPluggableAllocator=self._allocator(), MemPool=self._mem_pool(), use_mem_pool=self.use_mem_pool, _snapshot=self._snapshot
        )
        cuda = SimpleNamespace(
            memory=memory,
            current_device=lambda: self.device,
            synchronize=self._synchronize,
            empty_cache=self.empty_cache,
            graph=self.graph,
            CUDAGraph=type("CUDAGraph", (Graph,), {"torch": self}),
            get_allocator_backend=lambda: self.backend,
            is_available=lambda: self.gpus,
        )
        for name, value in {"cuda": cuda, "version": SimpleNamespace(cuda="13.0"), "__version__": "2.11.0"}.items():
            setattr(self.module, name, value)

    def empty(self, nbytes: int) -> Tensor:
        me = threading.get_ident()
        pool = next((p for thread, device, p in self.routes if thread == me and device == self.device), None)
        return Tensor(self, None if pool is None else self.pools[pool], self.device, nbytes)

    def take(self, pool: Private | None, device: int, nbytes: int) -> int:
        if pool is None:
            self.plain.append(ctypes.create_string_buffer(nbytes))
            return ctypes.addressof(self.plain[-1])
        if self.settings["expandable_segments"]:
            raise RuntimeError("MemPool doesn't currently support expandable_segments.")
        for cached in pool.unused:
            if cached[1] == nbytes:
                pool.unused.remove(cached)
                return cached[0]
        address = pool.malloc(nbytes, device, None)
        if not address:
            raise MemoryError("CUDA out of memory")
        return int(address)

    def empty_cache(self) -> None:
        self.caches_emptied += 1
        for private in self.pools.values():
            if private.uses == 0:
                private.release()

    @contextlib.contextmanager
    def use_mem_pool(self, pool: Any, device: int | None = None) -> Iterator[None]:
        route = (threading.get_ident(), self.device if device is None else device, pool.id)
        self.routes.append(route)
        self.pools[pool.id].uses += 1
        try:
            yield
        finally:
            self.routes.remove(route)
            self.pools[pool.id].uses -= 1

    @contextlib.contextmanager
    def graph(self, graph: Any, pool: int | None = None, stream: Any = None) -> Iterator[None]:
        graph.stream, graph.torch = stream, self
        graph.capture_begin(*([] if pool is None else [pool]), capture_error_mode="global")
        try:
            yield
        finally:
            graph.capture_end()

    def _synchronize(self, device: int | None = None) -> None:
        self.synchronised += 1

    def _snapshot(self) -> dict[str, Any]:
        return {"allocator_settings": self.settings}

    def _allocator(self) -> type:
        class CUDAPluggableAllocator:
            def __init__(self, path: str, malloc: str, free: str) -> None:
                library = ctypes.CDLL(path)
                self.malloc, self.free = getattr(library, malloc), getattr(library, free)
                self.malloc.restype, self.malloc.argtypes = ctypes.c_void_p, (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
                self.free.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)

            def allocator(self) -> CUDAPluggableAllocator:
                return self

        return CUDAPluggableAllocator

    def _mem_pool(self) -> type:
        torch = self

        class MemPool:
            def __init__(self, allocator: Any) -> None:
                self.id = next(torch._ids)
                torch.pools[self.id] = Private(allocator.malloc, allocator.free, torch.device)

            def use_count(self) -> int:
                return torch.pools[self.id].uses

            def __del__(self) -> None:
                pool = torch.pools[self.id]
                pool.uses -= 1
                if pool.uses == 0:
                    pool.release()

        return MemPool


class Graph:
    """A CUDA graph: holds its pool until it is reset."""

    _pool: int | None = None
    torch: Torch
    route = (0, 0, 0)

    def capture_begin(self, pool: int | None = None, capture_error_mode: str = "global") -> None:
        assert capture_error_mode
        self._pool = pool
        if pool is not None:
            assert self.torch.pools[pool].uses, "a pool that is gone: torch would begin one of its own under this id, without our allocator"
            self.torch.pools[pool].uses += 1
            self.route = (threading.get_ident(), self.torch.device, pool)
            self.torch.routes.append(self.route)

    def capture_end(self) -> None:
        if self._pool is not None:
            self.torch.routes.remove(self.route)

    def reset(self) -> None:
        if self._pool is not None:
            self.torch.pools[self._pool].uses -= 1
            self._pool = None

    def pool(self) -> int:
        if self._pool is None:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self._pool


def install(monkeypatch: pytest.MonkeyPatch) -> Torch:
    torch = Torch()
    monkeypatch.setitem(sys.modules, "torch", torch.module)
    return torch


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Torch:
    monkeypatch.setattr(tags, "_warned", threading.Event())
    for name in ("GPUCKPT_POOL", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pool, "_tags", None)
    return install(monkeypatch)


@pytest.fixture
def gpu(tmp_path: Path, torch: Torch, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu(tmp_path)
    monkeypatch.setattr(pool, "_tags", Tags(made.pool))
    return made


def where() -> dict[str, str]:
    return {s.tag: s.where for s in pool.stats()}


def under(torch: Torch, name: str, text: bytes = b"") -> Tensor:
    with pool.tag(name):
        return torch.empty(GRANULARITY).copy_(text)


def lasting(torch: Torch, *names: str) -> None:
    """A tensor under each, which lives as long as *torch*."""
    torch.plain += [under(torch, name) for name in names]
