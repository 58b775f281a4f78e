"""What an operation would do, for ``--dry-run``: the plan, what it needs and what is there. Touches nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from gpuckpt import keeping, method, plan, room
from gpuckpt.agent.protocol import LOOK_S
from gpuckpt.errors import GpuckptError
from gpuckpt.group import Group, as_found, as_member
from gpuckpt.model import Call, GpuReport, ProcessReport, Report, State
from gpuckpt.words import HELD, word


class Preview(Group):
    """Has the same commands as :class:`gpuckpt.operation.Operation`, and only looks."""

    def look_s(self) -> float:
        """Nobody types it to wait."""
        return LOOK_S if self.command == "suspend" else 0.0

    def suspend(
        self,
        targets: Sequence[int],
        *,
        tree: bool = True,
        along: Collection[int] = (),
        by: str = "auto",
        keep_in: str = keeping.RAM,
        oom_score_adj: int | None = None,  # noqa: ARG002 - as the operation has it
    ) -> Report:
        """What a suspend would do; ``details["plan"]`` has it. Touches nothing."""
        self.method, self.beside = by, frozenset(along)
        inventory = self.inspect(targets, tree)
        if wider := self.wider({p.id for p in inventory.processes}, targets):
            self.beside, targets = wider
            inventory = self.inspect(targets, tree)
        self.deadline.set(sum(p.nbytes for p in inventory.processes))
        now = {p.id: p.state for p in inventory.processes}
        down = method.suspended(self, inventory)
        already = len(down) == len(now) and not self.left_in_the_middle(inventory)
        moving = [p for p in inventory.processes if not p.along and keep_in != keeping.RAM]
        try:
            self.refuse_the_lost(inventory)
            if already:
                method.refuse_on_top(self, inventory, keep_in)
                moving = keeping.movable(self, keep_in, inventory.processes)
            else:
                self.part_in(now)
                self.refuse(inventory)
                method.refuse(self, inventory, keep_in)
            if moving:
                keeping.refuse(self, keep_in, moving)
            refused = None
        except GpuckptError as e:
            refused = e.as_dict()
        self.now = now
        beside = {p.id for p in inventory.processes if p.along}
        available = inventory.host_room.available_bytes if inventory.host_room else None
        agents = {p.id for p in inventory.processes if p.agent}
        movable = {p.id for p in inventory.processes if as_member(p, offload=by != "driver").movable}
        goal = {p: down.get(p, plan.bottom(p, beside, method.down(by))) for p in now}
        self.taken = method.taken(self, inventory)
        to_disk = [plan.Phase(call, tuple(p.id for p in moving)) for call in (Call.STORE, Call.DROP) if moving]
        return self._previewed(
            [*plan.phases(now, goal, agents, movable), *to_disk] if not refused or by != "pool" else (),
            as_found(inventory, down),
            already=already and not moving and not refused,
            refused=refused,
            movable={str(p.pid): dataclasses.asdict(p.movable) for p in inventory.processes if p.movable},
            timeout_seconds=self.deadline.limit_s,
            host_bytes_needed=inventory.needed_host_bytes,
            host_bytes_available=available,
            host_limit=inventory.host_room.limit if inventory.host_room else "",
        )

    def resume(
        self,
        targets: Sequence[int],
        *,
        tree: bool = True,
        wished: Mapping[str, str] | None = None,
        to_gpu: str = "",
        wait_s: float = 0.0,  # noqa: ARG002 - as the operation has it
    ) -> Report:
        """What a resume would do, and whether there is room for it now. Touches nothing."""
        record, inventory = self.group_to_resume(targets, tree)
        if record is None:
            room.refuse_running(targets[0], inventory, wished or {}, to_gpu)
            return self._previewed((), as_found(inventory), already=True, refused=None, gpu_bytes_needed={}, gpu_bytes_free={}, gpu_map={})
        self.record = record
        self.look()
        gpu_map = room.gpu_map_for(self, wished or {}, to_gpu)
        need = room.need(self, gpu_map)
        try:
            self.part_in(record.found)
            self.give_up_the_bereft()
            self.refuse_unanswered()
            if short := room.shortages(self, need, gpu_map):
                raise room.no_room(self, short[0])
            refused = None
        except GpuckptError as e:
            refused = e.as_dict()
        record = self.record
        held = self.world.held()
        kept = {
            m.id: keeping.Kept.of(self, m.id, m, self.world.image_bytes(m.id)) if self.now[m.id] is State.CHECKPOINTED else keeping.NOWHERE
            for m in record.members
        }
        away = [p for p, image in kept.items() if image.disk_bytes]
        rows = [
            ProcessReport(
                m.id.pid,
                m.name,
                "lost" if m.lost else HELD if m.along and self.is_down(m.id) else word(self.now[m.id], by_pool=self.is_down(m.id)),
                tuple(GpuReport(g.uuid, g.nbytes, held.get(m.id.pid, {}).get(g.uuid, 0)) for g in m.gpus),
                kept[m.id].host_bytes,
                disk_bytes=kept[m.id].disk_bytes,
                image=kept[m.id].image,
            )
            for m in record.members
            if self.now[m.id] is not State.GONE
        ]
        from_disk = [plan.Phase(Call.LOAD, tuple(away))] if away else []
        return self._previewed(
            [*from_disk, *plan.phases(self.now, dict.fromkeys(record.found, State.RUNNING), self.agents, self.movable)],
            rows,
            refused=refused,
            gpu_bytes_needed=need,
            gpu_bytes_free={g.uuid: g.free_bytes for g in self.world.gpus()},
            gpu_map=gpu_map,
            host_bytes_needed=sum(kept[p].disk_bytes for p in away),
        )

    def _previewed(self, phases: Sequence[plan.Phase], rows: Sequence[ProcessReport], *, already: bool = False, **more: object) -> Report:
        steps = [{"name": str(p.call), "pids": [i.pid for i in p.processes]} for p in phases]
        way = {"method": self.taken} if self.taken else {}
        if already:
            self.hazards = ()  # they are of a suspend, and there would be none
        return self.report(rows, already=already, details={"dry_run": True, "plan": {"steps": steps, **more}, **way})
