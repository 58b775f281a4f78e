"""Images on disk against images in memory, in turn on one process, with `dd` beside them; what a damaged file, a kill -9 and a dead target leave.
usage: image.py [GIB] [N] [DIR]

DIR (default: the current directory) must be on a real disk. Ends at the first failure, and after LIMIT_S in any case. On a slow disk it takes a
smaller image, and fewer than N rounds where time is short: the file says how many. Needs gpuckpt with its preload library.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lab import SIMULATED, Results, Target, gpuckpt, left_s, limit, state, used_mib, wait_for, wall_s

from gpuckpt.image import file, keeper, preload
from gpuckpt.inspect import host, processes

LIMIT_S = 270.0
gib, n = float(sys.argv[1]) if len(sys.argv) > 1 else 8, int(sys.argv[2]) if len(sys.argv) > 2 else 5
place = Path(sys.argv[3] if len(sys.argv) > 3 else ".").absolute() / "gpuckpt-images"
place.mkdir(mode=0o700, exist_ok=True)
r = Results("image")
ALONE = ("--no-tree", "--accept-loss", "possible-import")
RANDOM = Path("/dev/shm/gpuckpt-random")  # what dd writes: disks of zeros are quicker
PIECE = (64 << 20) if SIMULATED else (256 << 20)
SHORT = ("in_", "checkpoint", "store", "drop", "load", "restore", "suspended_rss_grew_mib", "available_mib")


def must(what: str, ok: bool, seen: object = None) -> None:
    if not r.check(what, ok, seen):
        r.finish()


def available_mib() -> int:
    """In a cgroup of its own (lane.sh) of what that takes, else of the machine: others use memory too. Only differences mean anything."""
    own = processes.cgroup(os.getpid())
    taken = Path(f"/sys/fs/cgroup{own}/memory.current")
    return -int(taken.read_text()) >> 20 if own and taken.exists() else host.meminfo().get("MemAvailable", 0) >> 20


def free_mib() -> int:
    found = os.statvfs(place)
    return found.f_bfree * found.f_frsize >> 20


def step(document: dict[str, Any], name: str) -> float | None:
    return next((s["seconds"] for s in document.get("steps", []) if s["name"] == name), None)


def held(t: Target) -> Path:
    """The file, which has no name."""
    if SIMULATED:
        return next((Path(os.environ["GPUCKPT_SIMULATE"]) / "kept").glob(f"{t.pid}-*/held"))
    process = processes.read(t.pid)
    assert process is not None
    with keeper.of(process.id) as found:
        assert found.holds is not None, "the process does not hold its file"
        return found.holds


def down(t: Target, keep_in: str) -> dict[str, Any]:
    code, document, wall = gpuckpt("suspend", t.pid, *ALONE, "--keep-in", keep_in, timeout=100)
    must(f"suspend, kept in {keep_in}", code == 0, document.get("error"))
    return {"suspend_wall_s": wall, **{k: step(document, k) for k in ("checkpoint", "store", "drop")}, **document["processes"][0]["image"]}


def up(t: Target) -> dict[str, Any]:
    code, document, wall = gpuckpt("resume", t.pid, "--no-tree", timeout=100)
    must("resume", code == 0, document.get("error"))
    must("the same answers", t.same())
    return {"resume_wall_s": wall, **{k: step(document, k) for k in ("load", "restore")}}


def cycle(t: Target, keep_in: str) -> dict[str, Any]:
    rss, available, disk = t.rss_mib(), available_mib(), free_mib()
    row = {"in_": keep_in, **down(t, keep_in)}
    row |= {"suspended_rss_grew_mib": t.rss_mib() - rss, "available_mib": available_mib() - available, "disk_mib": disk - free_mib()}
    row |= {"used_mib": used_mib(), "state": state(t.pid), "names": sorted(os.listdir(place))}
    row |= up(t)
    wait_for(lambda: disk - free_mib() < 100, 5)  # the last descriptor is closed a moment after the process runs
    row |= {"rss_grew_mib": t.rss_mib() - rss, "disk_left_mib": disk - free_mib()}
    print(json.dumps({k: row[k] for k in SHORT if row[k] is not None}), flush=True)
    return row


def dd(nbytes: int) -> dict[str, float]:
    """GiB a second of direct I/O in pieces of 16 MiB, writing with a flush at the end, and reading."""
    path, pieces = place / "dd", max(1, nbytes // PIECE)
    written = read = 0.0
    try:
        for i in range(pieces):
            words = [f"if={RANDOM}", f"of={path}", "bs=16M", f"count={PIECE >> 24}", f"seek={i * (PIECE >> 24)}", "oflag=direct", "conv=notrunc"]
            written += wall_s(["dd", *words, "status=none"])
        written += wall_s(["sync", path])
        read = wall_s(["dd", f"if={path}", "of=/dev/null", "bs=16M", "iflag=direct", "status=none"])
    finally:
        path.unlink(missing_ok=True)
    total = pieces * PIECE / (1 << 30)
    return {"write_gib_s": round(total / written, 3), "read_gib_s": round(total / read, 3)}


def start(kind: str = "torch") -> Target:
    environ = dict(preload.environment())
    if kind == "plain" and os.environ.get("PLAIN_TARGET") and not SIMULATED:
        return Target(env=environ, program=[os.environ["PLAIN_TARGET"], str(gib)])
    return Target(gib, "plain", env=environ)


def fitting(rates: dict[str, float]) -> float:
    """GiB of an image of which, at these rates, half of the time left moves all that is written and read: by us in 2 N + 6 ways each, by dd in N."""
    seconds_a_gib = (2 * n + 6) * (1 / rates["write_gib_s"] + 1 / rates["read_gib_s"]) + (n + 8) * 0.5
    return max(1.0, min(gib, round(left_s() / 2 / seconds_a_gib, 1)))


def side_by_side(t: Target) -> None:
    rows: dict[str, list[dict[str, Any]]] = {"ram": [], "disk": []}
    beside: list[dict[str, float]] = []
    round_s = 0.0
    while len(beside) < n and (not beside or left_s() > 4 * round_s):  # the rest takes about three rounds
        begun = time.perf_counter()
        rows["ram"].append(cycle(t, "ram"))
        rows["disk"].append(cycle(t, str(place)))
        beside.append(dd(int(gib * (1 << 30))))
        round_s = max(round_s, time.perf_counter() - begun)
        r.note("cycles", rows)
        r.note("dd", beside)
    disk = rows["disk"]
    if not SIMULATED:
        must("the library made every image", all(x["path"] == "preload" for x in rows["ram"] + disk), disk[0]["path"])
        must("the driver says that it is checkpointed all the while", all(x["state"] == "CHECKPOINTED" for x in disk), disk[0]["state"])
        must("RSS of the suspended process within 300 MiB of before", all(x["suspended_rss_grew_mib"] < 300 for x in disk), [x["suspended_rss_grew_mib"] for x in disk])
        must("and the machine has the memory back", all(abs(x["available_mib"]) < 1024 for x in disk), [x["available_mib"] for x in disk])
    must("the file has no name, and is gone after the resume", all(not x["names"] and x["disk_left_mib"] < 100 for x in disk), [x["disk_left_mib"] for x in disk])
    nbytes = disk[0]["bytes"] / (1 << 30)
    median = {
        "write_gib_s": round(nbytes / statistics.median(x["store"] for x in disk), 3),
        "read_gib_s": round(nbytes / statistics.median(x["load"] for x in disk), 3),
    }
    of_dd = {k: round(median[k] / statistics.median(b[k] for b in beside), 3) for k in median}
    keys = ("suspend_wall_s", "checkpoint", "resume_wall_s", "restore")
    r.note("rounds", len(beside))
    r.note("median", {kind: {k: round(statistics.median(x[k] for x in both), 3) for k in keys} for kind, both in rows.items()})
    r.note("rates", {**median, "of_dd": of_dd})
    print(json.dumps({"rates": median, "of_dd": of_dd}), flush=True)
    if not SIMULATED:
        r.check("written at 0.8 of what dd reaches, or more", of_dd["write_gib_s"] >= 0.8, of_dd)
        r.check("read back at 0.8 of what dd reaches, or more", of_dd["read_gib_s"] >= 0.8, of_dd)


def moved_later(t: Target) -> None:
    down(t, "ram")
    rss = t.rss_mib()
    row = down(t, str(place))
    r.note("moved_later", {**row, "rss_fell_mib": rss - t.rss_mib()})
    up(t)


def damaged(t: Target) -> None:
    down(t, str(place))
    path = held(t)
    where = file.HEADER_BYTES + (100 if SIMULATED else 100 << 20)
    with open(path, "r+b") as f:
        f.seek(where)
        before = f.read(1)
        f.seek(where)
        f.write(bytes([before[0] ^ 1]))
    code, document, _ = gpuckpt("resume", t.pid, "--no-tree", timeout=100)
    must("a damaged file is refused", (code, document["error"]["code"]) == (3, "image-unreadable"), document.get("error"))
    must("and the process is checkpointed as before", state(t.pid) == "CHECKPOINTED")
    with open(path, "r+b") as f:
        f.seek(where)
        f.write(before)
    up(t)


def killed(t: Target) -> None:
    """kill -9 of the command and its callers while the file is written."""
    disk = free_mib()
    p = subprocess.Popen(["gpuckpt", "suspend", str(t.pid), *ALONE, "--keep-in", str(place)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: SIMULATED or free_mib() < disk - 100 or p.poll() is not None, 60)
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if (directory / "comm").read_text().strip() == "gpuckpt-store":
                os.kill(int(directory.name), signal.SIGKILL)
        except OSError:
            continue
    p.kill()
    p.wait(20)
    code, document, _ = gpuckpt("recover")
    r.note("killed_while_writing", {"recover": code, "said": document.get("recovered"), "names": sorted(os.listdir(place))})
    must("after kill -9 of everything no file is left", not os.listdir(place), sorted(os.listdir(place)))
    must("and its space is back", SIMULATED or wait_for(lambda: free_mib() > disk - 200, 20), disk - free_mib())
    if state(t.pid) == "CHECKPOINTED":
        up(t)
    must("and the process computes the same", t.same())


def dead(t: Target) -> None:
    down(t, str(place))
    disk = free_mib()
    t.end()
    wait_for(lambda: free_mib() - disk > gib * 1000 * 0.9, 20)  # of a large file the blocks go one after the other
    r.note("target_killed", {"disk_freed_mib": free_mib() - disk})
    must("a target that is killed takes its file along", SIMULATED or free_mib() - disk > gib * 1000 * 0.9, free_mib() - disk)
    gpuckpt("recover")


if why := preload.problem():
    raise SystemExit(f"no preload library: {why}")
limit(r, LIMIT_S)
with open(RANDOM, "wb") as random:
    for _ in range(PIECE >> 20):
        random.write(os.urandom(1 << 20))
r.note("file_system", file.filesystem(place))
try:
    r.note("disk", rates := dd(max(PIECE, (1 << 30) if not SIMULATED else 0)))
    gib = fitting(rates)
    r.note("gib", gib)
    print(json.dumps({"gib": gib, "dd": rates}), flush=True)
    target = start()
    try:
        side_by_side(target)
        moved_later(target)
        damaged(target)
        killed(target)
        dead(target)
    finally:
        target.end()
    if os.environ.get("PLAIN_TARGET") and left_s() > 60:
        target = start("plain")
        try:
            r.note("plain", [cycle(target, str(place))])
        finally:
            target.end()
finally:
    RANDOM.unlink(missing_ok=True)
r.finish()
