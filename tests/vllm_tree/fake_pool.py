"""``gpuckpt.pool`` in a stand-in for vLLM: its tags, on the stand-in's simulated GPU. Takes that module's place at ``FAKE_POOL=1``."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from vllm.device_allocator import AllocationData, cumem


class Pool:
    def __init__(self) -> None:
        self.blocks: dict[int, AllocationData] = {}
        self.name = ""

    def problem(self) -> str:
        return os.environ.get("FAKE_POOL_PROBLEM", "")

    def active(self) -> bool:
        return bool(self.blocks)

    @contextmanager
    def tag(self, name: str) -> Iterator[None]:
        before, self.name = self.name, name
        cumem.ROUTES.append(self)
        yield
        cumem.ROUTES.pop()
        self.name = before

    def allocate(self, size: int) -> int:
        handle = (0, size, next(cumem._addresses), 1)
        cumem.create_and_map(handle)
        self.blocks[handle[2]] = AllocationData(handle, self.name)
        return handle[2]

    def graph_pool(self) -> Any:
        if os.environ.get("FAKE_POOL_GRAPHS") == "no":
            raise RuntimeError("torch's CUDAGraph has no capture_begin")
        return SimpleNamespace(allocate=self._allocate_for_graphs)

    def _allocate_for_graphs(self, size: int) -> int:
        with self.tag("cudagraph"):
            return self.allocate(size)

    def trim(self) -> int:
        if cumem.ROUTES:
            raise RuntimeError("the pool cannot trim while something is allocated")
        return 0

    def stats(self) -> tuple[Any, ...]:
        def where(b: AllocationData) -> str:
            return "gpu" if not b.is_asleep else "host" if b.cpu_backup_tensor else "discarded"

        return tuple(SimpleNamespace(tag=b.tag, device=0, bytes=b.handle[1], where=where(b), host_bytes=0) for b in self.blocks.values())

    def sleep(self, level: int = 1, *, offload: Collection[str] = (), discard: Collection[str] = ()) -> None:
        assert not set(offload) & set(discard)
        for address, block in self.blocks.items():
            if not block.is_asleep:
                block.cpu_backup_tensor = None if block.tag in discard else cumem.DEVICE[address]
                cumem.unmap_and_release(block.handle)
                block.is_asleep = True

    def wake(self, tags: Collection[str] | None = None) -> None:
        for address, block in self.blocks.items():
            if block.is_asleep and (tags is None or block.tag in tags or block.tag not in ("weights", "kv_cache")):
                cumem.create_and_map(block.handle)
                cumem.DEVICE[address] = block.cpu_backup_tensor or cumem.DEVICE[address]
                block.is_asleep = False


if os.environ.get("FAKE_POOL") == "1":
    sys.modules["gpuckpt.pool"] = Pool()  # type: ignore[assignment]
