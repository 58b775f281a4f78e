"""The real driver: ``cuCheckpointProcess*`` through ``cuda.bindings``, whose gaps and quirks from 12.8 to 13.5 end here."""

from __future__ import annotations

import ctypes
import math
import os
import re
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuckpt import errors
from gpuckpt.driver.api import OLDEST_CUDA, OLDEST_MAPS, CallError, Driver, DriverVersion, no_maps, refuse_storage
from gpuckpt.inspect import processes
from gpuckpt.model import Call, ProcessId, State

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from gpuckpt.driver.api import Storage
    from gpuckpt.image.memory import Memory

_LONGEST_TIMEOUT_MS = (1 << 32) - 1  # timeoutMs is an unsigned int

# CUprocessState by number: bindings before 13.4 have no names for 4 and 5, which a newer driver may answer all the same.
_STATES = {
    0: State.RUNNING,
    1: State.LOCKED,
    2: State.CHECKPOINTED,
    3: State.FAILED,
    4: State.CHECKPOINTING,
    5: State.RESTORING,
}

# 13.0.0, 13.0.1 and 13.3.0 lack some of these. CUcheckpointGpuPair, which 12.x lacks, is asked for only where a map needs it.
NEEDED = (
    "CUcheckpointLockArgs",
    "CUcheckpointRestoreArgs",
    "CUprocessState",
    "cuCheckpointProcessCheckpoint",
    "cuCheckpointProcessGetState",
    "cuCheckpointProcessLock",
    "cuCheckpointProcessRestore",
    "cuCheckpointProcessUnlock",
)


class CudaDriver(Driver):
    """The driver of this machine. Creating one loads ``libcuda``, and initialises nothing.

    Calls raise :class:`CallError` for what the driver answers; a result without a name in the bindings appears by its number.

    Raises:
        errors.NoDriver: there is no ``libcuda.so.1``, or only the toolkit's stub of it.
        errors.DriverTooOld: it is older than 570. A call raises it too where the driver lacks that one function.
        errors.BindingsTooOld: the installed ``cuda-bindings`` has no checkpoint API, or a broken one.
    """

    def __init__(self) -> None:
        self._cuda = _bindings()
        missing = [name for name in NEEDED if not hasattr(self._cuda, name)]
        if missing:
            raise _bindings_too_old(f"cuda-bindings {_bindings_version()} lacks {', '.join(missing)}")
        self._version = _version(self._cuda)
        if self._version < OLDEST_CUDA:
            raise _driver_too_old(f"the driver supports CUDA {self._version[0]}.{self._version[1]}")

    def state(self, pid: int) -> State:
        try:
            (value,) = self._call("state", "cuCheckpointProcessGetState", pid)
        except _UnnamedStateError as unnamed:
            return _STATES.get(unnamed.value, State.UNKNOWN)
        except CallError as error:
            if error.result == "NOT_INITIALIZED":
                return State.NONE
            if error.result == "OPERATING_SYSTEM":
                return State.DENIED if _alive(pid) else State.GONE
            raise
        return _STATES.get(int(value), State.UNKNOWN)

    def restore_thread(self, pid: int) -> int:
        if not hasattr(self._cuda, "cuCheckpointProcessGetRestoreThreadId"):  # of the needed ones it is not
            raise CallError("restore-thread", "NOT_SUPPORTED")
        (tid,) = self._call("restore-thread", "cuCheckpointProcessGetRestoreThreadId", pid)
        return int(tid)

    def lock(self, pid: int, timeout_s: float) -> None:
        args = self._cuda.CUcheckpointLockArgs()
        args.timeoutMs = _timeout_ms(timeout_s)
        self._call(Call.LOCK, "cuCheckpointProcessLock", pid, args)

    def checkpoint(self, pid: int, storage: Storage | None = None) -> None:
        refuse_storage(Call.CHECKPOINT, storage)
        self._call(Call.CHECKPOINT, "cuCheckpointProcessCheckpoint", pid, None)

    def restore(self, pid: int, gpu_map: Mapping[str, str], *, initialise: bool, storage: Storage | None = None) -> None:
        """As in :class:`Driver`. These end before the driver was asked to restore, so *pid* is as it was:
        ``CallError`` with ``call == "cuInit"``, ``BindingsTooOld`` and ``DriverTooOld`` (a map needs cuda-bindings 13 and CUDA 13),
        ``ValueError`` (not a GPU's UUID).
        """
        refuse_storage(Call.RESTORE, storage)
        args = self._restore_args(gpu_map) if gpu_map else None
        if initialise:
            self._call("cuInit", "cuInit", 0)
        self._call(Call.RESTORE, "cuCheckpointProcessRestore", pid, args)

    def unlock(self, pid: int) -> None:
        self._call(Call.UNLOCK, "cuCheckpointProcessUnlock", pid, None)

    def image(self, process: ProcessId) -> AbstractContextManager[Memory]:
        from gpuckpt.image import memory

        return memory.of(process)

    def image_dropped(self, process: ProcessId) -> bool:
        from gpuckpt.image import keeper

        return keeper.dropped(process)

    def _restore_args(self, gpu_map: Mapping[str, str]) -> Any:
        uuids = [(_uuid_bytes(old), _uuid_bytes(new)) for old, new in gpu_map.items()]
        if not hasattr(self._cuda, "CUcheckpointGpuPair"):
            raise _bindings_too_old(f"cuda-bindings {_bindings_version()} cannot restore onto other GPUs (13.0.2 is the first that can)")
        if self._version < OLDEST_MAPS:  # these arguments are reserved there, and whether it looks at them nobody says
            raise no_maps(DriverVersion(self._version))
        pairs = []
        for old, new in uuids:
            pair = self._cuda.CUcheckpointGpuPair()
            pair.oldUuid = self._cuuuid(old)
            pair.newUuid = self._cuuuid(new)
            pairs.append(pair)
        args = self._cuda.CUcheckpointRestoreArgs()
        args.gpuPairs = pairs
        args.gpuPairsCount = len(pairs)
        return args

    def _cuuuid(self, sixteen: bytes) -> Any:
        out = self._cuda.CUuuid()
        # CUuuid.bytes is read-only in every version; the setters of a pair copy what is written here.
        ctypes.memmove(int(out.getPtr()), sixteen, 16)
        return out

    def _call(self, call: str, function: str, *args: Any) -> list[Any]:
        """What *function* returns beside its result, which is SUCCESS."""
        return _call(self._cuda, call, function, *args)


