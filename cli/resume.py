"""`gpuckpt resume`."""

from __future__ import annotations

import click

from gpuckpt import errors
from gpuckpt.cli import completing
from gpuckpt.cli.common import (
    Duration,
    ask_run,
    execute,
    is_run,
    json_option,
    pids,
    refuse_for_run,
    show_refusal,
    show_run,
    timeout_option,
)
from gpuckpt.cli.progress import Bar
from gpuckpt.cli.rendezvous import rendezvous_options
from gpuckpt.model import Report
from gpuckpt.rendezvous.choice import Choice
from gpuckpt.words import size


@click.command()
@click.argument("targets", nargs=-1, required=True, metavar="TARGET...", shell_complete=completing.targets)
@click.option(
    "--gpu",
    "gpus",
    multiple=True,
    metavar="OLD=NEW",
    help="Restore on another card of the same kind: GPU UUIDs, or one UUID alone for a group on one GPU. Repeatable.",
)
@click.option(
    "--no-tree",
    is_flag=True,
    help="Only the processes named; refused where others were suspended together with them.",
)
@click.option("--wait", "wait_s", type=Duration(), metavar="DURATION", help="Wait for room on the GPUs this long. [default: not at all]")
@click.option("--dry-run", is_flag=True, help="Print the plan and whether there is room. Touches nothing.")
@rendezvous_options
@timeout_option(run=True)
@json_option
def resume(
    targets: tuple[str, ...],
    gpus: tuple[str, ...],
    no_tree: bool,
    wait_s: float | None,
    dry_run: bool,
    rendezvous: str | None,
    nodes: int | None,
    node_rank: int | None,
    rendezvous_key: str | None,
    timeout_s: float | None,
    as_json: bool,
) -> None:
    """Put suspended TARGETs back on their GPUs, at the same addresses, and let them go on.

    A TARGET is a pid, or the name of a run. A pid stands for the group that was suspended with it. Restore is called only when
    every GPU has room: a restore that runs out of memory would lose the process.

    \b
    Examples:
      gpuckpt resume 4242
      gpuckpt resume 4242 --wait 10m
      gpuckpt resume 4242 --gpu GPU-7169aa65-…
    """

    def body() -> Report:
        chosen = Choice(rendezvous, nodes, node_rank, rendezvous_key)
        chosen.check(dry_run=dry_run)
        if is_run(targets):
            chosen.refuse_run()
            refuse_for_run(targets[0], "resume", dry_run=dry_run, no_tree=no_tree, gpu=gpus, wait=wait_s)
            return ask_run(targets[0], "resume", timeout_s=timeout_s, quiet=as_json)
        from gpuckpt import early

        start = early.begin(timeout_s=timeout_s)
        from gpuckpt.local import LocalWorld
        from gpuckpt.operation import Operation
        from gpuckpt.preview import Preview

        wished, to_gpu = _wished(gpus)
        with (
            LocalWorld(command="resume", start=start) as world,
            world.interruptible(),
            chosen.barrier(world, "resume", timeout_s, me=world.me, boot_id=world.journal.boot_id) as barrier,
            Bar(as_json) as bar,
        ):
            kind = Preview if dry_run else Operation
            operation = kind(world, "resume", timeout_s=timeout_s, tell=bar.tell, watch=bar.watch, barrier=barrier)
            return operation.resume(pids(targets), tree=not no_tree, wished=wished, to_gpu=to_gpu, wait_s=wait_s or 0.0)

    execute("resume", as_json, body, show_plan if dry_run else show)


def show(report: Report) -> None:
    """The report for people."""
    if "run" in report.details:
        show_run(report)
        return
    for p in report.processes:
        if report.already:
            click.echo(f"already {p.state}: pid {p.pid} ({p.name})")
        elif p.state == "gone":
            click.echo(f"gone: pid {p.pid} ({p.name}) ended while it was suspended")
        else:
            back = ", ".join(f"{size(g.bytes_after)} on {g.uuid}" for g in p.gpus if g.bytes_after)
            click.echo(f"{p.state}: pid {p.pid} ({p.name})  {back}")
    if not report.already:
        click.echo(f"{report.seconds:.1f} s")


def show_plan(report: Report) -> None:
    if report.already:
        show(report)
        return
    plan = report.details["plan"]
    for step in plan["steps"]:
        click.echo(f"{step['name']:<11} {' '.join(map(str, step['pids']))}")
    for uuid, need in plan["gpu_bytes_needed"].items():
        click.echo(f"{uuid}: needs {size(need)}, has {size(plan['gpu_bytes_free'].get(uuid))} free")
    if error := plan["refused"]:
        show_refusal(error)
    elif nbytes := plan.get("host_bytes_needed"):
        click.echo(f"would go ahead, if host memory has room for the {size(nbytes)} that are on disk")
    else:
        click.echo("would go ahead")


def _wished(gpus: tuple[str, ...]) -> tuple[dict[str, str], str]:
    alone = [g for g in gpus if "=" not in g]
    if alone and len(gpus) > 1:
        raise errors.Usage("--gpu: one UUID alone, or OLD=NEW for each GPU", hint="gpuckpt resume PID --gpu OLD=NEW --gpu OLD2=NEW2")
    pairs = [(old, new) for old, sign, new in (g.partition("=") for g in gpus) if sign]
    if len({p[0] for p in pairs}) != len(pairs):
        raise errors.Usage("--gpu names one old GPU twice")
    return dict(pairs), alone[0] if alone else ""
