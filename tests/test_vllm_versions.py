"""vLLM from 0.26 to 0.33: what the adapters decide over each is what its sources say (``tests/vllm_versions.json``)."""

from __future__ import annotations

import copy
import importlib
import json
import logging
import os
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from gpuckpt.agent import vllm, vllm_memory, vllm_pool, vllm_together
from gpuckpt.nccl import communicators, hazards

if TYPE_CHECKING:
    from collections.abc import Callable

GPU = Path(__file__).parent / "gpu"
VERSIONS: dict[str, Any] = json.loads((GPU.parent / "vllm_versions.json").read_text())
SOURCES = os.environ.get("GPUCKPT_VLLM_SOURCES", "")
SUPPORTED, LEFT, REFUSED = "supported", "left to vLLM", "refused"
#: What becomes of a feature where vLLM is not as known.
OTHERWISE = {"hold": REFUSED, "comms": REFUSED, "experts": REFUSED, "together": REFUSED, "offload": LEFT, "pool": LEFT, "graphs": LEFT}


@pytest.mark.skipif(not SOURCES, reason="GPUCKPT_VLLM_SOURCES names no folder of …VERSION/vllm")
def test_the_record_is_what_the_sources_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(GPU)
    found = importlib.import_module("vllm_record").record(Path(SOURCES))
    assert found
    assert {version: found[version] for version in found} == {version: VERSIONS.get(version) for version in found}


class Skeleton:
    """The names of one version of vLLM, with the parameters that they had in its sources, in the place of its modules."""

    def __init__(self, record: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        self.record, self.monkeypatch = record, monkeypatch
        for name in [m for m in sys.modules if m.split(".")[0] == "vllm"]:
            monkeypatch.delitem(sys.modules, name)
        for path, functions in record["signatures"].items():
            self.module(path)
            for name, parameters in functions.items():
                self._define(path, *name.rpartition(".")[::2], parameters)
        core = self.module("v1/engine/core.py")
        if "DPEngineCoreProc" in vars(core):
            core.DPEngineCoreProc = type("DPEngineCoreProc", (core.EngineCoreProc,), dict(vars(core.DPEngineCoreProc)))
        core.EngineCoreRequestType = SimpleNamespace(WAKEUP=object())
        core.EngineCoreOutputs = object
        for name in self.attributes("device_allocator/cumem.py"):
            setattr(
                self.module("device_allocator/cumem.py").CuMemAllocator if name == "instance" else self.module("device_allocator/cumem.py"),
                name,
                None,
            )
        for name in self.attributes("platforms/interface.py"):
            setattr(self.module("platforms/interface.py").Platform, name, None)

    def attributes(self, path: str) -> list[str]:
        found: list[str] = self.record["attributes"][path]
        return found

    def module(self, path: str) -> Any:
        name = "vllm." + path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        if name not in sys.modules:
            self.monkeypatch.setitem(sys.modules, name, ModuleType(name))
        return sys.modules[name]

    def _define(self, path: str, cls: str, name: str, parameters: list[str]) -> None:
        module, made = self.module(path), {}  # type: ignore[var-annotated]
        exec(f"def {name}({', '.join(p + '=None' * (p != 'self') for p in parameters)}): ...", made)
        if cls and not hasattr(module, cls):
            setattr(module, cls, type(cls, (), {}))
        static = cls and parameters[:1] != ["self"]
        setattr(getattr(module, cls) if cls else module, name, staticmethod(made[name]) if static else made[name])


def of_hook(vllm_: Skeleton, said: Callable[[], str]) -> dict[str, str]:
    """By what it warns of."""
    vllm_.monkeypatch.setenv("GPUCKPT_POOL", "1")
    vllm.hook()
    return {
        "hold": REFUSED if "cannot be suspended on several GPUs" in said() else SUPPORTED,
        "pool": LEFT if "keeps its own allocator" in said() else SUPPORTED,
    }


def of_graphs(_: Skeleton) -> str:
    pool = cast("Any", SimpleNamespace(graph_pool=object, tag=None))
    try:
        vllm_pool._hook_graphs(pool)
        vllm_pool._hook_workspaces(pool)
    except AttributeError:
        return LEFT
    return SUPPORTED


def of_offload(vllm_: Skeleton) -> str:
    """Supported if sleep mode's memory leaves, and the cache is dropped, with either model runner."""
    for path in ("v1/worker/gpu_model_runner.py", "v1/worker/gpu/model_runner.py"):
        config = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=True), cache_config=SimpleNamespace(cache_dtype="auto"))
        memory = vllm_memory.of(SimpleNamespace(vllm_config=config, model_runner=vllm_.module(path).GPUModelRunner()))
        if memory is None or not memory._drops():
            return LEFT
    return SUPPORTED


