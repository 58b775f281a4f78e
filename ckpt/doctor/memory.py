"""Checks of host memory: an image must fit into RAM and into every limit, and nobody may kill for it."""

from __future__ import annotations

import math
import mmap
import time
from typing import TYPE_CHECKING

from gpuckpt.doctor.check import Check, FaultRates, Subject, gib
from gpuckpt.image import paths, preload, reserve
from gpuckpt.inspect import host, processes
from gpuckpt.model import GIB, MIB
from gpuckpt.pool import allocator

if TYPE_CHECKING:
    from collections.abc import Iterator

MADV_NOHUGEPAGE = 15
MADV_HUGEPAGE = 14
MEASURED_BYTES = 256 * MIB
ROOM_TO_MEASURE = GIB
_COMPILE = "install a C compiler (gcc), then in the sources of gpuckpt: pip install --force-reinstall --no-deps --no-cache-dir ."

#: Which command shows what could be freed.
_WHO = "`ps -eo rss,pid,args --sort -rss | head` shows who has most of it"


def host_memory(subject: Subject) -> Iterator[Check]:
    """What is on the GPUs fits into host memory: each process by its own limits, and all GPUs together."""
    name, root = "host memory", subject.root
    for pid, nbytes in subject.processes.items():
        room = host.host_room(pid, root)
        if nbytes > room.available_bytes:
            yield Check(
                name,
                "problem",
                f"{subject.name(pid)} holds {gib(nbytes)} on its GPUs, but may take only {gib(room.available_bytes)} "
                f"of host memory ({room.limit}): a suspend is refused",
                _room_fix(room.limit, host.rss_bytes(pid, root) + nbytes),
            )
    held = sum(subject.processes.values())
    total_ram = host.meminfo(root).get("MemTotal", 0)
    total_gpu = sum(g.total_bytes or 0 for g in subject.present)
    room = host.host_room("self", root)
    said = (
        f"{gib(total_ram)} RAM, {gib(room.available_bytes)} to take ({room.limit}); "
        f"GPUs {gib(total_gpu)}, {gib(held)} of it held by processes seen here"
    )
    if unknown := [pid for pid in subject.processes if None in subject.listed[pid].values()]:
        who = ", ".join(subject.name(pid) for pid in unknown)
        yield Check(name, "warning", f"the driver does not tell how much {who} holds on the GPUs: what follows leaves it out")
    if held > host.meminfo(root).get("MemAvailable", held):
        yield Check(name, "warning", f"{said}: not all of them can be suspended at once", f"{_WHO}; suspend some at a time, or add RAM")
    elif total_gpu > total_ram:
        yield Check(
            name,
            "warning",
            f"{said}: GPUs that are full cannot all be suspended at once",
            "suspend some of them at a time (`gpuckpt ps` lists them), or add RAM",
        )
    else:
        yield Check(name, "ok", said)


def _room_fix(limit: str, need_bytes: int) -> str:
    if " of /" in limit:
        need = _whole_gib(need_bytes)
        return f"raise {limit} to {need} GiB or more: the pod's memory limit, or `docker update --memory {need}g --memory-swap -1 NAME`"
    return f"{_WHO}; free some, add RAM, or give the program less GPU memory (vLLM: --gpu-memory-utilization)"


def pod_memory(subject: Subject) -> Iterator[Check]:
    """In Kubernetes: the number for each manifest, against what can be seen of the pod's request and limit."""
    if not host.in_kubernetes(subject.root):
        return
    pods: dict[str, list[int]] = {}
    for pid in subject.processes:
        levels = host.cgroup_levels(pid, subject.root)
        pods.setdefault(levels[0].path if levels else "", []).append(pid)
    for path, pids in pods.items():
        held = sum(subject.processes[pid] for pid in pids)
        resident = sum(host.rss_bytes(pid, subject.root) for pid in pids)
        basis = f"{gib(held)} now on the GPUs and {gib(resident)} resident"
        yield _pod(subject, pids[0], held + resident, basis, f"{path}: " if len(pods) > 1 else "")
    if not pods:
        total = sum(g.total_bytes or 0 for g in subject.present)
        yield _pod(subject, "self", total, "all memory of the GPUs, since nothing runs on them", "")


