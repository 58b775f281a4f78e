"""What vLLM's sleep mode holds in a worker: weights, which are kept in host memory, and the KV cache, which is dropped or kept.

It is sleep level 1 by the allocator that vLLM has them in, without its endpoint. The cache is dropped only once the engine has forgotten
what is in it: its prefix cache is empty then, and requests in flight are computed anew from their tokens. Where others hold blocks of the
cache (a KV connector), or what wakes up would not be what slept (a quantised cache, whose scales vLLM sets to 1), it is kept.

What it relies on in vLLM (0.26 to 0.33, of which only 0.26 has run): ``CuMemAllocator.instance``, its ``pointer_to_data`` and the
``is_asleep`` of each; ``create_and_map``, ``unmap_and_release`` and ``libcudart`` beside it. vLLM's own ``wake_up`` cannot be called again
where it runs out of memory half-way, so blocks are woken here one by one. Tags other than "kv_cache" are kept, whatever they are: newer
versions have "runtime", "workspace" and "cudagraph" as well.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import sys
from collections.abc import Collection
from typing import Any

from gpuckpt.agent import vllm_pool
from gpuckpt.agent.memory import tags_in_pool
from gpuckpt.agent.vllm_known import known

CUMEM = "vllm.device_allocator.cumem"
KV_CACHE = "kv_cache"
#: What the model runner makes anew when the memory of the cache is back. Newer ones have nothing else there, and no such method: they take
#: the context in which the cache alone is allocated.
TOLD, ALONE = "post_kv_cache_wake_up", "kv_cache_allocation_context"
_PLAIN_CACHES = ("auto", "bfloat16", "float16", "half", "float", "float32")

log = logging.getLogger("vllm.gpuckpt")


def of(worker: Any) -> SleepMode | None:
    """What *worker* has in sleep mode's memory; None where vLLM was started without ``--enable-sleep-mode`` or with a backend of others.

    None, with a warning, where its allocator is not as known: the driver takes all then.
    """
    model = getattr(getattr(worker, "vllm_config", None), "model_config", None)
    own = getattr(model, "sleep_mode_backend", "cumem") == "cumem"
    if not getattr(model, "enable_sleep_mode", False) or not own:
        return None
    if vllm_pool.chosen():
        return InPool(worker)
    try:
        if cumem := sys.modules.get(CUMEM):
            known(cumem.CuMemAllocator, "sleep", "self", "offload_tags")
            _ = cumem.CuMemAllocator.instance, cumem.create_and_map, cumem.unmap_and_release, cumem.libcudart
    except AttributeError as e:
        log.warning("gpuckpt does not know this version of vLLM's sleep mode, whose memory the driver takes with all else: %s", e)
        return None
    return InCumem(worker)


class SleepMode:
    """A worker's :class:`~gpuckpt.agent.memory.Memory`, wherever it is."""

    by = "vLLM's sleep mode"

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.wanted = False  # an offload follows the visit that was announced last
        self.forgotten = False  # the engine says of this visit that it has forgotten what is in the KV cache
        self._taken = self._dropped = False  # by an offload that began, and has not come back

    def describe(self) -> dict[str, Any] | None:
        tags = self.tags()
        if not tags or any(t["where"] != "gpu" for t in tags):
            return None  # it was put to sleep by its own endpoint, and stays so
        names = {t["tag"] for t in tags} - ({KV_CACHE} if self._drops() else set())
        kept = sum(t["bytes"] for t in tags if t["tag"] in names)
        dropped = sum(t["bytes"] for t in tags) - kept
        return {"kept_bytes": kept, "dropped_bytes": dropped, "by": self.by, "host_bytes": self._host_bytes(names), "tags": tags}

    def announce(self, offload: bool) -> None:
        self.wanted, self.forgotten = offload, False

    def offload(self) -> dict[str, int]:
        seen = self.describe()
        if seen is None:
            raise RuntimeError("it was put to sleep by its own endpoint meanwhile")
        drops = self._drops()
        if drops and not self.forgotten:
            raise RuntimeError(
                "its engine cannot forget what is in the KV cache: a request holds blocks of it that cannot be computed anew"
            )
        names = {t["tag"] for t in seen["tags"]}
        dropped = names & {KV_CACHE} if drops else set()
        self._taken, self._dropped = True, bool(dropped)
        self._sleep(names - dropped, dropped)
        return {"kept_bytes": seen["kept_bytes"], "dropped_bytes": seen["dropped_bytes"]}

    def onload(self) -> None:
        if self._taken:  # else what sleeps was put to sleep by its own endpoint
            self._wake()
        if self._dropped and (tell := getattr(self.worker.model_runner, TOLD, None)):
            tell()
        self._taken = self._dropped = False

    def _drops(self) -> bool:
        config = self.worker.vllm_config
        if not _restores(self.worker.model_runner):
            return False
        return getattr(config, "kv_transfer_config", None) is None and str(config.cache_config.cache_dtype) in _PLAIN_CACHES

    def tags(self) -> list[dict[str, Any]]:
        """Bytes by tag, device, and where they are: "gpu" or elsewhere."""
        raise NotImplementedError

    def _host_bytes(self, kept: Collection[str]) -> int:
        """Host memory that *kept* tags take beyond what is there from an earlier time."""
        raise NotImplementedError

    def _sleep(self, kept: Collection[str], dropped: Collection[str]) -> None:
        raise NotImplementedError

    def _wake(self) -> None:
        """Can be called again where it raises."""
        raise NotImplementedError


