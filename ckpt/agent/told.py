"""What agents said in their hellos, in terms of the group that is looked at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gpuckpt.agent.client import Hello
from gpuckpt.model import GpuProcess, Rank


def ranks(hellos: Mapping[int, Hello]) -> tuple[Rank, ...]:
    """In communicators of more than one rank: the others concern nobody else."""
    said = [(pid, c) for pid in sorted(hellos) for c in hellos[pid].communicators if c["size"] > 1]
    return tuple(Rank(pid, c["name"], c["rank"], c["size"], c.get("nccl", "")) for pid, c in said)


def of(process: GpuProcess, hello: Hello | None) -> GpuProcess:
    """*process*, with what its agent said."""
    if hello is None:
        return process
    found = process._replace(agent=True, vouched=not hello.hazards, comms_bytes=comms_bytes(hello))
    return found._replace(movable=hello.movable, offloaded=hello.offloaded)


def comms_bytes(hello: Hello) -> int:
    """What NCCL's backups take of host memory, at most, when its communicators are suspended."""
    return sum(int(c.get("host_bytes", 0)) for c in hello.communicators)


def unseen(hellos: Mapping[int, Hello], members: Mapping[int, GpuProcess]) -> Iterator[str]:
    """Words for each of *members* whose program did not come to look at its communicators."""
    for pid in sorted(members):
        if pid in hellos and hellos[pid].unseen:
            known = "not known" if hellos[pid].blind else "told of as they were seen before"
            then = f"its communicators are {known}, and are looked at when it stands there"
            yield f"pid {pid} ({members[pid].name}): {hellos[pid].unseen}: {then}"


def own_ranks(hello: Hello | None) -> list[int] | None:
    """The ranks that a process has in the communicators that its agent knows; None without an agent."""
    return [c["rank"] for c in hello.communicators] if hello else None
