"""What all pictures share: one style for a light and a dark ground, and shapes as SVG text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# One ink for either ground, and a second for what moves: they read on white and on GitHub's dark.
STYLE = """<style>
text { font: 13px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: #24292f }
.small { font-size: 11.5px; fill: #57606a } .title { font-weight: 600 } .end { text-anchor: end } .middle { text-anchor: middle }
.axis { stroke: #8c959f; stroke-width: 1 } .grid { stroke: #8c959f; stroke-opacity: .25 }
.driver { fill: #2f81f7 } .a { fill: #d29922 } .b { fill: #3fb950 } .c { fill: #a371f7 } .d { fill: #8c959f }
.gpu { stroke: #2f81f7; fill: none; stroke-width: 2 } .host { stroke: #d29922; fill: none; stroke-width: 2 }
.zoom { fill: #8c959f; fill-opacity: .15 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .small { fill: #9da7b3 } }
</style>"""


def svg(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">'
    return "\n".join([head, f"<title>{title}</title>", STYLE, *parts, "</svg>", ""])


def text(x: float, y: float, words: str, css: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}"{f" class={chr(34)}{css}{chr(34)}" if css else ""}>{words}</text>'


def box(x: float, y: float, width: float, height: float, css: str, words: str = "") -> str:
    hover = f"<title>{words}</title>" if words else ""
    return f'<rect x="{x:.2f}" y="{y}" width="{max(width, 0.6):.2f}" height="{height}" class="{css}">{hover}</rect>'


def line(css: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{css}" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>'


def path(css: str, points: Iterable[tuple[float, float]]) -> str:
    return f'<polyline class="{css}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'


def dot(css: str, x: float, y: float, words: str) -> str:
    return f'<circle class="{css}" style="stroke-width:1" cx="{x:.1f}" cy="{y:.1f}" r="3"><title>{words}</title></circle>'


def ticks(most: float, count: int = 4) -> Sequence[float]:
    """Round figures from 0 to at least *most*."""
    step = next(s for k in range(-3, 9) for s in (10.0**k, 2 * 10.0**k, 2.5 * 10.0**k, 5 * 10.0**k) if s * count >= most)
    return [step * i for i in range(count + 1)]
