"""A server in the shape of reinforcement learning: burst, suspend, somebody else on the GPU, resume, the same answers; for as long as there is time.

usage: LIMIT_S=600 soak.py MODEL [ITERATIONS] [-- VLLM ARGS]        LEVEL2=1: every 25th sleep drops the weights, which are loaded again

One `vllm serve` under `gpuckpt exec`, with the agent; 64 to 256 requests at once in each iteration. In turn: a suspend between two bursts; in the middle of one; after the server's own sleep, woken up
at once, weights first, or cache first. In every third another process fills at least 95 % of what was freed. Then three prompts must be answered as in iteration 0, to
the bit of their logprobs. Each run of the script is a run of its own in soak.json, with its machine, since only cycles of one uninterrupted process tell anything together.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
from lab import HERE, OUT, SIMULATED, Results, Rounds, fill, gpuckpt, left_s, limit, used_mib
from lab_fits import slope
from make_model import load_format

PORT = 8125
PROMPTS = [list(range(100, 140)), list(range(900, 1100)), [5, 6, 7]]
KINDS = ("between bursts", "sleep, wake", "in a burst", "sleep, weights first", "between bursts", "sleep, cache first")
ORDERS = {"sleep, wake": [""], "sleep, weights first": ["tags=weights", "tags=kv_cache"], "sleep, cache first": ["tags=kv_cache", "tags=weights"]}
#: Growth an iteration that is nothing to speak of: MiB on the GPU, MiB of host memory, descriptors, seconds.
HARMLESS = {"gpu_mib": 1.0, "suspended_gpu_mib": 0.0, "rss_mib": 4.0, "fds": 0.1, "probe_s": 0.005, "suspend_wall_s": 0.01, "resume_wall_s": 0.01}
WARM = 3  # iterations that no slope counts


def ask(path: str, data: object = None, within_s: float = 180.0) -> tuple[int, Any]:
    """Status and answer; 0 and the reason where none came."""
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=within_s)
    try:
        body = json.dumps(data) if data is not None else None
        connection.request("GET" if data is None else "POST", path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read().decode()
        return answer.status, json.loads(text) if text.startswith(("{", "[")) else text
    except (OSError, http.client.HTTPException) as e:
        return 0, repr(e)
    finally:
        connection.close()


class Server:
    """`vllm serve`, or the fake one."""

    def __init__(self, model: str, extra: list[str], before: list[str] | None = None, **environ: str) -> None:
        words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model, *load_format(model), "--served-model-name", "m"]
        words += ["--max-model-len", "4096", "--enable-sleep-mode", *extra]
        if SIMULATED:
            words = [sys.executable, str(HERE.parent / "fake_vllm.py"), "serve", model, "--log", str(OUT / "fake.log"), *extra]
        words = [*(before or []), *words]
        env = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", **environ}
        with open(OUT / "soak_vllm.log", "w") as log:
            self.p = subprocess.Popen(
                [*words, "--host", "127.0.0.1", "--port", str(PORT)],
                env=env, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self.p.pid

    def tree(self) -> list[psutil.Process]:
        process = psutil.Process(self.pid)
        return [process, *process.children(recursive=True)]

    def rss_mib(self) -> int:
        return sum(p.memory_info().rss for p in self.tree()) >> 20

    def fds(self) -> int:
        return sum(p.num_fds() for p in self.tree())

    def up(self, within_s: float) -> bool:
        until = time.monotonic() + min(within_s, left_s() - 60)
        while time.monotonic() < until and self.p.poll() is None:
            if ask("/health", within_s=2)[0] == 200:
                return True
            time.sleep(0.3)
        return False

    def end(self) -> None:
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.p.wait(20)


class Burst:
    """So many requests at once. ``wait`` gives how many were answered."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.answered = count, 0
        self.failures: list[Any] = []
        self._lock = threading.Lock()
        self._begun = time.monotonic()
        self._pool = ThreadPoolExecutor(count)
        rng = random.Random(seed)
        for _ in range(count):
            prompt = [rng.randrange(3, 30000) for _ in range(rng.randrange(8, 256))]
            body = {"model": "m", "prompt": prompt, "max_tokens": rng.randrange(16, 128), "temperature": 0, "ignore_eos": True}
            self._pool.submit(self._one, {**body, "seconds": 0.3} if SIMULATED else body)

    def _one(self, body: dict[str, Any]) -> None:
        status, answer = ask("/v1/completions", body)
        good = status == 200 and isinstance(answer, dict) and "text" in answer["choices"][0]
        with self._lock:
            self.answered += good
            if not good:
                self.failures.append([status, str(answer)[:200]])

    def wait(self) -> dict[str, Any]:
        self._pool.shutdown()
        return {"requests": self.count, "answered": self.answered, "burst_s": round(time.monotonic() - self._begun, 2), "failures": self.failures[:3]}


def probe() -> tuple[Any, float]:
    """What it makes of each prompt alone, and of nothing that it remembers, with the seconds that it takes: beside others, or with what is found in the prefix
    cache, the last digits are others."""
    ask("/reset_prefix_cache", {})
    begun, found = time.perf_counter(), []
    for prompt in PROMPTS:
        status, answer = ask("/v1/completions", {"model": "m", "prompt": prompt, "max_tokens": 64, "temperature": 0, "logprobs": 1})
        if status != 200:
            return [status, str(answer)[:200]], 0.0
        found += [[c.get("text"), (c.get("logprobs") or {}).get("token_logprobs")] for c in answer["choices"]]
    return found, round(time.perf_counter() - begun, 4)


