"""Real processes, real signals: the command killed, its callers killed, the targets stopped, at moments drawn from a seed.

Simulated GPUs, real everything else. After each round ``gpuckpt recover`` must leave both targets running or both suspended, and in
the end their GPU memory holds what it held.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from gpuckpt.driver.simulated import SimulatedWorldDir
from gpuckpt.model import State
from tests import zygote
from tests.simulated_machine import COMMAND

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROUNDS = 7
AS_FOUND = (1, 5, 6, 124, 130, 143, -signal.SIGINT, -signal.SIGTERM)  # the last two: before it had begun
CALLERS = tuple(f"gpuckpt-{call}"[:15] for call in ("lock", "checkpoint", "restore", "unlock"))
PATIENCE_S = 30.0


@dataclass
class Bench:
    """Two targets of one group on two simulated GPUs."""

    directory: Path
    targets: list[subprocess.Popen[str]]
    random: random.Random

    @property
    def environ(self) -> dict[str, str]:
        return {**os.environ, "GPUCKPT_SIMULATE": str(self.directory), "GPUCKPT_STATE_DIR": str(self.directory / "state")}

    @property
    def pids(self) -> list[str]:
        return [str(t.pid) for t in self.targets]

    def gpuckpt(self, *arguments: str) -> subprocess.Popen[str]:
        return zygote.Popen(
            [COMMAND, *arguments], cwd=self.directory, env=self.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def run(self, *arguments: str) -> tuple[int, dict[str, Any]]:
        command = self.gpuckpt(*arguments, "--json")
        out, err = command.communicate(timeout=PATIENCE_S)
        assert out, err
        return command.returncode, json.loads(out)

    def ask(self, command: str) -> list[str]:
        """The answers of both targets, which must be running."""
        for t in self.targets:
            assert t.stdin is not None
            t.stdin.write(command + "\n")
            t.stdin.flush()
        return [json.loads(t.stdout.readline())["sum"] for t in self.targets if t.stdout is not None]

    def states(self) -> list[State]:
        with SimulatedWorldDir(self.directory).transaction() as world:
            processes = [world.rules.processes[t.pid] for t in self.targets]
            assert not any(p.lost for p in processes), "a target is lost"
            return [p.state for p in processes]

    def ours(self, names: tuple[str, ...] = ("gpuckpt",)) -> list[int]:
        """Helpers and callers at work on this bench, by the names that they give themselves."""
        found = []
        for path in Path("/proc").iterdir():
            if path.name.isdecimal():
                try:
                    if (path / "comm").read_text().startswith(names) and (path / "cwd").readlink() == self.directory:
                        found.append(int(path.name))
                except OSError:
                    continue
        return found

    def let_end(self) -> None:
        """Everything that a round left behind ends by itself once the targets may go on."""
        for t in self.targets:
            t.send_signal(signal.SIGCONT)
        deadline = time.monotonic() + PATIENCE_S
        while left := self.ours():
            assert time.monotonic() < deadline, f"still there: {left}"
            time.sleep(0.02)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    directory = tmp_path / "gpus"
    SimulatedWorldDir.create(directory, gpus=2, seconds_per_gib=0.2)
    seed = int(os.environ.get("GPUCKPT_TEST_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"GPUCKPT_TEST_SEED={seed}")
    made = Bench(directory, [], random.Random(seed))
    for number in range(2):
        target = subprocess.Popen(
            [sys.executable, "-m", "gpuckpt.driver.simtarget", f"--gpu={number}"],
            env=made.environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        made.targets.append(target)
        assert target.stdout is not None
        assert json.loads(target.stdout.readline())["ready"]
    yield made
    for target in made.targets:
        target.kill()
        target.communicate()


def kill_command(bench: Bench, command: subprocess.Popen[str]) -> None:
    time.sleep(bench.random.uniform(0.1, 1.0))
    command.kill()


def kill_caller(bench: Bench, command: subprocess.Popen[str]) -> None:
    """A caller, and half the time the command with it."""
    wait = bench.random.uniform(0.0, 0.3)
    both = bench.random.random() < 0.5
    while command.poll() is None:
        if bench.ours(CALLERS):
            time.sleep(wait)
            if both:
                command.kill()
            for pid in bench.ours(CALLERS):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.005)


def stop_target(bench: Bench, command: subprocess.Popen[str]) -> None:
    """A target stands still for a while; half the time the command is killed meanwhile."""
    target = bench.random.choice(bench.targets)
    time.sleep(bench.random.uniform(0.1, 0.8))
    target.send_signal(signal.SIGSTOP)
    time.sleep(bench.random.uniform(0.05, 0.6))
    if bench.random.random() < 0.5:
        command.kill()
    target.send_signal(signal.SIGCONT)


def interrupt(bench: Bench, command: subprocess.Popen[str]) -> None:
    time.sleep(bench.random.uniform(0.1, 1.0))
    for _ in range(bench.random.choice([1, 1, 2])):
        command.send_signal(bench.random.choice([signal.SIGINT, signal.SIGTERM]))
        time.sleep(bench.random.uniform(0.0, 0.1))


@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize("disturb", [kill_command, kill_caller, stop_target, interrupt])
def test_rounds(bench: Bench, disturb: Callable[[Bench, subprocess.Popen[str]], None], part: int) -> None:
    sums = bench.ask("check")
    for number in range(ROUNDS):
        before = bench.states()
        assert before[0] is before[1]
        suspend = before[0] is State.RUNNING
        command = bench.gpuckpt(
            *(["suspend", "--accept-loss", "possible-import"] if suspend else ["resume"]), "--timeout", "3s", *bench.pids
        )
        disturb(bench, command)
        _, err = command.communicate(timeout=PATIENCE_S)
        bench.let_end()
        after = bench.states()
        print(f"round {number}: {'suspend' if suspend else 'resume'} exit {command.returncode}, {before} -> {after}\n{err}")
        if command.returncode == 0:
            assert after == [State.CHECKPOINTED if suspend else State.RUNNING] * 2
        elif command.returncode in AS_FOUND:
            assert after == before
        else:
            assert command.returncode in (3, -signal.SIGKILL)
        code, report = bench.run("recover")
        print(f"recover: exit {code}, {report['recovered']}, {bench.states()}")
        assert code == 0
        assert bench.states() in ([State.RUNNING] * 2, [State.CHECKPOINTED] * 2)
        if bench.states()[0] is State.RUNNING:
            assert bench.ask("check") == sums
            assert not list((bench.directory / "state" / "groups").glob("*.json"))
            sums = bench.ask("step")
    bench.let_end()
    code, _ = bench.run("resume", *bench.pids)
    assert code == 0
    assert bench.ask("check") == sums
    _, status = bench.run("status")
    assert {p["state"] for p in status["processes"]} == {"running"}
