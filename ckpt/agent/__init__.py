"""The agent: what a program lets gpuckpt do inside it, for jobs that the driver alone cannot suspend.

>>> import gpuckpt.agent
>>> gpuckpt.agent.install()                    # doctest: +SKIP
>>> for batch in data:                         # doctest: +SKIP
...     step(batch)
...     gpuckpt.agent.checkpoint_here()        # costs one look at a flag

or, without a change to the program but for its loop, ``python -m gpuckpt.agent train.py ARGS…``.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gpuckpt.agent.communicators import Communicators
    from gpuckpt.agent.memory import Memory
    from gpuckpt.agent.server import Agent

__all__ = ["checkpoint_here", "idle", "install"]

_agent: Agent | None = None


def install(
    communicators: Communicators | None = None,
    *,
    summon: Callable[[int], None] | None = None,
    safe_point: str = "gpuckpt.agent.checkpoint_here()",
    memory: Memory | None = None,
    pool: bool = False,
) -> None:
    """Start this process's agent; a second call does nothing. *communicators*: by default, those of torch and vLLM. *memory*: what
    can leave the GPU ahead of the driver's copy; by default what is in ``gpuckpt.pool``. *pool*: make that ready now, before the first tag
    does (:func:`gpuckpt.pool.ready`); where it cannot be, one warning says why.

    A program whose loop sleeps gives *summon*, which makes it come to its safe point: it is called on the agent's thread, with the number
    of the visit that is wanted, and with 0 when none is any more. *safe_point* is what a person calls that point.
    From now on ``gpuckpt suspend`` may ask the program to stand still at :func:`checkpoint_here`. Forked children have no agent.
    Raises ``OSError`` where its socket cannot be made.
    """
    global _agent  # noqa: PLW0603 - one a process, as a process has one GPU state
    if _agent is not None:
        return
    if pool:
        from gpuckpt.pool import ready

        ready()
    from gpuckpt.agent import protocol
    from gpuckpt.agent.memory import PoolMemory
    from gpuckpt.agent.nccl import NcclCommunicators
    from gpuckpt.agent.server import Agent
    from gpuckpt.inspect import processes

    me = processes.read(os.getpid())
    assert me is not None
    path = protocol.make_directory(os.geteuid()) / protocol.socket_name(me.pid, me.start_ticks)
    made = Agent(communicators or NcclCommunicators(), path, summon, safe_point, memory or PoolMemory())
    made.start()
    _agent = made
    os.register_at_fork(after_in_child=_forget)


def checkpoint_here() -> None:
    """The program's safe point: call it where no GPU work of another thread is under way, on every rank alike.

    Returns at once unless a suspend waits for the program; then it returns when the process has been resumed, or the suspend given up.
    """
    if _agent is not None:
        place = _agent.place
        place.visits += 1
        if place.wanted:
            place.come()


@contextlib.contextmanager
def idle() -> Iterator[None]:
    """A ``with`` block in which the program uses no GPU, whatever else it does: waits for a request, reads data, sleeps.

    The whole block is a safe point: a suspend may come and go in it. Left while the process is suspended, it waits for the resume.
    It is for the thread that does the program's GPU work; no other may do any meanwhile. Without an agent it does nothing.
    """
    with _resting(stands=True):
        yield


def look_here() -> None:
    """Look at the program's communicators, on its own thread: its agent can tell of them from now on, wherever the program is."""
    if _agent is not None:
        _agent.place.look()


def lets_look() -> contextlib.AbstractContextManager[None]:
    """As :func:`idle`, but no safe point: only the communicators may be looked at in it."""
    return _resting(stands=False)


@contextlib.contextmanager
def _resting(*, stands: bool) -> Iterator[None]:
    place = _agent.place if _agent is not None else None
    if place is None or place.rest is not None:
        yield
        return
    from gpuckpt.agent.place import Rest

    place.visits += stands
    place.pass_by()
    try:
        place.begin_rest(Rest(_device(), stands))  # a signal's handler may raise in it
        yield
    finally:
        place.end_rest()


def _device() -> Callable[[], None]:
    """Makes the device that is current here current where it is called."""
    torch = sys.modules.get("torch")  # found, never imported by us first
    if torch is None or not torch.cuda.is_initialized():
        return lambda: None
    index = torch.cuda.current_device()
    return lambda: torch.cuda.set_device(index)


def _forget() -> None:
    global _agent  # noqa: PLW0603
    if _agent is not None:
        with contextlib.suppress(OSError):
            _agent.close_in_child()
        _agent = None
