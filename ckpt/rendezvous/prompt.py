"""A store that answers in time or not at all: a host that lost its power, or a file server that is gone, keeps who asks it for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from gpuckpt import errors
from gpuckpt.rendezvous.store import Store

T = TypeVar("T")
#: How long one answer of a store may take, in seconds.
ANSWER_DEADLINE_S = 10.0


class Prompt:
    """*store*, which is called *where*. Once it has been silent it is not asked again: what it says late answers no other question."""

    def __init__(self, store: Store, where: str, seconds: float) -> None:
        self._store, self._where, self._seconds = store, where, seconds
        self.open_to_others, self.ends, self.serving = store.open_to_others, store.ends, store.serving
        self._silent = False

    def get(self, key: str) -> bytes | None:
        return self._ask(lambda: self._store.get(key))

    def compare_set(self, key: str, value: bytes) -> bytes:
        return self._ask(lambda: self._store.compare_set(key, value))

    def close(self) -> None:
        if not self._silent:
            self._store.close()

    def _ask(self, work: Callable[[], T]) -> T:
        try:
            if not self._silent:
                return within(self._seconds, work)
        except TimeoutError:
            self._silent = True
        raise errors.RendezvousLost(f"the rendezvous {self._where} does not answer")


def within(seconds: float, work: Callable[[], T]) -> T:
    """What *work* returns or raises. Raises ``TimeoutError`` if it has not after *seconds*: its thread is left to itself then."""
    ended: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            ended.append(work())
        except BaseException as e:  # noqa: BLE001 - carried to the caller
            failed.append(e)

    thread = threading.Thread(target=run, name="gpuckpt-store", daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise failed[0]
    if not ended:
        raise TimeoutError
    return ended[0]
