"""The real ``NvmlDevices`` on the real ``pynvml``, against a ``libnvidia-ml.so.1`` made here that answers as told."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpuckpt import errors
from gpuckpt.driver.nvml import NvmlDevices
from gpuckpt.model import MIB, Gpu
from tests.conftest import BuiltOnce
from tests.simulated_machine import eventually

FIRST, SECOND = (f"GPU-0000000{index}-0000-0000-0000-000000000000" for index in range(2))

NO_PERMISSION, DRIVER_NOT_LOADED, NOT_SUPPORTED, LIBRARY_NOT_FOUND = 4, 9, 3, 12
GPU_IS_LOST, RESET_REQUIRED, MISMATCH, UNKNOWN = 15, 16, 18, 999

PROGRAM = """
import dataclasses, json, os, signal, sys
from gpuckpt.driver.nvml import NvmlDevices
from gpuckpt.driver.nvml_apart import NvmlApart
from gpuckpt.errors import GpuckptError
how = sys.argv[2:]
devices = NvmlApart(looks=how != ["apart, waiting"]) if how and how[0].startswith("apart") else NvmlDevices(warm=how == ["warm"])
if how == ["apart, killed"]:
    os.kill(devices._pid, signal.SIGKILL)
try:
    answer = getattr(devices, sys.argv[1])()
except GpuckptError as error:
    print(json.dumps({"code": error.code, "message": error.message, "hint": error.hint}))
else:
    print(json.dumps(answer, default=dataclasses.asdict))
