"""A run as a service: started again after failures, logged as JSON, known to systemd."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading

from tests.conftest import COMMAND, eventually
from tests.serving import Stage, stage

__all__ = ["stage"]


def test_restart_on_failure_and_what_systemd_is_told(stage: Stage) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
        s.bind(path := str(stage.runtime / "notify"))
        told: list[str] = []

        def read() -> None:
            while not told or "STOPPING=1" not in told[-1]:
                told.append(s.recv(4096).decode())

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        run = stage.run("--restart", "on-failure", NOTIFY_SOCKET=path).awake()
        port, child = run.port, run.child
        os.kill(child, signal.SIGKILL)
        eventually(lambda: run.child != child, "another is started")
        eventually(lambda: run.became("awake", 2), "it is up again")
        assert run.facts["listen"].endswith(f":{port}")
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
