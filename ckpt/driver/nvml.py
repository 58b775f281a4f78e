"""The real GPUs, and who is on them: NVML through ``pynvml``."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

from gpuckpt import errors
from gpuckpt.driver import mappings
from gpuckpt.driver.api import Devices, DriverVersion
from gpuckpt.model import Gpu, ProcessId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_COMPUTE_MODES = {0: "default", 1: "exclusive-process", 2: "prohibited", 3: "exclusive-process"}  # 1 was one thread, no longer in use
_LIST_ATTEMPTS = 4  # processes may be born between asking how many there are and asking which
_LOOK = "See what `nvidia-smi` and `dmesg` say."


class NvmlDevices(Devices):
    """The GPUs of this machine. NVML is initialised once.

    Raises, at any question:
        errors.NoDriver: no NVML, no kernel module, or two that do not match.
        errors.PermissionDenied: NVML may not be used, or no GPU may.
        errors.DriverError: NVML fails otherwise.
    """

    simulated = False

    def __init__(self, *, warm: bool = False) -> None:
        """*warm*: load it from now on, in a thread that ends with that; what fails is said at the first question."""
        self._initialised: Any = None
        self._loader = threading.Thread(target=self._load, name="gpuckpt-nvml", daemon=True) if warm else None
        if self._loader:
            self._loader.start()

    def version(self) -> DriverVersion:
        nvml = self._nvml()
        try:
            number = nvml.nvmlSystemGetCudaDriverVersion_v2()
        except (nvml.NVMLError_LibraryNotFound, nvml.NVMLError_FunctionNotFound) as error:
            raise errors.NoDriver(
                "NVML works here, but libcuda.so.1 cannot be loaded",
                hint="Start a container with `-e NVIDIA_DRIVER_CAPABILITIES=compute,utility`; elsewhere install the driver's CUDA library.",
            ) from error
        except nvml.NVMLError as error:
            raise _failed(nvml, "the CUDA version", error) from error
        try:
            package = str(nvml.nvmlSystemGetDriverVersion())
        except nvml.NVMLError:
            package = ""
        return DriverVersion((number // 1000, number % 1000 // 10), package)

    def gpus(self) -> tuple[Gpu, ...]:
        """As in :class:`Devices`. A GPU lost before its UUID could be read has ``lost-INDEX`` in its place.

        GPUs that we have no permission for (a container's device rules) are left out, as if they were not there.
        """
        nvml = self._nvml()
        return tuple(_gpu(nvml, index, handle) for index, handle in self._handles(nvml))

    def processes(self) -> dict[int, dict[str, int | None]]:
        """As in :class:`Devices`: compute processes, those of a MIG instance under the GPU that it is part of. Lost GPUs list none."""
        nvml = self._nvml()
        out: dict[int, dict[str, int | None]] = {}
        for _, handle in self._handles(nvml):
            if handle is None:
                continue
            try:
                uuid = nvml.nvmlDeviceGetUUID(handle)
                running = _compute_processes(nvml, handle)
            except nvml.NVMLError as error:
                if _is_lost(nvml, error):
                    continue
                raise _failed(nvml, "the processes on a GPU", error) from error
            for process in running:
                on = out.setdefault(process.pid, {})
                # One entry for each MIG instance. A sum with an unknown in it is unknown.
                before, more = on.get(uuid, 0), process.usedGpuMemory
                on[uuid] = None if before is None or more is None else before + more
        return out

    def loaded(self, pids: list[int]) -> set[int]:
        """As in :class:`Devices`, of those whose mappings we may see."""
        return {pid for pid in pids if mappings.has_libcuda(pid)}

    def contexts(self, pids: list[int]) -> set[int]:
        """As in :class:`Devices`: those that NVML lists, and, since its pids mean nothing in a container, those that have
        the memory of a context mapped."""
        listed = self.processes()
        return {pid for pid in pids if pid in listed or mappings.has_context(pid)}

    def image_bytes(self, pid: int) -> int:
        """As in :class:`Devices`, and never too small; :func:`mappings.image_bytes` says how it may be too large."""
        return mappings.image_bytes(pid)

    def image(self, process: ProcessId) -> Mapping[str, Any]:
        from gpuckpt.image import preload

        return preload.described(process)

    def gpu_lock_path(self, gpu: Gpu) -> str:
        """The GPU's device node. Raises ``GpuLost`` or ``GpuUnknown`` where there is none to know of."""
        if gpu.minor is None:
            kind = errors.GpuLost if gpu.lost else errors.GpuUnknown
            raise kind(f"{gpu.label} has no device node that NVML knows of", hint=_LOOK, gpu=gpu.uuid)
        return f"/dev/nvidia{gpu.minor}"

    def helper(self) -> int:
        return 0

    def close(self) -> None:
        """What NVML has open is open until this process ends."""

    def _nvml(self) -> Any:
        """``pynvml``, initialised."""
        if self._loader:
            self._loader.join()
            self._loader = None
        return self._initialise()

    def _load(self) -> None:
        with contextlib.suppress(Exception):
            nvml = self._initialise()
            for index, handle in self._handles(nvml):  # the first look at a GPU takes 7 ms
                _gpu(nvml, index, handle)

    def _initialise(self) -> Any:
        if self._initialised is None:
            import pynvml

            try:
                pynvml.nvmlInit()
            except pynvml.NVMLError as error:
                raise _not_initialised(pynvml, error) from error
            self._initialised = pynvml
        return self._initialised

    @staticmethod
    def _handles(nvml: Any) -> Iterator[tuple[int, Any]]:
        """Index and handle of each GPU that we may use; the handle of a lost one is None."""
        try:
            count = nvml.nvmlDeviceGetCount()
        except nvml.NVMLError as error:
            raise _failed(nvml, "the number of GPUs", error) from error
        denied = 0
        for index in range(count):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
            except nvml.NVMLError_NoPermission as error:
                denied += 1
                if denied == count:
                    raise _permission_denied() from error
                continue
            except nvml.NVMLError:
                # GPU_IS_LOST, or UNKNOWN and the like: whatever the reason, a GPU without a handle is of no use.
                handle = None
            yield index, handle


def _gpu(nvml: Any, index: int, handle: Any) -> Gpu:
    lost = handle is None
    total = free = None

    def ask(query: Callable[[], Any], otherwise: Any) -> Any:
        """Its answer; *otherwise* if it fails, or the GPU was found lost before (it need not be asked again)."""
        nonlocal lost
        if lost:
            return otherwise
        try:
            return query()
        except nvml.NVMLError as error:
            lost = _is_lost(nvml, error)
            return otherwise

    uuid = ask(lambda: nvml.nvmlDeviceGetUUID(handle), None)
    if uuid is None:
        uuid, lost = f"lost-{index}", True
    name = ask(lambda: nvml.nvmlDeviceGetName(handle), "")
    minor = ask(lambda: nvml.nvmlDeviceGetMinorNumber(handle), None)
    pci = ask(lambda: nvml.nvmlDeviceGetPciInfo(handle).busId, "")
    mode = ask(lambda: _COMPUTE_MODES.get(nvml.nvmlDeviceGetComputeMode(handle), "unknown"), "default")
    mig = ask(lambda: nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE, False)
    # Unknown counts as off: that costs a cuInit, and a restore that misses it may be the last.
    persistence = ask(lambda: nvml.nvmlDeviceGetPersistenceMode(handle) == nvml.NVML_FEATURE_ENABLED, False)
    # Version 1 counts what the driver reserves for itself as used.
    memory = ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2), None)
    if memory is not None and memory.total > 0:
        total, free = int(memory.total), int(memory.free)
    return Gpu(
        uuid=str(uuid),
        index=index,
        name=str(name),
        total_bytes=total,
        free_bytes=free,
        persistence=persistence,
        compute_mode=mode,
        mig=mig,
        lost=lost,
        minor=minor,
        pci=str(pci),
    )


