"""Host memory as the kernel sees it: what a process may still take, which limit says so, and who kills when it runs short.

Everything is read below ``root``, so that a test can lay out a machine in a directory. What is missing or may not be read is skipped.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from gpuckpt.model import HostRoom

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path("/")
HOST_PID_NAMESPACE = "pid:[4026531836]"  # the kernel's PROC_PID_INIT_INO: the first pid namespace has this number on every Linux

#: Bytes that the run which a process belongs to may hold in host memory: what the process holds by itself counts against them.
BUDGET_VARIABLE = "GPUCKPT_HOST_BUDGET"

RAY_THRESHOLD = "RAY_memory_usage_threshold"
RAY_REFRESH = "RAY_memory_monitor_refresh_ms"
RAY_LEAST_FREE = "RAY_min_memory_free_bytes"
RAY_DEFAULT_THRESHOLD = 0.95  # ray_config_def.h

_KILLERS = ("earlyoom", "systemd-oomd", "oomd", "nohang")


def host_rooms(pid: int | str, root: Path = ROOT) -> list[HostRoom]:
    """Bytes of host memory that *pid* (or "self") may still take, by each limit there is: MemAvailable, and what each cgroup
    on the way from *pid*'s own to the root leaves, version 1 or 2.

    File cache that the kernel drops by itself counts as free. Where nothing can be read, 0 bytes: unknown is not free.
    """
    rooms: list[HostRoom] = []
    available = meminfo(root).get("MemAvailable")
    if available is not None:
        rooms.append(HostRoom(available, "MemAvailable"))
    for level in cgroup_levels(pid, root):
        rooms += level.rooms()
    return rooms or [HostRoom(0, "unknown: /proc/meminfo cannot be read")]


def host_room(pid: int | str, root: Path = ROOT) -> HostRoom:
    """The tightest of :func:`host_rooms`."""
    return min(host_rooms(pid, root), key=lambda r: r.available_bytes)


def meminfo(root: Path = ROOT) -> dict[str, int]:
    """``/proc/meminfo`` in bytes."""
    found = {}
    for line in read(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        figures = rest.split()
        if figures and figures[0].isdigit():
            found[name] = int(figures[0]) * (1024 if figures[1:] == ["kB"] else 1)
    return found


class CgroupLevel(NamedTuple):
    """One cgroup with memory accounting: its path as ``/proc/PID/cgroup`` gives it, and its files."""

    path: str
    directory: Path
    version: int

    def limit(self, name: str) -> int | None:
        """A limit in bytes, such as ``memory.max``; None where it is absent or "max"."""
        return _number(self.directory / name)

    def used_bytes(self) -> int | None:
        """Bytes charged to it, less the file cache that the kernel drops first."""
        current = _number(self.directory / ("memory.current" if self.version == 2 else "memory.usage_in_bytes"))
        if current is None:
            return None
        key = "inactive_file" if self.version == 2 else "total_inactive_file"
        cache = 0
        for line in read(self.directory / "memory.stat").splitlines():
            name, _, value = line.partition(" ")
            if name == key and value.strip().isdigit():
                cache = int(value)
        return max(0, current - cache)

    def rooms(self) -> list[HostRoom]:
        used = self.used_bytes()
        if used is None:
            return []
        names = ("memory.max", "memory.high") if self.version == 2 else ("memory.limit_in_bytes",)
        limits = {name: self.limit(name) for name in names}
        return [HostRoom(max(0, limit - used), f"{name} of {self.path}") for name, limit in limits.items() if limit is not None]


def cgroup_levels(pid: int | str, root: Path = ROOT) -> list[CgroupLevel]:
    """The cgroups that account for *pid*'s memory, its own first, then each ancestor that can be seen.

    In a cgroup namespace the container's own cgroup shows as "/", and its limits lie at the mount itself.
    """
    levels = []
    for version, path, mounts in _memberships(pid, root):
        if ".." in PurePosixPath(path).parts:
            continue  # outside our cgroup namespace: none of the directories that we see is an ancestor of it
        for mount in mounts:
            levels += [CgroupLevel(str(part), mount / part.relative_to("/"), version) for part in _lineage(path, mount, root)]
    return [level for level in levels if level.used_bytes() is not None]


def cpu_quota(pid: int | str, root: Path = ROOT) -> int:
    """Whole CPUs that the cgroups of *pid* let it use at a time, rounded up; a very large number without a quota."""
    quotas = []
    for _, path, mounts in _memberships(pid, root, controller="cpu"):
        if ".." in PurePosixPath(path).parts:
            continue
        for mount in mounts:
            for part in _lineage(path, mount, root):
                directory = mount / part.relative_to("/")
                words = read(directory / "cpu.max").split() or [read(directory / f"cpu.cfs_{w}_us").strip() for w in ("quota", "period")]
                if all(w.isdigit() for w in words) and int(words[1]):
                    quotas.append(max(1, math.ceil(int(words[0]) / int(words[1]))))
    return min(quotas, default=sys.maxsize)


def _memberships(pid: int | str, root: Path, controller: str = "memory") -> Iterator[tuple[int, str, tuple[Path, ...]]]:
    fs = root / "sys/fs/cgroup"
    for line in read(root / f"proc/{pid}/cgroup").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            yield 2, path, (fs, fs / "unified")
        elif controller in controllers.split(","):
            yield 1, path, (fs / controller,)


def _lineage(path: str, mount: Path, root: Path) -> tuple[PurePosixPath, ...]:
    inside = PurePosixPath("/") / path
    shown = _mounted_subtree(mount, root)
    if shown != PurePosixPath("/") and inside.is_relative_to(shown):
        inside = PurePosixPath("/") / inside.relative_to(shown)
    return (inside, *inside.parents)


def _mounted_subtree(mount: Path, root: Path) -> PurePosixPath:
    """The cgroup that *mount* shows as its top. With cgroup v1, Docker mounts a subtree but leaves the host's paths in /proc."""
    point = "/" + mount.relative_to(root).as_posix()
    for line in read(root / "proc/self/mountinfo").splitlines():
        fields = line.split()
        if len(fields) > 4 and fields[4] == point and " - cgroup" in line:
            return PurePosixPath("/") / fields[3].lstrip("/") if ".." not in fields[3] else PurePosixPath("/")
    return PurePosixPath("/")