"""


@pytest.fixture(scope="session")
def library(built_once: BuiltOnce) -> Path:
    """A folder with the fake in it."""
    if shutil.which("gcc") is None:
        pytest.fail("the tests of the NVML adapter compile a fake libnvidia-ml: install gcc")
    gcc = ["gcc", "-Wall", "-Werror", "-shared", "-fPIC", Path(__file__).with_name("fake_nvml.c")]
    return built_once("nvml", lambda folder: subprocess.run([*gcc, "-o", folder / "libnvidia-ml.so.1"], check=True))


def ask(library: Path, question: str, *how: str, **fake: object) -> Any:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library), **{f"FAKE_{name}": str(value) for name, value in fake.items()}}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, question, *how], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def gpus(library: Path, **fake: object) -> list[Gpu]:
    return [Gpu(**gpu) for gpu in ask(library, "gpus", **fake)]


def test_all_is_well(library: Path) -> None:
    first, second = gpus(library, MODE_1=3, MIG_1=1, PERSISTENCE_1=0)
    assert first == Gpu(FIRST, 0, "NVIDIA Fake", 1000 * MIB, 900 * MIB, True, "default", False, False, 4, "00000000:00:00.0")
    assert second == Gpu(SECOND, 1, "NVIDIA Fake", 1000 * MIB, 900 * MIB, False, "exclusive-process", True, False, 5, "00000000:01:00.0")
    assert ask(library, "version") == [[12, 8], "580.159.04"]


@pytest.mark.parametrize(("number", "name"), [(1, "exclusive-process"), (2, "prohibited"), (9, "unknown")])
def test_compute_modes(library: Path, number: int, name: str) -> None:
    assert gpus(library, MODE_0=number)[0].compute_mode == name


@pytest.mark.parametrize("result", [GPU_IS_LOST, UNKNOWN])
@pytest.mark.parametrize("function", ["HandleByIndex_v2", "UUID"])
def test_a_gpu_lost_before_it_has_a_name_leaves_the_others(library: Path, function: str, result: int) -> None:
    first, second = gpus(library, **{f"RESULT_nvmlDeviceGet{function}_0": result})
    assert first == Gpu("lost-0", 0, lost=True, persistence=False)
    assert (second.uuid, second.lost, second.free_bytes) == (SECOND, False, 900 * MIB)


@pytest.mark.parametrize("result", [GPU_IS_LOST, RESET_REQUIRED])
@pytest.mark.parametrize("function", ["MinorNumber", "PciInfo_v3", "ComputeMode", "MigMode", "PersistenceMode", "MemoryInfo_v2"])
def test_a_gpu_lost_at_any_question(library: Path, function: str, result: int) -> None:
    first, second = gpus(library, **{f"RESULT_nvmlDeviceGet{function}_1": result})
    assert not first.lost
    assert (second.uuid, second.lost, second.total_bytes, second.free_bytes) == (SECOND, True, None, None)


def test_unknown_memory_is_none(library: Path) -> None:
    failing, zero = gpus(library, RESULT_nvmlDeviceGetMemoryInfo_v2_0=UNKNOWN, TOTAL_1=0, FREE_1=0)
    assert (failing.lost, failing.total_bytes, failing.free_bytes) == (False, None, None)
    assert (zero.lost, zero.total_bytes, zero.free_bytes) == (False, None, None)


def test_unsupported_questions_have_safe_answers(library: Path) -> None:
    questions = ("MinorNumber", "ComputeMode", "MigMode", "PersistenceMode")
    gpu = gpus(library, GPUS=1, **{f"RESULT_nvmlDeviceGet{question}_0": NOT_SUPPORTED for question in questions})[0]
    assert (gpu.minor, gpu.compute_mode, gpu.mig, gpu.persistence, gpu.lost) == (None, "default", False, False, False)


def test_gpus_that_are_not_ours_are_left_out_unless_all_are(library: Path) -> None:
    denied = {f"RESULT_nvmlDeviceGetHandleByIndex_v2_{index}": NO_PERMISSION for index in range(2)}
    assert [gpu.index for gpu in gpus(library, RESULT_nvmlDeviceGetHandleByIndex_v2_0=NO_PERMISSION)] == [1]
    assert ask(library, "gpus", **denied)["code"] == "permission"
    assert gpus(library, GPUS=0) == []


def test_processes_of_all_gpus(library: Path) -> None:
    found = ask(library, "processes", PROCESSES_0=f"7:{5 * MIB} 8:-1", PROCESSES_1=f"7:{6 * MIB}")
    assert found == {"7": {FIRST: 5 * MIB, SECOND: 6 * MIB}, "8": {FIRST: None}}
    assert ask(library, "processes") == {}


def test_one_process_on_two_mig_instances(library: Path) -> None:
    assert ask(library, "processes", PROCESSES_0="7:5 7:6 8:5 8:-1 8:5") == {"7": {FIRST: 11}, "8": {FIRST: None}}


@pytest.mark.parametrize("function", ["HandleByIndex_v2", "UUID", "ComputeRunningProcesses_v3"])
def test_processes_beside_a_lost_gpu(library: Path, function: str) -> None:
    fake = {f"RESULT_nvmlDeviceGet{function}_0": GPU_IS_LOST}
    assert ask(library, "processes", PROCESSES_0="7:5", PROCESSES_1="7:6", **fake) == {"7": {SECOND: 6}}


def test_processes_that_cannot_be_listed_are_not_none(library: Path) -> None:
    def code(result: int) -> str:
        return str(ask(library, "processes", RESULT_nvmlDeviceGetComputeRunningProcesses_v3_0=result)["code"])

    assert (code(UNKNOWN), code(NO_PERMISSION)) == ("driver-error", "permission")


def test_processes_born_while_they_are_listed(library: Path) -> None:
    assert ask(library, "processes", PROCESSES_0="7:5", BIRTHS=3) == {"7": {FIRST: 5}}
    assert ask(library, "processes", PROCESSES_0="7:5", BIRTHS=99)["code"] == "driver-error"


@pytest.mark.parametrize(
    ("result", "code", "words"),
    [
        (LIBRARY_NOT_FOUND, "no-driver", "libnvidia-ml.so.1"),
        (DRIVER_NOT_LOADED, "no-driver", "kernel module is not loaded"),
        (MISMATCH, "no-driver", "another version"),
        (UNKNOWN, "no-driver", "Unknown Error"),
        (NO_PERMISSION, "permission", "does not let us"),
    ],
)
def test_nvml_that_cannot_be_used(library: Path, result: int, code: str, words: str) -> None:
    for question in ("gpus", "processes", "version"):
        found = ask(library, question, RESULT_nvmlInitWithFlags=result)
        assert found["code"] == code
        assert words in found["message"]
        assert found["hint"]


@pytest.mark.parametrize("how", ["warm", "apart", "apart, waiting", "apart, killed"])
@pytest.mark.parametrize("question", ["gpus", "version", "processes"])
@pytest.mark.parametrize("fake", [{}, {"RESULT_nvmlInitWithFlags": DRIVER_NOT_LOADED}, {"RESULT_nvmlInitWithFlags": NO_PERMISSION}])
def test_loaded_beforehand_or_by_another_it_says_the_same(library: Path, fake: dict[str, int], question: str, how: str) -> None:
    fake = {"PROCESSES_0": "4242:1024 4243:", **fake} if question == "processes" else fake  # type: ignore[dict-item]
    assert ask(library, question, how, **fake) == ask(library, question, **fake)


LOADED = """
import os, pynvml, sys
from gpuckpt import early
if sys.argv[1] == "loaded":
    pynvml.nvmlInit()
