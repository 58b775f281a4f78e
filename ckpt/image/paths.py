"""The paths that an image can take into host memory, and what a suspend would have gained or lost on another one.

That is an estimate: the time that this checkpoint took, times a ratio of two that were measured side by side elsewhere (``SOURCES``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from gpuckpt.model import GIB
from gpuckpt.words import size

DRIVER, PRELOAD = "driver", "preload"

#: Where the ratios come from; a test holds them to it.
SOURCES = ("benchmarks/results/preload_torch.json", "benchmarks/results/preload_plain.json")
#: What a checkpoint with the library takes of the driver's own, where 16 threads share its copies: torch with 28.7 GiB, a plain C program
#: with 20.5 GiB. Of one thread that copies nothing is concluded.
RATIOS = (0.151, 0.14)
#: The least of it that was measured where memory was kept ready, for all of the image. Of a part of it, it is somewhere between.
READY_RATIO, READY_SOURCE = 0.119, "benchmarks/results/reserve_torch.json"
#: A smaller image is mostly fixed cost, of which nothing was measured side by side.
LEAST_BYTES = 4 * GIB


class Estimate(NamedTuple):
    """What a checkpoint would have taken on another *path*: from *low_s* to *high_s* seconds."""

    path: str
    low_s: float
    high_s: float
    source: str = SOURCES[0]

    def as_dict(self) -> dict[str, object]:
        return self._asdict()


def other(path: str, nbytes: int, seconds: float | None, *, shared: bool = False, ready: bool = False) -> Estimate | None:
    """Of an image of *nbytes* that took *path*, and *seconds* for its checkpoint; *shared*: several threads copied; *ready*: into memory
    kept ready. None where nothing is known that would tell."""
    if seconds is None or nbytes < LEAST_BYTES or (path == PRELOAD and not shared):
        return None
    few, many = min(RATIOS), max(RATIOS)
    if path == PRELOAD and ready:
        return Estimate(DRIVER, round(seconds / many, 2), round(seconds / READY_RATIO, 2), READY_SOURCE)
    if path == PRELOAD:
        return Estimate(DRIVER, round(seconds / many, 2), round(seconds / few, 2))
    return Estimate(PRELOAD, round(seconds * few, 2), round(seconds * many, 2))


def words(image: Mapping[str, Any]) -> str:
    """Of a report's ``image``: which path it took, why, and what another would have taken."""
    guess = image.get("estimate")
    low, high = (f"{guess[key]:.1f}" if guess else "" for key in ("low_s", "high_s"))
    span = f"about {low if low == high else f'{low}-{high}'} s of checkpoint, by the ratios in {guess['source']}" if guess else ""
    if image["path"] == PRELOAD:
        ready = f", {size(image['from_reserve_bytes'])} of it ready before" if image.get("from_reserve_bytes") else ""
        return f"with the preload library{ready}" + (f" (estimate without: {span})" if guess else "")
    why = f": {image['why']}" if image.get("why") else ""
    return f"by the driver alone{why}" + (f" (estimate with the preload library, 16 threads: {span})" if guess else "")
