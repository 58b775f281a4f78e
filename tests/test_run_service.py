"""A run as a service: started again after failures, logged as JSON, known to systemd."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpuckpt.supervisor import notify
from gpuckpt.supervisor.model import RunState
from gpuckpt.supervisor.places import alive
from tests.serving import Stage, stage
from tests.simulated_machine import COMMAND, eventually

__all__ = ["stage"]

DOCUMENT = Path(__file__).parent.parent / "docs/vllm.md"


def test_restart_on_failure_and_what_systemd_is_told(stage: Stage) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
        s.bind(path := str(stage.runtime / "notify"))
        told: list[str] = []

        def read() -> None:
            while not told or "STOPPING=1" not in told[-1]:
                told.append(s.recv(4096).decode())

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        with socket.create_server(("", 0)) as free:
            port = free.getsockname()[1]
        run = stage.run("--restart", "on-failure", fake=("--host=", f"--port={port}"), NOTIFY_SOCKET=path).awake()
        child = run.child
        os.kill(child, signal.SIGKILL)
        eventually(lambda: run.child != child, "another is started")
        eventually(lambda: run.became("awake", 2), "it is up again")
        for address in ("127.0.0.1", "::1"):
            socket.create_connection((address, port), timeout=10).close()
        run.suspended()
        assert run.complete(id=2).status == 200
        run.signal(signal.SIGTERM)
        assert run.end() == 0, "told to end, it is not started again"
        reader.join(20)
    assert "READY=1" in next(t for t in told if "STATUS=awake" in t)
    assert any("is started again" in t for t in told)
    assert any("STATUS=suspended" in t for t in told)
    assert "STOPPING=1" in told[-1]
    assert "EXTEND_TIMEOUT_USEC=" in told[-1]


def test_systemd_is_told_again_while_something_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start may take longer than one message puts its timeout off."""
    told: list[str] = []
    monkeypatch.setattr(notify, "notify", told.append)
    parts: list[Any] = []
    run: Any = SimpleNamespace(state=RunState.STARTING, stand_by=parts.append)
    states = [RunState.STARTING, RunState.AWAKE, RunState.RESUMING, RunState.SUSPENDED, RunState.SUSPENDING]

    async def sleep(seconds: float) -> None:
        assert 2 * seconds < notify.EXTEND_S
        if not states:
            raise asyncio.CancelledError
        run.state = states.pop(0)

    monkeypatch.setattr(notify, "asyncio", SimpleNamespace(sleep=sleep))
    made = notify.Notifier(run)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(parts[0])
    assert [t.splitlines()[0] for t in told] == [f"STATUS={s}" for s in ("starting", "starting", "resuming", "suspending")]
    assert all(t.endswith(f"EXTEND_TIMEOUT_USEC={notify.EXTEND_S}000000") for t in told)
    made.changed(RunState.SUSPENDED)
    assert "READY=1" in told[-1], "it was adopted as it was, and serves"


def test_it_is_not_started_again_for_ever_and_logs_json(stage: Stage) -> None:
    from gpuckpt.supervisor import supervise

    assert supervise.RESTARTS == 5
    words = [COMMAND, "run", "--name", "m", "--restart", "on-failure", "--log-format", "json", "--", "sh", "-c", "exit 3"]
    with subprocess.Popen(words, env=stage.environ, stderr=subprocess.PIPE, text=True) as process:
        lines = []
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(json.loads(line))
            if "again in 2 s (2 of 5)" in line:
                process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 3
    assert {"time", "level", "run", "logger", "message"} == set(lines[0])
    assert {line["run"] for line in lines} == {"m"}
    assert [line["level"] for line in lines if "again in" in line["message"]] == ["warning", "warning"]


def test_it_answers_at_every_moment_from_one_life_to_the_next(stage: Stage) -> None:
    """Also while the old one closes, which a client that reads slowly makes last; there it can be told to end, and is not started again."""
    run = stage.run("--restart", "on-failure").awake()
    path, child = stage.runtime / "m.sock", run.child
    seen = set()
    os.kill(child, signal.SIGKILL)
    while not run.became("awake", 2):
        answer = ask(path, "status")
        seen.add(answer["run"]["state"] if answer["error"] is None else answer["error"]["message"].partition(",")[0])
        time.sleep(0.005)
    assert "the command ended with 137" in seen, seen
    assert ask(path, "status")["run"]["state"] == "awake"
    body = json.dumps({"stream": True, "chunks": 200_000})
    with run.dial(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}"):
        eventually(lambda: run.notes("begin")[-1]["path"] == "/v1/completions", "it is being answered")
        os.kill(run.child, signal.SIGKILL)
        eventually(lambda: ask(path, "status")["error"], "its life closes")
        assert ask(path, "stop")["ok"]
    assert run.end() == 137
    assert not run.became("awake", 3)


def test_stop_between_two_lives(stage: Stage) -> None:
    words = [COMMAND, "run", "--name", "m", "--restart", "on-failure", "--", "sh", "-c", "exit 3"]
    with subprocess.Popen(words, env=stage.environ, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "again in 2 s (2 of 5)" in line:
                break
        path = stage.runtime / "m.sock"
        eventually(lambda: alive(path), "it answers while it waits")
        assert ask(path, "status")["error"]["code"] == "run-not-ready"
        assert "ended with 3, and is started again" in ask(path, "suspend")["error"]["message"]
        assert not ask(path, "hold", gpus=None, by="x", within_s=1)["held"]
        assert ask(path, "stop")["ok"]
        assert "is started again" not in process.stderr.read()
        assert process.wait(30) == 3


def ask(path: Path, command: str, **options: Any) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX) as s:
        s.settimeout(30)
        s.connect(str(path))
        s.sendall(json.dumps({"schema": 1, "command": command, **options}).encode() + b"\n")
        answer: dict[str, Any] = json.loads(s.makefile("rb").readline())
        return answer


def test_metrics_are_those_of_the_documents(stage: Stage) -> None:
    run = stage.run().awake()
    assert run.suspended().complete(id=1).status == 200
    assert run.complete(drops=True).status == 502
    run.suspended()
    text = run.get("/metrics").body.decode()
    documented = re.findall(r"`(gpuckpt_\w+)(?:\{([\w,]+)\})?`", DOCUMENT.read_text(encoding="utf-8"))
    assert {name for name, _ in documented} == set(re.findall(r"^# TYPE (gpuckpt_\w+) ", text, re.MULTILINE))
    values = {k: float(v) for k, v in re.findall(r"^(gpuckpt_\S+) (\S+)$", text, re.MULTILINE)}
    for name, labels in documented:
        shown = next(k for k in values if re.fullmatch(rf"{name}(_sum)?(\{{.*)?", k))
        assert re.findall(r'(\w+)="', shown) == [x for x in labels.split(",") if x]
    assert values['gpuckpt_state{state="suspended"}'] == 1
    assert values['gpuckpt_resumes_total{reason="request"}'] == 1
    assert values['gpuckpt_operations_total{operation="suspend",outcome="done"}'] == 2
    assert values['gpuckpt_refused_requests_total{code="server-unreachable"}'] == 1
    assert values[f'gpuckpt_gpu_bytes{{gpu="{stage.machine.uuids[0]}"}}'] == 0
    assert values["gpuckpt_host_bytes"] >= 8 << 30
    steps = {step for operation, step in re.findall(r'seconds_sum\{operation="(\w+)",step="([\w-]+)"', text) if operation == "resume"}
    assert {"whole", "restore", "wake"} <= steps
    assert values["gpuckpt_requests_running"] == values["gpuckpt_requests_waiting"] == 0
