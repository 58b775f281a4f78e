"""What the settings that make a `vllm serve -tp 2` suspendable cost while it is awake: tokens/s and time per token, with and without them.

usage: awake_cost.py MODEL [STARTS] [-- VLLM ARGS]

Servers are started in turn, with, without, without, with (STARTS of each, default 2), and each is measured several times: so the spread within a
start and between starts is seen beside the difference. Ends after $LIMIT_S seconds (default 560): what was measured by then is in the result
file, and starts that would not fit are not begun. With: `gpuckpt env --vllm`, --disable-custom-all-reduce and no fused all-reduce. Without: as
vLLM comes. With GPUCKPT_SIMULATE it runs against tests/vllm_tree, which tries the script and measures nothing.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
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
STREAMS, TOKENS, REPEATS, GPUS = 64, 256, 5, (0, 1)
if SIMULATED:
    STREAMS, TOKENS, REPEATS = 4, 8, 2
WITH, WITHOUT = "with", "without"
r = Results("awake_cost")
log = OUT / "awake_cost.log"
budget = Budget(r, float(os.environ.get("LIMIT_S", "560")), lambda: tail(log))
made = json.loads(subprocess.run(["gpuckpt", "env", "--vllm", "--json"], capture_output=True, text=True, check=True, timeout=60).stdout)
settings: dict[str, str] = made["environment"]
SUSPENDABLE = ["--disable-custom-all-reduce", "--compilation-config", '{"pass_config": {"fuse_allreduce_rms": false}}']
COMMON = ["-tp", "2", *load_format(model), "--served-model-name", "m", "--max-model-len", "4096"]
COMMON += ["--max-num-seqs", str(STREAMS), "--cudagraph-capture-sizes", "1", "2", "4", "8", "16", "32", "64", "--gpu-memory-utilization", "0.5"]


def measure(kind: str) -> dict[str, Any]:
    """One start of a server."""
    environ = {**os.environ, **(settings if kind == WITH else {})}
    row: dict[str, Any] = {"kind": kind, "per_token_ms": [], "tokens_s": []}
    with Server(budget, log, 8126, GPUS, [model, *COMMON, *(SUSPENDABLE if kind == WITH else []), *extra], environ) as server:
        row |= {"command": server.command[1:], "start_s": server.start_s}
        budget.step(f"{kind}: up after {row['start_s']} s")
        server.complete(TOKENS)
        server.throughput(STREAMS, TOKENS)  # warm
        code, plan, _ = gpuckpt("suspend", server.p.pid, "--dry-run", timeout=30)
        row["refused"] = (plan.get("plan") or {}).get("refused") or plan.get("error")
        row["running_mib"] = server.mib()
        for _ in range(REPEATS):
            row["per_token_ms"].append(server.per_token_ms(TOKENS))
            row["tokens_s"].append(server.throughput(STREAMS, TOKENS)[0])
        budget.step(f"{kind}: {row['per_token_ms']} ms a token alone, {row['tokens_s']} tokens/s of {STREAMS}")
        row["warnings"] = [line[:300] for line in log.read_text(errors="replace").splitlines() if "all-reduce" in line.lower() or "allreduce" in line.lower()][:10]
    return row


def of(kind: str, key: str) -> dict[str, Any]:
    """Medians by start, and the least and the most of all that was measured."""
    values = [row[key] for row in rows if row["kind"] == kind]
    return {"by_start": [statistics.median(v) for v in values], "least": min(map(min, values)), "most": max(map(max, values))}


rows: list[dict[str, Any]] = []
order = [WITH if w else WITHOUT for w in taken_in_turn(starts)]
r.note("settings", {"environment": settings, "options": SUSPENDABLE})
r.note("load", {"streams": STREAMS, "tokens": TOKENS, "repeats": REPEATS})
try:
    for kind in order:
        if len(rows) > 1 and not budget.allows(rows[-1]["wall_s"] + 10):  # later starts find what vLLM compiled
            budget.step(f"no time for another start ({kind})")
            break
        begun = time.monotonic()
        budget.step(f"{kind}: start")
        row = measure(kind)
        row["wall_s"] = round(time.monotonic() - begun, 1)
        rows.append(row)
        r.note("starts", rows)
except Exception as e:  # noqa: BLE001 - what was measured before stays
    r.check("every server started and answered", False, f"{type(e).__name__}: {e}")
finally:
    budget.end()
both = {kind for kind in (WITH, WITHOUT) if any(row["kind"] == kind for row in rows)}
r.check("servers with and without the settings were measured", len(both) == 2, [row["kind"] for row in rows])
r.check("with them a suspend would go ahead", not any(row["refused"] for row in rows if row["kind"] == WITH), [row["refused"] for row in rows if row["kind"] == WITH])
r.check("without them it is refused", all(row["refused"] for row in rows if row["kind"] == WITHOUT), [row["refused"] for row in rows if row["kind"] == WITHOUT])
if len(both) == 2:
    found = {key: {kind: of(kind, key) for kind in (WITH, WITHOUT)} for key in ("per_token_ms", "tokens_s")}
    for key, seen in found.items():
        seen["with_over_without"] = round(statistics.median(seen[WITH]["by_start"]) / statistics.median(seen[WITHOUT]["by_start"]), 4)
    r.note("found", found)
    print(json.dumps(found), flush=True)
budget.step("done")
r.finish()
