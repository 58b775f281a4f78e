"""What a `vllm serve` answers after its cache is gone, after sleeps of both levels, and by an adapter (LoRA). usage: vllm_levels.py MODEL [lora] [-- VLLM ARGS]

MODEL has weights (``make_model.py OUT 8 2048 --weights 1 --lora 2``), which a sleep of level 2 drops and the server loads again. On one GPU, under `gpuckpt exec`, with
the agent and the pool. A prompt of 8,000 tokens: what its first token takes computed anew, found in the prefix cache, after a suspend that dropped the cache and after
one that kept it. Then, in turn: a sleep, a suspend, a resume, a wake in each order; a request that comes between two wakes, with a suspend in between. ``lora``: instead of the
sleeps three suspends, and the answers of the model and of its adapter. Ends within $LIMIT_S seconds (260). With GPUCKPT_SIMULATE against tests/vllm_tree, which tries the script and shows nothing.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from awake import Server
from job import Asking, Budget, steps, tail
from lab import OUT, SIMULATED, Results, gpuckpt

words = sys.argv[1:]
extra = words[words.index("--") + 1 :] if "--" in words else []
words = words[: words.index("--")] if "--" in words else words
model, lora = words[0], "lora" in words[1:]
r = Results("vllm_levels" + "_lora" * lora)
log = OUT / f"{r.name}.log"
budget = Budget(r, float(os.environ.get("LIMIT_S", "260")), lambda: tail(log))
ROUTES = ("m", "adapter") if lora and not SIMULATED else ("m",)
PROMPTS = [list(range(100, 140)), list(range(900, 1100)), [5, 6, 7]]
LONG = [i % 31000 + 3 for i in range(7, 7 + (64 if SIMULATED else 8000))]
#: How it is put to sleep and woken up by its own calls.
ORDERS: tuple[tuple[int, tuple[str, ...]], ...] = ((1, ("",)), (1, ("weights", "kv_cache")), (1, ("kv_cache", "weights")), (2, ("weights", "kv_cache")), (2, ("",)))


def complete(server: Server, route: str, prompt: Any, tokens: int) -> Any:
    """The text and the logprobs of each prompt."""
    data = {"model": route, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "seed": 1, "logprobs": 1}
    answer = server.http("/v1/completions", data)
    return [[c["text"], (c.get("logprobs") or {}).get("token_logprobs")] for c in answer["choices"]]


def fresh(server: Server) -> dict[str, Any]:
    """The answers of each route, with nothing in the prefix cache: what is computed and what is found differ in the last digits. So do a prompt
    alone and one beside others: they are asked for one after the other."""
    found = {}
    for route in ROUTES:
        server.http("/reset_prefix_cache", {})
        found[route] = [complete(server, route, prompt, 32)[0] for prompt in PROMPTS]
    return found


def hits(server: Server) -> float:
    """Tokens found in the prefix cache so far, by vLLM's own count."""
    lines = [] if SIMULATED else [x for x in server.http("/metrics").splitlines() if x.startswith("vllm:prefix_cache_hits_total")]
    return sum(float(x.rsplit(" ", 1)[1]) for x in lines)


def first_token(server: Server) -> dict[str, Any]:
    """Of the long prompt: seconds, how much of it was found in the cache, and the answer."""
    before, begun = hits(server), time.perf_counter()
    answer = complete(server, "m", LONG, 1)
    return {"seconds": round(time.perf_counter() - begun, 4), "found_tokens": hits(server) - before, "answer": answer}


def suspend(server: Server, method: str = "auto") -> dict[str, Any]:
    code, down, wall = gpuckpt("suspend", server.p.pid, "--method", method, timeout=budget.left(keep_s=3.0))
    row = {"method": method, "suspend": code, "suspend_wall_s": wall, "left_mib": server.mib()[0] - server.empty[0], "down": steps(down), "error": down.get("error"), "warnings": down.get("warnings")}
    return row | {"moved": [p.get("moved") for p in down.get("processes", [])], "image_bytes": sum(p.get("host_bytes", 0) for p in down.get("processes", []))}


def resume(server: Server, row: dict[str, Any]) -> dict[str, Any]:
    code, up, wall = gpuckpt("resume", server.p.pid, timeout=budget.left(keep_s=3.0))
    return row | {"resume": code, "resume_wall_s": wall, "up": steps(up), "error": row["error"] or up.get("error")}


def good(row: dict[str, Any]) -> bool:
    return row["suspend"] == row["resume"] == 0 and row["left_mib"] <= 0


