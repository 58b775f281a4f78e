"""Two models that do not fit on one GPU together, `gpuckpt run --share`: requests in turn, at once, and a lease that fills the GPU.

usage: run_two_models.py [--rounds N] [--leases N] [--limit S] MODEL_A MODEL_B [-- VLLM ARGS]

An unmodified `openai` client asks, if it is installed. Both runs are started at once: each waits for the GPU by itself. With
GPUCKPT_SIMULATE it runs against tests/fake_vllm.py: that tries the script, and nothing else.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import lab
import runs
from lab import SIMULATED, Results, used_mib, wait_for
from runs import part

LIMIT_S = 540.0
START_S = 200.0
SHARE = ("--share", "--least-awake", "500ms")
#: The end takes so long.
END_S = 20.0
#: A round may take so long, before it is known how long one takes.
FIRST_S = 30.0


class Watch:
    """The memory in use on the GPU, ten times a second, and what happened when."""

    def __init__(self, r: Results) -> None:
        self._r = r
        self.points: list[tuple[float, int]] = []
        self.events: list[tuple[float, str]] = []
        self._begun = time.monotonic()
        threading.Thread(target=self._sample, daemon=True).start()

    def event(self, what: str) -> None:
        self.events.append((round(time.monotonic() - self._begun, 1), what))
        self._r.document["gpu_mib_over_time"] = list(self.points)
        self._r.note("events", self.events)
        print(self.events[-1], flush=True)

    def _sample(self) -> None:
        """A point where it changes, and where it begins to."""
        last: tuple[float, int] | None = None
        while True:
            now = (round(time.monotonic() - self._begun, 1), used_mib())
            if not self.points or abs(now[1] - self.points[-1][1]) > 64:
                if last is not None and last != self.points[-1]:
                    self.points.append(last)
                self.points.append(now)
            elif now[0] - self.points[-1][0] >= 5:
                self.points.append(now)
            last = now
            time.sleep(0.1)


class Show:
    def __init__(self, r: Results, models: list[str], vllm: list[str]) -> None:
        self.r, self.watch, self.empty, self.total = r, Watch(r), used_mib(), used_mib() + lab.free_mib()
        self.watch.event("start both")
        self.both = [runs.Run(n, m, p, *SHARE, vllm=vllm) for n, m, p in zip("ab", models, (8131, 8132), strict=True)]
        self.ask = {run.name: client(run) for run in self.both}
        self.reference: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []
        self.leases: list[dict[str, Any]] = []

    def start(self) -> None:
        for run in self.both:
            run.came_up(self.r, 2 * START_S)
            self.watch.event(f"{run.name} is up")

    def answers(self) -> None:
        """What each says when it has the GPU, and how much of it that takes."""
        mib = {}
        for run, other in (self.both, self.both[::-1]):
            self.watch.event(f"ask {run.name}")
            run.reference(self.r)
            other.suspended()
            self.reference[run.name] = self.ask[run.name]()[0]
            mib[run.name] = used_mib() - self.empty
        self.r.note("awake_mib", mib)
        self.r.check("together they are more than the card", sum(mib.values()) > self.total, {**mib, "card": self.total})
        self.r.check("each has answers of its own", SIMULATED or self.reference["a"] != self.reference["b"])

    def rounds(self, most: int, keep_s: float) -> None:
        longest = FIRST_S
        while len(self.rows) < 2 * most and runs.left_s() > keep_s + longest:
            begun = time.monotonic()
            for run in self.both:
                self.watch.event(f"ask {run.name}")
                answer, seconds = self.ask[run.name]()
                self.rows.append({"model": run.name, "seconds": seconds, "same": answer == self.reference[run.name]})
                self.r.note("rows", self.rows)
                print(self.rows[-1], flush=True)
            longest = max(5.0, time.monotonic() - begun)
        good = len(self.rows) >= 2 and all(x["same"] for x in self.rows)
        self.r.check("alternating requests, a swap each: every answer right", good, sorted(x["seconds"] for x in self.rows))

    def at_once(self) -> None:
        self.watch.event("16 requests at once for both")
        answers: list[tuple[str, Any]] = []
        clients = [threading.Thread(target=lambda k=k: answers.append((k, self.ask[k]()[0])), daemon=True) for k in "abab" * 4]
        for c in clients:
            c.start()
        for c in clients:
            c.join(60)
        other = [k for k, answer in answers if answer != self.reference[k]]  # batched otherwise: the last bits are vLLM's
        good = len(answers) == 16 and all(isinstance(x[1][0], list) for x in answers)
        self.r.check("16 at once for both, none failed", good, {"answered": len(answers), "not_bit_identical": other})

    def lend(self, most: int, keep_s: float) -> None:
        """A program has the whole GPU; a request that comes meanwhile waits, and is answered after it."""
        if most == 0:
            return
        longest = FIRST_S
        b = self.both[1]
        while len(self.leases) < most and runs.left_s() > keep_s + longest:
            self.watch.event("lease")
            begun = time.monotonic()
            program, path = runs.lease()
            waited: list[Any] = []
            other = threading.Thread(target=lambda to=waited: to.append(self.ask["b"]()), daemon=True)
            wait_for(lambda: b.state() == "suspended", 30)
            other.start()
            all_of_it, said = runs.filled(program, path, 60)
            self.watch.event("lease ends")
            row: dict[str, Any] = {"lease_s": round(time.monotonic() - begun, 2), "filled": all_of_it, "said": said}
            other.join(60)
            row |= {"waited_s": waited[0][1] if waited else None, "same": bool(waited) and waited[0][0] == self.reference["b"]}
            row["other_same"] = self.ask["a"]()[0] == self.reference["a"]
            self.leases.append(row)
            self.r.note("leases", self.leases)
            print("lease", row, flush=True)
            longest = max(5.0, time.monotonic() - begun)
        good = bool(self.leases) and all(x["filled"] and x["same"] and x["other_same"] for x in self.leases)
        self.r.check("lent to a program that filled the GPU; requests that came meanwhile and later are answered the same", good)

    def end(self) -> None:
        codes = [run.end(15) for run in self.both]
        gone = wait_for(lambda: used_mib() <= self.empty, 10)
        self.watch.event("both ended")
        self.r.check("SIGTERM ends both and leaves no GPU memory", gone, {"exit": codes, "mib": used_mib()})


def client(run: runs.Run) -> Any:
    """Asks the run what :meth:`runs.Run.complete` asks; with the openai client where there is one, which may try twice."""
    try:
        import openai
    except ImportError:
        def plain() -> tuple[Any, float]:
            answer = run.complete(100)
            return answer.found, answer.seconds

        return plain
    api = openai.OpenAI(base_url=f"http://127.0.0.1:{run.port}/v1", api_key="none", timeout=100)

    def ask() -> tuple[Any, float]:
        begun = time.monotonic()
        options = {"model": "m", "max_tokens": 64, "temperature": 0, "logprobs": 1}
        answers = [api.completions.create(prompt=p, extra_body={"cache_salt": runs.salt()}, **options) for p in runs.PROMPTS]
        choices = [a.choices[0] for a in answers]
        found = [[c.text, c.logprobs.token_logprobs if getattr(c, "logprobs", None) else None] for c in choices]
        return found, round(time.monotonic() - begun, 3)

    return ask


def main() -> None:
    chosen, vllm = runs.arguments(__doc__, 2, {"rounds": 8, "leases": 3}, LIMIT_S)
    vllm = ["--gib", "50", "--sleep-frees", "45", *vllm] if SIMULATED else ["--gpu-memory-utilization", "0.85", *vllm]
    runs.begin(chosen.limit)
    r = Results("run_two_models")
    r.note("wanted", {"rounds": chosen.rounds, "leases": chosen.leases, "limit_s": chosen.limit})
    show = Show(r, chosen.models, vllm)
    r.note("client", "plain HTTP" if show.ask["a"].__name__ == "plain" else "openai")
    if part(r, "start", 30, show.start) and part(r, "answers", 10, show.answers):
        part(r, "first rounds", END_S + FIRST_S + 1, lambda: show.rounds(min(2, chosen.rounds), END_S))
        part(r, "at once", END_S + FIRST_S, show.at_once)
        part(r, "a lease", END_S + FIRST_S + 1, lambda: show.lend(min(1, chosen.leases), END_S))
        part(r, "more rounds", END_S + 15, lambda: show.rounds(chosen.rounds, END_S + 15 * (chosen.leases - 1)))
        part(r, "more leases", END_S + FIRST_S + 1, lambda: show.lend(chosen.leases, END_S))
        part(r, "end", 10, show.end)
    r.finish()


if __name__ == "__main__":
    main()
