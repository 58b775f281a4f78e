"""Suspends with the preload library and without it, in turn on two processes of one kind; what the library saw; what a failing image mmap
does. usage: preload.py [GIB] [N] [torch|plain [reserve]]

Answers first whether the library can act at all: "the restore thread maps the image, from libcuda" fails with the thread and the caller that
it saw instead. Needs a C compiler for plain_target.c, or $PLAIN_TARGET, a build of it. Ends after LIMIT_S in any case; where time is short it
makes fewer than N rounds, and the file says how many. With one kind of process named, that alone is looked at, and its results are in
preload_KIND.json.

With "reserve": the driver alone, the library, and the library with memory kept ready, in turn. Each round has a fresh process of each, which is
suspended and resumed twice: a first suspend and a later one. In reserve_KIND.json:

    KIND_arms                {"without" | "with" | "reserve": [{"first": cycle, "later": cycle} of each process]}
    KIND_first_median_s,     of each of the three: checkpoint, restore, and the commands' wall time
    KIND_later_median_s
    KIND_first_ratio,        of "with" and of "reserve": the same, divided by the driver's alone
    KIND_later_ratio
    KIND_reserve             of each process that kept memory ready: how much, in what time it was there (ready_s), in what time it was zeroed
                             after each resume (zeroed_s), and what came back of it (returned)
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from lab import HERE, SIMULATED, Results, Target, alive, gpuckpt, left_s, limit, state, used_mib

from gpuckpt.image import preload, reserve
from gpuckpt.image.preload import Unavailable
from gpuckpt.inspect import processes

if SIMULATED:
    import lab_simulated

LIMIT_S = 420.0
gib, n = float(sys.argv[1]) if len(sys.argv) > 1 else 20, int(sys.argv[2]) if len(sys.argv) > 2 else 5
only = sys.argv[3] if len(sys.argv) > 3 else ""
RESERVE = "reserve" in sys.argv[4:]
r = Results(f"reserve_{only}" if RESERVE else f"preload_{only}" if only else "preload")
FOLDER = tempfile.TemporaryDirectory()
CALLS = """
import json, sys, time
from cuda.bindings import driver as cu
pid = int(sys.argv[1]); out = []
for name in sys.argv[2:]:
    args = {"Lock": lambda: [cu.CUcheckpointLockArgs()], "GetState": list, "GetRestoreThreadId": list}.get(name, lambda: [None])()
    if name == "Lock": args[0].timeoutMs = 10000
    t = time.perf_counter(); found = getattr(cu, "cuCheckpointProcess" + name)(pid, *args)
    out.append([name, found[0].name, str(found[1]) if len(found) > 1 else None, round(time.perf_counter() - t, 4)])
