"""The result files, and the words in which tables tell of them."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
UNTESTED = "untested"
DOCS = "../"  # from a document in docs/ to the root


def result(name: str) -> dict[str, Any] | None:
    """The document of one run; None if that script has not run on a GPU."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def source(name: str, up: str = "") -> str:
    """A link to a result file. *up*: the way from the document to the root."""
    return f"[{name}.json]({up}benchmarks/results/{name}.json)"


def noted(name: str, found: dict[str, Any]) -> str:
    """Its source, for a document in docs/, and what the run noted of itself: what ran beside it, what was compiled before."""
    return "; ".join([source(name, DOCS), *(found[key] for key in ("bytecode", "beside") if key in found)])


def spread(values: Sequence[float], unit: str = "s", digits: int = 1) -> str:
    """Median, and least to most: "13.9 s (12.4–15.3)"."""
    middle = f"{statistics.median(values):.{digits}f} {unit}"
    return middle if len(values) < 3 else f"{middle} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def huge_pages(document: dict[str, Any]) -> str:
    """The setting of transparent huge pages: "always [madvise] never" -> "`madvise`"."""
    words = document["machine"]["thp"]
    found = re.search(r"\[(\w+)\]", words)
    return f"`{found[1] if found else words}`"


def most(runs: Sequence[dict[str, Any]], key: str) -> int:
    return max(r[key] for r in runs)


def machine() -> str:
    """On what it was measured."""
    seen = {}
    for name in (
        "cycles",
        "cycles_thp_always",
        "cycles_preload",
        "vllm_serve",
        "vllm_tp2",
        "vllm_sleep",
        "two_ranks",
        "run_vllm",
        "preload_torch",
        "overhead",
    ):
        if found := result(name):
            m = found["machine"]
            persistence = "on" if m["persistence_mode"] else "off"
            key = f"{m['gpus']} × {m['gpu']}, driver {m['driver']}, persistence mode {persistence}, Python {m['python']}"
            seen.setdefault(key, m["date"])
    return "; ".join(f"{k}, {date}" for k, date in seen.items())
