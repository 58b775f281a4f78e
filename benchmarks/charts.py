"""Charts of ``tests/gpu/growth.py``, ``comparison.py``, ``run_two_models.py``, and of one server on more and more GPUs."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from drawing import box, dot, line, path, svg, text, ticks

AXES = {"gib": "GiB on the GPU", "processes": "processes", "graphs": "CUDA graphs"}
COMMANDS = {"suspend": "gpu", "resume": "host"}


def growth(document: Mapping[str, Any]) -> str:
    """A panel an axis: every later cycle a dot, and the line through them where enough were measured."""
    parts: list[str] = []
    wide, top, bottom = 250, 34, 194
    for panel, (axis, words) in enumerate(AXES.items()):
        rows = [r for r in document["rows"] if r["axis"] == axis and r["cycle"] > 0]
        left = 46 + panel * (wide + 40)
        parts.append(text(left, top - 16, f"by {words}", "title"))
        if not rows:
            parts.append(text(left, top + 20, "not measured", "small"))
            continue
        xs = [_x(r) for r in rows]
        across, up = ticks(max(xs)), ticks(max(r[f"{c}_wall_s"] for r in rows for c in COMMANDS))

        def place(x: float, s: float, left: int = left, across: Any = across, up: Any = up) -> tuple[float, float]:
            return left + x / across[-1] * wide, bottom - s / up[-1] * (bottom - top)

        for s in up:
            parts += [
                line("grid", left, place(0, s)[1], left + wide, place(0, s)[1]),
                text(left - 6, place(0, s)[1] + 4, f"{s:g}", "small end"),
            ]
        parts += [text(place(x, 0)[0], bottom + 16, f"{x:,g}", "small middle") for x in across]
        parts.append(line("axis", left, bottom, left + wide, bottom))
        for command, css in COMMANDS.items():
            parts += [dot(css, *place(_x(r), r[f"{command}_wall_s"]), f"{command} {_x(r):g}: {r[f'{command}_wall_s']:.2f} s") for r in rows]
            points = sorted({r["value"]: (_x(r), _middle(rows, r["value"], command)) for r in rows}.values())
            parts.append(path(css, [place(x, s) for x, s in points]))
    m = document["machine"]
    parts += [line("gpu", 46, bottom + 34, 68, bottom + 34), text(74, bottom + 38, "suspend", "small")]
    parts += [line("host", 140, bottom + 34, 162, bottom + 34), text(168, bottom + 38, "resume", "small")]
    parts.append(
        text(240, bottom + 38, f"seconds, the whole command · {m.get('gpu', 'simulated')}, driver {m.get('driver', '–')}", "small")
    )
    return svg(46 + 3 * (wide + 40), bottom + 52, "How the time of a suspend and of a resume grows", parts)


def _x(row: Mapping[str, Any]) -> float:
    return float(row["gib_on_gpu"] if row["axis"] == "gib" else row["value"])


def _middle(rows: list[Mapping[str, Any]], value: float, command: str) -> float:
    return statistics.median(r[f"{command}_wall_s"] for r in rows if r["value"] == value)


def by_ranks(documents: Mapping[int, Mapping[str, Any]], steps: Sequence[tuple[str, str]]) -> str:
    """A line a step, over the number of ranks: the median of the cycles, and every cycle a dot."""
    left, right, top, bottom = 46, 520, 20, 220
    found = {name: {n: [c[way][name] for c in d["cycles"]] for n, d in documents.items()} for way, name in steps}
    across, up = max(documents), ticks(max(s for by in found.values() for values in by.values() for s in values))
    parts = []

    def place(n: float, s: float) -> tuple[float, float]:
        return left + n / across * (right - left), bottom - s / up[-1] * (bottom - top)

    for s in up:
        parts += [line("grid", left, place(0, s)[1], right, place(0, s)[1]), text(left - 6, place(0, s)[1] + 4, f"{s:g}", "small end")]
    parts += [text(place(n, 0)[0], bottom + 16, f"{n}", "small middle") for n in documents] + [line("axis", left, bottom, right, bottom)]
    ends = sorted((place(across, statistics.median(by[across]))[1], name) for name, by in found.items())
    y = 0.0
    for at, name in ends:
        css = COMMANDS["suspend" if (("down", name) in steps) else "resume"]
        by, y = found[name], max(at + 4, y + 14)
        parts += [dot(css, *place(n, s), f"{name}, {n} ranks: {s:.3f} s") for n, values in by.items() for s in values]
        parts += [path(css, [place(n, statistics.median(values)) for n, values in by.items()]), text(right + 8, y, name, "small")]
    m = next(iter(documents.values()))["machine"]
    parts.append(
        text(left, bottom + 38, f"ranks; seconds of the slowest rank · {m.get('gpu', 'simulated')}, driver {m.get('driver', '–')}", "small")
    )
    return svg(right + 110, bottom + 52, "The steps of a suspend and a resume by ranks", parts)


def comparison(document: Mapping[str, Any]) -> str:
    """Two bars a tool: later suspends and later resumes."""
    found = document["summary"]
    left = max(150, 20 + 7 * max(map(len, found)))
    right, y = left + 470, 20
    most = ticks(max(v for f in found.values() for v in (f["later_suspend_s"], f["later_resume_s"])))[-1] or 1.0
    parts: list[str] = []
    for tool, f in found.items():
        parts.append(text(left - 10, y + 19, tool, "end"))
        for i, (command, css) in enumerate((("suspend", "driver"), ("resume", "a"))):
            s = f[f"later_{command}_s"]
            parts += [box(left, y + 14 * i, s / most * (right - left), 12, css, f"{command}: {s:.2f} s")]
            parts += [text(left + s / most * (right - left) + 6, y + 14 * i + 10, f"{s:.2f} s", "small")]
        parts.append(text(right + 60, y + 19, f"{f['left_mib']} MiB left", "small"))
        y += 40
    m = document["machine"]
    parts += [box(left, y, 12, 12, "driver"), text(left + 18, y + 11, "suspend", "small"), box(left + 90, y, 12, 12, "a")]
    parts += [text(left + 108, y + 11, "resume", "small")]
    what = "one vllm serve" if document.get("name") == "comparison_vllm" else "one torch process each"
    of = f"{what}, {document['gib']:g} GiB · {m.get('gpu', 'simulated')}, driver {m.get('driver', '–')}"
    parts.append(text(left + 170, y + 11, of, "small"))
    return svg(right + 160, y + 26, "Ways off a GPU and back", parts)


#: How much of a run its picture shows, in seconds: what one can see.
SHOWN_S = 70.0


def two_models(document: dict[str, Any]) -> str:
    """GPU memory over time while two runs share one GPU, and who was asked when: from the moment at which both were up, ``SHOWN_S`` long."""
    begun = next(s for s, words in document["events"] if words == "ask a") - 2
    points = [(max(0.0, s - begun), mib / 1024) for s, mib in document["gpu_mib_over_time"] if s >= begun - 10]
    whole = points[-1][0]
    last = min(whole, SHOWN_S)
    points = [*(p for p in points if p[0] < last), (last, next(gib for s, gib in reversed(points) if s <= last))]
    events = [(s - begun, words) for s, words in document["events"] if begun <= s <= begun + last]
    card = document["checks"]["together they are more than the card"]["seen"]
    left, right, top, bottom = 52, 760, 58, 228
    most = card["card"] / 1024

    def x(seconds: float) -> float:
        return left + seconds / last * (right - left)

    def y(gib: float) -> float:
        return bottom - gib / most * (bottom - top)

    parts = []
    for tick in range(0, int(most) + 1, 20):
        parts += [f'<line class="grid" x1="{left}" x2="{right}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>']
        parts += [text(left - 8, y(tick) + 4, f"{tick}", "small end")]
    parts += [f'<line class="axis" x1="{left}" x2="{right}" y1="{y(most):.1f}" y2="{y(most):.1f}" stroke-dasharray="4 3"/>']
    parts += [text(right, y(most) - 5, f"the card: {most:.0f} GiB", "small end")]
    free = float(left)  # where the next label may begin
    for seconds, words in events:
        at, short = x(seconds), words.removeprefix("ask ").split(" for ")[0].replace("requests at", "at")
        line = f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{bottom}">'
        parts += [f"{line}<title>{seconds:.1f} s: {words}</title></line>"]
        if at >= free and at + 7 * len(short) < right:
            parts += [text(at + 2, top - 20, short, "small")]
            free = at + 7 * len(short) + 6
    steps = [points[0], *(p for (_, before), (s, gib) in itertools.pairwise(points) for p in ((s, before), (s, gib)))]
    parts += [f'<polyline class="gpu" points="{" ".join(f"{x(s):.1f},{y(gib):.1f}" for s, gib in steps)}"/>']
    parts += [f'<line class="axis" x1="{left}" x2="{right}" y1="{bottom}" y2="{bottom}"/>']
    parts += [text(x(s), bottom + 16, f"{s}", "small middle") for s in range(0, int(last), 10)]
    parts += [text(left - 8, top - 42, "GiB of GPU memory in use, and who is asked"), text(right, bottom + 32, "seconds", "small end")]
    m = document["machine"]
    part = f", the first {last:.0f} of {whole:.0f} s" if last < whole else ""
    words = f"two vllm serve, a {card['a'] / 1024:.0f} GiB and b {card['b'] / 1024:.0f} GiB, gpuckpt run --share{part}"
    parts += [text(left, bottom + 50, f"{words} · {m['gpu']}, driver {m['driver']}", "small")]
    return svg(800, 290, "GPU memory over time while two models share one GPU", parts)
