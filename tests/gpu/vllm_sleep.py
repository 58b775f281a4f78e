"""`vllm serve --enable-sleep-mode` with GPUCKPT_AGENT=1, suspended by its pid: weights and KV cache by vLLM's allocator, then the driver;
and by the driver alone, in turn. usage: vllm_sleep.py MODEL [N] [pool] [-- VLLM ARGS]

N suspends with each method (3). ``pool``: with gpuckpt.pool in the place of vLLM's allocator. ``EXEC=1``: under `gpuckpt exec`, that is with the preload library;
and then by the driver alone once more, with the library told of nothing (``alone``). ``METHODS=driver,alone``: these, and not all. Ends after LIMIT_S (235) seconds in any case, and with it all that it started: a cycle that would not fit
any more is left out, and that is noted. With GPUCKPT_SIMULATE it runs against tests/vllm_tree: that tries the script, and nothing else.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from statistics import median
from typing import Any

import vllm_contract
from lab import HERE, OUT, SIMULATED, Results, gpuckpt, used_mib
from make_model import load_format

words = sys.argv[1:]
extra = words[words.index("--") + 1 :] if "--" in words else []
words = words[: words.index("--")] if "--" in words else words
pooled = "pool" in words
words = [w for w in words if w != "pool"]
model, n = words[0], int(words[1]) if len(words) > 1 else 3
LIMIT_S = float(os.environ.get("LIMIT_S", "235"))
PORT, END_S = 8127, 12.0  # kept for an orderly end
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


for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(signum, end)
watchdog = threading.Timer(LIMIT_S, lambda: (print(f"FAIL after {LIMIT_S:g} s: the script's own limit", flush=True), end()))
watchdog.daemon = True
watchdog.start()
under_exec = bool(os.environ.get("EXEC"))
r = Results("vllm_sleep" + "_pool" * pooled + "_exec" * under_exec)


def left_s() -> float:
    return LIMIT_S - END_S - (time.monotonic() - begun)


# 1. What is relied upon, by name.
if not SIMULATED:
    root = vllm_contract.root_of("vllm")
    r.check("vLLM is installed", root is not None)
    assumptions = {**vllm_contract.checks(root), **vllm_contract.checks_of_sleep(root), **vllm_contract.installed()}  # type: ignore[arg-type]
    if pooled:
        assumptions |= {**vllm_contract.checks_of_pool(root), **vllm_contract.checks_of_graphs(root)}  # type: ignore[arg-type]
        assumptions |= vllm_contract.checks_of_torch(vllm_contract.root_of("torch"))  # type: ignore[arg-type]
    broken = [what for what, ok in assumptions.items() if not ok]
    if not r.check("vLLM is as gpuckpt.agent.vllm_memory knows it", not broken, broken or len(assumptions)):
        r.finish()
empty = used_mib()
r.note("empty_mib", empty)


def http(path: str, data: object = None, timeout: float = 60) -> Any:
    body = json.dumps(data).encode() if data is not None else None
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", data=body, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as f:
        text = f.read().decode()
    return json.loads(text) if text.strip().startswith(("{", "[")) else text


def complete() -> tuple[list[str], list[Any]]:
    prompt = [list(range(100, 140)), list(range(900, 1100)), [5, 6, 7], [i % 997 + 3 for i in range(3000)]]
    answer = http("/v1/completions", {"model": "m", "prompt": prompt, "max_tokens": 48, "temperature": 0, "logprobs": 1})
    return [c["text"] for c in answer["choices"]], [c["logprobs"]["token_logprobs"] for c in answer["choices"]]


def fresh() -> tuple[list[str], list[Any]]:
    """With nothing in the prefix cache: prompts that are computed and prompts that are found give logprobs that differ in the last digits."""
    http("/reset_prefix_cache", {})
    return complete()


def hits() -> float | None:
    """Tokens found in the prefix cache so far, by vLLM's own count."""
    if SIMULATED:
        return None
    lines = [line for line in http("/metrics").splitlines() if line.startswith("vllm:prefix_cache_hits_total")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines) if lines else None


class Asking(threading.Thread):
    """A long request on its own; ``answer`` is the number of its tokens, or the words of what went wrong."""

    def __init__(self, tokens: int) -> None:
        super().__init__(daemon=True)
        self.tokens, self.answer = tokens, None
        self.start()

    def run(self) -> None:
        data = {"model": "m", "prompt": [7, 8, 9], "max_tokens": self.tokens, "min_tokens": self.tokens, "ignore_eos": True, "temperature": 0}
        try:
            self.answer = http("/v1/completions", data, 200)["usage"]["completion_tokens"]
        except Exception as e:  # noqa: BLE001 - whatever it is, it is the answer
            self.answer = f"{type(e).__name__}: {e}"


def steps(document: dict[str, Any]) -> dict[str, float]:
    return {s["name"]: s["seconds"] for s in document.get("steps", [])}


