"""Plain data that every other module speaks in: processes, GPUs, hazards, steps and reports. Frozen, and free of any library."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MIB = 1 << 20
GIB = 1 << 30


class State(enum.StrEnum):
    """What the driver says of a process, what its agent adds while it runs, and answers that neither can give itself."""

    RUNNING = "running"
    QUIESCED = "quiesced"  # its agent holds it at its safe point, no GPU work in flight
    OFFLOADED = "offloaded"  # and what its own allocator holds has left the GPU
    COMMS_SUSPENDED = "comms-suspended"  # and its communicators have given up what they import
    DISARMED = "disarmed"  # and its agent waits for a controller, whatever happens
    LOCKED = "locked"
    CHECKPOINTED = "checkpointed"
    CHECKPOINTING = "checkpointing"  # CUDA 13.4 and newer
    RESTORING = "restoring"  # CUDA 13.4 and newer
    FAILED = "failed"
    UNKNOWN = "unknown"  # a state that this version has no name for
    NONE = "none"  # a live process without CUDA state
    GONE = "gone"  # no such process
    DENIED = "denied"  # we may not ask
    BLOCKED = "blocked"  # the driver did not answer in time: another call on the process is under way, or it is stopped


class Call(enum.StrEnum):
    """What changes a process: an agent's calls, the driver's four, and those that move its image between memory and disk."""

    QUIESCE = "quiesce"
    OFFLOAD = "offload"
    COMMS = "comms"
    DISARM = "disarm"
    ARM = "arm"
    COMMS_RESUME = "comms-resume"
    ONLOAD = "onload"
    UNQUIESCE = "unquiesce"
    LOCK = "lock"
    CHECKPOINT = "checkpoint"
    RESTORE = "restore"
    UNLOCK = "unlock"
    STORE = "store"  # the image of a checkpointed process into a file
    DROP = "drop"  # its pages given back
    LOAD = "load"  # and filled again from the file


#: No steps of a plan's walk, which ends where the driver's calls end.
IMAGE_CALLS = frozenset({Call.STORE, Call.DROP, Call.LOAD})


class Status(enum.StrEnum):
    """What a journal record stands for. All but ``SUSPENDED`` are unfinished while nobody works on them."""

    SUSPENDING = "suspending"
    SUSPENDED = "suspended"
    RESUMING = "resuming"
    UNDOING = "undoing"


@dataclass(frozen=True, order=True, slots=True)
class ProcessId:
    """A process, and not its successor under the same number.

    ``start_ticks`` is the start time since boot in clock ticks (field 22 of ``/proc/PID/stat``).
    """

    pid: int
    start_ticks: int

    def __str__(self) -> str:
        return str(self.pid)


class Outcome(NamedTuple):
    """How a call ended. ``result`` is "SUCCESS", a CUDA result's name, "STALE" (the process was another one by then),
    "VANISHED" (its caller died: the call itself goes on in the target) or an exception of the adapter ("gpuckpt:CODE")."""

    result: str
    seconds: float = 0.0
    state: State | None = None  # of a state query
    message: str = ""
    failed_in: str = ""  # "cuInit" where a restore ended before the driver was asked to restore
    hint: str = ""
    image: dict[str, Any] | None = None  # of a store: where it lies now
    moved: dict[str, int] | None = None  # of an offload: "kept_bytes" and "dropped_bytes"
    stays: tuple[Mapping[str, Any], ...] = ()  # of comms, where it was asked for: as in a report, without what nobody can tell

    @property
    def ok(self) -> bool:
        return self.result == "SUCCESS"

    @property
    def answered(self) -> bool:
        """Whether the driver was asked, and this is what it said."""
        return (
            self.result not in ("STALE", "VANISHED", "NO_CALLER") and self.failed_in != "cuInit" and not self.result.startswith("gpuckpt:")
        )


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as NVML sees it now. ``None`` for a byte count means that the query failed: unknown is not free."""

    uuid: str
    index: int
    name: str = ""
    total_bytes: int | None = None
    free_bytes: int | None = None
    persistence: bool = True
    compute_mode: str = "default"  # "default", "exclusive-process", "prohibited"
    mig: bool = False
    lost: bool = False
    minor: int | None = None  # of /dev/nvidiaN
    pci: str = ""

    @property
    def label(self) -> str:
        return f"GPU {self.index} ({self.uuid})" if self.index >= 0 else self.uuid


@dataclass(frozen=True, slots=True)
class GpuBytes:
    """Bytes that one process holds on one GPU. ``None`` when NVML does not tell."""

    uuid: str
    nbytes: int | None


@dataclass(frozen=True, slots=True)
class Movable:
    """Memory of a process that its own allocator can take off the GPU and back, as its agent sees it now.

    ``kept_bytes`` go to host memory, ``dropped_bytes`` nowhere: a cache, which is empty afterwards. ``by``: whose allocator it is.
    ``host_bytes``: what that takes of host memory now; its allocator may have some of it from an earlier time, or round up.
    """

    kept_bytes: int
    dropped_bytes: int = 0
    by: str = "gpuckpt.pool"
    host_bytes: int | None = None  # as many as are kept
    tags: tuple[Mapping[str, Any], ...] = ()  # each {"tag", "device", "bytes", "where"}: "gpu", "host" or "discarded"

    @property
    def nbytes(self) -> int:
        return self.kept_bytes + self.dropped_bytes


