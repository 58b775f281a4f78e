"""What a shell offers after a command: names of runs, pids, GPUs and codes, without asking anybody."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from pathlib import Path

import pytest

from gpuckpt.cli import completing
from gpuckpt.cli.main import main
from gpuckpt.inspect import processes
from tests.simulated_machine import Machine


@pytest.fixture
def runtime(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of two runs that answer nothing, and of one that was killed, on a machine that this very process sees."""
    for name in ("GPUCKPT_SIMULATE", "GPUCKPT_STATE_DIR"):
        monkeypatch.setenv(name, machine.environ[name])
    made = tmp_path / "runtime"
    made.mkdir()
    monkeypatch.setenv("GPUCKPT_RUNTIME_DIR", str(made))
    monkeypatch.chdir(made)
    me = processes.read(os.getpid())
    assert me is not None
    for name, ticks in (("alpha", me.start_ticks), ("beta", me.start_ticks), ("killed", me.start_ticks - 1)):
        with socket.socket(socket.AF_UNIX) as s:
            s.bind(f"{name}.sock")
        Path(f"{name}.lock").write_text(json.dumps({"supervisor": me.pid, "supervisor_ticks": ticks}))
    return made


def offered(*words: str) -> list[str]:
    from click.shell_completion import ShellComplete

    return [c.value for c in ShellComplete(main, {}, "gpuckpt", "_GPUCKPT_COMPLETE").get_completions(list(words[:-1]), words[-1])]


def test_names_and_pids(machine: Machine, runtime: Path) -> None:
    target = machine.target()
    other = machine.target()
    pids = sorted((str(target.pid), str(other.pid)))
    for command in ("suspend", "resume", "status", "is-suspended", "swap"):
        found = offered(command, "")
        assert (found[:2], sorted(found[2:])) == (["alpha", "beta"], pids), command
    assert offered("swap", "alpha", "b") == ["beta"]
    assert offered("suspend", pids[0], pids[1]) == [pids[1]]
    assert pids[0] not in offered("suspend", pids[0], ""), "it was typed already"
    for command in ("stop", "attach"):
        assert offered(command, "") == ["alpha", "beta"], "a pid is no name"
    assert offered("stop", "g") == []


def test_what_is_suspended_is_offered_too_and_nothing_is_asked(machine: Machine, runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal knows it; neither the driver, nor NVML, nor a run is asked."""
    target = machine.target()
    assert machine.gpuckpt("suspend", target.pid).code == 0
    monkeypatch.delenv("GPUCKPT_SIMULATE")
    before = set(sys.modules)
    assert str(target.pid) in offered("resume", "")
    assert not {m for m in set(sys.modules) - before if re.match(r"cuda|pynvml|gpuckpt\.driver", m)}
    target.kill()
    assert str(target.pid) not in offered("resume", "")


def test_a_process_with_the_memory_device_open_is_a_cuda_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device = tmp_path / "uvm"
    device.touch()
    monkeypatch.setattr(completing, "_DEVICE", str(device))
    for name in ("GPUCKPT_SIMULATE",):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GPUCKPT_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("GPUCKPT_RUNTIME_DIR", str(tmp_path / "none"))
    me = str(os.getpid())
    assert me not in offered("suspend", me)
    with device.open():
        assert offered("suspend", me) == [me]
        monkeypatch.setattr(completing, "LOOK_S", -1.0)
        assert offered("suspend", me) == [], "it does not take long, whatever the machine"


def test_gpus(machine2: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By index and by UUID; as the driver has written them down where there are real ones."""
    monkeypatch.setenv("GPUCKPT_SIMULATE", machine2.environ["GPUCKPT_SIMULATE"])
    uuids = [g.uuid for g in machine2.world.peek().rules.gpus.values()]
    assert offered("lease", "--gpu", "") == ["0", "1", *uuids]
    assert offered("lease", "--gpu", "0", "--gpu", "") == ["1", uuids[1]], "it was typed already"
    assert offered("lease", "--gpu", uuids[1]) == [uuids[1]]
    monkeypatch.delenv("GPUCKPT_SIMULATE")
    for bus, uuid in (("0000:3b:00.0", "GPU-b"), ("0000:1a:00.0", "GPU-a")):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "information").write_text(f"Model: \t\t NVIDIA H200\nGPU UUID: \t {uuid}\nBus Type: \t PCIe\n")
    monkeypatch.setattr(completing, "_GPUS", str(tmp_path))
    assert offered("lease", "--gpu", "") == ["0", "1", "GPU-a", "GPU-b"]
    monkeypatch.setattr(completing, "_GPUS", str(tmp_path / "none"))
    assert offered("lease", "--gpu", "") == []


def test_codes() -> None:
    assert offered("explain", "gpu-") == ["gpu-changed", "gpu-lost", "gpu-memory", "gpu-unknown"]
    assert len(offered("explain", "")) > 40
