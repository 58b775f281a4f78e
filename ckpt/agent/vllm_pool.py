"""``gpuckpt.pool`` as the allocator of vLLM's sleep mode, where ``GPUCKPT_POOL=1`` asks for it beside ``GPUCKPT_AGENT=1``.

vLLM takes its allocator from ``vllm.device_allocator.get_mem_allocator_instance``, wherever it allocates, sleeps or wakes up, by
its own endpoints too. In its place stands :class:`PoolAllocator`, with vLLM's tags "weights" and "kv_cache".

With it come, under tags that every sleep keeps in host memory:

- "cudagraph": the graphs of ``current_platform.get_global_graph_pool``, which all of vLLM's wrappers and managers ask for the id of their
  graph pool (FULL, PIECEWISE, breakable, micro-batched, the speculator's), and pass on to its PyNccl. Captures that are only measured, and
  those of an encoder for images, have pools of their own by ``graph_pool_handle``, and stay outside. With
  ``--sleep-mode-offload-cudagraph`` (0.32) vLLM asks its allocator for a graph pool, and gets the same.
- "runtime": the scratch of ``WorkspaceManager``, each a tensor of its own that grows until vLLM serves. Newer versions allocate it, and
  more, under tags of their own ("workspace", "runtime").

The rest stays where torch has it, for reasons that docs/pool.md has. On a GPU it ran with vLLM 0.26, a dense
model and its graphs; workspaces of mixtures of experts have not. Versions up to 0.33 are read from their sources.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from gpuckpt.agent.vllm_known import known

VARIABLE = "GPUCKPT_POOL"
DROPPABLE = frozenset({"weights", "kv_cache"})
RUNTIME = "runtime"
NAME, GLOBAL = "get_mem_allocator_instance", "_global_graph_pool"
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
        _trim(self._pool)

    def sleep(self, offload_tags: Iterable[str] | str | None = None) -> None:
        """Weights and KV cache are dropped unless they are named; all else is kept, since captured graphs may read it."""
        kept = {offload_tags} if isinstance(offload_tags, str) else set(offload_tags or ())
        self._pool.sleep(offload=kept, discard=DROPPABLE - kept)

    def wake_up(self, tags: list[str] | None = None) -> None:
        self._pool.wake(tags)

    def discard(self, tags: Iterable[str] | str) -> None:
        self._pool.discard(tags)

    @contextlib.contextmanager
    def cudagraph_pool(self) -> Iterator[Any]:
        """The id of the pool that graphs have without being asked for it, too."""
        yield self._pool.graph_pool()

    def get_current_usage(self) -> int:
        """Bytes."""
        return sum(s.bytes for s in self._pool.stats())


def _trim(pool: Any) -> None:
    with contextlib.suppress(RuntimeError):  # somebody is inside another tag: what is not used is given back later
        pool.trim()


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
    asked = (name for name in vars(getattr(module, "MemAllocator", object)) if not name.startswith("_"))
    if lacking := [name for name in asked if not hasattr(PoolAllocator, name)]:
        raise AttributeError(f"an allocator is asked for {', '.join(lacking)}")

    @functools.wraps(own)
    def get_mem_allocator_instance() -> Any:
        return _take() or own()

    setattr(get_mem_allocator_instance, VARIABLE, True)
    for path, user in list(sys.modules.items()):  # whoever has imported it by name
        if path.startswith("vllm.") and getattr(user, "__dict__", {}).get(NAME) is own:
            setattr(user, NAME, get_mem_allocator_instance)


@functools.cache
def _take() -> PoolAllocator | None:
    """The pool; None, with a warning, where it cannot be had: vLLM has its own then."""
    global _taken  # noqa: PLW0603 - one a process, as it has one GPU state
    try:
        pool = importlib.import_module("gpuckpt.pool")
        if not (why := pool.problem()):
            with pool.tag("weights"):  # it refuses expandable_segments, which vLLM's own turns off where it allocates
                pass
    except (ImportError, RuntimeError) as e:
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
    own = known(cls, "get_global_graph_pool", "self")
    if not hasattr(cls, GLOBAL):
        raise AttributeError(f"Platform has no {GLOBAL}")
    if (handle := pool.graph_pool()) is None:
        return

    @functools.wraps(own)
    def get_global_graph_pool(platform: Any) -> Any:
        if getattr(platform, GLOBAL) is None:  # else one that is only measured with has its place for a while (0.29 and newer)
            setattr(type(platform), GLOBAL, handle)
        return own(platform)

    cls.get_global_graph_pool = get_global_graph_pool


def _who_registers_graphs() -> str:
    from gpuckpt.nccl.communicators import vllm_groups

    for name, group in vllm_groups(sys.modules):
        used = getattr(getattr(group, "device_communicator", None), "ca_comm", None)
        copies = not getattr(used, "_capture_registered", True)  # with --sleep-mode-offload-cudagraph
        if used is not None and not copies and not getattr(used, "disabled", False):
            return name
    return ""


def _hook_workspaces(pool: Any) -> None:
    cls = importlib.import_module(WORKSPACE).WorkspaceManager
    own = known(cls, "_ensure_workspace_size", "self", "required_bytes")
    if "alloc_context" in inspect.signature(cls).parameters:
        return  # it takes its memory from vLLM's allocator, which we are (0.33)

    @functools.wraps(own)
    def _ensure_workspace_size(manager: Any, required_bytes: int) -> Any:
        slots = getattr(manager, "_current_workspaces", ())  # some of which may never be used (0.28 and newer)
        if getattr(manager, "_locked", False) or all(w is not None and w.nbytes >= required_bytes for w in slots):
            return own(manager, required_bytes)
        with pool.tag(RUNTIME):
            workspace = own(manager, required_bytes)
        _trim(pool)
        return workspace

    cls._ensure_workspace_size = _ensure_workspace_size
