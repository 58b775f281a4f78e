"""The fault campaign on the real driver, with one process: each fault before each step of a suspend and a resume, and in the middle of each call.

usage: LIMIT_S=900 faults.py [GIB]        KEEP_IN=DIR adds the steps that move the image to disk (the target has the preload library then)

Cases are written to faults_gpu.json as they end; one that was seen is not tried again by a later run with the same file, so that several short
loans of a machine make one campaign. Calls that fail or hang are those that a real driver can be made to give: a checkpoint of managed memory, a
lock held by another tool; a stopped target, or a stopped caller, to which no answer comes. The target is thrown away where the fault takes it; "lost" ends are expected only where ``EXPECTED`` says so.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
from lab import HERE, Results, Rounds, Target, alive, callers, calls, free_mib, gpuckpt, limit, state, used_mib, wait_for

from gpuckpt.image import preload

KEEP_IN = os.environ.get("KEEP_IN", "")
SUSPEND = ("inspect", "lock", "re-inspect", "checkpoint", "verify", *(("store", "drop") if KEEP_IN else ()))
RESUME = ("inspect", "room", *(("load",) if KEEP_IN else ()), "restore", "unlock")
SLOW = ("lock", "checkpoint", "store", "drop", "load", "restore")  # a caller can be caught in the middle of them
#: (command, step, fault) after which the process may be lost, since nobody can help it.
EXPECTED = {("resume", "restore", "out of GPU memory"), ("resume", "restore", "out of host memory")}
KILLED = ("kill -9 of a target",)
HANGS = "a call hangs"
#: What a target takes besides, to sum up a chunk; torch keeps it.
SUM_MIB = 2048


@dataclass(frozen=True)
class Case:
    command: str
    step: str
    fault: str
    moment: str  # "before" or "during"

    @property
    def name(self) -> str:
        return f"{self.command}/{self.step}/{self.fault}/{self.moment}"


def cases() -> list[Case]:
    """Those that tell most come first."""
    found = []
    for command, steps in (("suspend", SUSPEND), ("resume", RESUME)):
        for step in steps:
            called = step in SLOW
            for fault in ("kill -9 of the command", "kill -9 of the command and its callers", "kill -9 of a target", "SIGSTOP of a target"):
                found += [Case(command, step, fault, moment) for moment in (("during", "before") if called else ("before",))]
            if called:
                found += [Case(command, step, fault, "during") for fault in ("kill -9 of a caller", HANGS)]
    found += [Case("suspend", "lock", "a call fails", "before"), Case("suspend", "checkpoint", "a call fails", "before")]
    found += [Case("suspend", step, "out of host memory", "before") for step in ("lock", "checkpoint")]
    found += [Case("suspend", step, "out of GPU memory", "before") for step in ("checkpoint", "verify")]
    found += [Case("resume", step, "out of GPU memory", "before") for step in ("inspect", "room", "restore")]
    found.append(Case("resume", "restore", "out of host memory", "before"))
    return sorted(found, key=lambda c: (c.moment != "during", c.fault in KILLED))


class Command:
    """A command that stands before *step* when this returns, or has ended without coming there."""

    def __init__(self, command: str, step: str, *more: object) -> None:
        told, tell = os.pipe()
        go, self.go = os.pipe()
        words = [sys.executable, str(HERE / "stepwise.py"), command, *map(str, more), "--json"]
        env = {**os.environ, "STEPWISE": f"{step}:{tell}:{go}"}
        self.p = subprocess.Popen(words, env=env, pass_fds=(tell, go), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        os.close(tell)
        os.close(go)
        self.there = bool(select.select([told], [], [], 60)[0]) and os.read(told, 6) == b"there\n"
        os.close(told)

    def let_go(self) -> None:
        os.close(self.go)

    def end(self) -> tuple[int, dict[str, Any]]:
        out, err = self.p.communicate(timeout=180)
        try:
            return self.p.returncode, json.loads(out)
        except ValueError:
            return self.p.returncode, {"error": {"code": "no-json", "message": (out + err)[-300:]}} if self.p.returncode >= 0 else {}


def start(fault: str) -> Target:
    env = dict(preload.environment()) if KEEP_IN else {}
    return Target(gib, "managed" if fault == "a call fails" else "work", env=env)


def play(case: Case, t: Target) -> dict[str, Any]:
    """One case on a running process. Says how it ended."""
    keep = ["--keep-in", KEEP_IN] if KEEP_IN else []
    if case.command == "resume":
        code, doc, _ = gpuckpt("suspend", t.pid, *keep)
        if code:
            return {"end": "not begun", "error": doc.get("error")}
    if case.step == "lock" and case.moment == "during":
        t.ask("busy 100")  # about 2 s of queued kernels, for which the lock waits
    timeout = "3s" if case.fault in ("SIGSTOP of a target", HANGS) else "60s"
    command = Command(case.command, case.step, t.pid, "--timeout", timeout, *(keep if case.command == "suspend" else []))
    undo: list[Callable[[], object]] = []
    try:
        if command.there and case.moment == "before":
            strike(case, command, t, undo)
        command.let_go()
        if command.there and case.moment == "during":
            wait_for(lambda: callers(case.step) or command.p.poll() is not None, 20)
            time.sleep(0.3 if case.step == "lock" else 0.15 * gib)
            if not callers(case.step):
                command.end()
                return {"end": "not injected: it was over too soon"}
            strike(case, command, t, undo)
        code, doc = command.end()
    finally:
        command.p.kill()  # whatever went wrong here: where it stood it would hold its locks
        for mend in undo:
            mend()
    row = {"exit": code, "code": (doc.get("error") or {}).get("code"), "said": {str(p["pid"]): p["state"] for p in doc.get("processes", [])}}
    if not command.there:
        return {**row, "end": "not injected: it did not come there"}
    if not wait_for(lambda: not callers(), 60):
        return {**row, "end": "WRONG: a caller is left", "callers": [p.info["name"] for p in callers()]}
    return {**row, **ended(case, t, code, row)}


def ended(case: Case, t: Target, code: int, row: dict[str, Any]) -> dict[str, Any]:
    """Recover as a person would, and see what the process is worth."""
    rec_code, rec, _ = gpuckpt("recover")
    seen: dict[str, Any] = {"recover": [rec_code, rec.get("recovered")]}
    if not alive(t.pid):
        wanted = case.fault in KILLED
        return {**seen, "end": "ended by the fault" if wanted else "WRONG: the process ended"}
    at = state(t.pid)
    seen["state"] = at
    first, second = ("running", "suspended") if case.command == "suspend" else ("suspended", "running")
    if at == "CHECKPOINTED":
        back, doc, _ = gpuckpt("resume", t.pid)
        if back == 3 and (doc.get("error") or {}).get("code") == "lost":
            told = "lost" in [row["code"], *row["said"].values(), doc["error"]["code"]]
            expected = (case.command, case.step, case.fault) in EXPECTED and told
            return {**seen, "end": "named as lost" if expected else "WRONG: lost", "error": doc["error"]}
        if back:
            return {**seen, "end": "WRONG: it does not come back", "error": doc.get("error")}
    whole = state(t.pid) == "RUNNING" and t.same()
    if not whole:
        return {**seen, "end": f"WRONG: {'other answers' if state(t.pid) == 'RUNNING' else state(t.pid)}"}
    here = "suspended" if at == "CHECKPOINTED" else "running"
    if code in (1, 5, 6, 124, 130, 143) and here != first:
        return {**seen, "end": f"WRONG: {here} after exit {code}"}
    if code == 0 and here != second:
        return {**seen, "end": f"WRONG: {here} after exit 0"}
    return {**seen, "end": "as found" if here == first else here}


def strike(case: Case, command: Command, t: Target, undo: list[Callable[[], object]]) -> None:
    process = psutil.Process(t.pid)
    match case.fault:
        case "kill -9 of the command":
            command.p.kill()
        case "kill -9 of the command and its callers":
            end(callers())
            command.p.kill()
            end(callers())
        case "kill -9 of a caller":
            end(callers(case.step))
        case "a call hangs":
            stopped = callers(case.step)
            for p in stopped:
                p.suspend()
            undo.append(lambda: [p.resume() for p in stopped if p.is_running()])
        case "kill -9 of a target":
            process.kill()
        case "SIGSTOP of a target":
            process.send_signal(signal.SIGSTOP)
            undo.append(lambda: process.send_signal(signal.SIGCONT))
        case "a call fails":  # at the checkpoint it is its managed memory; a lock fails where another tool was quicker
            if case.step == "lock":
                calls(t.pid, ("Lock",))
                undo.append(lambda: calls(t.pid, ("Unlock",)))
        case "out of host memory":
            before = resource.prlimit(t.pid, resource.RLIMIT_AS, (process.memory_info().vms + (64 << 20), resource.RLIM_INFINITY))
            undo.append(lambda: resource.prlimit(t.pid, resource.RLIMIT_AS, before))
        case "out of GPU memory":
            filler = Target(max(0.1, (free_mib() - 900 - SUM_MIB) / 1024))
            undo.append(filler.end)


def end(processes: list[psutil.Process]) -> None:
    for p in processes:
        try:
            p.kill()
        except psutil.NoSuchProcess:
            continue


gib = float(sys.argv[1]) if len(sys.argv) > 1 else 2.0
r, rounds = Results("faults_gpu"), Rounds()
limit(r, 600)
rows = r.earlier("cases")
done = {x["name"] for x in rows}
empty = used_mib()
target: Target | None = None
kind = ""
for case in cases():
    if case.name in done:
        continue
    if not rounds.another():
        break
    wanted = "managed" if case.fault == "a call fails" and case.step == "checkpoint" else "work"
    if target is None or kind != wanted:
        if target is not None:
            target.end()
        target, kind = start("a call fails" if wanted == "managed" else ""), wanted
    begun = time.monotonic()
    try:
        row = play(case, target)
    except Exception as e:  # noqa: BLE001 - the next case has a new target
        row = {"end": f"WRONG: {type(e).__name__}: {e}"}
    row = {"name": case.name, "command": case.command, "step": case.step, "fault": case.fault, "moment": case.moment, **row}
    rows.append({**row, "seconds": round(time.monotonic() - begun, 1)})
    r.note("cases", rows)
    rounds.took(time.monotonic() - begun)
    print(json.dumps(rows[-1], default=str), flush=True)
    if row["end"] not in ("as found", "suspended", "running"):
        target.end()
        gpuckpt("recover")
        target = None
if target is not None:
    target.end()
wrong = [x["name"] for x in rows if x["end"].startswith("WRONG")]
r.note("left_out", [c.name for c in cases() if c.name not in {x["name"] for x in rows}])
r.check("every fault ends as found, suspended, running, ended by itself, or lost where that could not be helped", not wrong, wrong)
r.check("the card is empty again", wait_for(lambda: used_mib() <= empty, 20), used_mib())
r.finish()
