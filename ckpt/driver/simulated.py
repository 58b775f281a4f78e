"""A simulated driver and its GPUs: real processes, and calls that block, hang and fail as the real ones were measured to."""

from __future__ import annotations

import contextlib
import math
import time
from typing import TYPE_CHECKING, Any

from gpuckpt.driver.api import CallError, DriverVersion, Storage, refuse_storage
from gpuckpt.driver.simulated_proc import look, stopped
from gpuckpt.driver.simulated_rules import Rules, SimulatedGpu, SimulatedProcess
from gpuckpt.driver.simulated_store import POLL_S, SimulatedWorldDir
from gpuckpt.driver.simulated_world import SUCCESS, Fault, StateLostError, World
from gpuckpt.errors import NoDriver
from gpuckpt.model import Call, Gpu, ProcessId, State

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping

    from gpuckpt.driver.simulated_image import SimulatedImage

__all__ = [
    "Fault",
    "Rules",
    "SimulatedDevices",
    "SimulatedDriver",
    "SimulatedGpu",
    "SimulatedProcess",
    "SimulatedWorldDir",
    "StateLostError",
]


class SimulatedDriver:
    """The ``Driver`` of a :class:`SimulatedWorldDir`: blocks, hangs and fails as the real one was measured to."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.world = SimulatedWorldDir(path)

    def state(self, pid: int) -> State:
        try:
            fault = self._begin_fault("state", pid)
        except CallError as error:
            if error.result != "OPERATING_SYSTEM":
                raise
            return State.GONE if look(pid) is None else State.DENIED
        pauses = _pauses()
        while True:
            with self.world.transaction() as world:
                _need_driver(world)
                try:
                    found = world.rules.state(pid)
                except CallError as error:
                    return State.NONE if error.result == "NOT_INITIALIZED" else State.GONE
                waits = stopped(pid) or world.under_way(pid)
            if not waits:
                _end_fault("state", fault)
                return found
            time.sleep(next(pauses))

    def restore_thread(self, pid: int) -> int:
        """The first thread: a simulated process has no driver's."""
        with self.world.transaction() as world:
            _need_driver(world)
            world.rules.state(pid)
        return pid

    def lock(self, pid: int, timeout_s: float) -> None:
        self._call(Call.LOCK, pid, timeout_s=max(1, math.ceil(timeout_s * 1000)) / 1000)

    def checkpoint(self, pid: int, storage: Storage | None = None) -> None:
        refuse_storage(Call.CHECKPOINT, storage)
        self._call(Call.CHECKPOINT, pid)

    def restore(self, pid: int, gpu_map: Mapping[str, str], *, initialise: bool, storage: Storage | None = None) -> None:
        refuse_storage(Call.RESTORE, storage)
        self._call(Call.RESTORE, pid, gpu_map=gpu_map, initialise=initialise)

    def unlock(self, pid: int) -> None:
        self._call(Call.UNLOCK, pid)

    def _call(
        self, call: Call, pid: int, timeout_s: float = 0.0, gpu_map: Mapping[str, str] | None = None, initialise: bool = False
    ) -> None:
        """Put a call under way and wait until whoever looks next has ended it. Calls on one process wait for one another."""
        fault = self._begin_fault(call, pid)
        mine: str | None = None
        pauses = _pauses()
        while True:
            with self.world.transaction() as world:
                _need_driver(world)
                if mine is None:
                    process = world.rules.find(call, pid)
                    if not world.under_way(pid):
                        mine = world.begin(call, process, timeout_s, dict(gpu_map or {}), initialise).id
                op = next((o for o in world.operations if o.id == mine), None)
                if op and op.result is not None:
                    world.operations.remove(op)
                    break
            time.sleep(next(pauses))
        if op.result != SUCCESS:
            raise CallError(call, op.result)
        _end_fault(call, fault)

    def _begin_fault(self, call: str, pid: int) -> Fault | None:
        fault = self.world.take_fault(call, pid)
        if fault is None:
            return None
        time.sleep(fault.delay_s)
        while fault.hang and look(pid) is not None:  # the call of a process that ended comes back
            time.sleep(0.5)
        if fault.before:
            _end_fault(call, fault)
        return fault

    @contextlib.contextmanager
    def image(self, process: ProcessId) -> Iterator[SimulatedImage]:
        from gpuckpt.driver.simulated_image import SimulatedImage

        yield SimulatedImage(self.world, process)

    def image_dropped(self, process: ProcessId) -> bool:
        return (self.world.kept(process.pid, process.start_ticks) / "dropped").exists()


class SimulatedDevices:
    """The ``Devices`` of a :class:`SimulatedWorldDir`. ``"driver": null`` in its ``machine.json`` is a machine without a driver."""

    simulated = True

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.world = SimulatedWorldDir(path)

    def helper(self) -> int:
        return 0

    def close(self) -> None:
        """Nothing of it is open."""

    def version(self) -> DriverVersion:
        with self.world.transaction() as world:
            return _need_driver(world)

    def gpus(self) -> tuple[Gpu, ...]:
        with self.world.transaction() as world:
            _need_driver(world)
            return tuple(_as_seen(g, world.rules.free(g.uuid)) for g in sorted(world.rules.gpus.values(), key=lambda g: g.index))

    def processes(self) -> dict[int, dict[str, int | None]]:
        """Checkpointed processes are not listed, even while an exported handle keeps memory taken."""
        with self.world.transaction() as world:
            _need_driver(world)
            return {p.pid: {**p.held_bytes} for p in world.rules.processes.values() if p.on_gpu and p.held_bytes}

    def loaded(self, pids: list[int]) -> set[int]:
        with self.world.transaction() as world:
            return set(pids) & set(world.rules.processes)

    def contexts(self, pids: list[int]) -> set[int]:
        with self.world.transaction() as world:
            held = {p.pid for p in world.rules.processes.values() if p.on_gpu and "contextless" not in p.traits}
            return set(pids) & held

    def image_bytes(self, pid: int) -> int:
        with self.world.transaction() as world:
            process = world.rules.processes.get(pid)
            return process.image_bytes if process else 0

    def image(self, process: ProcessId) -> Mapping[str, Any]:
        from gpuckpt.image import preload

        dropped = (self.world.kept(process.pid, process.start_ticks) / "dropped").exists()
        return {**preload.described(process), "dropped": dropped}

    def gpu_lock_path(self, gpu: Gpu) -> str:
        path = self.world.path / f"gpu-{gpu.uuid}.lock"
        path.touch()
        return str(path)


def _pauses() -> Iterator[float]:
    """Between two looks: short calls end soon, and those that last need no looking at all the time."""
    pause_s = POLL_S
    while True:
        yield pause_s
        pause_s = min(1.25 * pause_s, 8 * POLL_S)


def _end_fault(call: str, fault: Fault | None) -> None:
    if fault and fault.result:
        raise CallError(call, fault.result)


def _need_driver(world: World) -> DriverVersion:
    if world.rules.driver is None:
        raise NoDriver("this simulated machine has no NVIDIA driver", hint='set "driver" in its machine.json')
    return world.rules.driver


def _as_seen(gpu: SimulatedGpu, free: int) -> Gpu:
    memory: tuple[int | None, int | None] = (gpu.total_bytes, free)
    if gpu.lost or gpu.memory_query == "fails":
        memory = (None, None)
    elif gpu.memory_query == "zero":
        memory = (0, 0)
    pci = f"00000000:{gpu.index + 1:02X}:00.0"
    return Gpu(gpu.uuid, gpu.index, gpu.name, *memory, gpu.persistence, gpu.compute_mode, gpu.mig, gpu.lost, gpu.index, pci)
