"""The pool where it is off, or cannot be: the program runs on with torch's own memory, and is told once why."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import gpuckpt.pool as pool
from gpuckpt.pool import PoolError, allocator, tags
from tests.machines import Machine
from tests.pool_machine import GRANULARITY, Gpu
from tests.pool_torch import Graph, Torch, gpu, torch

__all__ = ["gpu", "torch"]


@pytest.mark.parametrize("how", ["setting", "call"])
def test_expandable_segments_are_refused_with_words(gpu: Gpu, torch: Torch, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Whichever variable or call has set them."""
    if how == "call":
        torch.settings["expandable_segments"] = True
    else:
        torch.settings.clear()  # torch does not say; then the variables do
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", "garbage_collection_threshold:0.8, expandable_segments:True")
    with pytest.raises(PoolError, match=r"expandable_segments is on.*PYTORCH_ALLOC_CONF"), pool.tag("weights"):
        pass
    with pytest.raises(PoolError, match="expandable_segments"), pool.cuda_graph(Graph()):
        pass
    assert torch.routes == []


@pytest.mark.parametrize(
    ("lack", "words"),
    [
        (lambda t, m: m.setattr(pool, "Allocator", lambda path: allocator.Allocator(path, "libcuda.so.none")), "needs libcuda"),
        (lambda t, m: m.setattr(tags, "library", lambda: None), "takes a C compiler"),
        (lambda t, m: m.setitem(sys.modules, "torch", None), "torch cannot be imported"),
        (lambda t, m: setattr(t.module.version, "cuda", None), "not built for CUDA"),
        (lambda t, m: setattr(t.module, "__version__", "2.8.0+cu128"), r"torch 2\.8\.0\+cu128 is too old: it takes 2\.9"),
        (lambda t, m: m.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"), "PYTORCH_NO_CUDA_MEMORY_CACHING is set"),
        (lambda t, m: setattr(t, "backend", "cudaMallocAsync"), "'cudaMallocAsync'"),
        (lambda t, m: setattr(t, "gpus", False), "sees no GPU"),
    ],
)
def test_wanted_but_impossible(torch: Torch, monkeypatch: pytest.MonkeyPatch, lack: Callable[..., None], words: str) -> None:
    """One warning names what is missing; the program runs on with torch's own memory."""
    lack(torch, monkeypatch)
    with pytest.warns(RuntimeWarning, match=f"gpuckpt.pool does nothing here: .*{words}"):
        assert not pool.ready()
    with pool.tag("weights"), pool.tag("kv_cache"):  # a second one would be an error
        tensor = torch.empty(GRANULARITY)
    assert (pool.active(), pool.stats(), torch.routes, torch.pools) == (False, (), [], {})
    assert pool.sleep().tags == {}
    assert tensor.nbytes


def test_off_means_plain_torch(gpu: Gpu, torch: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tag, no warning, the environment untouched; a graph's memory is where it would be."""
    monkeypatch.setenv("GPUCKPT_POOL", "0")
    before = dict(os.environ)
    graph = Graph()
    with pool.tag("weights"), pool.cuda_graph(graph, stream="side"):
        torch.empty(GRANULARITY)
    assert (graph._pool, graph.stream, torch.pools, dict(os.environ)) == (None, "side", {}, before)
    assert not pool.active()


@pytest.mark.parametrize(("said", "then"), [(None, "0"), ("0", "0"), ("1", "1")])
def test_nccl_does_not_register_the_memory_of_graphs(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, said: str | None, then: str
) -> None:
    """Unless it is told to, explicitly: that is kept, with a warning."""
    monkeypatch.setattr(pool, "_tags", None)
    monkeypatch.setattr(pool, "Allocator", lambda _: gpu.pool)
    monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)
    if said is not None:
        monkeypatch.setenv("NCCL_GRAPH_REGISTER", said)
    assert pool.ready()
    pool.tag("weights")
    assert os.environ["NCCL_GRAPH_REGISTER"] == then
    assert ["NCCL_GRAPH_REGISTER=1 is kept" in str(w.message) for w in recwarn] == [True] * (said == "1")
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", then)  # so that it is undone


def test_importing_it_imports_no_torch_and_leaves_the_environment_alone() -> None:
    code = """if True:
        import os, sys
        before = dict(os.environ)
        import gpuckpt.pool as pool
        pool.sleep(), pool.wake(), pool.stats()
        print("torch" in sys.modules, before == dict(os.environ))
    """
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == ["False", "True"]


@pytest.mark.parametrize(("wanted", "said"), [("1", ["gpuckpt.pool does nothing here: torch cannot be imported"]), ("0", [])])
def test_a_program_that_wants_it_hears_at_its_start_what_is_missing(wanted: str, said: list[str]) -> None:
    """And has its agent all the same."""
    code = "import sys; sys.modules['torch'] = None; import gpuckpt.agent as a; a.install(pool=True); assert a._agent"
    ran = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "GPUCKPT_POOL": wanted}, capture_output=True, text=True, check=True
    )
    assert [line.partition("RuntimeWarning: ")[2].partition(". ")[0] for line in ran.stderr.splitlines() if "Warning" in line] == said


def test_the_doctor_tells_who_has_it_and_that_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path)
    machine.process(11, 1, "trainer", maps=f"7f0000000000-7f0000001000 r-xp 00000000 08:01 7 {allocator.library()}\n")
    line = machine.line("pool library")
    assert (line.status, line.message) == ("ok", "loaded in 11 (trainer)")
    monkeypatch.setattr(allocator, "library", lambda: None)
    line = machine.line("pool library")
    assert (line.status, "was not built" in line.message, "gcc" in line.fix) == ("warning", True, True)
