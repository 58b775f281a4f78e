"""A torch.distributed job of N ranks (default 2): suspended and resumed as one, answers exact. usage: two_ranks.py [CYCLES] [N] [NAME] [--exec]

With ``--exec`` the ranks are started by ``gpuckpt exec``, with the preload library, which makes a cycle shorter. Ends after $LIMIT_S seconds
(default 120): fewer cycles are made where they would not fit, and the results say how many.
$RANK_GROUPS says which process groups it has (default ``world,new,split``: the default one, a new one and a split one); with $RANK_STRAY=1
each rank has a context on its neighbour's GPU as well. NAME is that of the results.
Needs NCCL 2.29.7 or newer in torch's place, and one GPU a rank. An un-suspended job without agents must be refused, not lost.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from job import Budget, Rank, ask, astray, environment, runs, steps, tail
from lab import Results, gpuckpt, state, used_mib
from lab_fits import slope

preload = "--exec" in sys.argv
words = [w for w in sys.argv[1:] if w != "--exec"]
cycles, n = int(words[0]) if words else 20, int(words[1]) if len(words) > 1 else 2
r = Results(words[2] if len(words) > 2 else "two_ranks")
budget = Budget(r, float(os.environ.get("LIMIT_S", "120")), lambda: [tail(x.log) for x in ranks])
ranks: list[Rank] = []
budget.step("the ranks start")
environ = environment()
ranks += [Rank(budget, i, n, environ, preload=preload) for i in range(n)]
try:
    first = [x.read() for x in ranks]
    if not r.check("the job runs", runs(first), first):
        raise SystemExit(1)
    r.note_nccl(x.pid for x in ranks)
    r.note("groups", first[0].get("groups"))
    r.note("preload", [tail(x.log, 4000).partition("\n")[0] for x in ranks] if preload else None)
    budget.step("dry run, and one rank alone")
    code, plan, _ = gpuckpt("suspend", ranks[0].pid, "--dry-run")
    r.check("dry run: every rank, agent steps", code == 0 and not plan["plan"]["refused"], [plan.get("plan"), plan.get("hazards")])
    code, doc, _ = gpuckpt("suspend", "--no-tree", ranks[1].pid)
    r.check("one rank alone is refused, and not lost", code == 6 and state(ranks[1].pid) == "RUNNING", doc.get("error"))
    rows: list[dict[str, Any]] = []
    longest = 0.0
    for i in range(cycles):
        if rows and not budget.allows(1.5 * longest + 2.0):
            budget.step(f"no time for cycle {i}")
            break
        begun = time.monotonic()
        budget.step(f"cycle {i}: suspend")
        code, down, wall = gpuckpt("suspend", ranks[i % n].pid, timeout=budget.left(keep_s=3.0))
        row: dict[str, Any] = {"suspend": code, "suspend_wall_s": wall, "left_mib": [used_mib(g) for g in range(n)], "down_steps": steps(down)}
        if code:
            r.check(f"cycle {i}", False, down.get("error"))
            break
        row["path"] = [(p.get("image") or {}).get("path") for p in down["processes"]]
        budget.step(f"cycle {i}: resume")
        code, up, wall = gpuckpt("resume", ranks[0].pid, timeout=budget.left(keep_s=3.0))
        row |= {"resume": code, "resume_wall_s": wall, "up_steps": steps(up), "astray": astray(down) or astray(up)}
        row["exact"] = code == 0 and ask(ranks) == first
        row["running_mib"] = [used_mib(g) for g in range(n)]
        rows.append(row)
        r.note("cycles", rows)
        longest = max(longest, time.monotonic() - begun)
        print(i, row, up.get("error"), flush=True)
        if not row["exact"]:
            r.check(f"cycle {i}", False, [up.get("error"), [tail(x.log) for x in ranks]])
            break
    r.note("cycles_asked_and_made", [cycles, len(rows)])
    r.check("every cycle made: every sum exact", bool(rows) and all(x["exact"] for x in rows), len(rows))
    r.check("0 MiB on every GPU while suspended", all(not any(x["left_mib"]) for x in rows), [x["left_mib"] for x in rows])
    r.check("each rank is on its own GPU alone", not any(x["astray"] for x in rows), [x["astray"] for x in rows if x["astray"]])
    if len(rows) > 4:
        r.note("slope_running_mib", [slope([float(x["running_mib"][g]) for x in rows[2:]]) for g in range(n)])
    budget.step("done")
finally:
    budget.end()
r.finish()
