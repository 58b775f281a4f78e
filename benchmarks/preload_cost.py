"""What the preload library costs a program that is awake: its start and its mmap calls, with and without it in turn.

Needs a C compiler, no GPU. Writes results/preload_cost.json. usage: preload_cost.py [ROUNDS]
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gpuckpt.image import preload

ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 15
STARTS = 60
HERE = Path(__file__).parent
MIB = 1 << 20
ENVIRON = {"without": {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}, "with": preload.environment()}
# name -> (pairs, bytes, flags): a small mapping, a large one that is not populated, one that the library looks at more closely
CASES = {"small": (200_000, 65536, 0x22), "large": (200_000, 64 * MIB, 0x22), "large_populated": (20, 64 * MIB, 0x8022)}


def start_ms(environ: dict[str, str]) -> float:
    """Milliseconds that a program without Python takes from start to end."""
    begun = time.perf_counter()
    for _ in range(STARTS):
        os.waitpid(os.posix_spawn("/bin/true", ["true"], environ), 0)
    return (time.perf_counter() - begun) / STARTS * 1e3


if why := preload.problem():
    raise SystemExit(f"no preload library: {why}")
seen: dict[str, dict[str, list[float]]] = {name: {"without": [], "with": []} for name in (*CASES, "start")}
with tempfile.TemporaryDirectory() as folder:
    program = f"{folder}/preload_cost"
    subprocess.run(["gcc", "-O2", "-Wall", "-o", program, HERE / "preload_cost.c"], check=True)
    for _ in range(ROUNDS):
        for side, environ in ENVIRON.items():
            for name, (pairs, nbytes, flags) in CASES.items():
                words = [program, str(pairs), str(nbytes), hex(flags)]
                seen[name][side].append(float(subprocess.check_output(words, env=environ)) / 1e3)
            seen["start"][side].append(start_ms(environ))
median = {name: {side: statistics.median(values) for side, values in sides.items()} for name, sides in seen.items()}
more = {name: sides["with"] - sides["without"] for name, sides in median.items()}
result = {
    "name": "preload_cost",
    "date": time.strftime("%Y-%m-%d"),
    "kernel": platform.release(),
    "machine": platform.machine(),
    "cores": os.cpu_count(),
    "rounds": ROUNDS,
    "mmap_and_munmap_us": {name: {side: round(v, 4) for side, v in median[name].items()} for name in CASES},
    "more_us": {name: round(more[name], 4) for name in CASES},
    "start_ms": {side: round(v, 4) for side, v in median["start"].items()},
    "more_start_ms": round(more["start"], 4),
    "note": "medians of the rounds, with and without in turn; nothing is announced; start is that of /bin/true",
}
(HERE / "results/preload_cost.json").write_text(json.dumps(result, indent=1) + "\n")
print(json.dumps(result, indent=1))
sys.exit(0 if more["small"] <= 1 and more["large"] <= 1 and more["start"] <= 5 else 1)