class MemoryKiller(NamedTuple):
    pid: int
    name: str


def memory_killers(root: Path = ROOT) -> tuple[MemoryKiller, ...]:
    """Daemons that kill before the kernel does: earlyoom, systemd-oomd and the like. Those outside our pid namespace stay unseen."""
    return tuple(MemoryKiller(pid, name) for pid in pids(root) if (name := comm(pid, root)) in _KILLERS)


class RayLimit(NamedTuple):
    """Ray's memory monitor above a process: raylet *pid* kills workers when more than ``threshold_bytes`` of ``total_bytes`` are used."""

    pid: int
    threshold: float
    used_bytes: int
    total_bytes: int
    least_free_bytes: int | None = None

    @property
    def threshold_bytes(self) -> int:
        by_share = int(self.total_bytes * self.threshold)
        return by_share if self.least_free_bytes is None else max(by_share, self.total_bytes - self.least_free_bytes)

    def usage(self, extra_bytes: int = 0) -> float:
        """The share of the node's memory in use, with *extra_bytes* more."""
        return (self.used_bytes + extra_bytes) / self.total_bytes

    def would_kill(self, extra_bytes: int) -> bool:
        """Whether *extra_bytes* more in host memory bring the node over the threshold."""
        return self.used_bytes + extra_bytes > self.threshold_bytes


def ray_monitor(pid: int, root: Path = ROOT) -> RayLimit | None:
    """The memory monitor of the raylet that *pid* descends from; None without one, or where it is switched off.

    Settings come from the raylet's environment, then from *pid*'s (a worker inherits them); Ray's defaults for the rest.
    Like Ray it measures the node, or the raylet's cgroup where that has a smaller limit.
    """
    raylet = next((p for p in ancestors(pid, root) if comm(p, root) == "raylet"), None)
    if raylet is None:
        return None
    env = {**environ(pid, root), **environ(raylet, root)}
    memory = meminfo(root)
    total, available = memory.get("MemTotal", 0), memory.get("MemAvailable")
    if _as_float(env.get(RAY_REFRESH)) == 0 or not total or available is None:
        return None
    used = total - available
    for level in cgroup_levels(raylet, root):
        limit = level.limit("memory.max" if level.version == 2 else "memory.limit_in_bytes")
        charged = level.used_bytes()
        if limit is not None and charged is not None and 0 < limit < total:
            total, used = limit, min(charged, limit)
    threshold = _as_float(env.get(RAY_THRESHOLD))
    least_free = _as_float(env.get(RAY_LEAST_FREE))
    return RayLimit(
        raylet,
        RAY_DEFAULT_THRESHOLD if threshold is None else threshold,
        used,
        total,
        None if least_free is None or least_free < 0 else int(least_free),
    )


