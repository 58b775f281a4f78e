"""`gpuckpt reserve`, and the option of `gpuckpt exec` and `gpuckpt run`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gpuckpt import errors
from gpuckpt.cli.common import Duration, Size, execute, json_option
from gpuckpt.model import Report
from gpuckpt.words import let_go, size

if TYPE_CHECKING:
    from gpuckpt.image.reserve import Reserve
    from gpuckpt.model import ProcessId

F = TypeVar("F", bound=Callable[..., object])
AUTO = 0  # as much as an image takes


class _Amount(Size):
    """A size, or "auto": 0. With *none*, "0" is 'none': -1."""

    def __init__(self, *, none: bool) -> None:
        self._none = none

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value).strip().lower()
        if text == "auto":
            return AUTO
        return -1 if self._none and text == "0" else super().convert(value, param, ctx)


def reserve_option(f: F) -> F:
    return click.option(
        "--reserve",
        type=_Amount(none=False),
        metavar="SIZE|auto",
        help="Have so much host memory ready for the first suspend too, in each process that uses a GPU; auto: as much as it takes. "
        "That memory is used from then on. [default: none]",
    )(f)


def words_of(nbytes: int) -> str:
    return size(nbytes) if nbytes else "as many bytes as an image takes"


@click.command()
@click.argument("target", metavar="TARGET")
@click.argument("amount", required=False, type=_Amount(none=True), metavar="[SIZE|auto|0]")
@click.option(
    "--timeout", "timeout_s", type=Duration(), default="5m", show_default=True, metavar="DURATION", help="Stop then, with what is ready."
)
@json_option
def reserve(target: str, amount: int | None, timeout_s: float, as_json: bool) -> None:
    """Have SIZE of host memory kept ready in each process of TARGET (a pid, or the name of a run) that uses a GPU; 0 gives it back.
    Without SIZE, tell what there is.

    It takes a program that was started by `gpuckpt exec --reserve` or `gpuckpt run --reserve`. "auto": what each holds on its GPUs now,
    and after a suspend, what that took. 1 GiB is left alone, of the machine's memory and by each cgroup: where that is reached, it stops.

    \b
    Examples:
      gpuckpt reserve 4242
      gpuckpt reserve 4242 20GiB
      gpuckpt reserve 4242 0
    """
    until = time.monotonic() + timeout_s

    def body() -> Report:
        try:
            return _reserve(target, amount, lambda: time.monotonic() < until)
        except KeyboardInterrupt:
            if amount is None:
                raise
            raise errors.Interrupted("interrupted; what is ready by now stays so", hint=f"gpuckpt reserve {target}") from None

    execute("reserve", as_json, body, _show)


def _reserve(target: str, amount: int | None, goes_on: Callable[[], bool]) -> Report:
    from gpuckpt import early
    from gpuckpt.image import reserve as it
    from gpuckpt.image.keeper import Unanswered
    from gpuckpt.image.page import Unavailable
    from gpuckpt.inspect import processes

    devices = early.devices(warm=amount == AUTO)
    rows, warnings, why = [], [], ""
    for process in _processes(target):
        try:
            now = it.look(process)
            if amount is not None:
                if halted := processes.halted(process):
                    words = f"pid {process} is {halted}, and would not answer; nothing was asked of it"
                    raise errors.Stopped(words, hint=let_go(halted, [process.pid]), pid=process.pid)
                nbytes = it.image_bytes(devices.processes().get(process.pid, {})) if amount == AUTO else max(0, amount)
                if amount == AUTO and not nbytes:
                    raise Unavailable(
                        f"what pid {process} holds on its GPUs cannot be seen from here, or it is suspended: give a size once it runs"
                    )
                outcome = it.order(process, nbytes, auto=amount == AUTO, goes_on=goes_on)
                if outcome.why:
                    warnings.append(f"pid {process}: {size(outcome.ready)} of {size(nbytes)} are ready: {outcome.why}")
                now = it.look(process)
            rows.append(_row(process, now))
        except (Unavailable, Unanswered) as error:
            why = why or str(error)
    if not rows:
        raise errors.NoPreload(
            f"no memory is kept ready in {target}: {why}; nothing was touched", hint="start it by `gpuckpt exec --reserve auto -- COMMAND`"
        )
    simulated = bool(os.environ.get("GPUCKPT_SIMULATE"))
    return Report("reserve", True, simulated, warnings=tuple(warnings), details={"reserved": rows})


def _row(process: ProcessId, now: Reserve) -> dict[str, Any]:
    return {
        "pid": process.pid,
        "reserved_bytes": now.ready,
        "wanted_bytes": now.wanted,
        "zeroed_bytes": now.ready - max(now.dirty, now.taken),
        "image_bytes": now.taken,
        "auto": now.auto,
    }


def _processes(target: str) -> list[ProcessId]:
    """Those that TARGET stands for, alive now. Raises :class:`gpuckpt.errors.NoProcess`, or ``Usage``."""
    from gpuckpt import follow
    from gpuckpt.cli.common import is_run, pids
    from gpuckpt.inspect import processes

    if is_run((target,)):
        return [p.id for p in processes.table().values() if processes.run_of(p.pid) == target]
    (pid,) = pids((target,))
    found = processes.read(pid)
    if found is None:
        raise errors.NoSuchProcess(f"there is no process {pid}", hint="gpuckpt ps", pid=pid)
    if os.geteuid() not in (0, owner := processes.uid_of(pid)):
        words = f"pid {pid} ({found.comm}) belongs to {processes.user_name(owner)}; nothing was touched"
        raise errors.PermissionDenied(words, hint=f"sudo gpuckpt reserve {pid}", pid=pid)
    return follow.family(found.id)


def _show(report: Report) -> None:
    for row in report.details["reserved"]:
        more = f", of {size(row['wanted_bytes'])} asked for" if row["wanted_bytes"] > row["reserved_bytes"] else ""
        used = f"; its image has {size(row['image_bytes'])} of it" if row["image_bytes"] else ""
        click.echo(f"pid {row['pid']}: {size(row['reserved_bytes'])} ready{more}{used}")
