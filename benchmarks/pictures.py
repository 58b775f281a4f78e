"""Draws docs/img/: pictures from benchmarks/results/, and one of a real run of the command line on simulated GPUs.

usage: pictures.py             timeline.svg and memory.svg from cycles.json, rendezvous.svg and preload.svg from files of their names,
                               ranks.svg from vllm_tp2.json, once that has the seconds of each rank
                               two_models.svg from run_two_models.json; each once there is such a file
       pictures.py --check     exit 1 if they are not what the result file says
       pictures.py run         run.svg, from a new run (needs an installed gpuckpt; its pids and seconds differ each time)
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
IMG = ROOT / "docs" / "img"
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


def timeline(document: dict[str, Any]) -> str:
    """Where the seconds go: the whole command to scale, and below it what is not the driver's, enlarged."""
    runs = document["cycles"]
    longest = max(median(runs, "suspend_wall_s"), median(runs, "resume_wall_s"))
    left, right = 88, 700
    scale = (right - left) / longest
    parts, y = [], 20
    for command, moving, own in (
        ("suspend", "checkpoint", ("inspect", "lock", "re-inspect", "verify")),
        ("resume", "restore", ("inspect", "room", "unlock")),
    ):
        steps = {k: statistics.median(r[f"{command}_steps"].get(k, 0.0) for r in runs) for k in (*own, moving)}
        wall = median(runs, f"{command}_wall_s")
        inside = statistics.median(r[f"{command}_s"] - sum(r[f"{command}_steps"].values()) for r in runs)
        start = statistics.median(r[f"{command}_wall_s"] - r[f"{command}_s"] for r in runs)
        shown = {"start-up": start, **{k: steps[k] for k in own}, "between the steps": inside}
        rest = wall - steps[moving]
        parts += [text(left - 10, y + 17, command, "title end")]
        parts += [box(left, y, rest * scale, 24, "a", f"the rest: {rest:.2f} s")]
        parts += [box(left + rest * scale, y, steps[moving] * scale, 24, "driver", f"{moving}: {steps[moving]:.2f} s")]
        parts += [
            f'<text x="{left + rest * scale + 10:.1f}" y="{y + 17}" style="fill:#fff">{moving} {steps[moving]:.1f} s: the driver</text>'
        ]
        # the rest, enlarged
        wide = 420.0
        parts += [
            f'<polygon class="zoom" points="{left},{y + 24} {left + rest * scale:.1f},{y + 24} {left + wide},{y + 44} {left},{y + 44}"/>'
        ]
        x = float(left)
        for (name, seconds), css in zip(shown.items(), ("d", "a", "b", "c", "b", "d"), strict=False):
            width = seconds / sum(shown.values()) * wide
            parts += [box(x, y + 44, width, 16, css, f"{name}: {seconds * 1000:.0f} ms")]
            x += width
        words = " · ".join(f"{name} {seconds * 1000:.0f}" for name, seconds in shown.items() if seconds >= 0.001)
        parts += [text(left, y + 76, f"the other {rest * 1000:.0f} ms, enlarged: {words}", "small")]
        y += 104
    m = document["machine"]
    gib = max(r["gpu_bytes"] for r in runs) / 2**30
    huge_pages = m["thp"].partition("[")[2].partition("]")[0]
    parts += [
        text(
            left,
            y + 2,
            f"torch process, {gib:.1f} GiB on the GPU, median of {len(runs)} cycles · {m['gpu']}, driver {m['driver']}, huge pages {huge_pages}",
            "small",
        )
    ]
    return svg(780, y + 14, "Where the seconds of a suspend and a resume go", parts)


def memory(document: dict[str, Any]) -> str:
    """GPU memory and host memory, cycle after cycle."""
    runs = document["cycles"]
    gpu, host = [], []
    for r in runs:
        gpu += [r["gpu_mib"] / 1024, r["suspended_gpu_mib"] / 1024]
        host += [r["rss_mib"] / 1024, r["suspended_rss_mib"] / 1024]
    left, right, top, bottom = 52, 640, 34, 186
    most = max(*gpu, *host)
    width = (right - left) / len(gpu)

    def height(gib: float) -> float:
        return bottom - gib / most * (bottom - top)

    parts = []
    for tick in range(0, int(most) + 1, 10):
        parts += [f'<line class="grid" x1="{left}" x2="{right}" y1="{height(tick):.1f}" y2="{height(tick):.1f}"/>']
        parts += [text(left - 8, height(tick) + 4, f"{tick}", "small end")]
    for css, values, shift in (("gpu", gpu, 0.0), ("host", host, 0.0)):
        points = [(left + (i + side) * width, height(v) + shift) for i, v in enumerate(values) for side in (0, 1)]
        parts += [f'<polyline class="{css}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>']
    parts += [f'<line class="axis" x1="{left}" x2="{right}" y1="{bottom}" y2="{bottom}"/>']
    parts += [text(left + (2 * i + 1) * width, bottom + 16, str(i + 1), "small middle") for i in range(len(runs))]
    parts += [text(left - 8, top - 14, "GiB", "small end"), text(right, bottom + 32, "cycle: running, then suspended", "small end")]
    parts += [
        f'<line class="gpu" x1="{left}" x2="{left + 22}" y1="{top - 18}" y2="{top - 18}"/>',
        text(left + 28, top - 14, "GPU memory used"),
    ]
    parts += [
        f'<line class="host" x1="{left + 170}" x2="{left + 192}" y1="{top - 18}" y2="{top - 18}"/>',
        text(left + 198, top - 14, "host memory of the process (RSS)"),
    ]
    m = document["machine"]
    parts += [text(left, bottom + 32, f"torch process · {m['gpu']}, driver {m['driver']}", "small")]
    return svg(660, 226, "GPU memory and host memory over the cycles", parts)


