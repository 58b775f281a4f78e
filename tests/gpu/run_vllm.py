"""`gpuckpt run --idle -- vllm serve`: idle to an empty GPU, a request brings it back, same answers; and a GPU lent out in between.

usage: run_vllm.py [--cycles N] [--leases N] [--limit S] MODEL [-- VLLM ARGS]

With `-- -tp N` it is a server on N GPUs, rehearsed before it is ready, and the result file is run_vllm_tp.json (run_vllm_tpN.json, where N is not 2). The parts go by
what they are worth: three cycles, what happens once, a lease, then more of both until the time is over. With GPUCKPT_SIMULATE it
runs against tests/fake_vllm.py: that tries the script, and nothing else.
"""

from __future__ import annotations

import statistics
import threading
import time
from typing import Any

import runs
from lab import Results, all_used_mib, wait_for
from lab_fits import slope
from runs import Answer, part

LIMIT_S = 480.0
IDLE_S = 1.0
START_S = 260.0
#: Asked of the first byte after a wake, beyond the resume's own seconds.
OVER_MS = 50.0
#: The end takes so long: from awake to suspended, and SIGTERM.
END_S = 25.0
#: A cycle may take so long, before it is known how long one takes.
FIRST_S = 25.0


class Show:
    def __init__(self, r: Results, run: runs.Run, empty: int) -> None:
        self.r, self.run, self.empty = r, run, empty
        self.reference = Answer(None, 0.0, 0.0)
        self.rows: list[dict[str, Any]] = []
        self.leases: list[dict[str, Any]] = []

    def start(self) -> None:
        self.run.came_up(self.r, START_S)

    def answers(self) -> None:
        self.reference = self.run.reference(self.r)

    def cycles(self, most: int, keep_s: float) -> None:
        """Idle, suspended, looked at, woken by a request; until there are *most*, or no more than *keep_s* are left."""
        longest = FIRST_S
        while len(self.rows) < most and runs.left_s() > keep_s + longest:
            begun = time.monotonic()
            self.rows.append(self.cycle())
            longest = max(time.monotonic() - begun, 5.0)
            self.r.note("cycles", self.rows)
            print(len(self.rows), self.rows[-1], flush=True)
        self.judge()

    def cycle(self) -> dict[str, Any]:
        run = self.run
        row: dict[str, Any] = {"awake_mib": all_used_mib()}
        before, last = run.step_seconds(), time.monotonic()
        run.suspended()
        row |= {"suspended_after_s": round(time.monotonic() - last, 2), "suspended_mib": all_used_mib()}
        row["models"], row["health"], row["metrics"] = (run.http(p, within_s=10)[0] for p in ("/v1/models", "/health", "/metrics"))
        row["still_suspended"] = run.state() == "suspended"
        answer = run.complete(40)
        row |= {"same": answer.found == self.reference.found, "first_byte_s": answer.first_byte_s, "answer_s": answer.seconds}
        steps = {k: round(v - before.get(k, 0.0), 4) for k, v in run.step_seconds().items()}
        row["steps_s"] = {k: v for k, v in steps.items() if v}
        row["beyond_resume_ms"] = round((answer.first_byte_s - steps.get("resume whole", 0.0)) * 1e3, 1)
        return row

    def judge(self) -> None:
        r, rows = self.r, self.rows
        r.check("cycles by themselves: idle, request, same text and logprobs", bool(rows) and all(x["same"] for x in rows), len(rows))
        r.check("0 MiB above the empty card while suspended", all(x["suspended_mib"] <= self.empty for x in rows), self.mib("suspended_mib"))
        looked = all(x["models"] == x["health"] == x["metrics"] == 200 and x["still_suspended"] for x in rows)
        r.check("looking answers and wakes nothing", looked)
        if not rows:
            return
        warm_ms = r.document[f"warm_first_byte_{self.run.name}_s"] * 1e3
        beyond = statistics.median(x["beyond_resume_ms"] for x in rows)
        seen = {"median_beyond_resume_ms": beyond, "warm_first_byte_ms": round(warm_ms, 1)}
        r.check("first byte after a wake: the resume, a warm request's own, and at most 50 ms", beyond - warm_ms <= OVER_MS, seen)
        names = sorted({k for x in rows for k in x["steps_s"]})
        r.note("median_steps_s", {k: round(statistics.median(x["steps_s"].get(k, 0.0) for x in rows), 4) for k in names})
        if len(rows) > 3:
            r.note("awake_mib_slope", slope([float(m) for m in self.mib("awake_mib")]))

    def mib(self, key: str) -> list[int]:
        return [x[key] for x in self.rows]

    def hidden(self) -> None:
        found = [self.run.http(p, {}, 10)[0] for p in ("/sleep?level=1", "//sleep", "/%73leep", "/collective_rpc", "/is_sleeping")]
        self.r.check("dev endpoints are not there", found == [404] * 5, found)

    def long_stream(self) -> None:
        """With an idle time far below what it takes."""
        body = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 2000, "min_tokens": 2000, "temperature": 0, "stream": True, "seconds": 5}
        status, text, seconds = self.run.http("/v1/completions", body, 60)
        whole = status == 200 and str(text).rstrip().endswith("data: [DONE]")
        seen = {"seconds": seconds, "events": str(text).count("data: ")}
        self.r.check("a streamed answer of 2,000 tokens is not cut by the idle clock", whole and seconds > 2 * IDLE_S, seen)

    def held(self) -> None:
        self.run.suspended()
        answers: list[Answer] = []
        clients = [threading.Thread(target=lambda: answers.append(self.run.complete(40)), daemon=True) for _ in range(16)]
        for c in clients:
            c.start()
        for c in clients:
            c.join(45)
        other = sum(a.found != self.reference.found for a in answers)  # batched otherwise: text may differ in the last bits, and that is vLLM's
        seen = {"answered": len(answers), "not_bit_identical": other, "failed": [a.found for a in answers if not a.ok][:1]}
        self.r.check("16 held at once are all answered", len(answers) == 16 and all(a.ok for a in answers), seen)

    def lend(self, most: int, keep_s: float) -> None:
        """Generate, then another program trains on the whole GPU, then generate again."""
        if most == 0:
            return
        longest = FIRST_S
        while len(self.leases) < most and runs.left_s() > keep_s + longest:
            begun = time.monotonic()
            before = self.run.complete(40)
            program, path = runs.lease(trains=True)
            all_of_it, said = runs.filled(program, path, 60)
            row = {"lease_s": round(time.monotonic() - begun, 2), "filled": all_of_it, "said": said}
            after = self.run.complete(40)
            row |= {"same": before.found == after.found == self.reference.found, "next_answer_s": after.seconds}
            self.leases.append(row)
            longest = max(time.monotonic() - begun, 5.0)
            self.r.note("leases", self.leases)
            print("lease", len(self.leases), row, flush=True)
        good = bool(self.leases) and all(x["filled"] and x["same"] for x in self.leases)
        self.r.check("lent to a program that trained on the whole GPU, and the same answers before and after", good, len(self.leases))

    def end(self) -> None:
        self.run.suspended()
        stopped = time.monotonic()
        code = self.run.end(20)
        gone = wait_for(lambda: all_used_mib() <= self.empty, 10)
        seen = {"exit": code, "mib": all_used_mib(), "s": round(time.monotonic() - stopped, 1)}
        self.r.check("SIGTERM while suspended leaves no process and no GPU memory", code == 143 and gone, seen)


