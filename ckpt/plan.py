"""Decisions without effects: what to do next, what a suspend or a restore needs, what a journal record means after a crash.

A process is at some depth between running and checkpointed (``DEPTH``). An operation is a goal for each process; going there,
back, and recovering after a crash are the same walk with other goals.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from gpuckpt.model import GIB, MIB, Call, Gpu, GpuBytes, ProcessId, State, Status

#: How far down a process is.
DEPTH = {
    State.RUNNING: 0,
    State.QUIESCED: 1,
    State.COMMS_SUSPENDED: 2,
    State.DISARMED: 3,
    State.LOCKED: 4,
    State.CHECKPOINTED: 5,
}
#: The call that takes a process one step down, and one step up.
DOWN = {
    State.RUNNING: Call.QUIESCE,
    State.QUIESCED: Call.COMMS,
    State.COMMS_SUSPENDED: Call.DISARM,
    State.DISARMED: Call.LOCK,
    State.LOCKED: Call.CHECKPOINT,
}
UP = {
    State.CHECKPOINTED: Call.RESTORE,
    State.LOCKED: Call.UNLOCK,
    State.DISARMED: Call.ARM,
    State.COMMS_SUSPENDED: Call.COMMS_RESUME,
    State.QUIESCED: Call.UNQUIESCE,
}
#: What a call turns a process into.
RESULT = {
    Call.QUIESCE: State.QUIESCED,
    Call.COMMS: State.COMMS_SUSPENDED,
    Call.DISARM: State.DISARMED,
    Call.LOCK: State.LOCKED,
    Call.CHECKPOINT: State.CHECKPOINTED,
    Call.RESTORE: State.LOCKED,
    Call.UNLOCK: State.DISARMED,
    Call.ARM: State.COMMS_SUSPENDED,
    Call.COMMS_RESUME: State.QUIESCED,
    Call.UNQUIESCE: State.RUNNING,
}
#: Where an agent may hold a process that the driver calls running; nobody means to leave it there.
AGENT_STAGES = frozenset({State.QUIESCED, State.COMMS_SUSPENDED, State.DISARMED})
#: Calls that move an image between host memory and disk; no step of the walk, which ends where the driver's calls end.
IMAGE_CALLS = frozenset({Call.STORE, Call.DROP, Call.LOAD})
#: Calls that an agent makes, on the program's own thread; the others are the driver's.
AGENT_CALLS = frozenset({Call.QUIESCE, Call.COMMS, Call.DISARM, Call.ARM, Call.COMMS_RESUME, Call.UNQUIESCE})


def result(call: Call, *, agent: bool) -> State:
    """What *call* turns a process into: without an agent the driver's unlock is the end of the way back."""
    return State.RUNNING if call is Call.UNLOCK and not agent else RESULT[call]


def depth(state: State, *, agent: bool) -> int:
    """Where *state* is on the way; a process without an agent has nothing to do before the lock."""
    return DEPTH[State.DISARMED if state is State.RUNNING and not agent else state]


#: Free GPU memory beyond the recorded bytes that a restore must find. NVML counts a process in 2 MiB pages, and a restore
#: that runs out of memory loses the process, so the margin is generous.
RESTORE_MARGIN_BYTES = 256 * MIB

#: Host memory beyond the GPU bytes that a checkpoint takes: the image measured 10 MiB more than NVML's figure
#: (1,644 for 1,634 MiB, benchmarks/results/driver-facts.json).
IMAGE_MARGIN_BYTES = 128 * MIB


@dataclass(frozen=True, slots=True)
class Phase:
    """One call on several processes at once. The next phase starts when all of them have ended."""

    call: Call
    processes: tuple[ProcessId, ...]


def belongs(state: State) -> State:
    """Where a process found in *state* is at home: its agent holds it only for an operation that nobody is at any more."""
    return State.RUNNING if state in AGENT_STAGES else state


