"""What all commands share: durations, targets, `--json`, and the one place that turns errors into words and exit codes."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import click

from gpuckpt import asked, errors
from gpuckpt.cli import streams
from gpuckpt.errors import GpuckptError
from gpuckpt.model import Report

F = TypeVar("F", bound=Callable[..., Any])

#: What commands that exit as another program does exit with where that was not so: they fail, it cannot be run, it is not found.
FAILED, CANNOT_RUN, NOT_FOUND = 125, 126, 127
UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


#: Keys that the documents of some commands have beyond those of all, and what they are where the command failed.
ONLY_OF: dict[str, dict[str, Any]] = {
    "suspend": {"dry_run": False, "plan": None, "method": None},
    "resume": {"dry_run": False, "plan": None},
    "ps": {"gpus": []},
    "status": {"gpus": []},
    "is-suspended": {"gpus": [], "suspended": None},
    "recover": {"recovered": []},
    "doctor": {"checks": []},
    "env": {"environment": {}},
    "explain": {"failures": []},
    "run": {
        "dry_run": False,
        "name": None,
        "adapter": None,
        "command_line": None,
        "environment": None,
        "changes": None,
        "listen": None,
        "keep": None,
    },
    "stop": {},
    "reserve": {},
    "lease": {},
    "attach": {},
    "swap": {"out": None, "in": None},
    "demo": {"gpu_bytes": None, "host_bytes": None, "same_answer": None, "suspend_seconds": None, "resume_seconds": None},
}


class Duration(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic from click 8.4 on
    """``30s``, ``2m``, ``500ms``, ``1h``; a bare number is seconds; 0 is refused."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, int | float):
            return float(value)
        text = value.strip().lower()
        unit = next((u for u in ("ms", "s", "m", "h") if text.endswith(u)), "")
        try:
            seconds = float(text[: len(text) - len(unit)]) * (UNITS[unit] if unit else 1.0)
        except ValueError:
            self.fail(f"{value!r} is not a duration: write 30s, 2m or 500ms", param, ctx)
        if not asked.is_duration(seconds):
            self.fail(f"{value!r}: {asked.NO_DURATION}", param, ctx)
        return seconds


