"""N suspends and resumes of one torch process through the CLI. usage: cycles.py [GIB] [N] [preload]

With ``preload`` the process has the preload library, as ``gpuckpt exec`` starts it.
"""

from __future__ import annotations

import sys

from lab import Results, Target, gpuckpt, used_mib
from lab_fits import slope

from gpuckpt.image import preload

gib, n = float(sys.argv[1]) if len(sys.argv) > 1 else 16, int(sys.argv[2]) if len(sys.argv) > 2 else 20
with_library = sys.argv[3:] == ["preload"]
r = Results("cycles_preload" if with_library else "cycles")
empty = used_mib()
target = Target(gib, "full", env=dict(preload.environment()) if with_library else {})
rows = []
try:
    same = True
    for i in range(n):
        row = {"gpu_mib": used_mib(), "rss_mib": target.rss_mib()}
        code, down, wall = gpuckpt("suspend", target.pid)
        row |= {"suspend_wall_s": wall, "suspend_s": down.get("seconds"), "suspended_gpu_mib": used_mib(), "suspended_rss_mib": target.rss_mib()}
        row["suspend_steps"] = {s["name"]: s["seconds"] for s in down.get("steps", [])}
        row["image_bytes"] = sum(p["host_bytes"] for p in down.get("processes", []))
        row["gpu_bytes"] = sum(g["bytes_before"] or 0 for p in down.get("processes", []) for g in p["gpus"])
        up_code, up, wall = gpuckpt("resume", target.pid)
        row |= {"resume_wall_s": wall, "resume_s": up.get("seconds"), "resume_steps": {s["name"]: s["seconds"] for s in up.get("steps", [])}}
        row["same"] = target.same()
        rows.append(row)
        print(i, code, up_code, {k: v for k, v in row.items() if not k.endswith("steps")}, down.get("error"), up.get("error"), flush=True)
        same = same and row["same"] and code == up_code == 0
        r.note("cycles", rows)
        if not same:
            break
    r.note("gib", gib)
    r.check(f"{n} cycles, answers bit-identical", same and len(rows) == n)
    r.check("0 MiB above the empty card while suspended", all(x["suspended_gpu_mib"] <= empty for x in rows), [x["suspended_gpu_mib"] for x in rows])
    fits = {k: slope([float(x[k]) for x in rows[2:]]) for k in ("gpu_mib", "rss_mib", "suspended_rss_mib", "suspend_s", "resume_s")}
    r.note("slopes_after_two_cycles", fits)
    r.check("GPU memory without slope", abs(fits["gpu_mib"]["per_step"]) <= max(1.0, fits["gpu_mib"]["plus_minus"]), fits["gpu_mib"])
    r.check("host RSS without slope", fits["rss_mib"]["per_step"] <= max(2.0, fits["rss_mib"]["plus_minus"]), fits["rss_mib"])
    r.check("audit and journal empty at the end", gpuckpt("recover")[1].get("already") is True)
finally:
    target.end()
r.finish()
