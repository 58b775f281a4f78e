"""Where the time of a checkpoint and a restore goes inside the process: its threads, sampled while gpuckpt suspends and resumes it.
usage: copy_path.py [GIB]

For each thread that did anything: CPU time in user and kernel mode, what it waited in, and, by the kernel's CPU clock (perf_event_open, needs
root), the places in code where it was found. Beside it the PCIe traffic that NVML saw. What is copied by a CPU shows as user time in one
place; what a copy engine does shows as waiting.
"""

from __future__ import annotations

import bisect
import collections
import ctypes
import json
import mmap
import os
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from lab import SIMULATED, Results, Target, wait_for

from gpuckpt.image import preload

gib = float(sys.argv[1]) if len(sys.argv) > 1 else 8
r = Results("copy_path")
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
RING_PAGES = 64


class Sampler:
    """The places where the thread *tid* is found, a thousand times a second of its CPU time."""

    def __init__(self, tid: int) -> None:
        attr = bytearray(112)
        # software, size, CPU clock, frequency, IP and TID; disabled, by frequency
        struct.pack_into("=IIQQQQQ", attr, 0, 1, 112, 0, 1000, 1 | 2, 0, 1 | 1 << 10)
        buffer = (ctypes.c_char * len(attr)).from_buffer(attr)
        libc = ctypes.CDLL(None, use_errno=True)
        self.fd = libc.syscall(298, ctypes.byref(buffer), tid, -1, -1, 8)  # perf_event_open on x86-64
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self.ring = mmap.mmap(self.fd, (1 + RING_PAGES) * mmap.PAGESIZE, mmap.MAP_SHARED)
        self._ioctl = lambda number: libc.ioctl(self.fd, number, 0)
        self._ioctl(0x2400)  # enable
        self.found: collections.Counter[tuple[str, int]] = collections.Counter()
        self.at = 0

    def drain(self) -> None:
        (head,) = struct.unpack_from("=Q", self.ring, 1024)
        size = RING_PAGES * mmap.PAGESIZE
        while self.at < head:
            data = bytes(self.ring[mmap.PAGESIZE + (self.at + i) % size] for i in range(24))
            kind, misc, length, ip = struct.unpack_from("=IHHQ", data)
            if kind == 9:
                self.found["kernel" if misc & 7 == 1 else "user", ip] += 1
            self.at += max(8, length)
        struct.pack_into("=Q", self.ring, 1032, self.at)

    def close(self) -> None:
        self._ioctl(0x2401)
        self.drain()
        self.ring.close()
        os.close(self.fd)


def kernel_symbols() -> tuple[list[int], list[str]]:
    found = []
    for line in Path("/proc/kallsyms").read_text().splitlines():
        address, kind, name = line.split()[:3]
        if kind in "tT":
            found.append((int(address, 16), name))
    found.sort()
    return [a for a, _ in found], [n for _, n in found]


def places(pid: int, found: dict[tuple[str, int], int]) -> dict[str, int]:
    """Samples by kernel function, or by library and 256 bytes of its code."""
    addresses, names = kernel_symbols()
    maps = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        words = line.split(maxsplit=5)
        begin, end = (int(x, 16) for x in words[0].split("-"))
        maps.append((begin, end, int(words[2], 16), words[5] if len(words) > 5 else "no file"))
    told: collections.Counter[str] = collections.Counter()
    for (mode, ip), count in found.items():
        if mode == "kernel":
            at = bisect.bisect_right(addresses, ip) - 1
            told[names[at] if at >= 0 and addresses[at] else "kernel"] += count
        else:
            where = next((f"{Path(m[3]).name}+{(ip - m[0] + m[2]) & ~255:#x}" for m in maps if m[0] <= ip < m[1]), "?")
            told[where] += count
    return dict(told.most_common(15))


def times(pid: int) -> dict[int, tuple[str, int, int]]:
    """tid -> name, ticks in user mode, ticks in kernel mode."""
    found = {}
    for directory in Path(f"/proc/{pid}/task").glob("*"):
        try:
            head, _, rest = (directory / "stat").read_text().rpartition(")")
            words = rest.split()
            found[int(directory.name)] = (head.partition("(")[2], int(words[11]), int(words[12]))
        except OSError:
            continue
    return found


