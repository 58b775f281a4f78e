"""A child that outlived its supervisor (``--keep-child``): what the next one must know of it, and in what state it finds it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from gpuckpt import errors
from gpuckpt.model import Report
from gpuckpt.supervisor.holdings import Holdings
from gpuckpt.supervisor.model import RunState, Server
from gpuckpt.supervisor.operate import Worker

#: How long an operation that the last supervisor had begun may take to end, or to go back, in seconds.
SETTLE_S = 120.0
_POLL_S = 0.5


def check_command(noted: Mapping[str, Any], command: list[str], name: str) -> None:
    """Raise :class:`gpuckpt.errors.NameTaken` if the child was started by another *command* than the one that is given now."""
    if noted.get("command") != command:
        raise errors.NameTaken(
            f"the child of the run {name!r}, pid {noted.get('child')}, has lost its supervisor, and was started by another command: "
            f"{' '.join(noted.get('command') or ['unknown'])}",
            hint=f"start that one to adopt it, or end it: kill {noted.get('child')}",
        )


def noted(holdings: Holdings) -> dict[str, Any]:
    """What of *holdings* cannot be seen from outside."""
    return {
        "gpu_bytes": holdings.gpu_bytes,
        "asleep_bytes": holdings.asleep_bytes,
        "pids": holdings.pids,
        "host_bytes": holdings.host_bytes,
        "holders": holdings.holders,
    }


def recall(holdings: Holdings, facts: Mapping[str, Any]) -> None:
    holdings.gpu_bytes, holdings.asleep_bytes = dict(facts.get("gpu_bytes", {})), dict(facts.get("asleep_bytes", {}))
    holdings.holders = list(facts.get("holders", []))
    holdings.pids, holdings.host_bytes = list(facts.get("pids", [])), int(facts.get("host_bytes", 0))


async def find(child: int, holdings: Holdings, server: Server) -> RunState:
    """SUSPENDED if the driver has its state or its server sleeps, else STARTING: its health will tell.

    Raises :class:`gpuckpt.errors.InFlight` where an operation on it does not come to an end.
    """
    until = time.monotonic() + SETTLE_S
    while True:
        states = await _states(holdings.pids or [child])
        if states <= {"suspended"} and states:
            holdings.down = True
            return RunState.SUSPENDED
        if states <= {"running"}:
            holdings.host_bytes = 0
            while not await server.healthy():  # it may have been starting
                await asyncio.sleep(_POLL_S)
            return RunState.SUSPENDED if await server.asleep() else RunState.STARTING
        if time.monotonic() >= until:
            raise errors.InFlight(f"the child, pid {child}, is {' and '.join(sorted(states))}", hint="gpuckpt recover", pid=child)
        await asyncio.sleep(_POLL_S)


async def _states(pids: list[int]) -> set[str]:
    worker = Worker()
    try:
        report: Report = await worker.run("look", pids)
    except errors.NoCudaState:
        return set()
    finally:
        await worker.finish()
    return {p.state for p in report.processes}
