"""`gpuckpt demo`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from gpuckpt import errors
from gpuckpt.cli.common import execute, json_option, timeout_option
from gpuckpt.model import Report
from gpuckpt.words import size


@click.command()
@click.option("--simulate", is_flag=True, help="On simulated GPUs, also where there is a real one.")
@click.option("--gib", type=click.FloatRange(0.1, 64), default=4.0, show_default=True, help="GPU memory that the target holds.")
@timeout_option()
@json_option
def demo(simulate: bool, gib: float, timeout_s: float | None, as_json: bool) -> None:
    """Half a minute that shows it all: starts a small program on the GPU, suspends it, shows the GPU free, resumes it, and checks
    that it computes the same. Without a GPU it runs on simulated ones, and says so.

    \b
    Examples:
      gpuckpt demo
      gpuckpt demo --simulate --json
    """
    execute("demo", as_json, lambda: play(simulate, gib, timeout_s, (lambda _: None) if as_json else click.echo), lambda _: None)


def play(simulate: bool, gib: float, timeout_s: float | None, say: Any) -> Report:
    """The demo; its report's ``details`` has what was seen at each step. Raises if anything is not as it should be."""
    begun = time.monotonic()
    with _stage(simulate, say) as simulated, _target(simulated, gib) as target:
        from gpuckpt import resume, suspend
        from gpuckpt.early import devices
        from gpuckpt.reporting import RETAINED_LEAST_BYTES

        listed = target.pid in devices().processes()  # a container's processes may not be, or by other numbers

        def used() -> int:
            if listed:
                return sum(nbytes or 0 for nbytes in devices().processes().get(target.pid, {}).values())
            more = _used_bytes() - target.used_before_bytes
            return more if more >= RETAINED_LEAST_BYTES else 0

        first, before = target.ask("check"), used()
        say(f"a program runs on the GPU: pid {target.pid} holds {size(before)}, its data sums to {first['sum'][:12]}")
        say(f"$ gpuckpt suspend {target.pid}")
        # Of this program we know that it shares no memory with whatever else our parents started.
        down = suspend(target.pid, timeout_s=timeout_s, tree=False, accept_loss=["possible-import"])
        during, image = used(), sum(p.host_bytes for p in down.processes)
        say(f"  suspended in {down.seconds:.1f} s: it holds {size(during)} on the GPU, {size(image)} in host memory, and is alive")
        say(f"$ gpuckpt resume {target.pid}")
        up = resume(target.pid, timeout_s=timeout_s, wait_s=30.0)
        second, after = target.ask("check"), used()
        same = first["sum"] == second["sum"]
        say(f"  resumed in {up.seconds:.1f} s: it holds {size(after)} again, and its data sums to {second['sum'][:12]}")
        say("the same as before: it never noticed" if same else "NOT the same as before")
    if during or not same:
        raise errors.GpuckptError(
            "the demo did not end as it should: " + ("GPU memory stayed taken" if during else "the program computes something else now"),
            hint="gpuckpt doctor, then report this with its output",
        )
    details = {
        "gpu_bytes": {"running": before, "suspended": during, "resumed": after},
        "host_bytes": image,
        "same_answer": same,
        "suspend_seconds": down.seconds,
        "resume_seconds": up.seconds,
    }
    return Report("demo", True, simulated, down.processes, time.monotonic() - begun, details=details)


class Target:
    """The program that is suspended: answers lines of JSON."""

    def __init__(self, command: list[str]) -> None:
        self.used_before_bytes = _used_bytes()
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
        self.pid = self._process.pid
        self.ready = self._answer()

    def ask(self, command: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._answer()

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise errors.GpuckptError("the demo's program ended by itself", hint="gpuckpt doctor")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _used_bytes() -> int:
    """On all GPUs, by whomever."""
    from gpuckpt.early import devices

    return sum(g.total_bytes - g.free_bytes for g in devices().gpus() if g.total_bytes and g.free_bytes is not None)


@contextmanager
def _target(simulated: bool, gib: float) -> Iterator[Target]:
    module = "gpuckpt.driver.simtarget" if simulated else "gpuckpt.driver.demotarget"
    target = Target([sys.executable, "-m", module, "--gib", str(gib)])
    try:
        yield target
    finally:
        target.end()


@contextmanager
def _stage(simulate: bool, say: Any) -> Iterator[bool]:
    """Real GPUs where there are any and nobody asked for simulated ones, else a simulated machine of its own."""
    from gpuckpt.early import devices

    if not simulate and not os.environ.get("GPUCKPT_SIMULATE"):
        try:
            gpus = devices().gpus()
            say(f"on this machine's {gpus[0].name} (driver {devices().version().package})")
            yield False
            return
        except (errors.GpuckptError, IndexError) as e:
            say(f"there is no usable GPU here ({getattr(e, 'message', 'none found')}): on simulated GPUs, everything else is real")
    else:
        say("on simulated GPUs, everything else is real")
    if os.environ.get("GPUCKPT_SIMULATE"):
        yield True
        return
    from gpuckpt.driver.simulated_store import SimulatedWorldDir

    with tempfile.TemporaryDirectory(prefix="gpuckpt-demo-") as directory:
        SimulatedWorldDir.create(Path(directory), gpus=1, gib=80, seconds_per_gib=0.25)
        os.environ.update(GPUCKPT_SIMULATE=directory, GPUCKPT_STATE_DIR=f"{directory}/state")
        try:
            yield True
        finally:
            del os.environ["GPUCKPT_SIMULATE"], os.environ["GPUCKPT_STATE_DIR"]