class Size(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """``64GiB``, ``64G``, ``500MB``; a bare number is bytes. G is GiB, GB is 10^9 bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"([0-9.]+) *([KMGT]?)(iB|B|)", str(value).strip(), re.IGNORECASE)
        try:
            number = float(match[1]) if match else -1.0
        except ValueError:
            number = -1.0
        if match is None or number <= 0:
            self.fail(f"{value!r} is not a size: write 64GiB or 500MB", param, ctx)
        base = 1000 if match[3].lower() == "b" and match[2] else 1024
        return int(number * base ** (" KMGT".index(match[2].upper() or " ")))


class Wrapper(click.Command):
    """A command that exits as another program does: what fails of itself, bad usage too, has a status that no program is expected to have,
    as with ``timeout`` or ``docker run``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as e:
            e.exit_code = FAILED  # type: ignore[misc]
            raise


def json_option(f: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, the same shape on failure.")(f)


def timeout_option(
    words: str = "Deadline for the whole command; when it passes everything goes back.", *, run: bool = False
) -> Callable[[F], F]:
    """*run*: the TARGET may be one."""
    default = f"60s and 2s for each GiB{'; of a run as long as it says how it is' if run else ''}"
    return click.option("--timeout", "timeout_s", type=Duration(), metavar="DURATION", help=f"{words} [default: {default}]")


def look_timeout_option(f: F) -> F:
    return click.option(
        "--timeout", "timeout_s", type=Duration(), metavar="DURATION", default="30s", show_default=True, help="Give up after this long."
    )(f)


@contextmanager
def within(timeout_s: float, command: str, as_json: bool, status: int | None = None) -> Iterator[None]:
    """End a command that only looks, with *status* if given, when *timeout_s* has passed, also where a driver library hangs and never comes
    back to Python."""
    hint = "the driver does not answer: see what nvidia-smi and dmesg say, or give a longer --timeout"
    error = errors.Deadline(f"no answer within {timeout_s:g} s; nothing was touched", hint=hint)
    timer = threading.Timer(timeout_s, fail, (command, as_json, error, status))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def pids(targets: Sequence[str]) -> list[int]:
    """The pids that TARGET words name. Raises :class:`gpuckpt.errors.Usage` for a word that is none."""
    found = []
    for t in targets:
        if not t.isascii() or not t.isdecimal() or int(t) == 0:
            raise errors.Usage(
                f"{t!r} is neither a pid nor the name of a run", hint=f"gpuckpt ps lists the processes that can be suspended; {_runs()}"
            )
        found.append(int(t))
    return found


def is_run(targets: Sequence[str]) -> bool:
    """Whether TARGET words stand for one run: a name, and nothing else. Raises :class:`gpuckpt.errors.Usage` for a name among others."""
    names = [t for t in targets if t and not t.isdigit()]
    if not names:
        return False
    from gpuckpt.supervisor import control

    found = [n for n in names if control.exists(n)]
    if found and len(targets) > 1:
        raise errors.Usage(f"{found[0]!r} is a run: name it alone", hint="one command for each run")
    return bool(found)


def refuse_for_run(name: str, command: str, **given: object) -> None:
    """Raise :class:`gpuckpt.errors.Usage` for an option of *command* that was given and is about pids: a run does as it was started."""
    option = next((f"--{o.replace('_', '-')}" for o, value in given.items() if value), "")
    if option:
        from gpuckpt.supervisor import places

        child = places.child_of(name) or "PID"
        raise errors.Usage(
            f"{option} takes pids: a {command} of the run {name!r} is done as it was started; nothing was touched",
            hint=f"gpuckpt {command} --dry-run {child}" if option == "--dry-run" else f"leave {option} out",
        )


def ask_run(name: str, command: str, *, timeout_s: float | None = None, quiet: bool = True, **options: Any) -> Report:
    """What the run *name* answers. Raises its error, and :class:`gpuckpt.errors.Usage` where there is no such run. Where it takes its time,
    and there is no deadline, what is waited for is said on stderr, unless *quiet*."""
    from gpuckpt.supervisor import control
    from gpuckpt.supervisor.operate import report_or_raise

    if not control.exists(name):
        raise errors.Usage(f"there is no run called {name!r}", hint=_runs())
    said = ""

    def tell(words: str) -> None:
        nonlocal said
        if words != said and not quiet:
            said = words
            click.echo(f"waiting for the run {name}: {words}", err=True)

    try:
        answer = control.ask(name, command, timeout_s=timeout_s, told=tell, **options)
    except KeyboardInterrupt:
        raise errors.Interrupted(
            f"interrupted; the run {name!r} goes on with the {command} that it was asked for", hint=f"gpuckpt status {name}"
        ) from None
    return report_or_raise(command, json.dumps(answer).encode())


def _runs() -> str:
    """Which runs there are, for who has named none of them."""
    from gpuckpt.supervisor import places

    names = places.running()
    return f"the runs of yours are {', '.join(names)}" if names else "no run of yours is there"


def show_run(report: Report) -> None:
    """A run for people."""
    r = report.details["run"]
    where = f", listens on {r['listen']}" if r["listen"] else ""
    click.echo(
        f"{r['state']}: run {r['name']} (pid {r['child_pid']}, supervisor {r['supervisor_pid']}) for {r['state_seconds']:.0f} s, "
        f"{r['requests_running']} requests running, {r['requests_waiting']} waiting{where}"
    )
    if r.get("cache") and r["state"] == "suspended":
        click.echo(f"  {r['cache']['words']}")
    if r.get("held_by"):
        click.echo(f"  kept off its GPU: {r['held_by']}")
    if r["last_error"]:
        click.echo(f"  last failure: {r['last_error']['message']} [{r['last_error']['code']}]")


def show_refusal(error: dict[str, Any], said: Sequence[str] = ()) -> None:
    """Why a dry run says no, for people; what was *said* before is not said again."""
    click.echo("would be refused" + ("" if error["message"] in said else f": {error['message']}"))
    if error["hint"] and error["message"] not in said:
        click.echo(f"  try: {error['hint']}")
    click.echo(f"  [{error['code']}] more: gpuckpt explain {error['code']}")


def execute(command: str, as_json: bool, body: Callable[[], Report], show: Callable[[Report], None]) -> NoReturn:
    """Run *body*, print its report (JSON, or with *show*), and exit as DESIGN says."""
    try:
        report = body()
    except GpuckptError as e:
        fail(command, as_json, e)
    if as_json:
        print_json(report)
    else:
        for w in report.warnings:
            warn(w)
        show(report)
    finish(0)


def fail(command: str, as_json: bool, error: GpuckptError, status: int | None = None) -> NoReturn:
    """Say *error* in words or as a document, with what it left behind, and exit with its code, or with *status*."""
    report = error.report or Report(command, False, bool(os.environ.get("GPUCKPT_SIMULATE")), error=error.as_dict())
    if as_json:
        print_json(report)
    else:
        for w in report.warnings:
            warn(w)
        click.echo(f"gpuckpt {command}: {error.message}", err=True)
        for note in getattr(error, "__notes__", ()):
            click.echo(f"  ({note})", err=True)
        for p in report.processes:
            click.echo(f"  pid {p.pid} ({p.name}): {p.state}", err=True)
        if error.hint:
            click.echo(f"  try: {error.hint}", err=True)
        click.echo(f"  [{error.code}] more: gpuckpt explain {error.code}", err=True)
    finish(errors.exit_code(error) if status is None else status)


def print_json(report: Report) -> None:
    document = report.as_dict()
    for key, value in ONLY_OF.get(report.command, {}).items():
        document.setdefault(key, value)
    click.echo(json.dumps(document))


def warn(text: str) -> None:
    click.echo(f"warning: {text}", err=True)


def finish(code: int) -> NoReturn:
    """Exit at once. What Python and the driver's libraries do at an orderly exit takes 20 ms and serves nobody here."""
    streams.settle()
    os._exit(code)
