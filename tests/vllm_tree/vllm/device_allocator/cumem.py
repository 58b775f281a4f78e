"""vLLM's sleep mode on a simulated GPU: blocks of memory with a tag, whose content lies in this process."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gpuckpt.driver.api import CallError
from gpuckpt.driver.simulated_store import SimulatedWorldDir
from vllm.device_allocator import AllocationData, HandleType

DEVICE: dict[int, bytes] = {}  # what is at each address of the GPU
HOST: dict[int, bytes] = {}
CONTENT = 64
_addresses = itertools.count(0x7000_0000_0000, 1 << 30)


class HostTensor:
    def __init__(self, nbytes: int) -> None:
        if (limit := SimulatedWorldDir(os.environ["GPUCKPT_SIMULATE"]).path / "pinned").exists() and int(limit.read_text()) < nbytes:
            raise RuntimeError("CUDA error: out of memory (cudaHostAlloc)")
        self.nbytes, self.address = nbytes, next(_addresses)
        HOST[self.address] = b""

    def data_ptr(self) -> int:
        return self.address

    def numel(self) -> int:
        return self.nbytes

    def element_size(self) -> int:
        return 1


class Libcudart:
    def cudaMemcpy(self, dst: int, src: int, count: int) -> None:  # noqa: N802 - its name
        content = DEVICE[src] if src in DEVICE else HOST[src]
        if dst in DEVICE:
            DEVICE[dst] = content
        else:
            HOST[dst] = content


libcudart = Libcudart()


def create_and_map(allocation_handle: HandleType) -> None:
    _, size, address, _ = allocation_handle
    if address in DEVICE:
        raise RuntimeError("CUDA Error: invalid argument")  # it is mapped
    with SimulatedWorldDir(os.environ["GPUCKPT_SIMULATE"]).transaction() as world:
        try:
            world.rules.alloc(os.getpid(), size)
        except CallError as error:
            raise RuntimeError("CUDA Error: out of memory") from error
    DEVICE[address] = os.urandom(CONTENT)


def unmap_and_release(allocation_handle: HandleType) -> None:
    _, size, address, _ = allocation_handle
    with SimulatedWorldDir(os.environ["GPUCKPT_SIMULATE"]).transaction() as world:
        world.rules.release(os.getpid(), size)
    del DEVICE[address]


def allocate(size: int) -> int:
    """As torch does: in the pool of the innermost context."""
    return (ROUTES[-1] if ROUTES else CuMemAllocator.get_instance()).allocate(size)


ROUTES: list[Any] = []  # allocators other than vLLM's that are in use just now


class CuMemAllocator:
    instance: CuMemAllocator | None = None

    @staticmethod
    def get_instance() -> CuMemAllocator:
        if CuMemAllocator.instance is None:
            CuMemAllocator.instance = CuMemAllocator()
        return CuMemAllocator.instance

    def __init__(self) -> None:
        self.pointer_to_data: dict[int, AllocationData] = {}
        self.current_tag = "default"

    @contextmanager
    def use_memory_pool(self, tag: str) -> Iterator[None]:
        self.current_tag, before = tag, self.current_tag
        yield
        self.current_tag = before

    def allocate(self, size: int) -> int:
        handle = (0, size, next(_addresses), 1)
        create_and_map(handle)
        self.pointer_to_data[handle[2]] = AllocationData(handle, self.current_tag)
        return handle[2]

    def sleep(self, offload_tags: tuple[str, ...]) -> None:
        for address, data in self.pointer_to_data.items():
            if data.tag in offload_tags:
                copy = HostTensor(data.handle[1])
                libcudart.cudaMemcpy(copy.data_ptr(), address, copy.nbytes)
                data.cpu_backup_tensor = copy
            try:
                unmap_and_release(data.handle)
            finally:
                data.is_asleep = True

    def wake_up(self, tags: list[str] | None = None) -> None:
        for address, data in self.pointer_to_data.items():
            if tags is None or data.tag in tags:
                create_and_map(data.handle)
                data.is_asleep = False
                if data.cpu_backup_tensor is not None:
                    libcudart.cudaMemcpy(address, data.cpu_backup_tensor.data_ptr(), data.cpu_backup_tensor.nbytes)
                    data.cpu_backup_tensor = None
