"""Runs for the scripts here: `gpuckpt run -- vllm serve` (or the fake one), HTTP in which every read has a deadline, and an orderly end.

A script that uses it ends by itself: every wait has a deadline, the whole has one (``--limit``), what it starts writes to files and dies
with it, and each part that goes wrong is a failed check of its own, after which the next one begins.
"""

from __future__ import annotations

import argparse
import atexit
import faulthandler
import http.client
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab import HERE, OUT, SIMULATED, Results
from make_model import load_format

PROMPTS = [list(range(100, 140)), list(range(900, 1100)), [5, 6, 7]]
#: A program that fills what is free of the GPU, computes on it, and says how many MiB it had and the card has.
FILLER = """
import ctypes, time
l = ctypes.CDLL("libcuda.so.1"); c = ctypes.c_void_p(); free = ctypes.c_size_t(); total = ctypes.c_size_t(); p = ctypes.c_void_p()
assert l.cuInit(0) == 0 and l.cuDevicePrimaryCtxRetain(ctypes.byref(c), 0) == 0 and l.cuCtxSetCurrent(c) == 0
assert l.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
n = free.value - (512 << 20)
assert l.cuMemAlloc_v2(ctypes.byref(p), ctypes.c_size_t(n)) == 0
for k in range(20):
    assert l.cuMemsetD32_v2(p, k, ctypes.c_size_t(n // 4)) == 0 and l.cuCtxSynchronize() == 0
time.sleep(0.5)
print(n >> 20, total.value >> 20)
"""
SIMULATED_FILLER = (
    "import os, time\nfrom gpuckpt.driver.simulated_store import SimulatedWorldDir as W\nw = W(os.environ['GPUCKPT_SIMULATE'])\n"
    "w.register(os.getpid(), {sorted(w.peek().rules.gpus)[0]: 79 << 30})\ntime.sleep(0.5)\nprint(79 << 10, 80 << 10)\n"
)
started: list[Run] = []
programs: list[subprocess.Popen[bytes]] = []  # what else ends with the script
_begun = time.monotonic()
_limit_s = 0.0


class Late(Exception):
    """Something did not come in time."""


def arguments(description: str | None, models: int, counts: dict[str, int], limit_s: float) -> tuple[argparse.Namespace, list[str]]:
    """The command line: so many MODELs, an option for each of *counts*, ``--limit``; and what follows ``--``, which is vLLM's."""
    words = sys.argv[1:]
    extra = words[words.index("--") + 1 :] if "--" in words else []
    parser = argparse.ArgumentParser(description=description, epilog="What follows -- goes to vllm serve.")
    parser.add_argument("models", nargs=models, metavar="MODEL")
    for name, count in counts.items():
        parser.add_argument(f"--{name}", type=int, default=count, help=f"how many, if the time is enough (default {count})")
    parser.add_argument("--limit", type=float, default=limit_s, metavar="S", help=f"it ends within so many seconds (default {limit_s:.0f})")
    return parser.parse_args(words[: words.index("--")] if "--" in words else words), extra


def begin(limit_s: float) -> None:
    """From now on the script has *limit_s*. When they are over, or on SIGTERM, it ends, and with it all that it started."""
    global _limit_s  # noqa: PLW0603
    _limit_s = limit_s
    os.environ["GPUCKPT_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="gr-", dir="/tmp")
    atexit.register(kill_all)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGALRM, lambda *_: give_up())
    signal.alarm(max(1, int(limit_s) - 5))
    faulthandler.dump_traceback_later(limit_s, exit=True)  # should it hang where no signal reaches it: the runs die with it


def give_up() -> None:
    print(f"== not within {_limit_s:.0f} s", flush=True)
    for run in started:
        print(f"-- {run.name}: {run.tail()}", flush=True)
    sys.exit(1)


def left_s() -> float:
    """Until the script begins to end."""
    return _limit_s - 10 - (time.monotonic() - _begun)


def kill_all() -> None:
    """The death of a supervisor, even this one, ends its whole tree."""
    every = [*(run.process for run in started), *programs]
    for process in every:
        if process.poll() is None:
            process.kill()
    for process in every:
        process.wait(5)


