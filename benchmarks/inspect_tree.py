"""How long the inspection of a large process tree takes: one simulated CUDA process among N more. Writes results/inspect_tree.json.

usage: inspect_tree.py [N]
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gpuckpt.driver import mappings
from gpuckpt.driver.simulated_store import SimulatedWorldDir
from gpuckpt.local import LocalWorld
from gpuckpt.preview import Preview

n = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
TREE = """
import os, subprocess, sys
target = subprocess.Popen([sys.executable, "-m", "gpuckpt.driver.simtarget", "--daemon"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
target.stdout.readline()
for _ in range(int(sys.argv[1])):
    if os.fork() == 0:
        import signal
        signal.pause()
print(target.pid, flush=True)
sys.stdin.read()
os.killpg(0, 9)
"""
with tempfile.TemporaryDirectory() as directory:
    SimulatedWorldDir.create(Path(directory) / "world")
    os.environ |= {"GPUCKPT_SIMULATE": f"{directory}/world", "GPUCKPT_STATE_DIR": f"{directory}/state"}
    tree = subprocess.Popen(
        [sys.executable, "-c", TREE, str(n)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert tree.stdout is not None
    assert tree.stdin is not None
    pid = int(tree.stdout.readline())
    seconds = []
    for _ in range(9):
        with LocalWorld() as world:
            report = Preview(world, "suspend").suspend([pid])
            seconds.append(next(s.seconds for s in report.steps if s.name == "inspect"))
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    begun = time.perf_counter()
    for p in pids:
        mappings.has_libcuda(p)
    maps_s = time.perf_counter() - begun
    tree.stdin.close()
    tree.wait()
result = {
    "date": time.strftime("%Y-%m-%d"),
    "processes": n,
    "cores": os.cpu_count(),
    "inspect_median_s": round(statistics.median(seconds), 4),
    "inspect_max_s": round(max(seconds), 4),
    "real_adapter_adds_s": round(maps_s, 4),
    "note": "real_adapter_adds_s: reading the mappings of them all, which simulated GPUs spare; simulated GPU; every process has a Python interpreter's mappings",
}
(Path(__file__).parent / "results" / "inspect_tree.json").write_text(json.dumps(result, indent=1))
print(json.dumps(result))