def next_phase(
    now: Mapping[ProcessId, State], goal: Mapping[ProcessId, State], agents: Collection[ProcessId] = frozenset()
) -> Phase | None:
    """The next calls on the way from *now* to *goal*; None when nothing is left to do. *agents*: those that have one.

    All of a step come before the first of the next: every lock before a checkpoint, every restore before an unlock. What must come
    up comes up before anything goes down. Processes in a state without depth (gone, failed, unknown) are left alone.
    """
    here = {p: depth(now[p], agent=p in agents) for p in sorted(goal) if now.get(p) in DEPTH and goal[p] in DEPTH}
    gap = {p: at - depth(goal[p], agent=p in agents) for p, at in here.items()}
    if up := [p for p, distance in gap.items() if distance > 0]:
        deepest = max(here[p] for p in up)
        those = tuple(p for p in up if here[p] == deepest)
        return Phase(UP[now[those[0]]], those)
    if down := [p for p, distance in gap.items() if distance < 0]:
        shallowest = min(here[p] for p in down)
        those = tuple(p for p in down if here[p] == shallowest)
        return Phase(Call.LOCK if shallowest == DEPTH[State.DISARMED] else DOWN[now[those[0]]], those)
    return None


def phases(
    now: Mapping[ProcessId, State], goal: Mapping[ProcessId, State], agents: Collection[ProcessId] = frozenset()
) -> tuple[Phase, ...]:
    """The whole way from *now* to *goal* if every call succeeds."""
    states, found = dict(now), []
    while phase := next_phase(states, goal, agents):
        found.append(phase)
        states.update({p: result(phase.call, agent=p in agents) for p in phase.processes})
    return tuple(found)


def bottom(process: ProcessId, along: Collection[ProcessId]) -> State:
    """What *process* is while its group is suspended. One of those taken *along* waits for a controller, and keeps what it has."""
    return State.DISARMED if process in along else State.CHECKPOINTED


def recovery_goal(
    status: Status, found: Mapping[ProcessId, State], now: Mapping[ProcessId, State], along: Collection[ProcessId] = ()
) -> dict[ProcessId, State]:
    """Where the processes of an unfinished operation belong, given their states *now*. *along*: those that were taken along, which go
    back when nobody is left whom they could wait for.

    A suspend that had reached every process is finished, any other is undone. A resume that had restored any process is
    finished, any other is left suspended.
    """
    alive = [p for p in found if now.get(p) in DEPTH]
    down = {p: bottom(p, along) for p in alive}
    all_down = all(now[p] is down[p] for p in alive) and (not alive or not set(alive) <= set(along))
    if status in (Status.SUSPENDING, Status.SUSPENDED) and all_down:
        return down
    if status is Status.RESUMING:
        return down if all_down else dict.fromkeys(alive, State.RUNNING)
    if status is Status.SUSPENDED:
        return {p: belongs(now[p]) for p in alive}
    return {p: found[p] for p in alive if found[p] in DEPTH}


def needs_other_hosts(
    status: Status,
    phase: str,
    goal: Mapping[ProcessId, State],
    now: Mapping[ProcessId, State],
    agents: Collection[ProcessId],
    along: Collection[ProcessId] = (),
) -> bool:
    """Whether one host's part of an unfinished operation of several, at *phase* of its membership, waits for the others.

    What goes to its *goal* without a peer, a lock that is undone say, does not. Once voted, the others may have committed a suspend;
    and a part that runs again is remembered until all do.
    """
    moving = [p for p, state in goal.items() if now[p] is not state]
    if status is Status.RESUMING or (status is Status.SUSPENDING and phase != "joined"):
        return any(now[p] is not bottom(p, along) for p in goal)
    harmless = all(now[p] is State.QUIESCED or (now[p] is State.LOCKED and p not in agents) for p in moving)
    return bool(moving) and not (phase == "joined" and harmless)


def image_need_bytes(held: Iterable[GpuBytes]) -> int:
    """Host memory that a checkpoint of a process holding *held* takes; an unknown figure counts as nothing here."""
    nbytes = sum(g.nbytes or 0 for g in held)
    return nbytes + nbytes // 64 + IMAGE_MARGIN_BYTES