def none(*_):
    raise OSError("none")
if sys.argv[1] == "no process":
    os.fork = none
if sys.argv[1] == "no handle":
    os.pidfd_open = none
devices = early.devices(warm=True)
print(type(devices._devices).__name__, len(devices.gpus()), flush=True)
"""


@pytest.mark.parametrize(
    ("state", "wanted"), [("loaded", "NvmlDevices"), ("no process", "NvmlDevices"), ("no handle", "NvmlDevices"), ("not yet", "NvmlApart")]
)
def test_nvml_is_asked_here_where_no_other_can(library: Path, state: str, wanted: str) -> None:
    """A fork of a program that has NVML itself would have that, and not what it has open."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library)}
    done = subprocess.run([sys.executable, "-c", LOADED, state], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == [wanted, "2"], done.stderr


APART = """
import os, signal, sys, time
from gpuckpt import errors
from gpuckpt.driver.nvml_apart import NvmlApart
from gpuckpt.driver.patient import Patient
devices = NvmlApart()
devices.version()
print(devices._pid, flush=True)
os.kill(devices._pid, signal.SIGSTOP)  # as it hangs in the driver
try:
    Patient(devices, 0.5).gpus()
except errors.Deadline as error:
    print(error.message, flush=True)
if sys.argv[1] == "close":
    devices.close()
    print(len(devices.gpus()), flush=True)
else:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("end", ["close", "killed"])
def test_the_process_that_asks_nvml_hangs_and_leaves_nothing(library: Path, end: str) -> None:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library)}
    done = subprocess.run([sys.executable, "-c", APART, end], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == (0 if end == "close" else -9), done.stderr
    pid, said, *more = done.stdout.splitlines()
    assert "has not answered within 0.5 s" in said
    assert more == (["2"] if end == "close" else []), "closed, it is asked here"
    eventually(lambda: not Path(f"/proc/{pid}").exists(), "it ends with who began it")


def test_no_library(tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").touch()  # hides a real one on the machine that tests
    assert ask(tmp_path, "gpus")["code"] == "no-driver"


def test_nvml_without_libcuda(library: Path) -> None:
    found = ask(library, "version", RESULT_nvmlSystemGetCudaDriverVersion_v2=LIBRARY_NOT_FOUND)
    assert found["code"] == "no-driver"
    assert "NVIDIA_DRIVER_CAPABILITIES" in found["hint"]


def test_the_lock_of_a_gpu_is_its_device_node() -> None:
    devices = NvmlDevices()
    assert devices.gpu_lock_path(Gpu("GPU-1", 0, minor=3)) == "/dev/nvidia3"
    with pytest.raises(errors.GpuLost):
        devices.gpu_lock_path(Gpu("lost-0", 0, lost=True))
    with pytest.raises(errors.GpuUnknown):
        devices.gpu_lock_path(Gpu("GPU-1", 0))
