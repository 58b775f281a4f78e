"""What an operation needs of the world around it. ``local.py`` is the real one; tests have one in memory, with a clock of its own."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from gpuckpt.journal import Record
from gpuckpt.model import Call, Gpu, Hazard, Inventory, Outcome, ProcessId, Rank, State


class Pending(Protocol):
    """A driver call under way in a caller of its own."""

    process: ProcessId
    caller_pid: int
    outcome: Outcome | None

    def keep(self) -> None:
        """A granted lock is wanted: its caller need not stand by to undo it any longer."""
        ...

    def release(self) -> None:
        """Leave the call to itself: a lock undoes itself when granted, a quiesce is given up, anything else runs to its end."""
        ...


class Journal(Protocol):
    def prepare(self) -> None: ...
    def save(self, record: Record) -> None: ...
    def remove(self, *record_ids: str) -> None: ...
    def records(self) -> list[Record]: ...
    def audit(self, **line: Any) -> None: ...
    def left_bytes(self, process: ProcessId) -> list[int]: ...


class Claim(Protocol):
    """An exclusive hold on processes or GPUs, among all gpuckpt of all users. Ends with the process that holds it."""

    def release(self) -> None: ...


class World(Protocol):
    simulated: bool
    me: ProcessId
    user: str  # "alice (uid 1000)"

    @property
    def journal(self) -> Journal: ...

    def now(self) -> float:
        """Monotonic seconds."""
        ...

    @property
    def interruptions(self) -> Sequence[int]:
        """Signals that asked us to stop, in order of arrival."""
        ...

    def inspect(
        self, targets: Sequence[int], *, tree: bool, along: Collection[int] = (), method: str = "auto", look_s: float = 0.0
    ) -> Inventory:
        """The CUDA processes that *targets* stand for, and those to take along that *along* stands for, with their hazards. Raises for
        one that is none.

        *method*: by which a suspend would move their memory, which decides how much host memory that takes. *look_s*: how long to wait
        for programs with an agent to look at their communicators.
        """
        ...

    def states(self, processes: Iterable[ProcessId]) -> dict[ProcessId, State]:
        """The driver's word on each, within a short deadline: ``BLOCKED`` where it does not answer, ``GONE`` for the dead."""
        ...

    def ranks(self, processes: Iterable[ProcessId]) -> tuple[Rank, ...]:
        """What the agents of *processes* say of their communicators, suspended ones too; nothing of those that do not answer."""
        ...

    def short_for_comms(self, processes: Iterable[ProcessId]) -> list[Hazard]:
        """For each limit of host memory what NCCL would break by its backups, if the communicators of *processes* were suspended now."""
        ...

    def silent(self, process: ProcessId) -> bool:
        """Whether no agent answered for *process* when its state was last asked for."""
        ...

    def halted(self, process: ProcessId) -> str:
        """As :func:`gpuckpt.inspect.processes.halted`."""
        ...

    def alive(self, process: ProcessId) -> bool: ...

    def gpus(self) -> tuple[Gpu, ...]: ...

    def refuse_maps(self) -> None:
        """Raise :class:`gpuckpt.errors.DriverTooOld` where the driver cannot restore onto other GPUs."""
        ...

    def held(self) -> dict[int, dict[str, int | None]]:
        """pid -> {GPU UUID: bytes} as NVML says now."""
        ...

    def image_bytes(self, process: ProcessId) -> int: ...

    def image(self, process: ProcessId) -> Mapping[str, Any]:
        """Of a checkpointed process: how its image was made ("path" and more), and whether memory of it was given back ("dropped")."""
        ...

    def describe(self, pid: int) -> str:
        """ "pid 4242 (python train.py, alice)": how to name a process to a person."""
        ...

    def uptime_s(self) -> float:
        """Seconds since boot."""
        ...

    def heir(self, process: ProcessId) -> tuple[ProcessId, float] | None:
        """Who has the number of *process*, which ended, and the seconds since boot when that one was started; None if nobody."""
        ...

    def age_s(self, pid: int) -> float | None:
        """Seconds since *pid* was started; None for one that is not seen here."""
        ...

    def start(
        self,
        call: Call,
        process: ProcessId,
        *,
        timeout_s: float = 0.0,
        gpu_map: Mapping[str, str] | None = None,
        initialise: bool = False,
        image: Mapping[str, Any] | None = None,
        claims: Sequence[Any] = (),
    ) -> Pending: ...

    def ask(
        self,
        call: Call,
        processes: Sequence[ProcessId],
        *,
        operation: str,
        timeout_s: float,
        movable: Collection[ProcessId] = (),
        keep: bool = False,
        accept: bool = False,
        measure: bool = False,
    ) -> Mapping[ProcessId, Pending]:
        """Begin the *call* of the agents of *processes*; an agent answers after at most *timeout_s*, or not at all.

        What they do together (``agent.protocol.TOGETHER``) all begin, or none: those that were ready then end as "agent:DROPPED".
        A quiesce tells those that are *movable* that an offload follows; with *keep* the communicators are left alone, with *accept* their
        hazards are taken on. After comms they tell what stays on the GPU, to *measure* it.
        """
        ...

    def wait(self, pending: Collection[Any], until: float) -> None:
        """Return once one of *pending* has ended, at *until*, or on a new interruption. With none pending: sleep."""
        ...

    def claim(self, processes: Sequence[ProcessId], until: float) -> Claim:
        """Hold *processes*, waiting until *until*. Raises :class:`gpuckpt.errors.Busy`, saying who is at it, or ``Interrupted`` for a
        signal that comes meanwhile."""
        ...

    def claimed(self, process: ProcessId) -> bool:
        """Whether *process* is held: a gpuckpt is at work on it, or a call that one began."""
        ...

    def claim_gpus(self, gpus: Sequence[Gpu], until: float) -> Claim:
        """Hold *gpus* for a resume, in UUID order. Raises :class:`gpuckpt.errors.Busy`."""
        ...

    def let_go(self, claim: Any) -> None:
        """Give up a *claim* of GPUs while the resume goes on: others may go first."""
        ...


def usage(world: World, mine: Collection[int]) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes used on each GPU, and by processes other than *mine*: of one moment, or somebody's allocation would count as ours."""
    held = world.held()
    for _ in range(3):
        gpus, before, held = world.gpus(), held, world.held()
        if held == before:
            break
    used = {g.uuid: g.total_bytes - g.free_bytes for g in gpus if g.total_bytes and g.free_bytes is not None}
    others = dict.fromkeys(used, 0)
    for pid, on in held.items():
        if pid not in mine:
            for uuid, nbytes in on.items():
                others[uuid] = others.get(uuid, 0) + (nbytes or 0)
    return used, others
