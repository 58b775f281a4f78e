"""What stays on the GPU by the pool alone, told by class: by the process itself, and what NVML counts beyond that."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from gpuckpt.agent import stays
from gpuckpt.driver.simulated_comms import NoCommunicator
from gpuckpt.model import GIB, MIB
from gpuckpt.reporting import REMAINDER
from gpuckpt.reporting import stays as with_remainder
from tests.test_offload import BY_POOL, POOL, resumed, suspended

if TYPE_CHECKING:
    from tests.simulated_machine import Machine

TOLD = ("--stays", "local-memory=0.5", "--stays", "torch=0.25")


class Memory:
    """A program's, with 10 MiB under tags, 4 of them awake."""

    def tags(self) -> list[dict[str, Any]]:
        return [{"tag": "a", "device": 0, "bytes": n * MIB, "where": where} for n, where in ((4, "gpu"), (6, "host"))]


@pytest.fixture(scope="module")
def libcuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("libcuda") / "libcuda_stays.so"
    subprocess.run(
        ["gcc", "-std=c11", "-Wall", "-Wextra", "-shared", "-fPIC", "-o", out, Path(__file__).with_name("stays_libcuda.c")], check=True
    )
    return out


def of(nbytes: dict[str, int], unit: int = MIB) -> dict[str, float]:
    return {name: n / unit for name, n in nbytes.items()}


def test_the_driver_is_asked_where_the_program_has_a_context(libcuda: Path) -> None:
    """And where it has loaded none, it is not loaded for that."""
    with pytest.raises(OSError, match="dlopen"):
        stays.of_driver(str(libcuda))
    fake = ctypes.CDLL(str(libcuda))
    found = of(stays.of_driver(str(libcuda)))
    assert found == {"stream-ordered": 32, "graph-nodes": 6, "local-memory": 132 * 2048 * 4096 / MIB, "printf-malloc": 9}
    assert fake.fake_held() == 0, "every context is popped, and released"


@pytest.mark.parametrize(
    ("unknown", "missing"),
    [
        ("cuCtxGetLimit", {"local-memory", "printf-malloc"}),
        ("cuDeviceGetGraphMemAttribute", {"graph-nodes"}),
        ("cuMemPoolGetAttribute", {"stream-ordered"}),
    ],
)
def test_what_a_driver_does_not_tell_is_left_out(libcuda: Path, monkeypatch: pytest.MonkeyPatch, unknown: str, missing: set[str]) -> None:
    fake = ctypes.CDLL(str(libcuda))
    monkeypatch.setenv("FAKE_UNKNOWN", unknown)
    found = stays.of_driver(str(libcuda))
    assert {name for name, nbytes in found.items() if not nbytes} == missing
    assert fake.fake_held() == 0
    monkeypatch.setenv("FAKE_UNKNOWN", "cuDeviceGetCount")
    with pytest.raises(OSError, match="CUDA error 3"):
        stays.of_driver(str(libcuda))


@pytest.mark.parametrize(("initialised", "backend", "torch"), [(True, "native", 20), (True, "async", 0), (False, "native", 0)])
def test_torch_is_asked_where_it_runs(monkeypatch: pytest.MonkeyPatch, initialised: bool, backend: str, torch: int) -> None:
    """It counts what lies under tags as its own, wherever that is by now."""
    cuda = SimpleNamespace(
        is_initialized=lambda: initialised,
        get_allocator_backend=lambda: backend,
        device_count=lambda: 2,
        memory_reserved=lambda device: (25, 5)[device] * MIB,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert stays.of_torch(Memory()) == torch * MIB  # type: ignore[arg-type]


def test_one_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(NoCommunicator):
        def held_bytes(self) -> int:
            raise RuntimeError("NCCL is not well")

    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(stays, "of_driver", lambda: {"graph-nodes": 0, "local-memory": MIB})
    found = stays.classes(Broken(None, 0), Memory())  # type: ignore[arg-type]
    assert [(s["class"], s["bytes"]) for s in found] == [("pool", 4 * MIB), ("local-memory", MIB)]
    assert all(s["why"] for s in found)


def test_the_remainder() -> None:
    told = [{"class": "torch", "bytes": 3 * MIB, "why": "so"}]
    assert [(s["class"], s["bytes"]) for s in with_remainder(told, 5 * MIB)] == [("torch", 3 * MIB), (REMAINDER, 2 * MIB)]
    assert with_remainder(told, 2 * MIB) == tuple(told), "what is computed can be more than is taken"


def test_a_report_says_what_stays_and_why(machine: Machine) -> None:
    """Case 45: by class and by process; and of a full suspend nothing."""
    target, other = machine.target(*POOL, *TOLD), machine.target(*POOL)
    down = suspended(machine, target, str(other.pid), "--method", "pool")
    by_pid = {p["pid"]: p for p in down.document["processes"]}
    rows = by_pid[target.pid]["stays"]
    assert [(s["class"], s["bytes"] / GIB) for s in rows] == [("torch", 0.25), ("local-memory", 0.5), (REMAINDER, 2.0)]
    assert (rows[1]["why"], "modules" in rows[2]["why"]) == (stays.WHY["local-memory"], True)
    assert sum(s["bytes"] for s in rows) == by_pid[target.pid]["retained_bytes"]
    assert [(s["class"], s["bytes"] / GIB) for s in by_pid[other.pid]["stays"]] == [(REMAINDER, 2.0)]
    again = suspended(machine, target, "--method", "pool").document["processes"]
    assert [(p["state"], p["stays"]) for p in again] == [(BY_POOL, by_pid[p["pid"]]["stays"]) for p in again]
    resumed(machine, target)
    words = machine.gpuckpt("suspend", target.pid, "--method", "pool", json=False).stdout
    assert f"\n  pid {target.pid} keeps: torch 256 MiB, local-memory 512 MiB, {REMAINDER} 2.0 GiB\n" in words
    up = resumed(machine, target)
    full = suspended(machine, target)
    assert [p["stays"] for r in (up, full) for p in r.document["processes"]] == [[], []]
    resumed(machine, target)
    assert "keeps" not in machine.gpuckpt("suspend", target.pid, json=False).stdout
