"""Where the time of a command goes before its first driver call: each part in a fresh interpreter, medians. usage: startup.py [N]"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

from lab import SIMULATED, Results, Target

PARTS = """
import json, sys, time
laps = {}
def lap(name, do):
    begun = time.perf_counter(); done = do(); laps[name] = round(1000 * (time.perf_counter() - begun), 2); return done
pid = int(sys.argv[1])
lap("import click", lambda: __import__("click"))
lap("import gpuckpt.local", lambda: __import__("gpuckpt.local"))
lap("import gpuckpt.operation", lambda: __import__("gpuckpt.operation"))
from gpuckpt.inspect import processes
from gpuckpt.local import LocalWorld
world = lap("LocalWorld()", LocalWorld)
if len(sys.argv) < 3:
    lap("import pynvml", lambda: __import__("pynvml"))
lap("NVML: version", world.devices.version)
lap("NVML: gpus", world.devices.gpus)
lap("NVML: gpus again", world.devices.gpus)
lap("NVML: processes", world.devices.processes)
lap("process table", processes.table)
lap("journal of earlier boots", world.void)
lap("first state query", lambda: world.states([processes.read(pid).id]))
lap("second state query", lambda: world.states([processes.read(pid).id]))
lap("contexts", lambda: world.devices.contexts([pid]))
lap("inspect, all of it known", lambda: world.inspect([pid], tree=True))
print(json.dumps(laps))
"""
n = int(sys.argv[1]) if len(sys.argv) > 1 else 5
r = Results("startup")
target = Target(0.25)
try:
    rows = []
    for _ in range(n):
        words = [sys.executable, "-c", PARTS, str(target.pid), *(["simulated"] if SIMULATED else [])]
        p = subprocess.run(words, capture_output=True, text=True, timeout=60)
        if not r.check("every part ran", p.returncode == 0, p.stderr[-600:] or None):
            break
        rows.append(json.loads(p.stdout))
    r.note("median_ms", {k: statistics.median(x[k] for x in rows) for k in (rows[0] if rows else ())})
    print(json.dumps(r.document.get("median_ms"), indent=1))
finally:
    target.end()
r.finish()
