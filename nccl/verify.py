"""Proves that a communicator works: sums over data that differs by rank, exactly, and within a deadline.

NCCL reports a resume as done also where it could not map a peer's memory again; the next collective then hangs, faults or answers
wrongly. Here it does so on data of ours.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol

from gpuckpt.errors import CommunicatorBroken, GpuckptError
from gpuckpt.nccl.communicators import Communicator

#: elements of 64 bits: the first goes through NCCL's buffers for short messages, the second through all of its channels
COUNTS = (1 << 10, 1 << 20)


class Device(Protocol):
    """What a collective takes of one CUDA device. Entered, it is current in the calling thread. No call waits for the GPU but ``wrong``."""

    stream: int

    def __enter__(self) -> object: ...

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> object: ...

    def ramp(self, count: int, factor: int) -> Any:
        """A device buffer of *count* 64-bit integers, ``factor * (i + 1)`` at i, written on ``stream``."""

    def address(self, buffer: Any) -> int:
        """Where *buffer* lies on the device."""

    def ready(self) -> bool:
        """Whether everything on ``stream`` has run; raises what CUDA reports."""

    def wrong(self, buffer: Any, factor: int) -> int:
        """How many elements of *buffer* are not ``factor * (i + 1)``. Called when ``ready``."""


def verify(
    communicators: Sequence[Communicator], deadline_s: float, device: Callable[[int], Device] | None = None, counts: Sequence[int] = COUNTS
) -> None:
    """A sum on each communicator, in the order given; every rank calls this at the same time.

    *deadline_s* is for all together. Raises :class:`gpuckpt.errors.CommunicatorBroken` with the first that fails or does not answer in
    time; what is queued on it then stays queued, since NCCL can only abort it with the communicator.
    """
    open_device = device or torch_device
    until = time.monotonic() + deadline_s
    for c in communicators:
        _within(until, c, deadline_s, lambda give_up, c=c: _sums(c, open_device(c.device), counts, give_up))  # type: ignore[misc]


def _sums(c: Communicator, device: Device, counts: Sequence[int], give_up: threading.Event) -> None:
    everyone = c.size * (c.size + 1) // 2
    with device:
        for count in counts:
            send, receive = device.ramp(count, c.rank + 1), device.ramp(count, 0)
            c.library.all_reduce(c.pointer, device.address(send), device.address(receive), count, device.stream)
            while not device.ready():
                if give_up.wait(0.001):
                    return
                if state := c.library.async_error(c.pointer):
                    raise _broken(c, f"NCCL reports {c.library.describe(state)}")
            if n := device.wrong(receive, everyone):
                raise _broken(c, f"{n} of {count} sums over its ranks are wrong: the memory of a peer is not mapped where it was")


def _within(until: float, c: Communicator, deadline_s: float, work: Callable[[threading.Event], None]) -> None:
    """Run *work* in a thread of its own: a collective on peers that are gone may not even return from its launch."""
    failed: list[BaseException] = []
    give_up = threading.Event()

    def run() -> None:
        try:
            work(give_up)
        except BaseException as error:  # noqa: BLE001  # carried to the caller
            failed.append(error)

    thread = threading.Thread(target=run, name="gpuckpt-verify", daemon=True)
    thread.start()
    thread.join(max(0.0, until - time.monotonic()))
    if thread.is_alive():
        give_up.set()
        raise _broken(c, f"a sum over its ranks did not end within {deadline_s:g} s: a rank is missing, or a peer's memory is not mapped")
    if failed:
        error = failed[0]
        if isinstance(error, CommunicatorBroken) or not isinstance(error, Exception):
            raise error
        raise _broken(c, error.message if isinstance(error, GpuckptError) else f"{type(error).__name__}: {error}") from error


def _broken(c: Communicator, why: str) -> CommunicatorBroken:
    message = f"{c.label} (rank {c.rank} of {c.size}) does not work: {why}"
    return CommunicatorBroken(message, hint="end the job and start it again", step="verify")


def torch_device(index: int) -> Device:
    """A device by means of the torch that the program has imported. Raises :class:`gpuckpt.errors.CommunicatorBroken` without one."""
    torch = sys.modules.get("torch")
    if torch is None:
        raise CommunicatorBroken(
            "the communicators cannot be verified: torch is not imported, and no other means was given",
            hint="pass device=, an implementation of gpuckpt.nccl.verify.Device",
            step="verify",
        )
    return TorchDevice(torch, index)


#: One side stream for each device, kept: torch's caching allocator keeps the buffers of a stream for that stream alone, so with a new one
#: each time a process grew by 44 MiB a cycle (benchmarks/results/vllm_tp2.json).
_SIDE_STREAMS: dict[int, Any] = {}


class TorchDevice:
    """Tensors and a stream of torch's. The buffers come from its caching allocator, on a side stream: once for each device.

    A thread begins on device 0. Leaving a stream makes the device current that was so before, and with that a context on it: of 524 MiB
    on GPU 0, in every rank (benchmarks/results/vllm_tp2.json). So the device is entered first, which leaves without a context.
    """

    def __init__(self, torch: Any, index: int) -> None:
        self._torch = torch
        self._device = torch.device("cuda", index)
        if index not in _SIDE_STREAMS:
            _SIDE_STREAMS[index] = torch.cuda.Stream(device=self._device)
        self._side = _SIDE_STREAMS[index]
        self._current = contextlib.ExitStack()
        self.stream = int(self._side.cuda_stream)

    def __enter__(self) -> TorchDevice:
        with contextlib.ExitStack() as entered:
            entered.enter_context(self._torch.cuda.device(self._device))
            entered.enter_context(self._torch.cuda.stream(self._side))
            self._current = entered.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._current.__exit__(kind, value, trace)

    def ramp(self, count: int, factor: int) -> Any:
        return self._torch.arange(1, count + 1, dtype=self._torch.int64, device=self._device) * factor

    def address(self, buffer: Any) -> int:
        return int(buffer.data_ptr())

    def ready(self) -> bool:
        return bool(self._side.query())

    def wrong(self, buffer: Any, factor: int) -> int:
        return int((buffer != self.ramp(math.prod(buffer.shape), factor)).sum().item())
