"""What goes wrong, on the real driver: each case ends as it was found, suspended, or named. usage: bad_days.py [NAME…]

With names (``busy``, ``SIGTERM:suspend/checkpoint`` …) only those, into ``bad_days_NAME.json`` of the first.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import psutil
from lab import Results, Target, callers, free_mib, gpuckpt, state, used_mib, wait_for

only = sys.argv[1:]
r = Results("_".join(["bad_days", *(n.partition(":")[0].lower() for n in only[:1])]))
empty = used_mib()


def code_of(document: dict) -> str:
    return (document.get("error") or {}).get("code", "")


def case_busy() -> None:
    t = Target(1, "work")
    t.ask("busy 600")  # about 13 s of queued kernels
    code, doc, wall = gpuckpt("suspend", t.pid, "--timeout", "1s")
    r.check("busy beyond --timeout: exit 124, running", code == 124 and state(t.pid) == "RUNNING", [code, code_of(doc), wall])
    code, doc, wall = gpuckpt("suspend", t.pid, "--timeout", "60s")
    r.check("busy, longer --timeout: waits for the queue, then suspends", code == 0, [code, code_of(doc), wall])
    code, doc, _ = gpuckpt("resume", t.pid)
    r.check("and back, same answers", code == 0 and t.same(), code_of(doc))
    t.end()


def case_stopped() -> None:
    t = Target(1, "work")
    os.kill(t.pid, signal.SIGSTOP)
    code, doc, wall = gpuckpt("suspend", t.pid)
    r.check("stopped: refused at once, exit 6", code == 6 and code_of(doc) == "stopped" and wall < 2, [code, code_of(doc), wall])
    begun = time.perf_counter()
    code, doc, wall = gpuckpt("status", t.pid)
    r.check("status of a stopped process answers at once", wall < 2 and doc["processes"][0]["state"] == "stopped", [code, doc.get("processes"), wall])
    os.kill(t.pid, signal.SIGCONT)
    # stopped between the inspection and the lock: the lock hangs beyond its timeout
    t.ask("busy 100")
    p = subprocess.Popen(["gpuckpt", "suspend", str(t.pid), "--timeout", "4s", "--json"], stdout=subprocess.PIPE, text=True)
    caller = wait_for(lambda: callers("lock"), 5)
    os.kill(t.pid, signal.SIGSTOP)
    out, _ = p.communicate(timeout=60)
    doc = json.loads(out)
    r.check(
        "stopped in mid-lock: deadline, caller detached, named in-flight, exit 3",
        caller and p.returncode == 3 and code_of(doc) == "in-flight",
        [p.returncode, doc.get("error"), round(time.perf_counter() - begun, 1)],
    )
    os.kill(t.pid, signal.SIGCONT)
    r.check("continued: it unlocks itself", wait_for(lambda: state(t.pid) == "RUNNING" and not callers("lock"), 20), state(t.pid))
    code, doc, _ = gpuckpt("recover")
    r.check("recover clears the journal, answers the same", code == 0 and t.same(), [code, doc.get("recovered")])
    t.end()


def case_managed() -> None:
    t = Target(1, "managed")
    code, doc, wall = gpuckpt("suspend", t.pid)
    r.check("managed memory: exit 6, named, running", code == 6 and code_of(doc) == "managed-memory" and state(t.pid) == "RUNNING", [code, doc.get("error"), wall])
    r.check("managed memory: computes on", t.same())
    t.end()


def case_room() -> None:
    t = Target(8)
    code, doc, _ = gpuckpt("suspend", t.pid)
    held = doc["processes"][0]["gpus"][0]["bytes_before"] >> 20
    filler = Target((free_mib() - held + 600) / 1024)  # leaves less than it needs
    code, doc, wall = gpuckpt("resume", t.pid)
    r.check("no room: exit 6, no restore, holder named", code == 6 and code_of(doc) == "gpu-memory" and str(filler.pid) in doc["error"]["message"], [code, doc.get("error"), wall])
    r.check("no room: still suspended, intact", state(t.pid) == "CHECKPOINTED", state(t.pid))
    p = subprocess.Popen(["gpuckpt", "resume", str(t.pid), "--wait", "60s", "--json"], stdout=subprocess.PIPE, text=True)
    time.sleep(2)
    filler.end()
    out, _ = p.communicate(timeout=90)
    r.check("room came back within --wait: resumed, same answers", p.returncode == 0 and t.same(), [p.returncode, json.loads(out).get("error")])
    # how tight may it be? everything but what the process held, plus our margin
    gpuckpt("suspend", t.pid)
    filler = Target((free_mib() - held - 256 - 700) / 1024)
    free = free_mib()
    code, doc, _ = gpuckpt("resume", t.pid)
    r.check("tight room: restored with little to spare, or refused", code in (0, 6), {"exit": code, "free_mib": free, "held_mib": held, "free_after_mib": free_mib()})
    filler.end()
    if code == 6:
        gpuckpt("resume", t.pid)
    r.check("tight room: same answers", t.same())
    t.end()


def case_exported() -> None:
    t = Target(1, "exported")
    before = used_mib()
    code, doc, _ = gpuckpt("suspend", t.pid)
    retained = sum(p["retained_bytes"] for p in doc["processes"]) >> 20
    r.check("exported handle: retained bytes reported, with a warning", code == 0 and retained >= 1000 and bool(doc["warnings"]), {"retained_mib": retained, "left": used_mib(), "before": before, "warnings": doc["warnings"]})
    code, doc, _ = gpuckpt("resume", t.pid)
    r.check("exported handle: resumed, same answers", code == 0 and t.same(), [code, code_of(doc), used_mib()])
    t.end()


def kill_in(command: str, step: str, victim: str, sig: int = signal.SIGKILL) -> None:
    """Kill *victim* ("command" or "caller") while *step* is under way; then recover, and the process must be whole."""
    t = Target(3, "work")
    if command == "resume":
        gpuckpt("suspend", t.pid)
    if step == "lock":
        t.ask("busy 150")  # about 3 s of queued kernels, for which the lock waits
    p = subprocess.Popen(["gpuckpt", command, str(t.pid), "--json"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    seen = wait_for(lambda: callers(step), 10) if step != "start" else True
    if step == "start":
        time.sleep(0.05)
    for c in callers() if victim == "caller" else [p]:
        try:
            c.send_signal(sig)
        except psutil.NoSuchProcess:
            continue
    out = p.communicate(timeout=60)[0]
    code, doc = p.returncode, (json.loads(out) if out.strip() else {})
    rec_code, rec = None, {}
    if sig == signal.SIGKILL:
        wait_for(lambda: not callers(), 30)
        rec_code, rec, _ = gpuckpt("recover")
    at = state(t.pid)
    if at == "CHECKPOINTED":
        gpuckpt("resume", t.pid)
    whole = state(t.pid) == "RUNNING" and t.same()
    name = signal.Signals(sig).name
    extra = code in (128 + sig, 0, 1) if sig != signal.SIGKILL else True
    r.check(f"{name} of the {victim} in {command}/{step}", seen and whole and extra and rec_code in (0, None), {"exit": code, "error": code_of(doc), "recover": [rec_code, rec.get("recovered")], "state": at})
    t.end()


cases = {
    "busy": case_busy,
    "stopped": case_stopped,
    "managed": case_managed,
    "room": case_room,
    "exported": case_exported,
}
for name, case in cases.items():
    if only and name not in only:
        continue
    try:
        case()
    except Exception as e:  # noqa: BLE001 - the next case runs all the same
        r.check(f"case {name} ran", False, repr(e))
for command, step, victim, sig in (
    ("suspend", "start", "command", signal.SIGKILL),
    ("suspend", "lock", "command", signal.SIGKILL),
    ("suspend", "checkpoint", "command", signal.SIGKILL),
    ("suspend", "checkpoint", "caller", signal.SIGKILL),
    ("resume", "restore", "command", signal.SIGKILL),
    ("resume", "restore", "caller", signal.SIGKILL),
    ("suspend", "lock", "caller", signal.SIGKILL),
    ("suspend", "lock", "command", signal.SIGINT),
    ("suspend", "checkpoint", "command", signal.SIGINT),
    ("suspend", "checkpoint", "command", signal.SIGTERM),
):
    if only and f"{signal.Signals(sig).name}:{command}/{step}" not in only:
        continue
    try:
        kill_in(command, step, victim, sig)
    except Exception as e:  # noqa: BLE001
        r.check(f"{signal.Signals(sig).name} of the {victim} in {command}/{step}", False, repr(e))
r.check("the card is empty again", wait_for(lambda: used_mib() <= empty, 10), used_mib())
r.finish()
