"""What a command says while it is at work, and measures for its report and the audit log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from gpuckpt.model import Hazard, ProcessReport, Report, Step
from gpuckpt.world import World


class Progress(NamedTuple):
    """Told while driver calls run: the step, and the bytes on the group's GPUs now and at the start of the operation."""

    step: str
    message: str = ""
    bytes_now: int | None = None
    bytes_start: int | None = None


class Telling:
    """*tell* hears of each step, and of the bytes that move meanwhile."""

    def __init__(self, world: World, command: str, tell: Callable[[Progress], None] | None = None) -> None:
        self.world = world
        self.command = command
        self.steps: list[Step] = []
        self.warnings: list[str] = []
        self.hazards: tuple[Hazard, ...] = ()
        self._seconds: dict[int, float] = {}  # of the calls of the step that is under way, by pid
        self._tell = tell
        self._begun = world.now()

    def seconds(self) -> float:
        return self.world.now() - self._begun

    def moved(self) -> tuple[int | None, int | None]:
        """Bytes on the group's GPUs now, and when it was found; None where nobody looks, or knows."""
        return None, None

    def say(self, step: str, message: str = "") -> None:
        if self._tell is not None:
            self._tell(Progress(str(step), message, *((None, None) if message else self.moved())))

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        begun = self.world.now()
        self.say(name)
        try:
            yield
        finally:
            self.steps.append(Step(str(name), round(self.world.now() - begun, 4), self._seconds))
            self._seconds = {}

    def report(self, rows: Iterable[ProcessReport], *, ok: bool = True, **more: Any) -> Report:
        """The report of this command with *rows*, and what has been said and measured so far."""
        told = tuple(self.steps), self.hazards, tuple(self.warnings)
        return Report(self.command, ok, self.world.simulated, tuple(rows), self.seconds(), *told, **more)

    def audit(self, pids: Sequence[int], outcome: str, **more: Any) -> None:
        self.world.journal.audit(
            command=self.command, by=self.world.user, pids=list(pids), outcome=outcome, seconds=round(self.seconds(), 3), **more
        )
