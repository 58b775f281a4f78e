"""What a process keeps on its GPUs once its pool has left, by class, as far as anything in the process can tell.

Asked on the program's own thread, while it stands at its safe point and before it disarms. Nothing is initialised for it: torch, NCCL and
the driver are asked where the program has them, and a GPU where its primary context is there. A class that cannot be told is left out: so
it is part of what NVML counts beyond all of these, with the context, modules and graph executables, of which no call tells.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from gpuckpt.agent.communicators import Communicators
from gpuckpt.agent.memory import Memory

#: class -> why it stays
WHY = {
    "pool": "tags that are awake",
    "torch": "segments of torch's cache, outside of tags, that a tensor or a graph uses",
    "nccl": "what communicators keep when they are suspended; all that they have where they cannot be, or are of one rank",
    "stream-ordered": "allocations of cudaMallocAsync",
    "graph-nodes": "memory that CUDA graphs allocate by nodes of their own",
    "local-memory": "the stack of the greediest kernel so far (cuCtxGetLimit), for each thread that can be resident: computed",
    "printf-malloc": "the limits of what kernels print and allocate: at most, taken with the first kernel that does",
}

_STACK, _PRINTF, _HEAP = 0, 1, 2  # CUlimit
_PROCESSORS, _THREADS = 16, 39  # CUdevice_attribute: of the GPU, and on each of them
_RESERVED_BY_POOL, _RESERVED_BY_GRAPHS = 5, 2  # CUmemPool_attribute, CUgraphMem_attribute


def classes(communicators: Communicators, memory: Memory) -> list[dict[str, Any]]:
    """Each ``{"class", "bytes", "why"}`` of all GPUs together, without those of nothing. Never raises."""
    found: dict[str, int] = {}
    asks: list[Callable[[], dict[str, int]]] = [
        lambda: {"pool": sum(t["bytes"] for t in memory.tags() if t["where"] == "gpu")},
        lambda: {"torch": of_torch(memory)},
        lambda: {"nccl": communicators.held_bytes()},
        of_driver,
    ]
    for ask in asks:
        with contextlib.suppress(Exception):  # whatever the program's libraries raise: its suspend goes on
            found |= ask()
    return [{"class": name, "bytes": found[name], "why": why} for name, why in WHY.items() if found.get(name, 0) > 0]


def of_torch(memory: Memory) -> int:
    """What torch has reserved outside of tags, which it counts as its own, asleep or awake. 0 where its memory is cudaMallocAsync's."""
    torch = sys.modules.get("torch")  # found, never imported by us first
    if torch is None or not torch.cuda.is_initialized() or torch.cuda.get_allocator_backend() != "native":
        return 0
    reserved: int = sum(torch.cuda.memory_reserved(device) for device in range(torch.cuda.device_count()))
    return reserved - sum(int(t["bytes"]) for t in memory.tags())


def of_driver(name: str = "libcuda.so.1") -> dict[str, int]:
    """Of the driver, on each GPU that has the process's primary context. Raises where the program has not loaded it."""
    cu, found = _Driver(name), dict.fromkeys(("stream-ordered", "graph-nodes", "local-memory", "printf-malloc"), 0)
    for device in cu.devices():
        with cu.current(device):
            threads = cu.attribute(device, _PROCESSORS) * cu.attribute(device, _THREADS)
            for what, nbytes in (
                ("stream-ordered", cu.reserved_by_pool),
                ("graph-nodes", cu.reserved_by_graphs),
                ("local-memory", lambda _: cu.limit(_STACK) * threads),  # noqa: B023 - called here
                ("printf-malloc", lambda _: cu.limit(_PRINTF) + cu.limit(_HEAP)),
            ):
                with contextlib.suppress(OSError, AttributeError):  # a driver that has no such call
                    found[what] += nbytes(device)
    return found


class _Driver:
    """The libcuda that the program has loaded. Each call raises ``OSError`` where the driver does not answer CUDA_SUCCESS."""

    def __init__(self, name: str) -> None:
        self._c = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)

    def devices(self) -> list[int]:
        """Those with a primary context. None is made, nor is the driver initialised."""
        found, flags = [], ctypes.c_uint()
        for ordinal in range(self._out(ctypes.c_int(), "cuDeviceGetCount")):
            device = self._out(ctypes.c_int(), "cuDeviceGet", ordinal)
            active = ctypes.c_int()
            self._call("cuDevicePrimaryCtxGetState", device, ctypes.byref(flags), ctypes.byref(active))
            if active.value:
                found.append(device)
        return found

    @contextlib.contextmanager
    def current(self, device: int) -> Iterator[None]:
        """Its primary context is current in this thread."""
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        try:
            self._call("cuCtxPushCurrent_v2", context)
            try:
                yield
            finally:
                self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        finally:
            self._call("cuDevicePrimaryCtxRelease_v2", device)

    def attribute(self, device: int, which: int) -> int:
        return self._out(ctypes.c_int(), "cuDeviceGetAttribute", which, device)

    def limit(self, which: int) -> int:
        return self._out(ctypes.c_size_t(), "cuCtxGetLimit", which)

    def reserved_by_graphs(self, device: int) -> int:
        value = ctypes.c_uint64()
        self._call("cuDeviceGetGraphMemAttribute", device, _RESERVED_BY_GRAPHS, ctypes.byref(value))
        return value.value

    def reserved_by_pool(self, device: int) -> int:
        pool, value = ctypes.c_void_p(), ctypes.c_uint64()
        self._call("cuDeviceGetDefaultMemPool", ctypes.byref(pool), device)
        self._call("cuMemPoolGetAttribute", pool, _RESERVED_BY_POOL, ctypes.byref(value))
        return value.value

    def _out(self, value: Any, function: str, *arguments: int) -> int:
        self._call(function, ctypes.byref(value), *arguments)
        return int(value.value)

    def _call(self, function: str, *arguments: Any) -> None:
        if result := getattr(self._c, function)(*arguments):
            raise OSError(f"{function}: CUDA error {result}")
