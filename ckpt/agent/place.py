"""The program's safe point: what an agent needs done on the program's own thread and device is handed over here, and comes back done.

To *look* is to ask communicators what they are and hold, which calls NCCL: it delays a program that passes by, no more. To *stand* is to
stay until it is dismissed, doing one job after the other.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gpuckpt.agent import signals
from gpuckpt.agent.communicators import AsFoundError, Communicators


class HalfWayError(Exception):
    """An offload that failed, and could not be taken back."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What the program's thread saw of its communicators: as :class:`~gpuckpt.agent.communicators.Communicators` describes it."""

    communicators: tuple[dict[str, Any], ...] = ()
    hazards: tuple[str, ...] = ()
    sockets: int = 0  # when it began to look

    @property
    def ranks(self) -> frozenset[tuple[Any, ...]]:
        return frozenset((c["name"], c["rank"], c["size"]) for c in self.communicators)


class Done(NamedTuple):
    """What the program's thread has done. ``error``: words, "" if it went well; ``result``: of a look and of a quiesce a :class:`Seen`."""

    visit: int
    call: str
    error: str = ""
    result: Any = None


@dataclass(frozen=True, slots=True)
class Rest:
    """The program uses no GPU for now. ``enter`` makes its device current in a thread of ours: to look, and with ``stands`` to stand."""

    enter: Callable[[], None]
    stands: bool


@dataclass(eq=False, slots=True)
class Place:
    """One a process. ``wanted`` is all that the program reads while nothing goes on; the agent's thread alone writes it."""

    communicators: Communicators
    tell: Callable[[Done], None]  # called on the program's thread
    wanted: bool = False
    called: bool = False  # to stand
    visit: int = 0  # counts the calls: what belongs to an earlier one must not count for this one
    visits: int = 0  # how often the program has come to its safe point
    rest: Rest | None = None
    _looking: bool = False
    _asked: int = 0  # looks
    _taken: int = 0
    _standing: threading.Lock = field(default_factory=threading.Lock)  # held by who stands or looks
    _jobs: queue.SimpleQueue[tuple[int, str, Callable[[], Any] | None]] = field(default_factory=queue.SimpleQueue)  # None: go on

    # The program's thread.

    def come(self) -> None:
        """The program is at its safe point: do what is wanted there, and return when nothing is any more."""
        with self._standing:
            self._attend(stands=True)

    def look(self) -> None:
        """Unasked, on the program's own thread."""
        with self._standing:
            self._taken = self._asked
            self.tell(Done(self.visit, "look", result=self._look()))

    def pass_by(self) -> None:
        """Look, if somebody wants to know."""
        if self._looking:
            with self._standing:
                self._attend(stands=False)

    def begin_rest(self, rest: Rest) -> None:
        self.rest = rest
        if self.wanted:
            self._stand_in()

    def end_rest(self) -> None:
        """The program wants to go on with its GPU: returns when nobody stands or looks for it any more."""
        with contextlib.ExitStack() as ends:
            if not self._standing.acquire(blocking=False):
                ends.enter_context(signals.deferred())
                self._standing.acquire()
            ends.callback(self._standing.release)
            self.rest = None

    def _attend(self, *, stands: bool) -> None:
        if self.called and stands:
            with signals.deferred():
                self._stand()
        elif self._looking and self._asked != self._taken:
            self._taken = self._asked
            self.tell(Done(self.visit, "look", result=self._look()))

    def _look(self) -> Seen:
        sockets = self.communicators.sockets()
        try:
            return Seen(tuple(self.communicators.describe()), tuple(self.communicators.hazards()), sockets)
        except Exception as e:  # noqa: BLE001 - whatever the program's libraries raise, the program must not hear of it
            return Seen(hazards=(f"its communicators cannot be looked at: {words(e)}",), sockets=sockets)

    def _stand(self) -> None:
        visit = self.visit
        self.communicators.synchronise()
        self.tell(Done(visit, "quiesce", result=self._look()))
        while True:
            when, call, work = self._jobs.get()
            if when != visit:
                continue  # of a visit that was given up before we came
            if work is None:
                return
            try:
                self.tell(Done(visit, call, result=work()))
            except Exception as e:  # noqa: BLE001 - the controller must hear of it, the program must not
                self.tell(Done(visit, call, words(e), isinstance(e, (HalfWayError, AsFoundError))))

    # The agent's thread.

    def ask_to_look(self) -> None:
        """Tells of a "look" once the program has come, or of a "quiesce" that another asked for."""
        self._asked += 1
        self._looking = self.wanted = True
        if self.rest is not None:
            self._stand_in()

    def looked(self) -> None:
        """Nobody waits for a look any more."""
        self._looking, self.wanted = False, self.called

    def call(self) -> int:
        """Have the program stand here; returns the number of this visit."""
        self.visit += 1
        self.called = self.wanted = True
        if self.rest is not None and self.rest.stands:
            self._stand_in()
        return self.visit

    def give(self, call: str, work: Callable[[], Any]) -> None:
        """A job for the program that stands."""
        self._jobs.put((self.visit, call, work))

    def dismiss(self) -> None:
        """The program goes on, or need not come."""
        self.called, self.wanted = False, self._looking
        self._jobs.put((self.visit, "", None))

    def in_child(self) -> None:
        """After a fork: whoever held it stayed behind."""
        self._standing = threading.Lock()

    def _stand_in(self) -> None:
        """Let a thread of ours come, as long as the program rests."""

        def come() -> None:
            with self._standing:
                if self.wanted and (rest := self.rest) is not None:
                    rest.enter()
                    self._attend(stands=rest.stands)

        threading.Thread(target=come, name="gpuckpt-stand-in", daemon=True).start()


def words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
