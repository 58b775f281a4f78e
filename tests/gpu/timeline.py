"""Where the wall time of a command goes: `gpuckpt status PID`, or `suspend` and `resume` in turn, with a mark at each step of its start and end.

usage: timeline.py [N]        N times each (5); the marks cost about 2 ms

Each mark is in milliseconds from before the command was started; the result file has the run that took the middle time.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

LOG = Path(os.environ.get("TIMELINE_LOG", "/dev/null"))


def mark(what: str) -> None:
    fd = os.open(LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, f"{time.monotonic():.6f} {what}\n".encode())
    os.close(fd)


def marked(owner: Any, name: str, label: str = "") -> None:
    function = getattr(owner, name)

    def wrapped(*args: Any, **options: Any) -> Any:
        mark(f"{label or name} …")
        try:
            return function(*args, **options)
        finally:
            mark(f"{label or name}")

    setattr(owner, name, wrapped)


def child(words: list[str]) -> None:
    """The command, in this process."""
    mark("the interpreter is up")
    from gpuckpt import early
    from gpuckpt.cli import entry
    from gpuckpt.driver import caller, nvml, nvml_apart
    from gpuckpt.inspect import processes
    from gpuckpt.journal import Journal

    mark("imported: callers, NVML")
    marked(nvml_apart.NvmlApart, "_ask", "NVML is asked")
    marked(early, "ahead", "the helper is forked, NVML begun")
    marked(caller, "driver", "helper: the driver's bindings")
    marked(caller, "_serve", "caller: one call")
    marked(caller.Callers, "close", "the helper is let go")
    marked(nvml.NvmlDevices, "_initialise", "NVML")
    marked(nvml.NvmlDevices, "gpus", "look at the GPUs")
    marked(processes, "table", "process table")
    marked(Journal, "save", "journal: save")
    marked(Journal, "audit", "journal: audit")
    marked(os, "fsync")
    end = os._exit

    def ended(code: int) -> None:
        mark("exit")
        end(code)

    os._exit = ended
    sys.argv = ["gpuckpt", *words]
    entry.main()


def run(words: list[str]) -> tuple[float, list[tuple[float, str]]]:
    """Wall milliseconds, and the marks."""
    log = Path(f"/tmp/timeline.{os.getpid()}.log")
    log.unlink(missing_ok=True)
    from lab import wall_s

    command = [sys.executable, __file__, "--child", *words]
    begun = time.monotonic()
    wall = 1000 * wall_s(command, env={**os.environ, "TIMELINE_LOG": str(log)}, stdout=DEVNULL)
    lines = [line.split(" ", 1) for line in log.read_text().splitlines()]
    log.unlink()
    return round(wall, 1), sorted((round(1000 * (float(at) - begun), 1), what) for at, what in lines)


def main() -> None:
    from lab import Results, Target, wall_s

    n = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    r = Results("timeline")
    target = Target(0.25)
    try:
        pid = str(target.pid)
        runs: dict[str, list[tuple[float, list[tuple[float, str]]]]] = {"status": [], "suspend": [], "resume": []}
        for _ in range(n):
            runs["status"].append(run(["status", pid]))
            runs["suspend"].append(run(["suspend", pid]))
            runs["resume"].append(run(["resume", pid]))
        for command, seen in runs.items():
            middle = sorted(seen)[len(seen) // 2]
            r.note(command, {"wall_ms": [wall for wall, _ in seen], "median": middle})
            print(f"{command}: {[wall for wall, _ in seen]} ms", *(f"{at:8.1f} {what}" for at, what in middle[1]), sep="\n")
        pass_ms = []
        for _ in range(n):
            pass_ms.append(round(1000 * wall_s([sys.executable, "-c", "pass"]), 1))
        r.note("python -c pass", pass_ms)
        r.check("the same answers", target.same())
    finally:
        target.end()
    r.finish()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2:])
    else:
        main()
