"""Draws docs/img/: pictures from benchmarks/results/, and one of a real run of the command line on simulated GPUs.

usage: pictures.py             memory.svg from cycles.json, timeline.svg from preload_torch.json; ranks.svg from vllm_tp2.json once that has the seconds of each
                               rank; rendezvous.svg, preload.svg, growth.svg, comparison.svg, comparison_vllm.svg and two_models.svg (run_two_models.json) from the
                               results of their names where there are some; by-ranks.svg from vllm_tpN.json once there are two; and architecture.svg
       pictures.py --check     exit 1 if they are not what the result file says
       pictures.py run         run.svg, from a new run (needs an installed gpuckpt; its pids and seconds differ each time)
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tables_ranks
from architecture import architecture
from charts import by_ranks, comparison, growth, two_models
from documents import result
from drawing import box, svg, text
from ranks import has_ranks, ranks

ROOT = Path(__file__).parent.parent
IMG = ROOT / "docs" / "img"
RESULTS = ROOT / "benchmarks" / "results"


def timeline(document: dict[str, Any]) -> str:
    """Where the seconds go: the whole command to scale, and below it what is not the driver's, enlarged."""
    runs = document["torch_cycles"]["without"]
    longest = max(median(runs, "suspend_wall_s"), median(runs, "resume_wall_s"))
    left, right = 88, 700
    scale = (right - left) / longest
    parts, y = [], 20
    for command, moving, own in (("suspend", "checkpoint", ("lock", "re-inspect", "verify")), ("resume", "restore", ("unlock",))):
        steps = {k: median(runs, k) for k in (*own, moving)}
        around = statistics.median(r[f"{command}_wall_s"] - sum(r[k] for k in (*own, moving)) for r in runs)
        shown = {"start-up, inspection, end": around, **{k: steps[k] for k in own}}
        rest = statistics.median(r[f"{command}_wall_s"] - r[moving] for r in runs)
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
        for (name, seconds), css in zip(shown.items(), ("d", "a", "b", "c"), strict=False):
            width = seconds / sum(shown.values()) * wide
            parts += [box(x, y + 44, width, 16, css, f"{name}: {seconds * 1000:.0f} ms")]
            x += width
        words = " · ".join(f"{name} {seconds * 1000:.0f}" for name, seconds in shown.items() if seconds >= 0.001)
        parts += [text(left, y + 76, f"the other {rest * 1000:.0f} ms, enlarged: {words}", "small")]
        y += 104
    m = document["machine"]
    gib = max(r["used_mib"] for r in runs) / 1024
    huge_pages = m["thp"].partition("[")[2].partition("]")[0]
    parts += [
        text(
            left,
            y + 2,
            f"torch process, {gib:.1f} GiB on the GPU, medians of {len(runs)} cycles · {m['gpu']}, driver {m['driver']}, huge pages {huge_pages}",
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


def drawings() -> dict[str, str]:
    """Every picture that is drawn from what is in this tree."""
    found = {"architecture.svg": architecture()}
    for name, draw, of in (
        ("timeline.svg", timeline, "preload_torch"),
        ("memory.svg", memory, "cycles"),
        ("rendezvous.svg", rendezvous, "rendezvous"),
        ("preload.svg", preload, "preload_torch"),
        ("growth.svg", growth, "growth"),
        ("comparison.svg", comparison, "comparison" if (RESULTS / "comparison.json").exists() else "comparison_48"),
        ("comparison_vllm.svg", comparison, "comparison_vllm"),
        ("ranks.svg", ranks, "vllm_tp2"),
        ("two_models.svg", two_models, "run_two_models"),
    ):
        if (document := result(of)) and (draw is not ranks or has_ranks(document)):
            found[name] = draw(document)
    servers = {n: {**d, "cycles": tables_ranks.whole(d)} for n in tables_ranks.COUNTS if (d := result(f"vllm_tp{n}"))}
    if len(servers) > 1:
        found["by-ranks.svg"] = by_ranks(servers, tables_ranks.GROWING)
    return found


def main(arguments: Sequence[str]) -> int:
    IMG.mkdir(parents=True, exist_ok=True)
    if "run" in arguments:
        (IMG / "run.svg").write_text(run(), encoding="utf-8")
        return 0
    stale = []
    for name, drawn in drawings().items():
        path = IMG / name
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
