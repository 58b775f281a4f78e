"""`gpuckpt lease`."""

from __future__ import annotations

import os
import shutil
import sys

import click

from gpuckpt import errors
from gpuckpt.cli import completing
from gpuckpt.cli.common import CANNOT_RUN, FAILED, NOT_FOUND, Duration, Wrapper, fail, within


@click.command(cls=Wrapper, context_settings={"allow_interspersed_args": False})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND [ARGS]...")
@click.option(
    "--gpu", "gpus", multiple=True, required=True, metavar="GPU", shell_complete=completing.gpus, help="Index or UUID. Repeatable."
)
@click.option(
    "--timeout",
    "timeout_s",
    type=Duration(),
    default="5m",
    show_default=True,
    metavar="DURATION",
    help="How long running requests may take to end; then nothing is started.",
)
@click.option("--json", "as_json", is_flag=True, help="If COMMAND is not started, say why as one JSON document on stdout.")
def lease(command: tuple[str, ...], gpus: tuple[str, ...], timeout_s: float, as_json: bool) -> None:
    """Run COMMAND with GPUs to itself: the runs on them are suspended, and come back when it has ended.

    Only runs of `gpuckpt run` by the same user are moved. Their running requests end first; new ones wait, up to their --hold. The
    lease ends with COMMAND, however that ends, and with all that inherited it. In Python: `with gpuckpt.lease(0): ...`.

    Exits as COMMAND does; 125 if gpuckpt itself fails, bad usage included; 126 if COMMAND cannot be run, 127 if it is not found.

    \b
    Examples:
      gpuckpt lease --gpu 0 -- python train.py
      gpuckpt lease --gpu 0 --gpu 1 --timeout 10m -- torchrun --nproc-per-node 2 train.py
    """
    from gpuckpt.supervisor.lease import Lease, uuids

    if shutil.which(command[0]) is None:
        missing = not os.path.exists(command[0])  # noqa: PTH110
        error = errors.CannotStart(f"{command[0]} cannot be run; nothing was touched", hint="check the command after --")
        fail("lease", as_json, error, status=NOT_FOUND if missing else CANNOT_RUN)
    try:
        with within(timeout_s, "lease", as_json, FAILED):
            chosen = uuids(gpus)
        taken = Lease(chosen, by=f"pid {os.getpid()} ({' '.join(command)[:60]}) has a lease", within_s=timeout_s)
    except errors.GpuckptError as e:
        fail("lease", as_json, e, status=FAILED)
    except KeyboardInterrupt:
        fail("lease", as_json, errors.Interrupted("interrupted; what had been suspended comes back"))
    click.echo(f"gpuckpt lease: suspended: {', '.join(taken.runs) or 'no run was there'}", err=True)
    sys.stderr.flush()
    taken.pass_on()
    try:
        os.execvp(command[0], command)  # noqa: S606 - the command that was typed, as it was typed
    except OSError as e:
        fail("lease", as_json, errors.CannotStart(f"{command[0]}: {e.strerror}"), status=CANNOT_RUN)
