"""The process that carries out one suspend or resume of a supervised tree.

``python -m gpuckpt.supervisor.worker SUPERVISOR`` gets ready, takes its order as one line of JSON, and prints a line for each step that it
comes to, then the report, as ``--json`` does. SIGTERM makes it go back, as it does for the commands; it gets one when its supervisor dies,
and does nothing where that has died before: the order lies in the pipe all the same.
It imports no asyncio, which would take a quarter of its start.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

from gpuckpt import errors
from gpuckpt.model import Report

if TYPE_CHECKING:
    from gpuckpt.early import Start

#: Its first line, before it has begun anything.
TAKEN = '{"taken": true}\n'


def main() -> None:
    from gpuckpt import early
    from gpuckpt.driver.forked import end_with

    end_with(int(sys.argv[1]), signal.SIGTERM)

    # No GPU is looked at before there is an order: as long as one is, nobody can reset it.
    start = early.Start(early.callers(os.environ), early.devices(warm=True, looks=False))
    from gpuckpt import group, operation  # noqa: F401 - loaded before they are wanted
    from gpuckpt.supervisor import world  # noqa: F401 - loaded before they are wanted

    if not (line := sys.stdin.readline()):
        os._exit(0)  # it was not wanted
    with contextlib.suppress(OSError):
        sys.stdout.write(TAKEN)
        sys.stdout.flush()
    order = json.loads(line)
    simulated = bool(os.environ.get("GPUCKPT_SIMULATE"))
    acted = True
    try:
        report = _operate(start, **order)
    except errors.GpuckptError as e:
        acted = e.report is not None
        report = e.report or Report(order["command"], False, simulated, error=e.as_dict())
    with contextlib.suppress(OSError):  # nobody waits for it any more
        print(json.dumps({**report.as_dict(), "acted": acted}), flush=True)
        sys.stdin.read()  # what it holds is held until nobody has the other end
    os._exit(0)


def _operate(
    start: Start,
    command: str,
    pids: list[int],
    timeout_s: float | None,
    wait_s: float,
    accept: list[str],
    reserved: dict[str, int],
    host_left: tuple[int, str] | None,
    keep_in: str,
    method: str,
) -> Report:
    from gpuckpt.group import as_found
    from gpuckpt.operation import Operation
    from gpuckpt.supervisor.world import ReservingWorld
    from gpuckpt.telling import Progress

    reserving = ReservingWorld(command, reserved, host_left, lambda nbytes: _tell(Progress("host-memory", str(nbytes))), start)
    with reserving as world, world.interruptible():
        if command == "gpus":
            found = [{"uuid": g.uuid, "index": g.index} for g in world.gpus()]
            return Report(command, True, world.simulated, details={"gpus": found})
        if command == "room":
            reserving.claim_room(time.monotonic() + wait_s, lambda waits: _tell(Progress("room", waits)))
            return Report(command, True, world.simulated)
        operation = Operation(world, command, timeout_s=timeout_s, accept=frozenset(accept), tell=_tell)
        operation.method = method
        if command in ("check", "look"):
            inventory = operation.inspected(pids)
            if command == "check":
                operation.refuse(inventory)
            return Report(command, True, world.simulated, tuple(as_found(inventory)))
        return operation.suspend(pids, by=method, keep_in=keep_in) if command == "suspend" else operation.resume(pids, wait_s=wait_s)


def _tell(progress: Any) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more, and the operation goes on
        print(json.dumps({"progress": [progress.step, progress.message]}), flush=True)


if __name__ == "__main__":
    main()
