"""Several communicators of each rank, suspended and resumed one after the other, in one group call of NCCL, and by a thread each: seconds. usage: nccl_ways.py [ROUNDS] [N] [GROUPS]

A job of N (2) ranks with GROUPS (3) communicators of all ranks for each way. gpuckpt does one after the other (`gpuckpt.nccl.suspend`); whether the others are quicker, and whether the sums are
exact after them, is what this is to tell. A way that hangs is ended after 40 s, and said to. Needs NCCL 2.29.7 or newer in torch's place, and one GPU a rank.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

WAYS = ("one after the other", "one group", "a thread each")
SECONDS = 40.0


def rank_of(way: str, rounds: int, groups: int) -> None:
    """One rank: each round says what it took, and whether the sums after it were exact."""
    import ctypes
    import threading

    import torch
    import torch.distributed as dist

    from gpuckpt.nccl.communicators import listing

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", rank))
    made = [dist.group.WORLD, *(dist.new_group(list(range(size)), backend="nccl") for _ in range(groups - 1))]
    x = torch.arange(1 << 22, device="cuda", dtype=torch.int64) * (rank + 1)
    together = torch.arange(1 << 22, device="cuda", dtype=torch.int64) * (size * (size + 1) // 2)

    def exact() -> bool:
        for g in made:
            y = x.clone()
            dist.all_reduce(y, group=g)
            if not torch.equal(y, together):
                return False
        return True

    first = exact()  # they are made by their first sum
    known = listing().communicators
    dll = known[0].library._dll

    def all_of_them(verb: str) -> None:
        if way == "one after the other":
            for c in known:
                getattr(c.library, verb)(c.pointer)
        elif way == "one group":
            assert dll.ncclGroupStart() == 0
            for c in known:
                arguments = [ctypes.c_void_p(c.pointer), *([ctypes.c_int(1)] if verb == "suspend" else [])]
                assert getattr(dll, f"ncclComm{verb.capitalize()}")(*arguments) == 0
            assert dll.ncclGroupEnd() == 0
        else:
            threads = [threading.Thread(target=getattr(c.library, verb), args=(c.pointer,)) for c in known]
            for t in threads:
                t.start()
            for t in threads:
                t.join()

    def timed(verb: str) -> float:
        torch.cuda.synchronize()
        dist.barrier(group=gloo)
        begun = time.perf_counter()
        all_of_them(verb)
        return round(time.perf_counter() - begun, 4)

    gloo = dist.new_group(list(range(size)), backend="gloo")
    for i in range(rounds):
        row: dict[str, Any] = {"round": i, "communicators": len(known), "bytes": [c.library.stats(c.pointer).suspendable_bytes for c in known], "suspend_s": timed("suspend")}
        row |= {"down": all(c.library.stats(c.pointer).suspended for c in known), "resume_s": timed("resume"), "exact": first and exact()}
        print(json.dumps(row), flush=True)
    os._exit(0)


def main() -> None:
    from job import Budget, environment
    from lab import OUT, Results

    rounds, n, groups = (int(w) for w in [*sys.argv[1:4], *["5", "2", "3"][len(sys.argv[1:4]) :]])
    r = Results("nccl_ways")
    budget = Budget(r, float(os.environ.get("LIMIT_S", "150")))
    for way in WAYS:
        budget.step(way)
        environ = {**os.environ, **environment(), "WORLD_SIZE": str(n)}
        words = [sys.executable, __file__, "--rank", way, str(rounds), str(groups)]
        with (OUT / f"nccl_ways.{WAYS.index(way)}.log").open("wb") as log:
            ranks = [subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log, text=True, env={**environ, "RANK": str(i)}) for i in range(n)]
        budget.started += ranks
        said, hung = [], False
        for p in ranks:
            try:
                said.append([json.loads(line) for line in p.communicate(timeout=SECONDS)[0].splitlines() if line.startswith("{")])
            except subprocess.TimeoutExpired:
                hung = True
                for other in ranks:
                    other.kill()
                said.append([json.loads(line) for line in p.communicate()[0].splitlines() if line.startswith("{")])
        r.note(way, {"hung": hung, "exits": [p.wait(10) for p in ranks], "ranks": said})
        whole = all(len(x) == rounds and all(y["exact"] and y["down"] for y in x) for x in said)
        found = {k: max(statistics.median(y[k] for y in x) for x in said) for k in ("suspend_s", "resume_s")} if whole else {}
        r.check(f"{way}: every round, sums exact", whole, {"hung": hung, **found})
    budget.end()
    r.finish()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_of(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
