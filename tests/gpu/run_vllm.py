"""`gpuckpt run --idle -- vllm serve`: idle to an empty GPU, a request brings it back, same answers. usage: run_vllm.py MODEL [N] [-- VLLM ARGS]

With GPUCKPT_SIMULATE it runs against tests/fake_vllm.py: that tries the script, and nothing else.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from typing import Any

from lab import HERE, OUT, SIMULATED, Results, gpuckpt, slope, used_mib, wait_for

words = sys.argv[1:]
extra = words[words.index("--") + 1 :] if "--" in words else []
words = words[: words.index("--")] if "--" in words else words
model, n = words[0], int(words[1]) if len(words) > 1 else 20
IDLE_S = 5.0
PORT = 8124
r = Results("run_vllm")
empty = used_mib()
os.environ["GPUCKPT_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="gr-", dir="/tmp")


def http(path: str, data: object = None, timeout: float = 120) -> tuple[int, Any, float]:
    body = json.dumps(data).encode() if data is not None else None
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", data=body, headers={"Content-Type": "application/json"})
    begun = time.perf_counter()
    try:
        with urllib.request.urlopen(request, timeout=timeout) as f:
            text, status = f.read().decode(), f.status
    except urllib.error.HTTPError as e:
        text, status = e.read().decode(), e.code
    seconds = time.perf_counter() - begun
    return status, json.loads(text) if text.strip().startswith(("{", "[")) else text, round(seconds, 3)


def complete() -> tuple[Any, float]:
    prompt = [list(range(100, 140)), list(range(900, 1100)), [5, 6, 7]]
    status, answer, seconds = http("/v1/completions", {"model": "m", "prompt": prompt, "max_tokens": 64, "temperature": 0, "logprobs": 1})
    if status != 200:
        return [status, answer], seconds
    return [[c.get("text"), (c.get("logprobs") or {}).get("token_logprobs")] for c in answer["choices"]], seconds


def state() -> str:
    code, document, _ = gpuckpt("status", "m", timeout=30)
    return document["run"]["state"] if code == 0 else f"status exits with {code}"


def stream(tokens: int) -> dict[str, Any]:
    body = {"model": "m", "prompt": [1, 2, 3], "max_tokens": tokens, "min_tokens": tokens, "temperature": 0, "stream": True, "seconds": 12}
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}/v1/completions", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"})
    begun, lines = time.monotonic(), 0
    with urllib.request.urlopen(request, timeout=300) as f:
        last = b""
        for line in f:
            if line.startswith(b"data: "):
                lines, last = lines + 1, line
    return {"seconds": round(time.monotonic() - begun, 1), "events": lines, "done": last.strip() == b"data: [DONE]"}


serve = ["vllm", "serve", model, "--load-format", "dummy", "--served-model-name", "m", "--max-model-len", "4096", *extra]
if SIMULATED:
    serve = [sys.executable, str(HERE.parent / "fake_vllm.py"), "serve", model, "--log", str(OUT / "fake.log"), *extra]
serve += ["--host", "127.0.0.1", "--port", str(PORT)]
run = ["gpuckpt", "run", "--name", "m", "--adapter", "vllm", "--idle", f"{IDLE_S:g}s", "--hold", "100s", "--", *serve]
log = open(OUT / "run_vllm.log", "w")
begun = time.monotonic()
supervisor = subprocess.Popen(run, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, stdin=subprocess.DEVNULL)
try:
    if not wait_for(lambda: supervisor.poll() is not None or state() in ("awake", "suspended"), 280) or supervisor.poll() is not None:
        r.check("the run came up", False, open(log.name).read()[-2500:])
        r.finish()
    r.note("start_s", round(time.monotonic() - begun, 1))
    complete()
    reference, warm_s = complete()
    r.note("warm_answer_s", warm_s)
    rows: list[dict[str, Any]] = []
    for i in range(n):
        awake_mib, last = used_mib(), time.monotonic()
        idle = wait_for(lambda: state() == "suspended", IDLE_S + 90)
        row: dict[str, Any] = {"awake_mib": awake_mib, "suspended": idle, "after_s": round(time.monotonic() - last, 2), "suspended_mib": used_mib()}
        row["models"], row["health"] = http("/v1/models")[0], http("/health")[0]
        row["metrics"] = http("/metrics")[0]
        row["still_suspended"] = state() == "suspended"
        answer, row["first_answer_s"] = complete()
        row["same"] = answer == reference
        rows.append(row)
        r.note("cycles", rows)
        print(i, row, flush=True)
        if supervisor.poll() is not None:
            break
    r.check(f"{n} cycles by themselves: idle, request, same text and logprobs", len(rows) == n and all(x["suspended"] and x["same"] for x in rows))
    r.check("0 MiB above the empty card while suspended", all(x["suspended_mib"] <= empty for x in rows), [x["suspended_mib"] for x in rows])
    r.check("looking answers and wakes nothing", all(x["models"] == x["health"] == x["metrics"] == 200 and x["still_suspended"] for x in rows))
    if len(rows) > 3:
        r.note("awake_mib_slope", slope([float(x["awake_mib"]) for x in rows]))
    r.check("dev endpoints are not there", [http(p, {})[0] for p in ("/sleep?level=1", "//sleep", "/%73leep", "/collective_rpc", "/is_sleeping")] == [404] * 5)
    long = stream(2000)
    r.check("a long stream is not cut by the idle clock", long["done"], long)
    held: list[Any] = []
    wait_for(lambda: state() == "suspended", IDLE_S + 90)
    clients = [threading.Thread(target=lambda: held.append(complete()[0])) for _ in range(16)]
    for c in clients:
        c.start()
    for c in clients:
        c.join()
    r.check("16 held at once are all answered", len(held) == 16 and all(isinstance(h[0], list) for h in held), held[0])
    stopped = time.monotonic()
    wait_for(lambda: state() == "suspended", IDLE_S + 90)
    supervisor.send_signal(signal.SIGTERM)
    code = supervisor.wait(60)
    gone = wait_for(lambda: used_mib() <= empty, 20)
    r.check("SIGTERM while suspended leaves no process and no GPU memory", code == 143 and gone, {"exit": code, "mib": used_mib(), "s": round(time.monotonic() - stopped, 1)})
finally:
    if supervisor.poll() is None:
        supervisor.kill()
    supervisor.wait()
r.note("log_tail", open(log.name).read()[-4000:])
r.finish()
