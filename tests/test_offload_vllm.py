"""vLLM with ``gpuckpt.pool`` in its allocator's place: the pool's library and blocks are real; vLLM, torch and the driver are fakes."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import gpuckpt.pool as pool
from gpuckpt.agent import vllm_memory, vllm_pool
from tests.pool_machine import GRANULARITY, Gpu
from tests.pool_torch import Torch, gpu, torch, where
from tests.test_offload_pool import worker

__all__ = ["gpu", "torch"]


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
def test_vllms_memory_in_the_pool(gpu: Gpu, torch: Torch, cache_dtype: str) -> None:
    allocator = vllm_pool.PoolAllocator(pool)
    assert allocator.get_current_usage() == 0
    made = {}
    for tag in ("weights", "kv_cache"):
        with allocator.use_memory_pool(tag=tag):
            made[tag] = torch.empty(GRANULARITY).copy_(tag.encode() * 100)
    assert allocator.get_current_usage() == 2 * GRANULARITY
    content = {tag: t.content() for tag, t in made.items()}
    memory = vllm_memory.InPool(worker(cache_dtype))
    kept = 2 if cache_dtype == "fp8" else 1
    seen = memory.describe()
    assert (seen["kept_bytes"], seen["dropped_bytes"], seen["host_bytes"]) == tuple(GRANULARITY * n for n in (kept, 2 - kept, kept))
    if cache_dtype == "auto":
        with pytest.raises(RuntimeError, match="cannot forget"):
            memory.offload()
    memory.announce(True)
    memory.forgotten = True
    assert memory.offload() == {"kept_bytes": kept * GRANULARITY, "dropped_bytes": (2 - kept) * GRANULARITY}
    assert gpu.held.used == (0, 0)
    memory.onload()
    assert made["weights"].content() == content["weights"]
    assert (made["kv_cache"].content() == content["kv_cache"]) is (cache_dtype == "fp8")
    assert memory.worker.model_runner.woken == ([] if cache_dtype == "fp8" else [True])
    for level, asleep in ((("weights",), {"weights": "host", "kv_cache": "discarded"}), ((), dict.fromkeys(made, "discarded"))):
        allocator.sleep(offload_tags=level)
        assert where() == asleep
        assert memory.describe() is None, "it sleeps by its own call"
        allocator.wake_up(["weights"])
        assert where()["kv_cache"] == "discarded"
        allocator.wake_up(None)
    assert set(where().values()) == {"gpu"}


class Platform:
    """vLLM's, as far as it is hooked."""

    _global_graph_pool: Any = None

    def graph_pool_handle(self) -> Any:
        return "torch's own"

    def get_global_graph_pool(self) -> Any:
        cls = self.__class__
        if cls._global_graph_pool is None:
            cls._global_graph_pool = self.graph_pool_handle()
        return cls._global_graph_pool


class Workspaces:
    torch: Torch

    def __init__(self) -> None:
        self._current_workspaces: list[Any] = [None]

    def _ensure_workspace_size(self, required_bytes: int) -> Any:
        had = self._current_workspaces[0]
        if had is None or had.nbytes < required_bytes:
            self._current_workspaces[0] = had = None
            self.torch.empty_cache()
            self._current_workspaces[0] = self.torch.empty(required_bytes)
        return self._current_workspaces[0]


