"""One order to a run: what is to be done, for whom, and what the supervisor itself did for it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from gpuckpt.model import Report, Step


@dataclass(eq=False)
class Order:
    """A "suspend" or a "resume". ``done`` gets its report, or its error."""

    kind: str
    reason: str
    drain_s: float
    asked: float = field(default_factory=time.monotonic)
    done: asyncio.Future[Report] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    steps: list[Step] = field(default_factory=list)

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time a step of the supervisor's own: before a suspend's, after a resume's."""
        begun = time.monotonic()
        yield
        self.steps.append(Step(name, time.monotonic() - begun))

    def told(self, report: Report) -> Report:
        """*report* with these steps where they belong."""
        own = tuple(self.steps)
        return dataclasses.replace(report, steps=(*own, *report.steps) if self.kind == "suspend" else (*report.steps, *own))
