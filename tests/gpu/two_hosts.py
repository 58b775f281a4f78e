"""Two coordinators, each of one rank of a torch.distributed job: the path of two hosts, on one machine with two GPUs. usage: two_hosts.py [CYCLES]

Each `gpuckpt suspend --no-tree --rendezvous file://... PID` sees one rank alone, with a journal of its own. Ends at the first failure.
Every read and every command has a deadline. Needs NCCL 2.29.7 or newer in torch's place.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lab import HERE, SIMULATED, Results, used_mib

cycles = int(sys.argv[1]) if len(sys.argv) > 1 else 10
r = Results("two_hosts")
place = Path(tempfile.mkdtemp(prefix="two_hosts."))
READ_S, COMMAND_S = 180, 240


class Rank:
    def __init__(self, rank: int, environment: dict[str, str]) -> None:
        env = {**os.environ, **environment, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29519"}
        words = [str(HERE / "rank.py")]
        if SIMULATED:
            words = ["-m", "gpuckpt.driver.simtarget", "--gpu", str(rank), "--nccl-socket", "--agent", "tp", str(rank), "2"]
        self.p = subprocess.Popen([sys.executable, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        self.pid, self.received = self.p.pid, b""

    def send(self) -> None:
        self.p.stdin.write(b"check\n")  # type: ignore[union-attr]
        self.p.stdin.flush()  # type: ignore[union-attr]

    def read(self) -> dict[str, Any]:
        until, out = time.monotonic() + READ_S, self.p.stdout.fileno()  # type: ignore[union-attr]
        while True:
            line, found, rest = self.received.partition(b"\n")
            if found:
                self.received = rest
                if line.startswith(b"{"):
                    answer = json.loads(line)
                    return {k: v for k, v in answer.items() if k not in ("ready", "pid", "forked", "children")}
                continue
            if not select.select([out], [], [], max(0.0, until - time.monotonic()))[0]:
                return {"silent_for_s": READ_S}
            data = os.read(out, 65536)
            if not data:
                return {"ended": self.p.wait(10)}
            self.received += data


class Command:
    """A gpuckpt at work on one host."""

    def __init__(self, node: int, command: str, store: str, timeout: str) -> None:
        words = ["gpuckpt", command, str(ranks[node].pid), *(["--no-tree"] if command == "suspend" else [])]
        words += ["--rendezvous", f"file://{place}/{store}", "--nodes", "2", "--node-rank", str(node), "--timeout", timeout, "--json"]
        env = {**os.environ, "GPUCKPT_STATE_DIR": str(place / f"state{node}")}
        self.begun = time.perf_counter()
        self.p = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)

    def end(self) -> tuple[int, dict[str, Any], float]:
        try:
            out, err = self.p.communicate(timeout=COMMAND_S)
        except subprocess.TimeoutExpired:
            self.p.kill()
            out, err = self.p.communicate()
            return 125, {"error": {"code": "hung", "message": out + err}}, COMMAND_S
        seconds = round(time.perf_counter() - self.begun, 3)
        return self.p.returncode, json.loads(out) if out.startswith("{") else {"error": {"code": "no-json", "message": out + err}}, seconds


def must(what: str, ok: bool, seen: object = None) -> None:
    if not r.check(what, ok, seen):
        end()


def both(command: str, timeout: str = "120s") -> list[tuple[int, dict[str, Any], float]]:
    return [c.end() for c in [Command(node, command, "job", timeout) for node in range(2)]]


def sums() -> list[dict[str, Any]]:
    for x in ranks:
        x.send()
    return [x.read() for x in ranks]


def steps(document: dict[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for s in document.get("steps", []):
        found[s["name"]] = round(found.get(s["name"], 0.0) + s["seconds"], 4)
    return found


def end() -> None:
    for x in ranks:
        x.p.kill()
        x.p.wait(10)
    r.finish()


environment = json.loads(subprocess.run(["gpuckpt", "env", "--json"], capture_output=True, text=True, check=True, timeout=60).stdout)["environment"]
ranks = [Rank(i, environment) for i in range(2)]
first = [x.read() for x in ranks]
must("the job runs", all("sums" in f or "sum" in f for f in first), first)

code, doc, _ = Command(0, "suspend", "lonely", "8s").end()
must("a host that never comes: given up, nothing touched", code == 124 and doc["error"]["code"] == "host-missing", [code, doc.get("error")])
must("and the job goes on", sums() == first)

rows: list[dict[str, Any]] = []
for i in range(cycles):
    down = both("suspend")
    left = [used_mib(g) for g in range(2)]
    must(f"cycle {i}: both suspended", [d[0] for d in down] == [0, 0], [d[1].get("error") for d in down])
    up = both("resume")
    must(f"cycle {i}: both resumed", [u[0] for u in up] == [0, 0], [u[1].get("error") for u in up])
    exact = sums() == first
    rows.append(
        {
            "left_mib": left,
            "exact": exact,
            "running_mib": [used_mib(g) for g in range(2)],
            **{f"suspend_wall_s_{n}": d[2] for n, d in enumerate(down)},
            **{f"suspend_steps_{n}": steps(d[1]) for n, d in enumerate(down)},
            **{f"resume_wall_s_{n}": u[2] for n, u in enumerate(up)},
            **{f"resume_steps_{n}": steps(u[1]) for n, u in enumerate(up)},
        }
    )
    r.note("cycles", rows)
    print(i, rows[-1], flush=True)
    must(f"cycle {i}: exact, and 0 MiB in between", exact and not any(left), [left, exact])

running = [Command(node, "suspend", "killed", "20s") for node in range(2)]
until = time.monotonic() + 60
while time.monotonic() < until and not list((place / "killed").glob("*.checkpoint.all")):
    time.sleep(0.001)
running[1].p.kill()
running[1].end()
code, doc, _ = running[0].end()
held = code == 3 and doc["error"]["code"] == "held"
must("kill -9 of one coordinator after the commit: the other holds, or was done", held or code == 0, [code, doc.get("error")])
time.sleep(5)  # what the driver was at goes on without its controller
up = both("resume")
must("both resume from there", [u[0] for u in up] == [0, 0], [u[1].get("error") for u in up])
must("exact after that", sums() == first)
end()