class OomScore(NamedTuple):
    """``score``: what the kernel's killer and earlyoom compare, highest dies first. ``adjustment``: -1000 (never) to 1000."""

    score: int
    adjustment: int


def oom_score(pid: int, root: Path = ROOT) -> OomScore | None:
    """The out-of-memory score of *pid*; None if it is gone."""
    try:
        return OomScore(int(read(root / f"proc/{pid}/oom_score")), int(read(root / f"proc/{pid}/oom_score_adj")))
    except ValueError:
        return None


def thp(root: Path = ROOT) -> str:
    """The transparent hugepage setting: "always", "madvise", "never", or "" where the kernel has none."""
    _, _, rest = read(root / "sys/kernel/mm/transparent_hugepage/enabled").partition("[")
    return rest.partition("]")[0]


def in_container(root: Path = ROOT) -> bool:
    """Whether this looks like a container. One that shares every namespace with its host may pass for the host."""
    return (
        (root / ".dockerenv").exists()
        or (root / "run/.containerenv").exists()
        or "container" in environ(1, root)
        or in_kubernetes(root)
        or not pid_namespace_is_host(root)
    )


def in_kubernetes(root: Path = ROOT) -> bool:
    return any("KUBERNETES_SERVICE_HOST" in environ(pid, root) for pid in (1, "self"))


def pid_namespace_is_host(root: Path = ROOT) -> bool:
    """Whether pids here are the kernel's own. True where that cannot be told."""
    try:
        return str((root / "proc/self/ns/pid").readlink()) == HOST_PID_NAMESPACE
    except OSError:
        return True


def hidepid(root: Path = ROOT) -> str:
    """The ``hidepid`` option of ``/proc``, "" where processes of others can be seen."""
    for line in read(root / "proc/mounts").splitlines():
        fields = line.split()
        if len(fields) > 3 and fields[1] == "/proc" and fields[2] == "proc":
            options = dict(option.partition("=")[::2] for option in fields[3].split(","))
            value = options.get("hidepid", "")
            return "" if value in ("0", "off") else value
    return ""


def pids(root: Path = ROOT) -> list[int]:
    try:
        return sorted(int(entry.name) for entry in (root / "proc").iterdir() if entry.name.isdigit())
    except OSError:
        return []


def ancestors(pid: int, root: Path = ROOT) -> list[int]:
    """Parent, grandparent and so on, up to the first process."""
    found: list[int] = []
    while (pid := _parent(pid, root)) > 0 and pid not in found:
        found.append(pid)
    return found


def comm(pid: int, root: Path = ROOT) -> str:
    """The command name, which the kernel cuts after 15 characters."""
    return read(root / f"proc/{pid}/comm").strip()


def rss_bytes(pid: int, root: Path = ROOT) -> int:
    """Resident bytes of *pid*, 0 if it is gone."""
    for line in read(root / f"proc/{pid}/status").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def environ(pid: int | str, root: Path = ROOT) -> dict[str, str]:
    """The environment that *pid* was started with; empty if we may not read it."""
    entries = read(root / f"proc/{pid}/environ").split("\0")
    return dict(entry.partition("=")[::2] for entry in entries if "=" in entry)


def read(path: Path) -> str:
    """The text of *path*, "" if it is missing or may not be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _parent(pid: int, root: Path) -> int:
    fields = read(root / f"proc/{pid}/stat").rpartition(")")[2].split()
    return int(fields[1]) if len(fields) > 1 else 0


def _number(path: Path) -> int | None:
    text = read(path).strip()
    return int(text) if text.isdigit() else None


def _as_float(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None
