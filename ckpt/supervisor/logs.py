"""What a run logs, for people or as one JSON object a line. A log that cannot be written stops nothing."""

from __future__ import annotations

import datetime
import json
import logging
import sys


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
    made.setFormatter(JsonLines(name) if kind == "json" else logging.Formatter(f"gpuckpt run {name}: %(message)s"))
    return made
