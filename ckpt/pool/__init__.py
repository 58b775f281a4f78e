"""GPU memory that leaves at the speed of the link, or is dropped, and comes back at the same addresses.

>>> import gpuckpt.pool as pool
>>> with pool.tag("weights"):                  # doctest: +SKIP
...     model = load()
>>> with pool.tag("kv_cache"):                 # doctest: +SKIP
...     cache = allocate()
>>> with pool.cuda_graph(graph):               # doctest: +SKIP
...     out = step(x)
>>> pool.sleep()                               # doctest: +SKIP
>>> pool.wake()                                # doctest: +SKIP

Importing this imports no torch. While ``GPUCKPT_POOL=0``, or where a requirement is missing (one warning names it), tags do nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from gpuckpt.pool.allocator import Allocator, Moved, NoGpuMemory, NoHostMemory, PoolError, TagStats, library
from gpuckpt.pool.tags import CUDAGRAPH, NAMES, VARIABLE, Tags, keep_nccl_off_graph_memory, problem, warn_once

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = [
    "Moved",
    "NoGpuMemory",
    "NoHostMemory",
    "PoolError",
    "TagStats",
    "active",
    "asleep",
    "copy_",
    "cuda_graph",
    "discard",
    "drop_graphs",
    "graph_pool",
    "problem",
    "ready",
    "sleep",
    "stats",
    "tag",
    "trim",
    "wake",
]

WEIGHTS, KV_CACHE, RUNTIME = "weights", "kv_cache", "runtime"
_KNOWN = (WEIGHTS, KV_CACHE, CUDAGRAPH, RUNTIME)
_KEPT = (CUDAGRAPH, RUNTIME)  # captured graphs read values in there that were written once, at capture
_LEVELS = {1: {KV_CACHE}, 2: {KV_CACHE, WEIGHTS}}  # what each drops

_tags: Tags | None = None
_lock = threading.Lock()


def ready() -> bool:
    """Whether tags do something in this process; where they are wanted and cannot, one warning says why. The first tag asks, too: to be
    called before NCCL makes its first communicator, which reads then whether it may register the memory of graphs. Imports torch, and
    initialises CUDA as ``torch.cuda.is_available()`` does: to be called by who uses a GPU, not by who forks it."""
    return _ready() is not None


def tag(name: str) -> contextlib.AbstractContextManager[None]:
    """What this thread allocates with torch on its current device inside goes to the pool, under *name* (``[a-z_]+``).

    Raises on entry:
        ValueError: *name* is no tag, or one too many.
        PoolError: memory under *name* is asleep, or torch's expandable_segments is on.
    """
    if not NAMES.fullmatch(name):
        raise ValueError(f"no tag {name!r}: small letters and underscores")
    tags = _ready()
    return contextlib.nullcontext() if tags is None else tags.tag(name)


@contextlib.contextmanager
def cuda_graph(graph: Any, **options: Any) -> Iterator[None]:
    """``torch.cuda.graph(graph, **options)``, with the graph's memory under the tag "cudagraph". All captures share one graph pool."""
    tags = _ready()
    if tags is None:
        import torch

        with torch.cuda.graph(graph, **options):
            yield
        return
    with tags.cuda_graph(graph, **options):
        yield


def graph_pool() -> Any:
    """The id of that graph pool on this thread's current device, for code that captures by itself: ``torch.cuda.graph(g, pool=…)``.

    None where tags do nothing. The id holds as long as the process: the memory of graphs that are gone stays in the pool for the next
    capture, and :func:`drop_graphs` does not free it. From now on each capture in this process, into whatever pool, is seen: until it ends,
    :func:`sleep` is refused, and while "cudagraph" is asleep none begins (:class:`PoolError`).
    """
    tags = _ready()
    return None if tags is None else tags.graph_pool()


def sleep(
    level: int = 1,
    *,
    offload: Iterable[str] | None = None,
    discard: Iterable[str] | None = None,
    barrier: Callable[[], object] | None = None,
) -> Moved:
    """Synchronise, and take the memory of all tags off the GPU.

    Level 1 drops the content of "kv_cache", level 2 that of "weights" too; all else goes to host memory. What *offload* names does in any
    case. With *discard* the level drops nothing: what *discard* names is dropped, and all else kept. What sleeps already stays as it is.
    Before it, every block is awake or asleep; after it, whether it returned or raised, too, and it can be called again. *barrier* is for
    ranks that sleep by calls of their own and may read each other's memory: it is called before anything is unmapped, and when all is
    (``torch.distributed.barrier``).

    Raises:
        ValueError: an unknown level or tag, or "cudagraph" or "runtime" to be discarded.
        NoHostMemory: and all is awake that was.
        PoolError: some thread is inside a tag, or the driver failed.
    """
    tags = _ours()
    with _meeting(barrier) as meet:
        if level not in _LEVELS:
            raise ValueError(f"no level {level!r}: 1 keeps weights, 2 drops them")
        keep, drop = _names(offload), _names(discard)
        if both := keep & drop:
            raise ValueError(f"to be offloaded and discarded: {', '.join(sorted(both))}")
        _refuse_unknown(keep)
        _refuse_discard(drop)
        if tags is None:
            return Moved(0.0, 0, 0, 0)
        if discard is None:
            drop = _LEVELS[level] - keep
        begun = time.perf_counter()
        with tags.still("sleep"):
            tags.settle()
            settled = time.perf_counter()
            meet()
            moved = tags.allocator.sleep({t: "discard" if t in drop else "offload" for t in tags.allocator.tags})
    phases = {"settle": settled - begun, **moved.phases}
    return dataclasses.replace(moved, seconds=time.perf_counter() - begun, phases=phases)


