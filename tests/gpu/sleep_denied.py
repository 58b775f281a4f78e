"""A vLLM that goes to sleep while another program takes more of its GPU than it gives up, and then says that it cannot. usage: sleep_denied.py [--tries N] [--limit S] MODEL

`gpuckpt run` of a small server (8 GiB of KV cache). In each try another program takes 40 GiB a moment after the run has begun to suspend, each time a little later, until vLLM denies
its sleep ("Memory usage increased after sleeping"). Then the suspend was refused, the run is awake with its memory back and answers as before, and the next suspend goes through. With GPUCKPT_SIMULATE
against tests/fake_vllm.py, which denies the first one: that tries the script, and shows nothing.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import runs
from lab import SIMULATED, Results, gpuckpt, taker, used_mib
from runs import Late, part

LIMIT_S, START_S, GIB = 200.0, 150.0, 40
VLLM = ["--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(8 << 30)]
#: When the other program begins, in seconds after the run has begun to suspend: its server reads how much is free some 0.02 s later, and again when all has left, 0.1 s later still.
MOMENTS_S = (0.03, 0.06, 0.02, 0.09, 0.045, 0.075, 0.12, 0.01)
#: MiB that a vLLM has less after a sleep that it denied: that emptied torch's cache, which fills again as it is needed.
CACHE_MIB = 1024


def attempt(run: runs.Run, moment_s: float) -> dict[str, Any]:
    """One suspend, with the other program in its way; afterwards that is gone."""
    other = None if SIMULATED else taker(GIB << 10)
    found: dict[str, Any] = {"moment_s": moment_s}
    try:
        before, begun = run.tail(1 << 30).count(": suspending"), time.monotonic()
        thread = threading.Thread(target=lambda: found.update(zip(("exit", "document"), gpuckpt("suspend", run.name)[:2], strict=True)), daemon=True)
        thread.start()
        while run.tail(1 << 30).count(": suspending") == before and time.monotonic() < begun + 20 and thread.is_alive():
            time.sleep(0.002)
        time.sleep(moment_s)
        if other:
            other.send("take")
        thread.join(60)
    finally:
        if other:
            other.end()
    found["error"] = (found.pop("document", None) or {}).get("error")
    return found


def main() -> None:
    chosen, vllm = runs.arguments(__doc__, 1, {"tries": 16}, LIMIT_S)
    runs.begin(chosen.limit)
    r = Results("sleep_denied")
    options = ["--sleep-frees", "6", "--denies-sleep", "1"] if SIMULATED else VLLM
    run = runs.Run("m", chosen.models[0], 8126, vllm=[*options, *vllm])
    rows: list[dict[str, Any]] = []

    def denied() -> None:
        reference, awake_mib = run.reference(r, 3), used_mib()
        for i in range(chosen.tries):
            rows.append(attempt(run, MOMENTS_S[i % len(MOMENTS_S)]))
            r.note("tries", rows)
            print(rows[-1], flush=True)
            rows[-1] |= {"state": run.state(), "used_mib": used_mib()}
            answer = run.complete(40)  # wakes it, where it was suspended after all
            rows[-1]["same"] = answer.found == reference.found
            r.note("tries", rows)
            if rows[-1].get("exit") != 0:
                break
        last = rows[-1]
        r.check("every try: the same answers afterwards", all(x["same"] for x in rows), rows)
        error = last["error"] or {}
        r.check("vLLM denied its sleep", error.get("code") == "server-refused" and "/sleep" in error.get("message", ""), last)
        r.check("its memory had left, and its workers were told to wake up", SIMULATED or "/collective_rpc" in run.tail(20000), run.tail(1500))
        r.check("the run stayed awake, with all its memory", last["state"] == "awake" and last["used_mib"] >= awake_mib - CACHE_MIB, [awake_mib, last["used_mib"]])
        code, document, _ = gpuckpt("suspend", run.name)
        r.check("the next suspend goes through", code == 0 and run.state() == "suspended", document.get("error"))
        r.check("and the same answers after it", run.complete(40).found == reference.found)

    def start() -> None:
        run.came_up(r, START_S)
        if not run.until("awake", within_s=30):
            raise Late(f"it is {run.state()}")

    if part(r, "start", 30, start):
        part(r, "a sleep that is denied", 20, denied)
    run.end(20)
    r.finish()


if __name__ == "__main__":
    main()