def _pod(subject: Subject, pid: int | str, need: int, basis: str, where: str) -> Check:
    name, number = "pod memory", f"{_whole_gib(need)}Gi"
    needs = f"Put {number} into the pod's memory request and limit ({basis})"
    fix = f'resources: {{requests: {{memory: "{number}"}}, limits: {{memory: "{number}"}}}}'
    # the container's cgroup and the pod's; what lies above belongs to the node
    levels = host.cgroup_levels(pid, subject.root)[:2]
    limits = [v for level in levels if (v := level.limit("memory.max" if level.version == 2 else "memory.limit_in_bytes")) is not None]
    limit = min(limits, default=None)
    ram = host.meminfo(subject.root).get("MemTotal", 0)
    # Kubernetes writes the request here where the feature MemoryQoS is on
    request = max((v for level in levels for file in ("memory.min", "memory.low") if (v := level.limit(file))), default=0)
    if limit is None or 0 < ram < limit:
        below = f", and a request of {gib(request)}: pods above theirs are evicted first" if 0 < request < need else ""
        return Check(name, "warning", f"{where}no memory limit{below}; without one an image too many wedges the node. {needs}", fix)
    if limit < need:
        return Check(name, "problem", f"{where}the limit is {gib(limit)}: a suspend would go beyond it. {needs}", fix)
    if 0 < request < need:
        return Check(name, "warning", f"{where}a request of {gib(request)}: pods above theirs are evicted first. {needs}", fix)
    seen = "" if request else "; the request cannot be seen from here"
    return Check(name, "ok", f"{where}the limit is {gib(limit)}, needed are {number} ({basis}){seen}")


def killers(subject: Subject) -> Iterator[Check]:
    """No daemon kills the process with the most memory, which a suspended one is."""
    found = host.memory_killers(subject.root)
    for killer in found:
        if killer.name == "systemd-oomd":
            fix = "systemctl edit SERVICE, in [Service]: ManagedOOMPreference=omit"
        else:
            avoid = "--avoid '^(VLLM|python)' in EARLYOOM_ARGS of /etc/default/earlyoom"
            fix = f"sudo gpuckpt suspend PID --oom-score-adj -800; for earlyoom also {avoid}"
        yield Check(
            "memory killers",
            "warning",
            f"{killer.name} runs (pid {killer.pid}) and kills the largest; a suspended process has its GPU memory in RAM{_scores(subject)}",
            fix,
        )
    if not found:
        blind = "" if host.pid_namespace_is_host(subject.root) else " seen (those of the host are invisible from here)"
        yield Check("memory killers", "ok", f"none{blind}")


def _scores(subject: Subject) -> str:
    scores = {pid: score for pid in subject.processes if (score := host.oom_score(pid, subject.root))}
    told = ", ".join(f"{subject.name(pid)} {s.score} (adjusted by {s.adjustment})" for pid, s in scores.items())
    return f". oom_score now: {told}" if told else ""


def ray(subject: Subject) -> Iterator[Check]:
    """No Ray memory monitor kills a worker for its image."""
    monitored: dict[int, list[tuple[int, host.RayLimit]]] = {}
    for pid in subject.processes:
        if limit := host.ray_monitor(pid, subject.root):
            monitored.setdefault(limit.pid, []).append((pid, limit))
    for raylet, workers in monitored.items():
        limit = workers[0][1]
        largest = max(subject.processes[pid] for pid, _ in workers)
        together = sum(subject.processes[pid] for pid, _ in workers)
        fix = _ray_fix(limit, together)
        said = (
            f"raylet {raylet} kills workers above {limit.threshold_bytes / limit.total_bytes:.0%} of {gib(limit.total_bytes)} "
            f"({host.RAY_THRESHOLD}); {limit.usage():.0%} are in use"
        )
        if limit.would_kill(largest):
            yield Check("Ray", "problem", f"{said}, {limit.usage(largest):.0%} with the largest of its processes suspended", fix)
        elif limit.would_kill(together):
            yield Check("Ray", "warning", f"{said}, {limit.usage(together):.0%} with all {len(workers)} of its processes suspended", fix)
        else:
            yield Check("Ray", "ok", f"{said}, {limit.usage(together):.0%} with all of its processes suspended")


def _ray_fix(limit: host.RayLimit, nbytes: int) -> str:
    share = math.ceil(limit.usage(nbytes) * 100 + 1) / 100
    if share >= 1:
        return f"{_WHO}; free some, suspend less at a time, or give the node more: no threshold makes room for it"
    return f"start Ray with {host.RAY_THRESHOLD}={share:.2f}, or {host.RAY_REFRESH}=0 to switch the monitor off"


