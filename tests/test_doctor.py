"""What the doctor says of drivers and GPUs, and how the command tells it."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from gpuckpt import doctor
from gpuckpt.cli import doctor as command
from gpuckpt.cli.main import main
from gpuckpt.doctor import Check, UserMode
from gpuckpt.errors import NoDriver
from gpuckpt.model import Gpu
from tests.machines import CLOSED_MODULE, GOOD, GPU0, GPU1, FakeDevices, Machine

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_all_is_well(machine: Machine) -> None:
    found = machine.examine()
    assert {c.status for c in found} == {"ok"}, [c for c in found if c.status != "ok"]
    assert all(c.fix == "" for c in found)
    assert not any("could not be checked" in c.message for c in found)


def test_whatever_is_not_well_comes_with_a_cure(machine: Machine) -> None:
    machine.devices = FakeDevices(dataclasses.replace(GPU0, persistence=False, mig=True, compute_mode="prohibited"), package="535.1.1")
    machine.user_mode = UserMode()
    machine.lay({"proc/8/comm": "nvidia-cuda-mps\n", "proc/9/comm": "earlyoom\n", "sys/kernel/mm/transparent_hugepage/enabled": "[never]"})
    for check in machine.examine():
        assert check.status == "ok" or check.fix, check


@pytest.mark.parametrize(
    ("package", "cuda", "status", "said"),
    [
        ("535.104.05", (12, 2), "problem", "cannot checkpoint"),
        ("550.54.14", (12, 4), "problem", "cuda-checkpoint program works"),
        ("565.57.01", (12, 7), "problem", "cuda-checkpoint program works"),
        ("570.86.15", (12, 8), "ok", "resume on other GPUs needs 580"),
        ("580.159.04", (13, 0), "ok", "resume on other GPUs"),
        ("595.45.04", (13, 2), "warning", "cuda-checkpoint#53"),
        ("615.10", (13, 4), "ok", "custom storage"),
        ("", (12, 6), "problem", "CUDA 12.6 has no checkpoint calls"),
        ("", (12, 9), "ok", "CUDA 12.9"),
    ],
)
def test_driver_version(machine: Machine, package: str, cuda: tuple[int, int], status: str, said: str) -> None:
    machine.devices = FakeDevices(package=package, cuda=cuda)
    line = machine.line("NVIDIA driver")
    assert line.status == status
    assert said in line.message


def test_closed_modules_of_595_are_fine(machine: Machine) -> None:
    machine.devices = FakeDevices(package="595.45.04", cuda=(13, 2))
    machine.lay({"proc/driver/nvidia/version": CLOSED_MODULE.format("595.45.04")})
    assert machine.line("NVIDIA driver").status == "ok"


def test_no_driver_leaves_the_machine_checks(machine: Machine) -> None:
    (machine.root / "proc/driver/nvidia/version").unlink()
    machine.user_mode = UserMode(bindings="13.4.4", error="libcuda.so.1 not found")
    for node in (machine.root / "dev").iterdir():
        node.unlink()
    found = machine.examine(doctor.Absent(NoDriver("libnvidia-ml.so.1 was not found")))
    names = [c.name for c in found]
    assert (found[0].name, found[0].status) == ("NVIDIA driver", "problem")
    assert "libnvidia-ml.so.1" in found[0].message
    assert {"permission", "container", "host memory", "memory killers", "huge pages", "MPS", "NCCL"} <= set(names)
    assert not {"GPUs", "MIG", "persistence mode", "compute mode"} & set(names)
    assert not any("could not be checked" in c.message for c in found)


def test_no_driver_though_its_module_is_loaded(machine: Machine) -> None:
    line = machine.examine(doctor.Absent(NoDriver("Driver/library version mismatch")))[0]
    assert "kernel module 580.159.04 is loaded" in line.message
    assert "reboot" in line.fix


def test_driver_that_is_gone_when_gpus_are_asked_for(machine: Machine) -> None:
    machine.devices.answers["gpus"] = NoDriver("NVML was shut down")
    assert machine.line("GPUs").status == "problem"


def test_no_driver_in_a_container(machine: Machine) -> None:
    (machine.root / "proc/driver/nvidia/version").unlink()
    machine.container()
    assert "--gpus all" in machine.examine(doctor.Absent(NoDriver("none")))[0].fix


def test_lost_gpu_is_one_line_and_the_rest_work(machine: Machine) -> None:
    lost = Gpu("GPU-cccc", 2, lost=True, persistence=False, mig=True, compute_mode="prohibited", pci="0000:19:00.0", minor=2)
    machine.devices = FakeDevices(GPU0, GPU1, lost)
    found = machine.examine()
    assert [(c.name, c.status) for c in found if c.name.startswith("GPU ")] == [("GPU 0", "ok"), ("GPU 1", "ok"), ("GPU 2", "problem")]
    assert [c.name for c in found if c.status != "ok"] == ["GPU 2"]
    assert "lost" in machine.line("GPU 2").message


def test_unknown_memory_is_not_free(machine: Machine) -> None:
    machine.devices = FakeDevices(dataclasses.replace(GPU0, free_bytes=None))
    assert machine.line("GPU 0").status == "warning"


def test_no_gpu(machine: Machine) -> None:
    machine.devices.answers["gpus"] = ()
    assert machine.line("GPUs").status == "problem"


def test_kernel_module_and_library_of_two_versions(machine: Machine) -> None:
    machine.lay({"proc/driver/nvidia/version": CLOSED_MODULE.format("570.86.15")})
    line = machine.line("driver versions")
    assert line.status == "problem"
    assert "570.86.15" in line.message
    assert "580.159.04" in line.message


def test_libcuda_of_a_compat_package(machine: Machine) -> None:
    machine.user_mode = dataclasses.replace(GOOD, libcuda="590.44.01")
    assert machine.line("driver versions").status == "warning"


@pytest.mark.parametrize(
    ("user_mode", "said"),
    [
        (UserMode(), "not installed"),
        (dataclasses.replace(GOOD, bindings="13.0.0"), "13.0.0 lacks"),
        (dataclasses.replace(GOOD, bindings="13.0.1"), "13.0.1 lacks"),
        (dataclasses.replace(GOOD, bindings="13.3.0"), "13.3.0 lacks"),
        (dataclasses.replace(GOOD, bindings="12.9.7", missing=("CUcheckpointRestoreArgs",)), "CUcheckpointRestoreArgs"),
        (dataclasses.replace(GOOD, bindings="12.6.2.post1"), "older than"),
        (UserMode("13.4.4", error="no libcuda"), "does not find libcuda: no libcuda"),
        (dataclasses.replace(GOOD, cuda=(12, 4)), "CUDA 12.4"),
    ],
)
def test_bindings(machine: Machine, user_mode: UserMode, said: str) -> None:
    machine.user_mode = user_mode
    line = machine.line("cuda-bindings")
    assert line.status == "problem"
    assert said in line.message


@pytest.mark.parametrize(("version", "said"), [("12.9.4", "12.9.4; resume on other GPUs needs 13.0.2"), ("13.4.4", "13.4.4")])
def test_bindings_that_serve(machine: Machine, version: str, said: str) -> None:
    machine.user_mode = dataclasses.replace(GOOD, bindings=version)
    line = machine.line("cuda-bindings")
    assert (line.status, line.message) == ("ok", said)


def test_process_with_a_newer_libcuda(machine: Machine) -> None:
    maps = "7f00-7f01 r-xp 00000000 08:01 77    /usr/local/cuda/compat/libcuda.so.590.44.01\n7f02-7f03 rw-p 0 00:00 0\n"
    machine.process(70, 1, maps=maps)
    line = machine.line("libcuda of processes")
    assert line.status == "problem"
    assert "70 (python3) runs libcuda 590.44.01" in line.message
    assert line.fix.endswith("LD_LIBRARY_PATH=/usr/local/cuda/compat")


def test_device_nodes(machine: Machine) -> None:
    (machine.root / "dev/nvidia-uvm").unlink()
    (machine.root / "dev/nvidia0").unlink()
    line = machine.line("device nodes")
    assert line.status == "problem"
    assert "/dev/nvidia-uvm, /dev/nvidia0" in line.message


def test_device_nodes_as_a_process_sees_them(machine: Machine) -> None:
    """A container that was started with some of them, or lost one."""
    nodes = {f"root/dev/{node}": "" for node in ("nvidiactl", "nvidia-uvm", "nvidia0")}
    machine.process(70, 4, **nodes)
    machine.process(71, 4)  # whose root may not be looked at
    assert machine.line("device nodes").status == "ok"
    (machine.root / "proc/70/root/dev/nvidia0").unlink()
    line = machine.line("device nodes")
    assert line.status == "warning"
    assert "70 (python3) is on a GPU and does not see /dev/nvidia0:" in line.message
    assert "--gpus all" in line.fix


def test_persistence_off(machine: Machine) -> None:
    machine.devices = FakeDevices(GPU0, dataclasses.replace(GPU1, persistence=False))
    line = machine.line("persistence mode")
    assert line.status == "warning"
    assert "off on GPU 1:" in line.message
    assert "nvidia-smi -pm 1" in line.fix


@pytest.mark.parametrize(("mode", "status"), [("exclusive-process", "warning"), ("prohibited", "problem")])
def test_compute_mode(machine: Machine, mode: str, status: str) -> None:
    machine.devices = FakeDevices(GPU0, dataclasses.replace(GPU1, compute_mode=mode))
    line = machine.line("compute mode")
    assert line.status == status
    assert line.fix == "sudo nvidia-smi -i 1 -c DEFAULT"


def test_mig(machine: Machine) -> None:
    machine.devices = FakeDevices(dataclasses.replace(GPU0, mig=True))
    assert machine.line("MIG").status == "problem"


@pytest.mark.parametrize(
    ("version", "gpus", "status", "said"),
    [
        ("2.28.9", 2, "warning", "cannot suspend communicators"),
        ("2.29.7", 2, "warning", "deadlocks"),
        ("2.30.7", 2, "ok", "2.30.7"),
        ("2.28.9", 1, "ok", "only needed for several GPUs"),
    ],
)
def test_nccl(machine: Machine, version: str, gpus: int, status: str, said: str) -> None:
    machine.devices = FakeDevices(*(GPU0, GPU1)[:gpus])
    machine.user_mode = dataclasses.replace(GOOD, nccl=(("nvidia-nccl-cu13", version),))
    line = machine.line("NCCL")
    assert line.status == status
    assert said in line.message


def test_nccl_of_a_process(machine: Machine) -> None:
    machine.devices = FakeDevices(GPU0, GPU1)
    packages = "/opt/venv/lib/python3.12/site-packages"
    machine.process(70, 1, maps=f"7f00-7f01 r-xp 00000000 08:01 77 {packages}/nvidia/nccl/lib/libnccl.so.2\n")
    machine.lay({f"proc/70/root{packages}/nvidia_nccl_cu12-2.28.9.dist-info/METADATA": ""})
    line = machine.line("NCCL")
    assert line.status == "warning"
    assert "nvidia-nccl-cu12 2.28.9 in 70 (python3)" in line.message


def test_probe_finds_the_installed_bindings() -> None:
    found = doctor.probe()
    assert found.bindings
    assert found.missing == ()
    assert found.cuda or found.error


@pytest.mark.parametrize("question", ["version", "gpus", "processes"])
def test_a_failing_question_breaks_no_other_check(machine: Machine, question: str) -> None:
    expected = {c.name for c in machine.examine()}
    machine.devices.answers[question] = RuntimeError("NVML_ERROR_UNKNOWN")
    found = machine.examine()
    failed = [c for c in found if "could not be checked: RuntimeError: NVML_ERROR_UNKNOWN" in c.message]
    assert failed
    assert {c.status for c in failed} == {"warning"}
    assert {"permission", "MPS", "huge pages"} <= {c.name for c in found if c.status == "ok"}
    assert expected - {"GPU 0"} <= {c.name for c in found}


@pytest.mark.parametrize("which", range(len(doctor.CHECKS)))
def test_each_failing_check_is_isolated(machine: Machine, which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> list[Check]:
        raise ValueError("surprise")

    name = doctor.CHECKS[which][0]
    whole = [c.name for c in machine.examine()]
    monkeypatch.setattr(doctor, "CHECKS", (*doctor.CHECKS[:which], (name, broken), *doctor.CHECKS[which + 1 :]))
    found = machine.examine()
    assert [c for c in found if c.status != "ok"] == [Check(name, "warning", "could not be checked: ValueError: surprise")]
    assert len(found) >= len(whole)


def test_failing_probe(machine: Machine) -> None:
    machine.user_mode = OSError("bad ELF")
    assert "could not be checked: OSError: bad ELF" in machine.line("cuda-bindings").message


def test_simulated_gpus(machine: Machine) -> None:
    (machine.root / "proc/driver/nvidia/version").unlink()
    for node in (machine.root / "dev").iterdir():
        node.unlink()
    machine.devices = FakeDevices(GPU0, package="", simulated=True)
    machine.user_mode = UserMode(bindings="13.4.4", error="no libcuda")
    found = machine.examine()
    assert {c.status for c in found} == {"ok"}
    assert "simulated" in machine.line("GPUs").message


def test_command_prints_json(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.devices = FakeDevices(dataclasses.replace(GPU0, mig=True))
    assert command.run(lambda: machine.devices, as_json=True, examine=machine.examine) == 6
    document = json.loads(capsys.readouterr().out)
    assert set(document) > {"schema", "command", "ok", "simulated", "checks", "seconds", "error"}
    assert (document["schema"], document["command"], document["ok"], document["error"]) == (1, "doctor", False, None)
    (mig,) = [c for c in document["checks"] if c["name"] == "MIG"]
    assert set(mig) == {"name", "status", "message", "fix"}
    assert mig["status"] == "problem"


def test_command_prints_aligned_text(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.devices = FakeDevices(dataclasses.replace(GPU0, persistence=False))
    assert command.run(lambda: machine.devices, as_json=False, examine=machine.examine) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    lines = out.splitlines()
    assert len({re.match(r"(?:ok|warning|problem) +\S.*?  +", line).end() for line in lines if re.match(r"(ok|warning)\b", line)}) == 1  # type: ignore[union-attr]
    assert any(line.lstrip().startswith("fix: sudo nvidia-smi -pm 1") for line in lines)
    assert lines[-1] == "0 problems, 1 warning"


def test_command_asks_the_world_for_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuckpt.early.devices", lambda: FakeDevices(dataclasses.replace(GPU0, mig=True)))
    result = CliRunner().invoke(main, ["doctor", "--json"])
    assert result.exit_code == 6
    assert "MIG" in [c["name"] for c in json.loads(result.output)["checks"]]


def test_command_without_a_driver(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    def devices() -> Any:
        raise NoDriver("libnvidia-ml.so.1 was not found")

    assert command.run(devices, as_json=False, examine=machine.examine) == 6
    assert capsys.readouterr().out.startswith("problem  NVIDIA driver")


def test_table_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [Check("driver", "ok", "580"), Check("host memory", "problem", "word " * 40, "type this")]
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[31mproblem" in command.table(checks, terminal=True)
    monkeypatch.setenv("NO_COLOR", "1")
    plain = command.table(checks, terminal=True)
    assert "\x1b" not in plain
    assert max(map(len, plain.splitlines())) <= 60


def test_help_has_examples_and_exit_codes() -> None:
    result = CliRunner().invoke(main, ["doctor", "--help"])
    assert result.exit_code == 0
    for words in ("gpuckpt doctor --json", "default", "Exit status: 0"):
        assert words in result.output
