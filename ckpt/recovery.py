"""After a crash of gpuckpt or of its shell: every unfinished operation in the journal is finished or undone, and said."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from gpuckpt.errors import GpuckptError
from gpuckpt.journal import Record
from gpuckpt.model import Report, State, Status
from gpuckpt.operation import Operation
from gpuckpt.walk import Progress
from gpuckpt.world import World


def unfinished(world: World) -> list[Record]:
    """Records that stand for something other than a group that is wholly suspended, or whose processes are gone."""
    found = []
    for record in world.journal.records():
        states = world.states(m.id for m in record.members)
        alive = [m for m in record.members if states[m.id] is not State.GONE]
        whole = record.status is Status.SUSPENDED and alive and all(states[m.id] is State.CHECKPOINTED or m.lost for m in alive)
        marked = any(m.waiting for m in record.members)
        if not whole or marked:
            found.append(record)
    return found


def recover_all(world: World, tell: Callable[[Progress], None] | None = None) -> list[Report]:
    """One report for each unfinished operation. ``details["recovered"]`` says what was done in words."""
    reports = []
    for record in unfinished(world):
        operation = Operation(world, "recover", tell=tell)
        try:
            report = operation.recover(record)
        except GpuckptError as e:
            report = e.report or Report("recover", False, world.simulated, error=e.as_dict())
        if report is None:
            continue
        reports.append(dataclasses.replace(report, details={"recovered": words(record, operation, report.ok)}))
    return reports


def words(record: Record, operation: Operation, ok: bool) -> str:
    """What became of *record*, for a person."""
    states = operation.now
    names = ", ".join(f"pid {m.id} ({m.name})" for m in record.members)
    if states and all(s is State.GONE for s in states.values()):
        return f"{names}: ended; the entry was removed"
    if record.status is Status.SUSPENDED:
        return f"{names}: {', '.join(sorted({str(s) for s in states.values()}))}"
    verb = {Status.SUSPENDING: "suspend", Status.UNDOING: "suspend", Status.RESUMING: "resume"}[record.status]
    if not ok:
        return f"{names}: the {verb} stays in the middle"
    down = all(s in (State.CHECKPOINTED, State.GONE) for s in states.values())
    finished = down == (verb == "suspend")
    return f"{names}: the {verb} was {'finished' if finished else 'undone'}"
