"""Ctrl-C, SIGTERM and kill -9 at each step; calls that do not return."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from gpuckpt.driver.simulated_proc import now_s
from gpuckpt.model import Call, State
from tests.simulated_machine import eventually
from tests.test_cli_concurrent import held, waits_for

if TYPE_CHECKING:
    from tests.simulated_machine import Machine, Running, Target

SIGNALS = pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])


@SIGNALS
def test_while_it_waits_for_another(machine: Machine, signum: int, code: int) -> None:
    target = machine.target()
    with held(target):
        suspend = machine.begin("suspend", target.pid)
        eventually(lambda: waits_for(suspend, target), "it waits")
        suspend.signal(signum)
        result = suspend.end()
    assert (result.code, result.error["code"]) == (code, "interrupted")
    assert machine.records() == []


def begin_to_lock(machine: Machine, target: Target) -> Running:
    """A suspend that waits for a target which has a second of work left, however long the command took to come there."""

    def locking() -> bool:
        with machine.world.transaction() as world:
            if not world.under_way(target.pid):
                machine.world._call_path(target.pid).write_text(f"{now_s() + 1.0:.6f}")  # busy for a second from here on
                return False
            return True

    suspend = machine.begin("suspend", target.pid)
    eventually(locking, "the lock")
    return suspend


@SIGNALS
def test_while_it_locks(machine: Machine, signum: int, code: int) -> None:
    target = machine.target()
    suspend = begin_to_lock(machine, target)
    suspend.signal(signum)
    result = suspend.end()
    assert (result.code, result.error["code"], result.states) == (code, "interrupted", {target.pid: "running"})
    assert target.unharmed()
    assert machine.records() == []


@SIGNALS
def test_while_it_checkpoints(machine: Machine, signum: int, code: int) -> None:
    one, two = machine.target("--gib", "1"), machine.target("--gib", "4")
    machine.slow(0.2)
    suspend = machine.begin("suspend", one.pid, two.pid)
    eventually(lambda: two.under_way(Call.CHECKPOINT), "the checkpoint")
    suspend.signal(signum)
    result = suspend.end()
    assert (result.code, result.states) == (code, {one.pid: "running", two.pid: "running"})
    assert one.unharmed()
    assert two.unharmed()
    assert machine.records() == []
    assert machine.audit()[-1]["outcome"] == "interrupted"


@SIGNALS
def test_while_it_waits_for_room(machine: Machine, signum: int, code: int) -> None:
    target = machine.target("--gib", "50")
    machine.gpuckpt("suspend", target.pid)
    filler = machine.target("--gib", "50")
    resume = machine.begin("resume", target.pid, "--wait", "10m")
    eventually(lambda: machine.holds_gpu(0), "it looks for room")
    resume.signal(signum)
    result = resume.end()
    assert (result.code, result.error["code"]) == (code, "interrupted")
    assert machine.gpuckpt("is-suspended", target.pid).code == 0
    filler.kill()
    assert machine.gpuckpt("resume", target.pid).code == 0


@SIGNALS
def test_a_restore_under_way_is_finished(machine: Machine, signum: int, code: int) -> None:
    target = machine.target("--gib", "4")
    machine.gpuckpt("suspend", target.pid)
    machine.slow(0.2)
    resume = machine.begin("resume", target.pid)
    eventually(lambda: target.under_way(Call.RESTORE), "the restore")
    resume.signal(signum)
    result = resume.end()
    assert result.code in (0, code)
    assert result.states == {target.pid: "running"}
    assert target.unharmed()
    assert machine.records() == []


def test_the_second_ctrl_c_leaves_it(machine: Machine) -> None:
    target = machine.target("--gib", "4")
    machine.slow(1.0)
    suspend = machine.begin("suspend", target.pid)
    eventually(lambda: target.under_way(Call.CHECKPOINT), "the checkpoint")
    suspend.signal(2)
    suspend.signal(15)  # two of a kind may arrive as one
    result = suspend.end()
    assert (result.code, result.error["code"], result.states) == (3, "in-flight", {target.pid: "in-flight"})
    assert "gpuckpt recover" in result.error["hint"]
    assert "when it was interrupted a second time" in result.error["message"]
    assert "deadline" not in result.error["message"]
    assert target.under_way(Call.CHECKPOINT), "it did not wait for the driver"
    (row,) = machine.gpuckpt("status", target.pid).document["processes"]
    assert (row["state"], row["note"].split(" by ")[0]) == ("in-flight", "checkpoint")
    eventually(lambda: target.state is State.CHECKPOINTED, "the driver ends it")
    machine.slow(0.0)
    result = machine.gpuckpt("recover")
    assert (result.code, result.states) == (0, {target.pid: "running"})
    assert target.unharmed()
    assert machine.records() == []


@pytest.mark.parametrize(
    ("module", "words"),
    [("signal", ""), ("click", ""), ("gpuckpt.errors", ""), ("gpuckpt.cli.ps", "gpuckpt ps: interrupted; nothing was touched")],
)
def test_while_the_program_is_loaded(machine: Machine, module: str, words: str) -> None:
    """From our first line on: no trace of Python's, whatever is being imported just then."""
    script = f"""
import os, sys
class CtrlC:
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), 2)
sys.modules.pop("signal", None)
sys.meta_path.insert(0, CtrlC())
sys.argv = ["gpuckpt", "ps"]
from gpuckpt.cli.entry import main
main()
"""
    done = subprocess.run([sys.executable, "-c", script], env=machine.environ, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.splitlines()[:1] == ([words] if words else [])


def test_a_look_is_interrupted(machine: Machine) -> None:
    with machine.slow_look():
        look = machine.begin("ps")
        eventually(lambda: machine.world.path.joinpath("lock").as_posix() in look.open_files(), "it looks")
        look.signal(2)
        result = look.end()
    assert (result.code, result.error["code"]) == (130, "interrupted")


def test_stopped_while_it_is_locked(machine: Machine) -> None:
    """The driver ignores its timeout then: the caller is left alone, and unlocks when the process goes on."""
    target = machine.target()
    machine.world.add_fault("lock", delay_s=1.0)
    suspend = machine.begin("suspend", target.pid, "--timeout", "2s")
    eventually(lambda: machine.faults_left() == 0, "the lock begins")
    target.stop()
    result = suspend.end()
    assert (result.code, result.error["code"], result.error["step"]) == (3, "in-flight", "lock")
    assert result.states == {target.pid: "in-flight"}
    assert f"kill -CONT {target.pid}" in result.error["hint"]
    assert "by the deadline" in result.error["message"]
    for look in ("ps", "status"):
        (row,) = machine.gpuckpt(look).document["processes"]
        assert row["state"] == "in-flight"
        assert row["note"].startswith("lock by caller ")
    for command in ("suspend", "resume"):
        again = machine.gpuckpt(command, target.pid)
        assert (again.code, again.error["code"]) == (6, "stopped"), "at once, not after a deadline"
        assert again.document["seconds"] < 10
    target.signal(signal.SIGCONT)
    eventually(lambda: not target.under_way(Call.LOCK) and target.state is State.RUNNING, "it unlocks itself")
    assert target.unharmed()
    recovered = machine.gpuckpt("recover")
    assert (recovered.code, recovered.states) == (0, {target.pid: "running"})
    assert machine.records() == []
    assert machine.gpuckpt("suspend", target.pid).code == 0


def test_stopped_while_it_is_checkpointed(machine: Machine) -> None:
    target = machine.target("--gib", "2")
    machine.slow(0.5)
    suspend = machine.begin("suspend", target.pid, "--timeout", "2s")
    eventually(lambda: target.under_way(Call.CHECKPOINT), "the checkpoint")
    target.stop()
    result = suspend.end()
    assert (result.code, result.error["code"], result.error["step"]) == (3, "in-flight", "checkpoint")
    stuck = machine.gpuckpt("recover")
    assert (stuck.code, stuck.error["code"]) == (3, "in-flight")
    assert "undone" not in stuck.document["recovered"][0]
    target.signal(signal.SIGCONT)
    eventually(lambda: target.state is State.CHECKPOINTED, "the driver ends it")
    assert machine.gpuckpt("resume", target.pid).states == {target.pid: "running"}
    assert target.unharmed()
    assert machine.records() == []


def test_a_call_that_hangs(machine: Machine) -> None:
    """Exit 3: which pid, which step; the others are back."""
    one, two = machine.target(), machine.target()
    machine.world.add_fault("checkpoint", pid=two.pid, hang=True)
    result = machine.gpuckpt("suspend", one.pid, two.pid, "--timeout", "2s")
    assert (result.code, result.error["code"], result.error["pid"], result.error["step"]) == (3, "in-flight", two.pid, "checkpoint")
    assert result.states[one.pid] == "running"
    assert one.unharmed()


def test_a_state_that_hangs(machine: Machine) -> None:
    target = machine.target()
    machine.world.add_fault("state", hang=True, times=2)
    result = machine.gpuckpt("suspend", target.pid, "--timeout", "2s")
    assert (result.code, result.error["code"], result.error["pid"]) == (124, "concurrent-operation", target.pid)
    assert "does not answer" in result.error["message"]
    assert machine.gpuckpt("suspend", target.pid).code == 0


def test_kill_9_while_it_locks(machine: Machine) -> None:
    target = machine.target()
    suspend = begin_to_lock(machine, target)
    suspend.signal(9)
    suspend.end()
    eventually(lambda: not target.under_way(Call.LOCK) and target.state is State.RUNNING, "the caller undoes its lock")
    assert target.unharmed()
    (row,) = machine.gpuckpt("ps").document["processes"]
    assert "gpuckpt recover" in row["note"]
    result = machine.gpuckpt("recover")
    assert (result.code, result.states) == (0, {target.pid: "running"})
    assert "the suspend was undone" in result.document["recovered"][0]
    assert machine.records() == []


@pytest.mark.parametrize("then", ["recover", "suspend", "resume"])
def test_kill_9_while_it_checkpoints(machine: Machine, then: str) -> None:
    target = machine.target("--gib", "2")
    machine.slow(0.3)
    suspend = machine.begin("suspend", target.pid)
    eventually(lambda: target.under_way(Call.CHECKPOINT), "the checkpoint")
    suspend.signal(9)
    suspend.end()
    result = machine.gpuckpt(then, *([] if then == "recover" else [target.pid]))
    assert (result.code, result.states) == (0, {target.pid: "running" if then == "resume" else "suspended"})
    if then == "recover":
        assert "the suspend was finished" in result.document["recovered"][0]
    assert machine.gpuckpt("recover").document["already"] is True, "nothing more to do"
    if then != "resume":
        assert machine.gpuckpt("resume", target.pid).code == 0
    assert target.unharmed()
    assert machine.records() == []


def test_kill_9_with_a_part_of_the_group_down(machine: Machine) -> None:
    one, two = machine.target("--gib", "1"), machine.target("--gib", "1")
    machine.world.add_fault("checkpoint", pid=two.pid, hang=True)
    suspend = machine.begin("suspend", one.pid, two.pid)
    eventually(lambda: one.state is State.CHECKPOINTED, "one is down")
    suspend.signal(9)
    suspend.end()
    machine.kill_callers()
    result = machine.gpuckpt("recover")
    assert (result.code, result.states) == (0, {one.pid: "running", two.pid: "running"})
    assert one.unharmed()
    assert two.unharmed()


def test_a_caller_that_is_left_is_not_called_another_gpuckpt(machine: Machine) -> None:
    target = machine.target()
    machine.world.add_fault("checkpoint", hang=True)
    suspend = machine.begin("suspend", target.pid)
    eventually(lambda: machine.faults_left() == 0, "the checkpoint hangs")
    suspend.signal(9)
    suspend.end()
    for look in ("status", "ps"):
        (row,) = machine.gpuckpt(look).document["processes"]
        assert row["state"] == "in-flight"
        assert "a gpuckpt that has ended" in row["note"]
        assert "left in the middle (suspending)" in row["note"]
        assert "gpuckpt recover" in row["note"]
    machine.kill_callers()
    assert machine.gpuckpt("recover").states == {target.pid: "running"}
    assert target.unharmed()


@pytest.mark.parametrize("then", ["recover", "resume"])
def test_kill_9_while_it_restores(machine: Machine, then: str) -> None:
    target = machine.target("--gib", "2")
    machine.gpuckpt("suspend", target.pid)
    machine.slow(0.3)
    resume = machine.begin("resume", target.pid)
    eventually(lambda: target.under_way(Call.RESTORE), "the restore")
    resume.signal(9)
    resume.end()
    result = machine.gpuckpt(then, *([target.pid] if then == "resume" else []))
    assert (result.code, result.states) == (0, {target.pid: "running"})
    assert target.unharmed()
    assert machine.records() == []


@pytest.mark.parametrize(("command", "call", "state"), [("suspend", Call.CHECKPOINT, "suspended"), ("resume", Call.RESTORE, "running")])
def test_kill_9_of_a_caller(machine: Machine, command: str, call: Call, state: str) -> None:
    """The driver goes on with the call in the target, and gpuckpt waits for it there."""
    target = machine.target("--gib", "2")
    if command == "resume":
        machine.gpuckpt("suspend", target.pid)
    machine.slow(0.5)
    operation = machine.begin(command, target.pid)
    eventually(lambda: target.under_way(call), str(call))
    (under_way,) = machine.world.peek().under_way(target.pid)
    os.kill(under_way.owner_pid, signal.SIGKILL)
    result = operation.end()
    assert (result.code, result.states) == (0, {target.pid: state})
    assert "the driver completed the call" in result.document["warnings"][0]
