"""Agents that cannot be reached: their program has no descriptor left, or their socket is gone."""

from __future__ import annotations

import resource
import shutil
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from gpuckpt.agent import client, protocol
from gpuckpt.agent.client import Agents
from gpuckpt.inspect import processes
from gpuckpt.model import State
from tests.simulated_machine import eventually
from tests.test_agent import job
from tests.test_agent_look import Double, Program

if TYPE_CHECKING:
    import pytest

    from tests.simulated_machine import Machine


def test_an_agent_without_a_descriptor_is_not_lost(machine4: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = job(machine4, 2)
    process = processes.read(ranks[0].pid)
    assert process is not None
    before = resource.prlimit(ranks[0].pid, resource.RLIMIT_NOFILE)
    resource.prlimit(ranks[0].pid, resource.RLIMIT_NOFILE, (3, before[1]))
    agents = Agents()
    with monkeypatch.context() as patch:
        patch.setattr(client, "HELLO_DEADLINE_S", 0.2)
        assert agents.hello(process.id) is None
    resource.prlimit(ranks[0].pid, resource.RLIMIT_NOFILE, before)
    hello = agents.hello(process.id)
    agents.close()
    assert hello is not None
    assert hello.stage is State.RUNNING
    assert machine4.gpuckpt("suspend", ranks[0].pid).code == 0
    assert machine4.gpuckpt("resume", ranks[0].pid).code == 0
    assert all(r.unharmed() for r in ranks)


def test_a_program_that_nobody_can_tell_to_go_on_is_not_called_running(machine4: Machine) -> None:
    """Its socket was swept away while it was suspended, and cannot be made anew. It is back on its GPU, and stands still."""
    ranks = job(machine4, 2)
    assert machine4.gpuckpt("suspend", ranks[0].pid).code == 0
    process = processes.read(ranks[1].pid)
    assert process is not None
    found = protocol.find(process.id, processes.uid_of(process.pid))
    assert found is not None
    found.unlink()
    found.mkdir()
    result = machine4.gpuckpt("resume", ranks[0].pid)
    assert (result.code, result.error["code"], result.error["pid"]) == (3, "in-flight", ranks[1].pid)
    for command in (("recover",), ("resume", ranks[0].pid)):
        again = machine4.gpuckpt(*command)
        assert again.code == 3, command
        assert f"kill -9 {ranks[1].pid}" in str(again.document)
        assert "a socket that was removed is made anew" in str(again.document)
    ranks[1].kill()
    machine4.gpuckpt("recover")
    assert not machine4.gpuckpt("recover").document["recovered"]
    (protocol.directory(processes.uid_of(ranks[0].pid)) / found.name).rmdir()


def test_an_agent_whose_socket_was_swept_away_makes_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its directory; where somebody else made that one, only once it is gone. Who has its connection keeps it."""
    monkeypatch.setattr(protocol, "FOUND_S", 0.02)
    path = tmp_path / "agents" / "agent.sock"
    path.parent.mkdir(0o700)
    program = Program(Double(), path)
    shutil.rmtree(path.parent)
    path.parent.symlink_to(tmp_path)
    assert program.hello()["result"] == "SUCCESS"
    assert not (tmp_path / "agent.sock").exists()
    path.parent.unlink()
    eventually(path.exists, "it is there again")
    assert path.stat().st_mode & 0o777 == 0o600
    second = socket.socket(socket.AF_UNIX)
    second.connect(str(path))
    link = client.Link(second)
    link.ask("hello")
    assert (link.wait_for_answer(time.monotonic() + 20) or {})["result"] == "SUCCESS"
    assert program.hello()["result"] == "SUCCESS"
    second.close()
    program.sock.close()
