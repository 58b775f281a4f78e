"""Resume on the other card, both ways; two processes that exchange their cards; one process on both cards. Answers compared. Needs two GPUs of one kind."""

from __future__ import annotations

from lab import SIMULATED, Results, Target, gpuckpt, used_mib

from gpuckpt.image import preload

r = Results("other_card")
if SIMULATED:
    import lab_simulated

    uuids = [g.uuid for g in lab_simulated.world.gpus()]
else:
    import pynvml

    uuids = [pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in (0, 1)]
target = Target(4, "full")
asleep = used_mib(1)  # what a CUDA process takes of a card that it does not use
try:
    here = 0
    for i in range(4):
        there = 1 - here
        code, down, _ = gpuckpt("suspend", target.pid)
        r.check(f"{i}: suspended, both cards empty", code == 0 and used_mib(0) == used_mib(1) == 0, [used_mib(0), used_mib(1), down.get("error")])
        wish = uuids[there] if i % 2 else f"{uuids[here]}={uuids[there]}"
        code, up, _ = gpuckpt("resume", target.pid, "--gpu", wish)
        seen = {"mib": [used_mib(0), used_mib(1)], "error": up.get("error"), "same": code == 0 and target.same()}
        r.check(f"{i}: resumed on GPU {there}, same answers", seen["same"] and used_mib(there) > 4000 and used_mib(here) <= asleep, seen)
        if code:
            break
        here = there
    code, down, _ = gpuckpt("suspend", target.pid)
    code, up, _ = gpuckpt("resume", target.pid)
    r.check("and once more where it is", code == 0 and target.same(), up.get("error"))
finally:
    target.end()
pair = [Target(2, "plain", gpu) for gpu in (0, 1)]
try:
    pids = [t.pid for t in pair]
    code, down, _ = gpuckpt("suspend", *pids, "--accept-loss", "possible-import")
    code, up, _ = gpuckpt("resume", *pids, "--gpu", f"{uuids[0]}={uuids[1]}", "--gpu", f"{uuids[1]}={uuids[0]}")
    seen = {"errors": [down.get("error"), up.get("error")], "on": [[g["uuid"] for g in p["gpus"] if g["bytes_after"]] for p in up.get("processes", [])]}
    exchanged = code == 0 and [uuids[1]] in seen["on"][:1] and [uuids[0]] in seen["on"][1:]
    r.check("two processes that exchange their cards, same answers", exchanged and all(t.same() for t in pair), seen)
finally:
    for t in pair:
        t.end()
if not SIMULATED:
    for env in ({}, dict(preload.environment())):
        target = Target(2, "both", env=env)
        how = "with the preload library" if env else "by the driver alone"
        try:
            for i in range(2):
                code, down, _ = gpuckpt("suspend", target.pid)
                left, images = [used_mib(0), used_mib(1)], down["processes"][0]["image"] if code == 0 else None
                up_code, up, _ = gpuckpt("resume", target.pid)
                seen = {"left_mib": left, "image": images, "errors": [down.get("error"), up.get("error")]}
                r.check(f"one process on both cards, {how}, {i}: both empty, the same answers", code == up_code == 0 and left == [0, 0] and target.same(), seen)
                r.note(f"on_both_cards_{'with' if env else 'without'}", seen)
        finally:
            target.end()
r.finish()
