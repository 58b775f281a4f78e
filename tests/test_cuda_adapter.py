"""The real ``CudaDriver`` on the real bindings, against a ``libcuda.so.1`` made here that answers as told."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cuda.bindings import driver

from tests.conftest import BuiltOnce

OLD = "GPU-7169aa65-1559-2e37-e6d5-d5a2b7e6c033"
NEW = "GPU-00112233-4455-6677-8899-aabbccddeeff"

# Reads a list of [environment, method, arguments, keyword arguments];
# writes what came of each. The fake reads its environment at every call.
PROGRAM = """
import json, os, sys
from gpuckpt.driver import api, cuda
from gpuckpt.errors import GpuckptError
outcomes = []
driver = None
for environment, method, args, kwargs in json.load(sys.stdin):
    os.environ.update(environment)
    try:
        driver = driver or cuda.CudaDriver()
        value = getattr(driver, method)(*args, **kwargs)
        outcomes.append({"value": value})
    except api.CallError as error:
        outcomes.append({"call": error.call, "result": error.result})
    except GpuckptError as error:
        outcomes.append({"code": error.code, "message": error.message, "hint": error.hint})
    except ValueError as error:
        outcomes.append({"ValueError": str(error)})
    for name in environment:
        del os.environ[name]
json.dump(outcomes, sys.stdout)
"""


def compile_fake(folder: Path, *flags: str) -> Path:
    """*folder*, with a ``libcuda.so.1`` in it."""
    if shutil.which("gcc") is None:
        pytest.fail("the tests of the CUDA adapter compile a fake libcuda: install gcc")
    source = Path(__file__).with_name("fake_libcuda.c")
    subprocess.run(["gcc", "-Wall", "-Werror", "-shared", "-fPIC", *flags, "-o", folder / "libcuda.so.1", source, "-ldl"], check=True)
    return folder


@pytest.fixture(scope="session")
def library(built_once: BuiltOnce) -> Path:
    return built_once("cuda", compile_fake)


@pytest.fixture(scope="session")
def library_before_570(built_once: BuiltOnce) -> Path:
    return built_once("cuda-before-570", lambda folder: compile_fake(folder, "-DOLD"))


@pytest.fixture
def library_absent(tmp_path: Path) -> Path:
    """An empty file, as images hold where the driver should be mounted. It hides a real library on the machine that tests."""
    (tmp_path / "libcuda.so.1").touch()
    return tmp_path


def case(method: str, *args: Any, env: dict[str, str] | None = None, **kwargs: Any) -> tuple[Any, ...]:
    return ({f"FAKE_{name}": value for name, value in (env or {}).items()}, method, args, kwargs)


def outcomes(library: Path, *cases: tuple[Any, ...], log: Path | None = None, pythonpath: Path | None = None) -> list[dict[str, Any]]:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library)}
    if log is not None:
        environment["FAKE_LOG"] = str(log)
    if pythonpath is not None:
        environment["PYTHONPATH"] = str(pythonpath)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=json.dumps(cases), env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def asked(library: Path, log: Path, *cases: tuple[Any, ...]) -> list[str]:
    """What the library was asked; all *cases* succeed."""
    assert outcomes(library, *cases, log=log) == [{"value": None}] * len(cases)
    return log.read_text().splitlines()


def test_states_by_number_those_without_a_name_included(library: Path) -> None:
    numbers = (0, 1, 2, 3, 4, 5, 77, 2147483647)
    found = outcomes(library, *(case("state", 1, env={"STATE": str(n)}) for n in numbers))
    names = ["running", "locked", "checkpointed", "failed", "checkpointing", "restoring", "unknown", "unknown"]
    assert found == [{"value": name} for name in names]


def test_a_state_that_cannot_be_had(library: Path) -> None:
    zombie = subprocess.Popen(["true"])
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    gone = subprocess.Popen(["true"])
    gone.wait()

    def answer(pid: int, number: int) -> tuple[Any, ...]:
        return case("state", pid, env={"RESULT_cuCheckpointProcessGetState": str(number)})

    found = outcomes(
        library,
        answer(1, 3),
        answer(1, 304),
        answer(os.getpid(), 304),
        answer(zombie.pid, 304),
        answer(gone.pid, 304),
        answer(1, 999),
        answer(1, 7777),
    )
    zombie.wait()
    assert found == [
        {"value": "none"},
        {"value": "denied"},
        {"value": "denied"},
        {"value": "gone"},
        {"value": "gone"},
        {"call": "state", "result": "UNKNOWN"},
        {"call": "state", "result": "7777"},
    ]


def test_the_restore_thread(library: Path) -> None:
    found = outcomes(
        library, case("restore_thread", 7), case("restore_thread", 7, env={"RESULT_cuCheckpointProcessGetRestoreThreadId": "3"})
    )
    assert found == [{"value": 7}, {"call": "restore-thread", "result": "NOT_INITIALIZED"}]


def test_lock_timeouts_are_whole_milliseconds_and_never_none(library: Path, tmp_path: Path) -> None:
    timeouts = {0.0: 1, -1.0: 1, 0.0001: 1, 0.001: 1, 1.0: 1000, 1.0005: 1001, 30: 30000, 1e10: 4294967295, float("inf"): 4294967295}
    found = asked(library, tmp_path / "log", *(case("lock", 7, timeout) for timeout in timeouts))
    assert found == [f"lock 7 timeout_ms={ms}" for ms in timeouts.values()]


def test_what_each_call_asks_and_that_none_initialises_cuda(library: Path, tmp_path: Path) -> None:
    found = asked(library, tmp_path / "log", case("checkpoint", 7), case("restore", 7, {}, initialise=False), case("unlock", 7))
    assert found == ["checkpoint 7 args=none", "restore 7 pairs=0", "unlock 7 args=none"]


def test_restore_initialises_cuda_first_where_asked(library: Path, tmp_path: Path) -> None:
    assert asked(library, tmp_path / "log", case("restore", 8, {}, initialise=True)) == ["cuInit 0", "restore 8 pairs=0"]


@pytest.mark.skipif(not hasattr(driver, "CUcheckpointGpuPair"), reason="bindings of CUDA 12 know no pairs; see the test of that below")
def test_restore_onto_other_gpus(library: Path, tmp_path: Path) -> None:
    old, new = "7169aa6515592e37e6d5d5a2b7e6c033", "00112233445566778899aabbccddeeff"
    found = asked(library, tmp_path / "log", case("restore", 7, {OLD: NEW, NEW: OLD}, initialise=False))
    assert found == [f"restore 7 pairs=2 {old}>{new} {new}>{old}"]


def test_a_restore_that_ends_before_the_driver_is_asked(library: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    found = outcomes(
        library,
        case("restore", 7, {}, initialise=True, env={"RESULT_cuInit": "100"}),
        case("restore", 7, {OLD: "MIG-00112233-4455-6677-8899-aabbccddeeff"}, initialise=True),
        case("restore", 7, {OLD: "GPU-0"}, initialise=True),
        log=log,
    )
    assert found[0] == {"call": "cuInit", "result": "NO_DEVICE"}
    assert [list(outcome) for outcome in found[1:]] == [["ValueError"]] * 2
    assert log.read_text() == "cuInit 0\n"


def test_results_by_name_and_by_number_where_they_have_none(library: Path) -> None:
    def failing(method: str, function: str, number: int, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return case(method, 7, *args, env={f"RESULT_cuCheckpointProcess{function}": str(number)}, **kwargs)

    found = outcomes(
        library,
        failing("lock", "Lock", 600, 1.0),
        failing("lock", "Lock", 401, 1.0),
        failing("lock", "Lock", 7777, 1.0),
        failing("checkpoint", "Checkpoint", 801),
        failing("restore", "Restore", 2, {}, initialise=False),
        failing("unlock", "Unlock", 304),
    )
    assert found == [
        {"call": "lock", "result": "NOT_READY"},
        {"call": "lock", "result": "ILLEGAL_STATE"},
        {"call": "lock", "result": "7777"},
        {"call": "checkpoint", "result": "NOT_SUPPORTED"},
        {"call": "restore", "result": "OUT_OF_MEMORY"},
        {"call": "unlock", "result": "OPERATING_SYSTEM"},
    ]


def test_no_driver(library: Path, library_absent: Path) -> None:
    (absent,) = outcomes(library_absent, case("state", 1))
    (stub,) = outcomes(library, case("state", 1, env={"RESULT_cuDriverGetVersion": "34"}))
    assert (absent["code"], stub["code"]) == ("no-driver", "no-driver")
    assert "nvidia-smi" in absent["hint"]
    assert "STUB_LIBRARY" in stub["message"]


def test_driver_too_old(library: Path, library_before_570: Path) -> None:
    (by_version,) = outcomes(library, case("state", 1, env={"VERSION": "12040"}))
    (by_function,) = outcomes(library_before_570, case("state", 1))
    assert (by_version["code"], by_function["code"]) == ("driver-too-old", "driver-too-old")
    assert "CUDA 12.4" in by_version["message"]
    assert "cuCheckpointProcessGetState" in by_function["message"]
    assert "570" in by_version["hint"]


def test_a_driver_that_knows_no_map_is_not_asked_to_restore(library: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    (found,) = outcomes(library, case("restore", 7, {OLD: NEW, NEW: OLD}, initialise=True, env={"VERSION": "12090"}), log=log)
    assert found["code"] == "driver-too-old"
    assert "CUDA 12.9" in found["message"]
    assert log.read_text() == ""


def test_driver_before_cuda_12(tmp_path: Path) -> None:
    source = tmp_path / "ancient.c"
    source.write_text("int cuDriverGetVersion(int *version) { *version = 11040; return 0; }\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", source], check=True)
    assert [outcome["code"] for outcome in outcomes(tmp_path, case("state", 1))] == ["driver-too-old"]


def stub_bindings(folder: Path, names: dict[str, str]) -> Path:
    """*folder* to be on PYTHONPATH, with ``cuda.bindings`` 12.3.4 that hold *names* alone."""
    package = folder / "cuda" / "bindings"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text("__version__ = '12.3.4'\n")
    (package / "driver.py").write_text("import enum\n" + "".join(f"{name} = {value}\n" for name, value in names.items()))
    return folder


COMPLETE = {
    "CUresult": "enum.IntEnum('CUresult', {'CUDA_SUCCESS': 0})",
    "CUprocessState": "None",
    "CUcheckpointLockArgs": "None",
    "CUcheckpointRestoreArgs": "None",
    "cuDriverGetVersion": "lambda: (CUresult.CUDA_SUCCESS, 13000)",
    **{f"cuCheckpointProcess{name}": "lambda *a: (CUresult(0),)" for name in ("GetState", "Lock", "Checkpoint", "Restore", "Unlock")},
}


@pytest.mark.parametrize("missing", ["CUcheckpointRestoreArgs", "CUcheckpointLockArgs", "cuCheckpointProcessRestore"])
def test_bindings_without_the_checkpoint_api(library: Path, tmp_path: Path, missing: str) -> None:
    folder = stub_bindings(tmp_path, {name: value for name, value in COMPLETE.items() if name != missing})
    (found,) = outcomes(library, case("state", 1), pythonpath=folder)
    assert found["code"] == "bindings-too-old"
    assert missing in found["message"]
    assert "12.3.4" in found["message"]
    assert "pip install -U cuda-python" in found["hint"]


def test_bindings_of_cuda_12_restore_but_not_onto_other_gpus(library: Path, tmp_path: Path) -> None:
    folder = stub_bindings(tmp_path, COMPLETE)
    found = outcomes(library, case("restore", 1, {}, initialise=False), case("restore", 1, {OLD: NEW}, initialise=False), pythonpath=folder)
    assert found[0] == {"value": None}
    assert found[1]["code"] == "bindings-too-old"


def test_a_storage_of_the_callers_own_is_refused_before_anything_is_called(library: Path, tmp_path: Path) -> None:
    """From CUDA 13.4 on the driver has it, and no adapter yet."""
    log = tmp_path / "log"
    found = outcomes(library, case("checkpoint", 1, storage="any"), case("restore", 1, {}, initialise=False, storage="any"), log=log)
    assert [f["result"] for f in found] == ["NOT_SUPPORTED"] * 2
    assert not log.exists() or "cuCheckpointProcess" not in log.read_text()


def test_no_bindings_at_all(library: Path, tmp_path: Path) -> None:
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda" / "__init__.py").touch()
    (found,) = outcomes(library, case("state", 1), pythonpath=tmp_path)
    assert found["code"] == "bindings-too-old"


def test_importing_the_adapter_imports_no_bindings() -> None:
    program = (
        "import sys, gpuckpt.driver.cuda, gpuckpt.driver.nvml; print([m for m in ('cuda.bindings.driver', 'pynvml') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
