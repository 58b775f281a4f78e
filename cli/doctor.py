"""``gpuckpt doctor``: says whether processes can be suspended on this machine, and what to type where not."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import time
from typing import TYPE_CHECKING

import click

from gpuckpt import doctor as examination
from gpuckpt.cli.common import look_timeout_option, print_json, within
from gpuckpt.errors import NoDriver, Refused
from gpuckpt.model import Report

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuckpt.driver.api import Devices

COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}


@click.command(
    "doctor",
    epilog="""\b
Examples:
  gpuckpt doctor            a table, with the command that mends each problem
  gpuckpt doctor --json     one document for programs
  gpuckpt doctor --json | jq '.checks[] | select(.status != "ok")'

Exit status: 0 if there is no problem (warnings may be there), 6 if there is one.
""",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table (default: the table).")
@look_timeout_option
def doctor(as_json: bool, timeout_s: float) -> None:
    """Say whether GPU processes can be suspended on this machine.

    Looks at the driver, the GPUs, permissions, containers and host memory, and changes nothing. Takes about a second:
    the speed of huge pages is measured with 256 MiB of host memory. NO_COLOR is obeyed.
    """
    with within(timeout_s, "doctor", as_json):
        status = run(_devices, as_json=as_json)
    sys.exit(status)


def run(
    devices: Callable[[], Devices],
    *,
    as_json: bool,
    examine: Callable[[Devices], list[examination.Check]] = examination.checks,
) -> int:
    """Examine, print, and return the exit status."""
    begin = time.monotonic()
    try:
        found_devices = devices()
    except NoDriver as error:
        found_devices = examination.Absent(error)
    found = examine(found_devices)
    ok = all(c.status != "problem" for c in found)
    if as_json:
        told = [{"name": c.name, "status": c.status, "message": c.message, "fix": c.fix} for c in found]
        seconds = round(time.monotonic() - begin, 3)
        print_json(Report("doctor", ok, found_devices.simulated, seconds=seconds, details={"checks": told}))
    else:
        click.echo(table(found, terminal=sys.stdout.isatty(), simulated=found_devices.simulated))
    return 0 if ok else Refused.exit_code


def table(found: list[examination.Check], *, terminal: bool, simulated: bool = False) -> str:
    """The checks as aligned text: wrapped on a terminal, one line each elsewhere; coloured on a terminal unless ``NO_COLOR`` is set."""
    colour = terminal and not os.environ.get("NO_COLOR")
    width = shutil.get_terminal_size().columns if terminal else None
    names = max((len(c.name) for c in found), default=0)
    indent = " " * (9 + names + 2)
    lines = ["GPUs are simulated"] if simulated else []
    for c in found:
        word = c.status.ljust(9)
        if colour:
            word = click.style(word, fg=COLOURS[c.status])
        message = _wrap(c.message, indent, width)
        lines.append(f"{word}{c.name.ljust(names)}  {message}")
        if c.fix:
            lines.append(f"{indent}fix: {_wrap(c.fix, indent + '     ', width)}")
    problems = sum(c.status == "problem" for c in found)
    warnings = sum(c.status == "warning" for c in found)
    lines.append(f"{_count(problems, 'problem')}, {_count(warnings, 'warning')}")
    return "\n".join(lines)


def _wrap(text: str, indent: str, width: int | None) -> str:
    if width is None or width < len(indent) + 20:
        return text
    room = width - len(indent)
    return f"\n{indent}".join(textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)) or text


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def _devices() -> Devices:
    from gpuckpt.early import devices

    return devices()
