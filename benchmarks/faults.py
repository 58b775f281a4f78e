"""Runs the fault campaign on simulated GPUs, and writes what came of it: benchmarks/results/faults.json and docs/faults.md.

usage: faults.py            run it (seconds), write both
       faults.py --check    exit 1 if docs/faults.md is not what the result files say
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests import campaign  # noqa: E402 - the tests are not installed

RESULT = ROOT / "benchmarks/results/faults.json"
REAL = ROOT / "benchmarks/results/faults_gpu.json"
DOCUMENT = ROOT / "docs/faults.md"
LETTERS = {campaign.AS_FOUND: "F", campaign.SUSPENDED: "S", campaign.RUNNING: "R", campaign.HELD: "H", campaign.LOST: "L"}


def counted(cases: Iterable[campaign.Case]) -> list[dict[str, Any]]:
    """One row a step and fault, in the order in which steps come."""
    ends: dict[tuple[str, str, str], Counter[str]] = {}
    for c in cases:
        ends.setdefault((c.way, c.step, c.fault), Counter())[c.end] += 1
    return [
        {"command": way, "step": step, "fault": fault, "injected": found.total(), "ends": {e: found[e] for e in campaign.ENDS if found[e]}}
        for (way, step, fault), found in sorted(ends.items(), key=lambda item: place(*item[0]))
    ]


def place(way: str, step: str, fault: str) -> tuple[int, int, int]:
    """Where a row belongs."""
    ways = [w.name for w in campaign.WAYS]
    return ways.index(way) if way in ways else len(ways) + ("resume" in way), campaign.ORDER.index(step), list(campaign.FAULTS).index(fault)


def written(document: dict[str, Any], real: dict[str, Any] | None) -> str:
    """docs/faults.md"""
    rows = document["rows"]
    total = sum(r["injected"] for r in rows)
    ends = Counter({e: sum(r["ends"].get(e, 0) for r in rows) for e in campaign.ENDS})
    lines = [
        "# Faults",
        "",
        "Written by [benchmarks/faults.py](../benchmarks/faults.py), which puts each fault into each moment of each step of a suspend, a resume, the way",
        "back of a suspend that fails, and a recovery: a group of two ranks with agents, on two simulated GPUs, images on disk; and two hosts with a rank each. A moment is",
        "the time before any of the command's own actions, and the middle of every call. The real plan, operation, journal and coordinators run; processes, driver",
        "and clock are in memory, as [measured](../benchmarks/results/driver-facts.json). CI runs it too ([campaign.py](../tests/campaign.py)).",
        "",
        f"**{total:,} faults: {ends[campaign.AS_FOUND]:,} ended as found (F), {ends[campaign.SUSPENDED]:,} suspended (S), {ends[campaign.RUNNING]:,} running again (R), "
        f"{ends[campaign.HELD]:,} named and held (H), {ends[campaign.LOST]:,} named as lost (L).** Counted is how it is when the trouble is over and",
        "`gpuckpt recover` has run. After every one, whoever is suspended comes back when asked, nobody is called lost who is not, and the exit code agrees with the states.",
        "Whom the fault itself kills does not count; the others of its group do.",
        "",
        "| fault | what it stands for |",
        "|---|---|",
        *(f"| {fault} | {what} |" for fault, what in campaign.FAULTS.items()),
    ]
    for way in dict.fromkeys(r["command"] for r in rows):
        lines += ["", f"## {way[0].upper()}{way[1:]}", "", *matrix([r for r in rows if r["command"] == way])]
    lines += [
        "",
        "## Lost or held, and why that could not be helped",
        "",
        "| fault | in | named as lost | held | why |",
        "|---|---|---|---|---|",
    ]
    lines += explained(rows)
    lines += ["", "## On a real driver", "", *on_a_gpu(real)]
    return "\n".join(lines) + "\n"


def explained(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each reason."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for r in rows:
        if campaign.LOST in r["ends"]:
            found.setdefault((r["fault"], campaign.UNAVOIDABLE[r["step"], r["fault"]]), []).append(r)
        elif campaign.HELD in r["ends"]:
            found.setdefault((r["fault"], campaign.HELD_WHY[r["fault"]]), []).append(r)
    return [
        f"| {fault} | {', '.join(dict.fromkeys(r['step'] for r in those))} | {ended(those, campaign.LOST)} | {ended(those, campaign.HELD)} | {why} |"
        for (fault, why), those in found.items()
    ]


def ended(rows: Sequence[dict[str, Any]], end: str) -> str:
    """ "12 of 40", or nothing."""
    count = sum(r["ends"].get(end, 0) for r in rows)
    return f"{count} of {sum(r['injected'] for r in rows)}" if count else ""


def matrix(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Steps down, faults across; in a cell how often what came of it."""
    faults = [f for f in campaign.FAULTS if any(r["fault"] == f for r in rows)]
    lines = [f"| step | {' | '.join(faults)} |", "|---" * (len(faults) + 1) + "|"]
    cells = {(r["step"], r["fault"]): r for r in rows}
    for step in dict.fromkeys(r["step"] for r in rows):
        line = [f"{step} ({campaign.STEPS[step]})" if step in campaign.STEPS else step]
        for fault in faults:
            found = cells.get((step, fault))
            line.append(", ".join(f"{n} {LETTERS[e]}" for e, n in found["ends"].items()) if found else "–")
        lines.append(f"| {' | '.join(line)} |")
    return lines


def on_a_gpu(real: dict[str, Any] | None) -> list[str]:
    """What ``tests/gpu/faults.py`` saw."""
    if real is None:
        return ["Not yet run: [tests/gpu/faults.py](../tests/gpu/faults.py) does it with one process."]
    machine = real["machine"]
    lines = ["| command | step | fault | injected | ended |", "|---|---|---|---|---|"]
    cells: dict[tuple[str, str, str], Counter[str]] = {}
    for case in real["cases"]:
        cells.setdefault((case["command"], case["step"], case["fault"]), Counter())[case["end"]] += 1
    lines += [
        f"| {command} | {step} | {fault} | {found.total()} | {', '.join(f'{n} {e}' for e, n in sorted(found.items()))} |"
        for (command, step, fault), found in cells.items()
    ]
    left = Counter(name.split("/")[2] for name in real.get("left_out", []))
    words = ", ".join(f"{fault} ({n})" for fault, n in left.items())
    return [
        *lines,
        "",
        f"{machine.get('gpu', 'simulated')}, driver {machine.get('driver', '–')} ([faults_gpu.json](../benchmarks/results/faults_gpu.json)).",
        *([f"Not tried there yet: {left.total()} of {left.total() + len(real['cases'])}, {words}."] if left else []),
    ]


def main(arguments: Sequence[str]) -> int:
    if "--check" not in arguments:
        begun = time.monotonic()
        with contextlib.redirect_stdout(io.StringIO()):  # what a failing test would print
            rows = counted(campaign.exhaustive())
        document = {"simulated": True, "date": time.strftime("%Y-%m-%d"), "seconds": round(time.monotonic() - begun, 1), "rows": rows}
        RESULT.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    text = written(json.loads(RESULT.read_text()), json.loads(REAL.read_text()) if REAL.exists() else None)
    if "--check" not in arguments:
        DOCUMENT.write_text(text, encoding="utf-8")
    elif DOCUMENT.read_text(encoding="utf-8") != text:
        print("docs/faults.md is not what benchmarks/results say. Type: python benchmarks/faults.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
