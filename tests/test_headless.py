"""A process whose main thread has ended while others go on (``pthread_exit``): it is there, and what does not show of it is not nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuckpt.driver import cuda
from gpuckpt.inspect import hazards, processes
from gpuckpt.local import LocalWorld
from gpuckpt.model import GpuProcess, ProcessId, State
from tests.simulated_machine import Machine, eventually

PROGRAM = """
import ctypes, sys, threading
threading.Thread(target=sys.stdin.read).start()
print("ready", flush=True)
ctypes.CDLL(None).syscall({exit}, 0)
"""
EXIT = {"x86_64": 60, "aarch64": 93}


@pytest.fixture
def headless() -> Iterator[subprocess.Popen[bytes]]:
    if (number := EXIT.get(os.uname().machine)) is None:
        pytest.skip("the number of exit(2) is not known here")
    process = subprocess.Popen([sys.executable, "-c", PROGRAM.format(exit=number)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == b"ready\n"
        eventually(lambda: "State:\tZ" in Path(f"/proc/{process.pid}/status").read_text(), "its main thread ends")
        yield process
        process.kill()


def test_it_is_there_until_its_last_thread_ends(headless: subprocess.Popen[bytes]) -> None:
    proc = processes.read(headless.pid)
    assert proc is not None
    assert (proc.headless, proc.dead, proc.stopped) == (True, False, False)
    assert headless.pid in processes.table()
    assert processes.is_same(proc.id)
    assert cuda._alive(headless.pid)
    headless.kill()
    eventually(lambda: processes.read(headless.pid) is None, "it has ended")
    assert not cuda._alive(headless.pid)


def test_a_zombie_is_not() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert processes.read(pid) is None
    os.waitpid(pid, 0)


def test_what_it_has_open_is_not_known_to_be_safe(headless: subprocess.Popen[bytes]) -> None:
    proc = processes.read(headless.pid)
    assert proc is not None
    process = GpuProcess(proc.id, "serve", os.geteuid(), State.RUNNING, (), 0, False)
    (hazard,) = hazards.of_process(process, proc)
    assert (hazard.kind, hazard.pid, hazard.acceptable) == ("possible-import", headless.pid, True)
    assert "its main thread has ended" in hazard.message


def test_nor_are_files_that_nobody_may_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    proc = processes.read(os.getpid())
    assert proc is not None
    process = GpuProcess(proc.id, "serve", os.geteuid(), State.RUNNING, (), 0, False)
    assert hazards.of_process(process, proc) == []

    def denied(path: str) -> list[str]:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "listdir", denied)
    (hazard,) = hazards.of_process(process, proc)
    assert "cannot be looked at (Permission denied)" in hazard.message
    gone = GpuProcess(ProcessId(proc.pid, proc.start_ticks + 1), "serve", os.geteuid(), State.RUNNING, (), 0, False)
    assert hazards.of_process(gone, proc) == [], "it has ended: that is told elsewhere"


@pytest.mark.parametrize("unseen", ["headless", "listed"])
def test_it_is_in_its_group_though_nothing_shows_its_library(machine: Machine, monkeypatch: pytest.MonkeyPatch, unseen: str) -> None:
    for name, value in machine.environ.items():
        monkeypatch.setenv(name, value)
    target = machine.target()
    with LocalWorld() as world:
        procs, held = processes.table(), world.devices.processes()

        def nothing(_: Any) -> set[int]:
            return set()

        monkeypatch.setattr(world.devices, "loaded", nothing)
        if unseen == "headless":
            procs[target.pid] = procs[target.pid]._replace(headless=True)
            monkeypatch.setattr(world.devices, "contexts", nothing)
            held = {}
        assert set(world.cuda_processes([target.pid, os.getppid()], procs, held)) == {target.pid}
