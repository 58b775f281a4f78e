"""What limits the copy of a checkpoint and of a restore: the threads of a process, looked at while gpuckpt suspends and resumes it.
usage: copy_path.py [GIB]

It ends within LIMIT_S, and says after each operation which of these it is: a CPU copies (in whose code, from what into what, how fast), a thread
waits for the GPU (in which call), the kernel is busy (with what: page faults, pinning), or a thread spins. For that it samples code and
registers of each thread (sampler.py), its waits and system calls, and reads CPU time, page faults, context switches and NUMA nodes. Then the same
process without samples (what they cost), with the restore thread first in the scheduler's queue, and where the copy is the C library's, two
others with other thresholds of its memcpy. With $PLAIN_TARGET, a build of plain_target.c, mostly on that: it starts faster.
"""

from __future__ import annotations

import collections
import ctypes
import json
import os
import platform
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from lab import SIMULATED, Results, Target, left_s, limit
from sampler import Clocked, Mapping, Places, Stopped, imports, mappings, tell

from gpuckpt.image import preload
from gpuckpt.image.preload import Unavailable
from gpuckpt.inspect import processes

LIMIT_S = 60.0
gib = float(sys.argv[1]) if len(sys.argv) > 1 else 4
r = Results("copy_path")
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
ALONE = ("--no-tree", "--accept-loss", "possible-import")
NO_LIBRARY = {"LD_PRELOAD": "", "GPUCKPT_PRELOAD": "0"}
COUNTS = ("user_s", "kernel_s", "minor_faults", "major_faults", "waits", "preempted")


def counts(pid: int) -> dict[int, dict[str, Any]]:
    """tid -> its name, the CPU it was on last, and COUNTS."""
    found = {}
    for directory in Path(f"/proc/{pid}/task").glob("*"):
        try:
            head, _, rest = (directory / "stat").read_text().rpartition(")")
            status = (directory / "status").read_text()
        except OSError:
            continue
        words = rest.split()
        switches = [int(x) for x in re.findall(r"ctxt_switches:\s+(\d+)", status)]
        values = (int(words[11]) * TICK_S, int(words[12]) * TICK_S, int(words[7]), int(words[9]), *switches)
        found[int(directory.name)] = {"name": head.partition("(")[2], "cpu": int(words[36]), **dict(zip(COUNTS, values, strict=True))}
    return found


def waiting(pid: int, tid: int, places: Places | None) -> str:
    """What a thread is in: R where it runs, else its system call, with the file that it is about and the code that made it."""
    task = Path(f"/proc/{pid}/task/{tid}")
    try:
        words = (task / "syscall").read_text().split()
        if not words or words[0] == "running":
            return "R"
        wchan = (task / "wchan").read_text().strip("0")
        about = ""
        if words[0] in ("0", "1", "7", "16"):  # read, write, poll, ioctl
            try:
                about = f" {os.readlink(task / 'fd' / str(int(words[1], 16)))} {words[2]}"
            except OSError:
                about = f" {words[2]}"
        at = f" at {places.code(int(words[-1], 16))}" if places else ""
    except OSError:
        return "?"
    return f"call {words[0]}{about} {wchan}{at}"


def restore_tid(pid: int) -> int:
    """By its name (docs/driver-path.md), for want of anybody who could be asked in the middle of a checkpoint."""
    return next((tid for tid, c in counts(pid).items() if re.fullmatch(r"cuda0000\d{7,}", c["name"])), 0)


def nodes(pid: int, address: int) -> str:
    """The line of the kernel's NUMA map for the mapping at *address*: pages on each node, and their size."""
    try:
        lines = Path(f"/proc/{pid}/numa_maps").read_text().splitlines()
    except OSError as e:
        return str(e)
    return next((line for line in lines if line.startswith(f"{address:x} ")), "")


def pcie(over: threading.Event, rates: list[tuple[int, ...]]) -> None:
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    while not over.is_set():
        try:
            rates.append(tuple(pynvml.nvmlDeviceGetPcieThroughput(handle, k) for k in (0, 1)))  # KiB/s from the card, to it; over 20 ms
        except pynvml.NVMLError:
            return


def samplers(pid: int, tids: list[int], first: int) -> tuple[dict[int, Any], str]:
    """One a thread by the kernel's clock; or one for the thread *first* by ptrace; and why not."""
    made: dict[int, Any] = {}
    try:
        for tid in tids:
            made[tid] = Clocked(tid)
    except OSError as e:
        if made:
            return made, ""
        try:
            return {first: Stopped(first)} if first else {}, f"perf_event_open: {e}; by ptrace, the restore thread alone"
        except OSError as stopped:
            return {}, f"perf_event_open: {e}; ptrace: {stopped}"
    return made, ""