def sleep(level: int) -> list[int]:
    return [ask(f"/sleep?level={level}", {})[0]]


def wake(orders: list[str], level: int) -> list[int]:
    answers = []
    for query in orders:
        answers.append(ask(f"/wake_up{'?' if query else ''}{query}", {})[0])
        if level == 2 and query in ("", "tags=weights"):
            answers.append(ask("/collective_rpc", {"method": "reload_weights"})[0])
    return answers


def iteration(i: int, server: Server, reference: Any) -> dict[str, Any]:
    level = 2 if os.environ.get("LEVEL2") and i % 25 == 24 else 1
    kind = "sleep, weights first" if level == 2 else KINDS[i % len(KINDS)]
    row: dict[str, Any] = {"i": i, "kind": kind, "level": level if "sleep" in kind else 0}
    burst = Burst(random.Random(i).choice((64, 96, 128, 192, 256)), seed=i)
    if kind == "in a burst":
        time.sleep(0.5)
    else:
        row |= burst.wait()
    row |= {"gpu_mib": used_mib(), "rss_mib": server.rss_mib(), "fds": server.fds()}
    if "sleep" in kind:
        row["sleep"] = sleep(level)
    code, down, wall = gpuckpt("suspend", server.pid)
    row |= {"suspend": code, "suspend_wall_s": wall, "suspended_gpu_mib": used_mib(), "suspend_error": down.get("error")}
    if i % 3 == i // len(KINDS) % 3:  # of each kind in turn
        row["freed_mib"], row["filled_mib"] = row["gpu_mib"] - row["suspended_gpu_mib"], fill()
    code, up, wall = gpuckpt("resume", server.pid, "--wait", "20s")
    row |= {"resume": code, "resume_wall_s": wall, "resume_error": up.get("error")}
    if "sleep" in kind:
        row["wake"] = wake(ORDERS[kind], level)
    if kind == "in a burst":
        row |= burst.wait()
    answers, row["probe_s"] = probe()
    return {**row, "same": answers == reference}


def fits(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Slopes an iteration, of one run. Suspends of each kind take their own time: their slope is of those of one kind."""
    found = {k: slope([float(x[k]) for x in rows[WARM:]]) for k in ("gpu_mib", "suspended_gpu_mib", "rss_mib", "fds", "probe_s")}
    alike = [x for x in rows[WARM:] if x["kind"] == "between bursts"]
    return found | {k: slope([float(x[k]) for x in alike]) for k in ("suspend_wall_s", "resume_wall_s")}


def main() -> None:
    words = sys.argv[1:]
    extra = words[words.index("--") + 1 :] if "--" in words else []
    words = words[: words.index("--")] if "--" in words else words
    r, rounds = Results("soak"), Rounds(30)
    limit(r, 600)
    runs, rows = r.appended("runs"), []
    empty = used_mib()
    server = Server(words[0], extra, before=["gpuckpt", "exec", "--"], GPUCKPT_AGENT="1")
    try:
        if not r.check("vllm serve came up", server.up(240), (OUT / "soak_vllm.log").read_text(errors="replace")[-1500:]):
            return
        Burst(64, seed=-1).wait()
        probe()
        reference, _ = probe()
        run: dict[str, Any] = {"begun": time.strftime("%Y-%m-%d %H:%M:%S"), "pid": server.pid, "machine": r.document["machine"], "rows": rows}
        while len(rows) < (int(words[1]) if len(words) > 1 else 100) and rounds.another():
            begun = time.monotonic()
            rows.append(iteration(len(rows), server, reference))
            rounds.took(time.monotonic() - begun)
            r.note("runs", [*runs, run])
            print({k: v for k, v in rows[-1].items() if v is not None}, flush=True)
            if not (rows[-1]["same"] and rows[-1]["suspend"] == rows[-1]["resume"] == 0):
                break
        run["slopes"] = fits(rows) if len(rows) > WARM + 3 else None
        r.note("runs", [*runs, run])
        judge(r, rows, run["slopes"], empty)
    finally:
        server.end()
        r.finish()


def judge(r: Results, rows: list[dict[str, Any]], slopes: dict[str, Any] | None, empty: int) -> None:
    made, answered = sum(x["requests"] for x in rows), sum(x["answered"] for x in rows)
    r.check("every request answered", made == answered, {"made": made, "answered": answered, "first failures": [x["failures"] for x in rows if x["failures"]][:1]})
    bad = [x["i"] for x in rows if not x["same"] or x["suspend"] or x["resume"] or set(x.get("sleep", []) + x.get("wake", [])) - {200}]
    r.check(f"{len(rows)} iterations, the probes bit-identical", bool(rows) and not bad, bad)
    r.check("0 MiB above the empty card while suspended", all(x["suspended_gpu_mib"] <= empty for x in rows), max((x["suspended_gpu_mib"] for x in rows), default=0))
    filled = [[x["filled_mib"], x["freed_mib"]] for x in rows if "filled_mib" in x]
    r.check("another process filled 95 % of what was freed", all(a >= 0.95 * b for a, b in filled), filled[:3])
    for name, found in (slopes or {}).items():
        r.check(f"{name} does not grow", found["per_step"] - found["plus_minus"] <= HARMLESS[name], found)


if __name__ == "__main__":
    main()
