"""A job of ranks for the scripts here, and the seconds that a script has: every step is told as it begins, and nothing outlives the budget."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab import FILLER, HERE, OUT, SIMULATED, Results, free_mib, used_mib

_ANSWER = ("ready", "pid", "forked", "children")  # what of an answer tells nothing of the GPU's content


class Budget:
    """*limit_s* seconds from the start of the script. At their end the results say at which step, what *look* sees is added, and
    everything in ``started`` is killed."""

    def __init__(self, results: Results, limit_s: float, look: Callable[[], object] = lambda: None) -> None:
        self.results, self.limit_s, self.look = results, limit_s, look
        self.begun = time.monotonic()
        self.started: list[subprocess.Popen[Any]] = []
        self.steps: list[list[Any]] = []
        timer = threading.Timer(limit_s, self._over)
        timer.daemon = True
        timer.start()

    def step(self, words: str) -> None:
        seconds = round(time.monotonic() - self.begun, 2)
        print(f"[{seconds:7.2f} s] {words}", flush=True)
        self.steps.append([seconds, words])
        self.results.note("timeline", self.steps)

    def left(self, keep_s: float = 0.0) -> float:
        """Seconds, less *keep_s* for what comes later; never less than one."""
        return max(1.0, self.begun + self.limit_s - keep_s - time.monotonic())

    def allows(self, seconds: float) -> bool:
        return self.begun + self.limit_s - time.monotonic() > seconds

    def end(self) -> None:
        for p in self.started:
            kill(p)
        for p in self.started:
            p.wait(10)

    def _over(self) -> None:
        try:
            self.step(f"the budget of {self.limit_s:g} s is used up")
            self.results.check(f"ended within {self.limit_s:g} s", False, [self.steps[-2:-1], self.look()])
        finally:
            for p in self.started:
                kill(p)
            os._exit(1)


def kill(p: subprocess.Popen[Any]) -> None:
    """End *p*, and its whole session if it leads one."""
    try:
        if os.getsid(p.pid) == p.pid:
            os.killpg(p.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # a server that ended may have left workers, of which nothing is known by now
    p.kill()


class Asking(threading.Thread):
    """A request on its own; ``answer`` is what came, or the words of what went wrong."""

    def __init__(self, ask: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self.ask, self.seconds = ask, 0.0
        self.answer: Any = None
        self.start()

    def run(self) -> None:
        begun = time.monotonic()
        try:
            self.answer = self.ask()
        except Exception as e:  # noqa: BLE001 - whatever it is, it is the answer
            self.answer = f"{type(e).__name__}: {e}"
        self.seconds = round(time.monotonic() - begun, 2)


def fill(gpus: tuple[int, ...], started: list[subprocess.Popen[Any]]) -> list[Any]:
    """Another process on each GPU at once: MiB that it wrote, and MiB of the GPU; or what it said instead."""

    def begin(*words: str) -> subprocess.Popen[str]:
        p = subprocess.Popen([sys.executable, "-c", *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        started.append(p)
        return p

    if SIMULATED:
        code = "from gpuckpt.driver.simtarget import main; import sys; sys.exit(main(['--gpu', sys.argv[1], '--gib', '79']))"
        running = [begin(code, str(g)) for g in gpus]
        return [[79 << 10, 80 << 10] if "ready" in p.communicate(timeout=60)[0] else p.returncode for p in running]
    sizes = [free_mib(g) + used_mib(g) for g in gpus]
    running = [begin(FILLER, str(g)) for g in gpus]
    said = [p.communicate(timeout=90)[0].strip() for p in running]
    return [[int(s), size] if s.isdigit() else s[-300:] for s, size in zip(said, sizes, strict=True)]


def by_rank(document: dict[str, Any]) -> dict[str, list[float]]:
    """The seconds of each step's call on each process, in the order of their pids."""
    return {s["name"]: [s["seconds_by_pid"][pid] for pid in sorted(s["seconds_by_pid"], key=int)] for s in document.get("steps", [])}


def environment() -> dict[str, str]:
    """What ``gpuckpt env`` says, and a port for the ranks to meet at."""
    made = subprocess.run(["gpuckpt", "env", "--json"], capture_output=True, text=True, check=True, timeout=60)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    return {**json.loads(made.stdout)["environment"], "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ.get("MASTER_PORT", str(port))}


class Rank:
    """One rank, which answers commands; its stderr is in $OUT/NAME.rankN.log. With *preload* it is started by ``gpuckpt exec``."""

    def __init__(self, budget: Budget, rank: int, size: int, environ: dict[str, str], *, preload: bool = False) -> None:
        self.budget, self.log = budget, OUT / f"{budget.results.name}.rank{rank}.log"
        words = [sys.executable, str(HERE / "rank.py")]
        if SIMULATED:
            words = [sys.executable, "-m", "gpuckpt.driver.simtarget", "--gpu", str(rank), "--nccl-socket", "--agent", f"tp{environ['MASTER_PORT']}", str(rank), str(size)]
        words = [*(["gpuckpt", "exec", "--"] if preload else []), *words]
        env = {**os.environ, **environ, "RANK": str(rank), "WORLD_SIZE": str(size)}
        with self.log.open("wb") as log:
            self.p = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=env)
        budget.started.append(self.p)
        self.pid, self.received = self.p.pid, b""

    def send(self, command: str = "check") -> None:
        try:
            self.p.stdin.write(command.encode() + b"\n")  # type: ignore[union-attr]
            self.p.stdin.flush()  # type: ignore[union-attr]
        except BrokenPipeError:
            pass  # the next read says so

    def read(self, seconds: float = 600.0) -> dict[str, Any]:
        """Its next answer, or why there is none: {"silent_for_s"} or {"ended"}."""
        begun, out = time.monotonic(), self.p.stdout.fileno()  # type: ignore[union-attr]
        until = begun + min(seconds, self.budget.left(keep_s=3.0))
        while True:
            line, found, rest = self.received.partition(b"\n")
            if found:
                self.received = rest
                if line.startswith(b"{"):
                    return {k: v for k, v in json.loads(line).items() if k not in _ANSWER}
                continue
            if not select.select([out], [], [], max(0.0, until - time.monotonic()))[0]:
                return {"silent_for_s": round(time.monotonic() - begun, 1), "log": tail(self.log)}
            data = os.read(out, 65536)
            if not data:
                return {"ended": self.p.wait(10), "log": tail(self.log)}
            self.received += data


def ask(ranks: list[Rank], command: str = "check", seconds: float = 30.0) -> list[dict[str, Any]]:
    for x in ranks:
        x.send(command)
    return [x.read(seconds) for x in ranks]


def runs(first: list[dict[str, Any]]) -> bool:
    return all("sums" in f or (SIMULATED and "sum" in f) for f in first)


def tail(path: Path, n: int = 1500) -> str:
    try:
        return path.read_text(errors="replace")[-n:]
    except OSError:
        return ""


def steps(document: dict[str, Any]) -> dict[str, float]:
    """Seconds by step; what came several times is added up."""
    found: dict[str, float] = {}
    for s in document.get("steps", []):
        found[s["name"]] = round(found.get(s["name"], 0.0) + s["seconds"], 4)
    return found


def astray(document: dict[str, Any]) -> list[Any]:
    """Processes that are on several GPUs: a rank with a context on another one's keeps memory there, and its place in a restore."""
    on = [[p["pid"], [[g["uuid"], g["bytes_before"], g["bytes_after"]] for g in p["gpus"]]] for p in document.get("processes", [])]
    return [p for p in on if len(p[1]) > 1]
