"""What a rendezvous needs of a store: registers that are written once. Who writes first has decided for all."""

from __future__ import annotations

from typing import Protocol


class Store(Protocol):
    """All calls raise :class:`gpuckpt.errors.RendezvousLost` where the store cannot be reached; whether a write came there is then open."""

    #: Whether others than those who may operate on the processes can write there: values must then be authenticated.
    open_to_others: bool
    #: Whether the store ends with the process that serves it: the hosts then take leave of one another.
    ends: bool
    #: Whether this process serves it.
    serving: bool

    def get(self, key: str) -> bytes | None:
        """What *key* holds, None if nothing was written there. Never waits."""
        ...

    def compare_set(self, key: str, value: bytes) -> bytes:
        """Write *value* where nothing was written yet. Returns what *key* holds from now on, for everybody and for good."""
        ...

    def close(self) -> None: ...
