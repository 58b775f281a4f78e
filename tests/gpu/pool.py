"""The pool on a GPU: how fast tags leave and come back, what is left meanwhile, whether the answers stay the same. usage: pool.py [GIB]

One torch process with weights, kv_cache and runtime tags and CUDA graphs. Beside each other in one run: the pinned copy (the limit), first and
later sleeps, changed and unchanged data, the ways to copy; then `gpuckpt suspend` of it while it sleeps, and while it is awake.
Ends by itself within 150 s at 24 GiB; each part reports its own failure, and the rest goes on.
"""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import time
import traceback
from typing import Any

from lab import HERE, SIMULATED, Results, Target, gpuckpt, left_s, limit, used_mib

LIMIT_S = 145.0
MIB = 1 << 20

if SIMULATED:
    raise SystemExit("there is no simulated torch: tests/test_pool*.py test the pool where there is no GPU")
gib = float(sys.argv[1]) if len(sys.argv) > 1 else 24
r = Results("pool")
r.note("gib", gib)
limit(r, LIMIT_S + 5)  # where not even an exception gets through
summary: dict[str, Any] = {}


class Late(Exception):
    pass


def out_of_time(*_: object) -> None:
    raise Late(f"more than {LIMIT_S} s")


signal.signal(signal.SIGALRM, out_of_time)
signal.alarm(int(min(left_s() - 5, LIMIT_S)))


def part(name: str, needs_s: float = 5.0) -> Any:
    """Run a function as a part: its failure is reported, and the rest goes on."""

    def run(function: Any) -> None:
        begun = time.monotonic()
        if left_s() < needs_s:
            r.check(f"{name}: ran", False, f"no time: {left_s():.0f} s left")
            return
        try:
            function()
        except Late as error:
            r.check(f"{name}: ran", False, str(error))
        except Exception as error:
            r.check(f"{name}: ran", False, f"{type(error).__name__}: {error} {traceback.format_exc()[-600:]}")
        r.note(f"seconds_{name}", round(time.monotonic() - begun, 2))

    return run


t = Target(program=[sys.executable, str(HERE / "pool_target.py"), str(gib)])
first = t.first
r.check("the process starts", "sum" in first, first)
if "sum" not in first:
    r.finish()
original = first["sum"], first["replay"]


def ask(command: str, seconds: float = 60) -> Any:
    t.send(command)
    answer = t.read(max(1.0, min(seconds, left_s())))
    if isinstance(answer, dict) and (answer.get("late") or answer.get("eof") or "error" in answer):
        raise RuntimeError(f"{command}: {json.dumps(answer)[:1500]}")
    return answer


def same() -> bool:
    """The answers are those of the start."""
    answer = ask("check")
    if answer["flipped"]:
        ask("flip")
        answer = ask("check")
    return (answer["sum"], answer["replay"]) == original


def median(rows: list[dict[str, Any]], key: str = "seconds") -> float:
    return round(statistics.median(x[key] for x in rows), 4)