class _UnnamedStateError(Exception):
    """The driver answered a state that the bindings have no name for."""

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value


def _bindings() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise _bindings_too_old(f"cuda-bindings cannot be imported ({error})") from error
    return driver


def _bindings_version() -> str:
    import cuda.bindings

    return str(getattr(cuda.bindings, "__version__", "of an unknown version"))


def _version(cuda: Any) -> tuple[int, int]:
    try:
        (number,) = _call(cuda, "version", "cuDriverGetVersion")
    except CallError as error:
        # STUB_LIBRARY: the toolkit's lib64/stubs is on LD_LIBRARY_PATH.
        raise _no_driver(f"cuDriverGetVersion answers {error.result}") from error
    return number // 1000, number % 1000 // 10


def _call(cuda: Any, call: str, function: str, *args: Any) -> list[Any]:
    values: list[Any]
    try:
        result, *values = getattr(cuda, function)(*args)
    except RuntimeError as error:
        raise _not_loaded(error) from error
    except (ValueError, KeyError) as error:
        # The bindings turn integers into enum members: ValueError, or KeyError for a result in 12.9.0 to 13.1.
        unnamed = re.fullmatch(r"(\d+)(?: is not a valid (CUresult|CUprocessState))?", str(error))
        if unnamed is None:
            raise
        if unnamed[2] == "CUprocessState":
            raise _UnnamedStateError(int(unnamed[1])) from error
        raise CallError(call, unnamed[1]) from error
    if int(result) != 0:
        raise CallError(call, str(result.name).removeprefix("CUDA_ERROR_"))
    return values


def _not_loaded(error: RuntimeError) -> errors.GpuckptError:
    """Bindings say in words alone whether the library or a function in it is missing.

    'Function "cuX" not found' (to 13.3), 'function cuX is not found' (12.9.10 and from 13.4),
    'Failed to get cuGetProcAddress_v2' (a driver before CUDA 12).
    """
    if re.search(r"^function .* not found|cuGetProcAddress", str(error), re.IGNORECASE):
        return _driver_too_old(str(error))
    return _no_driver(str(error))


def _no_driver(why: str) -> errors.NoDriver:
    return errors.NoDriver(
        f"There is no working CUDA driver here: {why}",
        hint="Install the NVIDIA driver, 570 or newer, and see that `nvidia-smi` works; start a container with `--gpus all`.",
    )


def _driver_too_old(why: str) -> errors.DriverTooOld:
    return errors.DriverTooOld(
        f"The NVIDIA driver cannot checkpoint: {why}, and it takes CUDA {OLDEST_CUDA[0]}.{OLDEST_CUDA[1]}",
        hint="Update the NVIDIA driver to 570 or newer; `nvidia-smi` shows the one that is loaded.",
    )


def _bindings_too_old(why: str) -> errors.BindingsTooOld:
    return errors.BindingsTooOld(f"The Python bindings of the driver do not serve: {why}", hint="pip install -U cuda-python")


def _uuid_bytes(gpu: str) -> bytes:
    if not gpu.startswith("GPU-"):
        raise ValueError(f"not the UUID of a GPU: {gpu!r}")
    return uuid.UUID(gpu.removeprefix("GPU-")).bytes


def _timeout_ms(timeout_s: float) -> int:
    """Whole milliseconds, rounded up: never 0, which means no timeout to the driver."""
    if timeout_s * 1000 >= _LONGEST_TIMEOUT_MS:
        return _LONGEST_TIMEOUT_MS
    return max(1, math.ceil(timeout_s * 1000))


def _alive(pid: int) -> bool:
    """Whether *pid* exists and is no zombie, which has no CUDA state left."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    hidden = not Path(f"/proc/{pid}").exists()  # by hidepid=, since it took the signal
    return hidden or processes.read(pid) is not None
