"""Suspend, resume and recover: walks a group of processes to where they shall be, and back if that fails.

The order of things is ``plan.next_phase``'s; this module makes the calls, keeps the deadline, and answers for what
went wrong. What it promises: every process ends as it was found, or suspended, or is named in the report.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from gpuckpt import errors, plan
from gpuckpt.driver.caller import Outcome
from gpuckpt.errors import GpuckptError
from gpuckpt.journal import Member, Record
from gpuckpt.model import (
    Call,
    Gpu,
    GpuBytes,
    GpuProcess,
    GpuReport,
    Hazard,
    Inventory,
    ProcessId,
    ProcessReport,
    Report,
    State,
    Status,
    Step,
)
from gpuckpt.world import Claim, Pending, World

#: How long a roll-back waits for room on its GPUs before it leaves the processes suspended, in seconds.
UNDO_WAIT_S = 30.0
#: How long a lock that was asked to end may take before its caller is left to itself, in seconds.
LOCK_GRACE_S = 10.0
#: Bytes that a GPU may differ by NVML's own rounding before they count as retained.
RETAINED_LEAST_BYTES = 64 << 20

ERRORS_OF_HAZARDS: dict[str, type[GpuckptError]] = {
    "stopped": errors.Stopped,
    "possible-import": errors.PossibleImport,
    "nccl-communicator": errors.NcclCommunicator,
    "rdma": errors.Rdma,
    "mps": errors.Mps,
    "mig": errors.Mig,
    "host-memory": errors.HostMemory,
}


@dataclass(frozen=True, slots=True)
class Progress:
    """Told while driver calls run: the step, and the bytes on the group's GPUs now and at the start of the operation."""

    step: str
    message: str = ""
    bytes_now: int | None = None
    bytes_start: int | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    process: ProcessId
    error: GpuckptError


