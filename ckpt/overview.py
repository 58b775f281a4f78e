"""What there is: every process on the GPUs or suspended, in one list. Looks, changes nothing, and never waits for a busy driver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from gpuckpt import claims, errors, refusals
from gpuckpt.image import reserve
from gpuckpt.inspect import processes
from gpuckpt.journal import Member, Record, void_words
from gpuckpt.local import LocalWorld
from gpuckpt.model import Gpu, GpuBytes, Membership, ProcessId, State, Status
from gpuckpt.words import BY_POOL, HELD, let_go, word


@dataclass(frozen=True, slots=True)
class Row:
    """One process. ``state`` is a word of ``gpuckpt ps``: "running", "locked", "suspended", "suspended (pool)", "held" (taken along),
    "suspending", "resuming",
    "in-flight", "stopped", "lost", "gone", "foreign" (NVML knows the pid, we cannot see the process) or "unknown"."""

    pid: int
    name: str
    user: str
    state: str
    gpus: tuple[GpuBytes, ...] = ()
    host_bytes: int = 0  # of its image, where that is in memory, and of what its pool keeps there
    disk_bytes: int = 0  # and where it is on disk
    reserved_bytes: int = 0  # of host memory that is kept ready for its image
    since: float | None = None  # seconds since the epoch: when it was suspended
    by: str = ""
    group: str = ""  # id of its journal record
    note: str = ""


@dataclass(frozen=True, slots=True)
class Overview:
    gpus: tuple[Gpu, ...]
    rows: tuple[Row, ...]
    warnings: tuple[str, ...] = ()

    @property
    def suspended(self) -> bool:
        """Whether it names a process that is suspended, and none that runs. Those taken along stand still, and keep their memory."""
        states = {r.state for r in self.rows} - {"gone", HELD}
        return bool(states) and states <= {"suspended", BY_POOL}


def overview(world: LocalWorld, targets: Sequence[int] = ()) -> Overview:
    """All CUDA processes of the machine; with *targets*, those that these pids stand for.

    Raises ``NoSuchProcess`` for a target that neither lives nor is in the journal, ``NotAProcess`` for a thread, ``NoCudaState`` if nothing
    of it holds GPU memory.
    """
    procs = processes.table()  # first: NVML may still be on its way
    void = world.void()
    records = world.journal.records()
    gpus = world.devices.gpus()
    held = world.devices.processes()
    warnings = [void_words(r) for r in void] + world.journal.unreadable()
    members = {m.id: (r, m) for r in records for m in r.members}

    wanted = set(procs) if not targets else _reach(targets, procs, records, world.root)
    loaded = world.devices.loaded([p for p in wanted if p in procs and p != world.me.pid])
    busy = {p.id for pid, p in procs.items() if (pid in loaded or p.id in members) and claims.taken(f"/proc/{pid}")}
    states = world.states(procs[p].id for p in loaded if procs[p].id not in busy)
    contexts = world.devices.contexts(list(loaded))  # after the states: a call that ended while these were asked for has moved memory

    rows = []
    for pid in sorted(loaded):
        proc = procs[pid]
        record, member = members.get(proc.id, (None, None))
        state = states.get(proc.id, State.BLOCKED)
        if state in (State.NONE, State.GONE) or (
            state in (State.RUNNING, State.DENIED, State.BLOCKED) and pid not in contexts and not member
        ):
            continue
        left = proc.id in busy and _left_behind(proc.id, record)
        halted = processes.halted(proc.id, world.root) if proc.stopped or state is State.BLOCKED else ""
        called, note = _word(pid, state, halted, proc.id in busy, left, record, member, pid in contexts)
        if record is not None and record.membership is not None:
            note = "; ".join(n for n in (note, _with_others(record.membership)) if n)
        nbytes = world.image_bytes(proc.id) if called == "suspended" else 0
        moved = ((member.moved if member else None) or {}).get("kept_bytes", 0) if called in ("suspended", BY_POOL) else 0
        on_disk = nbytes if called == "suspended" and world.image(proc.id).get("dropped") else 0
        rows.append(
            Row(
                pid,
                processes.command(pid),
                processes.user_name(processes.uid_of(pid)),
                called,
                tuple(GpuBytes(u, n) for u, n in sorted(held.get(pid, {}).items())),
                nbytes - on_disk + moved,
                on_disk,
                reserve.ready_bytes(proc.id),
                record.since if record and called in ("suspended", BY_POOL, HELD) else None,
                record.by if record else "",
                record.id if record else "",
                note,
            )
        )
    rows += _dead(members, procs, targets)
    if not targets:
        rows += [
            Row(pid, *_stranger(pid, pid in procs), tuple(GpuBytes(u, n) for u, n in sorted(on.items())))
            for pid, on in sorted(held.items())
            if pid not in loaded and pid != world.me.pid
        ]
    elif not rows:
        _explain(targets, procs, void, world.command)
    return Overview(gpus, tuple(rows), tuple(warnings))


def _reach(targets: Sequence[int], procs: dict[int, processes.Proc], records: Sequence[Record], root: Path) -> set[int]:
    found = set(targets)
    for t in targets:
        found |= set(processes.relatives(t, procs, root))
    for r in records:
        if _stands_for(targets, r, procs):
            found |= {m.id.pid for m in r.members}
    return found


def _stands_for(targets: Sequence[int], record: Record, procs: dict[int, processes.Proc]) -> bool:
    """Whether one of *targets* names a member: a number that another process has by now does not."""
    return any(m.id.pid in targets and (m.id.pid not in procs or procs[m.id.pid].id == m.id) for m in record.members)


def _left_behind(process: ProcessId, record: Record | None) -> bool:
    """Whether the gpuckpt that took hold of *process* has ended, and only a driver call of its is still under way."""
    try:
        ended = claims.left_behind(f"/proc/{process.pid}")
    except OSError:
        return False
    if ended is None:  # in a pid namespace the kernel does not tell of a holder that has ended
        return record is not None and record.controller is not None and not processes.is_same(record.controller)
    return ended


def _word(
    pid: int, state: State, halted: str, busy: bool, left: bool, record: Record | None, member: Member | None, has_context: bool
) -> tuple[str, str]:
    if member is not None and member.lost:
        return "lost", member.lost
    if busy:
        if record is not None and member is not None and member.waiting:
            return "in-flight", member.waiting
        if left:
            middle = (
                f", left in the middle ({record.status}): then gpuckpt recover" if record and record.status is not Status.SUSPENDED else ""
            )
            return "in-flight", f"a driver call of a gpuckpt that has ended is still under way{middle}"
        return (str(record.status) if record and record.status is not Status.SUSPENDED else "in-flight"), "another gpuckpt is at work on it"
    if halted:
        if record is not None and record.status is Status.SUSPENDED and not has_context:
            return "suspended", f"{halted}: before a resume, {let_go(halted, [pid])}"
        return "stopped", f"{halted}: the driver would not answer"
    if state is State.BLOCKED:
        return "in-flight", member.waiting if member else "the driver does not answer: a call on it is under way"
    if record is not None and record.status is not Status.SUSPENDED:
        return word(state), f"left in the middle ({record.status}): gpuckpt recover"
    if member is not None and member.along and state is State.DISARMED:
        return HELD, "taken along by a suspend: it stands at its safe point until the resume"
    if record is not None and state is State.DISARMED and record.down is state:
        return BY_POOL, "what its pool does not hold is on the GPU"
    if state is State.DENIED:
        return "unknown", "the driver does not let us ask (gpuckpt doctor explains)"
    if state is State.LOCKED:
        return "locked", "CUDA calls of the process wait: gpuckpt resume"
    return word(state), ""


def _with_others(membership: Membership) -> str:
    return f"{membership.label} of group {membership.group}, {membership.phase}: it is resumed on all of them together"


def _dead(members: dict[ProcessId, tuple[Record, Member]], procs: dict[int, processes.Proc], targets: Sequence[int]) -> list[Row]:
    """Members that died while suspended, named as long as a living one is left in their group."""
    found = []
    for id_, (record, member) in sorted(members.items()):
        alive = id_.pid in procs and procs[id_.pid].id == id_
        if alive or (targets and not _stands_for(targets, record, procs)):
            continue
        if any(m.id.pid in procs and procs[m.id.pid].id == m.id for m in record.members):
            found.append(
                Row(
                    id_.pid,
                    member.name,
                    processes.user_name(member.uid),
                    "gone",
                    group=record.id,
                    note="ended while its group was suspended",
                )
            )
    return found


def _stranger(pid: int, here: bool) -> tuple[str, str, str]:
    if here and processes.uid_of(pid) not in (-1, 0):
        return processes.command(pid), processes.user_name(processes.uid_of(pid)), "unknown"
    return "not visible from here (container?)", "?", "foreign"


def _explain(targets: Sequence[int], procs: dict[int, processes.Proc], void: Sequence[Record], command: str) -> NoReturn:
    missing = [t for t in targets if t not in procs]
    if missing:
        refusals.explain_missing(missing[0], command, void)
    raise errors.NoCudaState(
        f"neither pid {targets[0]} ({processes.command(targets[0])}) nor any process that belongs to it holds GPU memory",
        hint="gpuckpt ps lists the processes on the GPUs",
        pid=targets[0],
    )
