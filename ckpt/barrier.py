"""What an operation asks before each step: whether all others are ready too. :class:`Alone` is the answer where this host is all."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from gpuckpt import errors
from gpuckpt.errors import GpuckptError
from gpuckpt.model import Inventory, Membership

#: The step after the last one.
END = "end"


class Part(NamedTuple):
    """What this host's journal says of the processes that an operation is about."""

    group: str = ""  # that other hosts have a part in too
    committed: bool = False  # processes of it are, or were, checkpointed on all of them
    journal: tuple[str, ...] = ()  # every such group in the journal, of whatever processes


class Barrier(Protocol):
    """Used by one operation, in this order: ``join``, ``before`` each step, ``before(END)``; or ``back``, and ``before`` each step up."""

    @property
    def several(self) -> bool:
        """Whether other hosts have a part in the operation."""
        ...

    @property
    def committed(self) -> bool:
        """Whether the hosts have agreed to do what cannot be taken back by one of them alone."""
        ...

    @property
    def membership(self) -> Membership | None:
        """Known from ``join`` on."""
        ...

    def check(self, membership: Membership | None, pid: int) -> None:
        """Raise :class:`gpuckpt.errors.SeveralHosts` if a group with *membership* cannot be worked on here."""
        ...

    def join(
        self,
        inventory: Inventory,
        pid: int,
        *,
        already: bool,
        part: Part,
        deadline: float,
        patience_s: float,
        note: Callable[[Membership], None],
    ) -> bool:
        """Return when every host has looked at its part, and all of it may be operated on: True if nothing is left to do on any.

        *pid*: what a person calls the part by. *patience_s*: how long a driver call may take beyond *deadline*. *note* is called to have
        the membership written down before this host can be committed, and once it is; what it raises before ends the operation.
        """
        ...

    def before(self, step: str, cause: GpuckptError | None = None) -> None:
        """Return when every host is ready to begin *step*. With *cause* this one is not, and all learn why.

        Raises *cause*; another host's failure in words, with everything to be taken back; or :class:`gpuckpt.errors.Held`: what has
        been done stays.
        """
        ...

    def fail(self, cause: GpuckptError) -> None:
        """Let the others know, who need not wait for us. Does nothing where they know or where the operation is over. Never raises."""
        ...

    def back(self, cause: GpuckptError, *, stuck: bool) -> None:
        """Everything shall go back, for *cause*; with *stuck* a process here cannot, so that its peers have nobody to go on with.

        Raises :class:`gpuckpt.errors.Held` where it may not go back: the others may go forward.
        """
        ...


class Alone:
    """One host: nobody to wait for, and groups that have a part elsewhere are refused."""

    several = False
    committed = False
    membership: Membership | None = None

    def check(self, membership: Membership | None, pid: int) -> None:
        if membership is not None:
            others = ", ".join(f"{h} (node {i})" for i, h in enumerate(membership.hosts) if i != membership.node)
            raise errors.SeveralHosts(
                f"pid {pid} belongs to a group that has a part on {others}: it comes back together with them; nothing was touched",
                hint=f"on this host, and likewise on each other one: {membership.resume_command(pid)}",
                pid=pid,
            )

    def join(
        self,
        inventory: Inventory,  # noqa: ARG002 - as the protocol has it
        pid: int,  # noqa: ARG002
        *,
        already: bool,
        part: Part,  # noqa: ARG002
        deadline: float,  # noqa: ARG002
        patience_s: float,  # noqa: ARG002
        note: Callable[[Membership], None],  # noqa: ARG002
    ) -> bool:
        return already

    def before(self, step: str, cause: GpuckptError | None = None) -> None: ...

    def fail(self, cause: GpuckptError) -> None: ...

    def back(self, cause: GpuckptError, *, stuck: bool) -> None: ...
