"""A run for a test: the real ``gpuckpt run`` in front of the fake vLLM, on simulated GPUs, and a small HTTP client."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gpuckpt.inspect.processes import below
from tests import zygote
from tests.simulated_machine import COMMAND, Machine, Result, eventually, make_machine

FAKE = [sys.executable, str(Path(__file__).with_name("fake_vllm.py")), "serve", "model"]
PATIENCE_S = 30.0


def descendants(pid: int) -> list[int]:
    """The pid of every live process below *pid*, parents first."""
    return [p.pid for p in below(pid)]


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = self.json["error"]
        return found


class Client(threading.Thread):
    """A request under way. ``answer`` once it has come."""

    def __init__(self, serving: Serving, *arguments: Any, **options: Any) -> None:
        super().__init__(daemon=True)
        self._call = lambda: serving.request(*arguments, **options)
        self.answer: Answer | None = None
        self.problem: Exception | None = None
        self.ended = 0.0
        self.start()

    def run(self) -> None:
        try:
            self.answer = self._call()
        except Exception as e:
            self.problem = e
        self.ended = time.monotonic()

    def result(self) -> Answer:
        self.join(PATIENCE_S)
        assert self.answer is not None, f"no answer: {self.problem}"
        return self.answer


class Serving:
    """One ``gpuckpt run``."""

    def __init__(self, stage: Stage, name: str, options: tuple[str, ...], fake: tuple[str, ...], environ: dict[str, str]) -> None:
        self.stage, self.name = stage, name
        self.log = stage.machine.path / f"{name}.jsonl"
        self.stderr_path = stage.machine.path / f"{name}.{len(stage.started)}.stderr"
        command = [*FAKE, "--log", str(self.log), "--host", "127.0.0.1", "--port", "0", *fake]
        kind = () if "--upstream" in options else ("--adapter", "vllm")
        words = [COMMAND, "run", *kind, "--name", name, *options, "--", *command]
        with open(self.stderr_path, "w") as stderr:
            self.process = zygote.Popen(words, env={**stage.environ, **environ}, stdin=subprocess.DEVNULL, stderr=stderr)
        self.tree: list[int] = []
        self._asked = 0.0

    # What it is.

    @property
    def facts(self) -> dict[str, Any]:
        """Asked no more often than each 20 ms: it costs both sides."""
        time.sleep(max(0.0, self._asked + 0.02 - time.monotonic()))
        self._asked = time.monotonic()
        found: dict[str, Any] = self.ask("status")["run"]
        return found

    def ask(self, command: str, **options: Any) -> dict[str, Any]:
        """What its control socket answers: quicker than a command of its own."""
        with socket.socket(socket.AF_UNIX) as s:
            s.settimeout(PATIENCE_S)
            s.connect(str(self.stage.runtime / f"{self.name}.sock"))
            s.sendall(json.dumps({"schema": 1, "command": command, **options}).encode() + b"\n")
            answer: dict[str, Any] = json.loads(s.makefile("rb").readline())
            return answer

    def order(self, command: str) -> threading.Thread:
        """Ask for something that takes its time, and go on; the run may end before it answers."""

        def ask() -> None:
            with contextlib.suppress(OSError, ValueError):
                self.ask(command)

        made = threading.Thread(target=ask, daemon=True)
        made.start()
        return made

    @property
    def stderr(self) -> str:
        return self.stderr_path.read_text()

    @property
    def port(self) -> int:
        lines = [x for x in self.stderr.splitlines() if "listening on http://" in x]
        return int(lines[0].rpartition(":")[2]) if lines else 0

    @property
    def state(self) -> str:
        """As it logged it last: quicker than to ask."""
        prefix = f"gpuckpt run {self.name}: "
        known = ("awake", "draining", "suspending", "suspended", "resuming", "failed", "stopping", "ended")
        words = [x.removeprefix(prefix) for x in self.stderr.splitlines() if x.startswith(prefix)]
        return next((w for w in reversed(words) if w in known), "starting")

    def became(self, state: str, times: int = 1) -> int:
        return self.stderr.count(f"gpuckpt run {self.name}: {state}\n") >= times

    def until(self, state: str, within_s: float = PATIENCE_S) -> None:
        eventually(lambda: self.state == state or self.process.poll() is not None, f"{self.name} is {state}", within_s)
        assert self.state == state, self.stderr

    def awake(self) -> Serving:
        eventually(lambda: self.port or self.process.poll() is not None, "the gate listens", PATIENCE_S)
        self.until("awake")
        self.tree = descendants(self.process.pid)
        return self

    def notes(self, what: str) -> list[dict[str, Any]]:
        """What the fake did."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [n for n in map(json.loads, lines) if n["what"] == what]

    @property
    def child(self) -> int:
        ready: int = eventually(lambda: self.notes("ready"), "the server is up", PATIENCE_S)[-1]["pid"]
        return ready

    # What is asked of it.

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, timeout_s: float = PATIENCE_S
    ) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        try:
            connection.putrequest(method, path, skip_accept_encoding=True)
            for k, v in {**({"Content-Length": str(len(data))} if data is not None else {}), **(headers or {})}.items():
                connection.putheader(k, v)
            connection.endheaders(data)
            answer = connection.getresponse()
            return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        return self.request("GET", path, headers=headers)

    def complete(self, headers: dict[str, str] | None = None, **body: Any) -> Answer:
        return self.request("POST", "/v1/completions", body, headers)

    def complete_when_it_listens(self, **body: Any) -> Answer:
        eventually(lambda: self.port or self.process.poll() is not None, "the gate listens", PATIENCE_S)
        return self.complete(**body)

    def set(self, **options: Any) -> None:
        """Of the fake, from now on; ``status`` is path -> status."""
        assert self.complete(set=options).status == 200

    def begin(self, headers: dict[str, str] | None = None, **body: Any) -> Client:
        """A completion, and no waiting for it."""
        return Client(self, "POST", "/v1/completions", body, headers)

    def dial(self, text: str | bytes) -> socket.socket:
        """Raw bytes on a connection of their own."""
        s = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)
        s.sendall(text.encode() if isinstance(text, str) else text)
        return s

    def suspended(self) -> Serving:
        answer = self.ask("suspend")
        assert answer["ok"], answer["error"]
        return self

    def signal(self, signum: int) -> None:
        self.process.send_signal(signum)

    def end(self) -> int:
        return self.process.wait(PATIENCE_S)

    def nothing_left(self) -> None:
        """Of its tree, nor on the GPUs."""
        eventually(lambda: not any(alive(p) for p in self.tree), f"nothing of {self.tree} is left")
        assert self.stage.machine.used() == 0

    def close(self) -> None:
        doomed = descendants(self.process.pid)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pid in {*doomed, *self.tree}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@dataclass
