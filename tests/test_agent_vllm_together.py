"""vLLM servers whose data-parallel engines step together, as those of a mixture of experts do: all stand after one step, or none."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from gpuckpt.agent.client import Agents
from gpuckpt.inspect import processes
from gpuckpt.model import Call, State
from tests.conftest import eventually
from tests.test_agent_vllm import serve

if TYPE_CHECKING:
    from tests.conftest import Machine
    from tests.test_agent_vllm import Server

TOGETHER = ("-tp", "1", "-dp", "2", "--enable-expert-parallel")


def test_idle_engines_and_back(machine2: Machine) -> None:
    server = serve(machine2, *TOGETHER, method="spawn")
    reference = [server.ask(f"first-{i}", engine=i) for i in range(2)]
    for cycle in range(2):
        down = server.suspend()
        assert down.code == 0, down
        assert down.states == dict.fromkeys(server.workers, "suspended")
        assert [machine2.used(0), machine2.used(1)] == [0, 0]
        waiting = [server.send(f"while-suspended-{cycle}-{i}", engine=i) for i in range(2)]
        assert server.resume().code == 0
        assert [server.tokens(name) for name in waiting] == reference
        assert [server.ask(f"after-{cycle}-{i}", engine=i) for i in range(2)] == reference
