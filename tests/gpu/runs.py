"""Runs for the scripts here: `gpuckpt run -- vllm serve` (or the fake one), HTTP in which every read has a deadline, and an orderly end."""

from __future__ import annotations

import atexit
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lab import HERE, OUT, SIMULATED

PROMPTS = [list(range(100, 140)), list(range(900, 1100)), [5, 6, 7]]
started: list[Run] = []
programs: list[subprocess.Popen[str]] = []  # what else ends with the script
_begun = time.monotonic()
_limit_s = 0.0


class Late(Exception):
    """Something did not come in time."""


def begin(limit_s: float) -> None:
    """From now on the script has *limit_s*. When they are over, or on SIGTERM, it ends, and with it all that it started."""
    global _limit_s  # noqa: PLW0603
    _limit_s = limit_s
    os.environ["GPUCKPT_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="gr-", dir="/tmp")
    atexit.register(kill_all)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGALRM, lambda *_: give_up())
    signal.alarm(int(limit_s) + 5)


def give_up() -> None:
    print(f"== not within {_limit_s:.0f} s", flush=True)
    for run in started:
        print(f"-- {run.name}: {run.tail()}", flush=True)
    sys.exit(1)


def left_s() -> float:
    return _limit_s - (time.monotonic() - _begun)


def kill_all() -> None:
    """The death of a supervisor, even this one, ends its whole tree."""
    for run in started:
        if run.process.poll() is None:
            run.process.kill()
    for program in programs:
        if program.poll() is None:
            program.kill()
    for run in started:
        run.process.wait()


class Run:
    """One supervised vLLM."""

    def __init__(self, name: str, model: str, port: int, *options: str, vllm: list[str]) -> None:
        self.name, self.port = name, port
        serve = ["vllm", "serve", model, "--load-format", "dummy", "--served-model-name", "m", "--max-model-len", "4096", *vllm]
        if SIMULATED:
            serve = [sys.executable, str(HERE.parent / "fake_vllm.py"), "serve", model, "--log", str(OUT / f"fake_{name}.log"), *vllm]
        serve += ["--host", "127.0.0.1", "--port", str(port)]
        self.log = Path(OUT / f"run_{name}.log")
        words = ["gpuckpt", "run", "--name", name, "--adapter", "vllm", "--hold", "100s", *options, "--", *serve]
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, stdin=subprocess.DEVNULL)
        self.begun = time.monotonic()
        started.append(self)

    def tail(self, nbytes: int = 2500) -> str:
        return self.log.read_text(errors="replace")[-nbytes:]

    def http(self, path: str, data: object = None, within_s: float = 60.0) -> tuple[int, Any, float]:
        """Status, answer, seconds. Raises :class:`Late`, also where bytes keep coming but no end."""
        begun = time.monotonic()
        body = json.dumps(data) if data is not None else None
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=within_s)
        try:
            connection.request("POST" if body is not None else "GET", path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = b""
            while piece := answer.read1(65536):
                text += piece
                if time.monotonic() - begun > within_s:
                    raise Late(f"{self.name} {path}: no end within {within_s:g} s")
        except TimeoutError as e:
            raise Late(f"{self.name} {path}: no answer within {within_s:g} s") from e
        finally:
            connection.close()
        words = text.decode()
        return answer.status, json.loads(words) if words.startswith(("{", "[")) else words, round(time.monotonic() - begun, 3)

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

    def complete(self, within_s: float = 60.0, tokens: int = 64) -> tuple[Any, float]:
        """What greedy decoding of three prompts gives, text and logprobs, or [status, answer]; and the seconds it took."""
        body = {"model": "m", "prompt": PROMPTS, "max_tokens": tokens, "temperature": 0, "logprobs": 1}
        status, answer, seconds = self.http("/v1/completions", body, within_s)
        if status != 200:
            return [status, answer], seconds
        return [[c.get("text"), (c.get("logprobs") or {}).get("token_logprobs")] for c in answer["choices"]], seconds

    def operations(self) -> list[str]:
        """What it logged of its suspends and resumes, with the seconds of each step."""
        lines = [x.partition(f"gpuckpt run {self.name}: ")[2] for x in self.log.read_text(errors="replace").splitlines()]
        return [x for x in lines if x.startswith(("suspend (", "resume ("))]

    def end(self, within_s: float = 60.0) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(within_s)
