"""The communicators of a real program: those that torch, vLLM or a registration show, through :mod:`gpuckpt.nccl`.

Tested against doubles of NCCL, torch and vLLM, and on two GPUs (benchmarks/results/two_ranks.json, vllm_tp2.json).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from gpuckpt.agent.communicators import AsFoundError

if TYPE_CHECKING:
    from gpuckpt.nccl.communicators import Communicator

#: How long the collective that proves a resumed communicator may take, in seconds.
VERIFY_DEADLINE_S = 30.0


class NcclCommunicators:
    """An agent's :class:`~gpuckpt.agent.communicators.Communicators`. A process without communicators has nothing to suspend."""

    def __init__(self) -> None:
        self._suspended: tuple[Communicator, ...] | None = None  # by us; None: nothing has been asked of them
        self._broken = ""  # in words: of a suspend that broke half-way nothing is sure any more
        self._seen: tuple[Communicator, ...] = ()  # all that were there then, with those of one rank

    def sockets(self) -> int:
        """Reads of ``/proc`` and no more: safe beside whatever the program does. Each communicator has one."""
        from gpuckpt.nccl.communicators import own_sockets

        return own_sockets()

    def obstacles(self) -> list[str]:
        return []

    def describe(self) -> list[dict[str, Any]]:
        from gpuckpt.nccl.communicators import listing
        from gpuckpt.nccl.suspend import needed_host_bytes

        if self._suspended is None:
            seen = listing()
            known = (*seen.communicators, *seen.alone)
            backups = [*needed_host_bytes(seen.communicators), *(0 for _ in seen.alone)]
        else:
            known, backups = self._seen, [0] * len(self._seen)
        return [
            {"name": c.label, "rank": c.rank, "size": c.size, "nccl": c.library.version, "host_bytes": n}
            for c, n in zip(known, backups, strict=True)
        ]

    def hazards(self) -> list[str]:
        """While suspended nothing is looked at: the communicators must not be touched."""
        if self._broken:
            return [self._broken]
        if self._suspended is not None:
            return []
        from gpuckpt.nccl.communicators import listing
        from gpuckpt.nccl.hazards import hazards

        seen = listing()
        found = [f"{h.message} ({h.hint})" for h in (*seen.hazards, *hazards(seen.communicators))]
        if seen.communicators and "torch" not in sys.modules:
            found.append(
                "its communicators cannot be proven after a resume: that is done with the program's torch (import torch in every rank)"
            )
        return found

    def synchronise(self) -> None:
        torch = sys.modules.get("torch")  # found, never imported by us first
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def suspend(self) -> None:
        from gpuckpt.nccl import suspend
        from gpuckpt.nccl.communicators import listing

        seen = listing()
        self._seen = (*seen.communicators, *seen.alone)
        outcome = suspend.suspend(seen.communicators)
        self._suspended = outcome.done  # what was found suspended belongs to its owner, and stays so
        if outcome.error is None:
            return
        self._broken = str(outcome.error)
        if outcome.broken is None:  # refused: its peers are, too, and all go back to where they were
            self.resume()
            self._broken = ""
            raise AsFoundError(str(outcome.error)) from outcome.error
        outcome.raise_for_error()

    def held_bytes(self) -> int:
        from gpuckpt.nccl.communicators import listing
        from gpuckpt.nccl.suspend import held_bytes

        seen = listing() if self._suspended is None else None
        return held_bytes(self._seen if seen is None else (*seen.communicators, *seen.alone))

    def resume(self) -> None:
        from gpuckpt.nccl import suspend
        from gpuckpt.nccl.verify import verify

        down = self._suspended or ()
        suspend.resume(down).raise_for_error()
        verify(down, VERIFY_DEADLINE_S)
        self._suspended = None
