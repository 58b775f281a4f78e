"""`gpuckpt ps`."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn

import click

from gpuckpt.cli.common import Duration, execute, fail, finish, json_option, look_timeout_option, print_json, warn, within
from gpuckpt.cli.streams import unwritten
from gpuckpt.errors import GpuckptError
from gpuckpt.model import Gpu, Report
from gpuckpt.words import BY_POOL, HELD, duration, size

if TYPE_CHECKING:
    from rich.console import Group

    from gpuckpt.overview import Overview, Row

#: Columns of a terminal below which ps shows only what does not fit otherwise: which process, how it is, where.
NARROW = 72
COLOURS = {
    "running": "green",
    "suspended": "cyan",
    BY_POOL: "cyan",
    HELD: "cyan",
    "lost": "red",
    "in-flight": "yellow",
    "locked": "yellow",
    "stopped": "yellow",
}


@click.command()
@click.option("--watch", is_flag=True, help="Show it again every --interval until Ctrl-C; with --json, a document a line.")
@click.option("--interval", "interval_s", type=Duration(), default="2s", show_default=True, help="With --watch.")
@look_timeout_option
@json_option
def ps(watch: bool, interval_s: float, timeout_s: float, as_json: bool) -> None:
    """Every process on the GPUs, or suspended: pid, name, state, bytes per GPU, bytes in host memory, since when, by whom.

    A process that the driver knows and this machine's /proc does not (another container's) is shown as foreign.

    \b
    Examples:
      gpuckpt ps
      gpuckpt ps --watch
      gpuckpt ps --json
    """
    if watch:
        _watch(interval_s, timeout_s, as_json)
    execute("ps", as_json, lambda: as_report("ps", (), timeout_s, as_json), show)


def as_report(command: str, pids: tuple[int, ...], timeout_s: float, as_json: bool) -> Report:
    """The overview as a report: ``details`` has its GPUs and rows."""
    from gpuckpt import early

    start = early.begin()
    from gpuckpt.local import LocalWorld
    from gpuckpt.overview import overview

    begun = time.monotonic()
    with LocalWorld(command=command, start=start) as world, within(timeout_s, command, as_json):
        seen = overview(world, pids)
        simulated = world.simulated
    return Report(
        command,
        True,
        simulated,
        seconds=time.monotonic() - begun,
        warnings=seen.warnings,
        details={"processes": [row_dict(r) for r in seen.rows], "gpus": [gpu_dict(g) for g in seen.gpus], "_overview": seen},
    )


def row_dict(row: Row) -> dict[str, Any]:
    return {
        "pid": row.pid,
        "name": row.name,
        "user": row.user,
        "state": row.state,
        "gpus": [{"uuid": g.uuid, "bytes": g.nbytes} for g in row.gpus],
        "host_bytes": row.host_bytes,
        "disk_bytes": row.disk_bytes,
        "reserved_bytes": row.reserved_bytes,
        "suspended_since": row.since,
        "by": row.by,
        "group": row.group,
        "note": row.note,
    }


def gpu_dict(gpu: Gpu) -> dict[str, Any]:
    return {
        "uuid": gpu.uuid,
        "index": gpu.index,
        "name": gpu.name,
        "total_bytes": gpu.total_bytes,
        "free_bytes": gpu.free_bytes,
        "lost": gpu.lost,
    }


def show(report: Report) -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = 240  # a pipe has no edge to wrap at
    console.print(picture(report.details["_overview"], simulated=report.simulated, width=console.width))


def picture(seen: Overview, *, simulated: bool, width: int) -> Group:
    """GPUs first, then the processes, as a person wants to see them."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    gpus = Table(box=None, pad_edge=False, show_header=False)
    for g in seen.gpus:
        used = None if g.total_bytes is None or g.free_bytes is None else g.total_bytes - g.free_bytes
        words = Text("lost: it fell off the bus", "red") if g.lost else Text(f"{size(used)} of {size(g.total_bytes)} used")
        gpus.add_row(
            Text(f"GPU {g.index}", "bold"),
            g.name + (" (simulated)" if simulated and "imulated" not in g.name else ""),
            words,
            Text(g.uuid, "dim"),
        )
    index = {g.uuid: g.index for g in seen.gpus}
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, right in (
        ("PID", True),
        ("NAME", False),
        ("USER", False),
        ("STATE", False),
        ("GPU MEMORY", False),
        ("HOST", True),
        ("DISK", True),
    ):
        table.add_column(name, justify="right" if right else "left", no_wrap=name != "NAME", overflow="ellipsis")
    for name in ("SINCE", "BY", ""):
        table.add_column(name, overflow="fold")
    narrow = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("PID", "STATE", "GPU MEMORY", "NAME"):
        narrow.add_column(name, no_wrap=name != "NAME", overflow="ellipsis" if name == "NAME" else "fold")
    for r in seen.rows:
        on = ", ".join(f"{index.get(g.uuid, '?')}: {size(g.nbytes)}" for g in r.gpus) or "-"
        since = f"{duration(max(0.0, time.time() - r.since))} ago" if r.since else ""
        state = Text(r.state, COLOURS.get(r.state, ""))
        kept = [size(n) if n else "-" for n in (r.host_bytes, r.disk_bytes)]
        table.add_row(str(r.pid), r.name, r.user, state, on, *kept, since, r.by, Text(r.note, "dim"))
        narrow.add_row(str(r.pid), state, on, r.name)
    nothing = Text("no process holds GPU memory, and none is suspended", "dim")
    return Group(gpus, "", (narrow if width < NARROW else table) if seen.rows else nothing)


def _watch(interval_s: float, timeout_s: float, as_json: bool) -> NoReturn:
    """Until Ctrl-C: in place on a terminal, one after the other elsewhere."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    in_place = Live(auto_refresh=False) if console.is_terminal and not console.is_dumb_terminal and not as_json else None
    try:
        with in_place or contextlib.nullcontext():
            while True:
                report = as_report("ps", (), timeout_s, as_json)
                if as_json:
                    print_json(report)
                else:
                    for w in report.warnings:
                        warn(w)
                    if in_place:
                        seen = report.details["_overview"]
                        in_place.update(picture(seen, simulated=report.simulated, width=Console().width), refresh=True)
                    else:
                        show(report)
                sys.stdout.flush()
                if unwritten():
                    finish(0)  # nobody is there to watch
                time.sleep(interval_s)
    except KeyboardInterrupt:
        finish(128 + signal.SIGINT)
    except GpuckptError as e:
        fail("ps", as_json, e)
