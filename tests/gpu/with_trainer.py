"""`gpuckpt suspend SERVER --with TRAINER` on two GPUs: two ranks of torch.distributed share communicators; one leaves its GPU, the other stands still on its own.

usage: with_trainer.py [CYCLES]

Without `--with` the suspend is refused, and the other rank named. In each of CYCLES (5) another process fills the server's GPU meanwhile, and the trainer keeps what
it has on its own; after the resume every sum is exact. Ends after $LIMIT_S seconds (default 120). Needs NCCL 2.30.7 in torch's place.
"""

from __future__ import annotations

import os
import statistics
import sys
import time

from job import Budget, Rank, ask, environment, fill, runs, steps, tail
from lab import Results, gpuckpt, used_mib, wait_for

#: What a process of two visible GPUs holds of each, in MiB: the trainer has so much on the server's.
SEEN_MIB = 4

cycles = int(sys.argv[1]) if len(sys.argv) > 1 else 5
r = Results("with_trainer")
ranks: list[Rank] = []
budget = Budget(r, float(os.environ.get("LIMIT_S", "120")), lambda: [tail(x.log) for x in ranks])
empty = [used_mib(g) for g in (0, 1)]
ranks[:] = [Rank(budget, i, 2, environ) for environ in [environment()] for i in (0, 1)]
server, trainer = ranks
first = [x.read() for x in ranks]
r.check("the job runs", runs(first), first)
r.note_nccl(x.pid for x in ranks)
running = [used_mib(g) - e for g, e in zip((0, 1), empty, strict=True)]
r.note("running_mib", running)

code, refused, _ = gpuckpt("suspend", server.pid, "--no-tree", timeout=30)
seen = [code, refused.get("error")]
r.check("without --with it is refused, and the other rank named", code == 6 and f"pid {trainer.pid}" in str(refused.get("error")), seen)
r.check("and every sum is as it was", ask(ranks) == first)

rows = []
for n in range(cycles):
    if not budget.allows(20):
        budget.step(f"no time for cycle {n}")
        break
    begun = time.monotonic()
    code, down, down_s = gpuckpt("suspend", server.pid, "--no-tree", "--with", trainer.pid, timeout=budget.left(5))
    left = [used_mib(g) - e for g, e in zip((0, 1), empty, strict=True)]
    row = {"suspend": code, "suspend_s": down_s, "down": steps(down), "left_mib": left, "error": down.get("error")}
    row["states"] = {p["pid"]: p["state"] for p in gpuckpt("status", server.pid, trainer.pid, timeout=20)[1].get("processes", [])}
    row["filled"] = fill((0,), budget.started)[0]
    code, up, up_s = gpuckpt("resume", server.pid, timeout=budget.left(5))
    row |= {"resume": code, "resume_s": up_s, "up": steps(up), "resume_error": up.get("error")}
    answers = ask(ranks)
    row |= {"same": answers == first, "seconds": round(time.monotonic() - begun, 1), **({} if answers == first else {"answers": answers})}
    rows.append(row)
    r.note("cycles", rows)
    budget.step(str({k: v for k, v in row.items() if k not in ("down", "up")}))
    if row["suspend"] or row["resume"]:
        break
r.check("every suspend and resume, and every sum exact after it", len(rows) == cycles and all(x["same"] and not x["suspend"] + x["resume"] for x in rows), len(rows))
r.check("the server's GPU is empty meanwhile, but for what the trainer has of every GPU that it sees", all(x["left_mib"][0] <= SEEN_MIB for x in rows))
r.check("the trainer keeps what it has on its own, less its communicators", all(0 < x["left_mib"][1] <= running[1] for x in rows), [x["left_mib"] for x in rows])
r.check("and is held meanwhile", all(x["states"].get(trainer.pid) == "held" for x in rows), [x["states"] for x in rows][:1])
r.check("another process filled the server's GPU", all(isinstance(x["filled"], list) and x["filled"][0] > 0.9 * x["filled"][1] for x in rows), [x["filled"] for x in rows])
r.note("median_s", {k: statistics.median(x[k] for x in rows) for k in ("suspend_s", "resume_s")} if rows else None)
budget.end()
wait_for(lambda: [used_mib(g) for g in (0, 1)] == empty, 10)
r.finish()
