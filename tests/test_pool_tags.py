"""Tags, as a program with torch uses them: torch is a fake, the library and its blocks are real, on the fake driver."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial

import pytest

import gpuckpt.pool as pool
from gpuckpt.pool import PoolError
from tests.pool_machine import GARBAGE, GRANULARITY, Gpu
from tests.pool_torch import Graph, Torch, gpu, lasting, torch, under, where

__all__ = ["gpu", "torch"]


# Policy.


def test_level_1_keeps_weights_and_drops_the_cache(gpu: Gpu, torch: Torch) -> None:
    made = {name: under(torch, name, name.encode() * 100) for name in ("weights", "kv_cache", "runtime", "mine")}
    outside = torch.empty(GRANULARITY)
    content = {name: t.content() for name, t in made.items()}
    moved = pool.sleep()
    assert where() == {"weights": "host", "kv_cache": "discarded", "runtime": "host", "mine": "host"}
    assert (moved.bytes_copied, moved.bytes_discarded) == (3 * GRANULARITY, GRANULARITY)
    assert moved.seconds >= sum(moved.phases.values()) > 0
    assert pool.asleep() == {"weights", "kv_cache", "runtime", "mine"}
    assert torch.synchronised
    assert torch.caches_emptied
    assert outside.content()
    pool.wake()
    assert {n: t.content() == content[n] for n, t in made.items()} == {"weights": True, "kv_cache": False, "runtime": True, "mine": True}
    assert not pool.asleep()


def test_a_graph_reads_its_constant_after_both_levels_and_every_order_of_waking(gpu: Gpu, torch: Torch) -> None:
    weights = under(torch, "weights", b"w" * 10)
    lasting(torch, "kv_cache")
    with pool.cuda_graph(Graph()):
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


def test_weights_are_updated_between_the_two_wakes(gpu: Gpu, torch: Torch) -> None:
    weights, cache = under(torch, "weights", b"old"), under(torch, "kv_cache")
    pool.sleep(2)
    pool.wake(("weights",))
    assert pool.asleep() == {"kv_cache"}
    weights.copy_(b"new")
    pool.wake(("kv_cache",))
    assert weights.content()[:3] == b"new"
    assert set(cache.content()) == {GARBAGE}


def test_a_tag_that_is_awake(gpu: Gpu, torch: Torch) -> None:
    """Case 50: naming one is no error, and does not keep the others asleep; nor do tuples that are empty or name one twice."""
    kept = [under(torch, "weights", b"w"), under(torch, "kv_cache"), under(torch, "runtime", b"r")]
    pool.sleep()
    pool.wake(())
    assert where() == {"weights": "host", "kv_cache": "discarded", "runtime": "gpu"}
    pool.wake(("weights", "weights"))
    assert pool.wake(("weights", "kv_cache")).tags == {"kv_cache": GRANULARITY}
    assert pool.wake(("weights", "kv_cache")).tags == pool.wake("weights").tags == pool.wake().tags == {}
    assert [t.content()[:1] for t in kept] == [b"w", bytes([GARBAGE]), b"r"]
    pool.sleep()
    assert pool.sleep(2).tags == {}, "what sleeps stays as it is"
    assert where()["weights"] == "host"


def test_a_program_decides_for_tags_by_name(gpu: Gpu, torch: Torch) -> None:
    kept = [under(torch, name, b"c") for name in ("weights", "kv_cache", "mine")]
    pool.sleep(offload=("weights", "runtime", "cudagraph", "kv_cache"), discard="mine")
    assert where() == {"weights": "host", "kv_cache": "host", "mine": "discarded"}
    pool.wake()
    assert [t.content()[:1] for t in kept] == [b"c", b"c", bytes([GARBAGE])]


def test_with_a_discard_of_nothing_nothing_is_dropped(gpu: Gpu, torch: Torch) -> None:
    """An agent offloads so: what it knows of is all kept."""
    kept = [under(torch, name, b"c") for name in ("weights", "kv_cache")]
    assert pool.sleep(2, offload=("weights",), discard=()).bytes_discarded == 0
    pool.wake()
    assert [t.content()[:1] for t in kept] == [b"c", b"c"]
    assert pool.sleep(2, offload="kv_cache").bytes_discarded == GRANULARITY
    assert where() == {"weights": "discarded", "kv_cache": "host"}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: pool.wake(("wieghts",)), "no tag wieghts: there are weights, kv_cache, cudagraph, runtime, mine"),
        (lambda: pool.sleep(discard=("nobody",)), "no tag nobody: there are weights"),
        (lambda: pool.sleep(3), "no level 3: 1 keeps weights, 2 drops them"),
        (lambda: pool.sleep(offload=("mine",), discard=("mine",)), "to be offloaded and discarded: mine"),
        (lambda: pool.sleep(discard=("cudagraph",)), "cudagraph cannot be discarded: captured graphs read values"),
        (lambda: pool.tag("KV-Cache"), "no tag 'KV-Cache': small letters and underscores"),
    ],
)
def test_what_makes_no_sense_is_said_and_nothing_moves(gpu: Gpu, torch: Torch, call: Callable[[], object], words: str) -> None:
    lasting(torch, "mine")
    with pytest.raises(ValueError, match=words):
        call()
    assert where() == {"mine": "gpu"}


def test_without_tags_there_is_nothing_to_do(torch: Torch) -> None:
    assert pool.sleep().seconds == pool.wake().seconds == 0
    assert (pool.stats(), pool.asleep(), pool.active(), pool.trim()) == ((), frozenset(), False, 0)
    met: list[str] = []
    pool.sleep(barrier=lambda: met.append("sleep"))
    pool.wake(barrier=lambda: met.append("wake"))
    assert met == ["sleep", "sleep", "wake", "wake"], "other ranks have tags, and wait"
    with pytest.raises(ValueError, match="no tag mine"):
        pool.wake(("mine",))


# Sleeping memory is not used.


def test_writing_into_sleeping_memory(gpu: Gpu, torch: Torch) -> None:
    """Case 49: our call says "asleep", and changes nothing."""
    weights, outside = under(torch, "weights", b"before"), torch.empty(GRANULARITY)
    pool.sleep()
    with pytest.raises(PoolError, match=r"written to is asleep, in tag 'weights': wake it first\. Nothing was written"):
        pool.copy_(weights, b"after")
    with pytest.raises(PoolError, match="read is asleep"):
        pool.copy_(outside, weights)
    pool.wake()
    assert weights.content()[:6] == b"before"
    pool.copy_(weights, outside.copy_(b"after"))
    assert weights.content()[:5] == b"after"


def test_nothing_is_allocated_under_a_tag_that_sleeps(gpu: Gpu, torch: Torch) -> None:
    """torch would hand out a piece of a segment that sleeps."""
    lasting(torch, "weights", "cudagraph")
    pool.sleep()
    with pytest.raises(PoolError, match="the tag 'weights' is asleep: wake it before"), pool.tag("weights"):
        pass
    with pytest.raises(PoolError, match="the tag 'cudagraph' is asleep"), pool.cuda_graph(Graph()):
        pass
    other = under(torch, "others", b"others")
    pool.wake()
    assert other.content()[:6] == b"others"


def test_nobody_sleeps_while_a_thread_is_inside_a_tag(gpu: Gpu, torch: Torch) -> None:
    inside, go = threading.Event(), threading.Event()
    lasting(torch, "kv_cache")
    pool.sleep()

    def load() -> None:
        with pool.tag("weights"):
            inside.set()
            go.wait(20)

    thread = threading.Thread(target=load, name="loader")
    thread.start()
    assert inside.wait(20)
    for call in (pool.sleep, partial(pool.wake, "kv_cache"), pool.trim):
        with pytest.raises(PoolError, match=r"thread 'loader' is inside the tag 'weights'\. Everything is as it was"):
            call()
    assert pool.wake("weights").tags == {}, "nothing of it sleeps"
    go.set()
    thread.join()
    pool.sleep()


# Allocating.


def test_the_inner_of_two_tags_counts(gpu: Gpu, torch: Torch) -> None:
    """In torch the outer one of two pools does."""
    with pool.tag("runtime"):
        a = torch.empty(GRANULARITY)
        with pool.tag("weights"):
            b = torch.empty(2 * GRANULARITY)
            with pool.tag("kv_cache"):
                c = torch.empty(3 * GRANULARITY)
            d = torch.empty(4 * GRANULARITY)
        graph = Graph()
        with pool.cuda_graph(graph):
            e = torch.empty(5 * GRANULARITY)
            with pool.tag("weights"):
                f = torch.empty(6 * GRANULARITY)
        g = torch.empty(7 * GRANULARITY)
    outside = torch.empty(GRANULARITY)
    assert {s.tag: s.bytes // GRANULARITY for s in pool.stats()} == {"runtime": 1 + 7, "weights": 2 + 4, "kv_cache": 3, "cudagraph": 5 + 6}
    assert torch.routes == []
    assert len({t.data_ptr() for t in (a, b, c, d, e, f, g, outside)}) == 8


def test_a_tag_is_left_when_its_body_fails(gpu: Gpu, torch: Torch) -> None:
    with pytest.raises(KeyError), pool.tag("weights"), pool.tag("runtime"):
        raise KeyError
    with pytest.raises(KeyError), pool.cuda_graph(Graph()):
        raise KeyError
    assert torch.routes == []
    address = gpu.malloc("weights")
    gpu.free(address)
    assert gpu.held.mapped == 0, "no capture is under way any more"
    pool.sleep()


def test_what_torch_does_not_use_is_freed_by_a_sleep_not_copied(gpu: Gpu, torch: Torch) -> None:
    kept, gone = under(torch, "weights", b"kept"), under(torch, "weights")
    del gone
    assert gpu.held.mapped == 2
    assert pool.sleep().bytes_copied == GRANULARITY
    torch.empty_cache()
    pool.wake()
    assert kept.content()[:4] == b"kept"
    del kept
    torch.empty_cache()
    assert gpu.nothing_held


def test_tensors_freed_while_asleep_give_all_back(gpu: Gpu, torch: Torch) -> None:
    tensor = under(torch, "weights")
    pool.sleep()
    del tensor
    torch.empty_cache()
    assert gpu.nothing_held
    assert pool.stats() == ()
    with pool.tag("weights"):  # nothing of it sleeps any more
        pass


def test_two_devices(gpu: Gpu, torch: Torch) -> None:
    made = []
    for torch.device in (0, 1):
        with pool.tag("weights"):
            made.append(torch.empty(GRANULARITY).copy_(b"device %d" % torch.device))
    pool.sleep()
    assert [(s.tag, s.device, s.where) for s in pool.stats()] == [("weights", 0, "host"), ("weights", 1, "host")]
    pool.wake()
    assert [t.content()[:8] for t in made] == [b"device 0", b"device 1"]


# Several ranks, forks, failures.


def test_ranks_that_sleep_by_calls_of_their_own_meet_before_and_after(gpu: Gpu, torch: Torch) -> None:
    """One that fails, too, or the others would wait for it."""
    lasting(torch, "weights")
    met: list[str] = []
    pool.sleep(barrier=lambda: met.append(where()["weights"]))
    pool.wake(barrier=lambda: met.append(where()["weights"]))
    assert met == ["gpu", "host", "host", "gpu"]
    gpu.fail_in("cuMemUnmap")
    with pytest.raises(PoolError, match="cuMemUnmap on GPU 0 failed with CUDA error 999 during sleep"):
        pool.sleep(barrier=lambda: met.append(where()["weights"]))
    assert met[4:] == ["gpu", "gpu"]
    with pool.tag("runtime"), pytest.raises(PoolError, match="inside the tag"):
        pool.sleep(barrier=lambda: met.append("too early"))
    assert met[6:] == ["too early"] * 2
    for call in (partial(pool.sleep, offload=("mine",)), partial(pool.sleep, 3), partial(pool.wake, ("mine",))):
        with pytest.raises(ValueError, match=r"no tag mine|no level 3"):  # a tag that the other ranks may have
            call(barrier=lambda: met.append("refused"))
    assert met[8:] == ["refused"] * 6


def test_a_barrier_that_fails_is_not_met_again(gpu: Gpu, torch: Torch) -> None:
    lasting(torch, "weights")
    met = []

    def barrier() -> None:
        met.append(where()["weights"])
        raise RuntimeError("a rank is gone")

    with pytest.raises(RuntimeError, match="a rank is gone"):
        pool.sleep(barrier=barrier)
    assert (met, where()) == (["gpu"], {"weights": "gpu"})


def test_a_forked_child_has_none_of_it(gpu: Gpu, torch: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it wait for a lock that a thread of its parent held."""
    lasting(torch, "weights")
    monkeypatch.setattr(pool._tags, "pid", os.getppid())
    with pool.tag("weights"), pool.cuda_graph(Graph()):
        assert torch.routes == []
    assert not pool.active()
    for call in (pool.sleep, pool.wake, pool.trim, pool.drop_graphs):
        with pytest.raises(PoolError, match=f"forked child: the pool's memory is its parent's, pid {os.getppid()}"):
            call()


def test_work_that_failed_before_a_sleep(gpu: Gpu, torch: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    lasting(torch, "weights")

    def fail(_: int) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.module.cuda, "synchronize", fail)
    with pytest.raises(PoolError, match="everything is as it was: CUDA error: an illegal memory access"):
        pool.sleep()
    assert where() == {"weights": "gpu"}
