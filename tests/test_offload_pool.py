"""What an agent makes of the real ``gpuckpt.pool``: its library and blocks are real, torch and the driver are fakes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import gpuckpt.pool as pool
from gpuckpt.agent import vllm_memory, vllm_pool
from gpuckpt.agent.memory import PoolMemory
from tests.pool_machine import GRANULARITY, OUT_OF_MEMORY, Gpu
from tests.pool_torch import Torch
from tests.test_pool_tags import gpu, torch, under, where

__all__ = ["gpu", "torch"]


def worker(cache_dtype: str = "auto", **config: object) -> SimpleNamespace:
    woken: list[bool] = []
    runner = SimpleNamespace(post_kv_cache_wake_up=lambda: woken.append(True), woken=woken)
    cache = SimpleNamespace(cache_dtype=cache_dtype)
    return SimpleNamespace(model_runner=runner, vllm_config=SimpleNamespace(cache_config=cache, kv_transfer_config=None, **config))


def test_nothing_is_dropped_of_a_program_and_all_comes_back(gpu: Gpu, torch: Torch) -> None:
    memory = PoolMemory()
    assert memory.describe() is None
    made = {name: under(torch, name, name.encode() * 100) for name in ("weights", "kv_cache", "mine")}
    content = {name: t.content() for name, t in made.items()}
    seen = memory.describe()
    assert seen is not None
    assert (seen["kept_bytes"], seen["host_bytes"]) == (3 * GRANULARITY, 3 * GRANULARITY)
    assert {t["tag"]: (t["bytes"], t["where"]) for t in seen["tags"]} == dict.fromkeys(made, (GRANULARITY, "gpu"))
    for _ in range(2):
        assert memory.offload() == {"kept_bytes": 3 * GRANULARITY, "dropped_bytes": 0}
        assert set(where().values()) == {"host"}
        assert gpu.held.used == (0, 0)
        assert memory.describe() is None
        memory.onload()
        assert {name: t.content() for name, t in made.items()} == content
        assert memory.describe()["host_bytes"] == 0, "its copies are there for the next time"


def test_what_slept_before_sleeps_on(gpu: Gpu, torch: Torch) -> None:
    weights, cache = under(torch, "weights", b"w" * 100), under(torch, "kv_cache", b"k" * 100)
    pool.sleep()
    pool.wake(("weights",))
    memory = PoolMemory()
    assert memory.offload() == {"kept_bytes": GRANULARITY, "dropped_bytes": 0}
    memory.onload()
    assert where() == {"weights": "gpu", "kv_cache": "discarded"}
    assert weights.content().startswith(b"w" * 100)
    assert cache is not None


@pytest.mark.parametrize("what", ["offload", "onload"])
def test_a_failure_can_be_tried_again(gpu: Gpu, torch: Torch, what: str) -> None:
    made = [under(torch, name, name.encode() * 100) for name in ("weights", "mine")]
    content = [t.content() for t in made]
    memory = PoolMemory()
    if what == "onload":
        memory.offload()
        gpu.fail_in("cuMemCreate", 2, OUT_OF_MEMORY)
        with pytest.raises(pool.NoGpuMemory):
            memory.onload()
    else:
        gpu.fail_in("cuMemUnmap", 1)
        with pytest.raises(pool.PoolError):
            memory.offload()
    memory.onload()
    assert [t.content() for t in made] == content
    assert set(where().values()) == {"gpu"}


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
