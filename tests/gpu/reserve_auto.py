"""Memory kept ready as a person has it: `gpuckpt exec --reserve auto`, and `gpuckpt run --reserve auto`, of a torch process. usage: reserve_auto.py [GIB]

How much gets ready by itself and when; how much of a first image and a later one comes from it; that it is zeroed again, and given back when asked.
Writes as it goes; ends at the first failure, and after LIMIT_S in any case.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from lab import HERE, SIMULATED, Results, Target, gpuckpt, limit, used_mib, wait_for

from gpuckpt.image import preload

if SIMULATED:
    import lab_simulated

LIMIT_S = 240.0
gib = float(sys.argv[1]) if len(sys.argv) > 1 else 8
NAME = f"reserve-auto-{os.getpid()}"
r = Results("reserve_auto")


def must(what: str, ok: bool, seen: object = None) -> None:
    if not r.check(what, ok, seen):
        r.finish()


def start(*before: str) -> Target:
    words = lab_simulated.command((gib,)) if SIMULATED else [str(HERE / "target.py"), str(gib)]
    return Target(gib, program=["gpuckpt", *before, "--reserve", "auto", "--", sys.executable, *words])


def ready(target: object) -> dict[str, Any]:
    """What `gpuckpt reserve` says of it; {} where there is none yet."""
    code, document, _ = gpuckpt("reserve", target)
    return {} if code else dict(document["reserved"][0])


def all_ready(target: object) -> float | None:
    """Seconds until as much as it holds on its GPU is there, and zeroed; None after a minute. It is asked for piece by piece."""
    begun, least = time.monotonic(), used_mib() << 20
    there = wait_for(lambda: (now := ready(target)).get("wanted_bytes", 0) >= least and now["zeroed_bytes"] == now["wanted_bytes"], 60)
    return round(time.monotonic() - begun, 2) if there else None


def cycle(t: Target, target: object) -> dict[str, Any]:
    code, down, wall = gpuckpt("suspend", target, *(() if target == NAME else ("--no-tree", "--accept-loss", "possible-import")))
    must(f"suspend {'of the run' if target == NAME else 'by pid'}", code == 0, down.get("error"))
    row: dict[str, Any] = {"suspend_wall_s": wall, "used_mib": used_mib(), "suspended_rss_mib": t.rss_mib()}
    row |= {s["name"]: s["seconds"] for s in down.get("steps", [])}
    if not SIMULATED:
        row["image"] = preload.described(found.id) if (found := preload_process(t)) else {}
    code, up, row["resume_wall_s"] = gpuckpt("resume", target, *(() if target == NAME else ("--no-tree",)))
    must("resume", code == 0, up.get("error"))
    must("the same answers", t.same())
    return row | {s["name"]: s["seconds"] for s in up.get("steps", []) if s["name"] == "restore"}


def preload_process(t: Target) -> Any:
    from gpuckpt.inspect import processes

    return processes.read(t.pid)


def both(kind: str, t: Target, target: object) -> None:
    """A first suspend and a later one."""
    rows: dict[str, Any] = {"held_mib": used_mib(), "ready_s": None if SIMULATED else all_ready(target), "kept": ready(target)}
    for turn in ("first", "later"):
        rows[turn] = cycle(t, target)
        rows[f"zeroed_after_{turn}_s"] = None if SIMULATED else all_ready(target)
        r.note(kind, rows)
        print(kind, turn, json.dumps({k: rows[turn].get(k) for k in ("checkpoint", "restore", "suspend_wall_s", "image")}), flush=True)
    if SIMULATED:
        return
    must(f"{kind}: it got ready by itself", rows["ready_s"] is not None, rows["kept"])
    for turn, least in (("first", 0.9), ("later", 1.0)):
        image = rows[turn]["image"]
        must(f"{kind}: the {turn} image comes from it", image.get("from_reserve_bytes", 0) >= least * image["bytes"], image)
        must(f"{kind}: and it is zeroed after the {turn} one", rows[f"zeroed_after_{turn}_s"] is not None)
    rss = t.rss_mib()
    gpuckpt("reserve", target, 0)
    rows["given_back_mib"] = rss - t.rss_mib()
    r.note(kind, rows)
    must(f"{kind}: given back when asked", rows["given_back_mib"] > 0.9 * gib * 1024, rows["given_back_mib"])


if why := preload.problem():
    raise SystemExit(f"no preload library: {why}")
limit(r, LIMIT_S)
r.note("gib", gib)
for kind, before, by_name in (("exec", ("exec",), False), ("run", ("run", "--name", NAME), True)):
    target = start(*before)
    try:
        both(kind, target, NAME if by_name else target.pid)
    finally:
        target.end()
r.finish()
