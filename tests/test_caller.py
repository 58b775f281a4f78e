"""Caller processes: both ways to start their helper, and what they hold on to."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from gpuckpt.driver import caller
from gpuckpt.driver.caller import Callers, Pending
from gpuckpt.driver.simulated import SimulatedWorldDir
from gpuckpt.inspect import processes
from gpuckpt.model import Call, ProcessId, State


@pytest.fixture
def world(tmp_path: Path) -> SimulatedWorldDir:
    return SimulatedWorldDir.create(tmp_path / "world")


@pytest.fixture
def target(world: SimulatedWorldDir):
    p = subprocess.Popen(
        [sys.executable, "-m", "gpuckpt.driver.simtarget"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "GPUCKPT_SIMULATE": str(world.path)},
    )
    assert p.stdout is not None
    p.stdout.readline()
    yield processes.read(p.pid).id
    p.kill()
    p.communicate()


@pytest.fixture(params=["forked", "spawned"])
def callers(request: pytest.FixtureRequest, world: SimulatedWorldDir, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gpuckpt.driver.forked.possible", lambda: request.param == "forked")
    made = Callers(f"simulated:{world.path}")
    yield made
    made.close()


def outcome(callers: Callers, pending: Pending, seconds: float = 10.0):
    until = time.monotonic() + seconds
    while pending.outcome is None and time.monotonic() < until:
        callers.wait([pending], until)
    return pending.outcome


def ended(condition, seconds: float = 10.0) -> bool:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def state(callers: Callers, target: ProcessId) -> State | None:
    return outcome(callers, callers.start(None, target)).state


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_lock_is_kept_and_undone(callers: Callers, target: ProcessId) -> None:
    lock = callers.start(Call.LOCK, target, timeout_s=5)
    assert outcome(callers, lock).ok
    lock.keep()
    assert ended(lambda: processes.read(lock.caller_pid) is None)
    assert state(callers, target) is State.LOCKED
    assert outcome(callers, callers.start(Call.UNLOCK, target)).ok
    assert state(callers, target) is State.RUNNING


def test_a_released_lock_undoes_itself(callers: Callers, target: ProcessId) -> None:
    lock = callers.start(Call.LOCK, target, timeout_s=5)
    assert outcome(callers, lock).ok
    lock.release()
    assert ended(lambda: state(callers, target) is State.RUNNING)


def test_a_call_on_another_process_under_the_same_pid_is_not_made(callers: Callers, target: ProcessId) -> None:
    successor = ProcessId(target.pid, target.start_ticks + 1)
    assert outcome(callers, callers.start(Call.LOCK, successor, timeout_s=5)).result == "STALE"
    assert state(callers, successor) is State.GONE
    assert state(callers, target) is State.RUNNING


def test_a_lock_that_went_to_a_successor_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pid was somebody else's by the time the driver locked it."""
    answers = iter([True, False])
    monkeypatch.setattr(processes, "is_same", lambda _: next(answers))
    monkeypatch.setattr("gpuckpt.driver.forked.named", lambda _: None)
    backend = Mock()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        caller._serve({"call": "lock", "pid": 7, "start_ticks": 1, "timeout_s": 1.0}, theirs, backend, None)
        assert json.loads(ours.recv(1 << 16))["result"] == "STALE"
    assert [c[0] for c in backend.method_calls] == ["lock", "unlock"]


def test_a_signal_goes_to_a_process_and_not_to_its_successor() -> None:
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        me = processes.read(sleeper.pid).id
        assert not processes.send(ProcessId(me.pid, me.start_ticks + 1), signal.SIGKILL)
        assert sleeper.poll() is None
        assert processes.send(me, signal.SIGKILL)
        assert sleeper.wait(10) == -signal.SIGKILL
    assert not processes.send(me, signal.SIGKILL)


def test_a_killed_caller_has_vanished_and_a_dead_helper_is_replaced(callers: Callers, target: ProcessId, world: SimulatedWorldDir) -> None:
    world.add_fault("lock", hang=True)
    lock = callers.start(Call.LOCK, target, timeout_s=5)
    os.kill(lock.caller_pid, signal.SIGKILL)
    assert outcome(callers, lock).result == "VANISHED"
    os.kill(callers._helper_pid, signal.SIGKILL)
    assert state(callers, target) is State.RUNNING


def test_a_claim_lives_as_long_as_the_call(callers: Callers, target: ProcessId, world: SimulatedWorldDir, tmp_path: Path) -> None:
    world.add_fault("checkpoint", delay_s=0.5)
    ours, theirs = (os.open(tmp_path, os.O_RDONLY) for _ in range(2))
    fcntl.flock(ours, fcntl.LOCK_EX)
    lock = callers.start(Call.LOCK, target, timeout_s=5)
    assert outcome(callers, lock).ok
    lock.keep()
    pending = callers.start(Call.CHECKPOINT, target, claims=[ours])
    os.close(ours)
    with pytest.raises(BlockingIOError):
        fcntl.flock(theirs, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert outcome(callers, pending).ok
    fcntl.flock(theirs, fcntl.LOCK_EX)  # comes as soon as the caller has gone
    os.close(theirs)


def test_a_forked_helper_holds_nothing_of_ours(world: SimulatedWorldDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuckpt.driver.forked.possible", lambda: True)
    held = os.open(tmp_path, os.O_RDONLY)
    made = Callers(f"simulated:{world.path}")
    made.warm()
    fds = f"/proc/{made._helper_pid}/fd"

    def opened() -> set[str]:
        return {os.readlink(f"{fds}/{n}").partition(":")[0] for n in os.listdir(fds)}

    assert outcome(made, made.start(None, processes.read(os.getpid()).id)) is not None  # it has come up
    assert opened() <= {"/dev/null", "socket"}
    made.close()
    os.close(held)


def test_a_stopped_helper_does_not_hold_us_up(callers: Callers, target: ProcessId, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuckpt.driver.caller.HELLO_TIMEOUT_S", 0.3)
    assert state(callers, target) is State.RUNNING
    stopped = callers._helper_pid
    os.kill(stopped, signal.SIGSTOP)
    lock = callers.start(Call.LOCK, target, timeout_s=5)  # through a new helper
    assert outcome(callers, lock).ok
    os.kill(stopped, signal.SIGCONT)  # the old one finds that nobody waits for it, and makes no second lock
    lock.release()
    assert ended(lambda: state(callers, target) is State.RUNNING)
    os.waitpid(stopped, 0)


def test_a_helper_that_ends_late_leaves_no_zombie_for_ever(world: SimulatedWorldDir) -> None:
    one, two = (Callers(f"simulated:{world.path}") for _ in range(2))
    one.warm()
    helper = one._helper_pid
    os.kill(helper, signal.SIGSTOP)
    one.close()
    assert Path(f"/proc/{helper}").exists(), "it is not waited for for long"
    os.kill(helper, signal.SIGCONT)

    def gone() -> bool:
        two.warm()
        two.close()
        return not Path(f"/proc/{helper}").exists()

    assert ended(gone), "whoever comes next sees to it"