def of_together(vllm_: Skeleton) -> str:
    sums = [words for words in vllm_together.SUMS if words.partition("(")[0] in vllm_.record["sums"]]
    vllm_.monkeypatch.setattr(vllm_together, "_source", lambda: "\n".join([vllm_together._NUMBERS, *sums]))
    engine = SimpleNamespace(**dict.fromkeys(vllm_.attributes("v1/engine/core.py"), True))
    together = vllm_together.Together(engine, cast("Any", None), cast("Any", None))
    if together.problem():
        return REFUSED
    together.install()
    synced = vllm_.module("config/parallel.py").ParallelConfig.__dict__["sync_dp_state"]
    assert isinstance(synced, staticmethod) is (
        vllm_.record["signatures"]["config/parallel.py"]["ParallelConfig.sync_dp_state"][0] != "self"
    )
    return SUPPORTED


def of_communicators(vllm_: Skeleton) -> dict[str, str]:
    """A group's own; and what it has beside it is a hazard, by name."""
    library = SimpleNamespace(**dict.fromkeys(vllm_.attributes("distributed/device_communicators/pynccl_wrapper.py"), object()))
    values = {"comm": 1, "nccl": library, "available": True, "unique_id": b"1"}
    pynccl = SimpleNamespace(**{n: values[n] for n in vllm_.attributes("distributed/device_communicators/pynccl.py")})
    names = vllm_.attributes("distributed/device_communicators/cuda_communicator.py")
    device = SimpleNamespace(**{n: pynccl if n == "pynccl_comm" else None for n in names})
    group = SimpleNamespace(device_communicator=device)
    state = SimpleNamespace(**{n: {"tp:0": lambda: group} for n in vllm_.attributes("distributed/parallel_state.py")})
    modules, found = {"vllm.distributed.parallel_state": state}, []  # type: ignore[var-annotated]
    comms = [c.name for c in communicators._vllm(modules, found)] == ["tp:0"] and not found
    for name in [n for n in names if n.endswith("_comm") and n not in hazards.HARMLESS]:
        setattr(device, name, SimpleNamespace(disabled=False))
        comms &= len(list(hazards._of_vllm(modules))) == 1
        setattr(device, name, None)
    plain = getattr(vllm_.module("distributed/device_communicators/all2all.py"), "AgRsAll2AllManager", type("Other", (), {}))
    experts = "all2all_manager" in names
    for cls, n in ((plain, 0), (type("DeepEPHTAll2AllManager", (), {}), 1)):
        device.all2all_manager = object.__new__(cls)
        experts &= len(list(hazards._of_vllm(modules))) == n
    return {"comms": SUPPORTED if comms else REFUSED, "experts": SUPPORTED if experts else REFUSED}


@pytest.fixture
def decide(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Callable[[dict[str, Any]], dict[str, str]]:
    """What the adapters make of a recorded version."""

    def decided(record: dict[str, Any]) -> dict[str, str]:
        skeleton = Skeleton(record, monkeypatch)
        caplog.set_level(logging.WARNING, "vllm.gpuckpt")
        monkeypatch.setattr(vllm_pool, "_taken", None)
        return {
            **of_hook(skeleton, lambda: caplog.text),
            **of_communicators(skeleton),
            "offload": of_offload(skeleton),
            "graphs": of_graphs(skeleton),
            "together": of_together(skeleton),
        }

    return decided


@pytest.mark.parametrize("version", VERSIONS)
def test_the_adapters_decide_as_recorded(version: str, decide: Callable[[dict[str, Any]], dict[str, str]]) -> None:
    record = VERSIONS[version]
    kept = {feature: all(record["kept"][feature].values()) for feature in OTHERWISE}
    assert decide(record) == {feature: SUPPORTED if kept[feature] else otherwise for feature, otherwise in OTHERWISE.items()}


def without(words: str) -> Callable[[dict[str, Any]], None]:
    """What makes a record one of a vLLM that has other names."""

    def change(record: dict[str, Any]) -> None:
        for part in ("signatures", "attributes", "sums"):
            record[part] = json.loads(re.sub(words, "another", json.dumps(record[part])))

    return change


@pytest.mark.parametrize(
    ("feature", "change"),
    [
        ("hold", "request_type"),
        ("hold", "worker_busy_loop"),
        ("comms", "pynccl_comm"),
        ("experts", "AgRsAll2AllManager"),
        ("together", "cpu_all_reduce_"),
        ("together", "current_wave"),
        ("offload", "unmap_and_release"),
        ("offload", "offload_tags"),
        ("offload", "kv_cache_allocation_context"),
        ("pool", "get_current_usage"),
        ("graphs", "_global_graph_pool"),
        ("graphs", "required_bytes"),
    ],
)
def test_a_version_of_tomorrow(feature: str, change: str, decide: Callable[[dict[str, Any]], dict[str, str]]) -> None:
    """Where something has another name it is noticed, and what does not hang on it goes on."""
    record = copy.deepcopy(VERSIONS["0.33.0"])
    without(change)(record)
    decided = decide(record)
    assert {f for f in OTHERWISE if decided[f] != SUPPORTED} == {feature}
    assert decided[feature] == OTHERWISE[feature]