def image_of(pid: int, before: list[Mapping]) -> tuple[int, int] | None:
    """The image of a process that is checkpointed: what the library saw, or the largest mapping that was not there *before*."""
    found = processes.read(pid)
    try:
        seen = preload.result(found.id).images  # type: ignore[union-attr]
        if seen and seen[0].address:
            return seen[0].address, seen[0].address + seen[0].nbytes
    except Unavailable:
        pass
    was = {(m[0], m[1]) for m in before}
    new = [m for m in mappings(pid) if (m[0], m[1]) not in was and m[3] == "rw-p" and not m[4]]
    return max(((m[0], m[1]) for m in new), key=lambda m: m[1] - m[0], default=None)


def watch(t: Target, step: str, command: tuple[str, ...], image: tuple[int, int] | None, *, sampled: bool) -> dict[str, Any]:
    """One command, and what the threads of *t* did meanwhile."""
    before, old = counts(t.pid), mappings(t.pid)
    first = restore_tid(t.pid)
    made, problem = samplers(t.pid, list(before), first) if sampled else ({}, "")
    over, rates, seen = threading.Event(), [], set(old)
    beside = threading.Thread(target=pcie, args=(over, rates), daemon=True)
    if not SIMULATED and sampled:
        beside.start()
    waits: dict[int, collections.Counter[str]] = {tid: collections.Counter() for tid in before}
    places = Places(old)
    begun = maps_at = time.monotonic()
    p = subprocess.Popen(["gpuckpt", *command, "--json"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    while p.poll() is None and left_s() > 1:
        for s in made.values():
            s.drain()
        now = time.monotonic()
        if now - maps_at > 0.1:
            maps_at = now
            seen |= set(mappings(t.pid))
            if sampled:
                for tid in waits:
                    if tid != first:
                        waits[tid][waiting(t.pid, tid, places)] += 1
        if sampled and first:
            waits[first][waiting(t.pid, first, places)] += 1
        time.sleep(0.002)
    wall = time.monotonic() - begun
    over.set()
    document = json.loads(p.communicate(timeout=max(1, left_s()))[0] or "{}")
    for s in made.values():
        s.close()
    after, seen = counts(t.pid), seen | set(mappings(t.pid))
    image = image or image_of(t.pid, old)
    places = Places(list(seen))
    did = {tid: {k: round(c[k] - before.get(tid, {}).get(k, 0), 3) for k in COUNTS} for tid, c in after.items()}
    busiest = sorted(did, key=lambda tid: -(did[tid]["user_s"] + did[tid]["kernel_s"]))[:3]
    threads = {}
    for tid in dict.fromkeys([*([first] if first in did else []), *busiest]):
        threads[f"{tid} {after[tid]['name']}"] = {**did[tid], "cpu": after[tid]["cpu"], "in": dict(waits.get(tid, collections.Counter()).most_common(8))}
        if tid in made:
            threads[f"{tid} {after[tid]['name']}"] |= tell(made[tid].found, places, image)
    steps = {s["name"]: s["seconds"] for s in document.get("steps", [])}
    row: dict[str, Any] = {"ok": document.get("ok"), "error": document.get("error"), "wall_s": round(wall, 3), "call_s": steps.get(step), "steps": steps}
    row |= {"image": image and [hex(image[0]), hex(image[1])], "image_gib": image and round((image[1] - image[0]) / (1 << 30), 3)}
    row |= {"numa": nodes(t.pid, image[0]) if image and step == "checkpoint" else None, "problem": problem, "threads": threads}
    if rates:
        row["pcie_kib_s"] = {"from_card": max(x[0] for x in rates), "to_card": max(x[1] for x in rates), "samples": len(rates)}
    return {"verdict": verdict(row), **row}


def verdict(row: dict[str, Any]) -> str:
    """In words, from the thread that did most."""
    if not row["threads"] or not row["call_s"]:
        return "?"
    name, did = max(row["threads"].items(), key=lambda x: x[1]["user_s"] + x[1]["kernel_s"])
    busy = (did["user_s"] + did["kernel_s"]) / row["call_s"]
    said = f"{row['call_s']} s, {name}: {busy:.0%} of it on a CPU ({did['user_s']:.2f} s user, {did['kernel_s']:.2f} s kernel), {did['minor_faults']} faults"
    if not did.get("samples"):
        return said
    held, samples = did["with_the_image_in_a_register"], did["samples"]
    if busy < 0.4:
        return f"{said}; it mostly waits: {next(iter(did['in']), '?')}"
    if held > 0.3 * samples:
        copy = did.get("progress", {})
        return f"{said}; a CPU copies, in {did['copying_in']}, called from {next(iter(did['called_from']), '?')}: {copy.get('gib_s')} GiB/s for {copy.get('seconds')} s"
    if did["in_kernel"] > 0.5 * samples:
        return f"{said}; the kernel is busy with {list(did['kernel'])[:4]}"
    return f"{said}; it runs without the image at hand: spins? {list(did['code'])[:3]}"


def cycle(name: str, t: Target, *, sampled: bool) -> dict[str, Any]:
    down = watch(t, "checkpoint", ("suspend", str(t.pid), *ALONE), None, sampled=sampled)
    place = down["image"] and (int(down["image"][0], 16), int(down["image"][1], 16))
    up = watch(t, "restore", ("resume", str(t.pid), "--no-tree"), place, sampled=sampled)
    r.note(name, {"suspend": down, "resume": up})
    print(f"{name}\n  suspend {down['verdict']}\n  resume  {up['verdict']}", flush=True)
    if not r.check("suspended and resumed, same answers", bool(down["ok"] and up["ok"] and t.same()), [down["error"], up["error"]]):
        r.finish()
    return down


def start(env: dict[str, str], *, torch: bool = False) -> Target:
    if not torch and not SIMULATED and (plain := os.environ.get("PLAIN_TARGET")):
        return Target(env=env, program=[plain, str(gib)])
    return Target(gib, "plain", env=env)


def hurried(t: Target) -> bool:
    """The restore thread before all others, on one CPU."""
    tid = restore_tid(t.pid)
    try:
        os.sched_setscheduler(tid, os.SCHED_FIFO, os.sched_param(1))
        os.sched_setaffinity(tid, {max(os.sched_getaffinity(tid))})
    except OSError as e:
        r.note("hurried", str(e))
        return False
    return bool(tid)


def this_machine() -> dict[str, Any]:
    """What the copy could depend on, and what one thread's memcpy reaches here between touched pages."""
    import mmap

    cpus = Path("/proc/cpuinfo").read_text()
    flags = set(next(iter(re.findall(r"flags\s*:(.*)", cpus)), "").split())
    cards = [p for p in Path("/sys/bus/pci/devices").glob("*") if (p / "vendor").read_text().strip() == "0x10de"]
    nbytes = 1 << 28
    spaces = [mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(2)]
    at = [ctypes.addressof(ctypes.c_char.from_buffer(s)) for s in spaces]
    rate: dict[str, float] = {}
    for pages in ("small", "huge"):
        for s, a in zip(spaces, at, strict=True):
            s.madvise(mmap.MADV_DONTNEED)
            s.madvise(mmap.MADV_HUGEPAGE if pages == "huge" else mmap.MADV_NOHUGEPAGE)
            ctypes.memset(a, 1, nbytes)
        for piece in (1 << 20, nbytes):
            begun = time.perf_counter()
            for _ in range(2):
                for o in range(0, nbytes, piece):
                    ctypes.memmove(at[0] + o, at[1] + (o if piece == nbytes else 0), piece)
            rate[f"{pages} pages, {piece >> 20} MiB at a time"] = round(2 * nbytes / (1 << 30) / (time.perf_counter() - begun), 2)
    return {
        "cpu": next(iter(re.findall(r"model name\s*:\s*(.*)", cpus)), "?"),
        "cpus": os.cpu_count(),
        "flags": sorted(flags & {"erms", "fsrm", "avx2", "avx512f"}),
        "nodes": Path("/sys/devices/system/node/online").read_text().strip() if Path("/sys/devices/system/node/online").exists() else None,
        "card_nodes": {p.name: (p / "numa_node").read_text().strip() for p in cards},
        "libc": " ".join(platform.libc_ver()),
        "memcpy_gib_s": rate,
    }


limit(r, LIMIT_S)
r.note("gib", gib)
r.note("host", host := this_machine())
print(json.dumps(host), flush=True)
loaded = dict(preload.environment())
target = start(loaded)
libcuda = next((m[4] for m in mappings(target.pid) if "/libcuda.so" in m[4]), "")
r.note("libcuda", {"path": libcuda, "imports": imports(libcuda, ("memcpy", "memmove", "memset", "madvise", "mlock", "mmap", "mmap64", "sched_yield"))})
print(json.dumps(r.document["libcuda"]), flush=True)
seen = cycle("sampled", target, sampled=True)
cycle("not_sampled", target, sampled=False)
if hurried(target):
    cycle("first_in_queue", target, sampled=False)
target.end()
in_libc = any("libc" in k and v > 20 for d in seen["threads"].values() for k, v in d.get("copying_in", {}).items() if "libcuda" not in k)
for name, threshold in (("never_past_the_cache", "0x1000000000"), ("always_past_the_cache", "0x4040")) if in_libc else ():
    if left_s() > 15:
        target = start({**loaded, "GLIBC_TUNABLES": f"glibc.cpu.x86_non_temporal_threshold={threshold}"})
        cycle(name, target, sampled=False)
        target.end()
for name, env, torch in (("without", NO_LIBRARY, False), ("torch", loaded, True)):
    if left_s() > 18:
        target = start(env, torch=torch)
        cycle(name, target, sampled=True)
        target.end()
r.finish()
