"""Commands that only look end in time also where a library beneath them hangs."""

from __future__ import annotations

import fcntl

import pytest

from gpuckpt.cli.main import COMMANDS
from tests.simulated_machine import Machine


@pytest.mark.parametrize("command", [("ps",), ("status",), ("is-suspended", 4242), ("doctor",)])
def test_a_look_gives_up(machine: Machine, command: tuple[str | int, ...]) -> None:
    with open(machine.world.path / "lock", "w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)  # every question to the simulated driver waits for this
        seen = machine.gpuckpt(*command, "--timeout", "500ms")
    assert seen.code == 124
    assert seen.document["error"]["code"] == "deadline"


@pytest.mark.parametrize("command", [c for c in COMMANDS if c not in ("completion", "env", "exec", "explain")])
def test_every_command_has_a_timeout_and_json(machine: Machine, command: str) -> None:
    words = machine.gpuckpt(command, "--help", json=False).stdout
    assert "--timeout DURATION" in words
    assert "--json" in words
