"""A group of processes on its way: makes the driver calls of each phase in parallel, keeps the deadline, words what failed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from gpuckpt import errors, plan, verdict
from gpuckpt.barrier import Alone, Barrier
from gpuckpt.deadline import Deadline
from gpuckpt.driver.api import CallError
from gpuckpt.errors import GpuckptError
from gpuckpt.inspect import ranks
from gpuckpt.journal import Record
from gpuckpt.model import Call, Outcome, ProcessId, Rank, State, Status
from gpuckpt.telling import Progress, Telling
from gpuckpt.words import let_go
from gpuckpt.world import Claim, Pending, World, usage

#: What an agent does without being asked, when its controller is gone.
_BACK_BY_ITSELF = (Call.COMMS_RESUME, Call.ONLOAD, Call.UNQUIESCE)
#: How long a lock that was asked to end may take before its caller is left to itself, in seconds.
LOCK_GRACE_S = 10.0
#: How long those that wait inside NCCL for a rank that has ended are waited for, in seconds: NCCL may notice, and say so.
BEREFT_GRACE_S = 2.0


class Failure(NamedTuple):
    """``dropped``: nothing is the matter with *process*; another one was not ready for what they do together."""

    process: ProcessId
    error: GpuckptError
    dropped: bool = False


class Walk(Telling):
    """What the commands of :mod:`gpuckpt.operation` stand on. ``now`` is each process's state, ``record`` what the journal says."""

    def __init__(
        self,
        world: World,
        command: str,
        *,
        timeout_s: float | None = None,
        accept: frozenset[str] = frozenset(),
        tell: Callable[[Progress], None] | None = None,
        watch: bool = True,
        barrier: Barrier | None = None,
    ) -> None:
        """*tell* hears of each step; with *watch* of the bytes on the GPUs too, four times a second. *barrier*: the other hosts."""
        super().__init__(world, command, tell)
        self.accept = accept
        self.barrier: Barrier = barrier or Alone()
        self.method = "auto"  # of a suspend (``method.py``)
        self.taken: dict[str, Any] = {}  # which way that takes, and why
        self.keep_comms = False  # communicators stay as they are: the driver has no part in this, and they cannot be suspended
        self.record: Record | None = None
        self.now: dict[ProcessId, State] = {}
        self.unheard: set[ProcessId] = set()  # those that their agents hold, which do not answer
        self._watch = watch and tell is not None
        self.deadline = Deadline(self._begun, timeout_s)
        self.claims: list[Claim] = []
        self.guards: dict[ProcessId, Pending] = {}
        self.group_before: dict[str, int] = {}  # bytes that the group held on each GPU when the operation began
        self.used_before: dict[str, int] = {}
        self.others_before: dict[str, int] = {}

    @property
    def agents(self) -> frozenset[ProcessId]:
        """Members that have an agent."""
        return frozenset(m.id for m in self.record.members if m.agent) if self.record else frozenset()

    @property
    def along(self) -> frozenset[ProcessId]:
        """Members that are taken along."""
        return frozenset(m.id for m in self.record.members if m.along) if self.record else frozenset()

    @property
    def movable(self) -> frozenset[ProcessId]:
        """Members whose own allocator takes memory off the GPU."""
        return frozenset(m.id for m in self.record.members if m.movable) if self.record else frozenset()

    def bottom(self, process: ProcessId) -> State:
        """What *process* is when the group is suspended."""
        return plan.bottom(process, self.along, self.record.down if self.record else State.CHECKPOINTED)

    def bottoms(self) -> dict[ProcessId, State]:
        """That of each."""
        return {p: self.bottom(p) for p in self.now}

    def is_down(self, process: ProcessId) -> bool:
        """Whether *process* is as it is when the group is suspended."""
        return self.now.get(process) is self.bottom(process)

    def needs_room(self, process: ProcessId, goal: State) -> bool:
        """Whether *process* takes GPU memory on its way to *goal*."""
        state = self.now.get(process)
        if state not in plan.DEPTH or goal not in plan.DEPTH:
            return False
        moves = [State.CHECKPOINTED, *([State.OFFLOADED] if process in self.movable else [])]
        return any(plan.DEPTH[goal] < plan.DEPTH[s] <= plan.DEPTH[state] for s in moves)

    def result(self, call: Call, process: ProcessId) -> State:
        """What *call* turns *process* into."""
        return plan.result(call, agent=process in self.agents, movable=process in self.movable)

    def walk(
        self,
        goal: Mapping[ProcessId, State],
        *,
        stop: bool = False,
        gpu_map: Mapping[str, str] | None = None,
        before: Mapping[Call, Callable[[], None]] | None = None,
    ) -> list[Failure]:
        """Go phase by phase to *goal*. With *stop* the first failure is raised when its phase has ended, else the others go on.

        *before*: what is to be looked at before the first such call; what it raises is raised."""
        goal, checks = dict(goal), dict(before or {})
        failures: list[Failure] = []
        while phase := plan.next_phase(self.now, goal, self.agents, self.movable):
            if stop:
                self.check_interruption()
                self.deadline.check(self.world.now(), phase.call)
            if check := checks.pop(phase.call, None):
                check()
            self.agree(phase.call, failures)
            with self.step(phase.call):
                failed = self._run(phase, gpu_map or {})
            if not stop and not self.barrier.several and all(self.now[f.process] is State.GONE for f in failed if not f.dropped):
                failed = [f for f in failed if not f.dropped]  # they go on without those that ended
            failures += failed
            if failed and stop and phase.call is Call.QUIESCE:
                self.check_interruption()
            if failed and stop:  # who is lost is told, or else who is left where it is, though another's end may have been the cause
                worst = max(failed, key=lambda f: (isinstance(f.error, errors.Lost), f.error.exit_code == 3))
                raise worst.error
            for f in failed:
                goal.pop(f.process, None)
        return failures

    def agree(self, step: str, failures: Sequence[Failure] = ()) -> None:
        """Wait until the other hosts, if there are any, are ready for *step* too, or tell them that this one is not."""
        if self.barrier.several:
            with self.step("agree"):
                self.barrier.before(step, failures[0].error if failures else None)

    def _run(self, phase: plan.Phase, gpu_map: Mapping[str, str]) -> list[Failure]:
        """Make the calls of one phase in parallel; when it returns, each has ended or was left to itself, and ``now`` is up to date."""
        world = self.world
        for process in phase.processes:
            if guard := self.guards.pop(process, None):
                guard.keep()
        begun, asked_to_stop = world.now(), len(world.interruptions)
        calls: dict[ProcessId, Pending] = {}
        not_made: list[Failure] = []
        initialise = phase.call is Call.RESTORE and not self._persistent()
        # asked for now: an agent that is at work has no time for it
        known = self._ranks() if phase.call in (Call.COMMS, Call.COMMS_RESUME) else ()
        if phase.call in plan.AGENT_CALLS:
            assert self.record is not None
            how: dict[str, Any] = {"operation": self.record.id, "timeout_s": max(0.05, self.deadline.at - begun), "movable": self.movable}
            how |= {"keep": self.keep_comms, "accept": "possible-import" in self.accept, "measure": self.method == "pool"}
            calls.update(world.ask(phase.call, phase.processes, **how))
        for process in phase.processes if phase.call not in plan.AGENT_CALLS else ():
            try:
                calls[process] = world.start(
                    phase.call,
                    process,
                    timeout_s=max(0.05, self.deadline.at - begun),
                    gpu_map=gpu_map,
                    initialise=initialise,
                    claims=self.claims,
                )
            except CallError as e:  # no process can be started: those that were are waited for
                self.now[process] = world.states([process])[process]
                not_made.append(Failure(process, self._error(phase.call, process, Outcome(e.result), self.now[process], gpu_map)))
        limit = self.deadline.limit(phase.call, begun, self.nbytes)
        while waiting := [c for c in calls.values() if c.outcome is None]:
            if world.now() >= limit or len(world.interruptions) >= 2:
                break
            if len(world.interruptions) > asked_to_stop:
                asked_to_stop = len(world.interruptions)
                if phase.call is Call.QUIESCE:
                    break  # who has not come yet goes on as if nobody had asked
                if phase.call is Call.LOCK:
                    limit = min(limit, world.now() + LOCK_GRACE_S)
                self.say(phase.call, f"stopping: a {phase.call} cannot be interrupted; waiting for it (Ctrl-C again: leave it)")
            if known and self._in_vain(known, [c.process for c in waiting]):
                known, limit = (), min(limit, world.now() + BEREFT_GRACE_S)
            looks = self._watch or bool(known)  # one that dies closes its connection, and is gone a moment later
            world.wait(waiting, min(limit, world.now() + 0.25) if looks else limit)
            self._seconds |= {c.process.pid: round(world.now() - begun, 4) for c in waiting if c.outcome is not None}
            self.say(phase.call)
        results = {p: c.outcome.result if c.outcome is not None else "" for p, c in calls.items()}
        # those that were not ready are why the others are not done, and those that ended are why others wait, or do not come
        order = sorted(calls, key=lambda p: (results[p] == "agent:DROPPED", not results[p], results[p] == "agent:NOT_READY"))
        return not_made + [f for process in order if (f := self._result(phase.call, process, calls[process], limit, gpu_map))]

    def _persistent(self) -> bool:
        """Whether the GPUs are known to need no ``cuInit`` before a restore. One that is not needed costs a moment."""
        try:
            return all(g.persistence for g in self.world.gpus())
        except GpuckptError:
            return False

    def _ranks(self) -> tuple[Rank, ...]:
        """What the members that live have in communicators; nothing where not all of them can say."""
        assert self.record is not None
        alive = [m.id for m in self.record.members if m.agent and self.world.alive(m.id)]
        if self.barrier.several or any(self.world.halted(p) for p in alive):
            return ()
        return self.world.ranks(alive)

    def _in_vain(self, known: Sequence[Rank], waiting: Sequence[ProcessId]) -> bool:
        """Whether each of *waiting* shares a communicator with a member that has ended, and waits for ever. *known*: before the calls."""
        assert self.record is not None
        gone = {m.id.pid for m in self.record.members if not self.world.alive(m.id)}
        left = ranks.bereft([r for r in known if r.pid not in gone]) if gone else {}
        return all(p.pid in left for p in waiting)

    def _result(self, call: Call, process: ProcessId, pending: Pending, limit: float, gpu_map: Mapping[str, str]) -> Failure | None:
        """Take in how one call ended."""
        outcome = pending.outcome
        if outcome is None and call is Call.QUIESCE and self.world.interruptions:
            pending.release()
            outcome = Outcome("agent:NOT_READY", message="it had not come to its safe point")
        if outcome is None:
            pending.release()
            return self._left_in_flight(call, process, pending.caller_pid)
        if outcome.ok:
            self.now[process] = self.result(call, process)
            if call is Call.OFFLOAD and self.record is not None:
                self.record = self.record.with_member(process, moved=outcome.moved)
            if call is Call.COMMS and self.record is not None:
                self.record = self.record.with_member(process, stays=outcome.stays)
            if call is Call.LOCK:
                self.guards[process] = pending
            return None
        pending.release()
        state = self.world.states([process])[process]
        while outcome.result == "VANISHED" and state is State.BLOCKED and self.world.now() < limit:
            self.world.wait((), self.world.now() + 0.1)  # its caller was killed: the driver goes on with the call in the target
            state = self.world.states([process])[process]
        self.now[process] = state
        further = call in _BACK_BY_ITSELF and state in plan.DEPTH and plan.DEPTH[state] <= plan.DEPTH[self.result(call, process)]
        if outcome.result == "agent:ILLEGAL_STATE" and further:
            return None  # it goes back by itself where a controller was killed
        if state is self.result(call, process) and (outcome.result == "VANISHED" or call in (Call.RESTORE, Call.UNLOCK)):
            how = "its caller was killed" if outcome.result == "VANISHED" else f"it failed with CUDA_ERROR_{outcome.result}"
            self.warnings.append(f"{call} of pid {process}: {how}, but the driver completed the call: the process is {state}")
            return None
        if state is State.BLOCKED:
            return self._left_in_flight(call, process, pending.caller_pid)
        error = self._error(call, process, outcome, state, gpu_map)
        if outcome.result in ("agent:VANISHED", "agent:SILENT") and call is not Call.QUIESCE and state is State.RUNNING:
            self._waits(process, f"{call} by its agent, which does not answer")
        if isinstance(error, errors.Lost) and self.record is not None:
            self.record = self.record.with_member(process, lost=error.message)
            self.save()
        return Failure(process, error, outcome.result == "agent:DROPPED")

    def _left_in_flight(self, call: Call, process: ProcessId, caller_pid: int) -> Failure:
        self._waits(process, f"{call} by {'its agent' if call in plan.AGENT_CALLS else f'caller {caller_pid}'}")
        who, interrupted = self.world.describe(process.pid), len(self.world.interruptions) >= 2
        if call in plan.AGENT_CALLS:
            gone = [p for p, state in self.now.items() if state is State.GONE]
            return Failure(process, self._with_stopped(verdict.agent_in_flight(who, call, process, gone, interrupted=interrupted)))
        halted = self.world.halted(process)
        return Failure(process, verdict.left_in_flight(who, call, process, caller_pid, halted=halted, interrupted=interrupted))

    def _waits(self, process: ProcessId, what: str) -> None:
        self.now[process] = State.BLOCKED
        if self.record is not None:
            self.record = self.record.with_member(process, waiting=what)
            self.save()

    def _error(self, call: Call, process: ProcessId, outcome: Outcome, state: State, gpu_map: Mapping[str, str]) -> GpuckptError:
        """Words for a failed call. *state*: what the driver says of the process now."""
        who, movable = self.world.describe(process.pid), process in self.movable
        error = verdict.of_call(who, call, process, outcome, state, command=self.command, gpu_map=gpu_map, movable=movable)
        return self._with_stopped(error) if call in plan.AGENT_CALLS else error

    def _with_stopped(self, error: GpuckptError) -> GpuckptError:
        """*error* of an agent, and which members are stopped: the others wait for these in what they do together."""
        if halted := {p.pid: why for p in self.now if (why := self.world.halted(p))}:
            why = next(iter(halted.values()))
            error.message += f"; pid {', '.join(map(str, halted))} is {why}, for which its group waits"
            then = error.hint or "gpuckpt recover"
            error.hint = f"{let_go(why, halted)}{', then ' if then.startswith('gpuckpt') else '; '}{then}"
        return error

    def look(self) -> None:
        """Take in each process's state. One that the driver answers for waits for no call any more."""
        assert self.record is not None
        self.now = self.world.states(m.id for m in self.record.members)
        for m in self.record.members:
            held = m.agent and (m.waiting or self.record.status in (Status.SUSPENDED, Status.RESUMING))
            if held and self.now[m.id] is State.RUNNING and self.world.silent(m.id):
                self.now[m.id] = State.BLOCKED  # the driver has no part in it: its program stands still until its agent is asked
                self.unheard.add(m.id)
        for process, state in self.now.items():
            if state is not State.BLOCKED:
                self.record = self.record.with_member(process, waiting="")

    def usage(self) -> tuple[dict[str, int], dict[str, int]]:
        """As :func:`gpuckpt.world.usage`, *mine* being the group."""
        return usage(self.world, {p.pid for p in self.now})

    def save(self, *, required: bool = False, **changes: Any) -> None:
        """Write the record. Before anything was done a failure is raised (*required*); later it is only told: going on, or back,
        matters more, and recovery reads the driver's states beside an older record."""
        assert self.record is not None
        self.record = dataclasses.replace(self.record, controller=self.world.me, **changes)
        try:
            self.world.journal.save(self.record)
        except errors.JournalError as e:
            if required:
                raise
            self.warnings.append(f"{e.message}; it still says {self.record.status} as before")

    @property
    def nbytes(self) -> int:
        """What the members held on their GPUs when they were found."""
        return sum(g.nbytes or 0 for m in self.record.members for g in m.gpus) if self.record else 0

    def moved(self) -> tuple[int | None, int | None]:
        if not self._watch or self.record is None:
            return None, None
        on = {g.uuid for m in self.record.members for g in m.gpus}
        now = None
        with suppress(GpuckptError):  # a bar without its figure, and no more: calls are under way
            used, others = self.usage()
            now = sum(max(0, used.get(u, 0) - others.get(u, 0)) for u in on)
        return now, self.nbytes

    def check_interruption(self) -> None:
        if self.world.interruptions:
            signum = self.world.interruptions[0]
            raise errors.Interrupted("interrupted; everything is as it was found", signum=signum)

    @contextmanager
    def holding(self, targets: Sequence[int]) -> Iterator[None]:
        """Locks that nobody came to want are undone and claims given back at the end, however it comes: we may be part of a program
        that lives on, and the next group's restore waits for the same GPU."""
        try:
            yield
        except GpuckptError as e:
            self.barrier.fail(e)
            if e.report is None:  # refused before it began: what began has its own line
                self.audit(targets, e.code)
            raise
        finally:
            for guard in self.guards.values():
                guard.release()
            self.guards.clear()
            self.release()

    def release(self) -> None:
        for claim in reversed(self.claims):
            claim.release()
        self.claims.clear()