def rates(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"seconds": median(rows), "gib_s": median(rows, "gib_s"), "phases": rows[len(rows) // 2]["phases"], "bytes": rows[0]["bytes_copied"]}


awake_mib = used_mib()
addresses = ask("addresses")
r.note("awake_mib", awake_mib)
r.note("blocks", ask("blocks"))


@part("limit")
def _() -> None:
    summary["limit"] = ask("limit")
    r.note("limit_gib_s", summary["limit"])


@part("fingerprint")
def _() -> None:
    found = ask("fingerprint")
    r.note("fingerprint", found)
    summary["fingerprint"] = found
    r.check("the fingerprint kernel computes what is defined", found["as_defined"], found)


@part("first")
def _() -> None:
    down = ask("sleep 1")
    asleep = used_mib()
    stats = ask("stats")
    up = ask("wake")
    r.note("first", {"down": down, "asleep_mib": asleep, "stats": stats, "up": up})
    summary["first"] = {"down_s": down["seconds"], "down_gib_s": down["gib_s"], "up_s": up["seconds"], "up_gib_s": up["gib_s"], "asleep_mib": asleep}
    r.check("first sleep and wake: same answers", same(), summary["first"])
    r.check("same addresses", ask("addresses") == addresses)
    pool_mib = sum(s[1] for s in stats) / MIB
    r.check("asleep, the pool holds nothing on the GPU", awake_mib - asleep > pool_mib * 0.98, [awake_mib, asleep, round(pool_mib)])


@part("ways")
def _() -> None:
    """Every way to copy; the parts after this one have the best."""
    found: dict[str, Any] = {}
    ways = {  # threads, piece, part
        "16 x 1M": (16, 0, 1 * MIB),
        "16 x 512K": (16, 0, 512 << 10),
        "16 x 256K": (16, 0, 256 << 10),
        "16 x 2M": (16, 0, 2 * MIB),
        "16 x 4M": (16, 0, 4 * MIB),
        "16 x 8M": (16, 0, 8 * MIB),
        "12 x 1M": (12, 0, 1 * MIB),
        "12 x 4M": (12, 0, 4 * MIB),
        "8 x 1M": (8, 0, 1 * MIB),
        "8 x 4M": (8, 0, 4 * MIB),
        "16 x 1M, pieces of 8M": (16, 8 * MIB, 1 * MIB),
    }

    def take(name: str) -> dict[str, Any]:
        ask("tune " + " ".join(map(str, ways[name])))
        ask("trim")
        first = ask("sleep 1")  # with host memory that nobody has touched yet
        rows = [(first, ask("wake"))]
        for _ in range(2):
            ask("flip")
            rows.append((ask("sleep 1"), ask("wake")))
        return {
            "first": first["gib_s"],
            "down": max(d["gib_s"] for d, _ in rows[1:]),
            "up": max(u["gib_s"] for _, u in rows),
            "phases": [first["phases"], rows[-1][0]["phases"], rows[-1][1]["phases"]],
        }

    for name in ways:
        found[name] = take(name)
        if left_s() < 85:
            break
    best = max(found, key=lambda n: min(found[n]["down"], found[n]["up"]))
    take(best)
    r.note("ways", found)
    r.note("best", best)
    summary["ways (first, down, up GiB/s)"] = {k: (v["first"], v["down"], v["up"]) for k, v in found.items()}
    summary["best"] = best
    r.check("every way to copy: same answers", same(), best)


@part("first_again", 10)
def _() -> None:
    rows = []
    for _ in range(3):
        ask("trim")
        rows.append(ask("sleep 1"))
        ask("wake")
    r.note("first_again", rows)
    summary["first_again"] = rates(rows)
    r.check("sleeps after a trim: same answers", same(), summary["first_again"])


@part("changed", 10)
def _() -> None:
    down, up, asleep = [], [], []
    for _ in range(5):
        ask("flip")
        down.append(ask("sleep 1"))
        asleep.append(used_mib())
        up.append(ask("wake"))
    r.note("changed", {"down": down, "up": up, "asleep_mib": asleep})
    summary["changed"] = {"down": rates(down), "up": rates(up)}
    r.check("later sleeps of changed data: same answers", same(), summary["changed"])
    link = summary.get("limit", {})
    for way, rows in (("down", down), ("up", up)):
        copying = statistics.median(row["bytes_copied"] / (1 << 30) / row["phases"]["copy"] for row in rows)
        share, whole = copying / link.get(way, float("inf")), median(rows, "gib_s") / link.get(way, float("inf"))
        r.check(f"copies {way} at 0.85 of the link", share >= 0.85, {"copying": round(share, 3), "with unmap and map": round(whole, 3)})


@part("unchanged", 10)
def _() -> None:
    rows, some = [], []
    ask("sleep 1"), ask("wake")
    for _ in range(5):
        rows.append(ask("sleep 1"))
        ask("wake")
    r.note("unchanged", rows)
    summary["unchanged"] = rates(rows)
    for _ in range(2):
        ask("flip_some")
        some.append(ask("sleep 1"))
        ask("wake")
    r.note("one_word_changed", some)
    summary["one_word_changed"] = {"seconds": [x["seconds"] for x in some], "bytes_copied": [x["bytes_copied"] for x in some]}
    r.check("sleeps of unchanged data: same answers", same(), [summary["unchanged"], summary["one_word_changed"]])


@part("many blocks", 10)
def _() -> None:
    """What each of 400 more blocks of 20 MiB adds to mapping and unmapping."""
    before = ask("blocks")
    ask("many 400")
    after = ask("blocks")
    rows = [(ask("sleep 1"), ask("wake")) for _ in range(3)]
    found = {"blocks": [before["count"], after["count"]], "down": [d["phases"] for d, _ in rows], "up": [u["phases"] for _, u in rows]}
    r.note("many_blocks", found)
    summary["many_blocks"] = {"blocks": found["blocks"], "down": found["down"][-1], "up": found["up"][-1]}
    r.check("400 more blocks: same content", ask("few")["same"], summary["many_blocks"])
    ask("sleep 1"), ask("wake")


@part("level 2", 10)
def _() -> None:
    down = ask("sleep 2")
    ask("wake weights")
    ask("reload")
    ask("wake kv_cache")
    r.check("level 2, weights woken and loaded anew before the cache: same answers", same(), down["seconds"])
    ask("sleep 2")
    ask("wake kv_cache")
    ask("wake weights")
    ask("reload")
    r.check("level 2, the other order: same answers", same())


def suspend(words: str) -> dict[str, Any]:
    code, down, wall = gpuckpt("suspend", t.pid, "--no-tree", "--accept-loss", "possible-import")
    between = used_mib()
    if code == 0:
        back, up, up_wall = gpuckpt("resume", t.pid, "--no-tree")
    else:
        back, up, up_wall = code, {}, 0.0
    steps = {s["name"]: s["seconds"] for s in [*down.get("steps", []), *up.get("steps", [])]}
    found = {"suspend_s": down.get("seconds"), "resume_s": up.get("seconds"), "wall": [wall, up_wall], "mib": between, "steps": steps}
    r.check(f"{words}: suspended and resumed, 0 MiB meanwhile", (code, back, between) == (0, 0, 0), [found, down.get("error"), up.get("error")])
    return found


@part("suspended asleep", 15)
def _() -> None:
    rows = []
    for _ in range(3):
        down = ask("sleep 1")
        found = suspend("asleep")
        up = ask("wake")
        rows.append({**found, "sleep_s": down["seconds"], "wake_s": up["seconds"]})
    r.note("suspended_asleep", rows)
    keys = ("sleep_s", "suspend_s", "resume_s", "wake_s")
    summary["suspended_asleep"] = {k: median(rows, k) for k in keys}
    r.check("suspended while asleep: same answers", same(), summary["suspended_asleep"])


@part("suspended awake", 30)
def _() -> None:
    ask("trim")
    found = suspend("awake")
    r.note("suspended_awake", found)
    summary["suspended_awake"] = {k: found[k] for k in ("suspend_s", "resume_s")}
    r.check("suspended while awake: same answers", same(), summary["suspended_awake"])


@part("ends asleep", 25)
def _() -> None:
    """Cases 49, 51 and 52."""
    wanted = {"exit": 7, "_exit": 3, "exception": 1, "sigterm": -signal.SIGTERM, "write": None, "flags": 0}
    words = {how: [sys.executable, str(HERE / "pool_target.py"), "--ending", how] for how in wanted}
    started = {how: subprocess.Popen(w, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for how, w in words.items()}
    found = {}
    for how, process in started.items():
        try:
            out, err = process.communicate(timeout=max(1.0, min(60.0, left_s())))
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        found[how] = {"code": process.returncode, "said": out[-600:], "errors": err[-400:]}
    r.note("ends_asleep", found)
    codes = {how: f["code"] for how, f in found.items()}
    r.check("what ends while it sleeps ends as it would have", all(codes[h] == c for h, c in wanted.items() if c is not None), codes)
    r.check("a write into sleeping memory: ours says so", "is asleep" in found["write"]["said"], found["write"])
    r.check("memory is GPUDirect-capable", '"gpudirect": 1' in found["flags"]["said"], found["flags"]["said"])


signal.alarm(0)
t.end()
r.note("summary", summary)
for key, value in summary.items():
    print(f"{key}: {json.dumps(value)}", flush=True)
r.finish()