def preload(document: dict[str, Any]) -> str:
    """Where the seconds of a suspend and a resume go, as the driver does it and with the preload library, in turn on two processes."""
    sides = {"without": "the driver as it is", "with": "preload library"}
    rows = document["torch_cycles"]
    longest = max(median(rows[side], "suspend_wall_s") for side in sides)
    left, right = 196, 720
    scale = (right - left) / longest
    parts, y = [], 20
    for command, moving in (("suspend", "checkpoint"), ("resume", "restore")):
        parts += [text(12, y + 28, command, "title")]
        for side, words in sides.items():
            wall, call = median(rows[side], f"{command}_wall_s"), median(rows[side], moving)
            got = statistics.median(r["library"].get("populate_s", 0.0) for r in rows[side]) if command == "suspend" else 0.0
            x = float(left)
            for css, seconds, hover in (
                ("a", wall - call, "the command, and the steps around it"),
                ("b", got, "getting host memory, in huge pages by 16 threads"),
                (
                    "driver",
                    call - got,
                    "the driver's copy" if got or command == "resume" else "the driver: getting host memory, and the copy",
                ),
            ):
                parts += [box(x, y, seconds * scale, 20, css, f"{hover}: {seconds:.2f} s")] if seconds else []
                x += seconds * scale
            parts += [text(left - 10, y + 15, words, "small end"), text(x + 8, y + 15, f"{wall:.1f} s", "small")]
            y += 26
        y += 12
    for i, (css, words) in enumerate((("a", "command and steps around"), ("b", "getting host memory"), ("driver", "driver's call"))):
        parts += [box(left + 190 * i, y, 10, 10, css), text(left + 190 * i + 16, y + 10, words, "small")]
    m = document["machine"]
    gib = rows["with"][0]["used_mib"] / 1024
    parts += [
        text(
            left,
            y + 34,
            f"torch, {gib:.1f} GiB, medians of {len(rows['with'])} · {m['gpu']}, driver {m['driver']}, huge pages madvise",
            "small",
        )
    ]
    return svg(780, y + 46, "A suspend and a resume, as the driver does it and with the preload library", parts)


def rendezvous(document: dict[str, Any]) -> str:
    """What the hosts of a suspend ask of the store: it grows with the hosts, and not with the ranks on them."""
    rows = document["memory"]
    most_hosts, most = max(r["hosts"] for r in rows), max(r["operations"] for r in rows)
    left, right, top, bottom = 62, 470, 34, 206

    def place(hosts: float, operations: float) -> tuple[float, float]:
        return left + hosts / most_hosts * (right - left), bottom - operations / most * (bottom - top)

    parts = []
    for tick in range(0, most + 1, 1000):
        y = place(0, tick)[1]
        parts += [
            f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>',
            text(left - 8, y + 4, f"{tick:,}", "small end"),
        ]
    ranks = sorted({r["ranks_a_host"] for r in rows})
    points = [place(r["hosts"], r["operations"]) for r in rows if r["ranks_a_host"] == ranks[-1]]
    parts += [f'<polyline class="gpu" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>']
    for r in rows:
        x, y = place(r["hosts"], r["operations"])
        radius = 2 + 1.5 * ranks.index(r["ranks_a_host"])  # the same number for all: rings round one point
        words = f"{r['hosts']} hosts of {r['ranks_a_host']} ranks: {r['operations']} operations"
        parts += [f'<circle class="host" style="stroke-width:1" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"><title>{words}</title></circle>']
    parts += [f'<line class="axis" x1="{left}" x2="{right}" y1="{bottom}" y2="{bottom}"/>']
    parts += [text(place(h, 0)[0], bottom + 16, str(h), "small middle") for h in sorted({r["hosts"] for r in rows}) if h >= 16]
    parts += [text(right, bottom + 32, "hosts", "small end"), text(left - 40, top - 14, "store operations of one suspend", "small")]
    parts += [text(left + 16, top + 14, f"rings: {', '.join(map(str, ranks))} ranks a host", "small")]
    last = {kind: document[kind][-1] for kind in ("memory", "file", "c10d") if kind in document}
    for i, (kind, words) in enumerate((("memory", "no store"), ("c10d", "TCPStore"), ("file", "directory"))):
        if kind in last:
            parts += [text(right + 24, top + 40 + 18 * i, f"{words}: {last[kind]['seconds']:.2f} s", "small")]
    size = f"{last['memory']['hosts'] * last['memory']['ranks_a_host']:,} ranks on {last['memory']['hosts']} hosts"
    parts += [text(right + 24, top + 18, size)]
    parts += [text(right + 24, top + 40 + 18 * 3, f"all hosts together, {document['machine']['cores']} cores", "small")]
    return svg(680, 246, "Store operations of one suspend, by hosts", parts)


