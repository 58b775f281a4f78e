"""Ways to take one `vllm serve` off its GPU and bring it back, in turn, in one run. usage: LIMIT_S=500 comparison_vllm.py MODEL [ROUNDS] [-- VLLM ARGS]

* ``driver``: the four calls on the process that holds the GPU, as NVIDIA's cuda-checkpoint makes them (the time inside the calls); the preload library is told of nothing
* ``vLLM sleep 1``: vLLM's own call, and its wake
* ``gpuckpt``: the whole command; its agent has vLLM's allocator leave first. ``gpuckpt, by the driver``: all by the driver, with the preload library

The server runs under `gpuckpt exec`, with GPUCKPT_AGENT=1 and its sleep mode. The first round counts apart. After each: three prompts, computed anew, must be answered as at the beginning,
to the bit of their logprobs. As `comparison.py` for what else is noted.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from lab import OUT, Results, Rounds, calls, gpuckpt, limit, used_mib
from lab_fits import summary
from soak import Server, probe, sleep, wake

Done = tuple[float, Any]


def driver(server: Server, down: bool) -> Done:
    made = [c for pid in engines for c in calls(pid, ("Lock", "Checkpoint") if down else ("Restore", "Unlock"))]
    return sum(c[3] for c in made), [c[1] for c in made if c[1] != "CUDA_SUCCESS"]


def vllm_sleep(server: Server, down: bool) -> Done:
    begun = time.perf_counter()
    answers = sleep(1) if down else wake([""], 1)
    return time.perf_counter() - begun, [a for a in answers if a != 200]


def ours(server: Server, down: bool) -> Done:
    _, document, wall = gpuckpt("suspend" if down else "resume", server.pid)
    return wall, document.get("error") or []


def by_the_driver(server: Server, down: bool) -> Done:
    _, document, wall = gpuckpt(*(["suspend", server.pid, "--method", "driver"] if down else ["resume", server.pid]))
    return wall, document.get("error") or []


TOOLS: dict[str, Callable[[Server, bool], Done]] = {"driver": driver, "vLLM sleep 1": vllm_sleep, "gpuckpt, by the driver": by_the_driver, "gpuckpt": ours}


def turn(name: str, server: Server, reference: Any) -> dict[str, Any]:
    held, rss = used_mib(), server.rss_mib()
    down_s, down_error = TOOLS[name](server, True)
    row: dict[str, Any] = {"suspend_s": round(down_s, 4), "suspend_error": down_error, "freed_mib": held - used_mib(), "host_mib": server.rss_mib() - rss}
    up_s, up_error = TOOLS[name](server, False)
    return {**row, "resume_s": round(up_s, 4), "resume_error": up_error, "same": probe()[0] == reference, "held_mib": held - empty, "rss_grew_mib": server.rss_mib() - rss}


words = sys.argv[1:]
extra = words[words.index("--") + 1 :] if "--" in words else []
words = words[: words.index("--")] if "--" in words else words
r, rounds = Results("comparison_vllm"), Rounds(30)
limit(r, 500)
empty, rows = used_mib(), []
engines: list[int] = []
server = Server(words[0], extra, before=["gpuckpt", "exec", "--"], GPUCKPT_AGENT="1")
try:
    if r.check("vllm serve came up", server.up(300), (OUT / "soak_vllm.log").read_text(errors="replace")[-1500:]):
        _, plan, _ = gpuckpt("suspend", server.pid, "--dry-run")
        engines = [p["pid"] for p in plan.get("processes", []) if p["gpus"]]
        r.check("one process holds the GPU", len(engines) == 1, plan.get("error") or engines)
        probe()
        reference = probe()[0]
        for i in range(int(words[1]) if len(words) > 1 else 6):
            if not rounds.another():
                break
            begun = time.monotonic()
            for name in TOOLS:
                rows.append({"tool": name, "round": i, **turn(name, server, reference)})
                r.note("rows", rows)
                print(rows[-1], flush=True)
            rounds.took(time.monotonic() - begun)
        r.note("gib", round(max((x["held_mib"] for x in rows), default=0) / 1024, 1))
        r.note("not_there", [])
        r.note("summary", summary(rows))
        for name, found in r.document["summary"].items():
            r.check(f"{name}: same answers after every round", found["same"] == found["rounds"], found)
        r.check("nothing failed", not any(x["suspend_error"] or x["resume_error"] for x in rows), [x for x in rows if x["suspend_error"] or x["resume_error"]][:2])
finally:
    server.end()
    r.finish()