def cache_is_gone(server: Server) -> None:
    """The prompt's first token, and what keeping the cache costs instead."""
    server.http("/reset_prefix_cache", {})
    found: dict[str, Any] = {"anew": first_token(server), "cached": first_token(server)}
    for name, method in (("cache dropped", "auto"), ("cache kept", "driver")):
        row = resume(server, suspend(server, method))
        found[name] = row | first_token(server)
        budget.step(f"{name}: {json.dumps({k: found[name][k] for k in ('suspend_wall_s', 'resume_wall_s', 'image_bytes', 'seconds', 'found_tokens')})}")
    r.note("long_prompt", {"tokens": len(LONG), **found})
    answers = {k: [a[0] for a in v["answer"]] for k, v in found.items()}
    r.check("case 26: the same first token, computed anew, found, and after both suspends", len({json.dumps(a) for a in answers.values()}) == 1, answers)
    r.check("case 26: both suspends left nothing on the GPU", good(found["cache dropped"]) and good(found["cache kept"]), [found[k]["error"] for k in ("cache dropped", "cache kept")])
    counts = [found[k]["found_tokens"] for k in ("anew", "cached", "cache dropped", "cache kept")]
    r.check("case 26: nothing is found of what was dropped, and all of what was kept", SIMULATED or (counts[0] == counts[2] == 0 and counts[1] == counts[3] > 0), counts)


def asleep_by_its_own_call(server: Server, reference: dict[str, Any]) -> None:
    rows: list[dict[str, Any]] = []
    for level, order in ORDERS:
        if not budget.allows(40):
            budget.step(f"no time for level {level}, {order}")
            continue
        server.http(f"/sleep?level={level}&mode=wait", {})
        row = resume(server, {"level": level, "order": order, **suspend(server)})
        if row["resume"] == 0:
            for tag in order if not SIMULATED else ("",):  # there every wake is of all
                server.http(f"/wake_up{f'?tags={tag}' if tag else ''}", {})
                if level == 2 and tag in ("", "weights") and not SIMULATED:
                    server.http("/collective_rpc", {"method": "reload_weights"})
            row["same"] = fresh(server) == reference
        rows.append(row)
        r.note("sleeps", rows)
        budget.step(f"level {level}, woken up {' then '.join(order) or 'at once'}: {row.get('same')}, {row['suspend_wall_s']} s, {row.get('resume_wall_s')} s")
    bad = [[x["level"], x["order"], x.get("same"), x["left_mib"], x["error"]] for x in rows if not (good(x) and x.get("same"))]
    r.check("suspended while it slept at either level, and right after each order of wakes", bool(rows) and not bad, bad)
    r.note("left_out", len(ORDERS) - len(rows))


def between_two_wakes(server: Server, reference: dict[str, Any]) -> None:
    server.http("/reset_prefix_cache", {})
    server.http("/sleep?level=1&mode=wait", {})
    if not SIMULATED:
        server.http("/wake_up?tags=weights", {})
    asking = Asking(lambda: complete(server, "m", PROMPTS[1], 32))
    time.sleep(1.0)
    early = asking.answer
    row = resume(server, suspend(server))
    later = asking.answer
    server.http("/wake_up?tags=kv_cache", {})
    asking.join(30)
    r.note("between_two_wakes", row | {"waited_s": asking.seconds})
    r.check("case 48: a request between two wakes waits, through a suspend as well", early is None and later is None, [early, later])
    r.check("case 48: it is answered as ever once all is awake", good(row) and asking.answer == reference["m"][1:2], [row["error"], str(asking.answer)[:200]])


def with_its_adapter(server: Server, reference: dict[str, Any]) -> None:
    r.check("the adapter answers otherwise than the model", SIMULATED or reference["m"] != reference["adapter"])
    rows = []
    for method in ("auto", "driver", "auto"):
        row = resume(server, suspend(server, method))
        rows.append(row | {"same": {route: a == reference[route] for route, a in fresh(server).items()}})
        r.note("cycles", rows)
        budget.step(f"{method}: {rows[-1]['same']}")
    r.check("case 25: the model and its adapter answer the same after three suspends", all(good(x) and all(x["same"].values()) for x in rows), [[x["same"], x["error"]] for x in rows])


options = ["--served-model-name", "m", "--max-model-len", "8192", "--gpu-memory-utilization", "0.3", "--enable-sleep-mode", *extra]
if lora:
    options += ["--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"adapter={Path(model) / 'lora'}"]
environ = {**os.environ, "GPUCKPT_AGENT": "1", "GPUCKPT_POOL": "1", "VLLM_SERVER_DEV_MODE": "1"}
if lora:
    environ["VLLM_BATCH_INVARIANT"] = "1"  # else vLLM adds up an adapter's parts in whatever order they come: no two answers are alike, awake or not
try:
    with Server(budget, log, 8131 + lora, (0,), [model, *options], environ, under=("gpuckpt", "exec", "--")) as server:
        r.note("start_s", server.start_s)
        fresh(server)
        reference = fresh(server)
        r.check("it answers twice alike", fresh(server) == reference)
        cache_is_gone(server)
        if lora:
            with_its_adapter(server, reference)
        else:
            between_two_wakes(server, reference)
            asleep_by_its_own_call(server, reference)
        r.note("log_complaints", [line[:300] for line in log.read_text(errors="replace").splitlines() if "ERROR" in line or "gpuckpt" in line][-10:])
except Exception as e:  # noqa: BLE001 - what was seen before stays
    r.check("all of it ran", False, f"{type(e).__name__}: {e}; {tail(log)}")
finally:
    budget.end()
r.finish()
