"""What an operation would do, for ``--dry-run``: the plan, what it needs and what is there. Touches nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from gpuckpt import keeping, method, plan, room
from gpuckpt.agent.protocol import LOOK_S
from gpuckpt.errors import GpuckptError
from gpuckpt.group import Group, as_found, as_member
from gpuckpt.model import GpuReport, ProcessReport, Report, State
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
        self.deadline.set(sum(p.nbytes for p in inventory.processes))
        now = {p.id: p.state for p in inventory.processes}
        down = method.suspended(self, inventory)
        already = len(down) == len(now) and not self.left_in_the_middle(inventory)
        try:
            if already:
                method.refuse_on_top(self, inventory, keep_in)
            else:
                self.refuse(inventory)
                method.refuse(self, inventory, keep_in)
            keeping.refuse(self, keep_in, [p for p in inventory.processes if not p.along])
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
        return self._previewed(
            plan.phases(now, goal, agents, movable) if not refused or by != "pool" else (),
            as_found(inventory, down),
            already=already and keep_in == keeping.RAM and not refused,
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
        short = room.shortages(self, need, gpu_map)
        held = self.world.held()
        rows = [
            ProcessReport(
                m.id.pid,
                m.name,
                "lost" if m.lost else HELD if m.along and self.is_down(m.id) else word(self.now[m.id], by_pool=self.is_down(m.id)),
                tuple(GpuReport(g.uuid, g.nbytes, held.get(m.id.pid, {}).get(g.uuid, 0)) for g in m.gpus),
                self.world.image_bytes(m.id) if self.now[m.id] is State.CHECKPOINTED else 0,
            )
            for m in record.members
            if self.now[m.id] is not State.GONE
        ]
        return self._previewed(
            plan.phases(self.now, dict.fromkeys(record.found, State.RUNNING), self.agents, self.movable),
            rows,
            refused=room.no_room(self, short[0]).as_dict() if short else None,
            gpu_bytes_needed=need,
            gpu_bytes_free={g.uuid: g.free_bytes for g in self.world.gpus()},
            gpu_map=gpu_map,
        )

    def _previewed(self, phases: Sequence[plan.Phase], rows: Sequence[ProcessReport], *, already: bool = False, **more: object) -> Report:
        steps = [{"name": str(p.call), "pids": [i.pid for i in p.processes]} for p in phases]
        way = {"method": self.taken} if self.taken else {}
        if already:
            self.hazards = ()  # they are of a suspend, and there would be none
        return self.report(rows, already=already, details={"dry_run": True, "plan": {"steps": steps, **more}, **way})
