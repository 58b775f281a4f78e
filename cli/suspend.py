"""`gpuckpt suspend`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import click

from gpuckpt.cli import completing
from gpuckpt.cli.common import ask_run, execute, is_run, json_option, pids, refuse_for_run, show_refusal, show_run, timeout_option
from gpuckpt.cli.progress import Bar
from gpuckpt.cli.rendezvous import rendezvous_options
from gpuckpt.image import paths
from gpuckpt.model import ACCEPTABLE_HAZARDS, METHODS, Report
from gpuckpt.rendezvous.choice import Choice
from gpuckpt.words import BY_POOL, HELD, size


@click.command()
@click.argument("targets", nargs=-1, required=True, metavar="TARGET...", shell_complete=completing.targets)
@click.option("--no-tree", is_flag=True, help="Only the processes named, not those that belong to them; the same hazards hold.")
@click.option("--dry-run", is_flag=True, help="Print the plan: order, pids, GPUs, bytes, hazards. Touches nothing.")
@click.option(
    "--accept-loss",
    multiple=True,
    type=click.Choice(ACCEPTABLE_HAZARDS),
    metavar="KIND",
    help=f"Take on a hazard that may lose the process: {', '.join(ACCEPTABLE_HAZARDS)}. Repeatable.",
)
@click.option(
    "--with",
    "along",
    multiple=True,
    type=click.IntRange(2),
    metavar="PID",
    help="Take PID, and all that belongs to it, along: its communicators are suspended too, and it stands still until the resume, "
    "its memory where it is. It needs an agent. Repeatable.",
)
@rendezvous_options
@click.option(
    "--method",
    type=click.Choice(METHODS),
    default="auto",
    show_default=True,
    help="auto: what lies in a pool of the program leaves first, the driver takes the rest. driver: it takes all. "
    "pool: no driver call; what lies in no pool stays on the GPU.",
)
@click.option(
    "--keep-in",
    default="ram",
    show_default=True,
    metavar="DIR",
    help="Keep what was on the GPUs in a file in DIR, and give the host memory back. Takes programs started by `gpuckpt exec`.",
)
@click.option(
    "--oom-score-adj",
    type=click.IntRange(-1000, 1000),
    metavar="N",
    help="While it is suspended, the kernel's out-of-memory killer takes it last (-1000: never) or first (1000). [default: as it is]",
)
@timeout_option(run=True)
@json_option
def suspend(
    targets: tuple[str, ...],
    no_tree: bool,
    dry_run: bool,
    accept_loss: tuple[str, ...],
    along: tuple[int, ...],
    rendezvous: str | None,
    nodes: int | None,
    node_rank: int | None,
    rendezvous_key: str | None,
    method: str,
    keep_in: str,
    oom_score_adj: int | None,
    timeout_s: float | None,
    as_json: bool,
) -> None:
    """Move everything that TARGETs hold on their GPUs to host memory.

    A TARGET is a pid, or the name of a run. A pid stands for every CUDA process that belongs to it. The processes stay alive and
    wait. Several pids form one operation: all or none. What is already suspended stays so.

    \b
    Examples:
      gpuckpt suspend 4242
      gpuckpt suspend --dry-run 4242
      gpuckpt suspend 4242 --timeout 30s --json
      gpuckpt suspend 4242 --rendezvous c10d://host0:29400/job --nodes 2 --rendezvous-key job.key    on each of two hosts
      gpuckpt suspend 4242 --keep-in /var/lib/images
      gpuckpt suspend SERVER --with TRAINER    where they share a communicator
      gpuckpt suspend 4242 --method pool    where the driver cannot checkpoint
    """

    def body() -> Report:
        chosen = Choice(rendezvous, nodes, node_rank, rendezvous_key)
        chosen.check(dry_run=dry_run)
        if is_run(targets):
            chosen.refuse_run()
            given = {"dry_run": dry_run, "no_tree": no_tree, "accept_loss": accept_loss, "with": along, "method": method != "auto"}
            given |= {"keep_in": keep_in != "ram", "oom_score_adj": oom_score_adj is not None}
            refuse_for_run(targets[0], "suspend", **given)
            return ask_run(targets[0], "suspend", timeout_s=timeout_s, quiet=as_json)
        from gpuckpt import early

        start = early.begin(timeout_s=timeout_s)
        from gpuckpt.local import LocalWorld
        from gpuckpt.operation import Operation
        from gpuckpt.preview import Preview

        with (
            LocalWorld(start=start) as world,
            world.interruptible(),
            chosen.barrier(world, "suspend", timeout_s, me=world.me, boot_id=world.journal.boot_id) as barrier,
            Bar(as_json) as bar,
        ):
            kind = Preview if dry_run else Operation
            accept = frozenset(accept_loss)
            operation = kind(world, "suspend", timeout_s=timeout_s, accept=accept, tell=bar.tell, watch=bar.watch, barrier=barrier)
            report = operation.suspend(
                pids(targets), tree=not no_tree, along=along, by=method, keep_in=keep_in, oom_score_adj=oom_score_adj
            )
            return dataclasses.replace(report, warnings=(*report.warnings, *_runs_unaware(report)))

    execute("suspend", as_json, body, show_plan if dry_run else show)


def _runs_unaware(report: Report) -> Iterator[str]:
    """Words for each run that does not know what has been done to its processes behind its back."""
    from gpuckpt.inspect import processes

    for name, pid in {processes.run_of(p.pid): p.pid for p in report.processes}.items():
        if not name:
            continue
        from gpuckpt.supervisor import control

        if control.exists(name):
            words = f"pid {pid} belongs to the run {name}, which does not know of this: its requests wait until gpuckpt resume {pid}"
            yield f"{words}. Better: gpuckpt suspend {name}"


def show(report: Report) -> None:
    """The report for people."""
    if "run" in report.details:
        show_run(report)
        return
    for p in report.processes:
        if report.already:
            click.echo(f"already {p.state}: pid {p.pid} ({p.name})")
            continue
        if p.state == HELD:
            kept = ", ".join(f"{size(g.bytes_after)} on {g.uuid}" for g in p.gpus)
            click.echo(f"held: pid {p.pid} ({p.name})  stands at its safe point until the resume, and keeps {kept}")
            continue
        moved = ", ".join(f"{size(g.bytes_before)} → {size(g.bytes_after)} on {g.uuid}" for g in p.gpus)
        stays = f"; {size(p.retained_bytes)} stay on the GPU" if p.state == BY_POOL else ""
        click.echo(f"{p.state}: pid {p.pid} ({p.name})  {moved}{stays}")
        if p.stays:
            click.echo(f"  pid {p.pid} keeps: " + ", ".join(f"{s['class']} {size(s['bytes'])}" for s in p.stays))
    if not report.already:
        way = report.details.get("method")
        if way and (way["taken"] != "driver" or way["asked"] != "auto"):
            click.echo(f"method {way['taken']}: {way['why']}")
        held, on_disk = (sum(getattr(p, name) for p in report.processes) for name in ("host_bytes", "disk_bytes"))
        where = ", ".join(f"{size(n)} {what}" for n, what in ((held, "in host memory"), (on_disk, "on disk")) if n) or "nothing held"
        for p in report.processes if not report.simulated else ():  # simulated times are made up
            if p.image:
                click.echo(f"  pid {p.pid}: {paths.words(p.image)}")
        several = report.details.get("_back")
        back = f"here, and likewise on each other host: {several}" if several else f"gpuckpt resume {report.processes[0].pid}"
        click.echo(f"{report.seconds:.1f} s, {where}. Back with: {back}")


def show_plan(report: Report) -> None:
    """The plan for people."""
    if report.already:
        show(report)
        return
    plan = report.details["plan"]
    for step in plan["steps"]:
        click.echo(f"{step['name']:<11} {' '.join(map(str, step['pids']))}")
    for p in report.processes:
        on = ", ".join(f"{size(g.bytes_before)} on {g.uuid}" for g in p.gpus) or "nothing on a GPU"
        click.echo(f"pid {p.pid} ({p.name}, {p.state}): {on}")
    room = f"{size(plan['host_bytes_available'])} by {plan['host_limit']}" if plan["host_limit"] else "unknown"
    click.echo(f"host memory needed {size(plan['host_bytes_needed'])}, there is {room}")
    for h in report.hazards:
        click.echo(f"hazard {h.kind}: {h.message}\n  try: {h.hint}")
    click.echo(f"method {report.details['method']['taken']}: {report.details['method']['why']}")
    if error := plan["refused"]:
        show_refusal(error, said=[h.message for h in report.hazards])
    else:
        click.echo(f"would go ahead; deadline {plan['timeout_seconds']:.0f} s")