class Operation:
    """One command on one group. An instance is used once."""

    def __init__(
        self,
        world: World,
        command: str,
        *,
        timeout_s: float | None = None,
        accept: frozenset[str] = frozenset(),
        tell: Callable[[Progress], None] | None = None,
    ) -> None:
        self.world = world
        self.command = command
        self.accept = accept
        self.steps: list[Step] = []
        self.warnings: list[str] = []
        self.hazards: tuple[Hazard, ...] = ()
        self.record: Record | None = None
        self.now: dict[ProcessId, State] = {}
        self._tell = tell
        self._begun = world.now()
        self._timeout_s = timeout_s
        self._deadline = self._begun + (timeout_s if timeout_s is not None else plan.default_timeout_s(0))
        self._claims: list[Claim] = []
        self._guards: dict[ProcessId, Pending] = {}
        self._used_before: dict[str, int] = {}
        self._others_before: dict[str, int] = {}

    # The three commands.

    def suspend(self, targets: Sequence[int], *, tree: bool = True) -> Report:
        """Checkpoint the group of *targets*. Raises a :class:`GpuckptError` whose ``report`` tells how each process was left."""
        inventory = self._inspect(targets, tree)
        self._set_deadline(sum(p.nbytes for p in inventory.processes))
        inventory = self._claim_group(inventory, targets, tree)
        if all(p.state is State.CHECKPOINTED for p in inventory.processes):
            return self._already(inventory)
        self.refuse(inventory)
        self.world.journal.prepare()
        superseded = self._begin(inventory)
        try:
            self._walk(dict.fromkeys(self.now, State.CHECKPOINTED), stop=True, before_checkpoint=lambda: self._reinspect(targets, tree))
            self._check_interruption()
            with self._step("verify"):
                self._verify()
        except GpuckptError as cause:
            self._undo(cause)
        except BaseException as cause:
            self._undo(GpuckptError(f"{type(cause).__name__}: {cause}"))
        self._save(status=Status.SUSPENDED)
        for record in superseded:
            self.world.journal.remove(record.id)
        return self._finish()

    def resume(self, targets: Sequence[int], *, wished: Mapping[str, str] | None = None, to_gpu: str = "", wait_s: float = 0.0) -> Report:
        """Restore the group of *targets*, once every GPU has room, waiting up to *wait_s* for it.

        *wished* maps GPUs (old UUID to new), *to_gpu* names one GPU for a group that was on one.
        """
        with self._step("inspect"):
            record, inventory = self._group_to_resume(targets)
        if record is None:
            return self._already(inventory)
        self._set_deadline(sum(g.nbytes or 0 for m in record.members for g in m.gpus), extra_s=wait_s)
        self._claims.append(self._claim(record.found))
        fresh = [r for r in self.world.journal.records() if r.id == record.id]
        if fresh and self._timeless(fresh[0]) != self._timeless(record):
            self._release()
            return self.resume(targets, wished=wished, to_gpu=to_gpu, wait_s=wait_s)  # another command was at it while we waited
        self.record = record
        self._look()
        if not fresh and not any(s in (State.CHECKPOINTED, State.LOCKED) for s in self.now.values()):
            return self._already(inventory)
        self._refuse_stopped()
        self.world.journal.prepare()
        gpu_map = self._gpu_map(wished or {}, to_gpu)
        if any(s is State.CHECKPOINTED for s in self.now.values()):
            self._claim_room(gpu_map, until=self.world.now() + wait_s)
        self._check_interruption()
        self._save(status=Status.RESUMING)
        failures = self._walk(dict.fromkeys(self.record.found, State.RUNNING), gpu_map=gpu_map)
        return self._settle(failures, dict.fromkeys(self.record.found, State.RUNNING))

    def recover(self, record: Record) -> Report:
        """Finish or undo the operation that *record* tells of. Nothing happens to a record that needs nothing."""
        self.record = record
        self._set_deadline(sum(g.nbytes or 0 for m in record.members for g in m.gpus))
        self._claims.append(self._claim(record.found, until=self.world.now()))
        self._look()
        goal = plan.recovery_goal(record.status, record.found, self.now)
        self._refuse_stopped()
        if any(self.now[p] is State.CHECKPOINTED and s is not State.CHECKPOINTED for p, s in goal.items()):
            self._claim_room({}, until=self.world.now())
        return self._settle(self._walk(goal), goal)

    def refuse(self, inventory: Inventory) -> None:
        """Raise for the first reason not to suspend *inventory*; nothing has been touched."""
        for p in inventory.processes:
            if p.state is State.FAILED:
                raise errors.Lost(
                    f"pid {p.pid} ({p.name}): the driver says that its GPU state failed; it cannot be suspended or restored",
                    hint=f"end it: kill {p.pid}",
                    pid=p.pid,
                )
            if p.state is State.DENIED:
                raise errors.PermissionDenied(
                    f"the driver does not let us touch pid {p.pid} ({p.name})",
                    hint="run it as its owner or as root, with CAP_SYS_PTRACE in a container (gpuckpt doctor explains)",
                    pid=p.pid,
                )
        for hazard in inventory.hazards:
            if not (hazard.acceptable and hazard.kind in self.accept):
                raise ERRORS_OF_HAZARDS[hazard.kind](hazard.message, hint=hazard.hint, pid=hazard.pid, step="inspect")
        for p in inventory.processes:
            if p.state not in plan.DEPTH:
                raise errors.Busy(
                    f"the driver does not answer for pid {p.pid} ({p.name}, state {p.state}): a call on it is under way",
                    hint="try again when it has ended; gpuckpt status tells",
                    pid=p.pid,
                )

    # Finding the group.

    def _inspect(self, targets: Sequence[int], tree: bool) -> Inventory:
        with self._step("inspect"):
            inventory = self.world.inspect(targets, tree=tree)
        self.hazards = inventory.hazards
        self.warnings += [w for w in inventory.warnings if w not in self.warnings]
        return inventory

    def _claim_group(self, inventory: Inventory, targets: Sequence[int], tree: bool) -> Inventory:
        """Hold the group, and look at it again if it changed before we held it."""
        while True:
            claim = self._claim([p.id for p in inventory.processes])
            states = self.world.states(p.id for p in inventory.processes)
            if all(states[p.id] is p.state for p in inventory.processes):
                self._claims.append(claim)
                return inventory
            claim.release()
            self._check_interruption()
            self._check_deadline("inspect")
            inventory = self._inspect(targets, tree)

    def _claim(self, processes: Iterable[ProcessId], until: float | None = None) -> Claim:
        return self.world.claim(sorted(processes), self._deadline if until is None else until)

    def _group_to_resume(self, targets: Sequence[int]) -> tuple[Record | None, Inventory]:
        """The journal's group where it knows one, else what the driver says of the targets' group."""
        known = [r for r in self.world.journal.records() if any(m.id.pid in targets for m in r.members)]
        known = [r for r in known if any(self._is(m) for m in r.members)]
        rest = [t for t in targets if not any(m.id.pid == t for r in known for m in r.members)]
        inventory = Inventory((), self.world.gpus())
        members: dict[ProcessId, Member] = {m.id: m for r in known for m in r.members}
        if rest:
            inventory = self.world.inspect(rest, tree=True)
            for p in inventory.processes:
                if p.state in (State.CHECKPOINTED, State.LOCKED):
                    members.setdefault(p.id, _member(p))
                elif p.state is State.FAILED:
                    raise errors.Lost(
                        f"pid {p.pid} ({p.name}): the driver says that its GPU state failed; no restore can succeed",
                        hint=f"end it: kill {p.pid}",
                        pid=p.pid,
                    )
                elif p.state is not State.RUNNING:
                    self.refuse(inventory)
        if not members:
            return None, inventory
        first = known[0] if known else Record(Status.SUSPENDED, (), inventory.gpus, by="another tool")
        retained = {uuid: nbytes for r in known for uuid, nbytes in r.retained.items()}
        record = dataclasses.replace(first, members=tuple(members.values()), retained=retained)
        if len(known) > 1:
            self.world.journal.prepare()
            self.world.journal.save(record)
            for other in known[1:]:
                self.world.journal.remove(other.id)
        return record, inventory

    def _is(self, member: Member) -> bool:
        return self.world.states([member.id])[member.id] is not State.GONE

    @staticmethod
    def _timeless(record: Record) -> object:
        return (record.status, record.members)

    # On the way.

    def _begin(self, inventory: Inventory) -> list[Record]:
        """Write the record that recovery would need. Returns the records that it takes over from once it is done."""
        ids = {p.id for p in inventory.processes}
        older = [r for r in self.world.journal.records() if any(m.id in ids for m in r.members)]
        unfinished = {m.id: m.found for r in older if r.status is not Status.SUSPENDED for m in r.members}
        recorded = {m.id: m.gpus for r in older for m in r.members}
        members = tuple(
            dataclasses.replace(_member(p), found=unfinished.get(p.id, p.state), gpus=p.gpus or recorded.get(p.id, ()))
            for p in inventory.processes
        )
        on = {g.uuid for m in members for g in m.gpus}
        self.now = {p.id: p.state for p in inventory.processes}
        retained = {uuid: nbytes for r in older for uuid, nbytes in r.retained.items()}
        self.record = Record(
            Status.SUSPENDING,
            members,
            tuple(g for g in inventory.gpus if g.uuid in on),
            retained=retained,
            by=self.world.user,
            controller=self.world.me,
        )
        self._used_before, self._others_before = self._usage()
        self._save()
        return older

    def _walk(
        self,
        goal: Mapping[ProcessId, State],
        *,
        stop: bool = False,
        gpu_map: Mapping[str, str] | None = None,
        before_checkpoint: Callable[[], None] | None = None,
    ) -> list[Failure]:
        """Go phase by phase to *goal*. With *stop* the first failure is raised when its phase has ended, else the others go on."""
        goal, failures = dict(goal), []
        while phase := plan.next_phase(self.now, goal):
            if stop:
                self._check_interruption()
                self._check_deadline(phase.call)
            if phase.call is Call.CHECKPOINT and before_checkpoint is not None:
                before_checkpoint()
                before_checkpoint = None
            with self._step(phase.call):
                failed = self._run(phase, gpu_map or {})
            failures += failed
            if failed and stop:
                raise failed[0].error
            for f in failed:
                goal.pop(f.process, None)
        return failures

    def _run(self, phase: plan.Phase, gpu_map: Mapping[str, str]) -> list[Failure]:
        """Make the calls of one phase in parallel; when it returns, each has ended or was left to itself, and ``now`` is up to date."""
        world = self.world
        for process in phase.processes:
            if guard := self._guards.pop(process, None):
                guard.keep()
        begun = world.now()
        calls: dict[ProcessId, Pending] = {}
        for process in phase.processes:
            calls[process] = world.start(
                phase.call,
                process,
                timeout_s=max(0.05, self._deadline - begun),
                gpu_map=gpu_map,
                initialise=phase.call is Call.RESTORE and not all(g.persistence for g in world.gpus()),
                claims=self._claims,
            )
        limit = self._limit(phase.call, begun)
        asked_to_stop = len(world.interruptions)
        while waiting := [c for c in calls.values() if c.outcome is None]:
            if world.now() >= limit or len(world.interruptions) >= 2:
                break
            if len(world.interruptions) > asked_to_stop:
                asked_to_stop = len(world.interruptions)
                if phase.call is Call.LOCK:
                    limit = min(limit, world.now() + LOCK_GRACE_S)
                self._say(
                    phase.call, f"stopping: the driver cannot be interrupted in a {phase.call}; waiting for it (Ctrl-C again: leave it)"
                )
            world.wait(waiting, min(limit, world.now() + 0.25) if self._tell else limit)
            self._say(phase.call)
        return [f for process, call in calls.items() if (f := self._result(phase.call, process, call, limit))]

    def _result(self, call: Call, process: ProcessId, pending: Pending, limit: float) -> Failure | None:
        """Take in how one call ended."""
        outcome = pending.outcome
        if outcome is None:
            pending.release()
            return self._left_in_flight(call, process, pending.caller_pid)
        if outcome.ok:
            self.now[process] = plan.RESULT[call]
            if call is Call.LOCK:
                self._guards[process] = pending
            return None
        pending.release()
        state = self.world.states([process])[process]
        while outcome.result == "VANISHED" and state is State.BLOCKED and self.world.now() < limit:
            self.world.wait((), self.world.now() + 0.1)  # its caller was killed: the driver goes on with the call in the target
            state = self.world.states([process])[process]
        self.now[process] = state
        if outcome.result == "VANISHED" and state is plan.RESULT[call]:
            self.warnings.append(f"the caller of {call} on pid {process} was killed; the driver completed the call")
            return None
        if state is State.BLOCKED:
            return self._left_in_flight(call, process, pending.caller_pid)
        error = self._error(call, process, outcome, state)
        if isinstance(error, errors.Lost) and self.record is not None:
            self.record = self.record.with_member(process, lost=error.message)
            self._save()
        return Failure(process, error)

    def _left_in_flight(self, call: Call, process: ProcessId, caller_pid: int) -> Failure:
        self.now[process] = State.BLOCKED
        if self.record is not None:
            self.record = self.record.with_member(process, waiting=f"{call} by caller {caller_pid}")
            self._save()
        then = "it unlocks itself when the driver grants it" if call is Call.LOCK else f"the driver goes on with the {call}"
        stopped = f"pid {process} is stopped: kill -CONT {process}, then " if self.world.stopped(process) else "when it has ended, "
        return Failure(
            process,
            errors.InFlight(
                f"{call} of {self.world.describe(process.pid)} has not returned by the deadline; its caller (pid {caller_pid}) was left "
                f"to itself: {then}",
                hint=f"{stopped}gpuckpt recover",
                pid=process.pid,
                step=call,
            ),
        )

    def _error(self, call: Call, process: ProcessId, outcome: Outcome, state: State) -> GpuckptError:
        """Words for a failed call. *state*: what the driver says of the process now."""
        who, where = self.world.describe(process.pid), {"pid": process.pid, "step": str(call)}
        if outcome.result.startswith("gpuckpt:"):
            cls = errors.by_code().get(outcome.result[8:], GpuckptError)
            return cls(outcome.message or outcome.result, hint="gpuckpt doctor", **where)
        if state is State.GONE:
            return errors.Aborted(f"{who} ended during {call}", **where)
        if call is Call.RESTORE and state is not State.LOCKED:
            return errors.Lost(
                f"restore of {who} failed (CUDA_ERROR_{outcome.result}); its GPU state cannot be brought back",
                hint=f"end it and start it again: kill {process}",
                **where,
            )
        if call is Call.LOCK and outcome.result == "NOT_READY":
            return errors.Deadline(
                f"{who} was busy on the GPU beyond the deadline; it goes on running",
                hint="a longer --timeout, or suspend it between two steps of its work",
                **where,
            )
        if call is Call.CHECKPOINT and outcome.result == "NOT_SUPPORTED":
            return errors.ManagedMemory(
                f"the driver cannot checkpoint {who}: CUDA_ERROR_NOT_SUPPORTED, as for managed memory (cudaMallocManaged)",
                hint="start the program without managed memory (torch and vLLM use none by default)",
                **where,
            )
        if state is State.DENIED:
            return errors.PermissionDenied(
                f"the driver does not let us touch {who}", hint=f"sudo gpuckpt {self.command} {process}", **where
            )
        return errors.DriverError(f"{call} of {who} failed: CUDA_ERROR_{outcome.result}; the driver says it is {state}", **where)

    def _reinspect(self, targets: Sequence[int], tree: bool) -> None:
        """Everything is locked: a CUDA process born since the inspection, or a death, ends the operation."""
        with self._step("re-inspect"):
            inventory = self.world.inspect([t for t in targets if t in {p.pid for p in self.now}] or [p.pid for p in self.now], tree=tree)
        for p in inventory.processes:
            if p.id not in self.now:
                raise errors.Aborted(
                    f"pid {p.pid} ({p.name}) began to use CUDA while its group was being locked; nothing was checkpointed",
                    hint=f"try again: gpuckpt {self.command} {' '.join(map(str, targets))}",
                    pid=p.pid,
                    step="re-inspect",
                )
        alive = {p.id for p in inventory.processes}
        for process in self.now:
            if process not in alive:
                raise errors.Aborted(
                    f"pid {process} ended while its group was being locked; nothing was checkpointed", pid=process.pid, step="re-inspect"
                )

    def _verify(self) -> None:
        """NVML must agree that the bytes are gone. What stayed is told, and counted at resume."""
        assert self.record is not None
        mine: dict[str, int] = {}
        for m in self.record.members:
            if m.found is not State.CHECKPOINTED:
                for g in m.gpus:
                    mine[g.uuid] = mine.get(g.uuid, 0) + (g.nbytes or 0)
        until = self.world.now() + 1.0
        while True:
            used, others = self._usage()
            retained = {}
            for uuid, held in mine.items():
                if uuid in used and uuid in self._used_before:
                    drift = others.get(uuid, 0) - self._others_before.get(uuid, 0)
                    left = used[uuid] - (self._used_before[uuid] - held) - drift
                    if left >= RETAINED_LEAST_BYTES:
                        retained[uuid] = left
            if not retained or self.world.now() >= until:
                break
            self.world.wait((), self.world.now() + 0.1)
        if retained:
            kept = {**self.record.retained, **{u: n + self.record.retained.get(u, 0) for u, n in retained.items()}}
            self.record = dataclasses.replace(self.record, retained=kept)
            for uuid, nbytes in retained.items():
                self.warnings.append(
                    f"{nbytes / 2**20:.0f} MiB stayed on {uuid} although the group is suspended: memory exported to another process or an "
                    "open file descriptor (cuMemExportToShareableHandle). A resume needs room for it once more"
                )

    # Ends.

    def _undo(self, cause: GpuckptError) -> None:
        """Take every process back to where it was found, then raise *cause*, or what is worse."""
        assert self.record is not None
        self.record = dataclasses.replace(self.record, status=Status.UNDOING)
        self._save()
        self._look()
        goal = {p: s for p, s in self.record.found.items() if self.now.get(p) in plan.DEPTH}
        blocked: GpuckptError | None = None
        if any(self.now[p] is State.CHECKPOINTED and s is not State.CHECKPOINTED for p, s in goal.items()):
            try:
                self._claim_room({}, until=self.world.now() + UNDO_WAIT_S)
            except GpuckptError as e:
                blocked = e
                goal = {p: s if self.now[p] is not State.CHECKPOINTED else State.CHECKPOINTED for p, s in goal.items()}
        failures = self._walk(goal)
        worse = next((f.error for f in failures if isinstance(f.error, errors.Lost)), None) or next((f.error for f in failures), None)
        if worse is None and blocked is not None:
            worse = errors.NotAsFound(
                f"{cause.message}; and the way back is blocked: {blocked.message}. What was checkpointed stays suspended, intact",
                hint=f"when there is room: gpuckpt resume {' '.join(str(p) for p in self.record.found)}",
                pid=cause.pid,
                step=cause.step,
            )
        if worse is not None and worse is not cause:
            worse.add_note(f"after: {cause.message}")
        self._end(worse or cause)

    def _settle(self, failures: list[Failure], goal: Mapping[ProcessId, State]) -> Report:
        """After a resume or a recovery: done, or the first failure."""
        assert self.record is not None
        if failures:
            worst = next((f.error for f in failures if isinstance(f.error, errors.Lost)), failures[0].error)
            if worst.exit_code not in (3,) and not isinstance(worst, errors.Aborted):
                worst = errors.NotAsFound(worst.message, hint=worst.hint or "gpuckpt recover", pid=worst.pid, step=worst.step)
            self._end(worst)
        if goal and all(s is State.CHECKPOINTED for s in goal.values()):
            self._save(status=Status.SUSPENDED)
        elif not self._not_as(goal):
            self.world.journal.remove(self.record.id)
        lost = [m for m in self.record.members if m.lost and self.now.get(m.id, State.GONE) is not State.GONE]
        if lost and self.command == "resume":
            self._end(errors.Lost(lost[0].lost, hint=f"end it and start it again: kill {lost[0].id}", pid=lost[0].id.pid, step="restore"))
        return self._finish()

    def _not_as(self, goal: Mapping[ProcessId, State]) -> list[ProcessId]:
        """Live processes that are not where *goal* wants them, the lost among them."""
        assert self.record is not None
        lost = [m.id for m in self.record.members if m.lost and self.now.get(m.id, State.CHECKPOINTED) is not State.GONE]
        return lost + [p for p, s in goal.items() if self.now.get(p) not in (s, State.GONE)]

    def _end(self, error: GpuckptError) -> None:
        """Leave the journal telling the truth, attach the report, raise *error*."""
        assert self.record is not None
        if not self._not_as(self.record.found if self.command == "suspend" else dict.fromkeys(self.record.found, State.RUNNING)):
            self.world.journal.remove(self.record.id)
        elif self.command != "suspend" and all(self.now[p] in (State.CHECKPOINTED, State.GONE) for p in self.record.found):
            self._save(status=Status.SUSPENDED)
        error.report = self._report(ok=False, error=error)
        self._close(error.code)
        raise error

    def _already(self, inventory: Inventory) -> Report:
        self.now = self.now or {p.id: p.state for p in inventory.processes}
        processes = tuple(
            ProcessReport(p.pid, p.name, _word(p.state), tuple(GpuReport(g.uuid, g.nbytes, g.nbytes) for g in p.gpus), p.host_bytes)
            for p in inventory.processes
        )
        report = Report(self.command, True, self.world.simulated, processes, self._seconds(), tuple(self.steps), already=True)
        self._close("already")
        return report

    def _finish(self) -> Report:
        report = self._report(ok=True)
        self._close("done")
        return report

    def _report(self, *, ok: bool, error: GpuckptError | None = None) -> Report:
        assert self.record is not None
        held = self.world.held()
        rows, retained = [], dict(self.record.retained)
        for m in self.record.members:
            state = self.now.get(m.id, State.GONE)
            word = "lost" if m.lost and state is not State.GONE else _word(state)
            here = held.get(m.id.pid, {}) if state is not State.GONE else {}
            gpus = {g.uuid: GpuReport(g.uuid, g.nbytes, 0) for g in m.gpus}
            for uuid, nbytes in here.items():
                gpus[uuid] = GpuReport(uuid, gpus[uuid].bytes_before if uuid in gpus else 0, nbytes)
            image = self.world.image_bytes(m.id) if state is State.CHECKPOINTED else 0
            kept = sum(retained.pop(g.uuid, 0) for g in m.gpus) if state is State.CHECKPOINTED else 0
            rows.append(ProcessReport(m.id.pid, m.name, word, tuple(gpus.values()), image, kept, m.lost or m.waiting))
        return Report(
            self.command,
            ok,
            self.world.simulated,
            tuple(rows),
            self._seconds(),
            tuple(self.steps),
            self.hazards,
            tuple(self.warnings),
            error=error.as_dict() if error else None,
        )

    def _close(self, outcome: str) -> None:
        for guard in self._guards.values():
            guard.release()
        self._guards.clear()
        self._release()
        self.world.journal.audit(
            command=self.command,
            by=self.world.user,
            pids=[p.pid for p in self.now],
            outcome=outcome,
            seconds=round(self._seconds(), 3),
            states={str(p): s for p, s in self.now.items()},
        )

    def _release(self) -> None:
        for claim in reversed(self._claims):
            claim.release()
        self._claims.clear()

    # Room.

    def _gpu_map(self, wished: Mapping[str, str], to_gpu: str) -> dict[str, str]:
        """The driver's full map for the user's wish. Raises for GPUs that do not fit each other."""
        assert self.record is not None
        on = sorted({g.uuid for m in self.record.members for g in m.gpus})
        if to_gpu:
            if len(on) != 1:
                raise errors.Usage(f"the group was on {len(on)} GPUs ({', '.join(on)}): name each, --gpu OLD=NEW")
            wished = {on[0]: to_gpu}
        gpus = self.world.gpus()
        try:
            full = plan.full_gpu_map(wished, gpus)
        except ValueError as e:
            raise errors.Usage(f"--gpu: {e}", hint="gpuckpt ps lists the GPUs") from e
        names = {g.uuid: g.name for g in (*self.record.gpus, *gpus)}
        for old in on:
            new = full.get(old, old)
            if names.get(old) and names.get(new) != names.get(old):
                raise errors.GpuChanged(
                    f"{new} is a {names.get(new)}, {old} was a {names.get(old)}: the driver restores only onto the same chip", gpu=new
                )
        return full

    def _claim_room(self, gpu_map: Mapping[str, str], until: float) -> None:
        """Hold the GPUs of the restore to come, and return once each has room. Raises, with nothing changed, if none comes by *until*."""
        assert self.record is not None
        down = [m for m in self.record.members if self.now.get(m.id) is State.CHECKPOINTED and not m.lost]
        held: list[GpuBytes] = []
        for m in down:
            known = [g for g in m.gpus if g.nbytes is not None]
            if known and len(known) == len(m.gpus):
                held += known
            else:
                image = self.world.image_bytes(m.id)
                held += [GpuBytes(g.uuid, image) for g in (m.gpus or [GpuBytes(g.uuid, None) for g in self.world.gpus()])]
        need = plan.room_need_bytes(held, self.record.retained, gpu_map)
        gpus = [g for g in self.world.gpus() if g.uuid in need]
        self._claims.append(self.world.claim_gpus(gpus, max(until, self._deadline)))
        recorded = {gpu_map.get(g.uuid, g.uuid): g for g in self.record.gpus} if not gpu_map else {}
        with self._step("room"):
            while short := plan.shortages(need, recorded, self.world.gpus()):
                if self.world.now() >= until or self.world.interruptions or any(s.kind == "missing" for s in short):
                    self._check_interruption()
                    raise self._no_room(short[0])
                self._say("room", f"waiting for room on {short[0].uuid}")
                self.world.wait((), min(until, self.world.now() + 0.2))

    def _no_room(self, short: plan.Shortage) -> GpuckptError:
        stays = "nothing was restored; the suspended process is intact"
        gpu = next((g for g in self.world.gpus() if g.uuid == short.uuid), Gpu(short.uuid, -1))
        if short.kind in ("lost", "missing"):
            return errors.GpuLost(
                f"{gpu.label} is {'lost' if short.kind == 'lost' else 'not on this machine any more'}; {stays}",
                hint="restore on another card of the same kind: gpuckpt resume PID --gpu OLD=NEW",
                gpu=short.uuid,
                step="room",
            )
        if short.kind == "changed":
            return errors.GpuChanged(f"{gpu.label}: {short.what}; {stays}", hint="set it back as it was", gpu=short.uuid, step="room")
        if short.kind == "unknown":
            return errors.GpuUnknown(
                f"the memory of {gpu.label} cannot be queried, and unknown is not free; {stays}",
                hint="nvidia-smi -q -d MEMORY; then resume again, or wait for it with --wait 1m",
                gpu=short.uuid,
                step="room",
            )
        holders = [(n.get(short.uuid) or 0, pid) for pid, n in self.world.held().items() if short.uuid in n]
        named = ", ".join(f"{self.world.describe(pid)}: {_gib(nbytes)}" for nbytes, pid in sorted(holders, reverse=True)[:5])
        return errors.GpuMemory(
            f"{gpu.label} has {_gib(short.free_bytes or 0)} free, the restore needs {_gib(short.needed_bytes)}; {stays}."
            + (f" Held by {named}" if named else ""),
            hint="free the GPU, then resume again; or let it wait: --wait 10m",
            gpu=short.uuid,
            step="room",
        )

    # Small things.

    def _look(self) -> None:
        assert self.record is not None
        self.now = self.world.states(m.id for m in self.record.members)

    def _refuse_stopped(self) -> None:
        """Before a resume acts: every process must answer, and none may be stopped."""
        assert self.record is not None
        for m in self.record.members:
            if self.now[m.id] is State.FAILED and not m.lost:
                self.record = self.record.with_member(m.id, lost="the driver says that its GPU state failed")
            elif self.now[m.id] is State.BLOCKED and self.world.stopped(m.id):
                raise errors.Stopped(
                    f"{self.world.describe(m.id.pid)} is stopped; every driver call on it would hang",
                    hint=f"kill -CONT {m.id}",
                    pid=m.id.pid,
                )
            elif self.now[m.id] not in plan.DEPTH and self.now[m.id] is not State.GONE and not m.lost:
                raise errors.InFlight(
                    f"the driver does not answer for {self.world.describe(m.id.pid)} (state {self.now[m.id]}"
                    f"{', ' + m.waiting if m.waiting else ''}): a call on it is under way",
                    hint="when it has ended: gpuckpt recover",
                    pid=m.id.pid,
                )

    def _usage(self) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes used on each GPU, and by processes outside the group."""
        used = {g.uuid: g.total_bytes - g.free_bytes for g in self.world.gpus() if g.total_bytes and g.free_bytes is not None}
        mine, others = {p.pid for p in self.now}, dict.fromkeys(used, 0)
        for pid, held in self.world.held().items():
            if pid not in mine:
                for uuid, nbytes in held.items():
                    others[uuid] = others.get(uuid, 0) + (nbytes or 0)
        return used, others

    def _save(self, **changes: object) -> None:
        assert self.record is not None
        self.record = dataclasses.replace(self.record, controller=self.world.me, **changes)  # type: ignore[arg-type]
        self.world.journal.save(self.record)

    def _set_deadline(self, nbytes: int, extra_s: float = 0.0) -> None:
        if self._timeout_s is None:
            self._timeout_s = plan.default_timeout_s(nbytes) + extra_s
        self._deadline = self._begun + self._timeout_s

    def _limit(self, call: Call, begun: float) -> float:
        """When a call that has not returned is left to itself. A checkpoint or restore gets as long as its bytes may take."""
        assert self.record is not None
        nbytes = sum(g.nbytes or 0 for m in self.record.members for g in m.gpus)
        if call is Call.LOCK:
            return max(self._deadline, begun) + min(2.0, self._timeout_s or 2.0)
        return max(self._deadline, begun) + max(plan.default_timeout_s(nbytes) - plan.default_timeout_s(0), self._timeout_s or 0.0, 2.0)

    def _check_interruption(self) -> None:
        if self.world.interruptions:
            signum = self.world.interruptions[0]
            raise errors.Interrupted("interrupted; everything is as it was found", signum=signum)

    def _check_deadline(self, step: str) -> None:
        if self.world.now() >= self._deadline:
            raise errors.Deadline(f"the deadline passed before {step}; everything is as it was found", hint="a longer --timeout", step=step)

    def _seconds(self) -> float:
        return self.world.now() - self._begun

    def _say(self, step: str, message: str = "") -> None:
        if self._tell is None:
            return
        now = start = None
        if self.record is not None and not message:
            on = {g.uuid for m in self.record.members for g in m.gpus}
            start = sum(g.nbytes or 0 for m in self.record.members for g in m.gpus)
            used = {g.uuid: g.total_bytes - g.free_bytes for g in self.world.gpus() if g.total_bytes and g.free_bytes is not None}
            others = self._usage()[1]
            now = sum(max(0, used.get(u, 0) - others.get(u, 0)) for u in on)
        self._tell(Progress(str(step), message, now, start))

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        begun = self.world.now()
        self._say(name)
        try:
            yield
        finally:
            self.steps.append(Step(str(name), round(self.world.now() - begun, 4)))


def _member(p: GpuProcess) -> Member:
    return Member(p.id, p.name, p.uid, p.state, p.gpus)


def _word(state: State) -> str:
    """The word that people see for a driver state."""
    words = {State.CHECKPOINTED: "suspended", State.BLOCKED: "in-flight", State.FAILED: "lost"}
    return words.get(state, str(state))


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 1 << 30 else f"{nbytes / 2**20:.0f} MiB"