def cycle(method: str, reference: Any, flying: Asking | None = None) -> dict[str, Any]:
    """One suspend by *method*, and the resume. ``good``: it did, nothing is left on the GPU, and the answers are *reference*."""
    row: dict[str, Any] = {"method": method, "gpu_mib": used_mib()}
    if method == "alone":
        os.environ["GPUCKPT_PRELOAD"] = "0"  # the library is told of nothing
    code, down, row["suspend_wall_s"] = gpuckpt("suspend", server.pid, "--method", method.replace("alone", "driver"), timeout=max(5.0, left_s()))
    row["image"] = [p.get("image") for p in down.get("processes", [])]
    row |= {"suspend": code, "suspend_s": down.get("seconds"), "down": steps(down), "left_mib": used_mib() - empty, "way": down.get("method"), "error": down.get("error"), "warnings": down.get("warnings")}
    row["moved"] = [p.get("moved") for p in down.get("processes", [])]
    row["states"] = [p.get("state") for p in down.get("processes", [])]
    row["in_flight"] = flying.is_alive() if flying else None
    if code == 0:
        code, up, row["resume_wall_s"] = gpuckpt("resume", server.pid, "--wait", "5s", timeout=max(5.0, left_s()))
        row |= {"resume": code, "resume_s": up.get("seconds"), "up": steps(up), "error": up.get("error"), "warnings": (row["warnings"] or []) + (up.get("warnings") or [])}
    os.environ.pop("GPUCKPT_PRELOAD", None)
    if code == 0:
        if flying:
            flying.join(60)
            row["in_flight_tokens"] = flying.answer
        before, t = hits(), time.perf_counter()
        text, logprobs = complete()
        row |= {"first_answer_s": round(time.perf_counter() - t, 3), "same_text": text == reference[0], "same_logprobs": logprobs == reference[1]}
        after = hits()
        row["prefix_hits"] = after - before if after is not None and before is not None else None
    row["seconds"] = round(time.monotonic() - begun, 1)
    row["good"] = code == 0 and row["same_text"] and row["same_logprobs"] and (method == "pool" or row["left_mib"] <= 0)
    return row


def tail(n: int = 3000) -> str:
    return open(OUT / "vllm_sleep.log").read()[-n:]


command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model, "--port", str(PORT), "--host", "127.0.0.1", *load_format(model)]
command += ["--served-model-name", "m", "--max-model-len", "4096", "--enable-sleep-mode", *extra]
# The dev endpoints are for the script: to compare like with like, and to put the server to sleep by its own call.
environ = {**os.environ, "GPUCKPT_AGENT": "1", "VLLM_SERVER_DEV_MODE": "1", "GPUCKPT_POOL": "1" if pooled else ""}
if under_exec:
    command = ["gpuckpt", "exec", "--", *command]
