"""How the time of a suspend and of a resume grows: with GiB (1 to 90), with processes (1 to 32), with CUDA graphs (0 to 2,000).

usage: LIMIT_S=600 growth.py        AXES=gib,graphs for some of them; a later run goes on with what is left

Each point is a few cycles of one group, one row each in growth.json, as they end; the first cycle of a process counts apart from its later ones.
The fits are of the later ones: a fixed cost and a slope, with 95 % intervals. Along the axis of graphs the bytes grow a little, too; what these take by the
slope of the first axis is taken off before the fit. Each process has its own 1.4 GiB, which leave side by side: that is in its slope.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from typing import Any

from lab import Results, Rounds, Target, free_mib, gpuckpt, limit, used_mib
from lab_fits import fit

POINTS = {"gib": (1, 4, 16, 64, 2, 8, 32, 90), "processes": (1, 4, 16, 32, 2, 8), "graphs": (0, 500, 2000, 100, 1000)}
CYCLES = 3
#: What a point may take: start and allocation, then cycles at the slowest rates measured (0.7 s a GiB both ways).
START_S, PER_GIB_S = 25.0, 0.8
UP_S = 240.0  # in which the processes of a point must be there
CONTEXT_GIB = 1.0  # what a process takes beside what it was asked for, at most


def start(axis: str, value: int) -> list[Target]:
    """The group of a point; none where they do not all come up. Its processes start at once: each takes seconds."""
    gib, mode, count = {"gib": (value, "plain", 1), "processes": (0.25, "plain", value), "graphs": (1, f"graphs={value}", 1)}[axis]
    targets: list[Target] = []
    begun, over = time.monotonic(), threading.Event()

    def one() -> None:
        target = Target(gib, mode)
        target.end() if over.is_set() else targets.append(target)

    threads = [threading.Thread(target=one, daemon=True) for _ in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(max(0.0, begun + UP_S - time.monotonic()))
    over.set()
    if len(targets) == count:
        return targets
    for t in targets:
        t.end()
    return []


def cycle(targets: list[Target]) -> dict[str, Any]:
    pids = [t.pid for t in targets]
    row: dict[str, Any] = {}
    for command in ("suspend", "resume"):
        code, document, wall = gpuckpt(command, *pids, "--accept-loss", "possible-import") if command == "suspend" else gpuckpt(command, *pids)
        steps = {s["name"]: s["seconds"] for s in document.get("steps", [])}
        row |= {f"{command}_exit": code, f"{command}_wall_s": wall, f"{command}_steps": steps, f"{command}_error": document.get("error")}
        if command == "suspend":
            row["gib_on_gpu"] = round(sum(g["bytes_before"] or 0 for p in document.get("processes", []) for g in p["gpus"]) / 2**30, 3)
            row["left_mib"] = used_mib()
    return {**row, "same": all(t.same() for t in targets)}


def fits(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A line for each axis and command, through the medians of the later cycles."""
    found: dict[str, Any] = {}
    for command in ("suspend", "resume"):
        along = points(rows, "gib", command)
        by_gib = fit([p["gib_on_gpu"] for p in along], [p["s"] for p in along])
        found[f"{command}_by_gib"] = by_gib
        along = points(rows, "processes", command)
        found[f"{command}_by_processes"] = fit([float(p["value"]) for p in along], [p["s"] for p in along])
        along = points(rows, "graphs", command)
        if by_gib and along:
            least = min(p["gib_on_gpu"] for p in along)
            ys = [p["s"] - by_gib["slope"] * (p["gib_on_gpu"] - least) for p in along]
            found[f"{command}_by_graphs"] = fit([float(p["value"]) for p in along], ys)
    return found


def points(rows: list[dict[str, Any]], axis: str, command: str) -> list[dict[str, float]]:
    found = []
    for value in sorted({x["value"] for x in rows if x["axis"] == axis}):
        later = [x for x in rows if x["axis"] == axis and x["value"] == value and x["cycle"] > 0]
        if later:
            s, gib = (statistics.median(x[k] for x in later) for k in (f"{command}_wall_s", "gib_on_gpu"))
            found.append({"value": value, "s": s, "gib_on_gpu": gib})
    return found


r, rounds = Results("growth"), Rounds()
limit(r, 590)
rows = r.earlier("rows")
empty = used_mib()
axes = os.environ.get("AXES", ",".join(POINTS)).split(",")
order = [(axis, POINTS[axis][i]) for i in range(max(map(len, POINTS.values()))) for axis in axes if i < len(POINTS[axis])]
left_out: list[list[Any]] = []
for axis, value in order:
    if any((x["axis"], x["value"]) == (axis, value) and x["cycle"] == CYCLES - 1 for x in rows):
        continue
    gib = {"gib": value, "processes": value, "graphs": 2}[axis]
    if (gib + CONTEXT_GIB) * 1024 > free_mib():
        left_out.append([axis, value, "more than the GPU has"])
        continue
    if not rounds.another(START_S + 2 * PER_GIB_S * gib):
        left_out.append([axis, value, "no time"])
        continue
    rows = [x for x in rows if (x["axis"], x["value"]) != (axis, value)]
    if not (targets := start(axis, value)):
        left_out.append([axis, value, "its processes did not come up"])
        continue
    try:
        for i in range(CYCLES):
            if i and not rounds.another(1.2 * PER_GIB_S * gib):
                break
            rows.append({"axis": axis, "value": value, "cycle": i, **cycle(targets), "at": time.strftime("%H:%M:%S")})
            r.note("rows", rows)
            print({k: v for k, v in rows[-1].items() if not k.endswith("steps")}, flush=True)
    finally:
        for t in targets:
            t.end()
r.note("left_out", left_out)
r.note("fits", fits(rows))
print(r.document["fits"], flush=True)
r.check("every point came up", not any(x[2].endswith("come up") for x in left_out), left_out)
good = all(x["suspend_exit"] == x["resume_exit"] == 0 and x["same"] for x in rows)
r.check("every suspend and resume, same answers", good, [x for x in rows if not x["same"]][:3])
r.check("0 MiB above the empty card while suspended", all(x["left_mib"] <= empty for x in rows), max((x["left_mib"] for x in rows), default=0))
r.finish()
