"""What the simulated driver does to simulated processes: the measured rules, the traps included. In memory: no files, no clock."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gpuckpt.driver.api import CallError, DriverVersion
from gpuckpt.model import Call, State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

TRAITS = frozenset({"managed", "import", "communicator", "contextless"})
DEFAULT_DRIVER = DriverVersion((13, 0), "580.159.04")
_WANTED = {Call.LOCK: State.RUNNING, Call.CHECKPOINT: State.LOCKED, Call.RESTORE: State.CHECKPOINTED, Call.UNLOCK: State.LOCKED}


@dataclass
class SimulatedGpu:
    uuid: str
    index: int
    name: str = "Simulated GPU"
    total_bytes: int = 80 << 30
    persistence: bool = True
    compute_mode: str = "default"  # "exclusive-process", "prohibited"
    mig: bool = False
    lost: bool = False
    memory_query: str = "ok"  # what NVML answers when asked for its memory: "ok", "fails", "zero"


@dataclass
class SimulatedProcess:
    """``held_bytes`` is in the process's own device order, and says while checkpointed where its memory came from."""

    pid: int
    start_ticks: int
    held_bytes: dict[str, int]
    state: State = State.RUNNING
    traits: set[str] = field(default_factory=set)
    exported_bytes: int = 0  # of its first GPU: allocations whose exported handle is an open descriptor
    retained_bytes: dict[str, int] = field(default_factory=dict)  # on the GPUs over and above ``held_bytes``
    image_bytes: int = 0
    refused: bool = False  # a checkpoint said NOT_SUPPORTED: the next says UNKNOWN
    lost: bool = False  # for the simulation to know; the driver goes on to say CHECKPOINTED

    @property
    def on_gpu(self) -> bool:
        return self.state in (State.RUNNING, State.LOCKED)

    def bytes_on(self, uuid: str) -> int:
        held = self.held_bytes.get(uuid, 0) if self.on_gpu else 0
        return held + self.retained_bytes.get(uuid, 0)


