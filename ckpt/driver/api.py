"""What gpuckpt asks of a CUDA driver and of NVML. Two implementations: ``cuda.py`` and ``nvml.py`` (real), ``simulated.py``."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from gpuckpt import errors
from gpuckpt.model import Gpu, ProcessId, State

if TYPE_CHECKING:
    from gpuckpt.image.memory import Memory

OLDEST_CUDA = (12, 8)  # driver 570, the first with cuCheckpointProcess*
OLDEST_MAPS = (13, 0)  # driver 580, the first that restores onto other GPUs


class DriverVersion(NamedTuple):
    """``cuda`` as (13, 0); ``package`` as "580.159.04", "" where nobody tells."""

    cuda: tuple[int, int]
    package: str = ""


def no_maps(version: DriverVersion) -> errors.DriverTooOld:
    """Why a driver older than ``OLDEST_MAPS`` is asked for no restore onto other GPUs."""
    return errors.DriverTooOld(
        f"the NVIDIA driver {version.package} (CUDA {version.cuda[0]}.{version.cuda[1]}) cannot restore onto other GPUs: that takes "
        f"CUDA {OLDEST_MAPS[0]}.{OLDEST_MAPS[1]}; nothing was restored",
        hint="resume it where it was, without --gpu; or update the NVIDIA driver to 580 or newer",
    )


class CallError(Exception):
    """A driver call failed. ``result`` is the CUDA result's name without its prefix, such as "OUT_OF_MEMORY"."""

    def __init__(self, call: str, result: str) -> None:
        super().__init__(f"{call}: CUDA_ERROR_{result}")
        self.call = call
        self.result = result


class Storage(Protocol):
    """Where a checkpoint's bytes go instead of the process's own host memory: what CUDA calls custom storage, from 13.4 (driver 615) on.
    There the driver maps the memory of *pid* into the caller, whose work the copy is: a call of ``copy`` for each GPU, and the checkpoint
    or restore is complete when the last has returned. No adapter takes one yet: they answer ``NOT_SUPPORTED``."""

    def copy(self, gpu: int, address: int, nbytes: int, stream: int) -> None:
        """Move *nbytes* between the device memory at *address*, as the caller sees it, and the storage. May leave work on *stream*."""
        ...


def refuse_storage(call: str, storage: Storage | None) -> None:
    """What an adapter that takes none says, before it calls anything."""
    if storage is not None:
        raise CallError(call, "NOT_SUPPORTED")


class Driver(Protocol):
    """The checkpoint calls on a process from outside. Each may block for as long as it likes: callers of their own make them.

    Every call raises :class:`CallError` and nothing else for what the driver answers.
    None initialises CUDA in the calling process, but ``restore(..., initialise=True)``.
    """

    def state(self, pid: int) -> State:
        """Its state: ``NONE`` without CUDA state, ``GONE`` if dead, ``UNKNOWN`` for a value that has no name here.

        Blocks while a checkpoint of *pid* runs, and while *pid* is stopped.
        A dead process and one that we may not ask look the same to the driver; this tells them apart (``GONE``, ``DENIED``).
        """
        ...

    def restore_thread(self, pid: int) -> int:
        """The thread of *pid* in which the driver works for a checkpoint and a restore."""
        ...

    def lock(self, pid: int, timeout_s: float) -> None:
        """Block new CUDA calls of *pid* and drain its queues. The timeout is rounded up to whole milliseconds, at least 1.

        Raises ``NOT_READY`` if it is busy for longer (nothing changed), ``ILLEGAL_STATE`` if it is not running.
        Ignores its timeout where the process is stopped.
        """
        ...

    def checkpoint(self, pid: int, storage: Storage | None = None) -> None:
        """Move all GPU memory of a locked process to its host memory, or to *storage*. ``NOT_SUPPORTED``: managed memory and the like,
        or a storage that this driver cannot have; still locked."""
        ...

    def restore(self, pid: int, gpu_map: Mapping[str, str], *, initialise: bool, storage: Storage | None = None) -> None:
        """Bring it back, locked, from where it was moved to. *gpu_map* maps old to new UUID: empty, or naming every GPU that the kernel
        driver sees.

        Any failure is final: no later restore of *pid* can succeed. *initialise*: call ``cuInit`` first (no persistence mode). But a
        *storage* that this driver cannot have is ``NOT_SUPPORTED`` before anything is called.
        """
        ...

    def unlock(self, pid: int) -> None: ...

    def image(self, process: ProcessId) -> AbstractContextManager[Memory]:
        """The image of a checkpointed process in its host memory. Raises ``gpuckpt.image.memory.Unavailable`` where it cannot be had."""
        ...

    def image_dropped(self, process: ProcessId) -> bool:
        """Whether memory of it was given back and has not all returned: a restore would lose the process."""
        ...


class Devices(Protocol):
    """GPUs and who is on them. Raises ``gpuckpt.errors.NoDriver`` where there is no driver."""

    simulated: bool

    def version(self) -> DriverVersion: ...

    def gpus(self) -> tuple[Gpu, ...]:
        """All GPUs in index order; one that fell off the bus is there with ``lost=True``; a failed memory query gives ``None``."""
        ...

    def processes(self) -> dict[int, dict[str, int | None]]:
        """pid -> {GPU UUID: bytes held}. pids as the driver knows them: in a container they may be foreign."""
        ...

    def loaded(self, pids: list[int]) -> set[int]:
        """Those of *pids* that have the CUDA driver loaded: the only ones that may have CUDA state."""
        ...

    def contexts(self, pids: list[int]) -> set[int]:
        """Those of *pids* that hold a CUDA context, and so GPU memory, now. A process that only initialised CUDA or NVML has none."""
        ...

    def image_bytes(self, pid: int) -> int:
        """Size of the checkpoint image in *pid*'s host memory, estimated from its mappings; 0 if it has none."""
        ...

    def image(self, process: ProcessId) -> Mapping[str, Any]:
        """Of a checkpointed process: how its image was made, and whether memory of it was given back (``preload.described``)."""
        ...

    def gpu_lock_path(self, gpu: Gpu) -> str:
        """A file whose ``flock`` stands for this GPU among all users of the machine."""
        ...

    def helper(self) -> int:
        """The pid of the process that asks on our behalf; 0 where there is none."""
        ...

    def close(self) -> None:
        """Nothing is asked any more."""
        ...
