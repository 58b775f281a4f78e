"""`gpuckpt exec`."""

from __future__ import annotations

import errno
import os
import signal
import sys
from typing import Any, NoReturn

import click

from gpuckpt.cli.common import CANNOT_RUN, FAILED, NOT_FOUND, Wrapper
from gpuckpt.cli.reserve import reserve_option, words_of


@click.command(cls=Wrapper, context_settings={"allow_interspersed_args": False})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND [ARGS]…")
@reserve_option
def exec(command: tuple[str, ...], reserve: int | None) -> None:  # noqa: A001
    """Become COMMAND, with the preload library loaded: its suspends take less time. Its children inherit it.

    The library does nothing but make the one large mapping of a checkpoint faster to get; GPUCKPT_PRELOAD=0 leaves it out. Whether it is
    on, or why not, is said on stderr once; COMMAND runs in either case.

    Exit status: that of COMMAND; 125 if gpuckpt itself fails, bad usage included; 126 if COMMAND cannot be run, 127 if it is not found.

    \b
    Examples:
      gpuckpt exec -- python train.py
      gpuckpt exec -- vllm serve MODEL
      gpuckpt exec --reserve 20GiB -- python train.py
    """
    from gpuckpt.image import preload

    why = preload.problem()
    environ = preload.environment()
    click.echo(f"gpuckpt exec: preload library {f'off: {why}' if why else 'on'}", err=True)
    if reserve is not None:
        environ = _with_reserve(environ, reserve, why)
    sys.stderr.flush()
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and what is ignored stays so
        signal.signal(signum, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, environ)  # noqa: S606
    except (FileNotFoundError, NotADirectoryError):
        if os.path.exists(command[0]):  # noqa: PTH110
            _fail(command[0], "its interpreter is not found", CANNOT_RUN)
        _fail(command[0], "not found", NOT_FOUND)
    except OSError as e:
        _fail(command[0], e.strerror, FAILED if e.errno in (errno.ENOMEM, errno.E2BIG) else CANNOT_RUN)


def _with_reserve(environ: dict[str, str], nbytes: int, why: str) -> dict[str, str]:
    from gpuckpt import follow
    from gpuckpt.image import reserve

    if why:
        click.echo("gpuckpt exec: --reserve does nothing without it", err=True)
        return environ
    click.echo(f"gpuckpt exec: {words_of(nbytes)} of host memory are kept ready in each process that uses a GPU", err=True)
    follow.start(nbytes or None)
    return reserve.environment(environ, auto=not nbytes)


def _fail(command: str, why: Any, code: int) -> NoReturn:
    click.echo(f"gpuckpt exec: {command}: {why}", err=True)
    sys.exit(code)
