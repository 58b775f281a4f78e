"""`gpuckpt status` and `gpuckpt is-suspended`."""

from __future__ import annotations

import dataclasses
import time

import click

from gpuckpt.cli import completing
from gpuckpt.cli.common import ask_run, execute, fail, finish, is_run, json_option, look_timeout_option, pids, print_json, show_run
from gpuckpt.cli.ps import as_report
from gpuckpt.errors import GpuckptError
from gpuckpt.model import Report
from gpuckpt.words import duration, size


@click.command()
@click.argument("targets", nargs=-1, metavar="[TARGET]...", shell_complete=completing.targets)
@look_timeout_option
@json_option
def status(targets: tuple[str, ...], timeout_s: float, as_json: bool) -> None:
    """How TARGETs and all that belongs to them are; without TARGET, every process on the GPUs or suspended.

    Answers at once also while an operation is under way, from the journal: the driver would make it wait.

    \b
    Examples:
      gpuckpt status
      gpuckpt status 4242 --json
    """

    def body() -> Report:
        if is_run(targets):
            return ask_run(targets[0], "status", timeout_s=timeout_s)
        return as_report("status", tuple(pids(targets)), timeout_s, as_json)

    execute("status", as_json, body, show)


def show(report: Report) -> None:
    if "run" in report.details:
        show_run(report)
        return
    rows = report.details["_overview"].rows
    for r in rows:
        on = ", ".join(f"{size(g.nbytes)} on {g.uuid}" for g in r.gpus)
        image = f"{size(r.host_bytes)} in host memory" if r.host_bytes else f"{size(r.disk_bytes)} on disk" if r.disk_bytes else ""
        ready = f"{size(r.reserved_bytes)} of host memory kept ready" if r.reserved_bytes else ""
        since = f"since {duration(max(0.0, time.time() - r.since))} by {r.by}" if r.since else ""
        facts = ", ".join(x for x in (on, image, ready, since, r.note) if x)
        click.echo(f"{r.state}: pid {r.pid} ({r.name}, {r.user})" + (f"  {facts}" if facts else ""))
    if not rows:
        click.echo("no process holds GPU memory, and none is suspended")


@click.command("is-suspended")
@click.argument("target", metavar="TARGET", shell_complete=completing.targets)
@look_timeout_option
@json_option
def is_suspended(target: str, timeout_s: float, as_json: bool) -> None:
    """Exit 0 if TARGET (a pid and all that belongs to it, or the name of a run) is suspended, 1 if not. Prints nothing but with --json.

    \b
    Examples:
      gpuckpt is-suspended 4242 && echo the GPU is free
    """
    try:
        if is_run([target]):
            report = dataclasses.replace(ask_run(target, "status", timeout_s=timeout_s), command="is-suspended")
            suspended = report.details["run"]["state"] == "suspended"
        else:
            report = as_report("is-suspended", tuple(pids([target])), timeout_s, as_json)
            suspended = report.details["_overview"].suspended
    except GpuckptError as e:
        fail("is-suspended", as_json, e)
    if as_json:
        report.details["suspended"] = suspended
        print_json(report)
    finish(0 if suspended else 1)
