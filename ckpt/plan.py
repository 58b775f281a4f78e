"""Decisions without effects: what to do next, what a suspend or a restore needs, what a journal record means after a crash.

A process is at some depth between running and checkpointed (``DEPTH``). An operation is a goal for each process; going there,
back, and recovering after a crash are the same walk with other goals.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from gpuckpt.model import GIB, MIB, Call, Gpu, GpuBytes, GpuProcess, ProcessId, State, Status

#: Each state below running: the call that leads down into it, and the one that leads up out of it.
CALLS = {
    State.QUIESCED: (Call.QUIESCE, Call.UNQUIESCE),
    State.OFFLOADED: (Call.OFFLOAD, Call.ONLOAD),
    State.COMMS_SUSPENDED: (Call.COMMS, Call.COMMS_RESUME),
    State.DISARMED: (Call.DISARM, Call.ARM),
    State.LOCKED: (Call.LOCK, Call.UNLOCK),
    State.CHECKPOINTED: (Call.CHECKPOINT, Call.RESTORE),
}
#: How far down a process is.
DEPTH = {state: depth for depth, state in enumerate((State.RUNNING, *CALLS))}
_INTO = {down: state for state, (down, _) in CALLS.items()}
_OUT_OF = {up: state for state, (_, up) in CALLS.items()}
#: Where an agent may hold a process that the driver calls running.
AGENT_STAGES = frozenset({State.QUIESCED, State.OFFLOADED, State.COMMS_SUSPENDED, State.DISARMED})
#: Those of them in which what its own allocator held has left the GPU, if it was to.
AWAY = frozenset({State.OFFLOADED, State.COMMS_SUSPENDED, State.DISARMED})
#: Calls that an agent makes, on the program's own thread; the others are the driver's.
AGENT_CALLS = frozenset(call for state in AGENT_STAGES for call in CALLS[state])
#: Of these the ones that move memory: they take as long as its bytes do.
MOVES_BYTES = frozenset({Call.OFFLOAD, Call.ONLOAD, Call.CHECKPOINT, Call.RESTORE})


def way(*, agent: bool, movable: bool) -> tuple[State, ...]:
    """The states that a process goes through on its way down. Without an agent it has nothing to do before the lock, and what is not
    *movable* by the program's own allocator the driver takes."""
    return tuple(s for s in DEPTH if (agent or s not in AGENT_STAGES) and (movable or s is not State.OFFLOADED))


def below(state: State, steps: tuple[State, ...]) -> State:
    """The next of *steps* down from *state*, which need not be one of them."""
    return next(s for s in steps if DEPTH[s] > DEPTH[state])


def result(call: Call, *, agent: bool, movable: bool = False) -> State:
    """What *call* turns a process into."""
    if call in _INTO:
        return _INTO[call]
    return [s for s in way(agent=agent, movable=movable) if DEPTH[s] < DEPTH[_OUT_OF[call]]][-1]


#: Free GPU memory beyond the recorded bytes that a restore must find. NVML counts a process in 2 MiB pages, and a restore
#: that runs out of memory loses the process, so the margin is generous.
RESTORE_MARGIN_BYTES = 256 * MIB

#: Host memory beyond the GPU bytes that a checkpoint takes: the image measured 10 MiB more than NVML's figure
#: (1,644 for 1,634 MiB, benchmarks/results/driver-facts.json).
IMAGE_MARGIN_BYTES = 128 * MIB


class Phase(NamedTuple):
    """One call on several processes at once. The next phase starts when all of them have ended."""

    call: Call
    processes: tuple[ProcessId, ...]


def belongs(state: State) -> State:
    """Where a process found in *state* is at home: its agent holds it only for an operation that nobody is at any more."""
    return State.RUNNING if state in AGENT_STAGES else state


def next_phase(
    now: Mapping[ProcessId, State],
    goal: Mapping[ProcessId, State],
    agents: Collection[ProcessId] = frozenset(),
    movable: Collection[ProcessId] = frozenset(),
) -> Phase | None:
    """The next calls on the way from *now* to *goal*; None when nothing is left to do.

    *agents*: those that have one. *movable*: those of them whose own allocator takes its memory off the GPU.

    All of a step come before the first of the next: every lock before a checkpoint, every restore before an unlock. What must come
    up comes up before anything goes down. Processes in a state without depth (gone, failed, unknown) are left alone.
    """
    here = {p: now[p] for p in sorted(goal) if now.get(p) in DEPTH and goal[p] in DEPTH}
    if up := [p for p, state in here.items() if DEPTH[state] > DEPTH[goal[p]]]:
        deepest = max((here[p] for p in up), key=DEPTH.__getitem__)
        return Phase(CALLS[deepest][1], tuple(p for p in up if here[p] is deepest))
    steps = {p: way(agent=p in agents, movable=p in movable) for p in here}
    if down := {p: below(state, steps[p]) for p, state in here.items() if DEPTH[state] < DEPTH[goal[p]]}:
        first = min(down.values(), key=DEPTH.__getitem__)
        return Phase(CALLS[first][0], tuple(p for p, state in down.items() if state is first))
    return None


