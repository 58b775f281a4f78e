"""`vllm serve -tp N`, suspended and resumed by its pid, through its agents: same answers, empty GPUs. usage: RANKS=N vllm_tp2.py MODEL [CYCLES] [-- VLLM ARGS]

N is 2 if it is not said, and the result is vllm_tpN.json. CYCLES (10) with the driver moving all memory; with `-- --enable-sleep-mode` half as many more with vLLM's allocator moving its own first. ``EXEC=1``: under
`gpuckpt exec`, that is with the preload library. Prints what gpuckpt relies on in vLLM first. Stops at the first cycle that fails, and after LIMIT_S seconds in any case; whatever it
started ends with it. With GPUCKPT_SIMULATE it runs against tests/vllm_tree, on simulated GPUs: that tries the script, and nothing else.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from typing import Any

import vllm_contract
from job import Asking, by_rank, fill
from lab import HERE, OUT, SIMULATED, Results, gpuckpt, used_mib
from lab_fits import slope
from make_model import load_format

words = sys.argv[1:]
extra = words[words.index("--") + 1 :] if "--" in words else []
words = words[: words.index("--")] if "--" in words else words
model, cycles = words[0], int(words[1]) if len(words) > 1 else 10
LIMIT_S = float(os.environ.get("LIMIT_S", "540"))
RANKS = int(os.environ.get("RANKS", "2"))
START_S, STEP_S, PORT, GPUS = 240.0, 120.0, 8125, tuple(range(RANKS))
FLIGHT_S = 1.5 if SIMULATED else 5.0  # how long the request shall take that is in flight when the suspend comes
begun = time.monotonic()
started: list[subprocess.Popen[Any]] = []


def end(*_: object) -> None:
    """End all that was started, at once."""
    for p in started:
        try:
            os.killpg(p.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    os._exit(3)


def start(command: list[str], **more: Any) -> subprocess.Popen[Any]:
    p = subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL, **more)
    started.append(p)
    return p


for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(signum, end)
watchdog = threading.Timer(LIMIT_S, lambda: (print(f"FAIL after {LIMIT_S:g} s: the script's own limit", flush=True), end()))
watchdog.daemon = True
watchdog.start()
r = Results(f"vllm_tp{RANKS}")

# 1. What is relied upon, by name.
if not SIMULATED:
    root = vllm_contract.root_of("vllm")
    r.check("vLLM is installed", root is not None)
    assumptions = {**vllm_contract.checks(root), **vllm_contract.checks_of_nccl(root), **vllm_contract.installed()}  # type: ignore[arg-type]
    broken = [what for what, ok in assumptions.items() if not ok]
    if not r.check("vLLM is as gpuckpt.agent.vllm knows it", not broken, broken or len(assumptions)):
        r.finish()
made = subprocess.run(["gpuckpt", "env", "--vllm", "--json"], capture_output=True, text=True, timeout=60)
environment = json.loads(made.stdout)["environment"]
r.check("gpuckpt env --vllm", environment.get("GPUCKPT_AGENT") == "1" and not json.loads(made.stdout)["warnings"], made.stdout[-600:])
empty = [used_mib(g) for g in GPUS]
r.note("empty_mib", empty)


# 2. The server.
def http(path: str, data: object = None, timeout: float = STEP_S) -> Any:
    body = json.dumps(data).encode() if data is not None else None
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", data=body, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as f:
        text = f.read().decode()
    return json.loads(text) if text.strip().startswith(("{", "[")) else text


def complete(timeout: float = STEP_S) -> tuple[list[str], list[Any]]:
    prompt = [list(range(100, 140)), list(range(900, 1100)), [5, 6, 7]]
    answer = http("/v1/completions", {"model": "m", "prompt": prompt, "max_tokens": 64, "temperature": 0, "logprobs": 1}, timeout)
    return [c["text"] for c in answer["choices"]], [c["logprobs"]["token_logprobs"] for c in answer["choices"]]


def long(tokens: int) -> int:
    """Tokens that a request for so many got."""
    data = {"model": "m", "prompt": [7, 8, 9], "max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True, "temperature": 0}
    return http("/v1/completions", data)["usage"]["completion_tokens"]


def tail(n: int = 2500) -> str:
    return open(OUT / f"{r.name}.log").read()[-n:]


def fresh() -> tuple[list[str], list[Any]]:
    """With nothing in the prefix cache, as after a suspend that dropped it."""
    http("/reset_prefix_cache", {})
    return complete()


def steps(document: dict[str, Any]) -> dict[str, float]:
    return {s["name"]: s["seconds"] for s in document.get("steps", [])}


ours = ["-tp", str(RANKS), "--disable-custom-all-reduce"]
if "fuse_allreduce_rms" not in " ".join(extra):
    ours += ["--compilation-config", '{"pass_config": {"fuse_allreduce_rms": false}}']
if "--gpu-memory-utilization" not in extra:
    ours += ["--gpu-memory-utilization", "0.08"]
command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model, "--port", str(PORT), "--host", "127.0.0.1"]
command += [*load_format(model), "--served-model-name", "m", "--max-model-len", "4096", *ours, *extra]
environ = {**os.environ, **environment, "VLLM_SERVER_DEV_MODE": "1"}
if os.environ.get("EXEC"):
    command = ["gpuckpt", "exec", "--", *command]
if SIMULATED:
    command = [sys.executable, "-m", "vllm.serve", "-tp", str(RANKS), "--port", str(PORT), *[w for w in extra if w == "--enable-sleep-mode"]]
    environ |= {"PYTHONPATH": str(HERE.parent / "vllm_tree"), "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
r.note("command", command)
try:
    server = start(command, stdout=open(OUT / f"{r.name}.log", "w"), stderr=subprocess.STDOUT, env=environ)
    while True:
        try:
            http("/health", timeout=2)
            break
        except Exception:  # noqa: BLE001 - until it answers
            if server.poll() is not None or time.monotonic() - begun > START_S:
                r.check("it came up", False, tail())
                raise SystemExit from None
            time.sleep(0.5)
    r.note("start_s", round(time.monotonic() - begun, 1))
    fresh()
    computed, reference = fresh(), complete()
    r.check("it answers twice alike, computed anew and out of its prefix cache", fresh() == computed and complete() == reference, [used_mib(g) for g in GPUS])
    t = time.monotonic()
    r.check("a long request", long(256) == 256)
    flight = min(3500, int(256 * FLIGHT_S / (time.monotonic() - t)))
    r.note("tokens_in_flight", flight)

    # 3. What would be refused, before anything is.
    code, plan, seconds = gpuckpt("suspend", server.pid, "--dry-run", timeout=60)
    seen = {"seconds": seconds, "error": plan.get("error"), "plan": plan.get("plan"), "hazards": plan.get("hazards"), "processes": plan.get("processes")}
    names = [s["name"] for s in ((plan.get("plan") or {}).get("steps") or [])]
    if not r.check("dry run: all workers, by their agents, nothing in the way", code == 0 and not plan["plan"]["refused"] and "comms" in names and len(plan["processes"]) == RANKS, seen):
        raise SystemExit
    r.note_nccl(p["pid"] for p in plan["processes"])
    r.note("running_mib", [used_mib(g) for g in GPUS])

    # 4. Cycles: in every other one a request is in flight when the suspend comes.
    rows: list[dict[str, Any]] = []
    wanted = ["driver"] * cycles + ["auto"] * (cycles // 2 if "--enable-sleep-mode" in extra else 0)
    for i, method in enumerate(wanted):
        row: dict[str, Any] = {"cycle": i, "method": method}
        answers = reference if method == "driver" else computed
        flying = Asking(lambda: long(flight)) if i % 2 else None
        if flying:
            time.sleep(0.1)
        code, down, row["suspend_wall_s"] = gpuckpt("suspend", server.pid, "--method", method, timeout=STEP_S)
        row |= {"suspend": code, "down": steps(down), "down_by_rank": by_rank(down), "left_mib": [used_mib(g) for g in GPUS], "error": down.get("error"), "warnings": down.get("warnings")}
        row["in_flight"] = flying.is_alive() if flying else None
        if code == 0:
            waiting = Asking(complete)
            row["filler_mib"] = fill(GPUS, started)
            row["answered_while_suspended"] = not waiting.is_alive()
            code, up, row["resume_wall_s"] = gpuckpt("resume", server.pid, "--wait", "20s", timeout=STEP_S)
            row |= {"resume": code, "up": steps(up), "up_by_rank": by_rank(up), "error": up.get("error"), "warnings": row["warnings"] + (up.get("warnings") or [])}
        if code == 0:
            waiting.join(STEP_S)
            row |= {"waited": type(waiting.answer) is tuple and len(waiting.answer[0]) == 3 or waiting.answer, "waited_s": waiting.seconds}
            row["waited_same"] = waiting.answer == answers
            if flying:
                flying.join(STEP_S)
                row["in_flight_tokens"] = flying.answer
            t = time.perf_counter()
            text, logprobs = complete() if method == "driver" else fresh()
            row |= {"same_text": text == answers[0], "same_logprobs": logprobs == answers[1], "answer_s": round(time.perf_counter() - t, 3)}
            row["running_mib"] = [used_mib(g) for g in GPUS]
        rows.append(row)
        r.note("cycles", rows)
        good = (
            code == 0
            and row["same_text"]
            and row["same_logprobs"]
            and row["waited"] is True
            and (flying is not None or row["waited_same"])  # beside another request the batch is another one
            and (flying is None or row["in_flight_tokens"] == flight)
            and all(left <= e for left, e in zip(row["left_mib"], empty, strict=True))
            and all(isinstance(f, list) and f[0] > 0.95 * f[1] for f in row["filler_mib"])
        )
        print("ok  " if good else "FAIL", json.dumps(row, default=str)[:1500], flush=True)
        if not good:
            r.check(f"cycle {i}", False, row)
            r.note("log", tail(6000))
            print(tail(), flush=True)
            break
    r.check(f"{len(wanted)} cycles: same text and logprobs, GPUs empty and filled meanwhile, no request lost", len(rows) == len(wanted) and not any(c.startswith("cycle ") for c in r.document["checks"]))
    whole = [x for x in rows if x.get("resume") == 0]
    for method in dict.fromkeys(x["method"] for x in whole):
        mine = [x for x in whole if x["method"] == method]
        r.note(f"by_{method}_s", {f"{which}_{command}": f([x[f"{command}_wall_s"] for x in some]) for command in ("suspend", "resume") for which, some, f in (("first", mine[:1], sum), ("later", mine[1:] or mine, statistics.median))})
    if whole:
        r.check("what was asked for was moved", all(("offload" in x["down"]) == (x["method"] == "auto") for x in whole))
        r.check("a request was in flight at a suspend", any(x["in_flight"] for x in whole) or cycles < 2, [x["in_flight"] for x in whole])
    if cycles > 5:
        r.note("slope_running_mib", [slope([float(x["running_mib"][g]) for x in whole[1:cycles]]) for g in GPUS])
    r.note("log_complaints", [line[:300] for line in open(OUT / f"{r.name}.log") if "ERROR" in line or "No available shared memory" in line][-10:])

    # 5. It ends in order.
    t = time.monotonic()
    server.send_signal(signal.SIGTERM)
    try:
        r.note("ended", [server.wait(30), round(time.monotonic() - t, 1)])
    except subprocess.TimeoutExpired:
        r.note("ended", "not within 30 s")
except subprocess.TimeoutExpired as e:
    r.check("every command returned in time", False, [str(e), tail()])
except SystemExit:
    pass
finally:
    for p in started:
        try:
            os.killpg(p.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
r.note("total_s", round(time.monotonic() - begun, 1))
r.finish()