class InCumem(SleepMode):
    """By vLLM's own allocator. Its copies are pinned memory of torch's, which rounds them up to powers of two and keeps them."""

    pinned_bytes = 0

    def tags(self) -> list[dict[str, Any]]:
        nbytes: dict[tuple[str, int, str], int] = {}
        for block in self._blocks().values():
            key = (block.tag, block.handle[0], "host" if block.is_asleep else "gpu")
            nbytes[key] = nbytes.get(key, 0) + block.handle[1]
        return [{"tag": tag, "device": device, "bytes": n, "where": where} for (tag, device, where), n in sorted(nbytes.items())]

    def _host_bytes(self, kept: Collection[str]) -> int:
        return max(0, self._to_pin(kept) - self.pinned_bytes)

    def _to_pin(self, kept: Collection[str]) -> int:
        return sum(1 << (b.handle[1] - 1).bit_length() for b in self._blocks().values() if b.tag in kept)

    def _sleep(self, kept: Collection[str], dropped: Collection[str]) -> None:  # noqa: ARG002 - all that is not kept
        self.pinned_bytes = max(self.pinned_bytes, self._to_pin(kept))
        sys.modules[CUMEM].CuMemAllocator.instance.sleep(offload_tags=tuple(sorted(kept)))

    def _wake(self) -> None:
        cumem = sys.modules[CUMEM]
        for address, block in self._blocks().items():
            if block.is_asleep:
                _wake_block(cumem, address, block)

    @staticmethod
    def _blocks() -> dict[int, Any]:
        allocator = getattr(getattr(sys.modules.get(CUMEM), "CuMemAllocator", None), "instance", None)
        return dict(allocator.pointer_to_data) if allocator is not None else {}


class InPool(SleepMode):
    """By ``gpuckpt.pool`` in its place."""

    by = "gpuckpt.pool"

    def tags(self) -> list[dict[str, Any]]:
        return tags_in_pool()

    def _host_bytes(self, kept: Collection[str]) -> int:
        missing: int = sum(s.bytes - s.host_bytes for s in sys.modules["gpuckpt.pool"].stats() if s.tag in kept)
        return max(0, missing)

    def _sleep(self, kept: Collection[str], dropped: Collection[str]) -> None:
        sys.modules["gpuckpt.pool"].sleep(offload=kept, discard=dropped)

    def _wake(self) -> None:
        sys.modules["gpuckpt.pool"].wake()  # nothing slept before


def _restores(runner: Any) -> bool:
    """Whether the memory of the cache may be dropped: what else lies there is made anew, or nothing does."""
    allocate = getattr(runner, "initialize_kv_cache", None)
    return hasattr(runner, TOLD) or (allocate is not None and ALONE in inspect.signature(allocate).parameters)


def _wake_block(cumem: Any, address: int, block: Any) -> None:
    """One block is awake when this returns, and asleep as before when it raises: its copy is let go last."""
    cumem.create_and_map(block.handle)
    copy = block.cpu_backup_tensor
    try:
        if copy is not None:
            cumem.libcudart.cudaMemcpy(address, copy.data_ptr(), copy.numel() * copy.element_size())
    except BaseException:
        with contextlib.suppress(Exception):
            cumem.unmap_and_release(block.handle)
        raise
    block.is_asleep = False
    block.cpu_backup_tensor = None


def forget_cache(engine: Any) -> bool:
    """Between two steps of *engine*, nothing in flight on the GPU: forget what is in its KV cache.

    Returns False where it cannot: requests that were preempted are computed anew all the same. After it nothing points into the cache.
    """
    scheduler = engine.scheduler
    if getattr(scheduler, "connector", None) is not None:
        return False
    was = scheduler.pause_state
    scheduler.set_pause_state(type(was).PAUSED_ALL)
    try:
        while engine.batch_queue:  # the answers are there: they are taken in before their requests are preempted
            engine._process_engine_step()
        return bool(engine.reset_prefix_cache(reset_running_requests=True))
    except RuntimeError:
        return False  # blocks are held that no preemption frees
    finally:
        scheduler.set_pause_state(was)
