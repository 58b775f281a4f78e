"""A suspend by the command line announces itself to a process that has the preload library, and no longer than its checkpoint lasts."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuckpt.image import preload
from gpuckpt.inspect import processes
from gpuckpt.model import Call, ProcessId
from tests.simulated_machine import Machine, Target, eventually


@pytest.fixture
def target(machine: Machine, image_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Target:
    """A program that has the library, and something by the name of libcuda."""
    with monkeypatch.context() as m:
        m.setenv("LD_PRELOAD", preload.environment({"LD_PRELOAD": str(image_folder / "libcuda.so.1")})["LD_PRELOAD"])
        return machine.target("--gib", "2")


def identity(target: Target) -> ProcessId:
    found = processes.read(target.pid)
    assert found is not None
    return found.id


def operation(target: Target) -> int:
    return preload.result(identity(target)).operation


def test_announced_while_the_checkpoint_lasts(machine: Machine, target: Target) -> None:
    assert operation(target) == 0
    machine.slow(1.0)
    running = machine.begin("suspend", target.pid)
    eventually(lambda: operation(target), "the announcement")
    assert target.under_way(Call.CHECKPOINT) or eventually(lambda: target.under_way(Call.CHECKPOINT), "the checkpoint")
    assert running.end().code == 0
    assert operation(target) == 0
    machine.slow(0.0)
    assert machine.gpuckpt("resume", target.pid).code == 0
    assert operation(target) == 0
    assert target.unharmed()


def test_a_caller_that_is_killed_leaves_nothing_that_matters(machine: Machine, target: Target) -> None:
    machine.slow(0.5)
    running = machine.begin("suspend", target.pid)
    first = eventually(lambda: operation(target), "the announcement")
    eventually(lambda: target.under_way(Call.CHECKPOINT), "the checkpoint")
    machine.kill_callers()
    running.end()
    assert operation(target) == first, "it expires by itself"
    machine.slow(0.0)
    machine.gpuckpt("recover")
    machine.gpuckpt("resume", target.pid)
    assert machine.gpuckpt("suspend", target.pid).code == 0
    assert operation(target) == 0
    assert machine.gpuckpt("resume", target.pid).code == 0
    assert target.unharmed()


def test_not_announced_where_it_is_not_wanted(machine: Machine, target: Target) -> None:
    machine.slow(0.3)
    running = machine.begin("suspend", target.pid, GPUCKPT_PRELOAD="0")
    eventually(lambda: target.under_way(Call.CHECKPOINT), "the checkpoint")
    assert operation(target) == 0
    assert running.end().code == 0
