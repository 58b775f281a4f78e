"""A simulated machine: GPUs in a directory, real processes on them, and the real command line run against it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gpuckpt.driver.simulated_store import SimulatedWorldDir
from gpuckpt.model import GIB, Call, State
from tests import zygote

COMMAND = str(Path(sys.executable).parent / "gpuckpt")
SIMTARGET = [sys.executable, "-m", "gpuckpt.driver.simtarget"]
DEADLINE_S = 20.0
MEMINFO = "MemTotal: {} kB\nMemAvailable: {} kB\n"


def eventually(condition: Callable[[], Any], what: str, within_s: float = DEADLINE_S) -> Any:
    """The first true value of *condition*; fails with *what* if none comes."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if value := condition():
            return value
        time.sleep(0.005)
    pytest.fail(f"not within {within_s:.0f} s: {what}")


@dataclass
class Result:
    """How a command ended. ``document`` is its JSON, {} if it printed none."""

    code: int
    stdout: str
    stderr: str

    @property
    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.stdout) if self.stdout.startswith("{") else {}
        return found

    @property
    def error(self) -> dict[str, Any]:
        error = self.document.get("error")
        assert error is not None, f"no error in {self}"
        found: dict[str, Any] = error
        return found

    @property
    def states(self) -> dict[int, str]:
        return {p["pid"]: p["state"] for p in self.document["processes"]}


