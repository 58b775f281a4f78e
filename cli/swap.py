"""`gpuckpt swap`."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator

import click

from gpuckpt import errors
from gpuckpt.cli import completing
from gpuckpt.cli.common import Duration, ask_run, execute, is_run, json_option, pids
from gpuckpt.inspect import processes
from gpuckpt.model import Report


@click.command()
@click.argument("out", metavar="OUT", shell_complete=completing.targets)
@click.argument("in_", metavar="IN", shell_complete=completing.targets)
@click.option("--timeout", "timeout_s", type=Duration(), default="2m", show_default=True, metavar="DURATION", help="For each of the two.")
@json_option
def swap(out: str, in_: str, timeout_s: float, as_json: bool) -> None:
    """Suspend OUT, resume IN in its place. If IN cannot be resumed, OUT comes back.

    Each is the name of a run, or a pid. Requests for OUT wait until IN is awake, and may wake OUT again then.

    \b
    Examples:
      gpuckpt swap Qwen3-8B Llama-3.1-8B
      gpuckpt swap 4242 4343 --json
    """

    def body() -> Report:
        if out == in_:
            raise errors.Usage("OUT and IN are the same")
        begun = time.monotonic()
        _find(in_, timeout_s)  # before OUT, which is at work, is moved for nothing
        with _away(out, timeout_s) as come_back:
            try:
                report = _resume(in_, timeout_s)
            except errors.GpuckptError as e:
                try:
                    e.add_note(f"{out} is {come_back()}")
                except errors.GpuckptError as worse:
                    e.add_note(f"and {out} did not come back: {worse.message} (gpuckpt resume {out})")
                raise
        details = {"out": out, "in": in_, "run": report.details.get("run")}
        simulated = bool(os.environ.get("GPUCKPT_SIMULATE"))
        return Report("swap", True, simulated, report.processes, time.monotonic() - begun, report.steps, details=details)

    execute("swap", as_json, body, lambda r: click.echo(f"{out} is suspended, {in_} is awake: {r.seconds:.1f} s"))


def _find(target: str, timeout_s: float) -> None:
    """Raise where there is no such run, or process."""
    if is_run([target]):
        ask_run(target, "status", timeout_s=timeout_s)
    elif processes.read(pid := pids([target])[0]) is None:
        raise errors.NoSuchProcess(f"there is no process {pid}; nothing was touched", hint="gpuckpt ps", pid=pid)


@contextlib.contextmanager
def _away(target: str, timeout_s: float) -> Iterator[Callable[[], str]]:
    """*target* suspended. Yields what brings it back to how it was found, and says how that is."""
    if not is_run([target]):
        yield _suspend_pid(pids([target])[0], timeout_s)
        return
    from gpuckpt.supervisor.lease import Held

    until = time.monotonic() + timeout_s
    try:
        held = Held(target, None, f"pid {os.getpid()} swaps it out", timeout_s)
    except OSError as e:
        raise errors.Usage(f"no run called {target!r} answers ({e.strerror or e})", hint="is its gpuckpt run still alive?") from None
    held.answer(until)

    def come_back() -> str:
        held.release(back=True)
        answer = held.answer(time.monotonic() + timeout_s)
        return "suspended, as it was" if answer["already"] else "awake again"

    yield come_back
    held.release(back=False)
    held.socket.close()


def _suspend_pid(pid: int, timeout_s: float) -> Callable[[], str]:
    import gpuckpt

    report = gpuckpt.suspend(pid, timeout_s=timeout_s)

    def come_back() -> str:
        if report.already:
            return "suspended, as it was"
        gpuckpt.resume(pid, timeout_s=timeout_s)
        return "running again"

    return come_back


def _resume(target: str, timeout_s: float) -> Report:
    if is_run([target]):
        return ask_run(target, "resume", timeout_s=timeout_s)
    import gpuckpt

    return gpuckpt.resume(pids([target])[0], timeout_s=timeout_s)