#: A colour for each step of a suspend or a resume; those of the driver that take long have one of their own.
COLOURS = {"quiesce": "c", "unquiesce": "c", "comms": "a", "comms-resume": "a", "offload": "b", "onload": "b", "disarm": "c", "arm": "c"}
LONG = ("checkpoint", "restore")


def has_ranks(document: dict[str, Any]) -> bool:
    """Whether a cycle that came back tells how long each step took on each rank."""
    return bool(_with_ranks(document))


def ranks(document: dict[str, Any]) -> str:
    """A suspend and a resume, rank by rank: each step begins on all when it has ended on all. Below, enlarged, all but the driver's copy."""
    runs = sorted(_with_ranks(document), key=lambda r: r["suspend_wall_s"])
    run = runs[len(runs) // 2]
    left, right, y, parts = 96, 700, 20, []
    longest = max(sum(run["down"].values()), sum(run["up"].values()))
    for command, steps, by_rank in (("suspend", run["down"], run["down_by_rank"]), ("resume", run["up"], run["up_by_rank"])):
        count = max(len(seconds) for seconds in by_rank.values())
        parts += [text(left, y, f"{command}, {sum(steps.values()):.2f} s", "title")]
        parts += _lanes(steps, by_rank, count, left, y + 8, (right - left) / longest)
        y += 8 + 18 * (count + 1) + 22
        short = {name: s for name, s in steps.items() if name not in LONG}
        long = ", ".join(name for name in steps if name in LONG)
        words = " · ".join(f"{name} {s * 1000:.0f}" for name, s in short.items() if s >= 0.001)
        parts += [text(left, y, f"without {long}, enlarged; ms: {words}", "small")]
        parts += _lanes(short, by_rank, count, left, y + 8, (right - left) / sum(short.values()))
        y += 8 + 18 * (count + 1) + 26
    m = document["machine"]
    from_what = f"vllm serve -tp {count}, {run['running_mib'][0] / 1024:.1f} GiB a rank, the middle one of {len(runs)} cycles"
    parts += [text(left, y - 4, f"{from_what} · {m['gpu']}, driver {m['driver']}", "small")]
    return svg(780, y + 10, "The steps of a suspend and a resume, by rank", parts)


def _with_ranks(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        r for r in document.get("cycles", ()) if r.get("resume") == 0 and any(r.get("down_by_rank", {}).values()) and r.get("up_by_rank")
    ]


def _lanes(steps: dict[str, float], by_rank: dict[str, list[float]], count: int, left: float, y: float, scale: float) -> list[str]:
    """A lane for gpuckpt's own steps and one for each rank, one step after the other."""
    parts, x = [text(left - 10, y + 12, "gpuckpt", "small end")], left
    parts += [text(left - 10, y + 12 + 18 * (n + 1), f"rank {n}", "small end") for n in range(count)]
    for name, seconds in steps.items():
        parts += [f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + 18 * (count + 1)}"/>']
        if not by_rank.get(name):
            parts += [box(x, y, seconds * scale, 14, "d", f"{name}: {seconds * 1000:.0f} ms")]
        for n, own in enumerate(by_rank.get(name, ())):
            css = "driver" if name in (*LONG, "lock", "unlock") else COLOURS.get(name, "d")
            parts += [box(x, y + 18 * (n + 1), own * scale, 14, css, f"rank {n}, {name}: {own * 1000:.1f} ms")]
            if own * scale > 9 * len(name):
                parts += [f'<text x="{x + 6:.1f}" y="{y + 18 * (n + 1) + 11}" style="fill:#fff;font-size:11px">{name}</text>']
        x += seconds * scale
    return parts


def two_models(document: dict[str, Any]) -> str:
    """GPU memory over time while two runs share one GPU, and who was asked when: from the moment at which both were up."""
    begun = next(s for s, words in document["events"] if words == "ask a") - 2
    points = [(max(0.0, s - begun), mib / 1024) for s, mib in document["gpu_mib_over_time"] if s >= begun - 10]
    last = points[-1][0]
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
        at, short = x(seconds), words.removeprefix("ask ").split(" for ")[0]
        line = f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{bottom}">'
        parts += [f"{line}<title>{seconds:.1f} s: {words}</title></line>"]
        if at >= free and at + 7 * len(short) < right:
            parts += [text(at + 2, top - 20, short, "small")]
            free = at + 7 * len(short) + 6
    steps = [points[0], *(p for (_, before), (s, gib) in zip(points, points[1:], strict=False) for p in ((s, before), (s, gib)))]
    parts += [f'<polyline class="gpu" points="{" ".join(f"{x(s):.1f},{y(gib):.1f}" for s, gib in steps)}"/>']
    parts += [f'<line class="axis" x1="{left}" x2="{right}" y1="{bottom}" y2="{bottom}"/>']
    parts += [text(x(s), bottom + 16, f"{s}", "small middle") for s in range(0, int(last), max(1, round(last / 8)))]
    parts += [text(left - 8, top - 42, "GiB of GPU memory in use, and who is asked"), text(right, bottom + 32, "seconds", "small end")]
    m = document["machine"]
    words = f"two vllm serve, a {card['a'] / 1024:.0f} GiB and b {card['b'] / 1024:.0f} GiB, gpuckpt run --share"
    parts += [text(left, bottom + 32, f"{words} · {m['gpu']}, driver {m['driver']}", "small")]
    return svg(800, 272, "GPU memory over time while two models share one GPU", parts)


def median(runs: Sequence[dict[str, Any]], key: str) -> float:
    return statistics.median(r[key] for r in runs)


def run() -> str:
    """A terminal, as it looks: the real commands, on real processes, with simulated GPUs."""
    from rich.console import Console
    from rich.text import Text

    from gpuckpt.driver.simulated_store import SimulatedWorldDir

    command = str(Path(sys.executable).parent / "gpuckpt")
    console = Console(record=True, width=112, file=open(os.devnull, "w"), color_system="truecolor")  # noqa: SIM115
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        SimulatedWorldDir.create(place / "world", gpus=1, gib=80, seconds_per_gib=0.1)
        (place / "train.py").write_text("from gpuckpt.driver.simtarget import main\nmain(['--gib', '20', '--daemon'])\n")
        environ = {
            **{k: v for k, v in os.environ.items() if k != "NO_COLOR"},
            "GPUCKPT_SIMULATE": str(place / "world"),
            "GPUCKPT_STATE_DIR": str(place / "state"),
            "FORCE_COLOR": "1",
            "COLUMNS": "112",
        }
        target = subprocess.Popen(
            [sys.executable, "train.py"],
            cwd=place,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            assert target.stdout is not None
            target.stdout.readline()
            for words in (["ps"], ["suspend", str(target.pid)], ["ps"], ["resume", str(target.pid)]):
                console.print(Text.assemble(("$ ", "dim"), (" ".join(["gpuckpt", *words]), "bold")))
                done = subprocess.run([command, *words], env=environ, capture_output=True, text=True, check=True)
                lines = [line.rstrip() for line in done.stdout.rstrip("\n").split("\n")]
                console.print(Text.from_ansi("\n".join(lines)))
                console.print()
        finally:
            target.kill()
            target.wait()
    picture = console.export_svg(title="gpuckpt, here on simulated GPUs", unique_id="run")
    return re.sub(r"\s*@font-face \{.*?\}", "", picture, flags=re.DOTALL)  # no font is fetched from anywhere


def main(arguments: Sequence[str]) -> int:
    IMG.mkdir(parents=True, exist_ok=True)
    if "run" in arguments:
        (IMG / "run.svg").write_text(run(), encoding="utf-8")
        return 0
    stale = []
    for name, draw, result in (
        ("timeline.svg", timeline, "cycles"),
        ("memory.svg", memory, "cycles"),
        ("rendezvous.svg", rendezvous, "rendezvous"),
        ("preload.svg", preload, "preload"),
        ("ranks.svg", ranks, "vllm_tp2"),
        ("two_models.svg", two_models, "run_two_models"),
    ):
        source = ROOT / f"benchmarks/results/{result}.json"
        if not source.exists():
            continue  # it has not been run yet
        document = json.loads(source.read_text())
        if draw is ranks and not has_ranks(document):
            continue
        path, drawn = IMG / name, draw(document)
        if not path.exists() or path.read_text(encoding="utf-8") != drawn:
            stale.append(name)
            if "--check" not in arguments:
                path.write_text(drawn, encoding="utf-8")
    if "--check" in arguments and stale:
        print(f"{', '.join(stale)}: not what benchmarks/results say. Type: python benchmarks/pictures.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