def discard(tags: Iterable[str]) -> Moved:
    """Take the memory of *tags* alone off the GPU, its content dropped; that of the others stays as it is. Otherwise as :func:`sleep`."""
    drop = _names(tags)
    _refuse_discard(drop)
    ours = _ours()
    if ours is None:
        return Moved(0.0, 0, 0, 0)
    begun = time.perf_counter()
    with ours.still("discard"):
        ours.settle()
        moved = ours.allocator.sleep(dict.fromkeys(drop, "discard"))
    return dataclasses.replace(moved, seconds=time.perf_counter() - begun)


def wake(tags: Iterable[str] | None = None, *, barrier: Callable[[], object] | None = None) -> Moved:
    """Bring the memory of *tags* back (None: of all), and with it that of every tag that is neither "weights" nor "kv_cache".

    The content of what was discarded is undefined. Tags that are awake stay so. *barrier* as for :func:`sleep`.

    Raises:
        ValueError: an unknown tag.
        NoGpuMemory: and all sleeps that slept; free memory and call again.
        PoolError: likewise.
    """
    ours = _ours()
    with _meeting(barrier) as meet:
        wanted = set(_known()) if tags is None else _names(tags) | (set(_known()) - {WEIGHTS, KV_CACHE})
        _refuse_unknown(wanted)
        if ours is None or not wanted & ours.asleep():  # also where a thread inside a tag, which made a sleep be refused, is there still
            return Moved(0.0, 0, 0, 0)
        begun = time.perf_counter()
        with ours.still("wake"):
            meet()
            moved = ours.allocator.wake(wanted)
    return dataclasses.replace(moved, seconds=time.perf_counter() - begun)


def trim() -> int:
    """Give back what is not needed: host copies of awake memory, which the next sleep makes anew, and GPU memory that torch holds under
    tags without using it. Returns bytes of host memory given back."""
    tags = _ours()
    if tags is None:
        return 0
    with tags.still("trim"):
        tags.let_go()
        return tags.allocator.trim()


def drop_graphs() -> None:
    """Free the memory of graphs that are gone, so that captures begin afresh and a recapture takes no more than the first one did.

    Raises:
        PoolError: graphs hold it, and how many; or it is asleep. Nothing has changed.
    """
    tags = _ours()
    if tags is not None:
        with tags.still("drop graphs"):
            tags.drop_graphs()


def stats() -> tuple[TagStats, ...]:
    """The bytes of each tag, by device and place."""
    return () if _tags is None else _tags.allocator.stats()


def active() -> bool:
    """Whether anything was ever allocated under a tag in this process."""
    return _tags is not None and _tags.pid == os.getpid() and bool(_tags.allocator.tags)


def asleep() -> frozenset[str]:
    """The tags of which something sleeps."""
    return frozenset() if _tags is None else _tags.asleep()


def copy_(tensor: Any, source: Any) -> Any:
    """``tensor.copy_(source)``, refused in words where *tensor* or *source* lies in memory that is asleep.

    torch itself does not know: its own ``copy_`` fails with "invalid argument", and a kernel that touches sleeping memory is an illegal
    access, after which the process cannot use its GPU any more.

    Raises:
        PoolError: asleep; nothing was written.
    """
    if _tags is not None:
        rows = [r for r in _tags.allocator.rows() if r.where != 0]
        for what, thing in (("written to", tensor), ("read", source)):
            at = thing.data_ptr()
            for row in rows:
                if row.address <= at < row.address + row.nbytes:
                    raise PoolError(
                        f"what is to be {what} is asleep, in tag {_tags.allocator.tags[row.tag]!r}: wake it first. Nothing was written"
                    )
    return tensor.copy_(source)


def _ready() -> Tags | None:
    """The tags of this process; None where they do nothing."""
    global _tags  # noqa: PLW0603 - one a process, as a process has one GPU state
    if os.environ.get(VARIABLE) == "0":
        return None
    if _tags is not None:
        return _tags if _tags.pid == os.getpid() else None  # a forked child has no GPU memory
    with _lock:
        if _tags is None:
            path = library()
            why = problem()
            if not why and path is not None:
                try:
                    _tags = Tags(Allocator(path))
                    keep_nccl_off_graph_memory()
                except PoolError as error:
                    why = str(error)
            if why:
                warn_once(why)
        return _tags


def _ours() -> Tags | None:
    if _tags is not None and _tags.pid != os.getpid():
        raise PoolError(f"pid {os.getpid()} is a forked child: the pool's memory is its parent's, pid {_tags.pid}, which alone can move it")
    return _tags


@contextlib.contextmanager
def _meeting(barrier: Callable[[], object] | None) -> Iterator[Callable[[], None]]:
    """Ranks meet twice: where what this gives is called, and at the end. One that fails, however early, meets the others all the same:
    they wait for it. Where the barrier itself fails there is no other."""
    left = [] if barrier is None else [barrier, barrier]

    def meet() -> None:
        try:
            left.pop()()
        except BaseException:
            left.clear()
            raise

    try:
        yield lambda: meet() if left else None
    finally:
        while left:
            meet()


def _known() -> tuple[str, ...]:
    used = () if _tags is None else _tags.allocator.tags
    return (*_KNOWN, *(t for t in used if t not in _KNOWN))


def _names(names: Iterable[str] | None) -> set[str]:
    return {names} if isinstance(names, str) else set(names or ())


def _refuse_discard(names: set[str]) -> None:
    _refuse_unknown(names)
    if needed := [t for t in _KEPT if t in names]:
        raise ValueError(f"{' and '.join(needed)} cannot be discarded: captured graphs read values in there that nothing writes again")


def _refuse_unknown(names: set[str]) -> None:
    if unknown := sorted(names - set(_known())):
        raise ValueError(f"no tag {', '.join(unknown)}: there are {', '.join(_known())}")
