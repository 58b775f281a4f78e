"""An in-memory :class:`gpuckpt.world.World`: one controller on a :class:`Machine`, with numbered points at which things happen to it.

Every call of the operation on its world or journal is a point. At a point, or some seconds after it, the schedule may kill the
controller: from then on each of its calls raises :class:`Crash`, so that no cleanup code has an effect, as with kill -9.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from gpuckpt import errors
from gpuckpt.agent.protocol import TOGETHER
from gpuckpt.driver.api import CallError
from gpuckpt.journal import Record
from gpuckpt.model import Call, Gpu, GpuBytes, GpuProcess, Hazard, Inventory, Outcome, ProcessId, Rank, State
from tests.memory_agents import AgentCall
from tests.memory_machine import PLAIN, Claim, DriverCall, Fault, Machine

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

STATE_DEADLINE_S = 2.0
_serial = itertools.count(1)


class Crash(BaseException):
    """The controller was killed."""


class MemoryJournal:
    """Records that survive every crash. A save happens or does not: never half."""

    def __init__(self, world: MemoryWorld) -> None:
        self._world = world

    def prepare(self) -> None:
        self._world.point("prepare")
        self._check()

    def save(self, record: Record) -> None:
        self._world.point("save")
        self._check()
        self._world.machine.records[record.id] = record

    def remove(self, *record_ids: str) -> None:
        for record_id in record_ids:
            self._world.point("remove")
            self._world.machine.records.pop(record_id, None)

    def records(self) -> list[Record]:
        self._world.point("records")
        return self._world.machine.counting()

    def left_bytes(self, process: ProcessId) -> list[int]:
        return []

    def audit(self, **line: Any) -> None:
        self._world.point("audit")

    def _check(self) -> None:
        if self._world.machine.journal_full:
            raise errors.JournalError("the journal cannot be written (No space left on device)")


class MemoryWorld:
    """One command. *on_point* is called with the number of each point before anything happens there."""

    simulated = True
    user = "tester (uid 1000)"

    def __init__(self, machine: Machine, faults: Iterable[Fault] = (), on_point: Callable[[MemoryWorld, int], None] | None = None) -> None:
        self.machine = machine
        self.journal = MemoryJournal(self)
        self.me = ProcessId(100_000 + next(_serial), 1)
        self.interruptions: list[int] = []
        self.dead = False
        self.points = 0
        self._faults = {f.nth: f for f in faults}
        self._on_point = on_point
        self.started = 0  # calls on drivers and agents
        self._calls: list[DriverCall] = []

    def point(self, _name: str) -> None:
        if not self.dead and self._on_point is not None:
            self._on_point(self, self.points)
        self.points += 1
        self._check_alive()

    def kill(self) -> None:
        """kill -9: claims that no caller inherited end, and callers find their socket closed."""
        self.dead = True
        self._leave()

    def end(self) -> None:
        """The command returned. It may be part of a longer-lived program, so what it holds is not given back by its exit."""
        if not self.dead and any(c.controller is self and self in c.holders for c in self.machine.claims.values()):
            self.machine.wrongs.append("a claim was held beyond the end of the command")
        self._leave()

    # Time.

    def now(self) -> float:
        return self.machine.clock

    def wait(self, pending: Collection[DriverCall], until: float) -> None:
        self.point("wait")
        before = len(self.interruptions)
        if not pending:
            self.machine.idle.add(self)
        try:
            self._pass(until, lambda: len(self.interruptions) > before or any(p.outcome is not None for p in pending))
        finally:
            self.machine.idle.discard(self)

    # Looking.

    def inspect(
        self, targets: Sequence[int], *, tree: bool, along: Collection[int] = (), method: str = "auto", look_s: float = 0.0
    ) -> Inventory:
        self.point("inspect")
        machine = self.machine
        for pid in (*targets, *along):
            if pid not in machine.groups:
                raise errors.NoSuchProcess(f"there is no process {pid}", pid=pid)
        wanted = {machine.groups[t] for t in targets}
        members = [p for p, g in sorted(machine.groups.items()) if p in along or (g in wanted if tree else p in targets)]
        self._look()
        states = self._states([ProcessId(p, 1) for p in members])
        held = self._held()
        found = [
            GpuProcess(
                id_,
                "train.py",
                1000,
                state,
                tuple(GpuBytes(u, n) for u, n in sorted(held.get(id_.pid, {}).items())),
                machine.rules.processes[id_.pid].image_bytes,
                id_.pid in machine.stopped,
                agent := machine.has_agent(id_.pid),
                id_.pid in along,
                machine.agents[id_.pid].movable if agent else None,
                machine.agents[id_.pid].offloaded if agent else False,
                agent,
            )
            for id_, state in states.items()
            if id_.pid in machine.rules.processes
        ]
        if not found:
            raise errors.NoSuchProcess(f"there is no process {targets[0]}", pid=targets[0])
        return Inventory(tuple(found), self._gpus(), tuple(self._hazards(found)))

    def states(self, processes: Iterable[ProcessId]) -> dict[ProcessId, State]:
        self.point("states")
        return self._states(list(processes))

    def ranks(self, processes: Iterable[ProcessId]) -> tuple[Rank, ...]:
        return ()  # here nobody waits for a peer that ended

    def short_for_comms(self, processes: Iterable[ProcessId]) -> list[Hazard]:
        self.point("short_for_comms")
        return [Hazard("host-memory", "NCCL's backups do not fit", "", acceptable=True)] if self.machine.host_short else []

    def silent(self, process: ProcessId) -> bool:
        return not self.machine.has_agent(process.pid)

    def halted(self, process: ProcessId) -> str:
        self.point("halted")
        return "stopped" if process.pid in self.machine.stopped else ""

    def alive(self, process: ProcessId) -> bool:
        self.point("alive")
        return self._states([process])[process] is not State.GONE

    def gpus(self) -> tuple[Gpu, ...]:
        self.point("gpus")
        self._look()
        return self._gpus()

    def refuse_maps(self) -> None:
        pass

    def held(self) -> dict[int, dict[str, int | None]]:
        self.point("held")
        self._look()
        return self._held()

    def image_bytes(self, process: ProcessId) -> int:
        self.point("image_bytes")
        found = self.machine.rules.processes.get(process.pid)
        return found.image_bytes if found else 0

    def image(self, process: ProcessId) -> dict[str, Any]:
        return {"dropped": process.pid in self.machine.dropped}

    def uptime_s(self) -> float:
        return self.machine.clock

    def heir(self, process: ProcessId) -> tuple[ProcessId, float] | None:
        return None

    def age_s(self, pid: int) -> float | None:
        return None

    def describe(self, pid: int) -> str:
        return f"pid {pid} (train.py, tester)"

    # Acting.

    def start(
        self,
        call: Call,
        process: ProcessId,
        *,
        timeout_s: float = 0.0,
        gpu_map: Mapping[str, str] | None = None,
        initialise: bool = False,
        image: Mapping[str, Any] | None = None,
        claims: Sequence[Claim] = (),
    ) -> DriverCall:
        self.point(f"start {call}")
        fault = self._faults.get(self.started, PLAIN)
        self.started += 1
        if fault.result == "NO_CALLER":
            raise CallError(call, "NO_CALLER")
        pending = DriverCall(
            self.machine, call, process, self, fault, timeout_s, gpu_map or {}, initialise, tuple(claims), 200_000 + next(_serial)
        )
        pending.image = image or {}
        if call is Call.RESTORE:
            self.machine.note_restore(pending)
        elif call in (Call.LOCK, Call.CHECKPOINT):
            self.machine.note_agent(pending)
        self._calls.append(pending)
        self.machine.enqueue(pending)
        return pending

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
    ) -> dict[ProcessId, AgentCall]:
        if call not in TOGETHER:
            asked = {}
            for p in processes:
                self.point(f"ask {call}")
                asked[p] = self._ask(call, p, timeout_s)
            return asked
        self.point(f"ask {call}")
        refusals = {p: self._refusal(call, p) for p in processes}
        if not any(refusals.values()):
            return {p: self._ask(call, p, timeout_s) for p in processes}
        return {p: AgentCall(call, p, outcome=Outcome(why or "agent:DROPPED")) for p, why in refusals.items()}

    def _refusal(self, call: Call, process: ProcessId) -> str:
        if process.pid not in self.machine.rules.processes:
            return "agent:VANISHED"
        return self.machine.agents[process.pid].refusal(call, self)

    def _ask(self, call: Call, process: ProcessId, timeout_s: float) -> AgentCall:
        fault = self._faults.get(self.started, PLAIN)
        self.started += 1
        asked = AgentCall(call, process)
        if process.pid in self.machine.rules.processes:
            self.machine.agents[process.pid].ask(asked, self, fault, timeout_s)
        else:
            asked.outcome = Outcome("agent:VANISHED")
        return asked

    # Claims.

    def claim(self, processes: Sequence[ProcessId], until: float) -> Claim:
        self.point("claim")
        return self._claim([f"pid {p}" for p in sorted(processes) if p.pid in self.machine.rules.processes], until)

    def claimed(self, process: ProcessId) -> bool:
        self.point("claimed")
        return f"pid {process}" in self.machine.claims

    def let_go(self, claim: Claim) -> None:
        claim.release()

    def claim_gpus(self, gpus: Sequence[Gpu], until: float) -> Claim:
        self.point("claim_gpus")
        return self._claim([f"gpu {g.uuid}" for g in sorted(gpus, key=lambda g: g.uuid)], until)

    def _claim(self, keys: Sequence[str], until: float) -> Claim:
        """One after the other, as the real one: what is held is kept while the next is waited for."""
        claim = Claim(self.machine, tuple(keys), {self}, self)
        claims, before = self.machine.claims, len(self.interruptions)
        for key in keys:
            while key in claims:
                interrupted = len(self.interruptions) > before
                if interrupted or self.now() >= until:
                    claim.release()
                    if interrupted:
                        raise errors.Interrupted("interrupted while waiting for another gpuckpt; nothing was touched")
                    raise errors.Busy(f"another gpuckpt is at work on {key}", pid=2)
                self._pass(until, lambda key=key: key not in claims or len(self.interruptions) > before)
            claims[key] = claim
        return claim

    # The machine as this controller sees it.

    def _look(self) -> None:
        if self.machine.blind:
            raise errors.DriverError("NVML does not tell")

    def _states(self, processes: list[ProcessId]) -> dict[ProcessId, State]:
        machine = self.machine

        def answers(p: ProcessId) -> bool:
            return p.pid not in machine.rules.processes or (p.pid not in machine.stopped and not machine.under_way(p.pid))

        asked = [p for p in processes if p.pid not in machine.stopped]
        self._pass(self.now() + STATE_DEADLINE_S, lambda: all(answers(p) for p in asked))
        known = machine.rules.processes
        return {p: State.GONE if p.pid not in known else machine.state(p.pid) if answers(p) else State.BLOCKED for p in processes}

    def _gpus(self) -> tuple[Gpu, ...]:
        rules = self.machine.rules
        return tuple(
            Gpu(g.uuid, g.index, g.name, *((g.total_bytes, rules.free(g.uuid)) if g.memory_query == "ok" else (None, None)))
            for g in rules.gpus.values()
        )

    def _held(self) -> dict[int, dict[str, int | None]]:
        return {p.pid: {**p.held_bytes} for p in self.machine.rules.processes.values() if p.on_gpu}

    def _hazards(self, found: Sequence[GpuProcess]) -> Iterator[Hazard]:
        if self.machine.host_short:
            yield Hazard("host-memory", "the image does not fit", "", acceptable=True)
        for p in found:
            if p.stopped:
                yield Hazard("stopped", f"pid {p.pid} is stopped", "", p.pid)
            if len(found) > 1 and not all(other.agent for other in found):
                yield Hazard("possible-import", f"pid {p.pid} belongs to others", "", p.pid, acceptable=True)
            if "communicator" in self.machine.rules.processes[p.pid].traits:
                yield Hazard("nccl-communicator", f"pid {p.pid} has a communicator", "", p.pid, acceptable=True)

    def _pass(self, until: float, done: Callable[[], bool]) -> None:
        self.machine.run(until, lambda: self.dead or done())
        self._check_alive()

    def _leave(self) -> None:
        for call in self._calls:
            call.release()
        for agent in self.machine.agents.values():
            agent.lose(self)
        for claim in list(self.machine.claims.values()):
            claim.drop(self)

    def _check_alive(self) -> None:
        if self.dead:
            raise Crash


def described(record: Record) -> str:
    """A record in one line, for a failing test to print."""
    members = ", ".join(f"{m.id}: found {m.found}{' lost' if m.lost else ''}{' ' + m.waiting if m.waiting else ''}" for m in record.members)
    return f"{record.id} {record.status} [{members}] retained {dict(record.retained)}"
