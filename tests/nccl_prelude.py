"""What the programs of the NCCL tests begin with: communicators of fake copies, fakes of torch and vLLM, and a device in host memory.

It runs in processes of its own, in which the fake libraries are loaded; it is no test.
"""

from __future__ import annotations

import ctypes
import os
import time
from types import ModuleType, SimpleNamespace
from typing import Any

from gpuckpt.nccl import library
from gpuckpt.nccl.communicators import Communicator

FOLDER = os.environ["FAKES"]
HUGE = 480 << 20


def opened(name: str) -> ctypes.CDLL:
    """A fake, loaded as a program does that knows it by its path."""
    dll = ctypes.CDLL(f"{FOLDER}/{name}")
    dll.fake_create.restype = ctypes.c_void_p
    return dll


def create(
    dll: ctypes.CDLL, name: str, rank: int = 0, size: int = 2, device: int = 0, suspendable: int = HUGE, total: int = HUGE + 7
) -> int:
    pointer: int = dll.fake_create(name.encode(), rank, size, device, ctypes.c_uint64(suspendable), ctypes.c_uint64(total))
    return pointer


def communicator(dll: ctypes.CDLL, name: str, carried: bool | None = None, **kwargs: Any) -> Communicator:
    kwargs = {"rank": 0, "size": 2, "device": 0, **kwargs}
    pointer = create(dll, name, **kwargs)
    return Communicator(name, "registered", pointer, library.of(dll), kwargs["rank"], kwargs["size"], kwargs["device"], carried)


class Backend:
    """torch's ProcessGroupNCCL: its communicator is that of the current device."""

    def __init__(self, torch: Any, pointers: dict[int, Any], collectives: int | None = None, options: Any = None) -> None:
        self._torch, self._pointers = torch, pointers
        self.options = options
        if collectives is not None:
            self._get_sequence_number_for_group = lambda: collectives

    def _comm_ptr(self) -> int:
        pointer = self._pointers.get(self._torch.cuda.current, 0)
        if isinstance(pointer, Exception):
            raise pointer
        return pointer


class Group:
    def __init__(self, backend: Any, cuda: bool = True, size: int = 2) -> None:
        self._backend, self.size = backend, lambda: size
        kinds = ("cpu", "cuda") if cuda else ("cpu",)
        self._device_types = [SimpleNamespace(type=kind) for kind in kinds]

    def _get_backend(self, device: Any) -> Any:
        return self._backend if device.type == "cuda" else SimpleNamespace(name=lambda: "gloo")


class Torch(ModuleType):
    """``torch`` as far as it is looked at; ``contexts`` are the devices on which the process has one."""

    def __init__(self, contexts: tuple[int, ...] = (0,), devices: int = 8, initialised: bool = True) -> None:
        super().__init__("torch")
        cuda = SimpleNamespace(current=contexts[0], entered=[])

        class Current:
            def __init__(self, index: int) -> None:
                self.index, self.before = index, cuda.current

            def __enter__(self) -> None:
                cuda.entered.append(self.index)
                cuda.current = self.index

            def __exit__(self, *_: object) -> None:
                cuda.current = self.before

        cuda.is_initialized = lambda: initialised
        cuda.current_device = lambda: cuda.current
        cuda.device_count = lambda: devices
        cuda.device = Current
        self.cuda = cuda
        self._C = SimpleNamespace(_cuda_hasPrimaryContext=lambda index: index in contexts)


def torch_modules(torch: Torch, groups: dict[str, Any]) -> dict[str, Any]:
    c10d = ModuleType("torch.distributed.distributed_c10d")
    c10d._world = SimpleNamespace(pg_names={group: name for name, group in groups.items()})
    return {"torch": torch, "torch.distributed.distributed_c10d": c10d}


def vllm_modules(groups: dict[str, Any]) -> dict[str, Any]:
    state = ModuleType("vllm.distributed.parallel_state")
    state._groups = {
        name: (lambda device=device: device and SimpleNamespace(device_communicator=device)) for name, device in groups.items()
    }
    return {"vllm.distributed.parallel_state": state}


def pynccl(dll: ctypes.CDLL | None, pointer: int, **more: Any) -> SimpleNamespace:
    """A vLLM device communicator."""
    nccl = SimpleNamespace(lib=dll) if dll else None
    return SimpleNamespace(pynccl_comm=SimpleNamespace(comm=ctypes.c_void_p(pointer), nccl=nccl, disabled=True), **more)


class HostDevice:
    """A device whose memory is this process's; ``slow_s`` after its first use it is ready."""

    stream = 1

    def __init__(self, index: int, slow_s: float = 0.0, fault: str = "") -> None:
        self.index, self.slow_s, self.fault = index, slow_s, fault
        self.begun = time.monotonic()

    def __enter__(self) -> HostDevice:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ramp(self, count: int, factor: int) -> Any:
        return (ctypes.c_int64 * count)(*(factor * (i + 1) for i in range(count)))

    def address(self, buffer: Any) -> int:
        return ctypes.addressof(buffer)

    def ready(self) -> bool:
        if self.fault:
            raise RuntimeError(self.fault)
        return time.monotonic() - self.begun >= self.slow_s

    def wrong(self, buffer: Any, factor: int) -> int:
        return sum(value != factor * (i + 1) for i, value in enumerate(buffer))


def calls() -> list[str]:
    """What the fakes were asked, those of looks aside."""
    looks = ("ncclCommMemStats", "ncclCommGetAsyncError", "ncclCommCount", "ncclCommUserRank", "ncclCommCuDevice")
    with open(os.environ["FAKE_NCCL_LOG"]) as log:
        return [line.strip() for line in log if line.split()[1] not in looks]
