"""What the scripts here make of their rows: lines through points with their intervals, and the summary of a comparison."""

from __future__ import annotations

import statistics
from typing import Any

#: Two-sided 95 % of Student's t, by degrees of freedom.
_T = [12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13]


def fit(xs: list[float], ys: list[float]) -> dict[str, float] | None:
    """The least squares line: fixed + slope x, each with its 95 % half-width. None where there are no three points to judge by."""
    n = len(xs)
    if n < 3 or len(set(xs)) < 2:
        return None
    mean_x, mean_y = sum(xs) / n, sum(ys) / n
    sxx = sum((x - mean_x) ** 2 for x in xs)
    b = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / sxx
    rest = sum((y - mean_y - b * (x - mean_x)) ** 2 for x, y in zip(xs, ys, strict=True)) / (n - 2)
    t = _T[n - 3] if n - 3 < len(_T) else 2.0
    fixed_pm = t * (rest * (1 / n + mean_x**2 / sxx)) ** 0.5
    found = {"fixed": mean_y - b * mean_x, "fixed_plus_minus": fixed_pm, "slope": b, "slope_plus_minus": t * (rest / sxx) ** 0.5}
    return {**{k: round(v, 5) for k, v in found.items()}, "points": n}


def slope(values: list[float]) -> dict[str, float]:
    """Least squares slope per step and its 95 % half-width."""
    found = fit([float(i) for i in range(len(values))], values) or {"slope": 0.0, "slope_plus_minus": float("inf")}
    return {"per_step": round(found["slope"], 4), "plus_minus": round(found["slope_plus_minus"], 4)}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the rows of a comparison: first and later times of each tool, what each left of what its process held, and the host memory that it took."""
    found = {}
    for name in dict.fromkeys(x["tool"] for x in rows):
        mine = [x for x in rows if x["tool"] == name]
        later = mine[1:] or mine
        median = {k: round(statistics.median(x[k] for x in later), 3) for k in ("suspend_s", "resume_s", "host_mib")}
        found[name] = {
            **{f"first_{k}": mine[0][k] for k in ("suspend_s", "resume_s")},
            **{f"later_{k}": median[k] for k in ("suspend_s", "resume_s")},
            "held_mib": mine[0]["held_mib"],
            "left_mib": max(0, *(x["held_mib"] - x["freed_mib"] for x in mine)),
            "host_mib": median["host_mib"],
            "same": sum(x["same"] for x in mine),
            "rounds": len(mine),
        }
    return found
