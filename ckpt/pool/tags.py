"""Tags for torch: what is allocated inside one goes to a memory pool of torch's whose memory comes from the pool's library.

Each tag has one allocator, which is never destroyed, and one memory pool a device, which lives until a sleep or trim lets go of it: torch
gives the unused segments of a pool back only then. The memory pool of graphs is kept as long as a graph holds it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import sys
import threading
import warnings
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuckpt.pool.allocator import FREE, Allocator, PoolError, library

if TYPE_CHECKING:
    from collections.abc import Iterator

VARIABLE = "GPUCKPT_POOL"  # "0": tags do nothing
CUDAGRAPH = "cudagraph"
NCCL_GRAPH_REGISTER = "NCCL_GRAPH_REGISTER"
_OLDEST = (2, 9)  # of torch
NAMES = re.compile(r"[a-z_]+")


def problem() -> str:
    """Why tags can do nothing in this process; "" if they can. The one place that decides it. Imports torch."""
    if library() is None:
        return "its library was not built when gpuckpt was installed: that takes a C compiler"
    try:
        import torch
    except ImportError:
        return "torch cannot be imported"
    if not getattr(torch.version, "cuda", None):
        return f"torch {torch.__version__} is not built for CUDA"
    if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < _OLDEST:
        return f"torch {torch.__version__} is too old: it takes 2.9"
    if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
        return "PYTORCH_NO_CUDA_MEMORY_CACHING is set, with which torch has no memory pools"
    if torch.cuda.get_allocator_backend() != "native":
        return f"torch's allocator is {torch.cuda.get_allocator_backend()!r}, and it takes the native one"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    return ""


class Tags:
    """The tags of this process on *allocator*."""

    def __init__(self, allocator: Allocator) -> None:
        import torch

        self.allocator = allocator
        self.pid = os.getpid()
        self._torch: Any = torch
        self._allocators: dict[str, Any] = {}
        self._pools: dict[tuple[str, int], Any] = {}
        self._lock = threading.RLock()
        self._open: list[tuple[str, str]] = []  # (thread, tag)
        self._inside = threading.local()
        self._lent: set[tuple[str, int]] = set()  # others know these pools by their ids, so they stay
        self._captures: dict[int, contextlib.ExitStack] = {}  # by the graph's id(): those that somebody else makes
        self._captured: weakref.WeakKeyDictionary[Any, tuple[int, str]] = weakref.WeakKeyDictionary()  # device, and where in the program

    # Allocating.

    @contextlib.contextmanager
    def tag(self, name: str) -> Iterator[None]:
        """What this thread allocates on its current device goes to *name*; the inner one of two tags counts. In a capture nothing changes:
        all memory is the graph's."""
        if getattr(self._inside, "capture", False):
            yield
            return
        with self._entered(name) as pool, self._unrouted(), self._routed(pool, self._torch.cuda.current_device()):
            yield

    @contextlib.contextmanager
    def cuda_graph(self, graph: Any, **options: Any) -> Iterator[None]:
        """``torch.cuda.graph(graph, **options)`` with its memory under the tag "cudagraph": one pool for all captures of a device."""
        if "pool" in options:
            raise ValueError("pool.cuda_graph has a graph pool of its own, which all captures share: leave pool= out")
        self._note(graph)
        with self._entered(CUDAGRAPH) as pool, self._unrouted(), self._torch.cuda.graph(graph, pool=pool.id, **options), self._capturing():
            yield

    def _note(self, graph: Any) -> None:
        """Whose capture this is: named where the graph is in the way."""
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("gpuckpt", "contextlib", "torch"):
            frame = frame.f_back
        place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        with self._lock, contextlib.suppress(TypeError):  # a graph of a kind that nobody can refer to weakly
            self._captured[graph] = self._torch.cuda.current_device(), place

    def graph_pool(self) -> Any:
        """The id of the pool of :meth:`cuda_graph`, for captures by code that takes an id: it holds for ever. Those captures are seen."""
        with self._lock:
            self._watch_captures()
            pool = self._pool(CUDAGRAPH)
            self._lent.add((CUDAGRAPH, self._torch.cuda.current_device()))
            return pool.id

    def _watch_captures(self) -> None:
        """Know of each capture in this process, whoever makes it: torch begins and ends them all by two methods."""
        cls = self._torch.cuda.CUDAGraph
        begin, end = cls.capture_begin, cls.capture_end
        if hasattr(begin, VARIABLE):
            return

        @functools.wraps(begin)
        def capture_begin(graph: Any, *args: Any, **options: Any) -> None:
            self._note(graph)
            with contextlib.ExitStack() as stack:
                stack.enter_context(self._entered(CUDAGRAPH))
                stack.enter_context(self._capturing())
                begin(graph, *args, **options)
                self._captures[id(graph)] = stack.pop_all()

        @functools.wraps(end)
        def capture_end(graph: Any) -> None:
            try:
                end(graph)
            finally:
                self._captures.pop(id(graph), contextlib.ExitStack()).close()

        setattr(capture_begin, VARIABLE, True)
        cls.capture_begin, cls.capture_end = capture_begin, capture_end

    @contextlib.contextmanager
    def _capturing(self) -> Iterator[None]:
        """This thread captures a graph: all that it allocates is the graph's, and nothing waits for the GPU."""
        self._inside.capture = True
        self.allocator.capturing(True)
        try:
            yield
        finally:
            self.allocator.capturing(False)
            self._inside.capture = False

    @contextlib.contextmanager
    def _routed(self, pool: Any, device: int) -> Iterator[None]:
        """This thread's allocations on *device* go to *pool*."""
        self._enter(pool, device)
        try:
            yield
        finally:
            self._leave()

    @contextlib.contextmanager
    def _unrouted(self) -> Iterator[None]:
        """Meanwhile this thread is in no pool of ours: of two that it is in, torch lets the outer one win."""
        if getattr(self._inside, "route", None) is None:
            yield
            return
        held = self._leave()
        try:
            yield
        finally:
            self._enter(*held)

    def _enter(self, pool: Any, device: int) -> None:
        context = self._torch.cuda.memory.use_mem_pool(pool, device)
        context.__enter__()
        self._inside.route = context, pool, device

    def _leave(self) -> tuple[Any, int]:
        context, pool, device = self._inside.route
        self._inside.route = None
        context.__exit__(None, None, None)
        return pool, device

    @contextlib.contextmanager
    def _entered(self, name: str) -> Iterator[Any]:
        me = (threading.current_thread().name, name)
        with self._lock:
            if name in self.asleep():
                raise PoolError(f"the tag {name!r} is asleep: wake it before anything is allocated under it")
            pool = self._pool(name)
            self._open.append(me)
        try:
            yield pool
        finally:
            with self._lock:
                self._open.remove(me)

    def _pool(self, name: str) -> Any:
        torch = self._torch
        device = torch.cuda.current_device()
        if (name, device) not in self._pools:
            self._refuse_expandable_segments()
            memory = torch.cuda.memory
            if name not in self._allocators:
                made = memory.CUDAPluggableAllocator(str(self.allocator.path), self.allocator.malloc_name(name), FREE)
                _keep_for_ever(made)  # memory pools have a bare pointer to it
                self._allocators[name] = made
            pool = memory.MemPool(self._allocators[name].allocator())
            self.allocator.prepare(device)
            _keep_for_ever(pool)  # not to be destroyed when the interpreter goes down, and torch's allocator perhaps before
            self._pools[name, device] = pool
        return self._pools[name, device]

    def _refuse_expandable_segments(self) -> None:
        settings: Any = {}
        with contextlib.suppress(Exception):  # a private function of torch's
            settings = self._torch.cuda.memory._snapshot()["allocator_settings"]
        said = ",".join(os.environ.get(n, "") for n in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")).replace(" ", "").lower()
        if settings.get("expandable_segments", "expandable_segments:true" in said):
            raise PoolError(
                "torch's expandable_segments is on, with which it has no memory pools of others. Take expandable_segments:True out of "
                "PYTORCH_CUDA_ALLOC_CONF or PYTORCH_ALLOC_CONF, or out of the call that sets it, or set GPUCKPT_POOL=0"
            )

    # Sleeping.

    def asleep(self) -> frozenset[str]:
        return frozenset(s.tag for s in self.allocator.stats() if s.where != "gpu")

    @contextlib.contextmanager
    def still(self, verb: str) -> Iterator[None]:
        """Nobody is inside a tag, nor enters one. Raises :class:`PoolError` if somebody is."""
        with self._lock:
            if self._open:
                who = ", ".join(f"thread {thread!r} is inside the tag {tag!r}" for thread, tag in self._open)
                raise PoolError(
                    f"the pool cannot {verb} while something is allocated: {who}. Everything is as it was; {verb} when it has left"
                )
            yield

    def settle(self) -> None:
        """All GPU work is done, and what torch does not use is freed."""
        try:
            for device in sorted({device for _, device in self._pools}):
                self._torch.cuda.synchronize(device)
            self.let_go()
        except RuntimeError as error:  # of work that had failed before, or in a forked child
            raise PoolError(f"pid {os.getpid()}: the GPU's work could not be waited for, and everything is as it was: {error}") from error

    def let_go(self) -> None:
        """Let torch free what it holds of our pools and does not use: now, and later when more of it is freed."""
        for key, pool in list(self._pools.items()):
            if pool.use_count() == 1 and key not in self._lent:  # else graphs have it, or will
                del self._pools[key]
                _let_die(pool)
        self._torch.cuda.empty_cache()

    def drop_graphs(self) -> None:
        """Let go of the graph pools, for captures to begin afresh, but for those that are lent. Raises :class:`PoolError` while graphs hold
        one, or it is asleep."""
        if CUDAGRAPH in self.asleep():
            raise PoolError("the memory of graphs is asleep: wake it first")
        for (name, device), pool in self._pools.items():
            if name == CUDAGRAPH and (graphs := pool.use_count() - 1):
                holders = f"{graphs} graphs hold" if graphs > 1 else "1 graph holds"
                with self._lock:
                    captured = list(self._captured.items())
                where = ", ".join(sorted(place for graph, (on, place) in captured if on == device and _holds(graph, pool.id)))
                named = f" (captured at {where})" if where else ""
                raise PoolError(f"{holders} the graph pool of GPU {device}{named}: call reset() of each, or delete it, and call again")
        self.let_go()


def _holds(graph: Any, pool_id: Any) -> bool:
    try:
        return bool(graph.pool() == pool_id)
    except RuntimeError:  # it was reset, or its capture failed
        return False


def _keep_for_ever(thing: object) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _let_die(thing: object) -> None:
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(thing))


def keep_nccl_off_graph_memory() -> None:
    """NCCL would register the buffers of graphs with its peers, who would then hold what goes to sleep. It reads this when it makes its
    first communicator."""
    said = os.environ.setdefault(NCCL_GRAPH_REGISTER, "0")
    if said != "0":
        words = f"{NCCL_GRAPH_REGISTER}={said} is kept, but peers that have mapped the memory of graphs hold it while it sleeps: unset it"
        warnings.warn(words, RuntimeWarning, stacklevel=4)


_warned = threading.Event()


def warn_once(why: str) -> None:
    if not _warned.is_set():
        _warned.set()
        warnings.warn(f"gpuckpt.pool does nothing here: {why}. Memory under tags is torch's own", RuntimeWarning, stacklevel=4)
