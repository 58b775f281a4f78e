"""One suspend or resume of a supervised tree, in a process of its own: a driver or a library that hangs there hangs nothing else.

This is its supervisor's side; :mod:`gpuckpt.supervisor.worker` is that process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from gpuckpt import errors
from gpuckpt.model import GpuReport, Hazard, ProcessReport, Report, Step
from gpuckpt.supervisor.worker import TAKEN
from gpuckpt.words import RAM

#: How long an operation may take beyond what it was given, in seconds. It has deadlines of its own; this is for where it never gets to
#: them.
LIMIT_S = 3600.0
#: How long its process may take to end once it is let go, in seconds.
_END_S = 5.0
_LINE_BYTES = 1 << 24
_PROGRESS = b'{"progress"'


class Worker:
    """An operation under way. *told* is called with each step that it comes to, and with what it waits for there ("" if nothing).

    A resume holds its GPUs until :meth:`finish`: what the server takes when it wakes up is taken after the driver's part.
    """

    def __init__(self, told: Callable[[str, str], None] = lambda _step, _waits: None) -> None:
        self.process: asyncio.subprocess.Process | None = None  # a ready one, else it starts its own
        self._interrupted = False
        self._taken = False
        self._told = told
        self.busy = True  # until it has told how it ended

    async def run(
        self,
        command: str,
        pids: Sequence[int] = (),
        *,
        timeout_s: float | None = None,
        wait_s: float = 0.0,
        accept: Collection[str] = (),
        reserved: Mapping[str, int] | None = None,
        host_left: tuple[int, str] | None = None,
        keep_in: str = RAM,
        method: str = "auto",
    ) -> Report:
        """Suspend or resume the tree of *pids*; "check" whether a suspend would be refused; "look" what they hold; hold GPUs once
        they have "room"; or name the "gpus".

        *reserved*: bytes on each GPU that a resume must find free beyond what the driver puts back. *host_left*: bytes of host memory
        that a suspend may take, and in words why not more; what it will take is told as the step "host-memory", before it locks.
        *keep_in*: where a suspend leaves the image. *method*: by which it takes memory off the GPU.

        Raises what the operation raised, with its ``report`` if it had begun to act.

        Raises :class:`gpuckpt.errors.InFlight` where it does not answer within :data:`LIMIT_S`; it is left to itself then.
        """
        order: dict[str, Any] = {"command": command, "pids": list(pids), "timeout_s": timeout_s, "wait_s": wait_s, "accept": sorted(accept)}
        order |= {"reserved": dict(reserved or {}), "host_left": host_left, "keep_in": keep_in, "method": method}
        self.busy = True
        line, limit_s = json.dumps(order).encode() + b"\n", LIMIT_S + wait_s + (timeout_s or 0.0)
        try:
            output = await asyncio.wait_for(self._order(line, self.process or await ready()), limit_s)
            if not (self._taken or self._interrupted) and self.process:  # it died before it had read its order: nothing has begun
                await dismiss(self.process)
                output = await asyncio.wait_for(self._order(line, await ready()), limit_s)
        except TimeoutError:
            raise errors.InFlight(f"the {command} did not answer within {limit_s:.0f} s", hint="gpuckpt status") from None
        except OSError as e:
            if self._taken:
                raise
            words = f"the process of the {command} cannot be started: {e.strerror or e}; nothing was begun"
            raise errors.GpuckptError(words, hint="see the limits of the run: open files (ulimit -n), processes, memory") from None
        finally:
            self.busy = False
        if not (output or self._taken):
            raise errors.GpuckptError(
                f"the process of the {command} ended before it took its order; nothing was begun",
                hint="see what it wrote on stderr; where gpuckpt was upgraded or removed meanwhile: start the run again",
            )
        return report_or_raise(command, output)

    async def _order(self, order: bytes, process: asyncio.subprocess.Process) -> bytes:
        """Have *process* carry it out. The line that is its report; b"" if it ended without one."""
        assert process.stdin is not None
        assert process.stdout is not None
        self.process, self._taken = process, False
        process.stdin.write(order)
        if self._interrupted:
            self.interrupt()
        async for line in process.stdout:
            if line == TAKEN.encode():
                self._taken = True
                continue
            if not line.startswith(_PROGRESS):
                return line
            self._told(*json.loads(line)["progress"])
        return b""

    async def finish(self) -> None:
        """Let go of the GPUs, however it ended. It can run another after that."""
        process, self.process = self.process, None
        if process is not None:
            await dismiss(process)

    def interrupt(self) -> None:
        """Ask it to go back to where things were."""
        self._interrupted = True
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGTERM)


async def ready() -> asyncio.subprocess.Process:
    """A process that waits for an order, which it is then quicker to carry out: starting it takes a tenth of a resume."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",  # nothing in the directory where we were started takes the place of a module
        "-m",
        "gpuckpt.supervisor.worker",
        str(os.getpid()),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
        limit=_LINE_BYTES,
    )


async def dismiss(process: asyncio.subprocess.Process) -> None:
    """It lets go of what it holds, and ends."""
    assert process.stdin is not None
    process.stdin.close()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), _END_S)


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


def held_bytes(report: Report) -> dict[str, int]:
    """What the processes of *report* hold on each GPU, or held before it."""
    found: dict[str, int] = {}
    for gpu in (g for p in report.processes for g in p.gpus):
        found[gpu.uuid] = found.get(gpu.uuid, 0) + max(gpu.bytes_before or 0, gpu.bytes_after or 0)
    return found
