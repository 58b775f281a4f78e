"""Two runs whose images do not fit into the host memory that they share: `gpuckpt run --keep-in ram,DIR --host-budget B`. usage: run_spill.py [GIB] [ROUNDS] [DIR]

Two torch processes of GIB (24) on one GPU. Each suspend of one finds the other's image in its way, which moves to a new directory in DIR (that of the result files) before it: where each image lies,
host memory given back, same answers after it came back from there. Writes as it goes; ends at the first failure, and after LIMIT_S in any case.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from job import steps
from lab import HERE, OUT, SIMULATED, Results, Rounds, Target, gpuckpt, limit, used_mib, wait_for

from gpuckpt.image import preload

if SIMULATED:
    import lab_simulated

LIMIT_S = 300.0
#: What a torch process of GIB has on its GPU beyond that, at most.
MORE_GIB = 9
gib, most = float(sys.argv[1]) if len(sys.argv) > 1 else 24, int(sys.argv[2]) if len(sys.argv) > 2 else 3
BUDGET_GIB = round(1.5 * gib + MORE_GIB / 2)  # more than one image, less than two
place = Path(tempfile.mkdtemp(dir=sys.argv[3] if len(sys.argv) > 3 else OUT))
r = Results("run_spill")


def must(what: str, ok: bool, seen: object = None) -> None:
    if not r.check(what, ok, seen):
        r.finish()


class Run:
    def __init__(self, name: str) -> None:
        words = lab_simulated.command((gib,)) if SIMULATED else [str(HERE / "target.py"), str(gib)]
        options = ("--host-budget", f"{BUDGET_GIB}GiB", "--keep-in", f"ram,{place}")
        self.name = f"spill-{name}-{os.getpid()}"
        self.target = Target(gib, program=["gpuckpt", "run", "--name", self.name, *options, "--", sys.executable, *words])

    def lies(self) -> str:
        """Where its image is."""
        (row,) = gpuckpt("status", self.target.pid)[1]["processes"]
        return "disk" if row["disk_bytes"] else "ram" if row["host_bytes"] else "gpu"

    def act(self, command: str) -> dict[str, Any]:
        code, document, wall = gpuckpt(command, self.name)
        must(f"{command} of {self.name[:7]}", code == 0, document.get("error"))
        return {"run": self.name[:7], "command": command, "wall_s": wall, "seconds": document["seconds"], "steps": steps(document)}


def cycle(one: Run, other: Run) -> None:
    """*one* leaves the GPU, *other* after it, whose image takes the place of the first in host memory; *one* comes back from disk and leaves once more, then both come back."""
    turns = (("suspend", one), ("suspend", other), ("resume", one), ("suspend", one), ("resume", other), ("resume", one))
    for command, run in turns:
        row = run.act(command)
        both = {"one": one, "other": other}
        row |= {"lie": {k: x.lies() for k, x in both.items()}, "used_mib": used_mib() - empty, "rss_mib": {k: x.target.rss_mib() for k, x in both.items()}}
        rows.append(row)
        r.note("rows", rows)
        print(row, flush=True)
    first, second, _, again, _, _ = found = rows[-len(turns) :]
    seen = [(x["lie"]["one"], x["lie"]["other"]) for x in found]
    wanted = [("ram", "gpu"), ("disk", "ram"), ("gpu", "ram"), ("ram", "disk"), ("ram", "gpu"), ("gpu", "gpu")]
    must("each suspend has the other's image moved to disk", seen == wanted, seen)
    for which, before, after in (("one", first, second), ("other", second, again)):
        given_mib = before["rss_mib"][which] - after["rss_mib"][which]
        must("and its host memory was given back", SIMULATED or given_mib > 0.9 * gib * 1024, given_mib)
    must("nothing left on the GPU", max(second["used_mib"], again["used_mib"]) <= 0, [second["used_mib"], again["used_mib"]])
    must("same answers", one.target.same() and other.target.same())
    must("no file is left", not any(place.iterdir()), [p.name for p in place.iterdir()])


if why := preload.problem():
    raise SystemExit(f"no preload library: {why}")
limit(r, LIMIT_S)
r.note("gib", gib)
r.note("budget_gib", BUDGET_GIB)
empty, runs, rows, rounds = used_mib(), [], [], Rounds(rest_s=20.0)
try:
    runs = [Run("a"), Run("b")]
    wait_for(lambda: used_mib() - empty > 2 * gib * 1024, 30)
    r.note("held_mib", used_mib() - empty)
    for i in range(most):
        if not rounds.another():
            break
        cycle(*(runs if i % 2 == 0 else runs[::-1]))
        rounds.took(sum(x["wall_s"] for x in rows[-6:]) + 3)
finally:
    for run in runs:
        run.target.end()
    shutil.rmtree(place, ignore_errors=True)
r.finish()
