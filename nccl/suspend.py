"""Suspends and resumes the communicators of this process, and proves of each that it is down, or up again.

Both are collective: every rank calls them at the same time with its communicators in the order of
:func:`gpuckpt.nccl.communicators.listing`, and a rank that does not come keeps the others waiting. There is no deadline here, since a
call of NCCL cannot be taken back: whoever calls says how long it waits, and reads from *progress* where a rank stands.

They never raise for what NCCL answers: an :class:`Outcome` says how each communicator was left, in success and in failure.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gpuckpt.errors import CommunicatorBroken, GpuckptError, NcclCallFailed, NcclCommunicator
from gpuckpt.nccl import environment
from gpuckpt.nccl.communicators import Communicator
from gpuckpt.nccl.library import REFUSALS, MemoryStats

#: called with a communicator and what begins ("suspend", "resume") or has ended ("suspended", "resumed") of it
Progress = Callable[[Communicator, str], None]

_PAST = {"suspend": "suspended", "resume": "resumed"}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How each communicator was left.

    ``done`` changed as asked, ``already`` were found so, ``broken`` is the one on which it failed and of which nothing is sure,
    ``untouched`` are those as they were found: not come to, or refused by NCCL before it did anything.
    ``nbytes`` is what left the GPU, or came back. ``error`` says why not all are done; its exit code is 3 if one is ``broken``.
    """

    done: tuple[Communicator, ...] = ()
    already: tuple[Communicator, ...] = ()
    broken: Communicator | None = None
    untouched: tuple[Communicator, ...] = ()
    nbytes: int = 0
    error: GpuckptError | None = None

    @property
    def ok(self) -> bool:
        return self.error is None

    def raise_for_error(self) -> None:
        if self.error is not None:
            raise self.error

    def as_dict(self) -> dict[str, Any]:
        return {
            "done": [c.label for c in self.done],
            "already": [c.label for c in self.already],
            "broken": self.broken.label if self.broken else None,
            "untouched": [c.label for c in self.untouched],
            "nbytes": self.nbytes,
            "error": self.error.as_dict() if self.error else None,
        }


def needed_host_bytes(communicators: Sequence[Communicator]) -> list[int]:
    """Host memory that NCCL's own backup of each takes at most while it is suspended, in bytes. NCCL does not say which part it backs up.
    0 of one that is suspended, cannot be, or does not answer (which is a hazard, by its own words)."""
    return [_backup_bytes(c) for c in communicators]


def held_bytes(communicators: Sequence[Communicator]) -> int:
    """What they have on the GPU now, in bytes, by NCCL's own count: 0 of one that does not tell (before 2.29.7), or does not answer."""
    total = 0
    for c in (c for c in communicators if c.library.can_suspend):
        with contextlib.suppress(GpuckptError):
            stats = c.library.stats(c.pointer)
            total += stats.persistent_bytes if stats.suspended else stats.total_bytes
    return total


def _backup_bytes(c: Communicator) -> int:
    if not c.library.can_suspend:
        return 0
    try:
        stats = c.library.stats(c.pointer)
    except GpuckptError:
        return 0
    return 0 if stats.suspended else stats.suspendable_bytes


def suspend(communicators: Sequence[Communicator], progress: Progress | None = None) -> Outcome:
    """Suspend all, in the order given. Stops at the first that fails.

    Before: :func:`gpuckpt.nccl.hazards.hazards` found nothing, every rank is idle and its device synchronised.
    After success nothing may use these communicators, not even a replay of a graph. Give ``outcome.done`` to :func:`resume`,
    and not all: one that was found suspended goes back to its owner so.
    """
    return _each(communicators, "suspend", progress)


def resume(communicators: Sequence[Communicator], progress: Progress | None = None) -> Outcome:
    """Resume those that are suspended, in the order given. Stops at the first that fails.

    Before: every rank is restored and unlocked. Success is not enough, since NCCL reports it also where a peer's memory is not mapped
    again: :func:`gpuckpt.nccl.verify.verify` comes next. One that failed for want of GPU memory can be asked again, on all ranks.
    """
    return _each(communicators, "resume", progress)


def _each(communicators: Sequence[Communicator], verb: str, progress: Progress | None) -> Outcome:
    done: list[Communicator] = []
    already: list[Communicator] = []
    nbytes = 0
    for i, c in enumerate(communicators):
        rest = tuple(communicators[i + 1 :])
        try:
            before = _stats(c)
        except GpuckptError as error:
            return Outcome(tuple(done), tuple(already), None, (c, *rest), nbytes, error)
        if before.suspended == (verb == "suspend"):
            already.append(c)
            continue
        if refusal := _unproven(c, before, verb):
            return Outcome(tuple(done), tuple(already), None, (c, *rest), nbytes, refusal)
        try:
            if progress:
                progress(c, verb)
            (c.library.suspend if verb == "suspend" else c.library.resume)(c.pointer)
            after = _stats(c)
        except NcclCallFailed as error:
            if error.result in REFUSALS and _is_as_before(c, before):
                refused = _refused(c, verb, error)
                return Outcome(tuple(done), tuple(already), None, (c, *rest), nbytes, refused)
            return Outcome(tuple(done), tuple(already), c, rest, nbytes, _broken(c, verb, str(error), done, rest))
        if after.suspended != (verb == "suspend"):
            said = f"NCCL says that it did, and counts the communicator as {'suspended' if after.suspended else 'active'}"
            return Outcome(tuple(done), tuple(already), c, rest, nbytes, _broken(c, verb, said, done, rest))
        done.append(c)
        nbytes += before.suspendable_bytes
        if progress:
            progress(c, _PAST[verb])
    return Outcome(tuple(done), tuple(already), nbytes=nbytes)


def _stats(c: Communicator) -> MemoryStats:
    return c.library.stats(c.pointer)


def _unproven(c: Communicator, before: MemoryStats, verb: str) -> GpuckptError | None:
    """Why *c* must not be suspended: the checkpoint that follows could not be restored."""
    if verb == "suspend" and (before.total_bytes == 0 or (c.carried and before.suspendable_bytes == 0)):
        return NcclCommunicator(
            f"{c.label}: a suspend would release none of its memory, so its peers are mapped by legacy CUDA IPC or the like, "
            "and a checkpoint could not be restored; it was not suspended",
            hint=environment.CURE,
            step="comms",
        )
    return None


def _is_as_before(c: Communicator, before: MemoryStats) -> bool:
    try:
        return _stats(c) == before
    except GpuckptError:
        return False


def _refused(c: Communicator, verb: str, error: NcclCallFailed) -> GpuckptError:
    hint = "NCCL refuses communicators split with splitShare, and all with NCCL_DISABLE_MEM_MANAGER=1; NCCL_DEBUG=WARN says which"
    return NcclCommunicator(f"NCCL refuses to {verb} {c.label}, which is as it was: {error.message}", hint=hint, step="comms")


def _broken(c: Communicator, verb: str, why: str, done: Sequence[Communicator], rest: Sequence[Communicator]) -> GpuckptError:
    past = _PAST[verb]
    message = f"{c.label} (rank {c.rank} of {c.size}) broke while it was to be {past}: {why}"
    message += f"; {past}: {', '.join(x.label for x in done) or 'none'}; not come to: {', '.join(x.label for x in rest) or 'none'}"
    hint = "end the job and start it again"
    if verb == "resume":
        hint = "if the GPU had no room, make some and resume again on all ranks; otherwise end the job and start it again"
    return CommunicatorBroken(message, hint=hint, step="comms")