def huge_pages(subject: Subject) -> Iterator[Check]:
    """Whether images may lie in huge pages, and what that gains on this machine."""
    name, setting = "huge pages", host.thp(subject.root)
    fix = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
    if not setting:
        yield Check(name, "warning", "this kernel has no transparent huge pages: images are faulted in 4 KiB at a time")
        return
    if host.host_room("self", subject.root).available_bytes < ROOM_TO_MEASURE:
        measured = "not measured, for lack of host memory"
    else:
        rates = subject.fault_rates()
        small, huge = rates.small_pages / GIB, rates.huge_pages / GIB
        measured = f"measured now: {small:.1f} GiB/s with 4 KiB pages, {huge:.1f} GiB/s with huge pages asked for"
    if setting == "never":
        yield Check(name, "warning", f"never: images are faulted in 4 KiB at a time; {measured}", fix)
    elif setting == "madvise":
        yield Check(name, "ok", f"madvise (the driver itself does not ask for them; with `always` its images have them too); {measured}")
    else:
        yield Check(name, "ok", f"{setting}; {measured}")


def pool_library(subject: Subject) -> Iterator[Check]:
    """Whether programs can have their memory in the pool, and which CUDA processes do."""
    have = [pid for pid in subject.processes if subject.mapped(pid, allocator.NAME)]
    told = f"loaded in {', '.join(map(subject.name, have))}" if have else "loaded in no CUDA process"
    if allocator.library() is None:
        why = "none: it was not built when gpuckpt was installed, and gpuckpt.pool does nothing for programs"
        yield Check("pool library", "warning", f"{why}; {told}", _COMPILE)
    else:
        yield Check("pool library", "ok", told)


def preload_library(subject: Subject) -> Iterator[Check]:
    """Whether programs can be started with the preload library, and which CUDA processes were."""
    name = "preload library"
    have = [pid for pid in subject.processes if subject.mapped(pid, preload.NAME)]
    told = f"loaded in {', '.join(map(subject.name, have))}" if have else "loaded in no CUDA process"
    without = len(subject.processes) - len(have)
    if have and without:
        told += f", not in {without} other{'s' if without > 1 else ''}"
    asked = (pid for pid in subject.processes if pid not in have)
    failed = [pid for pid in asked if preload.NAME in host.environ(pid, subject.root).get("LD_PRELOAD", "")]
    ready = {pid: n for pid in have if (found := processes.read(pid)) and (n := reserve.ready_bytes(found.id))}
    if ready:
        told += "; kept ready for images: " + ", ".join(f"{gib(n)} in {subject.name(pid)}" for pid, n in ready.items())
    if why := preload.problem():
        fix = f"unset {preload.VARIABLE}" if why.startswith(preload.VARIABLE) else _COMPILE
        yield Check(name, "warning", f"none: {why}. Suspends take the driver's own path; {told}", fix)
    elif not preload.populates():
        missing = "this kernel lacks MADV_POPULATE_WRITE: the library can do nothing here, and no image can be kept on disk"
        yield Check(name, "warning", f"{missing}; {told}", "Linux 5.14 or newer")
    elif failed:
        said = f"asked for and not loaded in {', '.join(map(subject.name, failed))}: suspends there take the driver's own path; {told}"
        yield Check(name, "warning", said, f"have {preload.library()} in the container or chroot too, and a program that is not setuid")
    else:
        few, many = (f"{1 / ratio:.1f}" for ratio in (max(paths.RATIOS), min(paths.RATIOS)))
        gain = f"; a large checkpoint without it takes about {few}-{many} times as long on 16 CPUs (estimate, by {paths.SOURCES[0]})"
        yield Check(name, "ok", f"{told}; programs get it by `gpuckpt exec -- COMMAND`{gain}")


def measure_fault_rates(nbytes: int = MEASURED_BYTES) -> FaultRates:
    """How fast one thread faults in anonymous memory, with 4 KiB pages and with huge pages asked for: the better of two runs each.

    Two runs, since the first in a virtual machine may wait for its host to find the memory.
    """
    small, huge = [], []
    for _ in range(2):
        small.append(_fault_rate(nbytes, MADV_NOHUGEPAGE))
        huge.append(_fault_rate(nbytes, MADV_HUGEPAGE))
    return FaultRates(max(small), max(huge))


def _fault_rate(nbytes: int, advice: int) -> float:
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(advice)
        begin = time.perf_counter()
        try:
            memory.madvise(preload.MADV_POPULATE_WRITE)
        except OSError:  # an older kernel
            with memoryview(memory) as view, view[::4096] as pages:
                pages[:] = bytes(len(pages))
        return nbytes / (time.perf_counter() - begin)


def _whole_gib(nbytes: int) -> int:
    return math.ceil(nbytes / GIB)
