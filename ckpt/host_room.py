"""Whether the images of a group fit into host memory: of the machine, of each one's cgroups, and below what Ray bears."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gpuckpt import plan
from gpuckpt.image import page
from gpuckpt.inspect import host
from gpuckpt.model import Gpu, GpuProcess, Hazard, HostRoom, ProcessId, State


def for_images(
    members: Sequence[GpuProcess], method: str, root: Path, gpus: Callable[[], Sequence[Gpu]] = tuple
) -> tuple[int, HostRoom | None, list[Hazard]]:
    """Host bytes that a suspend needs, the tightest room there is, and a hazard for each limit that it would break. What the library keeps
    ready in a process is needed, and is there. *gpus* are asked for where NVML does not tell what a member holds."""
    going = [p for p in members if p.state is not State.CHECKPOINTED and not (p.state is State.DISARMED and method == "pool")]
    if not going:
        return 0, None, []
    untold = _untold(going, method, root, gpus) if method != "pool" else {}
    needs = {p.pid: plan.host_need_bytes(p, method) + untold.get(p.pid, 0) for p in going}
    needed = sum(needs.values())
    extra = {p.pid: max(0, needs[p.pid] - _ready_bytes(p.id)) for p in going}
    rooms = _rooms(extra, root)
    who = f" (NVML does not tell what pid {next(iter(untold))} holds; no more than is used on its GPUs)" if untold else ""
    short = _short(rooms, f"the image needs {'up to ' if untold else ''}{{}} of host memory{who}, {{}} leaves {{}}")
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
    tightest = min((r for r, _ in rooms), key=lambda r: r.available_bytes, default=None)
    return needed, tightest, short


def _ready_bytes(process: ProcessId) -> int:
    """What the library keeps ready in *process*, where it is there."""
    if not page.there(process):
        return 0
    from gpuckpt.image import reserve  # few have it

    return reserve.ready_bytes(process)


def _untold(going: Sequence[GpuProcess], method: str, root: Path, gpus: Callable[[], Sequence[Gpu]]) -> dict[int, int]:
    """What members hold at most of which nothing tells, together, under the pid of the first of them: what is used on their GPUs, but for
    what NVML says of members, and what their own allocators have and move. In a pid namespace NVML may not list them, or by the numbers of
    another one."""
    listed = host.pid_namespace_is_host(root)
    silent = [p for p in going if not p.along and (any(g.nbytes is None for g in p.gpus) or not (p.gpus or listed))]
    if not silent:
        return {}
    there = gpus()
    on = {g.uuid for p in silent for g in p.gpus} if all(p.gpus for p in silent) else {g.uuid for g in there}
    used = sum(g.total_bytes - g.free_bytes for g in there if g.uuid in on and g.total_bytes and g.free_bytes is not None)
    told = sum(g.nbytes or 0 for p in going for g in p.gpus if g.uuid in on)
    told += sum(p.movable.nbytes for p in silent if p.movable and method != "driver")
    nbytes = max(0, used - told)
    return {silent[0].pid: nbytes + nbytes // 64}


def for_comms(extra: Mapping[int, int], root: Path) -> list[Hazard]:
    """A hazard for each limit that NCCL's backups would break now. *extra*: what they take of each pid."""
    words = "NCCL's backups of suspended communicators need {} of host memory, {} leaves {} by now; none was suspended"
    return _short(_rooms({pid: n for pid, n in extra.items() if n}, root), words)


def _rooms(extra: Mapping[int, int], root: Path) -> list[tuple[HostRoom, int]]:
    """Each limit of any of these pids, and what they take of it together."""
    rooms: dict[str, tuple[HostRoom, int]] = {}
    for pid, nbytes in extra.items():
        for room in host.host_rooms(pid, root):
            known = rooms.get(room.limit)
            rooms[room.limit] = (room, (known[1] if known else 0) + nbytes)
    return list(rooms.values())


def _short(rooms: Sequence[tuple[HostRoom, int]], words: str) -> list[Hazard]:
    return [
        Hazard(
            "host-memory",
            words.format(f"{need / 2**30:.1f} GiB", room.limit, f"{room.available_bytes / 2**30:.1f} GiB"),
            "free host memory or raise the limit; --accept-loss host-memory if the machine grows its memory on demand",
            acceptable=True,
        )
        for room, need in rooms
        if need > room.available_bytes
    ]
