"""The picture of docs/architecture.md: who speaks to whom in a suspend, and the way of the data."""

from __future__ import annotations

from drawing import svg, text

#: Of this picture alone: frames, the way of the data (thick), and of words (thin).
STYLE = """<style>
.frame { fill: none; stroke: #8c959f; stroke-width: 1.2 } .inner { fill: #8c959f; fill-opacity: .12; stroke: #8c959f; stroke-width: .8 }
.data { stroke: #2f81f7; stroke-width: 7; fill: none; marker-end: url(#thick) } .disk { stroke: #d29922; stroke-width: 7; fill: none; marker-end: url(#thin-disk) }
.says { stroke: #8c959f; stroke-width: 1.3; fill: none; marker-end: url(#thin) } .step { fill: #2f81f7; font-weight: 600; font-size: 11.5px }
</style>
<defs>
<marker id="thick" viewBox="0 0 6 6" refX="3" refY="3" markerWidth="2.4" markerHeight="2.4" orient="auto"><path d="M0 0 6 3 0 6z" fill="#2f81f7"/></marker>
<marker id="thin-disk" viewBox="0 0 6 6" refX="3" refY="3" markerWidth="2.4" markerHeight="2.4" orient="auto"><path d="M0 0 6 3 0 6z" fill="#d29922"/></marker>
<marker id="thin" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="6" markerHeight="6" orient="auto"><path d="M0 0 6 3 0 6z" fill="#8c959f"/></marker>
</defs>"""


def frame(x: float, y: float, width: float, height: float, title: str, *lines: str, css: str = "frame") -> list[str]:
    """A rounded box with a title and small lines below it."""
    parts = [f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" class="{css}"/>', text(x + 10, y + 19, title, "title")]
    return parts + [text(x + 10, y + 37 + 16 * i, words, "small") for i, words in enumerate(lines)]


def arrow(css: str, way: str) -> str:
    return f'<path class="{css}" d="{way}"/>'


def architecture() -> str:
    """Top: gpuckpt and what it writes down. Middle: the target. Bottom: where the bytes are before and after."""
    parts = [STYLE]
    parts += frame(
        20, 36, 240, 92, "gpuckpt suspend", "plan.py says what is next,", "walk.py makes the calls,", "operation.py goes back if one fails"
    )
    parts += frame(20, 180, 190, 58, "journal", "what is being done, on disk", "before it is done")
    parts += frame(390, 36, 220, 92, "callers", "one process for each driver call:", "what hangs costs a deadline;", "a lock undoes itself")
    parts += frame(
        640, 36, 220, 92, "NVML and /proc", "who is on the GPU, who belongs", "together, what is in the way,", "how much room there is"
    )
    parts += frame(310, 180, 550, 206, "the target: a process that knows nothing of it")
    parts += frame(326, 214, 160, 62, "agent", "a thread, if asked for:", "safe point, pool, NCCL", css="inner")
    parts += frame(506, 214, 338, 62, "the driver in it (libcuda)", "stops its CUDA calls, then moves what they see", css="inner")
    parts += frame(
        326,
        308,
        338,
        64,
        "image, in its own host memory",
        "one private mapping; with the preload library",
        "in huge pages, filled and copied by several threads",
        css="inner",
    )
    parts += frame(684, 308, 160, 64, "pool, if it has one", "what lies under tags:", "copied, or dropped", css="inner")
    parts += frame(506, 438, 338, 58, "GPU", "memory, contexts, graphs: 0 MiB when it is done")
    parts += frame(20, 438, 350, 58, "DIR of --keep-in", "each image a file with checksums; its pages in", "host memory are given back")
    # words
    parts += [arrow("says", "M115 128 V180"), text(123, 159, "before every step", "small")]
    parts += [arrow("says", "M260 82 H390"), text(268, 74, "lock, checkpoint", "step")]
    parts += [arrow("says", "M500 128 V158 H676 V214"), text(512, 152, "by pid, from outside", "small")]
    parts += [arrow("says", "M240 128 V250 H326")]
    parts += [text(232, y, words, "step end") for y, words in ((266, "quiesce,"), (281, "offload,"), (296, "comms,"), (311, "disarm"))]
    parts += [arrow("says", "M486 262 H496 V292 H764 V308")]
    parts += [arrow("says", "M140 36 V14 H750 V36"), text(270, 30, "inspect, re-inspect, verify", "step")]
    # data
    parts += [arrow("data", "M585 438 V382"), text(573, 422, "2. checkpoint", "step end")]
    parts += [arrow("data", "M764 438 V382"), text(778, 422, "1. offload", "step")]
    parts += [arrow("disk", "M348 372 V428"), text(362, 422, "store, drop", "step")]
    return svg(880, 512, "The data's way through a suspend", parts)
