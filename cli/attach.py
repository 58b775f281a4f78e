"""`gpuckpt attach`."""

from __future__ import annotations

import dataclasses
import signal

import click

from gpuckpt import errors
from gpuckpt.cli import completing
from gpuckpt.cli.common import Duration, ask_run, fail, finish, json_option, print_json
from gpuckpt.inspect import processes

_LOOK_S = 1.0


@click.command()
@click.argument("name", metavar="NAME", shell_complete=completing.names)
@click.option(
    "--timeout", "timeout_s", type=Duration(), default="2m", show_default=True, metavar="DURATION", help="For the resume, and the suspend."
)
@json_option
def attach(name: str, timeout_s: float, as_json: bool) -> None:
    """Resume the run NAME, stay in the foreground, and suspend it on SIGTERM or Ctrl-C.

    For programs that start and stop servers by a command: to them the run starts in seconds and stops without losing anything.
    Exits 0 when it has suspended the run, 1 when the run ends.

    \b
    Examples:
      gpuckpt attach Qwen3-8B
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    try:
        resumed = ask_run(name, "resume", timeout_s=timeout_s)
        supervisor = processes.read(resumed.details["run"]["supervisor_pid"])
        click.echo(f"gpuckpt attach: {name} is awake", err=True)
        while signal.sigtimedwait((signal.SIGTERM, signal.SIGINT), _LOOK_S) is None:
            if supervisor is None or not processes.is_same(supervisor.id):  # it is not asked: that it does not answer now says little
                fail("attach", as_json, errors.RunNotReady(f"the run {name!r} has ended", hint="see what it logged"))
        report = dataclasses.replace(ask_run(name, "suspend", timeout_s=timeout_s), command="attach")
    except errors.GpuckptError as e:
        fail("attach", as_json, e)
    if as_json:
        print_json(report)
    finish(0)
