"""The pool on several GPUs: what a `vllm serve` leaves behind cycle by cycle where the pool alone empties its GPUs, and its suspends by pool and driver. usage: vllm_residue.py MODEL [CYCLES] [RANKS…] [-- VLLM ARGS]

A server on each number of GPUs of RANKS (1 2) in turn, under `gpuckpt exec`, with the agent and the pool: CYCLES (20) suspends with `--method pool`, and a quarter as many by pool and
driver. After each resume the same answers; the rest on each GPU does not grow from cycle to cycle. Ends within $LIMIT_S seconds (400): cycles that would not fit are left out. With GPUCKPT_SIMULATE
against tests/vllm_tree, which tries the script and shows nothing.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from awake import Server
from job import Budget, by_rank, steps, tail
from lab import OUT, Results, gpuckpt
from lab_fits import slope
from make_model import load_format

words = sys.argv[1:]
extra = words[words.index("--") + 1 :] if "--" in words else []
words = words[: words.index("--")] if "--" in words else words
model, cycles = words[0], int(words[1]) if len(words) > 1 else 20
counts = [int(n) for n in words[2:]] or [1, 2]
r = Results("vllm_residue")
log = OUT / "vllm_residue.log"
budget = Budget(r, float(os.environ.get("LIMIT_S", "400")), lambda: tail(log))
environment = json.loads(subprocess.run(["gpuckpt", "env", "--vllm", "--json"], capture_output=True, text=True, check=True, timeout=60).stdout)["environment"]
PROMPTS = [list(range(100, 140)), list(range(900, 1100)), [5, 6, 7]]
OPTIONS = ["--served-model-name", "m", "--max-model-len", "4096", "--gpu-memory-utilization", "0.15", "--enable-sleep-mode", "--disable-custom-all-reduce"]
OPTIONS += ["--compilation-config", '{"pass_config": {"fuse_allreduce_rms": false}}', *extra]
#: MiB a cycle that are no growth: NVML counts in pages of 2 MiB.
HARMLESS_MIB = 1.0


def fresh(server: Server) -> list[Any]:
    server.http("/reset_prefix_cache", {})
    answer = server.http("/v1/completions", {"model": "m", "prompt": PROMPTS, "max_tokens": 32, "temperature": 0, "logprobs": 1})
    return [[c["text"], c["logprobs"]["token_logprobs"]] for c in answer["choices"]]


def cycle(server: Server, method: str, reference: list[Any]) -> dict[str, Any]:
    code, down, wall = gpuckpt("suspend", server.p.pid, "--method", method, timeout=budget.left(keep_s=3.0))
    left = [a - b for a, b in zip(server.mib(), server.empty, strict=True)]
    row: dict[str, Any] = {"method": method, "suspend": code, "suspend_s": down.get("seconds"), "suspend_wall_s": wall, "left_mib": left, "down": steps(down), "down_by_rank": by_rank(down), "error": down.get("error"), "warnings": down.get("warnings")}
    row["stays"] = [{k: p.get(k) for k in ("pid", "name", "retained_bytes", "stays", "note")} for p in down.get("processes", [])]
    if code == 0:
        code, up, wall = gpuckpt("resume", server.p.pid, timeout=budget.left(keep_s=3.0))
        row |= {"resume": code, "resume_s": up.get("seconds"), "resume_wall_s": wall, "up": steps(up), "error": up.get("error")}
    if code == 0:
        row |= {"same": fresh(server) == reference, "running_mib": server.mib()}
    return row


def measure(ranks: int) -> None:
    """One server on so many GPUs."""
    gpus, rows = tuple(range(ranks)), []
    words = [model, *load_format(model), *OPTIONS, "-tp", str(ranks)]
    environ = {**os.environ, **environment, "GPUCKPT_AGENT": "1", "GPUCKPT_POOL": "1", "VLLM_SERVER_DEV_MODE": "1"}
    with Server(budget, log, 8133, gpus, words, environ, under=("gpuckpt", "exec", "--")) as server:
        budget.step(f"tp {ranks}: up after {server.start_s} s, {server.mib()} MiB")
        fresh(server)
        reference, longest = fresh(server), 0.0
        r.check(f"tp {ranks}: it answers twice alike", fresh(server) == reference)
        for method in ["pool", "auto", "pool", "pool", "pool"] * (cycles // 4):
            if not budget.allows(longest * 1.5 + 25):
                budget.step("no time for another cycle")
                break
            begun = time.monotonic()
            rows.append(cycle(server, method, reference))
            longest = max(longest, time.monotonic() - begun)
            r.note(f"tp_{ranks}", {"start_s": server.start_s, "empty_mib": server.empty, "cycles": rows})
            if not rows[-1].get("same"):
                break
    bad = [[x["method"], x["suspend"], x.get("resume"), x.get("same"), x["error"]] for x in rows if not x.get("same")]
    r.check(f"tp {ranks}: every cycle came back, with the same answers", bool(rows) and not bad, bad or len(rows))
    pool, auto = ([x for x in rows if x["method"] == m] for m in ("pool", "auto"))
    r.check(f"tp {ranks}: nothing left by pool and driver", bool(auto) and all(n <= 0 for x in auto for n in x["left_mib"]), [x["left_mib"] for x in auto])
    found: dict[str, Any] = {"left_mib": [statistics.median(x["left_mib"][g] for x in pool) for g in gpus] if pool else None}
    if len(pool) > 4:
        found["left_slope_mib"] = [slope([float(x["left_mib"][g]) for x in pool[1:]]) for g in gpus]
        r.check(f"tp {ranks}: case 45: what the pool alone leaves does not grow", all(s["per_step"] - s["plus_minus"] <= HARMLESS_MIB for s in found["left_slope_mib"]), found)
    for name, some in (("pool", pool), ("auto", auto)):
        whole = [x for x in some if x.get("resume") == 0]
        if whole:
            later = whole[1:] or whole
            found[name] = {f"{k}_{which}": f for k in ("suspend_s", "resume_s", "suspend_wall_s", "resume_wall_s") for which, f in (("first", whole[0][k]), ("later", statistics.median(x[k] for x in later)))}
    r.note(f"found_tp_{ranks}", found)
    print(json.dumps({f"tp {ranks}": found})[:900], flush=True)


try:
    for count in counts:
        measure(count)
except Exception as e:  # noqa: BLE001 - what was seen before stays
    r.check("all of it ran", False, f"{type(e).__name__}: {e}; {tail(log)}")
finally:
    budget.end()
r.finish()
