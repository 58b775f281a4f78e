"""What of a program's GPU memory its own allocator can take off the GPU, ahead of the driver: by default that of ``gpuckpt.pool``.

A program that put some of its memory to sleep itself gets it back asleep: what is taken here is what was awake, and only that comes back.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol


class Memory(Protocol):
    """``describe`` and ``announce`` run on the agent's thread, ``tags`` on any, the others on the program's own, while it stands at its
    safe point.

    A failure is an exception whose text is for people.
    """

    def describe(self) -> dict[str, Any] | None:
        """Of a program that runs: the fields of :class:`gpuckpt.model.Movable`; None where nothing can be moved now."""
        ...

    def tags(self) -> list[dict[str, Any]]:
        """All that it has, at any time: ``{"tag", "device", "bytes", "where"}`` each; "gpu", or elsewhere."""
        ...

    def announce(self, offload: bool) -> None:
        """The program is about to be asked to stand still, and whether an offload will follow."""
        ...

    def offload(self) -> dict[str, int]:
        """Take the memory off the GPU: ``kept_bytes`` are in host memory then, ``dropped_bytes`` are gone.

        After a failure any part of it may have left; ``onload`` brings that back.
        """
        ...

    def onload(self) -> None:
        """Bring back what ``offload`` took. After a failure it can be called again, and nothing is lost."""
        ...


def tags_in_pool() -> list[dict[str, Any]]:
    """What ``gpuckpt.pool`` has, as :meth:`Memory.tags` tells it; nothing where the program has not imported it."""
    pool = sys.modules.get("gpuckpt.pool")
    return [{"tag": s.tag, "device": s.device, "bytes": s.bytes, "where": s.where} for s in (pool.stats() if pool else ())]


class PoolMemory:
    """The tags of ``gpuckpt.pool``, all of them kept: nothing is known of a program that could do without one."""

    def __init__(self) -> None:
        self._taken: tuple[str, ...] = ()

    def describe(self) -> dict[str, Any] | None:
        pool = sys.modules.get("gpuckpt.pool")  # found, never imported by us first
        if pool is None or not pool.active():
            return None
        awake = [s for s in pool.stats() if s.where == "gpu"]
        moving = sum(s.bytes for s in awake)
        host_bytes = max(0, moving - sum(s.host_bytes for s in awake))  # copies of an earlier sleep are there
        return {"kept_bytes": moving, "host_bytes": host_bytes, "tags": self.tags()} if moving else None

    def tags(self) -> list[dict[str, Any]]:
        return tags_in_pool()

    def announce(self, offload: bool) -> None: ...

    def offload(self) -> dict[str, int]:
        pool = sys.modules["gpuckpt.pool"]
        asleep = pool.asleep()
        self._taken = tuple(sorted({s.tag for s in pool.stats()} - asleep))
        moved = pool.sleep(offload=self._taken, discard=())
        return {"kept_bytes": moved.bytes_copied + moved.bytes_unchanged, "dropped_bytes": moved.bytes_discarded}

    def onload(self) -> None:
        if self._taken:
            sys.modules["gpuckpt.pool"].wake(self._taken)
        self._taken = ()
