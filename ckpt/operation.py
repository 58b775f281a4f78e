"""Suspend, resume and recover: walks a group of processes to where they shall be, and back if that fails.

The order of things is ``plan.next_phase``'s; this module makes the calls, keeps the deadline, and answers for what
went wrong. What it promises: every process ends as it was found, or suspended, or is named in the report.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import NoReturn

from gpuckpt import errors, keeping, method, plan, room, sparing
from gpuckpt.barrier import END
from gpuckpt.errors import GpuckptError
from gpuckpt.group import as_member, total_retained, waits_for_others
from gpuckpt.journal import Record
from gpuckpt.model import Call, GpuProcess, Inventory, ProcessId, Report, State, Status
from gpuckpt.reporting import Reporting
from gpuckpt.walk import Failure

#: How long a roll-back waits for room on its GPUs before it leaves the processes suspended, in seconds.
UNDO_WAIT_S = 30.0


class Operation(Reporting):
    """One command on one group. An instance is used once."""

    # The three commands.

    def suspend(
        self,
        targets: Sequence[int],
        *,
        tree: bool = True,
        along: Collection[int] = (),
        by: str = "auto",
        keep_in: str = keeping.RAM,
        oom_score_adj: int | None = None,
    ) -> Report:
        """Suspend the group of *targets* by a method (``method.py``), and keep its images in the directory *keep_in*, or in host memory.

        While it is suspended it has *oom_score_adj*, if one is given. What *along* stands for gives up its communicators with it, and
        stands at its safe point until the resume, its memory where it is.

        Raises a :class:`GpuckptError` whose ``report`` tells how each process was left.
        """
        with self.holding(targets):
            self.method, self.beside = by, frozenset(along)
            inventory = self.inspect(targets, tree)
            self.refuse_hazards(h for h in inventory.hazards if h.kind == "stopped")  # a claim on it may be held for as long as it is
            self.deadline.set(sum(p.nbytes for p in inventory.processes))
            inventory, targets = self.claim_group(inventory, targets, tree)
            self.refuse_the_lost(inventory)
            down = method.suspended(self, inventory)
            already = len(down) == len(inventory.processes) and not self.left_in_the_middle(inventory)
            if already:
                method.refuse_on_top(self, inventory, keep_in)
            if not already or self.barrier.several:
                part = self.part_in({p.id for p in inventory.processes})
                self.refuse(inventory)
                method.refuse(self, inventory, keep_in)
                if not already:
                    keeping.refuse(self, keep_in, [p for p in inventory.processes if not p.along])
                self.world.journal.prepare()
                already = self.join(inventory, targets[0], already=already, part=part, nbytes=sum(p.nbytes for p in inventory.processes))
            if already:
                if oom_score_adj is not None:
                    self.warnings.append("it was suspended before: its oom_score_adj stays as it is")
                moving = keeping.movable(self, keep_in, inventory.processes)
                return self._keep(targets, tree, keep_in, moving) if moving else self._already(inventory)
            self._begin(inventory)
            try:
                self.walk(self.bottoms(), stop=True, before={**self.before, Call.CHECKPOINT: lambda: self._reinspect(targets, tree)})
                self.check_interruption()
                with self.step("verify"):
                    if by != "pool":
                        self._verify()
                    self._refuse_the_dead()
                self.agree(END)
            except GpuckptError as cause:
                self._undo(cause)
            except BaseException as cause:  # noqa: BLE001 - whatever broke, the processes go back first
                self._undo(GpuckptError(f"{type(cause).__name__}: {cause}"))
            self.save(status=Status.SUSPENDED)
            if oom_score_adj is not None:
                sparing.spare(self, oom_score_adj)
            return self._kept(keep_in)

    def resume(
        self,
        targets: Sequence[int],
        *,
        tree: bool = True,
        wished: Mapping[str, str] | None = None,
        to_gpu: str = "",
        wait_s: float = 0.0,
    ) -> Report:
        """Restore the group of *targets*, once every GPU has room, waiting up to *wait_s* for it.

        *wished* maps GPUs (old UUID to new), *to_gpu* names one GPU for a group that was on one.
        """
        with self.holding(targets):
            with self.step("inspect"):
                record, inventory = self.group_to_resume(targets, tree)
            while record is not None:
                self.refuse_stopped(record.members)
                self.deadline.set(sum(g.nbytes or 0 for m in record.members for g in m.gpus), extra_s=wait_s)
                self.check_interruption()
                self.claims.append(self.claim(m.id for m in record.members))
                before, (record, inventory) = record, self.group_to_resume(targets, tree, (record, inventory))
                if record is not None and self.timeless(record) == self.timeless(before):
                    break
                self.release()  # another command was at it while we waited
                self.deadline.check(self.world.now(), "inspect")
            if record is None:
                if not self.join(inventory, targets[0], already=True, part=self.part_in(()), nbytes=0):
                    self.agree(END)  # other hosts have something to do: they need our votes
                room.refuse_running(targets[0], inventory, wished or {}, to_gpu)
                return self._already(inventory)
            part = self.part_in(record.found)
            self.record = record
            self.look()
            self.give_up_the_bereft()
            self.refuse_unanswered()
            self.world.journal.prepare()
            done = all(s in (State.RUNNING, State.GONE) for s in self.now.values())
            nbytes = sum(g.nbytes or 0 for m in record.members for g in m.gpus)
            done = self.join(inventory, targets[0], already=done, part=part, nbytes=nbytes)
            if done and self.barrier.several:
                return self._settle([], dict.fromkeys(self.record.found, State.RUNNING))
            gpu_map = room.gpu_map_for(self, wished or {}, to_gpu)
            if any(self.needs_room(p, State.RUNNING) for p in self.now):
                self.check_interruption()
                room.claim(self, gpu_map, until=min(self.world.now() + wait_s, self.deadline.at))
            self.check_interruption()
            if unread := keeping.load(self, [p for p, state in self.now.items() if state is State.CHECKPOINTED]):
                self.check_interruption()
                raise self._with_report(unread[0].error)
            self.save(
                required=True, status=Status.RESUMING, onto=tuple(sorted({gpu_map[g.uuid] for g in record.gpus if g.uuid in gpu_map}))
            )
            self.world.journal.remove(*self.record.replaces)
            try:
                if short := room.shortages(self, room.need(self, gpu_map), gpu_map):  # somebody was quicker than our disk
                    raise room.no_room(self, short[0])
            except GpuckptError:
                self.save(status=Status.SUSPENDED)
                raise
            return self._walk_on(dict.fromkeys(self.record.found, State.RUNNING), gpu_map)

    def recover(self, record: Record) -> Report | None:
        """Finish or undo the operation that *record* tells of; None if another command did so meanwhile."""
        with self.holding([m.id.pid for m in record.members]):
            self.deadline.set(sum(g.nbytes or 0 for m in record.members for g in m.gpus))
            self.claims.append(self.claim((m.id for m in record.members), until=self.world.now()))
            self.record = next((r for r in self.world.journal.records() if r.id == record.id), None)
            if self.record is None or self.timeless(self.record) != self.timeless(record):
                return None
            self.look()
            self.give_up_the_bereft()
            record = self.record
            goal = plan.recovery_goal(record.status, record.found, self.now, self.along, record.down)
            self.refuse_unanswered()
            there = record.membership
            if there is not None and plan.needs_other_hosts(
                record.status, there.phase, goal, self.now, self.agents, self.along, spans=there.spans
            ):
                self._end(waits_for_others(record, there), goal)
            reachable, blocked = room.for_goal(self, goal, wait_s=0.0)
            failures = self.walk(reachable)
            if blocked is not None and not failures:
                there_is_room = f"when there is room: gpuckpt resume {' '.join(str(p) for p in record.found)}"
                self._end(errors.NotAsFound(blocked.message, hint=there_is_room, gpu=blocked.gpu, step="room"), goal)
            return self._settle(failures, goal)

    def _walk_on(self, goal: Mapping[ProcessId, State], gpu_map: Mapping[str, str]) -> Report:
        """Restore and unlock. From here on there is no way back but forward, whatever breaks."""
        try:
            failures = self.walk(goal, gpu_map=gpu_map)
            self.agree(END, failures)
        except Exception as e:  # noqa: BLE001 - NVML failed, say: the processes and the journal are where they are
            self.look()
            if self.barrier.several and isinstance(e, GpuckptError) and (e.exit_code == 3 or not self.barrier.committed):
                self._end(e, goal)
            self._end(errors.NotAsFound(f"the resume broke off: {type(e).__name__}: {e}", hint="gpuckpt recover"), goal)
        return self._settle(failures, goal)

    # On the way.

    def _keep(self, targets: Sequence[int], tree: bool, keep_in: str, moving: Sequence[GpuProcess]) -> Report:
        """Move images of a group that was suspended before."""
        record, _ = self.group_to_resume(targets, tree)
        assert record is not None
        self.record = record
        self.look()
        self.refuse_unanswered()
        keeping.refuse(self, keep_in, moving)
        self.world.journal.prepare()
        self.save(required=True)
        self.world.journal.remove(*record.replaces)
        return self._kept(keep_in)

    def _kept(self, keep_in: str) -> Report:
        """The group is suspended, and told so: the end of it is where its images lie."""
        error = keeping.store(self, keep_in)
        return self._end(error, {}) if error else self._finish()

    def _run(self, phase: plan.Phase, gpu_map: Mapping[str, str]) -> list[Failure]:
        """As every phase; nothing is restored whose image is not in memory."""
        failed: list[Failure] = []
        if phase.call is Call.RESTORE:
            failed = keeping.load(self, phase.processes)
            phase = plan.Phase(
                phase.call, tuple(p for p in phase.processes if p not in {f.process for f in failed} and self.now[p] is not State.GONE)
            )
        return failed + super()._run(phase, gpu_map)

    def _begin(self, inventory: Inventory) -> None:
        """Write the record that recovery would need, in place of what older ones say."""
        ids = {p.id for p in inventory.processes}
        older = [r for r in self.world.journal.records() if any(m.id in ids for m in r.members)]
        now = {p.id: p.state for p in inventory.processes}
        along = {p.id for p in inventory.processes if p.along}
        belongs = {p: state for r in older for p, state in plan.recovery_goal(r.status, r.found, now, along, r.down).items()}
        recorded = {m.id: m for r in older for m in r.members}
        members = [
            as_member(p, before=recorded.get(p.id), found=belongs.get(p.id), offload=self.method != "driver") for p in inventory.processes
        ]
        on = {g.uuid for m in members for g in m.gpus}
        gpus = {g.uuid: g for g in (*(g for r in older for g in r.gpus), *inventory.gpus)}
        self.record = Record(
            Status.SUSPENDING,
            tuple(members),
            tuple(g for uuid, g in gpus.items() if uuid in on),
            retained=total_retained(r.retained for r in older if any(now.get(m.id) is State.CHECKPOINTED for m in r.members)),
            by=self.world.user,
            controller=self.world.me,
            replaces=tuple(i for r in older for i in (*r.replaces, r.id)),
            membership=self.barrier.membership,
            down=method.down(self.method),
        )
        self.now, self.taken = now, method.taken(self, inventory)
        self.used_before, self.others_before = self.usage()
        for p in inventory.processes:
            for g in () if p.along else p.gpus:
                self.group_before[g.uuid] = self.group_before.get(g.uuid, 0) + (g.nbytes or 0)
        self.save(required=True)
        self.world.journal.remove(*self.record.replaces)

    def _reinspect(self, targets: Sequence[int], tree: bool) -> None:
        """Everything is locked: a CUDA process born since the inspection, or a death, ends the operation."""
        with self.step("re-inspect"):
            try:
                pids = [p.pid for p in self.now if p not in self.along]
                inventory = self.world.inspect([t for t in targets if t in pids] or pids, tree=tree, along=self.beside)
            except (errors.NoSuchProcess, errors.NoCudaState) as e:
                raise errors.Aborted(
                    f"pid {e.pid} ended while its group was being locked; nothing was checkpointed", pid=e.pid, step="re-inspect"
                ) from e
        for p in inventory.processes:
            if p.id not in self.now:
                raise errors.Aborted(
                    f"pid {p.pid} ({p.name}) began to use CUDA while its group was being locked; nothing was checkpointed",
                    hint=f"try again: gpuckpt {self.command} {' '.join(map(str, targets))}",
                    pid=p.pid,
                    step="re-inspect",
                )
        alive = {p.id for p in inventory.processes}
        for process in (p for p in self.now if p not in alive):
            raise errors.Aborted(
                f"pid {process} ended while its group was being locked; nothing was checkpointed", pid=process.pid, step="re-inspect"
            )
        self.refuse_hazards((h for h in inventory.hazards if h.kind == "host-memory"), "re-inspect")  # others may have taken it since

    def _refuse_the_dead(self) -> None:
        """One that ended after its own call, while others were at theirs, say: the group is not what was to be suspended."""
        if gone := next((p for p in self.now if not self.world.alive(p)), None):
            raise errors.Aborted(f"pid {gone} ended while its group was being suspended", pid=gone.pid, step="verify")

    # Ends.

    def _undo(self, cause: GpuckptError) -> NoReturn:
        """Take every process back to where it was found, then raise *cause*, or what is worse."""
        assert self.record is not None
        self.look()
        try:
            self.barrier.back(cause, stuck=any(s not in plan.DEPTH and s is not State.GONE for s in self.now.values()))
        except errors.Held as held:
            self._end(held, self.bottoms())
        self.record = dataclasses.replace(self.record, status=Status.UNDOING)
        self.save()
        goal = {p: s for p, s in self.record.found.items() if self.now.get(p) in plan.DEPTH}
        goal, blocked = room.for_goal(self, goal, wait_s=UNDO_WAIT_S)
        try:
            failures = self.walk(goal)
            self.agree(END, failures)
        except GpuckptError as e:  # what is left of the way back waits for the other hosts
            self.look()
            self._end(e if e.exit_code == 3 else self._not_as_found(e), self.record.found)
        worse = self._worst([f for f in failures if self.now[f.process] is not State.GONE])
        if worse is None and blocked is not None:
            worse = errors.NotAsFound(
                f"{cause.message}; and the way back is blocked: {blocked.message}. What was checkpointed stays suspended, intact",
                hint=f"when there is room: gpuckpt resume {' '.join(str(p) for p in self.record.found)}",
                pid=cause.pid,
                step=cause.step,
            )
        left = [p for p, state in self.record.found.items() if self.now[p] not in (state, State.GONE)]
        if worse is None and cause.exit_code != 3 and left:
            worse = errors.InFlight(
                f"{cause.message}; and {self.world.describe(left[0].pid)} could not be taken back: "
                f"the driver says that it is {self.now[left[0]]}",
                hint="gpuckpt recover",
                pid=left[0].pid,
                step=cause.step,
            )
        if cause.exit_code == 3 and isinstance(worse, errors.InFlight):  # who still does what it did, or waits, is not what happened
            cause.add_note(f"and: {worse.message}")
            worse = None
        if worse is not None and worse is not cause:
            worse.add_note(f"after: {cause.message}")
        self._end(worse or cause, self.record.found)

    def _settle(self, failures: list[Failure], goal: Mapping[ProcessId, State]) -> Report:
        """After a resume or a recovery: done, or the first failure. A process that ended is no failure while others are left."""
        assert self.record is not None
        if any(s is not State.GONE for s in self.now.values()):
            self.warnings += [f.error.message for f in failures if self.now[f.process] is State.GONE]
            failures = [f for f in failures if self.now[f.process] is not State.GONE]
        if worst := self._worst(failures):
            self._end(worst, goal)
        lost = [m for m in self.record.members if m.lost and self.now.get(m.id, State.GONE) is not State.GONE]
        if lost:
            self._end(
                errors.Lost(lost[0].lost, hint=f"end it and start it again: kill -9 {lost[0].id}", pid=lost[0].id.pid, step="restore"), goal
            )
        self._write_down(goal)
        return self._finish()

    def _worst(self, failures: Sequence[Failure]) -> GpuckptError | None:
        """The failure to report: each leaves a process where it should not be, unless that one ended."""
        if not failures:
            return None
        worst = next((f for f in failures if isinstance(f.error, errors.Lost)), failures[0])
        if worst.error.exit_code == 3 or self.now[worst.process] is State.GONE:
            return worst.error
        return self._not_as_found(worst.error)

    @staticmethod
    def _not_as_found(error: GpuckptError) -> GpuckptError:
        return errors.NotAsFound(error.message, hint=error.hint or "gpuckpt recover", pid=error.pid, step=error.step)

    def _write_down(self, goal: Mapping[ProcessId, State], *, held: bool = False) -> None:
        """Leave the journal telling the truth: who is suspended or lost, or what is unfinished, and nothing of processes that run, but
        that they are *held*: other hosts still need this one's part to go on."""
        assert self.record is not None
        keeping.tidy(self)
        sparing.tidy(self)
        down = [m for m in self.record.members if m.lost or self.is_down(m.id) or self.now.get(m.id) is State.GONE]
        unfinished = any(self.now.get(p) not in (s, State.GONE) for p, s in goal.items())
        if unfinished and (self.command == "suspend" or len(down) < len(self.record.members)):
            return  # the record says so
        if any(self.now.get(m.id, State.GONE) is not State.GONE for m in down):
            members = self.record.members
            self.save(status=Status.SUSPENDED, members=tuple(down))
            self.record = dataclasses.replace(self.record, members=members)  # the report is about all of them
        elif not held:
            self.world.journal.remove(*self.record.replaces, self.record.id)

    def _end(self, error: GpuckptError, goal: Mapping[ProcessId, State]) -> NoReturn:
        """Write down how things are against *goal*, attach the report, raise *error*."""
        unfinished_elsewhere = self.command == "resume" and self.barrier.several and self.barrier.committed
        self._write_down(goal, held=isinstance(error, errors.Held) or unfinished_elsewhere)
        raise self._with_report(error)
