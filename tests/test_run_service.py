"""A run as a service: started again after failures, logged as JSON, known to systemd."""

from __future__ import annotations

import json
import os
import signal
import socket

from tests.conftest import eventually
from tests.serving import Stage, stage

__all__ = ["stage"]


def test_restart_on_failure(stage: Stage) -> None:
    run = stage.run("--restart", "on-failure", "--idle", "300ms").awake()
    port, child = run.port, run.child
    os.kill(child, signal.SIGKILL)
    eventually(lambda: run.child != child, "another is started")
    eventually(lambda: run.became("awake", 2), "it is up again")
    assert run.facts["listen"].endswith(f":{port}")
    assert run.complete(id=1).status == 200
    run.until("suspended")
    assert run.complete(id=2).status == 200
    run.signal(signal.SIGTERM)
    assert run.end() in (0, 143), "told to end, it is not started again"
    run.nothing_left()


def test_a_wrong_answer_restarts_the_run(stage: Stage) -> None:
    """Case 25: vllm-project/vllm#53888"""
    run = stage.run("--restart", "on-failure", "--probe", fake=("--forgets", "model")).awake().suspended()
    assert run.complete(id=1).status == 503
    eventually(lambda: run.became("awake", 2), "it is up again")
    assert run.complete(id=2).status == 200
    assert stage.gpuckpt("stop", "m").code == 0


def test_it_is_not_started_again_for_ever(stage: Stage) -> None:
    from gpuckpt.supervisor import supervise

    assert supervise.RESTARTS == 5
    run = stage.run("--restart", "on-failure", fake=("--no-such-option",))
    eventually(lambda: "started again in 2 s (2 of 5)" in run.stderr, "it was tried again, later")
    run.signal(signal.SIGTERM)
    assert run.end() == 2


def test_a_log_in_json(stage: Stage) -> None:
    run = stage.run("--log-format", "json")
    eventually(lambda: '"message": "awake"' in run.stderr, "it is awake")
    run.signal(signal.SIGTERM)
    assert run.end() == 0
    lines = [json.loads(line) for line in run.stderr.splitlines() if line.startswith("{")]
    assert {"time", "level", "run", "logger", "message"} == set(lines[0])
    assert {line["run"] for line in lines} == {"m"}


def test_systemd_is_told(stage: Stage) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
        s.bind(path := str(stage.runtime / "notify"))
        s.settimeout(20)
        run = stage.run(NOTIFY_SOCKET=path).awake().suspended()
        run.signal(signal.SIGTERM)
        run.end()
        told = []
        while not told or "STATUS=ended" not in told[-1]:
            told.append(s.recv(4096).decode())
    assert "READY=1" in next(t for t in told if "STATUS=awake" in t)
    assert sum("READY=1" in t for t in told) == 1
    assert any("STATUS=suspended" in t for t in told)
    assert any("STOPPING=1" in t and "EXTEND_TIMEOUT_USEC=" in t for t in told)
