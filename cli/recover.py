"""`gpuckpt recover`."""

from __future__ import annotations

import click

from gpuckpt.cli.common import fail, finish, json_option, print_json, timeout_option, warn
from gpuckpt.model import Report


@click.command()
@timeout_option("Deadline for all of them together.")
@json_option
def recover(timeout_s: float | None, as_json: bool) -> None:
    """After a crash of gpuckpt or of its shell: finish or undo every operation that was left in the middle.

    Reads the journal and asks the driver. A suspend that had reached every process is finished, any other is undone; a resume that
    had restored any process is finished, any other leaves it suspended. A driver call that was left under way is waited for, up to
    --timeout. Does nothing, and says so, when nothing was left.

    \b
    Examples:
      gpuckpt recover
      gpuckpt recover --json
    """
    from gpuckpt import early, errors, keeping
    from gpuckpt.journal import void_words

    start = early.begin(timeout_s=timeout_s)
    from gpuckpt.local import LocalWorld
    from gpuckpt.recovery import recover_all
    from gpuckpt.supervisor import places

    try:
        with LocalWorld(start=start) as world, world.interruptible():
            gone = world.void()
            void = [*map(void_words, gone), *keeping.sweep(world.journal.records())]
            unreadable = [*world.journal.unreadable(), *places.orphans()]
            reports = recover_all(world, timeout_s=timeout_s)
    except errors.GpuckptError as e:
        fail("recover", as_json, e)

    def status(report: Report) -> int:
        code = report.error["code"] if report.error else ""
        return 128 + world.interruptions[-1] if code == "interrupted" else errors.by_code()[code].exit_code

    failed = [r for r in reports if not r.ok]
    worst = max(failed, key=lambda r: (status(r) == 3, status(r)), default=None)  # 3: one is not as it was found
    if as_json:
        whole = Report(
            "recover",
            not failed,
            world.simulated,
            tuple(p for r in reports for p in r.processes),
            sum(r.seconds for r in reports),
            warnings=(*void, *unreadable),
            already=not reports,
            error=worst.error if worst else None,
            details={"recovered": [r.details["recovered"] for r in reports]},
        )
        print_json(whole)
    else:
        for text in (*void, *unreadable):
            warn(text)
        for r in reports:
            click.echo(r.details["recovered"])
            if r.error:
                click.echo(f"  {r.error['message']}", err=True)
                if r.error["hint"]:
                    click.echo(f"  try: {r.error['hint']}", err=True)
                click.echo(f"  [{r.error['code']}] more: gpuckpt explain {r.error['code']}", err=True)
        if not reports:
            click.echo("nothing was left in the middle")
    finish(status(worst) if worst else 0)
