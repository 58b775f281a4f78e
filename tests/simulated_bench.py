"""A simulated machine for tests of the simulated driver itself: what a test starts on it, and its end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from gpuckpt.driver.simulated import SimulatedDevices, SimulatedDriver, SimulatedWorldDir

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Target:
    """A running simtarget."""

    def __init__(self, world: SimulatedWorldDir, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gpuckpt.driver.simtarget", *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, "GPUCKPT_SIMULATE": str(world.path)},
        )
        self.pid = self.process.pid
        self.ready = self.read()

    def send(self, command: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(command + "\n")

    def read(self) -> dict[str, Any]:
        assert self.process.stdout
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def ask(self, command: str) -> dict[str, Any]:
        self.send(command)
        return self.read()

    def stop(self) -> None:
        """SIGSTOP, and wait for it: a signal takes effect when its target is next scheduled."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def end(self) -> None:
        self.process.kill()
        for stream in (self.process.stdout, self.process.stderr, self.process.stdin):
            assert stream
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        self.process.wait()


class Caller:
    """Another process that waits for ``go()`` and then runs *code* with a ``driver``."""

    def __init__(self, world: SimulatedWorldDir, code: str) -> None:
        begin = f"from gpuckpt.driver.simulated import SimulatedDriver\ndriver = SimulatedDriver({str(world.path)!r})\nprint()\ninput()\n"
        self.process = subprocess.Popen(
            [sys.executable, "-c", begin + code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
        )
        assert self.process.stdout
        self.process.stdout.readline()
        self.process.stdout.close()

    def go(self) -> None:
        assert self.process.stdin
        self.process.stdin.write(b"\n")
        self.process.stdin.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin
        self.process.stdin.close()


class Bench:
    """A simulated machine of two GPUs, and what a test starts on it."""

    def __init__(self, path: Path) -> None:
        self.world = SimulatedWorldDir.create(path, gpus=2)
        self.driver = SimulatedDriver(path)
        self.devices = SimulatedDevices(path)
        self.uuids = [g.uuid for g in self.devices.gpus()]
        self.ends: list[Callable[[], object]] = []

    def target(self, *options: str) -> Target:
        made = Target(self.world, *options)
        self.ends.append(made.end)
        return made

    def caller(self, code: str) -> Caller:
        made = Caller(self.world, code)
        self.ends.append(made.kill)
        return made

    def until_begun(self, pid: int) -> None:
        while not self.world.peek().under_way(pid):
            time.sleep(0.002)

    def suspend(self, pid: int) -> None:
        self.driver.lock(pid, 10)
        self.driver.checkpoint(pid)

    def resume(self, pid: int, gpu_map: dict[str, str] | None = None) -> None:
        self.driver.restore(pid, gpu_map or {}, initialise=False)
        self.driver.unlock(pid)

    def used(self) -> list[int]:
        return [(g.total_bytes or 0) - (g.free_bytes or 0) for g in self.devices.gpus()]

    def set(self, **facts: Any) -> None:
        with self.world.transaction() as world:
            for gpu in world.rules.gpus.values():
                for name, value in facts.items():
                    setattr(gpu, name, value)

    def slow(self, seconds_per_gib: float) -> None:
        with self.world.transaction() as world:
            world.seconds_per_gib = seconds_per_gib

    def files(self) -> dict[str, int]:
        return {part: sum(p.is_file() for p in (self.world.path / part).rglob("*")) for part in ("gpu", "host", "calls")}

    def end(self) -> None:
        for end in self.ends:
            end()
