"""The group of an operation: which processes it is about, and whether it may begin. Looks and refuses, changes nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from gpuckpt import errors, plan
from gpuckpt.agent.protocol import FOUND_S
from gpuckpt.barrier import Part
from gpuckpt.errors import GpuckptError
from gpuckpt.inspect import ranks
from gpuckpt.journal import Member, Record
from gpuckpt.model import Call, GpuProcess, GpuReport, Hazard, Inventory, Membership, ProcessId, ProcessReport, State, Status
from gpuckpt.walk import LOCK_GRACE_S, Walk
from gpuckpt.words import HELD, let_go, word
from gpuckpt.world import Claim

ERRORS_OF_HAZARDS: dict[str, type[GpuckptError]] = {
    "stopped": errors.Stopped,
    "possible-import": errors.PossibleImport,
    "nccl-communicator": errors.NcclCommunicator,
    "rdma": errors.Rdma,
    "mps": errors.Mps,
    "mig": errors.Mig,
    "host-memory": errors.HostMemory,
}

#: Hazards that are not the driver's alone.
OF_POOLS_TOO = frozenset({"stopped", "host-memory"})


class Group(Walk):
    """What an operation does before it acts. ``beside``: pids that are taken along, which goes before being part of the targets' tree."""

    beside: frozenset[int] = frozenset()

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
                raise _denied(p.pid, f"pid {p.pid} ({p.name})")
        try:
            self.refuse_hazards(h for h in inventory.hazards if self.method != "pool" or h.kind in OF_POOLS_TOO)
        except errors.Refused as e:
            if (
                self.method != "pool"
                and not isinstance(e, (errors.Stopped, errors.HostMemory))
                and all(p.movable for p in inventory.processes)
            ):
                e.hint += f"; or let its pool alone leave: gpuckpt suspend {inventory.processes[0].pid} --method pool"
            raise
        for p in inventory.processes:
            if p.state not in plan.DEPTH:
                raise errors.Busy(
                    _unanswered(f"pid {p.pid} ({p.name})", p.state),
                    hint="try again when it has ended; gpuckpt status tells",
                    pid=p.pid,
                )

    def refuse_the_lost(self, inventory: Inventory) -> None:
        """What is known to be lost is not suspended once more: what the driver would take down it could not bring back."""
        ids = {p.id for p in inventory.processes}
        for m in (m for r in self.world.journal.records() for m in r.members):
            if m.id in ids and m.lost:
                raise errors.Lost(m.lost, hint=f"end it and start it again: kill -9 {m.id}", pid=m.id.pid, step="inspect")

    def refuse_hazards(self, hazards: Iterable[Hazard], step: str = "inspect") -> None:
        for hazard in hazards:
            if not (hazard.acceptable and hazard.kind in self.accept):
                raise ERRORS_OF_HAZARDS[hazard.kind](hazard.message, hint=hazard.hint, pid=hazard.pid, step=step)

    @property
    def before(self) -> dict[Call, Callable[[], None]]:
        """What is to be done just before such a call of a suspend."""
        return {Call.COMMS: self._refuse_without_room, Call.LOCK: self._note_lock}

    def _refuse_without_room(self) -> None:
        """There was room for what NCCL keeps in host memory when it was planned; others may have taken it since."""
        if not self.keep_comms:
            self.refuse_hazards(self.world.short_for_comms(self.agents), "comms")

    def _note_lock(self) -> None:
        """Who is born meanwhile under the number of a member that ends may be locked in its place; its caller undoes that, unless it is
        killed. Then recovery must know when this was."""
        begun = self.world.uptime_s()
        self.save(locking=(begun, begun + max(0.0, self.deadline.at - self.world.now()) + LOCK_GRACE_S))

    def refuse_stopped(self, members: Iterable[Member]) -> None:
        for m in members:
            if halted := self.world.halted(m.id):
                words = f"{self.world.describe(m.id.pid)} is {halted}; every driver call on it would hang"
                raise errors.Stopped(words, hint=let_go(halted, [m.id.pid]), pid=m.id.pid)

    def refuse_unanswered(self) -> None:
        """Before a resume acts: every process must answer, and none may be stopped."""
        assert self.record is not None
        self.refuse_stopped(m for m in self.record.members if self.now[m.id] is State.BLOCKED)
        for m in self.record.members:
            if self.now[m.id] is State.FAILED and not m.lost:
                self.record = self.record.with_member(m.id, lost="the driver says that its GPU state failed")
            elif m.id in self.unheard:
                raise errors.InFlight(
                    f"the agent of {self.world.describe(m.id.pid)} does not answer, and its program stands still until it is asked to "
                    "go on; what was suspended with it waits as well",
                    hint=f"gpuckpt recover, in {FOUND_S:g} s once more: a socket that was removed is made anew; if it never answers, "
                    f"end it: kill -9 {m.id}",
                    pid=m.id.pid,
                )
            elif self.now[m.id] is State.DENIED and not m.lost:
                raise _denied(m.id.pid, self.world.describe(m.id.pid))
            elif self.now[m.id] not in plan.DEPTH and self.now[m.id] is not State.GONE and not m.lost:
                raise errors.InFlight(
                    _unanswered(self.world.describe(m.id.pid), self.now[m.id], m.waiting),
                    hint="when it has ended: gpuckpt recover",
                    pid=m.id.pid,
                )

    def give_up_the_bereft(self) -> None:
        """Mark as lost whoever shares a communicator with a process that ended: it could only wait for it, inside NCCL and on its GPU."""
        assert self.record is not None
        gone = [m for m in self.record.members if self.now[m.id] is State.GONE]
        if not gone or self.barrier.several or self.record.down is not State.CHECKPOINTED:  # a pool may have left communicators as they are
            return
        alive = [m for m in self.record.members if m.agent and self.now[m.id] in plan.DEPTH and self.now[m.id] is not State.RUNNING]
        bereft = ranks.bereft(self.world.ranks(m.id for m in alive))
        for m in alive:
            if m.id.pid in bereft and not m.lost:
                ended = ", ".join(f"pid {g.id} ({g.name})" for g in gone)
                why = f"pid {m.id} ({m.name}) cannot go on: {bereft[m.id.pid]} while it was suspended ({ended}); it stays as it is"
                self.record = self.record.with_member(m.id, lost=why)

    def inspect(self, targets: Sequence[int], tree: bool) -> Inventory:
        with self.step("inspect"):
            inventory = self.inspected(targets, tree=tree)
        self.hazards = inventory.hazards
        return inventory

    def look_s(self) -> float:
        """How long an inspection waits for programs to look at their communicators: one that is busy for so long does not come to its safe
        point either, for which the other half of the time is left."""
        return max(0.0, self.deadline.at - self.world.now()) / 2 if self.command == "suspend" else 0.0

    def inspected(self, targets: Sequence[int], *, tree: bool = True) -> Inventory:
        inventory = self.world.inspect(targets, tree=tree, along=self.beside, method=self.method, look_s=self.look_s())
        self.warnings += [w for w in inventory.warnings if w not in self.warnings]
        if self.barrier.several:  # then it is looked at over all hosts
            return inventory
        return inventory._replace(hazards=(*inventory.hazards, *ranks.hazards({"": inventory.ranks}, inventory.outside)))

    def claim_group(self, inventory: Inventory, targets: Sequence[int], tree: bool) -> tuple[Inventory, Sequence[int]]:
        """Hold the group, and look at it again if it changed before we held it. What was suspended together stays together."""
        while True:
            self.check_interruption()
            self.claims.append(self.claim(p.id for p in inventory.processes))
            states = self.world.states(p.id for p in inventory.processes)
            wider = self.wider(states, targets)
            if wider is None and all(states[p.id] is p.state for p in inventory.processes):
                return inventory, targets
            self.release()
            self.deadline.check(self.world.now(), "inspect")
            self.beside, targets = wider or (self.beside, targets)
            inventory = self.inspect(targets, tree)

    def wider(self, group: Collection[ProcessId], targets: Sequence[int]) -> tuple[frozenset[int], Sequence[int]] | None:
        """Who is taken along and the targets, with all that was suspended together with one of *group*; None if that has all of it."""
        together = self._suspended_with(group)
        held_for = any(not m.along for m in together)  # else whom it was taken along with has ended: it is as any other
        beside = self.beside | {m.id.pid for m in together if m.along and held_for}
        if beside == self.beside and all(m.id in group for m in together):
            return None
        return beside, [t for t in dict.fromkeys((*targets, *(m.id.pid for m in together))) if t not in beside]

    def _suspended_with(self, group: Collection[ProcessId]) -> list[Member]:
        """Living members of the records that one of *group* is in. Raises if such a record was left in the middle, and has others too."""
        together: list[Member] = []
        for record in self.world.journal.records():
            if any(m.id in group for m in record.members):
                alive = [m for m in record.members if self.world.alive(m.id)]
                outside = [m.id.pid for m in alive if m.id not in group]
                if outside and record.status is not Status.SUSPENDED:
                    raise errors.Refused(
                        f"pid {outside[0]} is part of the same group, which was left in the middle ({record.status}); nothing was touched",
                        hint="gpuckpt recover",
                        pid=outside[0],
                    )
                together += alive
        return together

    def part_in(self, processes: Collection[ProcessId]) -> Part:
        """What the journal says of *processes* and of groups that other hosts have a part in. Raises where these are not at hand."""
        shared = [r for r in self.world.journal.records() if r.membership]
        part = Part(journal=tuple(r.membership.group for r in shared if r.membership))
        for record in shared:
            member = next((m for m in record.members if m.id in processes), None)
            if member is not None and record.membership is not None:
                self.barrier.check(record.membership, member.id.pid)
                committed = record.membership.phase == "committed" and record.status is not Status.UNDOING
                return part._replace(group=record.membership.group, committed=committed)
        return part

    def join(self, inventory: Inventory, pid: int, *, already: bool, part: Part, nbytes: int) -> bool:
        """Meet the other hosts, if there are any. True if nothing is left to do on any."""
        if not self.barrier.several:
            return already
        patience_s = self.deadline.patience_s(nbytes)
        with self.step("meet"):
            return self.barrier.join(
                inventory, pid, already=already, part=part, deadline=self.deadline.at, patience_s=patience_s, note=self._note
            )

    def _note(self, membership: Membership) -> None:
        """Write down how far the operation of all hosts has come. From the vote on nothing here goes back by itself."""
        if self.command == "suspend":
            self.save(required=membership.phase == "voted", membership=membership)
            for guard in self.guards.values():
                guard.keep()
            self.guards.clear()

    def claim(self, processes: Iterable[ProcessId], until: float | None = None) -> Claim:
        return self.world.claim(sorted(processes), self.deadline.at if until is None else until)

    def group_to_resume(
        self, targets: Sequence[int], tree: bool, held: tuple[Record, Inventory] | None = None
    ) -> tuple[Record | None, Inventory]:
        """The journal's group where it knows one, else what the driver says of the targets' group; and what an inspection showed.

        Without *tree* it is the targets alone, and refused where they were suspended together with others. *held*: the answer of before,
        whose members we hold by now: what the journal says of these counts, and the targets are inspected anew only where the driver says
        otherwise of the rest.
        """
        records = [r for r in self.world.journal.records() if any(self.world.alive(m.id) for m in r.members)]
        named = [m for r in records for m in r.members if m.id.pid in targets and not self._number_taken(m)]
        known = [r for r in records if any(m in named for m in r.members)]
        rest = [t for t in targets if not any(m.id.pid == t for m in named)]
        inventory = Inventory((), self.world.gpus())
        found: dict[ProcessId, Member] = {}
        if rest:
            inventory = held[1] if held and self._as_seen(*held, records) else self.inspected(rest, tree=tree)
            for p in inventory.processes:
                if p.state in plan.DEPTH and p.state is not State.RUNNING:
                    found[p.id] = as_member(p)
                elif p.state is State.FAILED:
                    raise errors.Lost(
                        f"pid {p.pid} ({p.name}): the driver says that its GPU state failed; no restore can succeed",
                        hint=f"end it: kill {p.pid}",
                        pid=p.pid,
                    )
                elif p.state is not State.RUNNING:  # the other hazards are a suspend's
                    self.refuse(inventory._replace(hazards=tuple(h for h in inventory.hazards if h.kind == "stopped")))
            known += [r for r in records if r not in known and any(m.id in found for m in r.members)]
        members = {**found, **{m.id: m for r in known for m in r.members}}
        if not members:
            return None, inventory
        others = [p for p in members if p.pid not in targets and self.world.alive(p)]
        if others and not tree:
            raise errors.Refused(
                f"pid {targets[0]} was suspended together with pid {others[0]}, and is resumed with it; nothing was touched",
                hint=f"gpuckpt resume {targets[0]}",
                pid=others[0].pid,
            )
        first = known[0] if known else Record(Status.SUSPENDED, (), inventory.gpus, by="another tool")
        gpus = {g.uuid: g for r in (first, *known) for g in r.gpus}
        retained = total_retained(r.retained for r in known)
        return dataclasses.replace(
            first,
            members=tuple(members[p] for p in sorted(members)),
            gpus=tuple(gpus.values()),
            retained=retained,
            membership=next((r.membership for r in known if r.membership), None),
            replaces=tuple(dict.fromkeys(i for r in known for i in (*r.replaces, r.id) if i != first.id)),
        ), inventory

    def _as_seen(self, held: Record, inventory: Inventory, records: Iterable[Record]) -> bool:
        """Whether *inventory* still tells what another inspection would: of each member the journal or the driver says the same."""
        members, seen = {m.id for m in held.members}, {p.id: p.state for p in inventory.processes}
        known = members & {m.id for r in records for m in r.members}
        rest = {p: state for p, state in seen.items() if p not in known}
        return members <= known | rest.keys() and self.world.states(rest) == rest

    def _number_taken(self, member: Member) -> bool:
        """Whether another CUDA process has the pid of *member*, who ended."""
        if self.world.alive(member.id):
            return False
        try:
            return any(p.pid == member.id.pid for p in self.world.inspect([member.id.pid], tree=False).processes)
        except (errors.NoSuchProcess, errors.NoCudaState, errors.Usage):
            return False

    @staticmethod
    def timeless(record: Record) -> object:
        return (record.status, record.members, record.replaces)

    def left_in_the_middle(self, inventory: Inventory) -> bool:
        """Whether a record says of one of these that it is on its way, though nobody is at work on it."""
        ids = {p.id for p in inventory.processes}
        return any(r.status is not Status.SUSPENDED and any(m.id in ids for m in r.members) for r in self.world.journal.records())


