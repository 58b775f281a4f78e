"""Two coordinators, each of one rank of a torch.distributed job: the path of two hosts, on one machine with two GPUs. usage: two_hosts.py [CYCLES] [LIMIT_S] [--exec]

Each `gpuckpt suspend --no-tree --rendezvous file://... PID` sees one rank alone, with a journal of its own. Ends at the first failure, and
after LIMIT_S seconds (default $LIMIT_S, else 120) in any case: fewer cycles are made where they would not fit. What was done by then, and
when, is in the result file, with the votes of the last operation. With ``--exec`` the ranks have the preload library.
Needs NCCL 2.29.7 or newer in torch's place.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from job import Budget, Rank, ask, astray, environment, runs, steps, tail
from lab import Results, used_mib

words = [w for w in sys.argv[1:] if w != "--exec"]
cycles = int(words[0]) if words else 10
r = Results("two_hosts")
place = Path(tempfile.mkdtemp(prefix="two_hosts."))
at_work: list[Command] = []
#: What comes after the cycles: a host that never comes, then a kill, a hold and the way back.
LONELY_S, KILLED_S, RESERVE_S = 3.0, 5.0, 45.0


class Command:
    """A gpuckpt at work on one host."""

    def __init__(self, node: int, command: str, store: str, timeout_s: float) -> None:
        words = ["gpuckpt", command, str(ranks[node].pid), *(["--no-tree"] if command == "suspend" else [])]
        words += ["--rendezvous", f"file://{place}/{store}", "--nodes", "2", "--node-rank", str(node), "--timeout", f"{timeout_s:g}s", "--json"]
        env = {**os.environ, "GPUCKPT_STATE_DIR": str(place / f"state{node}")}
        self.node, self.command, self.begun, self.said = node, command, time.perf_counter(), place / f"said.{node}"
        with self.said.open("w") as said:
            self.p = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=said, text=True, env=env)
        budget.started.append(self.p)
        at_work.append(self)

    def end(self) -> tuple[int, dict[str, Any], float]:
        try:
            out, _ = self.p.communicate(timeout=budget.left(keep_s=3.0))
        except subprocess.TimeoutExpired:
            must(f"{self.command} on node {self.node} returns", False, look())
            raise
        at_work.remove(self)
        seconds = round(time.perf_counter() - self.begun, 3)
        document = json.loads(out) if out.startswith("{") else {"error": {"code": "no-json", "message": out + tail(self.said)}}
        error = document.get("error")
        budget.step(f"node {self.node}: {self.command} ended with {self.p.returncode} after {seconds} s {error['message'] if error else ''}")
        return self.p.returncode, document, seconds


def look() -> dict[str, Any]:
    """What can be seen where something hangs: who is at work, what it said, the votes, and the state of each rank's process."""
    votes = {d.name: [[f.name, f.read_text()[:400]] for f in newest(d)] for d in place.iterdir() if d.is_dir() and not d.name.startswith("state")}
    return {
        "at_work": [[c.node, c.command, round(time.perf_counter() - c.begun, 1), tail(c.said)] for c in at_work],
        "votes": votes,
        "journals": {str(f.relative_to(place)): json.loads(f.read_text()) for f in place.glob("state*/groups/*.json")},
        "ranks": [[x.pid, x.p.poll(), *(proc(x.pid, name) for name in ("wchan", "status"))] for x in ranks],
        "used_mib": [used_mib(g) for g in range(2)],
    }


def newest(directory: Path) -> list[Path]:
    return sorted(directory.glob("*"), key=lambda f: f.stat().st_mtime_ns)[-30:]


def proc(pid: int, name: str) -> str:
    try:
        text = Path(f"/proc/{pid}/{name}").read_text()
    except OSError as e:
        return e.strerror or str(e)
    return next((line for line in text.splitlines() if line.startswith("State:")), text[:100])


def must(what: str, ok: bool, seen: object = None) -> None:
    if not r.check(what, ok, seen):
        r.note("rank_logs", [tail(x.log) for x in ranks])
        finish()


def both(command: str, timeout_s: float = 30.0) -> list[tuple[int, dict[str, Any], float]]:
    budget.step(f"{command} on both")
    return [c.end() for c in [Command(node, command, "job", timeout_s) for node in range(2)]]


def sums() -> list[dict[str, Any]]:
    budget.step("sums")
    return ask(ranks)


def finish() -> None:
    budget.end()
    r.finish()


ranks: list[Rank] = []
budget = Budget(r, float(words[1] if len(words) > 1 else os.environ.get("LIMIT_S", "120")), look)
budget.step("the ranks start")
environ = environment()
ranks += [Rank(budget, i, 2, environ, preload="--exec" in sys.argv) for i in range(2)]
try:
    first = [x.read() for x in ranks]
    must("the job runs", runs(first), first)
    r.note_nccl(x.pid for x in ranks)

    rows: list[dict[str, Any]] = []
    longest = 0.0
    for i in range(cycles):
        if not budget.allows(longest + RESERVE_S) and rows:
            budget.step(f"no time for cycle {i}")
            break
        begun = time.monotonic()
        down = both("suspend")
        left = [used_mib(g) for g in range(2)]
        must(f"cycle {i}: both suspended", [d[0] for d in down] == [0, 0], [d[1].get("error") for d in down])
        must(f"cycle {i}: each rank was on its own GPU alone", not any(astray(d[1]) for d in down), [astray(d[1]) for d in down])
        up = both("resume")
        must(f"cycle {i}: both resumed", [u[0] for u in up] == [0, 0], [u[1].get("error") for u in up])
        exact = sums() == first
        rows.append(
            {
                "left_mib": left,
                "exact": exact,
                "running_mib": [used_mib(g) for g in range(2)],
                "astray": [astray(u[1]) for u in up],
                **{f"suspend_wall_s_{n}": d[2] for n, d in enumerate(down)},
                **{f"suspend_steps_{n}": steps(d[1]) for n, d in enumerate(down)},
                **{f"resume_wall_s_{n}": u[2] for n, u in enumerate(up)},
                **{f"resume_steps_{n}": steps(u[1]) for n, u in enumerate(up)},
            }
        )
        r.note("cycles", rows)
        longest = max(longest, time.monotonic() - begun)
        must(f"cycle {i}: exact, and 0 MiB in between", exact and not any(left), [left, exact])
    r.note("cycles_asked_and_made", [cycles, len(rows)])

    budget.step("one host alone")
    code, doc, _ = Command(0, "suspend", "lonely", LONELY_S).end()
    must("a host that never comes: given up, nothing touched", code == 124 and doc["error"]["code"] == "host-missing", [code, doc.get("error")])
    must("and the job goes on", sums() == first)

    budget.step("suspend on both, and kill -9 of node 1 at the commit")
    running = [Command(node, "suspend", "killed", KILLED_S) for node in range(2)]
    while not list((place / "killed").glob("*.checkpoint.all")) and all(c.p.poll() is None for c in running):
        time.sleep(0.001)
    running[1].p.kill()
    running[1].end()
    code, doc, _ = running[0].end()
    must("the other holds", code == 3 and doc["error"]["code"] == "held", [code, doc.get("error")])
    r.note("left_mib_of_the_killed", [used_mib(g) for g in range(2)])  # its checkpoint has ended by now, or was never begun
    up = both("resume")
    must("both resume from there", [u[0] for u in up] == [0, 0], [u[1].get("error") for u in up])
    must("exact after that", sums() == first)
    budget.step("done")
finally:
    budget.end()
r.finish()