def part(r: Results, name: str, needs_s: float, act: Callable[[], None]) -> bool:
    """One part of a script, by itself. False where it went wrong, which is a failed check, or was left out, which is noted."""
    ended = [f"{run.name} ended with {run.process.poll()}" for run in started if run.process.poll() is not None]
    why = "; ".join(ended) or (f"{left_s():.0f} s are left, it takes {needs_s:.0f}" if left_s() < needs_s else "")
    if why:
        r.note("left_out", {**r.document.get("left_out", {}), name: why})
        print(f"---- {name}: left out, {why}", flush=True)
        return False
    begun = time.monotonic()
    try:
        act()
    except Exception as e:  # noqa: BLE001 - the next part may be of use
        return r.check(f"{name}: went through", False, f"{type(e).__name__}: {e}")
    finally:
        r.note("part_s", {**r.document.get("part_s", {}), name: round(time.monotonic() - begun, 1)})
        for run in started:
            r.note(f"operations_{run.name}", run.operations())
            r.note(f"log_tail_{run.name}", run.tail(2000))
    return True


@dataclass(frozen=True)
class Answer:
    """What came of a streamed completion: *found* is the text and the logprobs of each prompt, or [status, body]."""

    found: Any
    first_byte_s: float
    seconds: float

    @property
    def ok(self) -> bool:
        return bool(self.found) and isinstance(self.found[0], list)


def salt() -> str:
    """A prompt with one of its own shares nothing in vLLM's prefix cache."""
    return str(time.monotonic_ns())