def room_need_bytes(
    held: Iterable[GpuBytes], retained: Mapping[str, int], gpu_map: Mapping[str, str], spare: Mapping[str, int | None] | None = None
) -> dict[str, int]:
    """Free bytes that restoring processes holding *held* needs, by UUID of the GPU that they go to.

    *spare*: what was free beside them when they were suspended. The margin is no larger, or a full GPU would never take them back.
    """
    need: dict[str, int] = {}
    for g in held:
        target = gpu_map.get(g.uuid, g.uuid)
        known = (spare or {}).get(g.uuid)
        margin = RESTORE_MARGIN_BYTES if known is None else min(known, RESTORE_MARGIN_BYTES)
        need[target] = need.get(target, margin) + (g.nbytes or 0)
    for uuid, nbytes in retained.items():
        target = gpu_map.get(uuid, uuid)
        if target in need:
            need[target] += nbytes
    return need


@dataclass(frozen=True, slots=True)
class Shortage:
    """A GPU that a restore cannot use now. ``kind``: "memory", "unknown", "lost", "missing" or "changed"."""

    kind: str
    uuid: str
    needed_bytes: int = 0
    free_bytes: int | None = None
    what: str = ""


def shortages(need: Mapping[str, int], recorded: Mapping[str, Gpu], gpus: Iterable[Gpu]) -> list[Shortage]:
    """Why a restore that needs *need* may not be called now; empty if it may. *recorded*: the target GPUs at suspend."""
    seen = {g.uuid: g for g in gpus}
    found = []
    for uuid, needed in sorted(need.items()):
        gpu, before = seen.get(uuid), recorded.get(uuid)
        if gpu is None:
            found.append(Shortage("missing", uuid, needed))
        elif gpu.lost:
            found.append(Shortage("lost", uuid, needed))
        elif gpu.mig and not (before and before.mig):
            found.append(Shortage("changed", uuid, needed, gpu.free_bytes, "MIG was switched on"))
        elif gpu.compute_mode == "prohibited" or (before and gpu.compute_mode != before.compute_mode):
            was = f" (was {before.compute_mode})" if before else ""
            found.append(Shortage("changed", uuid, needed, gpu.free_bytes, f"its compute mode is {gpu.compute_mode}{was}"))
        elif gpu.free_bytes is None or not gpu.total_bytes:
            found.append(Shortage("unknown", uuid, needed))
        elif gpu.free_bytes < needed:
            found.append(Shortage("memory", uuid, needed, gpu.free_bytes))
    return found


def full_gpu_map(wanted: Mapping[str, str], gpus: Iterable[Gpu]) -> dict[str, str]:
    """The map that the driver wants: every GPU once as old and once as new, honouring *wanted*, the rest moved least.

    Empty if *wanted* moves nothing. Raises ``ValueError`` with words for a wish that no exchange can meet.
    """
    uuids = [g.uuid for g in gpus if not g.lost]
    for uuid in {*wanted, *wanted.values()}:
        if uuid not in uuids:
            raise ValueError(f"there is no GPU {uuid} on this machine")
    if len(set(wanted.values())) != len(wanted):
        raise ValueError("two GPUs cannot be restored onto one")
    moved = {old: new for old, new in wanted.items() if old != new}
    if not moved:
        return {}
    free = [u for u in uuids if u not in wanted.values()]
    full = dict(wanted)
    for old in uuids:
        if old not in full:
            full[old] = old if old in free else free[0]
            free.remove(full[old])
    return full


def image_call_s(nbytes: int) -> float:
    """How long moving images of so many bytes to or from disk may take beyond the deadline: 10 s a GiB, for a disk of 100 MiB a second."""
    return 30.0 + 10.0 * nbytes / GIB


def default_timeout_s(nbytes: int) -> float:
    """Deadline where the user gave none: a minute, and two seconds for each GiB (4 times the slowest rate measured, 2 GiB/s)."""
    return 60.0 + 2.0 * nbytes / GIB
