"""What an agent asks of the program that it lives in: its communicators, and its GPU work."""

from __future__ import annotations

from typing import Any, Protocol


class AsFoundError(Exception):
    """A suspend that was refused: every communicator of the process is as it was found."""


class Communicators(Protocol):
    """The process's own side of GPU communication. All but ``sockets`` and ``obstacles`` run on the program's own thread, at its safe
    point, or on one that stands in for it while it rests: they call NCCL and CUDA, and hold on to objects that the program could let go of.

    A failure is an exception whose text is for people; but for :class:`AsFoundError` nothing is sure of the communicators after it.
    ``suspend`` and ``resume`` are collective: every rank, the same order.
    """

    def sockets(self) -> int:
        """On any thread, at any time: how many sockets of communicators the process holds. Another number than there was at a look means
        that there may be other communicators. No call of NCCL or CUDA, and nothing of the program's is touched."""
        ...

    def obstacles(self) -> list[str]:
        """On the agent's thread, at any time: what keeps the program from standing still at all, with its cure."""
        ...

    def describe(self) -> list[dict[str, Any]]:
        """One ``{"name", "rank", "size", "nccl"}`` for each communicator; ``nccl`` is its library's version.

        One of a single rank is named too: it is seen from outside, and whoever sees it is to know that it is no stranger.
        """
        ...

    def hazards(self) -> list[str]:
        """What would keep an import alive and cannot be suspended, with its cure; empty when this agent vouches for the process."""
        ...

    def synchronise(self) -> None:
        """Return when no GPU work of the process is in flight."""
        ...

    def suspend(self) -> None: ...

    def held_bytes(self) -> int:
        """GPU memory that they hold, suspended or not, as far as their library tells."""
        ...

    def resume(self) -> None:
        """Bring every communicator back and prove it: a collective over rank-distinct data."""
        ...