class GpuProcess(NamedTuple):
    """A process with CUDA state."""

    id: ProcessId
    name: str
    uid: int
    state: State
    gpus: tuple[GpuBytes, ...] = ()
    host_bytes: int = 0  # size of its image in host memory, while checkpointed
    stopped: bool = False  # SIGSTOP, ptrace stop, or a frozen cgroup
    agent: bool = False  # it has one that vouches for it
    along: bool = False  # taken along (``--with``): its communicators are suspended, and itself it is neither locked nor checkpointed
    movable: Movable | None = None  # what its agent can take off the GPU beforehand
    offloaded: bool = False  # its agent has done so
    vouched: bool = False  # its agent knows of nothing in it that cannot be suspended
    comms_bytes: int = 0  # what NCCL's own backups take of host memory, at most, while its communicators are suspended

    @property
    def pid(self) -> int:
        return self.id.pid

    @property
    def nbytes(self) -> int:
        return sum(g.nbytes or 0 for g in self.gpus)


#: By what a suspend takes memory off the GPU (``method.py``).
METHODS = ("auto", "driver", "pool")

#: Kinds of hazards that a person may take on with ``--accept-loss``.
ACCEPTABLE_HAZARDS = ("possible-import", "nccl-communicator", "rdma", "mps", "host-memory")


@dataclass(frozen=True, slots=True)
class Hazard:
    """Something that makes a suspend unsafe. ``acceptable`` ones can be taken on by ``--accept-loss KIND``."""

    kind: str
    message: str
    hint: str
    pid: int | None = None
    acceptable: bool = False


class Rank(NamedTuple):
    """What one process is in one communicator of more than one rank, as its agent describes it. ``nccl`` is a version, "" if unknown."""

    pid: int
    communicator: str
    rank: int
    size: int
    nccl: str = ""


class Outsider(NamedTuple):
    """A process that is not part of an operation, and has a rank in a communicator of that name and size. ``near``: it is related."""

    rank: Rank
    who: str  # "pid 4242 (python train.py, alice) on host0"
    near: bool


@dataclass(frozen=True, slots=True)
class Membership:
    """Where the processes of one host belong in an operation of several. ``hosts`` are names by node rank.

    ``group`` is the same on all of them. ``phase``: "joined"; "voted" (the others may have begun to checkpoint); "committed".
    """

    group: str
    rendezvous: str
    node: int
    hosts: tuple[str, ...]
    phase: str = "joined"
    key: str = ""  # the file that values in the store are authenticated with
    spans: bool = True  # a communicator of it has ranks on several hosts, which come back together or not at all

    @property
    def label(self) -> str:
        return f"node {self.node} of {len(self.hosts)} ({', '.join(self.hosts)})"

    def resume_command(self, pid: int) -> str:
        """What to type on this host to bring the group back."""
        key = f" --rendezvous-key {self.key}" if self.key else ""
        return f"gpuckpt resume {pid} --rendezvous {self.rendezvous} --nodes {len(self.hosts)} --node-rank {self.node}{key}"


class HostRoom(NamedTuple):
    """Host memory that a process may still take, and the limit that says so ("MemAvailable", "memory.max of /a/b")."""

    available_bytes: int
    limit: str


class Inventory(NamedTuple):
    """What an operation found: its CUDA processes in pid order, and all that decides whether it may go on."""

    processes: tuple[GpuProcess, ...]
    gpus: tuple[Gpu, ...]
    hazards: tuple[Hazard, ...] = ()
    warnings: tuple[str, ...] = ()
    needed_host_bytes: int = 0
    host_room: HostRoom | None = None
    ranks: tuple[Rank, ...] = ()  # of its processes, in communicators that their agents can suspend
    outside: tuple[Outsider, ...] = ()  # who has the ranks that are missing from these communicators, as far as is known


@dataclass(frozen=True, slots=True)
class Step:
    """One step of an operation. ``seconds_by_pid``: how long the call on each process took, of those that have ended."""

    name: str
    seconds: float
    seconds_by_pid: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GpuReport:
    uuid: str
    bytes_before: int | None
    bytes_after: int | None


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """How one process was left. ``state`` is "running", "locked", "suspended", "suspended (pool)", "held" (taken along: it stands still),
    "in-flight", "lost", "gone", "unknown", or where its agent holds it: "quiesced", "offloaded", "comms-suspended", "disarmed"."""

    pid: int
    name: str
    state: str
    gpus: tuple[GpuReport, ...] = ()
    host_bytes: int = 0  # of its image, where that is in host memory
    retained_bytes: int = 0  # left on the GPUs although the process is suspended
    note: str = ""
    disk_bytes: int = 0  # of its image, where that is on disk and not in host memory
    image: dict[str, Any] | None = None  # while suspended: how it was made, and where it lies
    moved: Mapping[str, int] | None = None  # while suspended: what left by its own allocator, "kept_bytes" and "dropped_bytes"
    stays: tuple[Mapping[str, Any], ...] = ()  # of ``retained_bytes`` by its pool alone: {"class", "bytes", "why"} each


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of one command; ``as_dict()`` is its JSON document."""

    command: str
    ok: bool
    simulated: bool
    processes: tuple[ProcessReport, ...] = ()
    seconds: float = 0.0
    steps: tuple[Step, ...] = ()
    hazards: tuple[Hazard, ...] = ()
    warnings: tuple[str, ...] = ()
    already: bool = False  # nothing had to be done
    details: dict[str, Any] = field(default_factory=dict)  # what one command alone has to say (a plan, a table)
    error: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """The document of ``--json``: schema 1, units in the keys, the same shape on failure."""
        out = dataclasses.asdict(dataclasses.replace(self, details={}))
        del out["details"]
        return {"schema": 1, **out, **{k: v for k, v in self.details.items() if not k.startswith("_")}}
