"""What an agent makes of the real ``gpuckpt.pool``: its library and blocks are real, torch and the driver are fakes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import gpuckpt.pool as pool
from gpuckpt.agent import vllm_memory, vllm_pool
from gpuckpt.agent.memory import PoolMemory
from gpuckpt.agent.server import Agent
from tests.pool_machine import GRANULARITY, OUT_OF_MEMORY, Gpu
from tests.pool_torch import Graph, Torch, gpu, torch, under, where

__all__ = ["gpu", "torch"]


def offload(memory: Any) -> dict[str, Any]:
    """As an agent does it: HalfWayError, if what failed cannot be taken back."""
    agent: Any = SimpleNamespace(memory=memory)
    return Agent._offload(agent)


def worker(cache_dtype: str = "auto", **config: object) -> SimpleNamespace:
    woken: list[bool] = []
    runner = SimpleNamespace(post_kv_cache_wake_up=lambda: woken.append(True), woken=woken)
    cache = SimpleNamespace(cache_dtype=cache_dtype)
    return SimpleNamespace(model_runner=runner, vllm_config=SimpleNamespace(cache_config=cache, kv_transfer_config=None, **config))


def test_nothing_is_dropped_of_a_program_and_all_comes_back(gpu: Gpu, torch: Torch) -> None:
    memory = PoolMemory()
    assert (memory.describe(), memory.tags()) == (None, [])
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
        assert {(t["tag"], t["bytes"], t["where"]) for t in memory.tags()} == {(name, GRANULARITY, "host") for name in made}
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


@pytest.mark.parametrize("kind", ["program", "vLLM"])
def test_a_program_that_stands_inside_a_tag_goes_on(gpu: Gpu, torch: Torch, kind: str) -> None:
    """Nothing has left, so nothing has to come back: or it would stand there for ever, inside its tag."""
    memory: Any = PoolMemory() if kind == "program" else vllm_memory.InPool(worker())
    memory.announce(True)
    memory.forgotten = True
    weights = under(torch, "weights", b"w" * 100)
    with pool.tag("runtime"), pytest.raises(pool.PoolError, match=r"is inside the tag 'runtime'\. Everything is as it was"):
        offload(memory)
    assert where() == {"weights": "gpu"}
    assert weights.content().startswith(b"w" * 100)


@pytest.mark.parametrize("level", [("weights",), ()])
def test_a_server_that_its_own_call_put_to_sleep_meanwhile_sleeps_on(gpu: Gpu, torch: Torch, level: tuple[str, ...]) -> None:
    """Between the look at it and the step in which it stands."""
    allocator, made = vllm_pool.PoolAllocator(pool), []
    for tag in ("weights", "kv_cache"):
        with allocator.use_memory_pool(tag=tag):
            made.append(torch.empty(GRANULARITY))
    memory = vllm_memory.InPool(worker())
    assert memory.describe() is not None
    allocator.sleep(offload_tags=level)
    asleep = where()
    memory.announce(True)
    memory.forgotten = True
    with pytest.raises(RuntimeError, match="by its own endpoint meanwhile"):
        offload(memory)
    assert where() == asleep
    allocator.wake_up(None)
    assert memory.describe() is not None
    assert made


def test_graphs_released_before_and_captured_anew_after(gpu: Gpu, torch: Torch) -> None:
    """As docs/pool.md has it, with a capture that fails once."""
    weights, graph, made, trouble = under(torch, "weights", b"w" * 100), Graph(), [], [RuntimeError("not now")]

    class Recaptured(PoolMemory):
        def offload(self) -> dict[str, int]:
            made.clear()
            graph.reset()
            pool.drop_graphs()
            return super().offload()

        def onload(self) -> None:
            super().onload()
            if trouble:
                raise trouble.pop()
            capture()

    def capture() -> None:
        with pool.cuda_graph(graph):
            made.append(torch.empty(GRANULARITY))

    capture()
    memory = Recaptured()
    assert memory.offload() == {"kept_bytes": GRANULARITY, "dropped_bytes": 0}
    assert (where(), gpu.held.used) == ({"weights": "host"}, (0, 0))
    with pytest.raises(RuntimeError, match="not now"):
        memory.onload()
    memory.onload()
    assert where() == {"weights": "gpu", "cudagraph": "gpu"}
    assert weights.content().startswith(b"w" * 100)
