"""Resume on the other card, both ways, with answers compared. Needs two GPUs of one kind."""

from __future__ import annotations

import pynvml
from lab import Results, Target, gpuckpt, used_mib

r = Results("other_card")
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
r.finish()