class Running:
    """A gpuckpt at work."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def signal(self, signum: int) -> None:
        self.process.send_signal(signum)

    def open_files(self) -> set[str]:
        found = set()
        for fd in Path(f"/proc/{self.process.pid}/fd").glob("*"):
            with contextlib.suppress(OSError):
                found.add(str(fd.readlink()))
        return found

    def end(self) -> Result:
        out, err = self.process.communicate(timeout=60)
        return Result(self.process.returncode, out, err)


class Target:
    """A program with simulated CUDA state. What it is asked waits until it runs, as CUDA calls do."""

    def __init__(self, world: SimulatedWorldDir, stdin: int, stdout: int) -> None:
        self._world, self._stdin, self._stdout, self._read = world, stdin, stdout, b""
        ready = self._line()
        self.pid: int = ready["pid"]
        self.sum: str = ready["sum"]
        self.children: list[int] = ready["children"]
        self.forked: list[int] = ready["forked"]
        self._pidfd = os.pidfd_open(self.pid)

    def ask(self, command: str) -> dict[str, Any]:
        self.tell(command)
        return self._line()

    def tell(self, command: str) -> None:
        """Ask, and leave the answer for later."""
        os.write(self._stdin, command.encode() + b"\n")

    def has_taken(self) -> bool:
        """Whether it has read all that it was told."""
        unread = bytearray(4)
        fcntl.ioctl(self._stdin, termios.FIONREAD, unread)
        return not any(unread)

    def unharmed(self) -> bool:
        """It runs, and computes on what it had."""
        return bool(self.ask("check")["sum"] == self.sum)

    def signal(self, signum: int) -> None:
        signal.pidfd_send_signal(self._pidfd, signum)

    def stop(self) -> None:
        self.signal(signal.SIGSTOP)
        eventually(lambda: _letter(self.pid) == "T", "the target stops")

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        eventually(lambda: _letter(self.pid) in ("", "Z"), "the target dies")

    @property
    def state(self) -> State:
        return self._world.peek().rules.processes[self.pid].state

    def under_way(self, call: Call) -> bool:
        return any(o.call == call for o in self._world.peek().under_way(self.pid))

    def close(self) -> None:
        self.kill()
        for fd in (self._pidfd, self._stdin, self._stdout):
            os.close(fd)

    def _line(self) -> dict[str, Any]:
        until = time.monotonic() + DEADLINE_S
        while b"\n" not in self._read:
            if not select.select([self._stdout], [], [], max(0.0, until - time.monotonic()))[0]:
                pytest.fail("the target does not answer")
            data = os.read(self._stdout, 65536)
            if not data:
                pytest.fail("the target ended by itself")
            self._read += data
        line, _, self._read = self._read.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found


@dataclass
class Machine:
    """Simulated GPUs, a journal and a ``/proc`` for host memory of its own. Real processes, which end with the test."""

    path: Path
    world: SimulatedWorldDir
    targets: list[Target] = field(default_factory=list)
    commands: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def state_dir(self) -> Path:
        return self.path / "state"

    @property
    def root(self) -> Path:
        return self.path / "sim/root"

    @property
    def environ(self) -> dict[str, str]:
        ours = {"GPUCKPT_SIMULATE": str(self.world.path), "GPUCKPT_STATE_DIR": str(self.state_dir)}
        return {**{k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}, **ours}

    @property
    def uuids(self) -> list[str]:
        return [g.uuid for g in sorted(self.world.peek().rules.gpus.values(), key=lambda g: g.index)]

    def target(self, *options: str) -> Target:
        """A program that shares neither ancestor nor session with any other."""
        return self.job(options)[0]

    def job(self, *programs: tuple[str, ...]) -> list[Target]:
        """Programs of one session, without a common ancestor."""
        return self.start(*((*SIMTARGET, *options) for options in programs))

    def start(self, *commands: tuple[str, ...], **environ: str) -> list[Target]:
        """*commands* that speak as a simtarget does, in one session and without a common ancestor."""
        pipes = [(os.pipe(), os.pipe()) for _ in commands]
        given = [fd for (stdin, _), (_, stdout) in pipes for fd in (stdin, stdout)]
        plain = all(command[:3] == tuple(SIMTARGET) and not any("<" in word for word in command) for command in commands)
        if plain and not environ and "LD_PRELOAD" not in self.environ:
            zygote.start_simtargets([list(command[3:]) for command in commands], given, self.environ)
        else:
            lines = []
            for command, ((stdin, _), (_, stdout)) in zip(commands, pipes, strict=True):
                lines.append(f"{' '.join(command)} </dev/fd/{stdin} >/dev/fd/{stdout} &")
            whole = {**self.environ, **environ}
            subprocess.run(["sh", "-c", "\n".join(lines)], check=True, pass_fds=given, start_new_session=True, env=whole)
        for fd in given:
            os.close(fd)
        made = [Target(self.world, stdin, stdout) for (_, stdin), (stdout, _) in pipes]
        self.targets += made
        return made

    def gpuckpt(self, *arguments: str | int, json: bool = True, **environ: str) -> Result:
        return self.begin(*arguments, json=json, **environ).end()

    def begin(self, *arguments: str | int, json: bool = True, prefix: tuple[str, ...] = (), **environ: str) -> Running:
        words = [*prefix, COMMAND, *map(str, arguments), *(["--json"] if json else [])]
        starts = prefix or any(name.startswith(("LD_", "PYTHON")) for name in environ)  # the loader and Python read these once
        process = (subprocess.Popen if starts else zygote.Popen)(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.path,
            env={**self.environ, **environ},
        )
        self.commands.append(process)
        return Running(process)

    def lay(self, files: dict[str, object]) -> None:
        """Write *files* below the machine's root."""
        for name, text in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(str(text))

    def host_memory(self, total_gib: float, available_gib: float) -> None:
        self.lay({"proc/meminfo": MEMINFO.format(int(total_gib * GIB) // 1024, int(available_gib * GIB) // 1024)})

    def gpu(self, index: int, **changes: Any) -> None:
        """Change a GPU: ``lost=True``, ``memory_query="fails"``, ``compute_mode="prohibited"``, ``mig=True``."""
        with self.world.transaction() as world:
            for name, value in changes.items():
                setattr(world.rules.gpus[self.uuids[index]], name, value)

    def slow(self, seconds_per_gib: float) -> None:
        """How long checkpoint and restore take from now on."""
        with self.world.transaction() as world:
            world.seconds_per_gib = seconds_per_gib

    def used(self, index: int = 0) -> int:
        with self.world.transaction() as world:
            return world.rules.used(self.uuids[index])

    def holds_gpu(self, index: int) -> bool:
        """Whether a gpuckpt holds the GPU for its resume."""
        path = self.world.path / f"gpu-{self.uuids[index]}.lock"
        if not path.exists():
            return False
        with open(path) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    @contextlib.contextmanager
    def slow_look(self) -> Iterator[None]:
        """Meanwhile nobody gets an answer from the simulated machine."""
        with open(self.world.path / "lock", "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextlib.contextmanager
    def in_call(self, target: Target) -> Iterator[None]:
        """Meanwhile *target* stands in a CUDA call: every other of its own waits for it, and a lock too."""
        with self.world._in_call(target.pid):
            yield

    def faults_left(self) -> int:
        return len(json.loads((self.world.path / "faults.json").read_text()))

    def kill_callers(self) -> None:
        """End what still makes driver calls here, with what it holds. Callers outlive their command by design."""
        killed = []
        for directory in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (directory / "comm").read_text().startswith("gpuckpt-") and (directory / "cwd").readlink() == self.path:
                    os.kill(int(directory.name), signal.SIGKILL)
                    killed.append(int(directory.name))
        eventually(lambda: all(_letter(pid) in ("", "Z") for pid in killed), "they end")

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(p.read_text()) for p in sorted((self.state_dir / "groups").glob("[!.]*.json"))]

    def rewrite(self, **changes: Any) -> None:
        """Change the one record of the journal."""
        (path,) = (self.state_dir / "groups").glob("[!.]*.json")
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    def audit(self) -> list[dict[str, Any]]:
        path = self.state_dir / "audit.log"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def close(self) -> None:
        for command in self.commands:
            if command.poll() is None:
                command.kill()
            command.communicate()
        self.kill_callers()
        for target in self.targets:
            target.close()


def make_machine(tmp_path: Path, gpus: int = 1) -> Iterator[Machine]:
    made = Machine(tmp_path, SimulatedWorldDir.create(tmp_path / "sim", gpus=gpus, gib=80))
    made.host_memory(512, 256)
    try:
        yield made
    finally:
        made.close()


def _letter(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
