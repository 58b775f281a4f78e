"""Figures and states as people read them."""

from __future__ import annotations

from collections.abc import Iterable

from gpuckpt.model import State

#: Why a process stands still, whatever it is told.
STOPPED, FROZEN = "stopped", "in a frozen cgroup"


def let_go(halted: str, pids: Iterable[int]) -> str:
    """What to do so that *pids*, which are *halted*, go on."""
    return f"kill -CONT {' '.join(map(str, pids))}" if halted == STOPPED else "thaw its cgroup (docker unpause, systemctl thaw)"


def size(nbytes: int | None) -> str:
    """ "16.9 GiB", "512 MiB", "0", "?" for unknown."""
    if nbytes is None:
        return "?"
    if nbytes == 0:
        return "0"
    if nbytes >= 1 << 30:
        return f"{nbytes / 2**30:.1f} GiB"
    return f"{max(1, round(nbytes / 2**20))} MiB"


def duration(seconds: float) -> str:
    """ "8.9 s", "3 min", "2 h": one figure that matters."""
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


#: A process whose pool and communicators have left the GPU, and nothing else.
BY_POOL = "suspended (pool)"
#: A process that was taken along by a suspend: it stands at its safe point until the resume.
HELD = "held"
#: Where an image is kept that is not kept in a directory: what ``--keep-in`` calls host memory.
RAM = "ram"


def word(state: State, *, by_pool: bool = False) -> str:
    """The word that people see for a driver state. *by_pool*: it is meant to be disarmed."""
    if by_pool and state is State.DISARMED:
        return BY_POOL
    words = {State.CHECKPOINTED: "suspended", State.BLOCKED: "in-flight", State.FAILED: "lost", State.DENIED: "unknown"}
    return words.get(state, str(state))
