"""After a crash of gpuckpt or of its shell: every unfinished operation in the journal is finished or undone, and said."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from gpuckpt import errors, plan
from gpuckpt.errors import GpuckptError
from gpuckpt.journal import Record
from gpuckpt.model import Call, ProcessId, Report, State, Status
from gpuckpt.operation import Operation
from gpuckpt.telling import Progress
from gpuckpt.words import word
from gpuckpt.world import World

_POLL_S = 0.1
#: How long an unlock may take, and how exact the time is at which a process was started, in seconds.
_UNLOCK_S, _TICK_S = 10.0, 0.01
#: What is left for a record when those before it have taken all the time, in seconds: what needs no waiting is done all the same.
_LEAST_S = 0.05
_AGAIN = Report("recover", False, False)


def unfinished(world: World) -> list[Record]:
    """Records that stand for something other than a group that is wholly suspended, or whose processes are gone."""
    found = []
    records = world.journal.records()
    states = world.states({m.id for r in records for m in r.members})  # at once: whoever is at work keeps us waiting
    for record in records:
        alive = [m for m in record.members if states[m.id] is not State.GONE]
        along = {m.id for m in record.members if m.along}
        down = [states[m.id] is plan.bottom(m.id, along, record.down) or m.lost or _unasked(world, m.id, states) for m in alive]
        whole = record.status is Status.SUSPENDED and all(down)
        whole = whole and any(not m.along or m.lost for m in alive)
        marked = any(m.waiting for m in record.members)
        if not whole or marked:
            found.append(record)
    return found


def _unasked(world: World, process: ProcessId, states: Mapping[ProcessId, State]) -> bool:
    """Whether *process* is stopped, and so as the journal says: it cannot have come back by itself, and to ask would hang."""
    return states[process] is State.BLOCKED and bool(world.halted(process))


def recover_all(world: World, *, timeout_s: float | None = None, tell: Callable[[Progress], None] | None = None) -> list[Report]:
    """One report for each unfinished operation; all of them together are waited for up to *timeout_s*. ``details["recovered"]`` says what
    was done in words."""
    reports, begun = [], world.now()
    for record in unfinished(world):
        mistaken: list[str] = []
        left_s = None if timeout_s is None else max(_LEAST_S, timeout_s - (world.now() - begun))
        operation = Operation(world, "recover", timeout_s=left_s, tell=tell)
        operation.deadline.set(sum(g.nbytes or 0 for m in record.members for g in m.gpus))
        try:
            _check_interruption(world)
            mistaken = strangers(world, record)
            while (report := _tried(operation, record)) is _AGAIN:
                world.wait((), world.now() + _POLL_S)
                _check_interruption(world)
        except errors.Busy as e:
            reports.append(_left_alone(record, e, world.simulated))
            continue
        except GpuckptError as e:
            if isinstance(e, errors.Interrupted):  # while it asked for its processes, say
                e.hint = e.hint or "gpuckpt recover"
            report = e.report or Report("recover", False, world.simulated, error=e.as_dict())
        if report is None:
            continue
        said = "; ".join([words(record, operation, report.ok), *mistaken])
        reports.append(dataclasses.replace(report, details={"recovered": said}))
    return reports


def _check_interruption(world: World) -> None:
    if world.interruptions:
        raise errors.Interrupted("interrupted before anything was done about it", hint="gpuckpt recover", signum=world.interruptions[-1])


def strangers(world: World, record: Record) -> list[str]:
    """Words for each process that is locked and has the number of a member of *record* that ended. Who was born while members were being
    locked was locked in its place, and is unlocked; any other one is only named, since that may be somebody else's lock.

    Raises :class:`gpuckpt.errors.NotAsFound` where one could not be unlocked; *record* stays then.
    """
    if record.locking is None or record.status not in (Status.SUSPENDING, Status.UNDOING):
        return []
    (begun, ended), found = record.locking, []
    known = {m.id for r in world.journal.records() for m in r.members}
    heirs = [(m, of) for m in record.members if (of := world.heir(m.id)) and of[0] not in known]
    states = world.states(heir for _, (heir, _) in heirs)
    for member, (heir, born_s) in heirs:
        who = f"{world.describe(heir.pid)} has the number of one that ended ({member.name})"
        meanwhile = begun <= born_s + _TICK_S and born_s <= ended
        if states[heir] is State.LOCKED and meanwhile:
            _unlock(world, heir, who)
            found.append(f"{who}, and was locked in its place: unlocked")
        elif states[heir] is State.LOCKED:
            found.append(f"{who}, and is locked, not by this suspend. Unless another tool is at work on it: gpuckpt resume {heir}")
        elif states[heir] is State.BLOCKED and meanwhile:
            found.append(f"{who}, and may have been locked in its place: when it answers, gpuckpt status {heir}")
    return found


def _unlock(world: World, process: ProcessId, who: str) -> None:
    claim = world.claim([process], until=world.now())
    try:
        pending = world.start(Call.UNLOCK, process, claims=[claim])
        until = world.now() + _UNLOCK_S
        while pending.outcome is None and world.now() < until:
            world.wait([pending], until)
        if world.states([process])[process] is State.LOCKED:
            raise errors.NotAsFound(
                f"{who}, was locked in its place, and could not be unlocked",
                hint=f"gpuckpt resume {process}",
                pid=process.pid,
                step="unlock",
            )
    finally:
        claim.release()


def _tried(operation: Operation, record: Record) -> Report | None:
    """As :meth:`Operation.recover`; ``_AGAIN`` while only a driver call that an earlier gpuckpt began is in the way, which will end."""
    try:
        return operation.recover(record)
    except errors.Busy as e:
        world = operation.world
        if e.pid is not None or world.now() >= operation.deadline.at or any(world.halted(m.id) for m in record.members):
            raise
    return _AGAIN


def _left_alone(record: Record, busy: errors.Busy, simulated: bool) -> Report:
    """Another gpuckpt is at work, and will end what it began; or only a call that an earlier one left, if nobody answers for the claim."""
    error = None
    if busy.pid is None:
        error = errors.InFlight(
            f"a driver call of an earlier gpuckpt is still under way on {names(record)}", hint="when it has ended: gpuckpt recover"
        ).as_dict()
    text = f"{names(record)}: left alone, {busy.message if error is None else 'a driver call is still under way'}"
    return Report("recover", error is None, simulated, error=error, details={"recovered": text})


def names(record: Record) -> str:
    return ", ".join(f"pid {m.id} ({m.name})" for m in record.members)


def words(record: Record, operation: Operation, ok: bool) -> str:
    """What became of *record*, for a person."""
    states = operation.now
    who = names(record)
    if states and all(s is State.GONE for s in states.values()):
        return f"{who}: ended; the entry was removed"
    if record.status is Status.SUSPENDED:
        return f"{who}: {', '.join(sorted({word(s) for s in states.values()}))}"
    if operation.record and (lost := [str(m.id) for m in operation.record.members if m.lost and states.get(m.id) is not State.GONE]):
        return f"{who}: pid {', '.join(lost)} is lost, and stays where it is"
    verb = {Status.SUSPENDING: "suspend", Status.UNDOING: "suspend", Status.RESUMING: "resume"}[record.status]
    down = all(operation.is_down(p) or s is State.GONE for p, s in states.items())
    if not ok:
        whole = down and operation.record is not None and operation.record.status is Status.SUSPENDED
        return f"{who}: {'suspended; it stays so for now' if whole else f'the {verb} stays in the middle'}"
    finished = down == (verb == "suspend")
    return f"{who}: the {verb} was {'finished' if finished else 'undone'}"
