"""An agent in a program that has no file descriptor left: it is heard again when there is one, and the program never notices."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

from gpuckpt.agent import client
from gpuckpt.agent.client import Agents
from gpuckpt.inspect import processes
from gpuckpt.model import State
from tests.test_agent import job

if TYPE_CHECKING:
    import pytest

    from tests.conftest import Machine


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