def main() -> None:
    chosen, vllm = runs.arguments(__doc__, 1, {"cycles": 20, "leases": 20}, LIMIT_S)
    runs.begin(chosen.limit)
    words = [part for word in vllm for part in word.split("=")]
    ranks = next((n for option, n in zip(words, words[1:], strict=False) if option in ("-tp", "--tensor-parallel-size")), "")
    r = Results(f"run_vllm_tp{'' if ranks == '2' else ranks}" if ranks else "run_vllm")
    r.note("wanted", {"cycles": chosen.cycles, "leases": chosen.leases, "limit_s": chosen.limit})
    show = Show(r, runs.Run("m", chosen.models[0], 8124, "--idle", f"{IDLE_S:g}s", vllm=vllm), all_used_mib())
    if part(r, "start", 30, show.start) and part(r, "reference", 5, show.answers):
        part(r, "first cycles", END_S + FIRST_S + 1, lambda: show.cycles(min(3, chosen.cycles), END_S))
        part(r, "dev endpoints", END_S, show.hidden)
        part(r, "long stream", END_S + 20, show.long_stream)
        part(r, "held requests", END_S + FIRST_S, show.held)
        part(r, "first leases", END_S + FIRST_S + 1, lambda: show.lend(min(3, chosen.leases), END_S))
        part(r, "more cycles", END_S + 15, lambda: show.cycles(chosen.cycles, END_S + 15 * min(5, chosen.leases)))
        part(r, "more leases", END_S + FIRST_S + 1, lambda: show.lend(chosen.leases, END_S))
        part(r, "end", 10, show.end)
    r.finish()


if __name__ == "__main__":
    main()