print(json.dumps(out))
"""


def calls(pid: int, *names: str) -> list[list[Any]]:
    """The driver's own answers, asked by a process of its own: [call, result, value, seconds] each."""
    if SIMULATED:
        return lab_simulated.calls(pid, names)
    try:
        p = subprocess.run([sys.executable, "-c", CALLS, str(pid), *names], capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return [["", "HUNG", None, 60.0]]
    return json.loads(p.stdout) if p.returncode == 0 else [["", p.stderr[-500:], None, 0.0]]


def result(pid: int) -> dict[str, Any]:
    """What the library says, with names for its numbers."""
    found = processes.read(pid)
    try:
        seen = preload.result(found.id)  # type: ignore[union-attr]
    except Unavailable as e:
        return {"unavailable": str(e)}
    images = [{"mib": i.nbytes >> 20, "verdict": i.verdict.name, "error": i.error, "flags": flags(pid, i.address)} for i in seen.images]
    last = {"verdict": seen.last.name, "thread": thread(pid, seen.last_tid), "caller": mapping(pid, seen.last_caller), "mib": seen.last_nbytes >> 20}
    return {"images": images, "seen": seen.seen, "last": last, "populate_s": seen.populate_s, "threads": seen.threads, "huge": seen.huge_pages, "copied_mib": seen.copied >> 20, "copies": seen.copies, "copy_threads": seen.copy_threads, "from_reserve_mib": seen.from_reserve >> 20}


def thread(pid: int, tid: int) -> str:
    try:
        return f"{tid} {Path(f'/proc/{pid}/task/{tid}/comm').read_text().strip()}"
    except OSError:
        return str(tid)


def mapping(pid: int, address: int) -> str:
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        begin, end = (int(x, 16) for x in line.split()[0].split("-"))
        if begin <= address < end:
            return f"{line.split(maxsplit=5)[5] if len(line.split()) > 5 else 'no file'}+{address - begin:#x}"
    return hex(address)


def flags(pid: int, address: int) -> str:
    """The VmFlags of the mapping that *address* lies in."""
    here = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            here = int(found[1], 16) <= address < int(found[2], 16)
        elif here and line.startswith("VmFlags:"):
            return line.split(":")[1].strip()
    return ""


def library_off() -> dict[str, str]:
    return {"LD_PRELOAD": "", "GPUCKPT_PRELOAD": "0"}


def start(kind: str, on: bool, size: float, more: dict[str, str] | None = None) -> Target:
    env = (more or {}) if on else library_off()
    if kind == "torch" or SIMULATED:
        return Target(size, "plain", env={**preload.environment(), **env} if on else env)
    return Target(env=env, program=[*(["gpuckpt", "exec", "--"] if on else []), plain_target(), str(size)])


def plain_target() -> str:
    if made := os.environ.get("PLAIN_TARGET"):
        return made
    built = str(Path(FOLDER.name) / "plain_target")
    if not os.path.exists(built):
        subprocess.run(["gcc", "-O3", "-o", built, HERE / "plain_target.c", "-ldl"], check=True)
    return built


def cycle(t: Target) -> dict[str, Any]:
    rss = t.rss_mib()
    code, down, wall = gpuckpt("suspend", t.pid, "--no-tree", "--accept-loss", "possible-import")
    if code:
        raise SystemExit(f"suspend: exit {code}, {down.get('error')}")
    row: dict[str, Any] = {"suspend": code, "suspend_wall_s": wall, "error": down.get("error"), "used_mib": used_mib()}
    row |= {s["name"]: s["seconds"] for s in down.get("steps", [])} | {"library": result(t.pid), "suspended_rss_mib": t.rss_mib()}
    code, up, wall = gpuckpt("resume", t.pid, "--no-tree")
    if code:
        raise SystemExit(f"resume: exit {code}, {up.get('error')}")
    row |= {"resume": code, "resume_wall_s": wall} | {s["name"]: s["seconds"] for s in up.get("steps", []) if s["name"] in ("restore", "unlock")}
    return {**row, "same": t.same(), "rss_grew_mib": t.rss_mib() - rss}


def side_by_side(kind: str, until_left_s: float) -> None:
    """N suspends of each, in turn: the first one without, the first one with. Fewer, so that *until_left_s* are left for the rest."""
    round_s = 0.0
    sides = {"without": start(kind, False, gib), "with": start(kind, True, gib)}
    rows: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    try:
        r.check(f"{kind}: the library is loaded where it should be", [preload.loaded(t.pid) for t in sides.values()] == [False, True])
        while len(rows["with"]) < n and (not round_s or left_s() > until_left_s + 1.2 * round_s):
            begun = time.monotonic()
            for side, t in sides.items():
                rows[side].append(cycle(t))
                print(kind, side, json.dumps({k: rows[side][-1].get(k) for k in ("checkpoint", "restore", "same", "error")}), flush=True)
                r.note(f"{kind}_cycles", rows)
            round_s = max(round_s, time.monotonic() - begun)
    finally:
        for t in sides.values():
            t.end()
    every = [row for both in rows.values() for row in both]
    r.check(f"{kind}: every suspend and resume, same answers", all(x["suspend"] == x["resume"] == 0 and x["same"] for x in every))
    keys = ("suspend_wall_s", "checkpoint", "resume_wall_s", "restore")
    median = {side: {k: round(statistics.median(x[k] for x in both if k in x), 3) for k in keys} for side, both in rows.items()}
    first = {side: {k: both[0].get(k) for k in keys} for side, both in rows.items()}
    ratio = {k: round(median["with"][k] / median["without"][k], 3) for k in keys if median["without"][k]}
    r.note(f"{kind}_median_s", median)
    r.note(f"{kind}_first_s", first)
    r.note(f"{kind}_ratio", ratio)
    print(kind, json.dumps({"median": median, "ratio": ratio}), flush=True)
    if SIMULATED:
        return
    seen = [x["library"] for x in rows["with"]]
    fast = [i["verdict"] == "FAST" for s in seen for i in s.get("images", [])]
    r.check(f"{kind}: the restore thread maps the image, from libcuda", all(s.get("images") for s in seen) and all(fast), seen[0])
    r.check(f"{kind}: huge pages, kept out of dumps", all({"hg", "dd"} <= set(i["flags"].split()) for s in seen for i in s.get("images", [])))
    r.check(f"{kind}: checkpoint at most 0.45 of the driver's own", ratio["checkpoint"] <= 0.45, ratio)
    r.check(f"{kind}: restore no slower", ratio["restore"] <= 1.1, ratio)
    r.check(f"{kind}: nothing stays in host memory", all(x["rss_grew_mib"] < 300 for x in rows["with"][1:]), [x["rss_grew_mib"] for x in rows["with"]])


def kept(pid: int, *amount: object) -> dict[str, Any]:
    """What `gpuckpt reserve` says of *pid*, told to have so much ready."""
    code, document, wall = gpuckpt("reserve", pid, *amount)
    if code or not document.get("reserved"):
        return {"exit": code, "error": document.get("error"), "wall_s": wall}
    return {**document["reserved"][0], "warnings": document["warnings"], "wall_s": wall}


def zeroed_s(pid: int) -> float | None:
    """Seconds until all that came back is zeroed; None after a minute."""
    begun = time.monotonic()
    while time.monotonic() < begun + 60:
        now = kept(pid)
        if "error" in now or now["zeroed_bytes"] >= now["wanted_bytes"]:
            return round(time.monotonic() - begun, 2)
        time.sleep(0.1)
    return None


def one_of_three(kind: str, arm: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A first and a later cycle of a fresh process, and of memory kept ready what there is to tell."""
    t = start(kind, arm != "without", gib, {reserve.VARIABLE: reserve.FIXED} if arm == "reserve" else None)
    told: dict[str, Any] = {}
    try:
        if arm == "reserve" and not SIMULATED:
            told = {"asked_mib": used_mib() + 64} | kept(t.pid, f"{used_mib() + 64}MiB")
            told["ready_s"] = told.pop("wall_s")
        rows = {"first": cycle(t)}
        if told:
            told["zeroed_s"] = [zeroed_s(t.pid)]
        rows["later"] = cycle(t)
        if told:
            told["zeroed_s"].append(zeroed_s(t.pid))
            found = processes.read(t.pid)
            with contextlib.suppress(Unavailable):
                told["returned"] = reserve.look(found.id).returned  # type: ignore[union-attr]
        return rows, told
    finally:
        t.end()


def three_arms(kind: str) -> None:
    rows: dict[str, list[dict[str, Any]]] = {"without": [], "with": [], "reserve": []}
    told, round_s = [], 0.0
    while len(rows["reserve"]) < n and (not round_s or left_s() > 5 + 1.1 * round_s):
        begun = time.monotonic()
        for arm, seen in rows.items():
            both, more = one_of_three(kind, arm)
            seen.append(both)
            told += [more] if more else []
            print(kind, arm, json.dumps({turn: {k: x.get(k) for k in ("checkpoint", "restore", "same")} for turn, x in both.items()} | more), flush=True)
            r.note(f"{kind}_arms", rows)
            r.note(f"{kind}_reserve", told)
        round_s = max(round_s, time.monotonic() - begun)
    every = [x for seen in rows.values() for both in seen for x in both.values()]
    r.check(f"{kind}: every suspend and resume, same answers", all(x["suspend"] == x["resume"] == 0 and x["same"] for x in every))
    keys = ("suspend_wall_s", "checkpoint", "resume_wall_s", "restore")
    ratios = {}
    for turn in ("first", "later"):
        median = {arm: {k: round(statistics.median(both[turn][k] for both in seen), 3) for k in keys} for arm, seen in rows.items()}
        ratios[turn] = {arm: {k: round(median[arm][k] / median["without"][k], 3) for k in keys if median["without"][k]} for arm in ("with", "reserve")}
        r.note(f"{kind}_{turn}_median_s", median)
        r.note(f"{kind}_{turn}_ratio", ratios[turn])
        print(kind, turn, json.dumps({"median": median, "ratio": ratios[turn]}), flush=True)
    if SIMULATED:
        return
    ready = [x["library"] for both in rows["reserve"] for x in both.values()]
    r.check(f"{kind}: the first mapping of GPU memory was seen", all("error" not in x for x in told), told[:1])
    r.check(f"{kind}: images come from what is ready, and as the library makes them", all(x.get("from_reserve_mib", 0) > 0.95 * gib * 1024 and [i["verdict"] for i in x.get("images", [])] == ["FAST"] and {"hg", "dd"} <= set(x["images"][0]["flags"].split()) for x in ready), ready[:2])
    r.check(f"{kind}: libcuda unmaps an image so that its memory comes back", all(x.get("returned") == 2 for x in told), told)
    r.check(f"{kind}: checkpoint at most 0.4 of the driver's own at the first suspend", ratios["first"]["reserve"]["checkpoint"] <= 0.4, ratios)
    r.check(f"{kind}: the first is no slower than with the library alone", ratios["first"]["reserve"]["checkpoint"] <= 1.05 * ratios["first"]["with"]["checkpoint"], ratios)
    r.check(f"{kind}: restore no slower", ratios["first"]["reserve"]["restore"] <= 1.1, ratios)


def restore_thread() -> None:
    """Who it is, in each state."""
    t = start("torch", False, 1)
    try:
        answers = calls(t.pid, "GetRestoreThreadId", "Lock", "GetRestoreThreadId", "Checkpoint", "GetRestoreThreadId", "Restore", "Unlock")
        tids = [a for a in answers if a[0] == "GetRestoreThreadId"]
        r.note("restore_thread", {"answers": answers, "name": [thread(t.pid, int(a[2] or 0)) for a in tids]})
        r.check("GetRestoreThreadId answers while running, locked and checkpointed", len({(a[1], a[2]) for a in tids}) == 1, tids)
        r.check("and the process computes the same", t.same())
    finally:
        t.end()


def failing_mmap(on: bool) -> bool:
    """Whether a process computes on after it. The address space is limited to what the process has and half of what the image takes, then Checkpoint is called."""
    words = "with" if on else "without"
    t = start("torch", on, 4)
    try:
        locked = calls(t.pid, "Lock")
        process = processes.read(t.pid)
        assert process is not None
        limit = psutil.Process(t.pid).memory_info().vms + (2 << 30)
        before = resource.prlimit(t.pid, resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        operation = 0
        if on and not SIMULATED:
            operation = preload.announce(process.id, int(calls(t.pid, "GetRestoreThreadId")[0][2]))
        failed = calls(t.pid, "Checkpoint", "GetState")
        if operation:
            preload.withdraw(process.id, operation)
        seen = result(t.pid) if on else None
        resource.prlimit(t.pid, resource.RLIMIT_AS, before)
        lives = alive(t.pid)
        back = calls(t.pid, "Restore", "Unlock", "GetState") if state(t.pid) == "CHECKPOINTED" else calls(t.pid, "Unlock", "GetState")
        same = lives and state(t.pid) == "RUNNING" and t.same()
        found = {"lock": locked, "checkpoint": failed, "library": seen, "alive": lives, "back": back, "same": same}
        r.note(f"failing_mmap_{words}", found)
        return bool(same)
    finally:
        t.end()


if why := preload.problem():
    raise SystemExit(f"no preload library: {why}")
if not SIMULATED and not os.environ.get("PLAIN_TARGET") and shutil.which("gcc") is None:
    raise SystemExit("no C compiler: build plain_target.c elsewhere and name it in PLAIN_TARGET")
r.note("gib", gib)
r.note("threads", preload.threads(os.getpid()))
limit(r, LIMIT_S)
if RESERVE:
    three_arms(only)
    r.finish()
if only:
    side_by_side(only, 3)
    r.finish()
restore_thread()
side_by_side("torch", left_s() / 2)
side_by_side("plain", 45)
without, with_library = failing_mmap(False), failing_mmap(True)
r.note("a_failing_mmap_is_survived", {"without": without, "with": with_library})
r.check("a failing image mmap is no worse with the library", with_library >= without, [without, with_library])
r.finish()
