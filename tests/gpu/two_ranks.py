"""A torch.distributed job of N ranks (default 2): suspended and resumed as one, answers exact. usage: two_ranks.py [CYCLES] [N] [NAME]

What breaks where there are several communicators is found out by $RANK_GROUPS (of ``world,new,split``, default world), $RANK_WARM,
$RANK_SEVERAL=1, $RANK_UNBOUND (new groups are not split from the default one) and $RANK_COMMS=1 (down and up without the driver); NAME is
then that of the results.
Needs NCCL 2.29.7 or newer in torch's place, and one GPU a rank. An un-suspended job without agents must be refused, not lost.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from typing import Any

from lab import HERE, Results, gpuckpt, slope, state, used_mib

cycles, n = int(sys.argv[1]) if len(sys.argv) > 1 else 20, int(sys.argv[2]) if len(sys.argv) > 2 else 2
r = Results(sys.argv[3] if len(sys.argv) > 3 else "two_ranks")
environment = json.loads(subprocess.run(["gpuckpt", "env", "--json"], capture_output=True, text=True, check=True).stdout)["environment"]


class Rank:
    def __init__(self, rank: int) -> None:
        env = {**os.environ, **environment, "RANK": str(rank), "WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ.get("MASTER_PORT", "29517")}
        self.p = subprocess.Popen([sys.executable, str(HERE / "rank.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self.pid = self.p.pid

    def send(self, command: str = "check") -> None:
        self.p.stdin.write(command + "\n")  # type: ignore[union-attr]
        self.p.stdin.flush()  # type: ignore[union-attr]

    def read(self, seconds: float = 120) -> dict[str, Any]:
        while select.select([self.p.stdout], [], [], seconds)[0]:
            line = self.p.stdout.readline()  # type: ignore[union-attr]
            if not line:
                return {"ended": self.p.poll()}
            if line.startswith("{"):
                return json.loads(line)
        return {"late": seconds}


def ask(ranks: list[Rank], command: str = "check") -> list[dict[str, Any]]:
    for x in ranks:
        x.send(command)
    return [x.read() for x in ranks]


ranks = [Rank(i) for i in range(n)]
try:
    first = [x.read() for x in ranks]
    if not r.check("the job runs", all("sums" in f for f in first), first):
        raise SystemExit(1)
    r.note("groups", first[0]["groups"])
    if os.environ.get("RANK_COMMS"):
        for i in range(cycles):
            if not r.check(f"{i}: down and up without the driver, sums exact", ask(ranks, "comms") == first):
                break
        raise SystemExit(0)
    code, plan, _ = gpuckpt("suspend", ranks[0].pid, "--dry-run")
    r.check("dry run: every rank, agent steps", code == 0 and not plan["plan"]["refused"], [plan.get("plan"), plan.get("hazards")])
    code, doc, _ = gpuckpt("suspend", "--no-tree", ranks[1].pid)
    r.check("one rank alone is refused, and not lost", code == 6 and state(ranks[1].pid) == "RUNNING", doc.get("error"))
    rows = []
    for i in range(cycles):
        code, down, wall = gpuckpt("suspend", ranks[i % n].pid)
        row: dict[str, Any] = {"suspend": code, "suspend_wall_s": wall, "left_mib": [used_mib(g) for g in range(n)]}
        row["down_steps"] = {s["name"]: s["seconds"] for s in down.get("steps", [])}
        if code:
            r.check(f"cycle {i}", False, down.get("error"))
            break
        code, up, wall = gpuckpt("resume", ranks[0].pid)
        row |= {"resume": code, "resume_wall_s": wall, "up_steps": {s["name"]: s["seconds"] for s in up.get("steps", [])}}
        row["exact"] = code == 0 and ask(ranks) == first
        row["running_mib"] = [used_mib(g) for g in range(n)]
        rows.append(row)
        r.note("cycles", rows)
        print(i, row, up.get("error"), flush=True)
        if not row["exact"]:
            break
    r.check(f"{cycles} cycles, every sum exact", len(rows) == cycles and all(x["exact"] for x in rows))
    r.check("0 MiB on every GPU while suspended", all(not any(x["left_mib"]) for x in rows), [x["left_mib"] for x in rows])
    if len(rows) > 4:
        r.note("slope_running_mib", slope([float(x["running_mib"][0]) for x in rows[2:]]))
finally:
    for x in ranks:
        x.p.kill()
        x.p.wait()
r.finish()
