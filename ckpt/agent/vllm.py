"""vLLM: an agent in each worker, and an engine that holds all of them between two of its steps.

A worker takes its work from its engine, so it cannot stand still alone: the others would wait for it inside NCCL. When its agent is asked
to quiesce it rings at the engine (:mod:`gpuckpt.agent.bell`). Once all have rung the engine sends them :func:`stand` by its own
``collective_rpc``: it comes to every worker between the same two steps, and runs on the worker's own loop and device. Until it returns
the engine schedules nothing. Requests in flight wait where they are, with what they have in the KV cache; new ones wait in its input queue.
Engines that step together agree on the step first (:mod:`gpuckpt.agent.vllm_together`).

With ``--enable-sleep-mode`` what vLLM's own allocator holds leaves the GPU while the workers stand (:mod:`gpuckpt.agent.vllm_memory`).
The engine forgets beforehand what is in the KV cache, if it will be dropped: whether it will, each worker has heard with its quiesce.

What it relies on in vLLM (0.26 to 0.33, of which only 0.26 has run): ``EngineCoreProc`` handles each request between two steps by
``_handle_client_request``, a ``WAKEUP`` too, and a blocked loop wakes for one in ``input_queue``; ``model_executor.collective_rpc`` runs a
callable on every worker in the order of all other work; a worker's loop is ``WorkerProc.worker_busy_loop``, which waits for its work in
``rpc_broadcast_mq.dequeue``, as an engine without workers does in ``input_queue.get``.
``tests/gpu/vllm_contract.py`` checks each of these in vLLM's sources.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

from gpuckpt.agent.vllm_known import known

if TYPE_CHECKING:
    from gpuckpt.agent.bell import Bell, Ring
    from gpuckpt.agent.communicators import Communicators
    from gpuckpt.agent.vllm_memory import SleepMode
    from gpuckpt.agent.vllm_together import Together

VARIABLE = "GPUCKPT_AGENT"
SAFE_POINT = "between two steps of its engine"
CORE, EXECUTOR = "vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor"

log = logging.getLogger("vllm.gpuckpt")  # below vLLM's own, so that it is seen

_loaded = False
_bell: Bell | None = None
_ring: Ring | None = None
_memory: SleepMode | None = None
_together: Together | None = None


def plugin() -> None:
    """vLLM's entry point ``vllm.general_plugins``, called in each of its processes: does nothing unless ``GPUCKPT_AGENT`` is 1."""
    global _loaded  # noqa: PLW0603 - one a process
    if os.environ.get(VARIABLE) != "1" or _loaded:
        return
    _loaded = True
    hook()
    os.register_at_fork(after_in_child=hook)  # a forked engine or worker does not load its plugins anew


def hook() -> None:
    """Put the agent into the loops of vLLM, as far as this process has imported them; neither is changed twice."""
    from gpuckpt.agent import vllm_pool

    try:
        vllm_pool.hook()
    except (ImportError, AttributeError) as e:
        log.warning("gpuckpt does not know this version of vLLM, which keeps its own allocator: %s", e)
    try:
        if core := sys.modules.get(CORE):
            _hook_engine(core)
        if executor := sys.modules.get(EXECUTOR):
            _hook_worker(executor)
    except AttributeError as e:
        log.warning("gpuckpt does not know this version of vLLM, which cannot be suspended on several GPUs: %s", e)


def communicators() -> Communicators:
    """What a worker's agent suspends. A test puts simulated ones in its place."""
    from gpuckpt.agent.nccl import NcclCommunicators

    return NcclCommunicators()


def _hook_engine(core: Any) -> None:
    cls = core.EngineCoreProc
    if hasattr(cls._handle_client_request, VARIABLE):
        return
    handle, wakeup = known(cls, "_handle_client_request", "self", "request_type", "request"), core.EngineCoreRequestType.WAKEUP

    @functools.wraps(handle)
    def handled(engine: Any, request_type: Any, request: Any) -> None:
        handle(engine, request_type, request)
        if request_type is wakeup:
            _together.come() if _together else hold(engine)

    setattr(handled, VARIABLE, True)
    loops = [each for each in (cls, *cls.__subclasses__()) if "run_busy_loop" in vars(each)]  # data-parallel engines have one of their own
    for each, own in [(each, known(each, "run_busy_loop", "self")) for each in loops]:  # all are known before one is changed
        each.run_busy_loop = _heard(own, wakeup)
    cls._handle_client_request = handled


def _heard(run_busy_loop: Any, wakeup: Any) -> Any:
    @functools.wraps(run_busy_loop)
    def run(engine: Any) -> Any:
        _listen(engine, wakeup)
        return run_busy_loop(engine)

    return run


def _hook_worker(executor: Any) -> None:
    cls = executor.WorkerProc
    if hasattr(cls.worker_busy_loop, VARIABLE):
        return
    worker_busy_loop = known(cls, "worker_busy_loop", "self")

    @functools.wraps(worker_busy_loop)
    def run(process: Any) -> Any:
        _install(os.getppid(), process.worker)
        _let_look(getattr(process, "rpc_broadcast_mq", None), "dequeue")
        return worker_busy_loop(process)

    setattr(run, VARIABLE, True)
    cls.worker_busy_loop = run


