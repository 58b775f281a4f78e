"""Tables of jobs on several GPUs, from the result files."""

from __future__ import annotations

import statistics
from typing import Any

from documents import DOCS, UNTESTED, result, source, spread

#: What a suspend and a resume took in the probe of it that came before the first line of gpuckpt, in seconds.
PROBE_S = (15.1, 5.3)


def tensor_parallel() -> str:
    """`vllm serve -tp 2` suspended by its pid, beside what the first probe of it took by hand."""
    found = result("vllm_tp2")
    if found is None:
        return UNTESTED
    gib = sum(found["running_mib"]) / 1024
    rows = ["| | on the two GPUs | suspend | resume |", "|---|---|---|---|"]
    for method, what in (("driver", "nothing moved beforehand"), ("auto", "vLLM's own allocator first")):
        runs = [c for c in found["cycles"] if c["method"] == method and not c["suspend"] and not c["resume"]]
        times = " | ".join(spread([r[f"{way}_wall_s"] for r in runs]) for way in ("suspend", "resume"))
        rows.append(f"| `gpuckpt suspend PID`, {what}; {len(runs)} cycles | {gib:.1f} GiB | {times} |")
    on = {"vllm_residue_tp2": "", "vllm_residue_tp2_again": ", on another host"}
    pools = {name: d for name in on if (d := result(name))}
    for name, pool in pools.items():
        for method, what in (("auto", "the pool and then the driver"), ("pool", "the pool alone")):
            runs = [c for c in pool["tp_2"]["cycles"] if c["method"] == method and c.get("same")]
            times = " | ".join(spread([r[f"{way}_wall_s"] for r in runs], digits=2) for way in ("suspend", "resume"))
            left = max(max(r["left_mib"]) for r in runs)
            gib = sum(runs[0]["running_mib"]) / 1024
            rows.append(
                f"| with `GPUCKPT_POOL=1`, {what}{on[name]}: {left:,} MiB left on each GPU; {len(runs)} cycles | {gib:.1f} GiB | {times} |"
            )
    seconds = " | ".join(f"{s:.1f} s" for s in PROBE_S)
    rows.append(
        f"| a probe that came before gpuckpt: NCCL's and the driver's calls by hand, nothing moved beforehand | not recorded | {seconds} |"
    )
    pool_said = "".join(f"; {source(name, DOCS)}" for name in pools)
    m, preload = found["machine"], "with the preload library" if "exec" in found["command"] else "without the preload library"
    said = f"Two {m['gpu']}, driver {m['driver']}, vLLM {m['versions'].get('vllm')}, {preload} ({source('vllm_tp2', DOCS)}{pool_said})."
    own = " and ".join(
        " / ".join(
            f"{statistics.median(c[f'{way}_s'] for c in pool['tp_2']['cycles'] if c['method'] == 'auto'):.2f}"
            for way in ("suspend", "resume")
        )
        for pool in pools.values()
    )
    said += (
        f" These are whole commands; by the reports' own `seconds`, the start of Python aside, pool and driver take {own} s." if own else ""
    )
    return "\n".join([*rows, "", f"{said} The probe ran on two H200 and left no file: its figures tell the order, no more."])


#: The steps that may take longer with more ranks, in the order of a suspend and a resume.
GROWING = (("down", "comms"), ("down", "lock"), ("down", "checkpoint"), ("up", "restore"), ("up", "comms-resume"))
COUNTS = (1, 2, 4, 8)


def by_ranks() -> str:
    """How the steps of `vllm serve -tp N`, nothing moved beforehand, grow with its ranks: medians, and of each step what its slowest rank took."""
    found = {n: d for n in COUNTS if (d := result(f"vllm_tp{n}"))}
    rows = [
        f"| ranks | on each GPU | {' | '.join(name for _, name in GROWING)} | the whole suspend | resume |",
        "|---|---|" + "---|" * (len(GROWING) + 2),
    ]
    for n, document in found.items():
        runs = whole(document)
        steps = [f"{statistics.median(r[way][name] for r in runs):.2f} s" for way, name in GROWING]
        both = [f"{statistics.median(r[f'{way}_wall_s'] for r in runs):.1f} s" for way in ("suspend", "resume")]
        rows.append(f"| {n} | {document['running_mib'][0] / 1024:.1f} GiB | {' | '.join([*steps, *both])} |")
    rows += ["", f"By {', '.join(source(f'vllm_tp{n}', DOCS) for n in found)}."] if found else []
    if left := [str(n) for n in COUNTS if n not in found]:
        rows[-1] += (
            f" With {' and '.join([', '.join(left[:-1]), left[-1]] if len(left) > 1 else left)} it has **not yet run on GPUs** (`RANKS=N tests/gpu/vllm_tp2.py`)."
        )
    return "\n".join([*rows, *(["", "![The steps of a suspend and a resume by ranks](img/by-ranks.svg)"] if len(found) > 1 else [])])


def whole(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Its cycles by the driver that came back."""
    return [c for c in document["cycles"] if c["method"] == "driver" and not c["suspend"] and not c["resume"]]


def awake_pool() -> str:
    """What pool and preload library cost `vllm serve` while it is awake."""
    found = result("awake_pool")
    if found is None:
        return UNTESTED
    rows = [
        f"| tokens/s, {found['load']['tokens']} tokens a stream; median of each start | without | with, fresh | with, after a suspend and a resume |"
    ]
    rows.append("|---|---|---|---|")
    for streams, by in found["found"].items():
        cells = ["; ".join(f"{v:,.0f}" for v in by[f"{kind}_by_start"]) for kind in ("without", "fresh", "after_a_cycle")]
        rows.append(f"| {streams} stream{'s' if streams != '1' else ''} | {' | '.join(cells)} |")
    differ = sum(n for start in found["starts"] if start["with"] for n in start["after_a_cycle_differs"].values())
    m = found["machine"]
    return "\n".join(
        [
            *rows,
            "",
            f"Batches of {', '.join(found['found'])}: {differ} answers after a resume differ from those before it. {m['gpu']}, driver {m['driver']}, "
            f"vLLM {m['versions'].get('vllm')}, the servers in turn, beside other work on the machine's other GPU ({source('awake_pool', DOCS)}).",
        ]
    )


def awake_cost() -> str:
    """What the settings that make `vllm serve -tp 2` suspendable cost it while it is awake."""
    found = result("awake_cost")
    if found is None:
        return UNTESTED
    load, rows = found["load"], ["| each of its starts; median (least–most) | with them | without |", "|---|---|---|"]
    for key, what in (
        ("per_token_ms", "ms a token, one stream"),
        ("tokens_s", f"tokens/s, {load['streams']} streams of {load['tokens']} tokens"),
    ):
        cells = []
        for kind in ("with", "without"):
            starts = [r[key] for r in found["starts"] if r["kind"] == kind]
            digits = 2 if key == "per_token_ms" else 0
            cells.append("; ".join(f"{statistics.median(v):,.{digits}f} ({min(v):,.{digits}f}–{max(v):,.{digits}f})" for v in starts))
        rows.append(f"| {what} | {' | '.join(cells)} |")
    m = found["machine"]
    return "\n".join(
        [
            *rows,
            "",
            f"Two {m['gpu']}, driver {m['driver']}, vLLM {m['versions'].get('vllm')}, the servers in turn ({source('awake_cost', DOCS)}).",
        ]
    )
