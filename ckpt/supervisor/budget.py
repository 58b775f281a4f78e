"""Host memory that all runs of this user together may fill with what was on the GPUs; by default what the machine has free.

Each run asks the others what they hold, and decides for itself: one at a time, by a lock, until it has said what it will take.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpuckpt import errors
from gpuckpt.inspect import host
from gpuckpt.supervisor import places, swept
from gpuckpt.supervisor.model import HOST_MEMORY_HINT
from gpuckpt.words import size

#: How long another run may take to decide, in seconds: it looks at its processes, and asks the others.
DECIDE_S = 60.0
_POLL_S = 0.02

Others = Callable[[], Awaitable[Sequence[Mapping[str, Any]]]]
Move = Callable[[Mapping[str, Any]], Awaitable[bool]]


async def nobody() -> Sequence[Mapping[str, Any]]:
    return ()


async def nowhere(_: Mapping[str, Any]) -> bool:
    return False


class Budget:
    """*limit_bytes* over all runs, None for what is free. *others* gives the facts of the other runs; *move* has one of them move
    what it holds to disk, and says whether it did. *ready*: bytes that this run has already, for its next image."""

    def __init__(
        self,
        limit_bytes: int | None = None,
        others: Others = nobody,
        environ: Mapping[str, str] = os.environ,
        move: Move = nowhere,
        ready: Callable[[], int] = lambda: 0,
    ) -> None:
        self.limit_bytes, self._others, self._move, self._ready = limit_bytes, others, move, ready
        simulated = Path(environ.get("GPUCKPT_SIMULATE") or "/") / "root"
        self._root = simulated if environ.get("GPUCKPT_SIMULATE") and simulated.is_dir() else Path("/")
        self._lock = places.runtime_directory(environ) / "host-memory.lease"

    def available_bytes(self) -> int:
        """MemAvailable; 0 where that cannot be read."""
        return host.meminfo(self._root).get("MemAvailable", 0)

    async def left(self, own_bytes: int = 0) -> tuple[int, str]:
        """Bytes that a run may still take which holds *own_bytes* already, and in words why not more."""
        everyone = [{**n, "host_bytes": n["host_bytes"] or n.get("reserved_bytes", 0)} for n in await self._others()]
        facts = [n for n in everyone if n["host_bytes"]]
        held = sum(n["host_bytes"] for n in facts)
        who = ", ".join(f"{n['name']} {size(n['host_bytes'])}" for n in sorted(facts, key=lambda n: -n["host_bytes"])) or "no other run"
        coming = sum(n["host_bytes"] for n in facts if n["state"] == "suspending")
        free = max(0, self.available_bytes() - coming) + self._ready()
        left, why = free, f"{size(free)} of host memory are available; it holds {who}"
        if self.limit_bytes is not None and (allowed := max(0, self.limit_bytes - held - own_bytes)) < free:
            left, why = allowed, f"the host budget of {size(self.limit_bytes)} leaves {size(allowed)}; it holds {who}"
        return left, why

    async def check(self, need_bytes: int) -> None:
        """Raise :class:`gpuckpt.errors.HostMemory` where *need_bytes* do not fit, and cannot be made to."""
        left, why = await self.left()
        if need_bytes > left and not await self.make_room(need_bytes):
            raise errors.HostMemory(f"suspended, this run needs {size(need_bytes)}; {why}; nothing was touched", hint=HOST_MEMORY_HINT)

    async def make_room(self, need_bytes: int, own_bytes: int = 0, *, whatever_the_limit: bool = False) -> bool:
        """Have other runs move what they hold to disk, the one that was not used for longest first, until *need_bytes* fit. Returns whether
        they fit now and did not before. Where all of it would not be enough nothing is moved.

        *whatever_the_limit*: need counts against what is free alone, since it stays only for a moment.
        """
        asked: set[str] = set()

        async def short() -> int:
            return need_bytes - (self.available_bytes() if whatever_the_limit else (await self.left(own_bytes))[0])

        while (missing := await short()) > 0:
            ready = [n for n in await self._others() if n.get("movable_bytes") and n["name"] not in asked]
            if sum(n["movable_bytes"] for n in ready) < missing:
                return False
            chosen = min(ready, key=lambda n: n["used_at"])
            asked.add(chosen["name"])
            await self._move(chosen)
        return bool(asked)

    @contextlib.asynccontextmanager
    async def deciding(self) -> AsyncIterator[Callable[[], None]]:
        """Alone until the end, or until what it yields is called: then what this run will take is among its facts. Where there can be no
        runtime directory it is alone in any case: no other run can be asked.

        Raises :class:`gpuckpt.errors.Busy` where another does not come to its end."""
        held: list[int] = []
        with contextlib.suppress(OSError, errors.PermissionDenied):
            swept.private(self._lock.parent)
            held.append(os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        try:
            until = time.monotonic() + DECIDE_S
            while held and (holder := swept.lock(held[0])) is not None:
                if time.monotonic() >= until:
                    raise _undecided(holder.pid)
                await asyncio.sleep(_POLL_S)
            yield lambda: os.close(held.pop()) if held else None
        finally:
            for each in held:
                os.close(each)


def _undecided(pid: int | None) -> errors.Busy:
    who = f"the run with pid {pid}" if pid else "another run"
    words = f"{who} has been deciding for {DECIDE_S:g} s how much host memory it takes, and this one waits for that; nothing was suspended"
    return errors.Busy(words, hint=f"kill -CONT {pid}, if it is stopped" if pid else "gpuckpt status", pid=pid)
