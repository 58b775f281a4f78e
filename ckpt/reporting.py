"""What a command answers with: the group as it is now, each process by name, state and bytes, and why if it failed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from gpuckpt import keeping
from gpuckpt.errors import GpuckptError
from gpuckpt.group import Group, as_found
from gpuckpt.journal import left_key
from gpuckpt.method import suspended
from gpuckpt.model import GpuReport, Inventory, ProcessReport, Report, State, Status
from gpuckpt.words import HELD, word

#: Bytes that a GPU may differ by NVML's own rounding before they count as retained.
RETAINED_LEAST_BYTES = 64 << 20
#: From how many suspends in a row on, each of which left so many bytes more than the one before, it is told.
GROWING_LEAST, GROWING_LEAST_BYTES = 4, 1 << 20


def growing(left_bytes: Sequence[int]) -> str:
    """Words for what the last of several suspends left more and more of, "" where they did not. *left_bytes*: of each, oldest first."""
    run = 1
    while run < len(left_bytes) and left_bytes[-run] - left_bytes[-run - 1] >= GROWING_LEAST_BYTES:
        run += 1
    if run < GROWING_LEAST:
        return ""
    first, last = left_bytes[-run] / 2**20, left_bytes[-1] / 2**20
    return f"{first:.0f} MiB, and {last:.0f} MiB {run - 1} suspends later: {(last - first) / (run - 1):.0f} MiB more each time"


#: What no call tells of, and NVML counts.
REMAINDER = "context-and-modules"


def stays(told: Sequence[Mapping[str, Any]], held_bytes: int) -> tuple[Mapping[str, Any], ...]:
    """What is *told* of a process by class, and in a class of its own what is left of the *held_bytes* that NVML counts."""
    left = held_bytes - sum(t["bytes"] for t in told)
    why = "what NVML counts beyond these: the context, modules, graph executables, and what was allocated past torch and every pool"
    return (*told, *([{"class": REMAINDER, "bytes": left, "why": why}] if left > 0 else []))


class Reporting(Group):
    """The end of a command: what stayed on the GPUs, its report, and a line in the audit log."""

    def _verify(self) -> None:
        """NVML must agree that the bytes are gone. What stayed is told, and counted at resume."""
        assert self.record is not None
        until = self.world.now() + 1.0
        while True:
            used, others = self.usage()
            retained = {}
            for uuid, held in self.group_before.items():
                if uuid in used and uuid in self.used_before:
                    drift = others.get(uuid, 0) - self.others_before.get(uuid, 0)
                    left = used[uuid] - (self.used_before[uuid] - held) - drift
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

    def _with_report(self, error: GpuckptError) -> GpuckptError:
        error.report = self._report(ok=False, error=error)
        self._close(error.code)
        return error

    def _already(self, inventory: Inventory) -> Report:
        self.now = self.now or {p.id: p.state for p in inventory.processes}
        known = {m.id: m for r in self.world.journal.records() for m in r.members}
        down = suspended(self, inventory)
        rows = []
        for p, row in zip(inventory.processes, as_found(inventory, down), strict=True):
            kept = keeping.Kept.of(self, p.id, known.get(p.id), row.host_bytes) if p.state is State.CHECKPOINTED else keeping.NOWHERE
            moved = known[p.id].moved if p.id in down and p.id in known else None
            host_bytes = kept.host_bytes + (moved or {}).get("kept_bytes", 0)
            by_pool = sum(g.bytes_after or 0 for g in row.gpus) if p.id in down and p.state is State.DISARMED else 0
            row = dataclasses.replace(row, host_bytes=host_bytes, disk_bytes=kept.disk_bytes, image=kept.image)  # noqa: PLW2901
            why = stays(known[p.id].stays, by_pool) if by_pool and p.id in known else ()
            rows.append(dataclasses.replace(row, moved=moved, retained_bytes=by_pool, stays=why))
        report = dataclasses.replace(self.report(rows, already=True), hazards=())  # they are of a suspend, and there is none
        self._close("already")
        return report

    def _finish(self) -> Report:
        """What a suspend left on the GPUs is compared with what earlier ones left, of the same process."""
        assert self.record is not None
        report = self._report(ok=True)
        ids = {m.id.pid: m.id for m in self.record.members}
        left = {ids[row.pid]: row.retained_bytes for row in report.processes if row.retained_bytes}
        grown = [
            f"pid {p} leaves more and more on its GPUs when it is suspended: {words}"
            for p, nbytes in left.items()
            if (words := growing([*self.world.journal.left_bytes(p), nbytes]))
        ]
        self._close("done", **({"left_bytes": {left_key(p): nbytes for p, nbytes in left.items()}} if left else {}))
        return dataclasses.replace(report, warnings=(*report.warnings, *grown))

    def _report(self, *, ok: bool, error: GpuckptError | None = None) -> Report:
        assert self.record is not None
        held = self._held()
        rows, retained = [], dict(self.record.retained)
        for m in self.record.members:
            state = self.now.get(m.id, State.GONE)
            checkpointed, down = state is State.CHECKPOINTED, self.is_down(m.id) and self.record.status is Status.SUSPENDED
            called = "lost" if m.lost and state is not State.GONE else HELD if m.along and down else word(state, by_pool=down)
            here = (held or {}).get(m.id.pid, {}) if state is not State.GONE else {}
            gpus = {g.uuid: GpuReport(g.uuid, g.nbytes, 0 if held is not None or state is State.GONE else None) for g in m.gpus}
            for uuid, nbytes in here.items():
                before = nbytes if m.along else gpus[uuid].bytes_before if uuid in gpus else 0
                gpus[uuid] = GpuReport(uuid, before, nbytes)
            image = keeping.Kept.of(self, m.id, m, self.world.image_bytes(m.id)) if checkpointed else keeping.NOWHERE
            kept = sum(retained.pop(g.uuid, 0) for g in m.gpus) if checkpointed else 0
            by_pool = down and not checkpointed and not m.along
            kept = sum(nbytes or 0 for nbytes in here.values()) if by_pool else kept
            why = stays(m.stays, kept) if by_pool else ()
            moved = m.moved if checkpointed or down else None
            in_host = image.host_bytes + (moved or {}).get("kept_bytes", 0)
            where = (in_host, kept, m.lost or m.waiting, image.disk_bytes, image.image, moved, why)
            rows.append(ProcessReport(m.id.pid, m.name, called, tuple(gpus.values()), *where))
        details: dict[str, Any] = {"method": self.taken} if self.taken else {}
        if self.record.membership:
            details["_back"] = self.record.membership.resume_command(rows[0].pid)
        return self.report(rows, ok=ok, error=error.as_dict() if error else None, details=details)

    def _held(self) -> Mapping[int, Mapping[str, int | None]] | None:
        """None where NVML does not tell: how the processes were left is told all the same."""
        try:
            return self.world.held()
        except GpuckptError as e:
            self.warnings.append(f"what is on the GPUs now is not known: {e.message}")
            return None

    def _close(self, outcome: str, **more: Any) -> None:
        self.audit([p.pid for p in self.now], outcome, states={str(p): s for p, s in self.now.items()}, **more)
