"""`gpuckpt run --idle -- vllm serve`: idle to an empty GPU, a request brings it back, same answers. usage: run_vllm.py MODEL [N] [-- VLLM ARGS]

It ends at the first thing that is not as it should be, and after four minutes in any case. With GPUCKPT_SIMULATE it runs against
tests/fake_vllm.py: that tries the script, and nothing else.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import runs
from lab import Results, slope, used_mib, wait_for

LIMIT_S = 235.0
IDLE_S = 1.0
#: What comes after the cycles takes so long.
REST_S = 45.0


def main() -> None:
    words = sys.argv[1:]
    extra = words[words.index("--") + 1 :] if "--" in words else []
    words = words[: words.index("--")] if "--" in words else words
    n = int(words[1]) if len(words) > 1 else 20
    runs.begin(LIMIT_S)
    r = Results("run_vllm")
    empty = used_mib()
    run = runs.Run("m", words[0], 8124, "--idle", f"{IDLE_S:g}s", vllm=extra)
    try:
        show(r, run, n, empty)
    except Exception as e:  # noqa: BLE001 - the rest is of no use then
        r.check("it went through", False, f"{type(e).__name__}: {e}")
    r.note("operations", run.operations())
    r.note("log_tail", run.tail(4000))
    r.finish()


def show(r: Results, run: runs.Run, n: int, empty: int) -> None:
    must(r.check("the run came up", run.until("awake", "draining", "suspending", "suspended", within_s=170), run.state()))
    r.note("start_s", round(time.monotonic() - run.begun, 1))
    run.complete()
    reference, warm_s = run.complete()
    r.note("warm_answer_s", warm_s)
    rows: list[dict[str, Any]] = []
    while len(rows) < n and runs.left_s() > REST_S:
        rows.append(cycle(run, reference))
        r.note("cycles", rows)
        print(len(rows), rows[-1], flush=True)
        must(rows[-1]["same"] and rows[-1]["suspended"])
    r.note("cycles_wanted", n)
    r.check(f"{len(rows)} cycles by themselves: idle, request, same text and logprobs", len(rows) >= min(n, 5))
    r.check("0 MiB above the empty card while suspended", all(x["suspended_mib"] <= empty for x in rows), [x["suspended_mib"] for x in rows])
    r.check("looking answers and wakes nothing", all(x["models"] == x["health"] == x["metrics"] == 200 and x["still_suspended"] for x in rows))
    if len(rows) > 3:
        r.note("awake_mib_slope", slope([float(x["awake_mib"]) for x in rows]))
    hidden = [run.http(p, {})[0] for p in ("/sleep?level=1", "//sleep", "/%73leep", "/collective_rpc", "/is_sleeping")]
    r.check("dev endpoints are not there", hidden == [404] * 5, hidden)
    body = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 2000, "min_tokens": 2000, "temperature": 0, "stream": True, "seconds": 5}
    status, text, seconds = run.http("/v1/completions", body, 30)
    r.check("a long stream is not cut by the idle clock", status == 200 and str(text).rstrip().endswith("data: [DONE]"), {"seconds": seconds})
    held: list[Any] = []
    must(run.until("suspended", within_s=20))
    clients = [threading.Thread(target=lambda: held.append(run.complete(30)[0]), daemon=True) for _ in range(16)]
    for c in clients:
        c.start()
    for c in clients:
        c.join(35)
    r.check("16 held at once are all answered", len(held) == 16 and all(isinstance(h[0], list) for h in held), held[:1])
    must(run.until("suspended", within_s=20))
    stopped = time.monotonic()
    code = run.end(20)
    gone = wait_for(lambda: used_mib() <= empty, 10)
    seen = {"exit": code, "mib": used_mib(), "s": round(time.monotonic() - stopped, 1)}
    r.check("SIGTERM while suspended leaves no process and no GPU memory", code == 143 and gone, seen)


def cycle(run: runs.Run, reference: Any) -> dict[str, Any]:
    awake_mib, last = used_mib(), time.monotonic()
    row: dict[str, Any] = {"awake_mib": awake_mib, "suspended": run.until("suspended", within_s=30)}
    row |= {"after_s": round(time.monotonic() - last, 2), "suspended_mib": used_mib()}
    row["models"], row["health"], row["metrics"] = (run.http(p, within_s=10)[0] for p in ("/v1/models", "/health", "/metrics"))
    row["still_suspended"] = run.state() == "suspended"
    answer, row["first_answer_s"] = run.complete(40)
    row["same"] = answer == reference
    return row


def must(ok: bool) -> None:
    if not ok:
        raise RuntimeError("the rest is left out")


if __name__ == "__main__":
    main()
