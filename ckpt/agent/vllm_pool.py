"""``gpuckpt.pool`` as the allocator of vLLM's sleep mode, where ``GPUCKPT_POOL=1`` asks for it beside ``GPUCKPT_AGENT=1``.

vLLM (0.26) takes its allocator from ``vllm.device_allocator.get_mem_allocator_instance``, wherever it allocates, sleeps or wakes up, by
its own endpoints too. In its place stands :class:`PoolAllocator`, with vLLM's tags "weights" and "kv_cache".

With it come, under tags that every sleep keeps in host memory:

- "cudagraph": the graphs of ``current_platform.get_global_graph_pool``, which all of vLLM's wrappers and managers ask for the id of their
  graph pool (FULL, PIECEWISE, breakable, micro-batched, the speculator's), and pass on to its PyNccl. Captures that are only measured, and
  those of an encoder for images, have pools of their own by ``graph_pool_handle``, and stay outside.
- "runtime": the scratch of ``WorkspaceManager``, each a tensor of its own that grows until vLLM serves.

The rest stays where torch has it, for reasons that docs/pool.md has. The server with the pool started and answered on a GPU; graphs and
workspaces in it have not yet run on one.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

VARIABLE = "GPUCKPT_POOL"
DROPPABLE = frozenset({"weights", "kv_cache"})
RUNTIME = "runtime"
PLATFORM, WORKSPACE = "vllm.platforms.interface", "vllm.v1.worker.workspace"

log = logging.getLogger("vllm.gpuckpt")

_taken: PoolAllocator | None = None


class PoolAllocator:
    """vLLM's ``MemAllocator`` on *pool*."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    @contextlib.contextmanager
    def use_memory_pool(self, tag: str | None = None) -> Iterator[None]:
        """What torch allocates inside lies in the pool. What it does not use at the end is given back, as vLLM's own does."""
        with self._pool.tag(tag or "default"):
            yield
        self._pool.trim()

    def sleep(self, offload_tags: Iterable[str] | str | None = None) -> None:
        """Weights and KV cache are dropped unless they are named; all else is kept, since captured graphs may read it."""
        kept = {offload_tags} if isinstance(offload_tags, str) else set(offload_tags or ())
        self._pool.sleep(offload=kept, discard=DROPPABLE - kept)

    def wake_up(self, tags: list[str] | None = None) -> None:
        self._pool.wake(tags)

    def get_current_usage(self) -> int:
        """Bytes."""
        return sum(s.bytes for s in self._pool.stats())


def chosen() -> bool:
    """Whether vLLM in this process has its memory in the pool."""
    return _taken is not None


def hook() -> None:
    """Offer the pool to vLLM, if it is asked for; whether it can be had is seen when vLLM first wants an allocator, in its worker."""
    if os.environ.get(VARIABLE) != "1":
        return
    # The pool sets it with its first tag, when vLLM's communicators are there and have read it.
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    module = importlib.import_module("vllm.device_allocator")
    own = module.get_mem_allocator_instance
    if hasattr(own, VARIABLE):
        return

    @functools.wraps(own)
    def get_mem_allocator_instance() -> Any:
        return _take() or own()

    setattr(get_mem_allocator_instance, VARIABLE, True)
    for user in (module, sys.modules.get("vllm.v1.worker.gpu_worker")):
        if user is not None:
            setattr(user, own.__name__, get_mem_allocator_instance)


@functools.cache
def _take() -> PoolAllocator | None:
    """The pool; None, with a warning, where it cannot be had: vLLM has its own then."""
    global _taken  # noqa: PLW0603 - one a process, as it has one GPU state
    try:
        pool = importlib.import_module("gpuckpt.pool")
        why = pool.problem()
    except ImportError as e:
        why = str(e)
    if why:
        log.warning("%s=1 has no effect, vLLM's own allocator is used: %s", VARIABLE, why)
        return None
    _taken = PoolAllocator(pool)
    for what, hook_them in (("graphs", _hook_graphs), ("workspaces", _hook_workspaces)):
        try:
            hook_them(pool)
        except (ImportError, AttributeError, RuntimeError) as e:
            log.warning("vLLM's %s stay where torch has them, and are not in gpuckpt's pool: %s", what, e)
    return _taken


def _hook_graphs(pool: Any) -> None:
    """Before anything of this worker has asked for a graph pool: its first wrapper is made while its weights are loaded."""
    cls = importlib.import_module(PLATFORM).Platform
    if name := _who_registers_graphs():
        why = "registers the memory of graphs with its peers by CUDA IPC, which does not take the pool's: start vLLM with"
        raise RuntimeError(f"the custom all-reduce of group {name} {why} --disable-custom-all-reduce")
    own, handle = cls.get_global_graph_pool, pool.graph_pool()
    if handle is None:
        return

    @functools.wraps(own)
    def get_global_graph_pool(_: Any) -> Any:
        return handle

    cls.get_global_graph_pool = get_global_graph_pool


def _who_registers_graphs() -> str:
    from gpuckpt.nccl.communicators import vllm_groups

    for name, group in vllm_groups(sys.modules):
        used = getattr(getattr(group, "device_communicator", None), "ca_comm", None)
        if used is not None and not getattr(used, "disabled", False):
            return name
    return ""


def _hook_workspaces(pool: Any) -> None:
    cls = importlib.import_module(WORKSPACE).WorkspaceManager
    own = cls._ensure_workspace_size

    @functools.wraps(own)
    def _ensure_workspace_size(manager: Any, required_bytes: int) -> Any:
        if all(w is not None and w.nbytes >= required_bytes for w in getattr(manager, "_current_workspaces", ())):
            return own(manager, required_bytes)
        with pool.tag(RUNTIME):
            workspace = own(manager, required_bytes)
        with contextlib.suppress(RuntimeError):  # somebody is inside a tag: the smaller one is given back later
            pool.trim()
        return workspace

    cls._ensure_workspace_size = _ensure_workspace_size
