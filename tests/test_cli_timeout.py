"""Every command ends in time, or when it is interrupted, also where a library beneath it hangs."""

from __future__ import annotations

import fcntl
import signal
import threading
from collections.abc import Iterator

import pytest

from gpuckpt import errors
from gpuckpt.cli.main import COMMANDS
from gpuckpt.driver.patient import Patient
from gpuckpt.driver.simulated import SimulatedDevices
from tests.simulated_machine import Machine, eventually


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


@pytest.mark.parametrize("words", [("suspend",), ("suspend", "--dry-run"), ("resume",), ("resume", "--dry-run")])
def test_nvml_that_hangs_before_anything_was_done(machine: Machine, words: tuple[str, ...]) -> None:
    target = machine.target()
    with machine.slow_look():
        seen = machine.gpuckpt(*words, target.pid, "--timeout", "500ms")
    assert (seen.code, seen.error["code"]) == (124, "deadline")
    assert "NVML" in seen.error["message"]
    assert target.unharmed()


def test_ctrl_c_while_nvml_hangs(machine: Machine) -> None:
    target = machine.target()
    with machine.slow_look():
        command = machine.begin("suspend", target.pid)
        eventually(lambda: str(machine.world.path / "lock") in command.open_files(), "it asks")
        command.signal(signal.SIGINT)
        ended = command.end()
    assert (ended.code, ended.error["code"]) == (130, "interrupted")
    assert target.unharmed()


class Hanging(SimulatedDevices):
    """Answers once ``let_go`` is set."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine.world.path)
        self.let_go = threading.Event()

    def gpus(self):  # type: ignore[no-untyped-def]
        self.let_go.wait()
        return super().gpus()


@pytest.fixture
def hanging(machine: Machine) -> Iterator[Hanging]:
    made = Hanging(machine)
    yield made
    made.let_go.set()


def test_what_hangs_is_asked_nothing_more_until_it_answers(hanging: Hanging) -> None:
    devices = Patient(hanging, within_s=0.05)
    with pytest.raises(errors.Deadline, match=r"within 0\.05 s"):
        devices.gpus()
    with pytest.raises(errors.Deadline, match="still does not answer"):
        devices.processes()
    hanging.let_go.set()
    eventually(lambda: not any(t.name == "gpuckpt-question" for t in threading.enumerate()), "it ends")
    assert len(devices.gpus()) == 1


def test_what_nvml_says_is_passed_on(machine: Machine) -> None:
    devices = Patient(SimulatedDevices(machine.world.path))
    assert devices.version() == SimulatedDevices(machine.world.path).version()
    with machine.world.transaction() as world:
        world.rules.driver = None
    with pytest.raises(errors.NoDriver):
        devices.processes()
