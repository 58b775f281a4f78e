"""Whether the images of a group fit into host memory: of the machine, of each one's cgroups, and below what Ray bears."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gpuckpt import plan
from gpuckpt.image import reserve
from gpuckpt.inspect import host
from gpuckpt.model import GpuProcess, Hazard, HostRoom, State


def for_images(members: Sequence[GpuProcess], method: str, root: Path) -> tuple[int, HostRoom | None, list[Hazard]]:
    """Host bytes that a suspend needs, the tightest room there is, and a hazard for each limit that it would break. What the library keeps
    ready in a process is needed, and is there."""
    going = [p for p in members if p.state is not State.CHECKPOINTED and not (p.state is State.DISARMED and method == "pool")]
    needed = sum(plan.host_need_bytes(p, method) for p in going)
    if not going:
        return 0, None, []
    rooms: dict[str, tuple[HostRoom, int]] = {}
    extra = {p.id: max(0, plan.host_need_bytes(p, method) - reserve.ready_bytes(p.id)) for p in going}
    for p in going:
        for room in host.host_rooms(p.pid, root):
            known = rooms.get(room.limit)
            rooms[room.limit] = (room, (known[1] if known else 0) + extra[p.id])
    short = [
        Hazard(
            "host-memory",
            f"the image needs {need / 2**30:.1f} GiB of host memory, {room.limit} leaves {room.available_bytes / 2**30:.1f} GiB",
            "free host memory or raise the limit; --accept-loss host-memory if the machine grows its memory on demand",
            acceptable=True,
        )
        for room, need in rooms.values()
        if need > room.available_bytes
    ]
    ray = host.ray_monitor(going[0].pid, root)
    if ray is not None and ray.would_kill(sum(extra.values())):
        short.append(
            Hazard(
                "host-memory",
                f"the image brings this node to {ray.usage(sum(extra.values())):.0%} of its memory, "
                f"and Ray (raylet, pid {ray.pid}) kills workers above {ray.threshold:.0%} ({host.RAY_THRESHOLD})",
                f"raise {host.RAY_THRESHOLD} for the raylet, or set {host.RAY_REFRESH}=0; --accept-loss host-memory to go on",
                ray.pid,
                acceptable=True,
            )
        )
    tightest = min((r for r, _ in rooms.values()), key=lambda r: r.available_bytes, default=None)
    return needed, tightest, short
