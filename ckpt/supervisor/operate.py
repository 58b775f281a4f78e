"""One suspend or resume of a supervised tree, in a process of its own: a driver or a library that hangs there hangs nothing else.

``python -m gpuckpt.supervisor.operate`` takes its order as one JSON argument and prints the report, as ``--json`` does. SIGTERM makes
it go back, as it does for the commands; it gets one when its supervisor dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Collection, Sequence
from typing import Any

from gpuckpt import errors
from gpuckpt.model import GpuReport, Hazard, ProcessReport, Report, Step

#: How long an operation may take at the very most, in seconds. It has deadlines of its own; this is for where it never gets to them.
LIMIT_S = 1800.0


class Worker:
    """An operation under way."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._interrupted = False

    async def run(
        self, command: str, pids: Sequence[int], *, timeout_s: float | None = None, wait_s: float = 0.0, accept: Collection[str] = ()
    ) -> Report:
        """Suspend or resume the tree of *pids*, or "check" whether a suspend would be refused.

        Raises what the operation raised, with its ``report`` if it had begun to act.

        Raises :class:`gpuckpt.errors.InFlight` where it does not answer within :data:`LIMIT_S`; it is left to itself then.
        """
        order = {"command": command, "pids": list(pids), "timeout_s": timeout_s, "wait_s": wait_s, "accept": sorted(accept)}
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # nothing in the directory where we were started takes the place of a module
            "-m",
            "gpuckpt.supervisor.operate",
            json.dumps(order),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        if self._interrupted:
            self.interrupt()
        assert self._process.stdout is not None
        try:
            output = await asyncio.wait_for(self._process.stdout.read(), LIMIT_S + wait_s)
            await self._process.wait()
        except TimeoutError:
            raise errors.InFlight(f"the {command} did not answer within {LIMIT_S + wait_s:.0f} s", hint="gpuckpt status") from None
        return report_or_raise(command, output)

    def interrupt(self) -> None:
        """Ask it to go back to where things were."""
        self._interrupted = True
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)


def report_or_raise(command: str, output: bytes) -> Report:
    try:
        document = json.loads(output)
    except ValueError:
        raise errors.InFlight(
            f"the process of the {command} died without a word; what it had begun is in the journal", hint="gpuckpt recover"
        ) from None
    report = report_of(document)
    if report.error is None:
        return report
    raise error_of(report.error, report if document.get("acted") else None)


def error_of(told: dict[str, Any], report: Report | None = None) -> errors.GpuckptError:
    """The error that ``error`` of a document tells of."""
    cls = errors.by_code().get(told["code"], errors.GpuckptError)
    return cls(told["message"], hint=told["hint"] or "", pid=told["pid"], gpu=told["gpu"], step=told["step"], report=report)


def report_of(document: dict[str, Any]) -> Report:
    """The report that was printed as *document*."""
    known = ("schema", "command", "ok", "simulated", "processes", "seconds", "steps", "hazards", "warnings", "already", "error", "acted")
    return Report(
        document["command"],
        document["ok"],
        document["simulated"],
        tuple(ProcessReport(**{**p, "gpus": tuple(GpuReport(**g) for g in p["gpus"])}) for p in document["processes"]),
        document["seconds"],
        tuple(Step(**s) for s in document["steps"]),
        tuple(Hazard(**h) for h in document["hazards"]),
        tuple(document["warnings"]),
        document["already"],
        {k: v for k, v in document.items() if k not in known},
        document["error"],
    )


def main() -> None:
    from gpuckpt.supervisor.keeper import PR_SET_PDEATHSIG, prctl

    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    order = json.loads(sys.argv[1])
    simulated = bool(os.environ.get("GPUCKPT_SIMULATE"))
    acted = True
    try:
        report = _operate(**order)
    except errors.GpuckptError as e:
        acted = e.report is not None
        report = e.report or Report(order["command"], False, simulated, error=e.as_dict())
    print(json.dumps({**report.as_dict(), "acted": acted}), flush=True)
    os._exit(0)


def _operate(command: str, pids: list[int], timeout_s: float | None, wait_s: float, accept: list[str]) -> Report:
    from gpuckpt.local import LocalWorld
    from gpuckpt.operation import Operation

    with LocalWorld(command=command) as world, world.interruptible():
        operation = Operation(world, command, timeout_s=timeout_s, accept=frozenset(accept))
        if command == "check":
            operation.refuse(operation.inspected(pids))
            return Report(command, True, world.simulated)
        return operation.suspend(pids) if command == "suspend" else operation.resume(pids, wait_s=wait_s)


if __name__ == "__main__":
    main()