def phases(
    now: Mapping[ProcessId, State],
    goal: Mapping[ProcessId, State],
    agents: Collection[ProcessId] = frozenset(),
    movable: Collection[ProcessId] = frozenset(),
) -> tuple[Phase, ...]:
    """The whole way from *now* to *goal* if every call succeeds."""
    states, found = dict(now), []
    while phase := next_phase(states, goal, agents, movable):
        found.append(phase)
        states.update({p: result(phase.call, agent=p in agents, movable=p in movable) for p in phase.processes})
    return tuple(found)


def bottom(process: ProcessId, along: Collection[ProcessId], down: State = State.CHECKPOINTED) -> State:
    """What *process* is while its group is suspended: *down*, but that one of those taken *along* waits for a controller, and keeps what it
    has."""
    return State.DISARMED if process in along else down


def recovery_goal(
    status: Status,
    found: Mapping[ProcessId, State],
    now: Mapping[ProcessId, State],
    along: Collection[ProcessId] = (),
    down: State = State.CHECKPOINTED,
) -> dict[ProcessId, State]:
    """Where the processes of an unfinished operation belong, given their states *now*. *down*: what counts as suspended in it. *along*:
    those that were taken along, which go back when nobody is left whom they could wait for.


    A suspend that had reached every process is finished, any other is undone. A resume that had restored any process is
    finished, any other is left suspended.
    """
    alive = [p for p in found if now.get(p) in DEPTH]
    suspended = {p: bottom(p, along, down) for p in alive}
    all_down = all(now[p] is suspended[p] for p in alive) and (not alive or not set(alive) <= set(along))
    if status in (Status.SUSPENDING, Status.SUSPENDED) and all_down:
        return suspended
    if status is Status.RESUMING:
        return suspended if all_down else dict.fromkeys(alive, State.RUNNING)
    if status is Status.SUSPENDED:
        return {p: down if now[p] is down and p not in along else belongs(now[p]) for p in alive}
    return {p: found[p] for p in alive if found[p] in DEPTH}


def needs_other_hosts(
    status: Status,
    phase: str,
    goal: Mapping[ProcessId, State],
    now: Mapping[ProcessId, State],
    agents: Collection[ProcessId],
    along: Collection[ProcessId] = (),
    *,
    spans: bool = True,
) -> bool:
    """Whether one host's part of an unfinished operation of several, at *phase* of its membership, waits for the others. *spans*: its ranks
    have peers there.

    What goes to its *goal* without a peer, a lock that is undone say, does not. Once voted, the others may have committed a suspend;
    and a part that runs again is remembered until all do.
    """
    moving = [p for p, state in goal.items() if now[p] is not state]
    if status is Status.RESUMING or (status is Status.SUSPENDING and phase != "joined"):
        return any(now[p] is not bottom(p, along) for p in goal)
    alone = (State.QUIESCED, State.OFFLOADED)
    harmless = not spans or all(now[p] in alone or (now[p] is State.LOCKED and p not in agents) for p in moving)
    return bool(moving) and not (phase == "joined" and harmless)


def image_need_bytes(held: Iterable[GpuBytes]) -> int:
    """Host memory that a checkpoint of a process holding *held* takes; an unknown figure counts as nothing here."""
    nbytes = sum(g.nbytes or 0 for g in held)
    return nbytes + nbytes // 64 + IMAGE_MARGIN_BYTES


def host_need_bytes(process: GpuProcess, method: str) -> int:
    """Host memory that a suspend of *process* by *method* takes: what is dropped takes none, and without the driver nothing else moves but
    what NCCL releases. Of an image that is a part, and where NCCL has it there is so much less for the driver."""
    if process.along:
        return process.comms_bytes
    moving = process.movable if method != "driver" else None
    kept = 0 if moving is None else moving.kept_bytes if moving.host_bytes is None else moving.host_bytes
    if method == "pool":
        return kept + process.comms_bytes
    return kept + max(IMAGE_MARGIN_BYTES, image_need_bytes(process.gpus) - (moving.nbytes if moving else 0))


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


class Shortage(NamedTuple):
    """A GPU that a restore cannot use now. ``kind``: "memory", "unknown", "lost", "missing", "changed" or "crowded" (takes one process)."""

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
    lost = {g.uuid: g.lost for g in gpus}
    uuids = [uuid for uuid in lost if not lost[uuid]]
    for uuid in {*wanted, *wanted.values()}:
        if uuid not in lost:
            raise ValueError(f"no GPU of this machine has the UUID {uuid}")
        if lost[uuid]:
            raise ValueError(f"{uuid} is lost, and the map that the driver wants has no place for it")
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