if SIMULATED:
    command = [sys.executable, "-m", "vllm.serve", "-tp", "1", "--port", str(PORT), "--enable-sleep-mode"]
    environ |= {"PYTHONPATH": str(HERE.parent / "vllm_tree"), "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
r.note("command", command)
rows: list[dict[str, Any]] = []
try:
    server = subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL, stdout=open(OUT / "vllm_sleep.log", "w"), stderr=subprocess.STDOUT, env=environ)
    started.append(server)
    while True:
        try:
            http("/health", timeout=2)
            break
        except Exception:  # noqa: BLE001 - until it answers
            if server.poll() is not None or left_s() < 30:
                r.check("vllm serve --enable-sleep-mode came up", False, tail())
                raise SystemExit from None
            time.sleep(0.5)
    r.note("start_s", round(time.monotonic() - begun, 1))
    fresh()
    computed, found = fresh(), complete()
    r.check("it answers twice alike, computed anew and out of its prefix cache", fresh() == computed and complete() == found)
    r.note("computed_is_found", computed == found)
    code, plan, _ = gpuckpt("suspend", server.pid, "--dry-run", timeout=60)
    names = [s["name"] for s in ((plan.get("plan") or {}).get("steps") or [])]
    seen = {"steps": names, "method": plan.get("method"), "error": plan.get("error"), "refused": (plan.get("plan") or {}).get("refused"), "movable": (plan.get("plan") or {}).get("movable")}
    r.check("by the allocator that was asked for", ("gpuckpt.pool" in json.dumps(plan.get("method"))) is (pooled and not SIMULATED), plan.get("method"))
    if pooled and not SIMULATED:
        tags = {t["tag"]: t["bytes"] >> 20 for m in (seen["movable"] or {}).values() for t in m["tags"]}
        r.note("tags_mib", tags)
        r.check("its graphs are in the pool", tags.get("cudagraph", 0) > 0, tags)
    if not r.check("dry run: an offload before the driver's calls", code == 0 and "offload" in names and not plan["plan"]["refused"], seen):
        r.note("log", tail(6000))
        raise SystemExit

    # 2. In turn: what vLLM's allocator holds first and the driver the rest; the driver alone.
    takes = {"auto": 20.0, "driver": 5.0 + used_mib() / 1024 * 1.0, "alone": 45.0}  # seconds of a cycle: a guess until there is one
    methods = ("auto", "driver", *(["alone"] if under_exec and not pooled else []))
    if chosen := os.environ.get("METHODS"):
        methods = tuple(chosen.split(","))
    wanted = [m for _ in range(n) for m in methods]
    for i, method in enumerate(wanted):
        if left_s() < takes[method] * 1.2:
            r.note(f"left_out_{i}", f"{method}: {left_s():.0f} s left, it takes {takes[method]:.0f}")
            continue
        t = time.monotonic()
        # by the driver the prefix cache comes back with all the rest, and the prompts are found in it
        row = cycle(method, computed if method == "auto" else found)
        takes[method] = time.monotonic() - t
        rows.append(row)
        r.note("cycles", rows)
        print("ok  " if row["good"] else "FAIL", json.dumps(row, default=str)[:1400], flush=True)
        if row.get("resume") != 0:
            r.note("log", tail(6000))
            print(tail(), flush=True)
            break
        complete()  # the prefix cache is full again for the next one
    whole = all(x.get("resume") == 0 for x in rows)
    r.check("every cycle: same text and logprobs", whole and all(x["same_text"] and x["same_logprobs"] for x in rows), [[x["method"], x.get("same_text"), x.get("same_logprobs")] for x in rows])
    r.check("0 MiB above the empty card while suspended", all(x["left_mib"] <= 0 for x in rows), [x["left_mib"] for x in rows])
    r.check("every way was taken", {x["method"] for x in rows} == set(methods) and all(("offload" in x["down"]) == (x["method"] == "auto") for x in rows))
    if not SIMULATED and "auto" in methods:
        r.check("case 47: after a suspend that dropped the KV cache nothing is found in it", all(x["prefix_hits"] == 0 for x in rows if x["method"] == "auto"), [[x["method"], x.get("prefix_hits")] for x in rows])
    for method in methods:
        mine = [x for x in rows if x["method"] == method and x.get("resume") == 0]
        if mine:
            later = mine[1:] or mine
            r.note(method, {"first_suspend_s": mine[0]["suspend_s"], "first_resume_s": mine[0]["resume_s"], "later": len(mine) - 1, "suspend_s": median(x["suspend_s"] for x in later), "resume_s": median(x["resume_s"] for x in later)})

    # 3. A request in flight; the pool alone; a server that sleeps by its own call.
    if whole and left_s() > takes["auto"] * 1.5:
        flying = Asking(100 if SIMULATED else 2000)
        time.sleep(0.1 if SIMULATED else 1.5)
        row = cycle("auto", computed, flying)
        r.note("in_flight", row)
        r.check("a request in flight ends with all of its tokens", row["resume"] == 0 and row["in_flight_tokens"] == flying.tokens, [row.get("in_flight"), row.get("in_flight_tokens"), row["error"]])
    if whole and left_s() > takes["auto"] * 1.5:
        fresh()
        row = cycle("pool", computed)
        r.note("pool", row)
        r.check("the pool alone: same answers, and what stays is told", row["good"] and row["states"] == ["suspended (pool)"], [row["left_mib"], row.get("error")])
    if whole and left_s() > takes["auto"] * 2:
        http("/sleep?level=1&mode=wait", {})
        asleep = used_mib()
        code, down, _ = gpuckpt("suspend", server.pid, timeout=max(5.0, left_s()))
        suspended = used_mib() - empty
        up_code, up, _ = gpuckpt("resume", server.pid, timeout=max(5.0, left_s()))
        still = http("/is_sleeping")
        held = used_mib()
        http("/wake_up", {})
        r.note("asleep", {"asleep_mib": asleep, "suspended_mib": suspended, "resumed_mib": held, "down": steps(down), "up": steps(up), "errors": [down.get("error"), up.get("error")]})
        r.check("a server that sleeps by its own call is left asleep, and right when it wakes", code == up_code == 0 and suspended <= 0 and "offload" not in steps(down) and (SIMULATED or still["is_sleeping"]) and fresh() == computed, [code, up_code, suspended, still, asleep, held])
    r.note("log_complaints", [line[:300] for line in open(OUT / "vllm_sleep.log") if "ERROR" in line or "gpuckpt" in line][-10:])

    # 4. It ends in order.
    t = time.monotonic()
    server.send_signal(signal.SIGTERM)
    try:
        r.note("ended", [server.wait(max(1.0, min(END_S - 2, left_s() + END_S - 2))), round(time.monotonic() - t, 1)])
    except subprocess.TimeoutExpired:
        r.note("ended", "not in time")
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
