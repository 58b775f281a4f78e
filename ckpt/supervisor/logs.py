"""What a run logs, for people or as one JSON object a line. A log that cannot be written stops nothing."""

from __future__ import annotations

import asyncio
import datetime
import json
import logging
import sys
import time
from collections.abc import Callable
from typing import Any

from aiohttp.http import HttpProcessingError

from gpuckpt.errors import GpuckptError
from gpuckpt.image import paths
from gpuckpt.model import Report

log = logging.getLogger("gpuckpt.run")

#: How often it is said that no connection can be accepted, in seconds: the loop says it thousands of times a second.
ACCEPTS_S = 10.0


class JsonLines(logging.Formatter):
    """``{"time", "level", "run", "logger", "message"}``, and ``exception`` where there is one."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def format(self, record: logging.LogRecord) -> str:
        found = {
            "time": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "run": self._name,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(found)


def handler(name: str, kind: str) -> logging.Handler:
    """Writes to stderr what the run *name* logs, as *kind* ("text" or "json") says."""
    made = logging.StreamHandler(sys.stderr)
    made.addFilter(_briefly)
    made.setFormatter(JsonLines(name) if kind == "json" else logging.Formatter(f"gpuckpt run {name}: %(message)s"))
    return made


def _briefly(record: logging.LogRecord) -> bool:
    """A client that does not speak HTTP as it should is worth a line: where our code was then says nothing."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        record.exc_info, record.levelno, record.levelname = None, logging.INFO, "INFO"
        record.msg, record.args = f"{record.getMessage()}: %s", (" ".join(str(error).split()),)
    return True


def of_the_loop() -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """What an event loop does with what it cannot tell anybody: log it; that it has run short of descriptors, now and then."""
    last: float | None = None

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal last
        if not context["message"].startswith("socket.accept()"):
            loop.default_exception_handler(context)
        elif last is None or time.monotonic() - last >= ACCEPTS_S:
            last = time.monotonic()
            log.warning("no connection can be accepted now, so clients wait: %s", context.get("exception"))

    return handle


def outcome(operation: str, reason: str, found: Report | GpuckptError, seconds: float) -> None:
    """How a suspend or a resume went, and why it was done."""
    if isinstance(found, Report):
        steps = ", ".join(f"{s.name} {s.seconds:.2f} s" for s in found.steps)
        log.info("%s (%s) in %.2f s: %s", operation, reason, seconds, steps)
        for p in found.processes if operation == "suspend" and not found.simulated else ():
            if p.image:
                log.info("pid %d: %s", p.pid, paths.words(p.image))
    else:
        notes = "".join(f"; {n}" for n in getattr(found, "__notes__", ()))
        log.warning("%s (%s) failed: %s%s [%s]", operation, reason, found.message, notes, found.code)
