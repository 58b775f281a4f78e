"""Tags, as a program with torch uses them: torch is a fake, the library and its blocks are real, on the fake driver."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpuckpt.pool as pool
from gpuckpt.pool import tags
from gpuckpt.pool.tags import Tags
from tests.pool_machine import GRANULARITY, Gpu
from tests.pool_torch import Graph, Torch, install


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Torch:
    monkeypatch.setattr(tags, "_warned", threading.Event())
    monkeypatch.delenv("GPUCKPT_POOL", raising=False)
    monkeypatch.setattr(pool, "_tags", None)
    return install(monkeypatch)


@pytest.fixture
def gpu(tmp_path: Path, torch: Torch, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    made = Gpu(tmp_path)
    monkeypatch.setattr(pool, "_tags", Tags(made.pool))
    yield made


def where() -> dict[str, str]:
    return {s.tag: s.where for s in pool.stats()}


def test_level_1_keeps_weights_and_drops_the_cache(gpu: Gpu, torch: Torch) -> None:
    made = {}
    for name in ("weights", "kv_cache", "runtime", "mine"):
        with pool.tag(name):
            made[name] = torch.empty(GRANULARITY).copy_(name.encode() * 100)
    outside = torch.empty(GRANULARITY)
    content = {name: t.content() for name, t in made.items()}
    moved = pool.sleep()
    assert where() == {"weights": "host", "kv_cache": "discarded", "runtime": "host", "mine": "host"}
    assert (moved.bytes_copied, moved.bytes_discarded) == (3 * GRANULARITY, GRANULARITY)
    assert pool.asleep() == {"weights", "kv_cache", "runtime", "mine"}
    assert torch.synchronised
    assert torch.caches_emptied
    assert outside.content()
    pool.wake()
    assert {n: t.content() == content[n] for n, t in made.items()} == {"weights": True, "kv_cache": False, "runtime": True, "mine": True}
    assert not pool.asleep()


def test_a_graph_reads_its_constant_after_both_levels_and_every_order_of_waking(gpu: Gpu, torch: Torch) -> None:
    with pool.tag("weights"):
        weights = torch.empty(GRANULARITY).copy_(b"w" * 10)
    with pool.tag("kv_cache"):
        cache = torch.empty(GRANULARITY)
    graph = Graph()
    with pool.cuda_graph(graph):
        constant = torch.empty(GRANULARITY).copy_(b"constant")
    content = constant.content()
    for level in (1, 2):
        for order in (("weights", "kv_cache"), ("kv_cache", "weights"), ("weights", "weights", "kv_cache")):
            pool.sleep(level)
            assert where()["cudagraph"] == "host"
            for name in order:
                pool.wake((name,))
                assert constant.content() == content
            assert not pool.asleep()
            if level == 1:
                assert weights.content()[:10] == b"w" * 10
            weights.copy_(b"w" * 10)
    assert cache.nbytes