def _compute_processes(nvml: Any, handle: Any) -> list[Any]:
    for _ in range(_LIST_ATTEMPTS - 1):
        try:
            return list(nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        except nvml.NVMLError_InsufficientSize:
            continue
    return list(nvml.nvmlDeviceGetComputeRunningProcesses(handle))


def _is_lost(nvml: Any, error: Any) -> bool:
    return error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED, nvml.NVML_ERROR_GPU_NOT_FOUND)


def _not_initialised(nvml: Any, error: Any) -> errors.GpuckptError:
    if error.value == nvml.NVML_ERROR_NO_PERMISSION:
        return _permission_denied()
    if error.value == nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        return errors.NoDriver(
            "The NVIDIA kernel module that is loaded is of another version than the libraries: the driver was updated under it",
            hint="Reboot; or end all that uses a GPU, then: sudo rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia; sudo modprobe nvidia",
        )
    if error.value == nvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        why = "libnvidia-ml.so.1 cannot be loaded"
    elif error.value == nvml.NVML_ERROR_DRIVER_NOT_LOADED:
        why = "the kernel module is not loaded, or its device nodes are missing"
    else:
        why = f"NVML cannot be initialised: {error}"
    return errors.NoDriver(
        f"There is no working NVIDIA driver here: {why}",
        hint="See that `nvidia-smi` works; start a container with `--gpus all`, and restart one that has lost its GPUs.",
    )


def _permission_denied() -> errors.PermissionDenied:
    return errors.PermissionDenied(
        "The NVIDIA driver does not let us use it", hint="See who may open the devices: ls -l /dev/nvidia*; or run sudo gpuckpt …"
    )


def _failed(nvml: Any, what: str, error: Any) -> errors.GpuckptError:
    if error.value == nvml.NVML_ERROR_NO_PERMISSION:
        return _permission_denied()
    return errors.DriverError(f"NVML does not tell {what}: {error}", hint=_LOOK)