def waiting(pid: int, tid: int) -> str:
    """State, kernel function that it waits in, and its system call with the file that it is about."""
    task = Path(f"/proc/{pid}/task/{tid}")
    try:
        state = (task / "stat").read_text().rpartition(")")[2].split()[0]
        words = (task / "syscall").read_text().split()
        wchan = (task / "wchan").read_text().strip("0")
    except OSError:
        return "?"
    if state == "R" or not words or words[0] == "running":
        return state
    about = ""
    if words[0] in ("16", "0", "1", "7"):  # ioctl, read, write
        try:
            about = f" {os.readlink(task / 'fd' / str(int(words[1], 16)))} {words[2]}"
        except OSError:
            about = f" fd {words[1]}"
    return f"{state} {wchan} syscall {words[0]}{about}"


def pcie(stop: threading.Event, rates: list[tuple[int, int]]) -> None:
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    while not stop.is_set():
        try:
            rates.append(tuple(pynvml.nvmlDeviceGetPcieThroughput(handle, k) for k in (0, 1)))  # type: ignore[arg-type]  # KiB/s to, from the host
        except pynvml.NVMLError:
            return


def watch(t: Target, *command: str) -> dict[str, Any]:
    before = times(t.pid)
    samplers: dict[int, Sampler] = {}
    problem = ""
    for tid in before:
        try:
            samplers[tid] = Sampler(tid)
        except OSError as e:
            problem = str(e)
    stop, rates = threading.Event(), []
    thread = threading.Thread(target=pcie, args=(stop, rates), daemon=True)
    if not SIMULATED:
        thread.start()
    waits: dict[int, collections.Counter[str]] = {tid: collections.Counter() for tid in before}
    begun = time.perf_counter()
    p = subprocess.Popen(["gpuckpt", *command, "--json"], stdout=subprocess.PIPE, text=True)
    while p.poll() is None and time.perf_counter() - begun < 120:
        for tid, seen in waits.items():
            seen[waiting(t.pid, tid)] += 1
        for s in samplers.values():
            s.drain()
        time.sleep(0.005)
    stop.set()
    out, _ = p.communicate(timeout=60)
    document = json.loads(out)
    after = times(t.pid)
    told = {}
    for tid, (name, user, kernel) in after.items():
        _, user0, kernel0 = before.get(tid, (name, 0, 0))
        sampler = samplers.pop(tid, None)
        if sampler is not None:
            sampler.close()
        if user + kernel > user0 + kernel0 + 1:
            told[f"{tid} {name}"] = {
                "user_s": round((user - user0) * TICK_S, 2),
                "kernel_s": round((kernel - kernel0) * TICK_S, 2),
                "waits": dict(waits.get(tid, collections.Counter()).most_common(6)),
                "places": places(t.pid, sampler.found) if sampler else problem,
            }
    steps = {s["name"]: s["seconds"] for s in document.get("steps", [])}
    most = {k: max((x[i] for x in rates), default=None) for i, k in enumerate(("to_host_kib_s", "from_host_kib_s"))}
    return {"ok": document["ok"], "error": document.get("error"), "steps": steps, "threads": told, "pcie_most": most, "pcie_samples": len(rates)}


def one(side: str, env: dict[str, str]) -> None:
    t = Target(gib, "plain", env=env)
    try:
        for cycle in range(2):
            down = watch(t, "suspend", str(t.pid), "--no-tree", "--accept-loss", "possible-import")
            up = watch(t, "resume", str(t.pid), "--no-tree")
            r.note(f"{side}_{cycle}", {"suspend": down, "resume": up})
            print(side, json.dumps({"suspend": down, "resume": up}), flush=True)
            if not r.check(f"{side}, {cycle}: suspended and resumed, same answers", down["ok"] and up["ok"] and t.same(), [down["error"], up["error"]]):
                r.finish()
    finally:
        t.end()
        wait_for(lambda: not Path(f"/proc/{t.pid}").exists(), 20)


r.note("gib", gib)
one("with", dict(preload.environment()))
one("without", {"LD_PRELOAD": "", "GPUCKPT_PRELOAD": "0"})
r.finish()
