"""The timeline of a suspend and a resume by rank."""

from __future__ import annotations

from typing import Any

from drawing import box, svg, text

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