# The engine.


def _listen(engine: Any, wakeup: Any) -> None:
    """Begin to hear the workers of *engine*; one that has its GPU itself is its own worker."""
    global _bell, _together
    from gpuckpt.agent.bell import Bell
    from gpuckpt.agent.vllm_together import Together, steps_together

    workers = getattr(engine.model_executor, "workers", None)
    bell = Bell(1 if workers is None else len(workers), lambda: engine.input_queue.put_nowait((wakeup, None)))
    together = Together(engine, bell, hold) if steps_together(engine) else None
    problem = together.problem() if together else ""
    try:
        if not problem:
            bell.start()
            _bell, _together = bell, together
    except OSError as e:
        problem = str(e)
    if problem:
        log.warning("gpuckpt cannot hold this engine, which cannot be suspended on several GPUs: %s", problem)
    elif together:
        together.install()
    if workers is None:
        _install(os.getpid(), getattr(engine.model_executor, "driver_worker", engine))
        _let_look(engine.input_queue, "get")


def hold(engine: Any) -> None:
    """Between two steps: if all workers have rung, let all stand still, and return when none of them does any more."""
    if _bell is None or (called := _bell.all_rung()) is None:
        return
    executor = engine.model_executor
    offloads = any(executor.collective_rpc(settle))  # first of all what is in flight is answered: those answers have a deadline of vLLM's
    forgotten = offloads and _forget_cache(engine)
    standing = executor.collective_rpc(stand, args=(called, forgotten), non_block=True)
    _bell.wait_for_silence(called)  # and not in vLLM's queue, which complains every minute
    standing.result()


def _forget_cache(engine: Any) -> bool:
    from gpuckpt.agent.vllm_memory import forget_cache

    try:
        return forget_cache(engine)
    except Exception:  # the engine goes on, with all that it has
        log.warning("gpuckpt cannot make this engine forget what is in its KV cache", exc_info=True)
        return False


# The worker.


def _install(engine_pid: int, worker: Any) -> None:
    global _ring, _memory
    from gpuckpt.agent import install, vllm_memory, vllm_together
    from gpuckpt.agent.bell import Ring

    _ring, _memory = Ring(engine_pid), vllm_memory.of(worker)
    config = getattr(getattr(worker, "vllm_config", None), "parallel_config", None)
    try:
        install(Worker(communicators(), _ring, vllm_together.refusals(config)), summon=_ring, safe_point=SAFE_POINT, memory=_memory)
    except OSError as e:
        log.warning("gpuckpt's agent cannot listen in this process, which cannot be suspended on several GPUs: %s", e)


def _let_look(waits: Any, name: str) -> None:
    """The communicators of this process may be looked at now, and while its loop is in ``waits.name``, for its next piece of work: nothing
    is asked of NCCL then. One that waits otherwise shows its new ones when it stands still."""
    from gpuckpt.agent import lets_look, look_here

    look_here()
    own = getattr(waits, name, None)
    if own is None:
        return

    @functools.wraps(own)
    def waiting(*args: Any, **kwargs: Any) -> Any:
        with lets_look():
            return own(*args, **kwargs)

    setattr(waits, name, waiting)


def settle(_: Any) -> bool:
    """Sent to every worker: returns when all that was sent before has been done, and whether its memory is to leave the GPU then."""
    return _memory is not None and _memory.wanted


def stand(_: Any, called: dict[int, int], forgotten: bool) -> None:
    """Sent to every worker: stand still if the quiesce that this one was *called* for is still wanted, until it is over.

    *forgotten*: nothing in the engine points into the KV cache.
    """
    from gpuckpt.agent import checkpoint_here
    from gpuckpt.agent.bell import ending_with

    if _ring is not None and _ring.visit and called.get(os.getpid()) == _ring.visit:
        if _memory is not None:
            _memory.forgotten = forgotten
        with ending_with(_ring.engine_pid):
            checkpoint_here()


class Worker:
    """The communicators of a worker, which cannot stand still without its engine."""

    def __init__(self, inner: Communicators, ring: Ring, refusals: list[str]) -> None:
        self.inner, self.ring, self.refusals = inner, ring, refusals
        self.describe, self.hazards, self.sockets = inner.describe, inner.hazards, inner.sockets
        self.synchronise, self.suspend, self.resume = inner.synchronise, inner.suspend, inner.resume
        self.held_bytes = inner.held_bytes

    def obstacles(self) -> list[str]:
        if not self.ring.visit and not self.ring.heard():
            cure = 'start vLLM after: eval "$(gpuckpt env --vllm)"; where it says there that gpuckpt cannot hold this engine, it says why'
            return [f"its engine (pid {self.ring.engine_pid}) is still starting, or has no agent to hold it between two steps ({cure})"]
        return self.refusals