@dataclass
class Rules:
    """All simulated GPUs and processes, and what each driver call makes of them.

    Each call succeeds or raises :class:`CallError` as the driver was measured to. *alive* tells of a pid that is not registered
    whether it is a live process without CUDA state (``NOT_INITIALIZED``) or none at all (``OPERATING_SYSTEM``).
    """

    gpus: dict[str, SimulatedGpu] = field(default_factory=dict)
    processes: dict[int, SimulatedProcess] = field(default_factory=dict)
    driver: DriverVersion | None = DEFAULT_DRIVER
    alive: Callable[[int], bool] = field(default=lambda _pid: False, compare=False)

    @classmethod
    def of(cls, gpus: Iterable[SimulatedGpu], *, alive: Callable[[int], bool] = lambda _pid: False) -> Rules:
        return cls(gpus={g.uuid: g for g in gpus}, alive=alive)

    def used(self, uuid: str) -> int:
        """Bytes taken on a GPU, by all processes, what checkpointed ones retained included."""
        return sum(p.bytes_on(uuid) for p in self.processes.values())

    def free(self, uuid: str) -> int:
        return self.gpus[uuid].total_bytes - self.used(uuid)

    def register(
        self, pid: int, start_ticks: int, bytes_by_uuid: Mapping[str, int], traits: Iterable[str] = (), exported_bytes: int = 0
    ) -> SimulatedProcess:
        """A process initialises CUDA and allocates: afterwards it is running. Raises as an allocation would, and adds nothing then.

        With the trait ``contextless`` it only loaded the driver: it holds nothing.
        """
        traits = set(traits)
        if not traits <= TRAITS:
            raise ValueError(f"unknown traits: {sorted(traits - TRAITS)}")
        held = {} if "contextless" in traits else dict(bytes_by_uuid)
        if exported_bytes > next(iter(held.values()), 0):
            raise ValueError("more bytes exported than the first GPU holds")
        self.processes.pop(pid, None)
        self._make_room("register", pid, held)
        process = SimulatedProcess(pid, start_ticks, held, traits=traits, exported_bytes=exported_bytes)
        self.processes[pid] = process
        return process

    def alloc(self, pid: int, nbytes: int) -> None:
        """A running process allocates more on its first GPU. Raises ``OUT_OF_MEMORY``, and nothing has changed then."""
        process = self.find("alloc", pid)
        uuid = next(iter(process.held_bytes), None)
        if process.state is not State.RUNNING or uuid is None:
            raise CallError("alloc", "ILLEGAL_STATE")
        self._make_room("alloc", pid, {uuid: nbytes})
        process.held_bytes[uuid] += nbytes

    def release(self, pid: int, nbytes: int) -> None:
        """A running process gives back so much of what it holds on its first GPU."""
        process = self.find("release", pid)
        uuid = next(iter(process.held_bytes))
        if process.state is not State.RUNNING or process.held_bytes[uuid] < nbytes:
            raise CallError("release", "ILLEGAL_STATE")
        process.held_bytes[uuid] -= nbytes

    def forget(self, pid: int) -> None:
        """The process ended: all that it held or retained is free."""
        self.processes.pop(pid, None)

    def find(self, call: str, pid: int) -> SimulatedProcess:
        """The process; raises what any *call* on one without CUDA state raises."""
        if pid in self.processes:
            return self.processes[pid]
        raise CallError(call, "NOT_INITIALIZED" if self.alive(pid) else "OPERATING_SYSTEM")

    def state(self, pid: int) -> State:
        """What GetState says: of a lost process still ``CHECKPOINTED``."""
        return self.find("state", pid).state

    def check(self, call: Call, pid: int) -> SimulatedProcess:
        """The process, in the state that *call* wants; raises what *call* would raise at once."""
        process = self.find(call, pid)
        if process.state is not _WANTED[call]:
            raise CallError(call, "ILLEGAL_STATE")
        return process

    def lock(self, pid: int) -> None:
        self.check(Call.LOCK, pid).state = State.LOCKED

    def unlock(self, pid: int) -> None:
        self.check(Call.UNLOCK, pid).state = State.RUNNING

    def checkpoint(self, pid: int) -> None:
        """Everything but what an exported handle holds leaves the GPUs. A refused process stays locked."""
        process = self.check(Call.CHECKPOINT, pid)
        if process.refused:
            raise CallError(Call.CHECKPOINT, "UNKNOWN")
        if "managed" in process.traits or any(self._has(u, "mig") for u in process.held_bytes):
            process.refused = True
            raise CallError(Call.CHECKPOINT, "NOT_SUPPORTED")
        if any(not self._has(u) or self._has(u, "lost") for u in process.held_bytes):
            raise CallError(Call.CHECKPOINT, "UNKNOWN")
        # The descriptor keeps the first memory it named: a second checkpoint does not leak again.
        if process.exported_bytes and not process.retained_bytes:
            process.retained_bytes = {next(iter(process.held_bytes)): process.exported_bytes}
        process.image_bytes = sum(process.held_bytes.values())
        process.state = State.CHECKPOINTED

    def restore(self, pid: int, gpu_map: Mapping[str, str], *, initialise: bool = True) -> None:
        """Bring the memory back to where *gpu_map* says; the process is locked then.

        Nothing is lost by a wrong state, by a map that is not a permutation of the live GPUs, or by a driver that is not initialised.
        Any other failure loses the process.
        """
        process = self.check(Call.RESTORE, pid)
        if process.lost:
            raise CallError(Call.RESTORE, "OPERATING_SYSTEM")
        live = {u for u, g in self.gpus.items() if not g.lost}
        if gpu_map and (set(gpu_map) != live or set(gpu_map.values()) != live):
            raise CallError(Call.RESTORE, "INVALID_VALUE")
        if not initialise and not all(self.gpus[u].persistence for u in live):
            raise CallError(Call.RESTORE, "NOT_INITIALIZED")
        moved = {gpu_map.get(u, u): n for u, n in process.held_bytes.items()}
        try:
            self._may_return(process, moved, gpu_map)
        except CallError:
            process.lost = True
            raise
        process.held_bytes = moved
        process.image_bytes = 0
        process.state = State.LOCKED

    def to_json(self) -> dict[str, Any]:
        """Plain data that :meth:`from_json` understands: ``driver``, ``gpus`` and ``processes``."""
        driver = self.driver and {"cuda": list(self.driver.cuda), "package": self.driver.package}
        processes = [{**dataclasses.asdict(p), "state": p.state.value, "traits": sorted(p.traits)} for p in self.processes.values()]
        return {"driver": driver, "gpus": [dataclasses.asdict(g) for g in self.gpus.values()], "processes": processes}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], *, alive: Callable[[int], bool] = lambda _pid: False) -> Rules:
        driver = data["driver"] and DriverVersion((data["driver"]["cuda"][0], data["driver"]["cuda"][1]), data["driver"]["package"])
        gpus = [SimulatedGpu(**g) for g in data["gpus"]]
        processes = [SimulatedProcess(**{**p, "state": State(p["state"]), "traits": set(p["traits"])}) for p in data["processes"]]
        return cls({g.uuid: g for g in gpus}, {p.pid: p for p in processes}, driver, alive)

    def _has(self, uuid: str, flag: str = "uuid") -> bool:
        return bool(getattr(self.gpus.get(uuid), flag, False))

    def _may_return(self, process: SimulatedProcess, moved: Mapping[str, int], gpu_map: Mapping[str, str]) -> None:
        if "import" in process.traits:
            raise CallError(Call.RESTORE, "INVALID_VALUE")
        if "communicator" in process.traits:
            raise CallError(Call.RESTORE, "NOT_SUPPORTED")
        if any(self.gpus[old].name != self.gpus[new].name for old, new in gpu_map.items()):
            raise CallError(Call.RESTORE, "INVALID_VALUE")
        self._make_room(Call.RESTORE, process.pid, moved)

    def _make_room(self, call: str, pid: int, wanted: Mapping[str, int]) -> None:
        """Raises unless every GPU takes *pid* and has the bytes free. Takes nothing."""
        for uuid in wanted:
            gpu = self.gpus.get(uuid)
            others = any(p.bytes_on(uuid) for p in self.processes.values() if p.pid != pid)
            if gpu is None or gpu.lost or gpu.compute_mode == "prohibited" or (gpu.compute_mode == "exclusive-process" and others):
                raise CallError(call, "DEVICE_UNAVAILABLE")
        if any(self.free(uuid) < nbytes for uuid, nbytes in wanted.items()):
            raise CallError(call, "OUT_OF_MEMORY")
