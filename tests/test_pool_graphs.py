"""CUDA graphs in the pool: captures by its own context manager and by others, recapture, and sleeps between. Torch is a fake."""

from __future__ import annotations

import pytest

import gpuckpt.pool as pool
from gpuckpt.pool import PoolError
from tests.pool_machine import GRANULARITY, Gpu
from tests.pool_torch import Graph, Torch, gpu, torch, under, where

__all__ = ["gpu", "torch"]


def test_all_captures_share_one_pool_which_lives_as_long_as_a_graph(gpu: Gpu, torch: Torch) -> None:
    graphs = [Graph() for _ in range(3)]
    for graph in graphs:
        with pool.cuda_graph(graph, stream="side"):
            torch.empty(GRANULARITY)
    assert len({g.pool() for g in graphs}) == 1
    assert graphs[0].stream == "side"
    pool.sleep()
    pool.wake()
    assert where() == {"cudagraph": "gpu"}, "torch holds nothing in it, the graphs do"
    with pytest.raises(ValueError, match="leave pool= out"), pool.cuda_graph(Graph(), pool=7):
        pass
    for graph in graphs:
        graph.reset()
    pool.trim()
    assert gpu.nothing_held


def test_recapture_refills_to_the_same_size(gpu: Gpu, torch: Torch) -> None:
    for _ in range(3):
        graph = Graph()
        with pool.cuda_graph(graph):
            kept = [torch.empty(GRANULARITY) for _ in range(4)]
        assert sum(s.bytes for s in pool.stats()) == 4 * GRANULARITY
        with pytest.raises(PoolError, match=r"1 graph holds the graph pool of GPU 0 \(captured at test_pool_graphs.py:\d+\)"):
            pool.drop_graphs()
        kept.clear()
        graph.reset()
        pool.drop_graphs()
        assert gpu.nothing_held


def test_the_id_of_the_graph_pool_holds_for_ever(gpu: Gpu, torch: Torch) -> None:
    """vLLM knows it and nothing else: through all that lets go of pools, before the first capture and after the last."""
    cuda, handle = torch.module.cuda, pool.graph_pool()
    for _ in range(2):
        pool.trim()
        pool.drop_graphs()
        pool.sleep()
        pool.wake()
        graphs = [cuda.CUDAGraph() for _ in range(2)]
        with cuda.graph(graphs[0], pool=handle):
            theirs = torch.empty(GRANULARITY).copy_(b"constant")
        with pool.cuda_graph(graphs[1]):
            ours = torch.empty(2 * GRANULARITY)
        assert {graphs[0].pool(), graphs[1].pool(), pool.graph_pool()} == {handle}
        assert [(s.tag, s.bytes) for s in pool.stats()] == [("cudagraph", 3 * GRANULARITY)], "a recapture takes no more"
        with pytest.raises(PoolError, match=r"2 graphs hold the graph pool of GPU 0 \(captured at .*:\d+, .*:\d+\)"):
            pool.drop_graphs()
        pool.sleep(2)
        pool.wake(("weights",))
        assert theirs.content().startswith(b"constant")
        for graph in graphs:
            graph.reset()
        del theirs, ours


def test_captures_of_others_are_seen(gpu: Gpu, torch: Torch) -> None:
    """Into whatever pool: nothing sleeps, nor waits for the GPU, until they end."""
    cuda, handle = torch.module.cuda, pool.graph_pool()
    weights, address = under(torch, "weights", b"w"), gpu.malloc("mine")
    for options in ({"pool": handle}, {}):
        with cuda.graph(cuda.CUDAGraph(), **options):
            with pytest.raises(
                PoolError, match="cannot sleep while something is allocated: thread 'MainThread' is inside the tag 'cudagraph'"
            ):
                pool.sleep()
            with pool.tag("runtime"):  # as in pool.cuda_graph: all memory is the graph's
                torch.empty(GRANULARITY)
            if address:
                gpu.free(address)
                address = 0
                assert gpu.held.mapped == 1 + 1 + 1, "it is freed later"
        pool.sleep()
        if options:
            with pytest.raises(PoolError, match="'cudagraph' is asleep"), cuda.graph(cuda.CUDAGraph(), pool=handle):
                pass
        pool.wake()
    assert {s.tag for s in pool.stats()} == {"weights", "cudagraph"}
    assert (torch.routes, weights.content()[:1]) == ([], b"w")


@pytest.mark.parametrize("method", ["capture_begin", "capture_end"])
def test_a_capture_of_others_that_fails_is_over(gpu: Gpu, torch: Torch, method: str) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("operation not permitted")

    cuda = torch.module.cuda
    cuda.CUDAGraph = type("CUDAGraph", (Graph,), {"torch": torch, method: fail})
    handle = pool.graph_pool()
    with pytest.raises(RuntimeError, match="not permitted"), cuda.graph(cuda.CUDAGraph(), pool=handle):
        pass
    gpu.free(gpu.malloc("mine"))
    assert gpu.held.mapped == 0, "nothing is captured any more"
    pool.sleep()


def test_graph_memory_is_not_dropped_while_it_sleeps(gpu: Gpu, torch: Torch) -> None:
    with pool.cuda_graph(Graph()):
        kept = torch.empty(GRANULARITY)
    pool.sleep()
    with pytest.raises(PoolError, match="asleep: wake it first"):
        pool.drop_graphs()
    pool.wake()
    assert kept.content()
