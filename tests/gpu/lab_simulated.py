"""Stands in for the GPU in ``lab.py`` where ``GPUCKPT_SIMULATE`` is set: to try a script before it costs GPU time.

A directory that is not there yet becomes a machine of two GPUs (as many as ``$RANKS``, if that is more) of 80 GiB (``$CARD_GIB``), at 50 GiB/s.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from gpuckpt.driver.api import CallError
from gpuckpt.driver.simulated import SimulatedDevices, SimulatedDriver
from gpuckpt.driver.simulated_store import SimulatedWorldDir

with contextlib.suppress(FileExistsError):
    SimulatedWorldDir.create(os.environ["GPUCKPT_SIMULATE"], gpus=max(2, int(os.environ.get("RANKS", "2"))), gib=float(os.environ.get("CARD_GIB", "80")), seconds_per_gib=0.02)
    proc = Path(os.environ["GPUCKPT_SIMULATE"], "root/proc")
    proc.mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: {512 << 20} kB\nMemAvailable: {256 << 20} kB\n")
world = SimulatedDevices(os.environ["GPUCKPT_SIMULATE"])


def used_mib(index: int = 0) -> int:
    gpu = world.gpus()[index]
    return (gpu.total_bytes - gpu.free_bytes) >> 20  # type: ignore[operator]


def free_mib(index: int = 0) -> int:
    return (world.gpus()[index].free_bytes or 0) >> 20


def state(pid: int) -> str:
    return str(SimulatedDriver(os.environ["GPUCKPT_SIMULATE"]).state(pid)).upper()


def command(args: tuple[Any, ...]) -> list[str]:
    """The simtarget for ``target.py GIB MODE GPU``."""
    gib, mode, gpu = [*args, "plain", 0][:3] if len(args) == 1 else [*args, 0][:3]
    more = {"managed": ["--trait", "managed"], "exported": ["--exported-gib", "1"]}.get(str(mode), [])
    total = float(gib) + 0.6 + (1 if mode == "exported" else 0)
    return ["-m", "gpuckpt.driver.simtarget", "--gib", str(total), "--gpu", str(gpu), *more]


def translate(line: str) -> str:
    """``busy N`` queues N products of about 22 ms."""
    return f"busy {int(line.split()[1]) * 0.022}" if line.startswith("busy") else line


def calls(pid: int, names: tuple[str, ...]) -> list[list[Any]]:
    """[call, result, value, seconds] each."""
    driver = SimulatedDriver(os.environ["GPUCKPT_SIMULATE"])
    known = {
        "Lock": lambda: driver.lock(pid, 10),
        "Checkpoint": lambda: driver.checkpoint(pid),
        "Restore": lambda: driver.restore(pid, {}, initialise=False),
        "Unlock": lambda: driver.unlock(pid),
        "GetState": lambda: driver.state(pid),
        "GetRestoreThreadId": lambda: driver.restore_thread(pid),
    }
    found = []
    for name in names:
        try:
            value = known[name]()
            found.append([name, "CUDA_SUCCESS", None if value is None else str(value), 0.0])
        except CallError as e:
            found.append([name, e.result, None, 0.0])
    return found
