"""The moment between two lives of a run with ``--restart``: it can still be told that there shall be no other."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from gpuckpt import errors
from gpuckpt.model import Report
from gpuckpt.supervisor.control import ControlServer, Peer


async def told_to_end(signals: asyncio.Queue[int], ending: Collection[int], control: Path, code: int, within_s: float) -> bool:
    """Wait for *within_s* seconds, answering on the socket *control*. True at once after a signal in *ending*, or ``gpuckpt stop``."""
    stopped = asyncio.Event()

    async def answer(order: dict[str, Any], _: Peer) -> dict[str, Any]:
        match order["command"]:
            case "stop":
                stopped.set()
                return {**Report("stop", True, False).as_dict(), "acted": True}
            case "hold":  # it is on no GPU
                return {**Report("hold", True, False, details={"held": False}).as_dict(), "acted": True}
            case _:
                left = max(0.0, until - time.monotonic())
                raise errors.RunNotReady(f"the command ended with {code}, and is started again in {left:.0f} s", hint="gpuckpt stop NAME")

    until = time.monotonic() + within_s
    server = ControlServer(control, answer)
    with contextlib.suppress(OSError):  # without it there are still signals
        await server.listen()
    told: list[asyncio.Future[Any]] = [asyncio.ensure_future(_ending(signals, ending)), asyncio.ensure_future(stopped.wait())]
    try:
        done, _ = await asyncio.wait(told, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        return bool(done) or stopped.is_set()
    finally:
        for task in told:
            task.cancel()
        await asyncio.gather(*told, return_exceptions=True)
        await server.close()


async def _ending(signals: asyncio.Queue[int], ending: Collection[int]) -> None:
    while await signals.get() not in ending:
        pass
