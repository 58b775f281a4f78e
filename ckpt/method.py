"""How a suspend takes memory off the GPU: by the allocators of the programs (*pool*), by the driver, or by one after the other.

``auto``    what an agent says its program's own allocator can move is moved first, then the driver takes the rest
``driver``  the driver takes all of it
``pool``    what the allocators can move, and the communicators' memory where that can be; the driver makes no call. What stays is told

A process that is suspended by its pool alone waits disarmed: its agent holds it until a controller comes.
"""

from __future__ import annotations

from typing import Any

from gpuckpt import errors, keeping
from gpuckpt.errors import GpuckptError
from gpuckpt.model import Inventory, ProcessId, State, Status
from gpuckpt.walk import Walk
from gpuckpt.words import size


def suspended(walk: Walk, inventory: Inventory) -> dict[ProcessId, State]:
    """Those of *inventory* that are suspended, and how: checkpointed, or disarmed: by a suspend with ``pool``, or taken along."""
    by_pool = {m.id for r in walk.world.journal.records() if r.status is Status.SUSPENDED and r.down is State.DISARMED for m in r.members}
    by_pool |= {p.id for p in inventory.processes if p.along}
    ways = {p.id: State.DISARMED if p.id in by_pool else State.CHECKPOINTED for p in inventory.processes}
    return {p.id: p.state for p in inventory.processes if p.state is ways[p.id]}


def down(method: str) -> State:
    """What a process is when it has been suspended by *method*."""
    return State.DISARMED if method == "pool" else State.CHECKPOINTED


def refuse(walk: Walk, inventory: Inventory, keep_in: str) -> None:
    """Raise if the method asked for is none for *inventory*: nothing has been touched. Leaves the communicators alone where need be."""
    already = suspended(walk, inventory)
    targets = [p for p in inventory.processes if not p.along]
    for p in targets:
        if p.id in already and already[p.id] is not down(walk.method):
            how = "the driver" if p.state is State.CHECKPOINTED else "its pool"
            raise errors.Refused(
                f"pid {p.pid} ({p.name}) is suspended by {how}, and others of its group are to be suspended by another method; "
                "nothing was touched",
                hint=f"gpuckpt resume {p.pid}, then suspend them together",
                pid=p.pid,
            )
    if walk.method != "pool":
        return
    if walk.barrier.several or keep_in != keeping.RAM:
        raise errors.Usage("--method pool goes together neither with --rendezvous nor with --keep-in; nothing was touched")
    for p in targets:
        if not p.agent or p.state is State.LOCKED:
            why = "has no agent that could hold it" if not p.agent else "is locked: its CUDA calls wait"
            raise _no_pool(f"pid {p.pid} ({p.name}) {why}; nothing was touched", p.pid)
    if not any(p.movable or p.offloaded for p in targets):
        first = targets[0]
        raise _no_pool(
            f"no memory of pid {first.pid} ({first.name}) lies in a pool that is awake: nothing would leave; nothing was touched"
        )
    unvouched = [h.message for h in inventory.hazards if h.kind == "nccl-communicator"]
    if unvouched or not all(p.vouched for p in inventory.processes):
        walk.keep_comms = True
        why = unvouched[0] if unvouched else "an agent knows of something that it cannot suspend"
        walk.warnings.append(f"communicators keep what they hold on the GPU: {why}")


def refuse_on_top(walk: Walk, inventory: Inventory, keep_in: str) -> None:
    """Raise where a pool has suspended the group before, and the driver, or its image, is asked for by name."""
    by_pool = [p.pid for p in inventory.processes if p.state is State.DISARMED and not p.along]
    if by_pool and (walk.method == "driver" or keep_in != keeping.RAM):
        raise errors.Refused(
            f"pid {by_pool[0]} is suspended by its pool, not by the driver; nothing was touched",
            hint=f"gpuckpt resume {by_pool[0]}, then suspend it anew",
            pid=by_pool[0],
        )


def taken(walk: Walk, inventory: Inventory) -> dict[str, Any]:
    """Which way is taken for *inventory*, and why, for a report."""
    moving = [p for p in inventory.processes if p.movable and not p.along]
    if walk.method == "driver":
        return {"asked": "driver", "taken": "driver", "why": "it was asked for"}
    if gone := [p.pid for p in inventory.processes if p.offloaded and not p.movable]:
        why = f"what lies in the pool of pid {', '.join(map(str, gone))} had left before"
        return {"asked": walk.method, "taken": "pool" if walk.method == "pool" else "pool, driver", "why": why}
    if not moving:
        with_agents = any(p.agent for p in inventory.processes)
        why = "nothing lies in a pool that is awake" if with_agents else "no process has an agent that could move memory"
        return {"asked": walk.method, "taken": "pool" if walk.method == "pool" else "driver", "why": why}
    parts = []
    for p in moving:
        assert p.movable is not None
        dropped = f", {size(p.movable.dropped_bytes)} of it dropped" if p.movable.dropped_bytes else ""
        parts.append(f"{size(p.movable.nbytes)} of pid {p.pid} by {p.movable.by}{dropped}")
    rest = "the rest stays, as asked" if walk.method == "pool" else "then the driver takes the rest"
    return {"asked": walk.method, "taken": walk.method if walk.method == "pool" else "pool, driver", "why": f"{'; '.join(parts)}; {rest}"}


def _no_pool(message: str, pid: int | None = None) -> GpuckptError:
    return errors.NoPool(message, hint="start the program with an agent and its memory in gpuckpt.pool; or leave it to the driver", pid=pid)
