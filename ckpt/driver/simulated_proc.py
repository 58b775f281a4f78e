"""What ``/proc`` says of processes on simulated GPUs: who lives, who is stopped, and the clock that all of them share."""

from __future__ import annotations

import signal
import time
from pathlib import Path

_PF_EXITING = 0x4  # include/linux/sched.h


def now_s() -> float:
    """Seconds since boot, the same for all processes, not moved by a change of the date."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def look(pid: int) -> tuple[str, int] | None:
    """State letter and start time of a process from ``/proc/PID/stat``; None if it is dead or dying: a zombie holds nothing any more."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" or int(fields[6]) & _PF_EXITING else (fields[0], int(fields[19]))


def killed(pid: int) -> bool:
    """Whether SIGKILL is on its way to *pid*: a stopped process that is killed runs for a moment, and does nothing any more."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return any(int(line.split()[1], 16) >> (signal.SIGKILL - 1) & 1 for line in lines if line.startswith(("SigPnd:", "ShdPnd:")))


def alive(pid: int, start_ticks: int) -> bool:
    seen = look(pid)
    return seen is not None and seen[1] == start_ticks


def stopped(pid: int) -> bool:
    return (look(pid) or ("",))[0] in ("T", "t")


def active(pid: int, start_ticks: int) -> bool:
    return alive(pid, start_ticks) and not stopped(pid)
