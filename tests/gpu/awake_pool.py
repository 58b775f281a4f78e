"""What gpuckpt's pool and preload library cost a `vllm serve` on one GPU while it is awake, fresh and after a suspend and a resume; and whether it answers the same.

usage: awake_pool.py MODEL [STARTS] [-- VLLM ARGS]

With: under `gpuckpt exec`, GPUCKPT_AGENT=1, GPUCKPT_POOL=1 and sleep mode. Without: vLLM as it comes. Servers are started in turn, with, without, without, with
(STARTS of each, default 2), each measured several times, at 1 to 256 streams; one with the pool again after a suspend and a resume. Batches of 1 to 256 are answered
twice while it is awake, and once after the resume: how many answers of the second and of the third differ from the first. Ends after $LIMIT_S seconds (default 560):
what was measured by then is in the result file. With GPUCKPT_SIMULATE it runs against tests/vllm_tree, which tries the script and measures nothing.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from typing import Any

from awake import Server, taken_in_turn
from job import Budget, tail
from lab import OUT, SIMULATED, Results, gpuckpt
from make_model import load_format

words = sys.argv[1:]
extra = words[words.index("--") + 1 :] if "--" in words else []
words = words[: words.index("--")] if "--" in words else words
model, starts = words[0], int(words[1]) if len(words) > 1 else 2
STREAMS, TOKENS, REPEATS = ((1, 2), 8, 2) if SIMULATED else ((1, 8, 64, 256), 128, 4)
COMMON = [*load_format(model), "--served-model-name", "m", "--max-model-len", "4096", "--gpu-memory-utilization", "0.5", "--max-num-seqs", str(STREAMS[-1]), *extra]
r = Results("awake_pool")
log = OUT / "awake_pool.log"
budget = Budget(r, float(os.environ.get("LIMIT_S", "560")), lambda: tail(log))
rows: list[dict[str, Any]] = []


def speed(server: Server) -> dict[str, list[float]]:
    """Tokens a second at each number of streams, REPEATS times in turn."""
    found: dict[str, list[float]] = {str(n): [] for n in STREAMS}
    for _ in range(REPEATS):
        for n in STREAMS:
            found[str(n)].append(server.throughput(n, TOKENS)[0])
    return found


def answers(server: Server) -> dict[str, list[Any]]:
    return {str(n): server.throughput(n, 32)[1] for n in STREAMS}


def differing(a: dict[str, list[Any]], b: dict[str, list[Any]]) -> dict[str, int]:
    return {n: sum(x != y for x, y in zip(a[n], b[n], strict=True)) for n in a}


def measure(pooled: bool) -> dict[str, Any]:
    """One start of a server."""
    environ = {**os.environ, **({"GPUCKPT_AGENT": "1", "GPUCKPT_POOL": "1"} if pooled else {})}
    row: dict[str, Any] = {"with": pooled}
    options = {"under": ("gpuckpt", "exec", "--")} if pooled else {}
    with Server(budget, log, 8129, (0,), [model, *COMMON, *(["--enable-sleep-mode"] if pooled else [])], environ, **options) as server:
        row |= {"start_s": server.start_s, "running_mib": server.mib()}
        budget.step(f"{'with' if pooled else 'without'}: up after {server.start_s} s")
        for n in STREAMS:
            server.throughput(n, TOKENS)  # warm
        row["fresh"] = speed(server)
        first, second = answers(server), answers(server)
        row["awake_repeat_differs"] = differing(first, second)
        if pooled:
            code, down, _ = gpuckpt("suspend", server.p.pid, timeout=60)
            row |= {"suspend": code, "left_mib": server.mib(), "way": down.get("method"), "error": down.get("error")}
            code, up, _ = gpuckpt("resume", server.p.pid, timeout=60)
            row |= {"resume": code, "resume_error": up.get("error")}
            row["after_a_cycle_differs"] = differing(first, answers(server))
            row["after_a_cycle"] = speed(server)
        budget.step(json.dumps({k: row.get(k) for k in ("fresh", "after_a_cycle", "awake_repeat_differs", "after_a_cycle_differs")}))
    return row


try:
    for pooled in taken_in_turn(starts):
        if len(rows) > 1 and not budget.allows(rows[-1]["wall_s"] + 20):
            budget.step("no time for another start")
            break
        begun = time.monotonic()
        rows.append(measure(pooled) | {"wall_s": round(time.monotonic() - begun, 1)})
        r.note("starts", rows)
except Exception as e:  # noqa: BLE001 - what was measured before stays
    r.check("every server started and answered", False, f"{type(e).__name__}: {e}")
finally:
    budget.end()
pooled_rows, plain_rows = [x for x in rows if x["with"]], [x for x in rows if not x["with"]]
r.note("load", {"streams": STREAMS, "tokens": TOKENS, "repeats": REPEATS})
r.check("servers with and without were measured", bool(pooled_rows and plain_rows), len(rows))
r.check("suspended by the pool and the driver, and resumed", all(x["suspend"] == x["resume"] == 0 for x in pooled_rows), [x["way"] for x in pooled_rows])
more = [[n, x["after_a_cycle_differs"][n], x["awake_repeat_differs"][n]] for x in pooled_rows for n in x["after_a_cycle_differs"]]
r.check("after a cycle no more answers differ than from one batch to the next", all(a <= max(b, int(int(n) * 0.02)) for n, a, b in more), more)
if pooled_rows and plain_rows:
    found: dict[str, Any] = {}
    for n in map(str, STREAMS):
        plain = [statistics.median(x["fresh"][n]) for x in plain_rows]
        sides = {when: [statistics.median(x[when][n]) for x in pooled_rows] for when in ("fresh", "after_a_cycle")}
        ratios = {f"{when}_over_without": round(statistics.median(v) / statistics.median(plain), 4) for when, v in sides.items()}
        found[n] = {"without_by_start": plain, **{f"{when}_by_start": v for when, v in sides.items()}, **ratios}
    r.note("found", found)
    print(json.dumps({n: {k: v for k, v in f.items() if k.endswith("without")} for n, f in found.items()}), flush=True)
r.finish()
