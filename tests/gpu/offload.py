"""A torch process with weights, a cache and CUDA graphs in `gpuckpt.pool`, and an agent: `gpuckpt suspend PID` by pool and driver, by the
driver alone, and by the pool alone, in turn; unchanged and changed data. usage: offload.py [GIB] [N]

Ends after LIMIT_S (200) seconds in any case: a cycle that would not fit any more is left out. With GPUCKPT_SIMULATE on a simulated GPU.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any


def target(gib: float) -> None:
    """The process: answers lines on its input, and comes to its safe point while it waits for one."""
    import os
    import select

    import torch

    import gpuckpt.agent
    import gpuckpt.pool as pool

    torch.cuda.set_device(0)
    generator = torch.Generator(device="cuda")
    generator.manual_seed(7)

    def chunks(nbytes: float) -> list[Any]:
        left, made = int(nbytes) // 4, []
        while left > 0:
            made.append(torch.randint(0, 2**31 - 1, (min(left, 1 << 28),), device="cuda", dtype=torch.int32, generator=generator))
            left -= made[-1].numel()
        return made

    with pool.tag("weights"):
        weights = chunks(gib * 0.8 * (1 << 30))
        ws = [torch.randn(1024, 1024, device="cuda", generator=generator) / 32 for _ in range(16)]
        x = torch.randn(64, 1024, device="cuda", generator=generator)
    with pool.tag("kv_cache"):
        cache = chunks(gib * 0.2 * (1 << 30))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.relu(x @ ws[0])
    torch.cuda.synchronize()
    graphs, outputs = [], []
    for i in range(32):
        graph = torch.cuda.CUDAGraph()
        with pool.cuda_graph(graph):
            y = x
            for k in range(50):
                y = torch.relu(y @ ws[(i + k) % 16])
        graphs.append(graph)
        outputs.append(y)

    def check() -> dict[str, object]:
        total = replay = 0
        for t in (*weights, *cache):
            total = (total * 1000003 + int(t.sum(dtype=torch.int64).item())) % (1 << 61)
        for graph, y in zip(graphs, outputs, strict=True):
            graph.replay()
            torch.cuda.synchronize()
            replay = (replay * 31 + int(y.view(torch.int32).to(torch.int64).sum().item())) % (1 << 61)
        return {"pid": os.getpid(), "sum": total, "replay": replay, "active": pool.active()}

    gpuckpt.agent.install()
    print(json.dumps(check()), flush=True)
    while True:
        while not select.select([sys.stdin], [], [], 0.005)[0]:
            gpuckpt.agent.checkpoint_here()
        match sys.stdin.readline().split():
            case ["check"]:
                print(json.dumps(check()), flush=True)
            case ["step"]:
                for t in (*weights, *cache):
                    t.add_(1)
                print(json.dumps(check()), flush=True)
            case _:
                return


def main() -> None:
    from lab import SIMULATED, Results, Target, gpuckpt, left_s, limit, used_mib

    gib, n = float(sys.argv[1]) if len(sys.argv) > 1 else 20.0, int(sys.argv[2]) if len(sys.argv) > 2 else 3
    r = Results("offload")
    limit(r, 200)
    empty = used_mib()
    program = [sys.executable, str(Path(__file__).resolve()), "--target", str(gib)]
    if SIMULATED:
        program = [sys.executable, "-m", "gpuckpt.driver.simtarget", "--gib", "1", "--pool", f"weights={gib * 0.8}", "--pool", f"kv_cache={gib * 0.2}"]
    t = Target(gib, program=program)
    r.note("gib", gib)
    r.check("its memory lies in the pool", SIMULATED or bool(t.first.get("active")), t.first)
    running = used_mib()
    takes = {"auto": 15.0, "driver": 8.0 + gib, "pool": 15.0}  # seconds of a cycle: a guess until there is one
    rows: list[dict[str, Any]] = []
    for changed, method in [(False, "auto"), (False, "driver")] + [(c, m) for _ in range(n) for c, m in ((False, "auto"), (True, "auto"), (False, "driver"), (False, "pool"))]:
        if left_s() < 1.3 * takes[method] + 5:
            r.note("left_out", [*r.document.get("left_out", []), [changed, method, round(left_s())]])
            continue
        if changed:
            t.first = t.ask("step")
        begun = time.monotonic()
        row: dict[str, Any] = {"method": method, "changed": changed, "running_mib": used_mib()}
        code, down, row["suspend_wall_s"] = gpuckpt("suspend", t.pid, "--method", method)
        row |= {"suspend": code, "suspend_s": down.get("seconds"), "down": {s["name"]: s["seconds"] for s in down.get("steps", [])}, "left_mib": used_mib() - empty, "error": down.get("error")}
        row |= {"moved": [p.get("moved") for p in down.get("processes", [])], "states": [p.get("state") for p in down.get("processes", [])]}
        if code == 0:
            code, up, row["resume_wall_s"] = gpuckpt("resume", t.pid)
            row |= {"resume": code, "resume_s": up.get("seconds"), "up": {s["name"]: s["seconds"] for s in up.get("steps", [])}, "error": up.get("error")}
        row["same"] = code == 0 and t.same()
        rows.append(row)
        takes[method] = time.monotonic() - begun
        r.note("cycles", rows)
        print("ok  " if row["same"] else "FAIL", json.dumps(row, default=str)[:700], flush=True)
        if code != 0:
            break
    r.check("same sums and replays after every resume", bool(rows) and all(x["same"] for x in rows))
    r.check("0 MiB above the empty card, but for the pool alone", all(x["left_mib"] <= 0 for x in rows if x["method"] != "pool"), [[x["method"], x["left_mib"]] for x in rows])
    r.check("the pool alone leaves less than a tenth", all(0 < x["left_mib"] < (running - empty) / 10 for x in rows if x["method"] == "pool"), [x["left_mib"] for x in rows if x["method"] == "pool"])
    first = {m: next((x for x in rows if x["method"] == m), None) for m in ("auto", "driver")}
    if all(first.values()):
        found: dict[str, Any] = {"suspend_first_s": {m: x["suspend_s"] for m, x in first.items() if x}}
        for name, method, changed in (("later", "auto", False), ("later_changed", "auto", True), ("driver", "driver", False), ("pool", "pool", False)):
            mine = [x for x in rows[2:] if (x["method"], x["changed"]) == (method, changed) and x.get("resume") == 0] or [x for x in rows[:2] if x["method"] == method]
            if mine:
                found[name] = {"n": len(mine), "suspend_s": median(x["suspend_s"] for x in mine), "resume_s": median(x["resume_s"] for x in mine)}
        r.note("medians", found)
        print(json.dumps(found), flush=True)
    t.end()
    r.finish()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--target"]:
        target(float(sys.argv[2]))
    else:
        main()
