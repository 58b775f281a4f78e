"""Ways to take a torch process off its GPU and bring it back, in one run. usage: LIMIT_S=300 comparison.py [GIB] [ROUNDS] [TOOL...]

* ``driver``: the four calls, one after the other in one process, as NVIDIA's cuda-checkpoint makes them (the time inside the calls, without that process's start);
  and ``cuda-checkpoint``, the whole command, where it is on PATH
* ``gpuckpt``: the whole command; ``gpuckpt exec``: the same on a process that has the preload library; ``gpuckpt pool``: and holds its memory in gpuckpt's
  pool, and ``gpuckpt pool, changed``: where all of it was written to since the last suspend
* ``torch_memory_saver``, where it is installed: pause and resume, called by the program itself, of what it allocated in a region with a backup in host memory;
  and the driver's calls for the rest after it

Each has a process of its own of the same making: GIB of random numbers on four streams, pinned memory, 64 CUDA graphs of 200 nodes. They take turns, where they fit
onto the GPU together; else one process after the other. The first round counts apart. Who "survives" is asked after each round: the sum of all memory, the replays of all graphs.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from lab import SIMULATED, Results, Rounds, Target, calls, free_mib, gpuckpt, left_s, limit, used_mib, wait_for
from lab_fits import summary

from gpuckpt.image import preload

gib, rounds_wanted = float(sys.argv[1]) if len(sys.argv) > 1 else 16, int(sys.argv[2]) if len(sys.argv) > 2 else 4
WORKSPACE_GIB = 6  # what a process takes beyond what it was asked for, at most


def driver(t: Target, down: bool) -> tuple[float, Any]:
    made = calls(t.pid, ("Lock", "Checkpoint") if down else ("Restore", "Unlock"))
    return sum(c[3] for c in made), [c[1] for c in made if c[1] != "CUDA_SUCCESS"]


def cuda_checkpoint(t: Target, _: bool) -> tuple[float, Any]:
    begun = time.perf_counter()
    done = subprocess.run(["cuda-checkpoint", "--toggle", "--pid", str(t.pid)], capture_output=True, text=True, timeout=200)
    return time.perf_counter() - begun, done.stderr.strip() if done.returncode else []


def ours(t: Target, down: bool) -> tuple[float, Any]:
    _, document, wall = gpuckpt("suspend" if down else "resume", t.pid)
    return wall, document.get("error") or []


def changed(t: Target, down: bool) -> tuple[float, Any]:
    if down:
        t.first = t.ask("step")
    return ours(t, down)


def saver(t: Target, down: bool) -> tuple[float, Any]:
    answer = t.ask("pause" if down else "resume")
    return answer.get("seconds", 0.0), [] if "seconds" in answer else [answer]


def saver_then_driver(t: Target, down: bool) -> tuple[float, Any]:
    first, second = [how(t, down) for how in ((saver, driver) if down else (driver, saver))]
    parts.append([round(first[0], 4), round(second[0], 4)])
    return first[0] + second[0], first[1] + second[1]


#: Seconds of each of the two, in the order in which they are done.
parts: list[list[float]] = []
#: name -> how it is done, and how its process is started
TOOLS: dict[str, tuple[Callable[[Target, bool], tuple[float, Any]], str, dict[str, str]]] = {
    "driver": (driver, "full", {}),
    "gpuckpt": (ours, "full", {}),
    "gpuckpt exec": (ours, "full", dict(preload.environment())),
    "gpuckpt pool": (ours, "pool", dict(preload.environment())),
    "gpuckpt pool, changed": (changed, "pool", dict(preload.environment())),
}
if shutil.which("cuda-checkpoint") and not SIMULATED:
    TOOLS["cuda-checkpoint"] = (cuda_checkpoint, "full", {})
if importlib.util.find_spec("torch_memory_saver") and not SIMULATED:
    TOOLS["torch_memory_saver"] = (saver, "saver", {})
    TOOLS["torch_memory_saver, then driver"] = (saver_then_driver, "saver", {})
NOT_THERE = [n for n in ("cuda-checkpoint", "torch_memory_saver") if n not in TOOLS]
TOOLS = {name: TOOLS[name] for name in sys.argv[3:] or TOOLS}


def turn(name: str, t: Target) -> dict[str, Any]:
    """One suspend and one resume by *name*. The other processes stay on the GPU: what is left is counted against what it held."""
    how = TOOLS[name][0]
    running_mib, rss = used_mib(), t.rss_mib()
    down_s, down_error = how(t, True)
    row: dict[str, Any] = {"suspend_s": round(down_s, 4), "suspend_error": down_error, "freed_mib": running_mib - used_mib(), "host_mib": t.rss_mib() - rss}
    up_s, up_error = how(t, False)
    if parts:
        row["parts_s"] = [parts.pop(0) for _ in range(len(parts))]
    row |= {"resume_s": round(up_s, 4), "resume_error": up_error, "same": t.same(), "rss_grew_mib": t.rss_mib() - rss}
    return row


r = Results("comparison" if len(sys.argv) < 4 else f"comparison_{gib:g}")
limit(r, 590)
r.note("gib", gib)
r.note("not_there", NOT_THERE)
together = SIMULATED or (gib + WORKSPACE_GIB) * len(TOOLS) < free_mib() / 1024
r.note("in_turn", together)
rows: list[dict[str, Any]] = []
empty = used_mib()


def rounds_of(names: list[str], until_s: float) -> None:
    """A process for each of *names*, and their rounds in turn, as many as there is time for until *until_s* are left."""
    targets: dict[str, Target] = {}
    held: dict[str, int] = {}
    rounds = Rounds(rest_s=until_s)
    wait_for(lambda: used_mib() <= empty, 20)  # what ended a moment ago may still be counted
    try:
        for name in names:
            before = used_mib()
            try:
                targets[name] = Target(gib, TOOLS[name][1], env=TOOLS[name][2])
            except KeyError:  # it ended before it had said who it is
                r.check(f"{name}: its process came up", False)
                continue
            held[name] = used_mib() - before
        for i in range(rounds_wanted):
            if not rounds.another():
                break
            begun = time.monotonic()
            for name, t in targets.items():
                rows.append({"tool": name, "round": i, "held_mib": held[name], **turn(name, t)})
                r.note("rows", rows)
                print(rows[-1], flush=True)
            rounds.took(time.monotonic() - begun)
    finally:
        for t in targets.values():
            t.end()


groups = [list(TOOLS)] if together else [[name] for name in TOOLS]
for n, group in enumerate(groups):
    rounds_of(group, 15.0 + (left_s() - 15.0) * (len(groups) - n - 1) / (len(groups) - n))
r.note("summary", summary(rows))
for name, found in r.document["summary"].items():
    r.check(f"{name}: same answers after every round", found["same"] == found["rounds"], found)
r.finish()