class Stage:
    """A simulated machine on which runs can be started."""

    machine: Machine
    runtime: Path
    started: list[Serving] = field(default_factory=list)

    @property
    def environ(self) -> dict[str, str]:
        # aiohttp reads every certificate of the machine when it is imported, and here nobody speaks TLS.
        ours = {"GPUCKPT_RUNTIME_DIR": str(self.runtime), "SSL_CERT_FILE": os.devnull}
        return {**{k: v for k, v in self.machine.environ.items() if k != "VLLM_API_KEY"}, **ours}

    def run(self, *options: str, fake: tuple[str, ...] = (), name: str = "m", **environ: str) -> Serving:
        self.started.append(Serving(self, name, options, fake, environ))
        return self.started[-1]

    def gpuckpt(self, *arguments: str, json: bool = True) -> Result:
        return self.machine.gpuckpt(*arguments, json=json, GPUCKPT_RUNTIME_DIR=str(self.runtime))


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """One GPU, and a runtime directory with a path short enough for sockets."""
    yield from make_stage(tmp_path)


@pytest.fixture
def stage2(tmp_path: Path) -> Iterator[Stage]:
    """The same with two."""
    yield from make_stage(tmp_path, gpus=2)


def make_stage(tmp_path: Path, gpus: int = 1) -> Iterator[Stage]:
    runtime = Path(tempfile.mkdtemp(prefix="gr-", dir="/tmp"))
    machine = make_machine(tmp_path, gpus)
    with contextlib.closing(machine):
        made = Stage(next(machine), runtime)
        try:
            yield made
        finally:
            for serving in made.started:
                serving.close()
            shutil.rmtree(runtime, ignore_errors=True)


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as s:
        return str(s.getsockname()[1])


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