@pytest.fixture
def vllm(gpu: Gpu, torch: Torch, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Classes of its own for each test, since they are changed."""
    found = SimpleNamespace(
        Platform=type("Platform", (Platform,), {}), WorkspaceManager=type("Workspaces", (Workspaces,), {"torch": torch})
    )
    for name, cls in ((vllm_pool.PLATFORM, "Platform"), (vllm_pool.WORKSPACE, "WorkspaceManager")):
        module = ModuleType(name)
        setattr(module, cls, getattr(found, cls))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(vllm_pool, "_taken", None)
    vllm_pool._take.cache_clear()
    return found


def test_vllms_graphs_are_in_the_pool_and_every_sleep_keeps_them(gpu: Gpu, torch: Torch, vllm: SimpleNamespace) -> None:
    """Of whoever asks the platform for the graph pool; those that are only measured have one of their own."""
    platform, cuda = vllm.Platform(), torch.module.cuda
    allocator = vllm_pool._take()
    assert allocator is not None
    with allocator.use_memory_pool(tag="weights"):  # its wrappers are made while its weights are loaded, and it ends with a trim
        handle = platform.get_global_graph_pool()
        weights = torch.empty(GRANULARITY)
    assert vllm.Platform().get_global_graph_pool() == handle
    assert platform.graph_pool_handle() == "torch's own"
    vllm.Platform._global_graph_pool, kept = "measured", vllm.Platform._global_graph_pool  # as 0.29 does for a while
    assert platform.get_global_graph_pool() == "measured"
    vllm.Platform._global_graph_pool = kept
    assert platform.get_global_graph_pool() == handle
    with allocator.cudagraph_pool() as offloaded:  # --sleep-mode-offload-cudagraph
        assert offloaded == handle
    with allocator.use_memory_pool(tag="kv_cache"):
        cache = torch.empty(GRANULARITY)
    with cuda.graph(cuda.CUDAGraph(), pool=handle):
        constant = torch.empty(GRANULARITY).copy_(b"constant")
        with pytest.raises(pool.PoolError, match="inside the tag 'cudagraph'"):
            allocator.sleep(offload_tags=("weights",))
    memory = vllm_memory.InPool(worker())
    seen = memory.describe()
    assert (seen["kept_bytes"], seen["dropped_bytes"]) == (2 * GRANULARITY, GRANULARITY)
    memory.announce(True)
    memory.forgotten = True
    memory.offload()
    assert where() == {"weights": "host", "kv_cache": "discarded", "cudagraph": "host"}
    memory.onload()
    assert constant.content().startswith(b"constant")
    for level in (("weights",), ()):  # as /sleep?level= does, and /wake_up?tags=
        allocator.sleep(offload_tags=level)
        assert where()["cudagraph"] == "host"
        allocator.wake_up(["weights"])
        assert where() == {"weights": "gpu", "kv_cache": "discarded", "cudagraph": "gpu"}
        assert constant.content().startswith(b"constant")
        allocator.wake_up(["kv_cache"])
    assert set(where().values()) == {"gpu"}
    assert (weights.nbytes, cache.nbytes) == (GRANULARITY, GRANULARITY)


def test_vllms_workspaces_are_kept_and_the_smaller_ones_given_back(gpu: Gpu, torch: Torch, vllm: SimpleNamespace) -> None:
    allocator = vllm_pool._take()
    assert allocator is not None
    workspaces = vllm.WorkspaceManager()
    for size in (1, 3, 5):
        assert workspaces._ensure_workspace_size(size * GRANULARITY).nbytes == size * GRANULARITY
    assert [(s.tag, s.bytes) for s in pool.stats()] == [("runtime", 5 * GRANULARITY)]
    emptied = torch.caches_emptied
    workspaces._ensure_workspace_size(GRANULARITY)
    assert torch.caches_emptied == emptied, "one that is large enough costs a look"
    with pool.tag("weights"):  # no time for a trim; it goes to its own tag all the same
        for size in (6, 7):
            workspaces._ensure_workspace_size(size * GRANULARITY)
    assert {(s.tag, s.bytes) for s in pool.stats()} == {("runtime", 13 * GRANULARITY)}
    workspaces._current_workspaces[0].copy_(b"scratch")
    allocator.sleep(offload_tags=())
    assert [(s.tag, s.bytes, s.where) for s in pool.stats()] == [("runtime", 7 * GRANULARITY, "host")]
    allocator.wake_up(["weights"])
    assert workspaces._current_workspaces[0].content().startswith(b"scratch")


def test_what_newer_versions_ask_an_allocator_for(gpu: Gpu, torch: Torch, vllm: SimpleNamespace) -> None:
    """One tag inside another, tags of which a sleep says nothing, and the cache dropped alone."""
    allocator = vllm_pool._take()
    assert allocator is not None
    made = {}
    with allocator.use_memory_pool(tag="weights"):
        made["weights"] = torch.empty(GRANULARITY).copy_(b"weights")
    with allocator.use_memory_pool(tag="runtime"):
        with allocator.use_memory_pool(tag="kv_cache"):
            made["kv_cache"] = torch.empty(GRANULARITY)
        made["runtime"] = torch.empty(GRANULARITY).copy_(b"runtime")

    class Newer(Workspaces):
        def __init__(self, alloc_context: Any) -> None:
            super().__init__()
            self.alloc_context = alloc_context

        def _ensure_workspace_size(self, required_bytes: int) -> Any:
            with self.alloc_context():
                return super()._ensure_workspace_size(required_bytes)

    Newer.torch = torch
    sys.modules[vllm_pool.WORKSPACE].WorkspaceManager = Newer  # type: ignore[attr-defined]
    own = Newer._ensure_workspace_size
    vllm_pool._hook_workspaces(pool)
    assert Newer._ensure_workspace_size is own
    made["workspace"] = Newer(lambda: allocator.use_memory_pool("workspace"))._ensure_workspace_size(GRANULARITY)
    assert where() == dict.fromkeys(made, "gpu")
    allocator.sleep(offload_tags=("weights", "runtime", "cudagraph"))
    assert where() == {"weights": "host", "kv_cache": "discarded", "runtime": "host", "workspace": "host"}
    allocator.wake_up(["weights"])
    assert where() == dict.fromkeys(made, "gpu") | {"kv_cache": "discarded"}
    allocator.wake_up(["kv_cache"])
    allocator.discard(("kv_cache",))
    assert where() == dict.fromkeys(made, "gpu") | {"kv_cache": "discarded"}
    with pytest.raises(ValueError, match="runtime cannot be discarded"):
        allocator.discard("runtime")
    allocator.wake_up(None)
    assert [made[t].content()[:7] for t in ("weights", "runtime")] == [b"weights", b"runtime"]


def test_all_who_have_the_function_by_name_get_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """And none of them where an allocator is asked for what the pool has not."""
    monkeypatch.setenv(vllm_pool.VARIABLE, "1")
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")

    def get_mem_allocator_instance() -> None: ...

    modules = [ModuleType(name) for name in ("vllm", "vllm.device_allocator", "vllm.compilation.cudagraph_pool")]
    for module in modules:
        module.get_mem_allocator_instance = get_mem_allocator_instance  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
    modules[1].MemAllocator = type("MemAllocator", (), {"sleep": None, "defragment": None})  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="asked for defragment"):
        vllm_pool.hook()
    assert {m.get_mem_allocator_instance for m in modules} == {get_mem_allocator_instance}
    modules[1].MemAllocator = type("MemAllocator", (), {"sleep": None, "discard": None})  # type: ignore[attr-defined]
    vllm_pool.hook()
    assert modules[1].get_mem_allocator_instance is modules[2].get_mem_allocator_instance is not get_mem_allocator_instance


def test_expandable_segments_leave_vllm_its_own_allocator(
    gpu: Gpu, torch: Torch, vllm: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    """Which turns them off where it allocates: the server starts as it would without the pool."""
    torch.settings["expandable_segments"] = True
    with caplog.at_level(logging.WARNING, "vllm.gpuckpt"):
        assert vllm_pool._take() is None
    (said,) = [r.getMessage() for r in caplog.records]
    assert said.startswith("GPUCKPT_POOL=1 has no effect, vLLM's own allocator is used: torch's expandable_segments is on")
    assert not vllm_pool.chosen()
    assert vllm.Platform().get_global_graph_pool() == "torch's own"


@pytest.mark.parametrize("copies", [True, False])
def test_a_custom_all_reduce_that_copies_registers_nothing(
    gpu: Gpu, torch: Torch, vllm: SimpleNamespace, copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with --sleep-mode-offload-cudagraph."""
    group = SimpleNamespace(device_communicator=SimpleNamespace(ca_comm=SimpleNamespace(disabled=False, _capture_registered=not copies)))
    state = ModuleType("vllm.distributed.parallel_state")
    state._groups = {"tp:0": lambda: group}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, state.__name__, state)
    assert vllm_pool._take() is not None
    assert (vllm.Platform().get_global_graph_pool() == "torch's own") is not copies