def _denied(pid: int, who: str) -> GpuckptError:
    return errors.PermissionDenied(
        f"the driver does not let us touch {who}; nothing was touched",
        hint="run it as its owner or as root, with CAP_SYS_PTRACE in a container (gpuckpt doctor explains)",
        pid=pid,
    )


def _unanswered(who: str, state: State, waiting: str = "") -> str:
    if state is State.UNKNOWN:
        return f"the driver says of {who} what this gpuckpt has no word for: it may be newer"
    return f"the driver does not answer for {who} (state {state}{', ' if waiting else ''}{waiting}): a call on it is under way"


def total_retained(retained: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Retained bytes by GPU, of several records together."""
    total: dict[str, int] = {}
    for record in retained:
        for uuid, nbytes in record.items():
            total[uuid] = total.get(uuid, 0) + nbytes
    return total


def as_member(p: GpuProcess, *, before: Member | None = None, found: State | None = None, offload: bool = False) -> Member:
    """*before*: what an older record says of it; *found*: where it belongs by that.

    *offload*: what its own allocator can move, it shall. One that has moved it already has to bring it back in any case.
    What one that is taken along has on its GPUs stays there, and is no part of what a resume needs.
    """
    movable = p.offloaded or (offload and p.movable is not None and not p.along)
    held = () if p.along else p.gpus
    member = Member(p.id, p.name, p.uid, found or plan.belongs(p.state), held, agent=p.agent, along=p.along, movable=movable)
    if before is None:
        return member
    away = p.state not in (State.RUNNING, State.QUIESCED)
    if not p.along:
        held = before.gpus if p.offloaded and before.gpus else p.gpus or before.gpus
    member = dataclasses.replace(member, gpus=held, lost=before.lost, image=before.image, oom_score_adj=before.oom_score_adj)
    return dataclasses.replace(member, movable=movable or before.movable, moved=before.moved, stays=before.stays) if away else member


def as_found(inventory: Inventory, by_pool: Collection[ProcessId] = ()) -> list[ProcessReport]:
    """The processes of *inventory* as rows of a report in which nothing has moved. *by_pool*: those that are suspended so."""
    return [
        ProcessReport(
            p.pid,
            p.name,
            HELD if p.along and p.state is State.DISARMED else word(p.state, by_pool=p.id in by_pool),
            tuple(GpuReport(g.uuid, g.nbytes, g.nbytes) for g in p.gpus),
            p.host_bytes,
        )
        for p in inventory.processes
    ]


def waits_for_others(record: Record, membership: Membership) -> GpuckptError:
    """Why one host cannot take *record* out of the middle alone."""
    names = ", ".join(f"pid {m.id} ({m.name})" for m in record.members)
    return errors.Held(
        f"{names}: left in the middle of an operation of {len(membership.hosts)} hosts ({', '.join(membership.hosts)}); "
        "they come back together with the processes there",
        hint=f"on this host, and likewise on each other one: {membership.resume_command(record.members[0].id.pid)}",
        pid=record.members[0].id.pid,
    )
