"""Bad days of a torch.distributed job on N GPUs: kill -9 of gpuckpt anywhere in a suspend and a resume, a GPU that somebody took, ranks that hang or die.

usage: RANKS=N ranks_bad_days.py [KILLS] [filled] [hangs] [deaths]        with a word, only that part beside the kills; or the step of one death

KILLS (default 6) of each command, spread over its whole time; after each `gpuckpt recover`, and `resume` if it says that the job is suspended: the sums
must be exact. Then somebody takes the GPU of rank 1 while the job is suspended: no rank is restored, and all of them once it is free. Then a rank hangs (SIGSTOP) in a suspend's communicators, in a resume's restore and in its communicators' way back: the command ends by its deadline,
and names it; when the rank goes on and `gpuckpt recover` has been at it the sums must be exact. Then a rank is killed in each step: the command ends by its
deadline, and names it. What becomes of the other rank is noted. Ends after $LIMIT_S seconds (default 300); what would not fit is left out, and said. Needs
NCCL 2.30.7 in torch's place.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

from job import Budget, Rank, ask, environment, kill, runs, steps, tail
from lab import SIMULATED, Results, free_mib, gpuckpt, taker, used_mib, wait_for

from gpuckpt.agent.client import Agents
from gpuckpt.inspect import processes

kills = int(sys.argv[1]) if len(sys.argv) > 1 else 6
parts = sys.argv[2:] or ["filled", "hangs", "deaths"]
size = int(os.environ.get("RANKS", "2"))
r = Results("ranks_bad_days" if size == 2 else f"ranks_bad_days_{size}")
ranks: list[Rank] = []
budget = Budget(r, float(os.environ.get("LIMIT_S", "300")), lambda: [stages(), [tail(x.log) for x in ranks]])
DEADLINE_S = 6.0
#: What a GPU shows beside that of a taker, without a rank on it: 3 MiB were seen; a rank has 3,340.
STRAY_MIB = 8
SETTLED_S = 5.0 if SIMULATED else 20.0


def start() -> list[dict[str, Any]]:
    """A new job; what it answers first."""
    budget.step("the ranks start")
    environ = environment()  # with a port of its own
    ranks[:] = [Rank(budget, i, size, environ) for i in range(size)]
    first = [x.read() for x in ranks]
    if not r.check(f"the job runs ({ranks[0].pid})", runs(first), first):
        finish()
    r.note_nccl(x.pid for x in ranks)
    return first


def finish() -> None:
    budget.end()
    r.finish()


def stages() -> list[str | None]:
    """What the agents say of themselves."""
    agents = Agents()
    try:
        ids = [p.id if (p := processes.read(x.pid)) else None for x in ranks]
        seen = agents.hellos(i for i in ids if i)
        return [str(seen[i].stage) if i in seen else None for i in ids]
    finally:
        agents.close()


def begin(command: str, *options: str) -> subprocess.Popen[str]:
    p = subprocess.Popen(["gpuckpt", command, str(ranks[0].pid), *options, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    budget.started.append(p)
    return p


def settled() -> tuple[bool, list[str]]:
    """Recover until nothing is under way any more; whether the job is suspended then, and what recover said."""
    said: list[str] = []

    def recovered() -> bool:
        code, document, _ = gpuckpt("recover", timeout=budget.left(keep_s=3.0))
        said[:] = document.get("recovered") or [str(document.get("error"))]
        return code == 0

    ok = wait_for(recovered, SETTLED_S)
    suspended = gpuckpt("is-suspended", ranks[0].pid, timeout=30)[0] == 0
    if not ok:
        said.append("recover did not succeed")
    return suspended, said


def whole(first: list[dict[str, Any]]) -> dict[str, float]:
    """One suspend and resume; how long each command took."""
    budget.step("a whole cycle")
    code, down, suspend_s = gpuckpt("suspend", ranks[0].pid, timeout=budget.left(keep_s=3.0))
    up_code, up, resume_s = gpuckpt("resume", ranks[0].pid, timeout=budget.left(keep_s=3.0))
    if not r.check("a cycle without trouble", code == up_code == 0 and ask(ranks) == first, [down.get("error"), up.get("error")]):
        finish()
    return {"suspend": suspend_s, "resume": resume_s, "checkpoint": steps(down)["checkpoint"]}


def killed(command: str, after_s: float, first: list[dict[str, Any]]) -> dict[str, Any]:
    """kill -9 of *command*, and the way back to a job that runs."""
    row: dict[str, Any] = {"command": command, "killed_after_s": round(after_s, 3)}
    if command == "resume":
        row["suspend"] = gpuckpt("suspend", ranks[0].pid, timeout=budget.left(keep_s=3.0))[0]
    p = begin(command)
    time.sleep(after_s)
    row["ended_before"] = p.poll()
    p.kill()
    p.wait(10)
    row["stages"], row["mib"] = stages(), [used_mib(g) for g in range(size)]
    suspended, row["recovered"] = settled()
    row["suspended"] = suspended
    if suspended:
        row["resume"] = gpuckpt("resume", ranks[0].pid, "--timeout", "30s", timeout=budget.left(keep_s=3.0))[0]
    wait_for(lambda: stages() == ["running"] * size, SETTLED_S)
    row["exact"] = ask(ranks) == first
    return row


def filled(first: list[dict[str, Any]]) -> dict[str, Any]:
    """Somebody takes the GPU of rank 1 while the job is suspended, so that what it had does not fit any more; and gives it back."""
    held_mib = used_mib(1)
    row: dict[str, Any] = {"suspend": gpuckpt("suspend", ranks[0].pid, timeout=budget.left(keep_s=3.0))[0]}
    other = taker(free_mib(1) - held_mib // 2 - 700, 1)
    row["taken"] = other.ask()
    row["held_mib"], row["free_mib"] = held_mib, free_mib(1)
    try:
        row["resume_without"], document, _ = gpuckpt("resume", ranks[0].pid, timeout=budget.left(keep_s=3.0))
        row["error"], row["mib"] = document.get("error"), [used_mib(g) for g in range(size)]
        row["suspended"] = gpuckpt("is-suspended", ranks[0].pid, timeout=30)[0] == 0
    finally:
        other.end()
    row["resume"] = gpuckpt("resume", ranks[0].pid, "--wait", "20s", timeout=budget.left(keep_s=3.0))[0]
    row["exact"] = ask(ranks) == first
    return row


def come(stage: str) -> bool:
    """Whether rank 1 has reached *stage*. "restored": its GPU has something again, which its agent cannot say before it runs."""
    return used_mib(1) > 100 if stage == "restored" else stages()[1] == stage


#: Where rank 1 hangs: the command, and the stage of its own at which it is stopped.
HANGS = {"suspend": ("suspend", "quiesced"), "restore": ("resume", "restored"), "comms-resume": ("resume", "comms-suspended")}


def hung(when: str, first: list[dict[str, Any]]) -> dict[str, Any]:
    """Rank 1 stands still *when*, and goes on when the command has ended."""
    command, stage = HANGS[when]
    row: dict[str, Any] = {"when": when}
    if command == "resume":
        row["suspend"] = gpuckpt("suspend", ranks[0].pid, timeout=budget.left(keep_s=3.0))[0]
    p = begin(command, "--timeout", f"{DEADLINE_S:g}s")
    begun = time.perf_counter()
    wait_for(lambda: p.poll() is not None or come(stage), DEADLINE_S)
    os.kill(ranks[1].pid, signal.SIGSTOP)
    row["ended_before"] = p.poll()
    try:
        out, err = p.communicate(timeout=DEADLINE_S + 30)
        row["seconds"], row["code"] = round(time.perf_counter() - begun, 2), p.returncode
        document = json.loads(out) if out.startswith("{") else {"error": out + err}
        row["error"], row["states"] = document.get("error"), {x["pid"]: x["state"] for x in document.get("processes", [])}
    finally:
        os.kill(ranks[1].pid, signal.SIGCONT)
    suspended, row["recovered"] = settled()
    if suspended:
        row["resume"] = gpuckpt("resume", ranks[0].pid, "--timeout", "30s", timeout=budget.left(keep_s=3.0))[0]
    wait_for(lambda: stages() == ["running"] * size, SETTLED_S)
    row["exact"] = ask(ranks) == first
    return row


#: Step in which rank 1 dies -> the command, and the stage that it has reached by then.
DEATHS = {
    "comms": ("suspend", "quiesced"),
    "lock": ("suspend", "disarmed"),
    "checkpoint": ("suspend", "disarmed"),
    "suspended": ("resume", ""),
    "restore": ("resume", "restored"),
    "comms-resume": ("resume", "comms-suspended"),
}


def died(when: str, walls: dict[str, float]) -> dict[str, Any]:
    """Rank 1 is killed in the step *when*; how the command ended, and what became of rank 0."""
    command, stage = DEATHS[when]
    row: dict[str, Any] = {"when": when}
    if command == "resume":
        row["suspend"] = gpuckpt("suspend", ranks[0].pid, timeout=budget.left(keep_s=3.0))[0]
    if when == "suspended":
        kill(ranks[1].p)
        ranks[1].p.wait(10)
    begun = time.perf_counter()
    p = begin(command, "--timeout", f"{DEADLINE_S:g}s")
    if when != "suspended":
        wait_for(lambda: come(stage) or p.poll() is not None, DEADLINE_S)
        if when == "checkpoint":
            time.sleep(0.4 * walls["checkpoint"])
        row["ended_before"] = p.poll()
        kill(ranks[1].p)
    out, err = p.communicate(timeout=budget.left(keep_s=3.0))
    row["seconds"], row["code"] = round(time.perf_counter() - begun, 2), p.returncode
    document = json.loads(out) if out.startswith("{") else {"error": out + err}
    row["error"], row["states"] = document.get("error"), {x["pid"]: x["state"] for x in document.get("processes", [])}
    row["rank_1"] = ranks[1].pid
    row["rank_0_answers"] = ask(ranks[:1], seconds=3.0)
    row["stages"] = stages()
    for x in ranks:
        kill(x.p)
        x.p.wait(10)
    row["freed"] = wait_for(lambda: not any(used_mib(g) for g in range(size)), SETTLED_S)
    row["recovered"] = settled()[1]
    return row


try:
    first = start()
    walls = whole(first)
    rows: list[dict[str, Any]] = []
    for i in range(kills):
        for command in ("suspend", "resume"):
            if not budget.allows(4 * (walls["suspend"] + walls["resume"]) + 8):
                budget.step(f"no time for kill {i} of {command}")
                continue
            after_s = (i + 0.5) / kills * walls[command]
            budget.step(f"kill -9 of a {command} after {after_s:.2f} s")
            rows.append(killed(command, after_s, first))
            r.note("kills", rows)
            budget.step(f"then: {rows[-1]['stages']}, {rows[-1]['recovered']}, exact {rows[-1]['exact']}")
            if not rows[-1]["exact"]:
                r.check(f"exact after a kill of {command} after {after_s:.2f} s", False, [rows[-1], [tail(x.log) for x in ranks]])
                finish()
    if kills:
        r.check(f"kill -9 of gpuckpt, {len(rows)} times: every sum exact", bool(rows) and all(x["exact"] for x in rows), [x["stages"] for x in rows])
    if "filled" in parts:
        budget.step("somebody takes the GPU of rank 1 while it is suspended")
        row = filled(first)
        refused = row["resume_without"] == 6 and row["suspended"] and not any(m > STRAY_MIB for g, m in enumerate(row["mib"]) if g != 1)
        r.check("a GPU that is taken: no rank is restored, and all once it is free, every sum exact", refused and row["resume"] == 0 and row["exact"], row)
    hangs: list[dict[str, Any]] = []
    for when in HANGS if "hangs" in parts else ():
        if not budget.allows(walls["suspend"] + walls["resume"] + 2 * DEADLINE_S + (10 if SIMULATED else 40)):
            budget.step(f"no time for a rank that hangs: {when}")
            continue
        budget.step(f"rank 1 hangs: {when}")
        hangs.append(row := hung(when, first))
        r.note("hangs", hangs)
        if row["ended_before"] is not None:
            budget.step(f"the command was quicker: {when}")
            continue
        named = str(ranks[1].pid) in str(row["error"]) or row["states"].get(ranks[1].pid) not in (None, "running", "suspended")
        held = row["code"] != 0 and named and row["seconds"] < DEADLINE_S + 25
        if not r.check(f"a rank hangs ({when}): it is named, in time; when it goes on every sum is exact", held and row["exact"], row):
            break
    deaths: list[dict[str, Any]] = []
    for when in DEATHS if "deaths" in parts else [w for w in DEATHS if w in parts]:
        if not budget.allows(walls["suspend"] + walls["resume"] + 2 * DEADLINE_S + (10 if SIMULATED else 25)):
            budget.step(f"no time for a rank that dies: {when}")
            continue
        budget.end()
        start()
        budget.step(f"rank 1 dies: {when}")
        deaths.append(died(when, walls))
        r.note("deaths", deaths)
        row = deaths[-1]
        if row.get("ended_before") is not None:
            budget.step(f"the command was quicker: {when}")
            continue
        named = str(row["rank_1"]) in str(row["error"]) or row["states"].get(row["rank_1"]) == "gone"
        in_time = row["seconds"] < DEADLINE_S + 25
        r.check(f"a rank dies ({when}): it is named, in time, and the GPUs are free after the job", row["code"] != 0 and named and in_time and row["freed"], row)
    budget.step("done")
finally:
    budget.end()
r.finish()
