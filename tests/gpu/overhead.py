"""The driver's calls alone and our commands, in turn on the same process, each first in its turn: what we add. usage: overhead.py [N]

``gpuckpt`` is the one on the PATH: in a virtual environment of its own, as a tool is installed, or in the program's, whose every package may have a say in how
long Python takes to start. The result file says how long that is, too.
"""

from __future__ import annotations

import compileall
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from lab import SIMULATED, Results, Target, gpuckpt, wall_s

ALONE = """
import json, sys, time
from cuda.bindings import driver as cu
pid, pause = int(sys.argv[1]), float(sys.argv[2]); out = {}
def call(name, *a):
    t = time.perf_counter(); r = getattr(cu, "cuCheckpointProcess" + name)(pid, *a); assert int(r[0]) == 0, r; out[name] = time.perf_counter() - t
a = cu.CUcheckpointLockArgs(); a.timeoutMs = 10000
call("Lock", a); time.sleep(pause); call("Checkpoint", None); time.sleep(10 * pause); call("Restore", None); call("Unlock", None)
print(json.dumps(out))
"""
#: gpuckpt looks at the group once more between lock and checkpoint: here such a pause, and ten times that before the restore.
PAUSE_S = 0.025
n = int(sys.argv[1]) if len(sys.argv) > 1 else 7
r = Results("overhead")
program = Path(shutil.which("gpuckpt") or "")
python = program.read_text().split("\n", 1)[0].removeprefix("#!")
r.note("gpuckpt_environment", "the program's" if Path(python).parent == Path(sys.executable).parent else "its own")
if not SIMULATED and r.document["gpuckpt_environment"] != "its own":
    import click
    import pynvml

    if bare := [m.__name__ for m in (click, pynvml) if not Path(m.__cached__ or "").exists()]:  # each command would compile them anew: 60 ms and more
        for module in (click, pynvml):
            compileall.compile_dir(Path(module.__file__).parent, maxlevels=0, quiet=1)
        r.note("bytecode", f"{', '.join(bare)} had no bytecode there, and were compiled beforehand as pip does")
    elif sys.pycache_prefix:
        r.note("bytecode", "kept in a directory of its own")


def by_driver(pid: int, pause_s: float) -> dict[str, float]:
    p = subprocess.run([sys.executable, "-c", ALONE, str(pid), str(pause_s)], capture_output=True, text=True, timeout=60, check=True)
    return json.loads(p.stdout)


def by_gpuckpt(pid: int) -> dict[str, float]:
    code, down, down_wall = gpuckpt("suspend", pid)
    up_code, up, up_wall = gpuckpt("resume", pid)
    assert code == up_code == 0, (down, up)
    steps = {**{s["name"]: s["seconds"] for s in down["steps"]}, **{f"resume_{s['name']}": s["seconds"] for s in up["steps"]}}
    return {"suspend_wall": down_wall, "resume_wall": up_wall, "suspend": down["seconds"], "resume": up["seconds"], **steps}


target = Target(0.25)
try:
    alone, paused, ours = [], [], []
    arms = [(alone, lambda: by_driver(target.pid, 0.0)), (paused, lambda: by_driver(target.pid, PAUSE_S)), (ours, lambda: by_gpuckpt(target.pid))]
    for i in range(n):
        for found, cycle in arms[i % 3 :] + arms[: i % 3]:
            found.append(cycle())
    median = {k: round(statistics.median(x[k] for x in alone), 4) for k in alone[0]}
    mine = {k: round(statistics.median(x[k] for x in ours), 4) for k in ours[0]}
    added = {
        "suspend_s": round(mine["suspend_wall"] - median["Lock"] - median["Checkpoint"], 4),
        "resume_s": round(mine["resume_wall"] - median["Restore"] - median["Unlock"], 4),
        "suspend_beyond_its_own_calls_s": round(statistics.median(x["suspend_wall"] - x["lock"] - x["checkpoint"] for x in ours), 4),
        "resume_beyond_its_own_calls_s": round(statistics.median(x["resume_wall"] - x["resume_restore"] - x["resume_unlock"] for x in ours), 4),
    }
    r.note("driver_alone_median_s", median)
    r.note("driver_alone_paused_median_s", {k: round(statistics.median(x[k] for x in paused), 4) for k in paused[0]})
    r.note("gpuckpt_median_s", mine)
    r.note("added", added)
    r.note("status_wall_s", [gpuckpt("status", target.pid)[2] for _ in range(15)])
    startup = {}
    for name, command in (("python -c pass", [python, "-c", "pass"]), ("gpuckpt --help", ["gpuckpt", "--help"])):
        startup[name] = round(statistics.median(wall_s(command, stdout=subprocess.DEVNULL) for _ in range(7)), 4)
    r.note("startup_median_s", startup)
    print(json.dumps({"alone": median, "ours": mine, "added": added, "startup": startup, "status": r.document["status_wall_s"]}, indent=1))
    r.check("target computes the same", target.same())
finally:
    target.end()
code, demo, _ = gpuckpt("demo")
shown = {k: demo.get(k) for k in ("error", "simulated", "gpu_bytes", "host_bytes", "same_answer", "suspend_seconds", "resume_seconds")}
r.check("gpuckpt demo on this GPU: it empties it, and computes the same", code == 0 and shown["same_answer"] and shown["simulated"] == SIMULATED, shown)
r.finish()
