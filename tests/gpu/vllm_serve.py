"""`gpuckpt suspend $(pid of vllm serve)`, another process on the freed GPU, `gpuckpt resume`. usage: vllm_serve.py MODEL [N] [-- VLLM ARGS]"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from typing import Any

from lab import OUT, Results, fill, free_mib, gpuckpt, used_mib
from make_model import load_format

words = sys.argv[1:]
extra = words[words.index("--") + 1 :] if "--" in words else []
words = words[: words.index("--")] if "--" in words else words
model, n = words[0], int(words[1]) if len(words) > 1 else 5
r = Results("vllm_serve")
empty = used_mib()


def http(path: str, data: object = None, timeout: float = 60) -> Any:
    body = json.dumps(data).encode() if data is not None else None
    request = urllib.request.Request("http://127.0.0.1:8123" + path, data=body, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as f:
        text = f.read().decode()
    return json.loads(text) if text.strip().startswith(("{", "[")) else text


def complete() -> tuple[list[str], list[Any]]:
    prompt = [list(range(100, 140)), list(range(900, 1100)), [5, 6, 7]]
    answer = http("/v1/completions", {"model": "m", "prompt": prompt, "max_tokens": 64, "temperature": 0, "logprobs": 1})
    return [c["text"] for c in answer["choices"]], [c["logprobs"]["token_logprobs"] for c in answer["choices"]]


log = open(OUT / "vllm.log", "w")
begun = time.monotonic()
server = subprocess.Popen(
    [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model, "--port", "8123", "--host", "127.0.0.1", *load_format(model),
     "--served-model-name", "m", "--max-model-len", "4096", *extra],
    stdout=log, stderr=subprocess.STDOUT, start_new_session=True, stdin=subprocess.DEVNULL,
)
try:
    while True:
        try:
            http("/health", timeout=2)
            break
        except Exception:  # noqa: BLE001 - until it answers
            if server.poll() is not None or time.monotonic() - begun > 240:
                r.check("vllm serve came up", False, open(log.name).read()[-1500:])
                r.finish()
            time.sleep(0.5)
    r.note("start_s", round(time.monotonic() - begun, 1))
    complete()
    reference = complete()
    code, plan, _ = gpuckpt("suspend", server.pid, "--dry-run")
    r.check("dry run of the vllm serve pid finds its engine", code == 0 and len(plan["processes"]) == 1, [plan.get("error"), plan.get("processes"), plan.get("hazards")])
    rows = []
    for i in range(n):
        row: dict[str, Any] = {"gpu_mib": used_mib()}
        code, down, wall = gpuckpt("suspend", server.pid)
        row |= {"suspend": code, "suspend_wall_s": wall, "suspended_gpu_mib": used_mib(), "down_steps": {s["name"]: s["seconds"] for s in down.get("steps", [])}}
        row["filler_mib"] = [str(fill()), str(free_mib() + used_mib())]
        up_code, up, wall = gpuckpt("resume", server.pid, "--wait", "20s")
        row |= {"resume": up_code, "resume_wall_s": wall, "up_steps": {s["name"]: s["seconds"] for s in up.get("steps", [])}}
        t = time.perf_counter()
        text, logprobs = complete()
        row |= {"same_text": text == reference[0], "same_logprobs": logprobs == reference[1], "first_answer_s": round(time.perf_counter() - t, 3)}
        rows.append(row)
        r.note("cycles", rows)
        print(i, row, down.get("error"), up.get("error"), flush=True)
    r.check(f"{n} cycles, same text and logprobs", len(rows) == n and all(x["same_text"] and x["same_logprobs"] for x in rows))
    r.check("0 MiB above the empty card while suspended", all(x["suspended_gpu_mib"] <= empty for x in rows), [x["suspended_gpu_mib"] for x in rows])
    r.check("another process filled the freed GPU each time", all(len(x["filler_mib"]) == 2 and int(x["filler_mib"][0]) > 0.95 * int(x["filler_mib"][1]) for x in rows), [x["filler_mib"] for x in rows])
finally:
    os.killpg(server.pid, signal.SIGKILL)
    server.wait()
r.finish()
