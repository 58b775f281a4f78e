"""Two models that do not fit on one GPU together, `gpuckpt run --share`: requests in turn, at once, and a lease that fills the GPU.

usage: run_two_models.py MODEL_A MODEL_B [ROUNDS] [-- VLLM ARGS]

An unmodified `openai` client asks, if it is installed. It ends at the first thing that is not as it should be, and after eight
minutes in any case. With GPUCKPT_SIMULATE it runs against tests/fake_vllm.py: that tries the script, and nothing else.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import Any

import runs
from lab import SIMULATED, Results, used_mib, wait_for

LIMIT_S = 480.0
#: What comes after the rounds takes so long.
REST_S = 120.0
SHARE = ("--share", "--least-awake", "500ms")
#: A program that fills what is free of the GPU, computes on it, and says how many MiB it had and the card has.
TRAINER = """
import ctypes, time
l = ctypes.CDLL("libcuda.so.1"); c = ctypes.c_void_p(); free = ctypes.c_size_t(); total = ctypes.c_size_t(); p = ctypes.c_void_p()
assert l.cuInit(0) == 0 and l.cuDevicePrimaryCtxRetain(ctypes.byref(c), 0) == 0 and l.cuCtxSetCurrent(c) == 0
assert l.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
n = free.value - (512 << 20)
assert l.cuMemAlloc_v2(ctypes.byref(p), ctypes.c_size_t(n)) == 0
for k in range(20):
    assert l.cuMemsetD32_v2(p, k, ctypes.c_size_t(n // 4)) == 0 and l.cuCtxSynchronize() == 0
time.sleep(1.0)
print(n >> 20, total.value >> 20)
"""
SIMULATED_TRAINER = "import os, time\nfrom gpuckpt.driver.simulated_store import SimulatedWorldDir as W\nw = W(os.environ['GPUCKPT_SIMULATE'])\nw.register(os.getpid(), {sorted(w.peek().rules.gpus)[0]: 79 << 30})\ntime.sleep(0.5)\nprint(79 << 10, 80 << 10)\n"


def main() -> None:
    words = sys.argv[1:]
    extra = words[words.index("--") + 1 :] if "--" in words else []
    words = words[: words.index("--")] if "--" in words else words
    rounds = int(words[2]) if len(words) > 2 else 8
    if SIMULATED:
        extra = ["--gib", "50", "--sleep-frees", "45", *extra]
    else:
        extra = ["--gpu-memory-utilization", "0.85", *extra]
    runs.begin(LIMIT_S)
    r = Results("run_two_models")
    watch = Watch()
    try:
        show(r, words[0], words[1], rounds, extra, watch)
    except Exception as e:  # noqa: BLE001 - the rest is of no use then
        r.check("it went through", False, f"{type(e).__name__}: {e}")
    for run in runs.started:
        r.note(f"operations_{run.name}", run.operations())
        r.note(f"log_tail_{run.name}", run.tail(3000))
    r.note("gpu_mib_over_time", watch.points)
    r.note("events", watch.events)
    r.finish()


def show(r: Results, model_a: str, model_b: str, rounds: int, extra: list[str], watch: Watch) -> None:
    empty = used_mib()
    both: list[runs.Run] = []
    ask: dict[str, Any] = {}
    reference: dict[str, Any] = {}
    for name, model, port in (("a", model_a, 8131), ("b", model_b, 8132)):
        watch.event(f"start {name}")
        run = runs.Run(name, model, port, *SHARE, vllm=extra)
        both.append(run)
        must(r.check(f"{name} came up", run.until("awake", within_s=200), run.state()))
        r.note(f"start_{name}_s", round(time.monotonic() - run.begun, 1))
        ask[name] = client(run)
        ask[name]()
        reference[name], warm_s = ask[name]()
        r.note(f"warm_answer_{name}_s", warm_s)
        r.note(f"awake_{name}_mib", used_mib())
    a, b = both
    r.check("the first left the GPU for the second to start", a.state() == "suspended", a.state())
    r.check("together they are more than the card", mib(r, "a") + mib(r, "b") > total_mib(), [mib(r, "a"), mib(r, "b"), total_mib()])
    r.note("client", "openai" if openai_client() else "plain HTTP")

    rows: list[dict[str, Any]] = []
    for n in range(rounds):
        if runs.left_s() < REST_S:
            break
        for run in (a, b):
            watch.event(f"ask {run.name}")
            answer, seconds = ask[run.name]()
            rows.append({"round": n, "model": run.name, "seconds": seconds, "same": answer == reference[run.name]})
            r.note("rows", rows)
            print(rows[-1], flush=True)
            must(rows[-1]["same"])
    r.check(f"{len(rows) // 2} rounds of alternating requests, every answer right", len(rows) >= 4, {"seconds": sorted(x["seconds"] for x in rows)})

    watch.event("16 requests at once for both")
    answers: list[tuple[str, Any]] = []
    clients = [threading.Thread(target=lambda k=k: answers.append((k, ask[k]()[0])), daemon=True) for k in "abab" * 4]
    for c in clients:
        c.start()
    for c in clients:
        c.join(100)
    wrong = [k for k, answer in answers if answer != reference[k] and not SIMULATED]
    r.check("16 at once for both, none failed", len(answers) == 16 and all(isinstance(x[1][0], list) for x in answers), {"other text": wrong})

    for n in range(3):
        watch.event("lease")
        begun = time.monotonic()
        script = SIMULATED_TRAINER if SIMULATED else TRAINER
        job = subprocess.Popen(["gpuckpt", "lease", "--gpu", "0", "--timeout", "60s", "--", sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        runs.programs.append(job)
        waited: list[Any] = []
        other = threading.Thread(target=lambda: waited.append(ask["b"]()), daemon=True)
        wait_for(lambda: b.state() == "suspended", 30)
        other.start()  # it comes while the other program has the GPU
        said = job.communicate(timeout=90)[0].split()
        seconds = round(time.monotonic() - begun, 2)
        watch.event("lease ends")
        must(r.check(f"lease {n}: another program filled the GPU", job.returncode == 0 and len(said) == 2 and int(said[0]) > 0.95 * int(said[1]), said))
        other.join(100)
        must(r.check(f"lease {n}: the request that came meanwhile is answered, the same", bool(waited) and waited[0][0] == reference["b"], {"lease_s": seconds, "answer_s": waited and waited[0][1]}))
        must(r.check(f"lease {n}: the other model answers, the same", ask["a"]()[0] == reference["a"]))

    codes = [run.end(60) for run in both]
    gone = wait_for(lambda: used_mib() <= empty, 20)
    r.check("SIGTERM ends both and leaves no GPU memory", gone, {"exit": codes, "mib": used_mib()})


def openai_client() -> Any:
    try:
        import openai
    except ImportError:
        return None
    return openai.OpenAI


def client(run: runs.Run) -> Any:
    """Asks the run for what :meth:`runs.Run.complete` asks; with the openai client where there is one, which may try twice."""
    make = openai_client()
    if make is None:
        return lambda: run.complete(100)
    api = make(base_url=f"http://127.0.0.1:{run.port}/v1", api_key="none", timeout=100)

    def ask() -> tuple[Any, float]:
        begun = time.monotonic()
        answer = api.completions.create(model="m", prompt=runs.PROMPTS, max_tokens=64, temperature=0, logprobs=1)
        found = [[c.text, c.logprobs.token_logprobs if getattr(c, "logprobs", None) else None] for c in answer.choices]
        return found, round(time.monotonic() - begun, 3)

    return ask


class Watch:
    """The memory in use on the GPU, ten times a second, and what happened when."""

    def __init__(self) -> None:
        self.points: list[tuple[float, int]] = []
        self.events: list[tuple[float, str]] = []
        self._begun = time.monotonic()
        threading.Thread(target=self._sample, daemon=True).start()

    def event(self, what: str) -> None:
        self.events.append((round(time.monotonic() - self._begun, 1), what))
        print(self.events[-1], flush=True)

    def _sample(self) -> None:
        while True:
            mib_now, now = used_mib(), round(time.monotonic() - self._begun, 1)
            if not self.points or abs(mib_now - self.points[-1][1]) > 64 or now - self.points[-1][0] >= 5:
                self.points.append((now, mib_now))
            time.sleep(0.1)


def mib(r: Results, name: str) -> int:
    return int(r.document[f"awake_{name}_mib"])


def total_mib() -> int:
    import lab

    return int(lab.used_mib() + lab.free_mib())


def must(ok: bool) -> None:
    if not ok:
        raise RuntimeError("the rest is left out")


if __name__ == "__main__":
    main()
