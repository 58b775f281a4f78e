"""What becomes of a vLLM server's prefix cache in a suspend, and what that costs: it is dropped, or kept (``--keep kv_cache``)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gpuckpt import errors, plan
from gpuckpt.model import Report
from gpuckpt.supervisor.budget import Budget
from gpuckpt.supervisor.holdings import Holdings
from gpuckpt.supervisor.model import RunState
from gpuckpt.supervisor.share import chosen_gpus
from gpuckpt.words import size

log = logging.getLogger("gpuckpt.run")


@dataclass(frozen=True)
class Fate:
    """Of the cache in the last suspend, measured. Kept: *moved_bytes* left the GPUs by the driver, in *seconds*, and *host_bytes* hold them
    (none where they lie on disk); what of that is the cache vLLM alone knows. Dropped: *dropped_bytes*, and all else is 0."""

    kept: bool
    moved_bytes: int = 0
    seconds: float = 0.0
    host_bytes: int = 0
    dropped_bytes: int = 0

    def words(self) -> str:
        if not self.kept:
            return f"{size(self.dropped_bytes)} of its cache are dropped; --keep kv_cache keeps them, at as much host memory"
        where = f"{size(self.host_bytes)} of host memory hold them" if self.host_bytes else "they lie on disk"
        return f"the cache is kept: all {size(self.moved_bytes)} were moved by the driver in {self.seconds:.1f} s, and {where}"


class Cache:
    """Of one run. ``fate`` is that of the last suspend, None before there was one that said anything of it."""

    def __init__(self, holdings: Holdings, kept: bool) -> None:
        self._holdings, self._kept = holdings, kept
        self._said = False
        self.fate: Fate | None = None

    def changed(self, state: RunState) -> None:
        """Say what keeping it will cost, once it is known what the server holds."""
        held = sum(self._holdings.gpu_bytes.values())
        if self._kept and not self._said and state is RunState.AWAKE and held:
            self._said = True
            free = self._holdings.budget.available_bytes()
            log.info(
                "--keep kv_cache: each suspend moves all %s to host memory by the driver, the cache included; %s are available",
                size(held),
                size(free),
            )

    def finished(self, operation: str, _reason: str, outcome: Report | errors.GpuckptError, _seconds: float) -> None:
        if operation != "suspend" or not isinstance(outcome, Report):
            return
        dropped = self._holdings.dropped_bytes
        if self._kept:
            moved = sum(max(0, (g.bytes_before or 0) - (g.bytes_after or 0)) for p in outcome.processes for g in p.gpus)
            took = sum(s.seconds for s in outcome.steps if s.name == "checkpoint")
            self.fate = Fate(True, moved, took, self._holdings.host_bytes)
        elif dropped:
            self.fate = Fate(False, dropped_bytes=dropped)
        else:
            return
        log.info("%s", self.fate.words())

    def facts(self) -> dict[str, Any] | None:
        return {**asdict(self.fate), "words": self.fate.words()} if self.fate is not None else None


def foreseen(environ: Mapping[str, str], gpu_count: int | None, timeout_s: float | None) -> dict[str, Any]:
    """What keeping the cache will cost at most, as far as it is known before anything is started. ``most_bytes`` is all the memory of the
    GPUs that the command will use, None where they cannot be asked."""
    from gpuckpt.early import devices

    try:
        gpus = devices(environ).gpus()
    except errors.GpuckptError:
        gpus = ()
    chosen = chosen_gpus([{"uuid": g.uuid, "index": g.index} for g in gpus], environ, gpu_count)
    totals = [g.total_bytes for g in gpus if g.uuid in chosen]
    most = sum(n for n in totals if n is not None) if totals and None not in totals else None
    free = Budget(environ=environ).available_bytes()
    deadline = timeout_s if timeout_s is not None else plan.default_timeout_s(most) if most is not None else None
    bound = f"at most {size(most)}, all the memory of {len(totals)} GPU{'s' * (len(totals) > 1)}; " if most is not None else ""
    words = (
        "each suspend moves all that the server holds to host memory by the driver, the cache included: "
        f"{bound}how much is said once it has started. {size(free)} of host memory are available"
        + (f"; deadline {deadline:.0f} s" if deadline is not None else "")
    )
    return {"what": "kv_cache", "most_bytes": most, "host_bytes_available": free, "timeout_seconds": deadline, "words": words}