class Run:
    """One supervised vLLM."""

    def __init__(self, name: str, model: str, port: int, *options: str, vllm: list[str]) -> None:
        self.name, self.port = name, port
        serve = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model, *load_format(model), "--served-model-name", "m"]
        serve += ["--max-model-len", "4096", *vllm]
        if SIMULATED:
            serve = [sys.executable, str(HERE.parent / "fake_vllm.py"), "serve", model, "--log", str(OUT / f"fake_{name}.log"), *vllm]
        serve += ["--host", "127.0.0.1", "--port", str(port)]
        self.log = Path(OUT / f"run_{name}.log")
        words = ["gpuckpt", "run", "--name", name, "--adapter", "vllm", "--hold", "100s", *options, "--", *serve]
        with open(self.log, "w") as log:
            self.process = spawn(words, stdout=log, stderr=subprocess.STDOUT)
        self.begun = time.monotonic()
        started.append(self)

    def tail(self, nbytes: int = 2500) -> str:
        return self.log.read_text(errors="replace")[-nbytes:]

    def came_up(self, r: Results, within_s: float) -> None:
        """Wait until it serves. Raises :class:`Late`."""
        up = self.until("awake", "draining", "suspending", "suspended", within_s=within_s)
        r.note(f"start_{self.name}_s", round(time.monotonic() - self.begun, 1))
        lines = [x for x in self.log.read_text(errors="replace").splitlines() if re.search(r"\btook\b|\d s(ecs)?\b.*(graph|compil)", x)]
        r.note(f"start_{self.name}_log", [x[-160:] for x in lines][-20:])
        if not up:
            raise Late(f"{self.name} did not come up: {self.tail()}")

    def http(self, path: str, data: object = None, within_s: float = 60.0) -> tuple[int, Any, float]:
        """Status, answer, seconds. Raises :class:`Late`, also where bytes keep coming but no end."""
        begun = time.monotonic()
        status, body, _ = self._ask(path, data, within_s)
        words = body.decode()
        return status, json.loads(words) if words.startswith(("{", "[")) else words, round(time.monotonic() - begun, 3)

    def _ask(self, path: str, data: object, within_s: float) -> tuple[int, bytes, float]:
        """Status, body, and seconds until the first byte of the body."""
        begun = time.monotonic()
        body = json.dumps(data) if data is not None else None
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=within_s)
        try:
            connection.request("POST" if body is not None else "GET", path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text, first_s = b"", 0.0
            while piece := answer.read1(65536):
                first_s = first_s or time.monotonic() - begun
                text += piece
                if time.monotonic() - begun > within_s:
                    raise Late(f"{self.name} {path}: no end within {within_s:g} s")
        except TimeoutError as e:
            raise Late(f"{self.name} {path}: no answer within {within_s:g} s") from e
        finally:
            connection.close()
        return answer.status, text, first_s

    def state(self) -> str:
        """As the gate says it; asking wakes nothing."""
        try:
            return str(self.http("/awake", within_s=10)[1]["state"])
        except (OSError, http.client.HTTPException, TypeError, Late):
            return "no answer"

    def until(self, *states: str, within_s: float) -> bool:
        until = time.monotonic() + min(within_s, max(1.0, left_s()))
        while time.monotonic() < until:
            if self.state() in states:
                return True
            if self.process.poll() is not None:
                return False
            time.sleep(0.05)
        return False

    def suspended(self, within_s: float = 30.0) -> None:
        """Wait until it is. Raises :class:`Late`."""
        if not self.until("suspended", within_s=within_s):
            raise Late(f"{self.name} is {self.state()}, not suspended, after {within_s:g} s: {self.tail(400)}")

    def complete(self, within_s: float = 60.0, tokens: int = 64) -> Answer:
        """What greedy decoding of three prompts gives, streamed. One after the other, and without what the prefix cache knows of them: vLLM's last
        bits depend on what else is in a batch, and on what of a prompt was computed before."""
        found: list[Any] = []
        first_s, begun = 0.0, time.monotonic()
        for prompt in PROMPTS:
            body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": 1, "stream": True, "cache_salt": salt()}
            status, text, this_s = self._ask("/v1/completions", body, within_s)
            first_s = first_s or round(this_s, 4)
            if status != 200 or not text.rstrip().endswith(b"data: [DONE]"):
                return Answer([status, text.decode() if status != 200 else "cut short"], first_s, round(time.monotonic() - begun, 4))
            events = [json.loads(line[6:]) for line in text.decode().splitlines() if line.startswith("data: {")]
            choices = [c for e in events for c in e.get("choices", [{"text": str(e)}])]
            logprobs = [p for c in choices for p in (c.get("logprobs") or {}).get("token_logprobs", [])]
            found.append(["".join(c["text"] for c in choices), logprobs])
        return Answer(found, first_s, round(time.monotonic() - begun, 4))

    def reference(self, r: Results, times: int = 5) -> Answer:
        """What it answers, warm: the last of several; how long that takes is noted."""
        answers = [self.complete() for _ in range(times)]
        r.note(f"warm_first_byte_{self.name}_s", statistics.median(a.first_byte_s for a in answers[1:]))
        r.note(f"warm_answer_{self.name}_s", statistics.median(a.seconds for a in answers[1:]))
        r.check(f"{self.name} answers", answers[-1].ok, None if answers[-1].ok else answers[-1].found)
        r.check(f"{self.name} answers the same while it stays awake", all(a.found == answers[-1].found for a in answers[1:]))
        return answers[-1]

    def step_seconds(self) -> dict[str, float]:
        """What its suspends and resumes took so far, together: "resume whole", "resume restore" … -> seconds."""
        text = str(self.http("/metrics", within_s=10)[1])
        found = re.findall(r'^gpuckpt_operation_seconds_sum\{operation="(\w+)",step="([\w-]+)"\} (\S+)$', text, re.MULTILINE)
        return {f"{operation} {step}": float(value) for operation, step, value in found}

    def operations(self) -> list[str]:
        """What it logged of its suspends and resumes, with the seconds of each step."""
        lines = [x.partition(f"gpuckpt run {self.name}: ")[2] for x in self.log.read_text(errors="replace").splitlines()]
        return [x for x in lines if x.startswith(("suspend (", "resume ("))]

    def end(self, within_s: float = 60.0) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(within_s)


def spawn(words: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """A program that is killed when this script ends, however it does."""
    return subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *words], stdin=subprocess.DEVNULL, **options)


def lease(timeout_s: float = 60.0, *, trains: bool = False) -> tuple[subprocess.Popen[bytes], Path]:
    """Another program on the whole GPU, under a lease: one that writes to all of it, or *trains* on it; and the file that it writes to."""
    path = OUT / "lease.log"
    with open(path, "w") as file:
        script = ["-c", SIMULATED_FILLER] if SIMULATED else [str(HERE / "trainer.py")] if trains else ["-c", FILLER]
        words = ["gpuckpt", "lease", "--gpu", "0", "--timeout", f"{timeout_s:.0f}s", "--", sys.executable, *script]
        programs.append(spawn(words, stdout=file, stderr=subprocess.STDOUT))
    return programs[-1], path


def filled(program: subprocess.Popen[bytes], path: Path, within_s: float) -> tuple[bool, str]:
    """Whether the program under the lease had all but all of the GPU; and what it said."""
    try:
        code = program.wait(within_s)
    except subprocess.TimeoutExpired:
        program.kill()
        return False, f"no end within {within_s:g} s"
    said = path.read_text()[-500:]
    mib = [int(w) for w in said.split()[-2:] if w.isdecimal()]
    return code == 0 and len(mib) == 2 and mib[0] > 0.95 * mib[1], said
