"""What a run is made of, in plain data: the states that it is in, what was chosen for it, and what it asks of its server."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

from gpuckpt.words import RAM

#: What to do where runs leave no host memory to each other.
HOST_MEMORY_HINT = "resume or stop one of them, give a larger --host-budget, or start them with --keep-in ram,DIR"
#: How long a listener that closes waits for clients that take their answer slowly, or never send the rest of what they ask, in seconds.
CLOSING_S = 1.0


class RunState(enum.StrEnum):
    STARTING = "starting"
    AWAKE = "awake"
    DRAINING = "draining"
    SUSPENDING = "suspending"
    SUSPENDED = "suspended"
    RESUMING = "resuming"
    FAILED = "failed"
    STOPPING = "stopping"
    ENDED = "ended"


class Server(Protocol):
    """What a run asks of the program that it supervises. Calls raise :class:`gpuckpt.errors.ServerRefused`."""

    async def healthy(self) -> bool: ...

    async def asleep(self) -> bool:
        """Whether it has been asked to sleep, and not to wake."""
        ...

    async def quiet(self, within_s: float) -> bool:
        """Whether it is done with all that it was asked, by clients that have left too. It begins nothing new until it is woken."""
        ...

    async def sleep(self) -> None:
        """Before a suspend: give back what it can by itself. It is quiet."""
        ...

    async def wake(self, *, gone: bool = False) -> None:
        """After a resume, or a suspend that did not come about. *gone*: most of what it held is not on its GPUs now, whatever it said."""
        ...


@dataclass(frozen=True)
class Policy:
    """What a person chose. Times in seconds."""

    drain_s: float = 30.0
    grace_s: float = 10.0
    timeout_s: float | None = None  # of one operation; None: its own default
    accept: frozenset[str] = frozenset()
    rehearse: bool | None = False  # suspend and resume once before it is ready; None: if several CUDA processes serve together
    probe: bool = False  # compare the answer to a golden prompt after each resume
    keep_in: str = RAM  # or a directory: where the image lies while it is suspended
    move_to: str = ""  # or a directory: where it goes from host memory once another run wants that
    method: str = "auto"  # by which its memory leaves (``gpuckpt.method``)
