"""Processes that share a communicator with a group and are not part of it: who they are, and who of them can be taken along."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence

from gpuckpt import errors, plan
from gpuckpt.agent.client import Agents
from gpuckpt.agent.protocol import LOOK_S
from gpuckpt.inspect import ranks
from gpuckpt.inspect.processes import Proc
from gpuckpt.model import GpuProcess, Outsider, Rank, State


def refuse_named_twice(targets: Collection[int], along: Collection[int]) -> None:
    if both := sorted(set(targets) & set(along)):
        raise errors.Usage(f"pid {both[0]} is named twice: as what is suspended, and after --with", pid=both[0])


def refuse(processes: Mapping[int, GpuProcess], wanted: Collection[int], silent: Collection[int]) -> None:
    """Raise for one that cannot be taken along. *processes*: those that can be; *wanted*: those that were named. Nothing was touched."""
    for pid in wanted:
        if pid not in processes:
            raise errors.NoCudaState(
                f"pid {pid}, which is to be taken along, holds no GPU memory; nothing was touched",
                hint="leave out --with; gpuckpt ps lists the processes on the GPUs",
                pid=pid,
            )
    for p in processes.values():
        if p.stopped or p.pid in silent:
            continue  # has a hazard of its own
        if p.state not in (State.RUNNING, *plan.AGENT_STAGES):
            raise errors.Refused(
                f"pid {p.pid} ({p.name}) is to be taken along, and is {p.state} itself; nothing was touched",
                hint=f"gpuckpt resume {p.pid}, or name it without --with",
                pid=p.pid,
            )
        if not p.agent:
            raise errors.Refused(
                f"pid {p.pid} ({p.name}) is to be taken along, and has no agent that could hold it; nothing was touched",
                hint="start it with an agent (docs/multi-gpu.md)",
                pid=p.pid,
            )


def outsiders(
    known: Sequence[Rank], agents: Agents, loaded: Callable[[], Sequence[Proc]], near: Collection[int], describe: Callable[[int], str]
) -> tuple[Outsider, ...]:
    """Who has a rank in a communicator that *known* ranks have a part of. Looked for where ranks are missing, among the processes that have
    CUDA *loaded*. *near*: relatives of the known. Names of communicators are unique in a job and not on a machine, so those that are not
    near may be of another job."""
    if not ranks.hazards({"": known}):
        return ()
    wanted, inside = {(r.communicator, r.size) for r in known}, {r.pid for r in known}
    hellos = agents.looks(agents.hellos(p.id for p in loaded() if p.pid not in inside and not p.stopped), LOOK_S)
    found = []
    for process, hello in hellos.items():
        for c in hello.communicators if hello else ():
            if (c["name"], c["size"]) in wanted:
                rank = Rank(process.pid, c["name"], c["rank"], c["size"], c.get("nccl", ""))
                found.append(Outsider(rank, f"{describe(process.pid)} on {os.uname().nodename}", process.pid in near))
    return tuple(found)