@pytest.mark.parametrize(("locked", "tagged"), [(False, 1), (True, 0)])
def test_a_workspace_that_does_not_grow_any_more_costs_nothing(
    gpu: Gpu, torch: Torch, vllm: SimpleNamespace, locked: bool, tagged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of newer versions some are never there, so that they would be looked for at every step."""
    assert vllm_pool._take() is not None
    workspaces, entered = vllm.WorkspaceManager(), []
    workspaces._ensure_workspace_size(GRANULARITY)
    workspaces._current_workspaces.append(None)
    workspaces._locked = locked
    tag = pool.tag
    monkeypatch.setattr(pool, "tag", lambda name: entered.append(name) or tag(name))
    workspaces._ensure_workspace_size(GRANULARITY)
    assert len(entered) == tagged


def test_a_cache_that_is_not_alone_and_that_nobody_restores_is_kept() -> None:
    """By what the model runner has: neither is known of it."""
    for runner, drops in (
        (SimpleNamespace(), False),
        (SimpleNamespace(initialize_kv_cache=lambda config, kv_cache_allocation_context: ...), True),
    ):
        made = worker()
        made.model_runner = runner
        assert vllm_memory.InPool(made)._drops() is drops


@pytest.mark.parametrize("lack", ["the method", "the module", "torch's method", "workspaces", "custom all-reduce"])
def test_a_vllm_that_is_not_as_known(
    gpu: Gpu, torch: Torch, vllm: SimpleNamespace, lack: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Or has its graphs registered with peers: one warning, they stay where torch has them, and weights and KV cache are in the pool."""
    if lack == "the method":
        vllm.Platform = sys.modules[vllm_pool.PLATFORM].Platform = type("Platform", (), {})  # type: ignore[attr-defined]
    elif lack == "the module":
        monkeypatch.setitem(sys.modules, vllm_pool.PLATFORM, None)
    elif lack == "torch's method":
        torch.module.cuda.CUDAGraph = type("CUDAGraph", (), {})
    elif lack == "custom all-reduce":
        group = SimpleNamespace(device_communicator=SimpleNamespace(ca_comm=SimpleNamespace(disabled=False)))
        state = ModuleType("vllm.distributed.parallel_state")
        state._groups = {"tp:0": lambda: group}  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, state.__name__, state)
    else:
        monkeypatch.setitem(sys.modules, vllm_pool.WORKSPACE, None)
    with caplog.at_level(logging.WARNING, "vllm.gpuckpt"):
        allocator = vllm_pool._take()
        assert vllm_pool._take() is allocator is not None
    what = "workspaces" if lack == "workspaces" else "graphs"
    assert [f"vLLM's {what} stay where torch has them" in r.getMessage() for r in caplog.records] == [True]
    if hasattr(vllm.Platform, "get_global_graph_pool"):
        assert (vllm.Platform().get_global_graph_pool() == "torch's own") is (what == "graphs")
    with allocator.use_memory_pool(tag="weights"):
        weights = torch.empty(GRANULARITY)
    assert where() == {"weights": "gpu"}
    assert weights.nbytes
