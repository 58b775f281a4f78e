"""Writes the figures of the README and of docs/ from benchmarks/results/, so that none is typed by hand.

usage: readme.py            fill the blocks between <!-- NAME --> and <!-- /NAME -->
       readme.py --check    exit 1 if they are not what the result files say
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tables
import tables_floors
import tables_image
import tables_ranks
from documents import ROOT, UNTESTED, machine, most, result, source


def figures() -> str:
    """The first screen's: what each takes as the driver does it, and by gpuckpt at its best. All of them: docs/figures.md."""
    rows = [
        "| seconds down / up | the driver alone | gpuckpt | left on the GPU | source |",
        "|---|---|---|---|---|",
    ]

    def both(runs: Sequence[dict[str, Any]]) -> str:
        return " / ".join(f"{statistics.median(r[f'{way}_wall_s'] for r in runs):.1f}" for way in ("suspend", "resume"))

    for kind, what in (("torch", "torch process"), ("plain", "plain C program")):
        if found := result(f"preload_{kind}"):
            sides = found[f"{kind}_cycles"]
            gib = sides["with"][0]["library"]["images"][0]["mib"] / 1024
            left = f"{most(cycles['cycles'], 'suspended_gpu_mib')} MiB" if kind == "torch" and (cycles := result("cycles_preload")) else ""
            rows.append(
                f"| {what}, {gib:.1f} GiB | {both(sides['without'])} | **{both(sides['with'])}** | {left} | {source(f'preload_{kind}')} |"
            )
    if found := result("vllm_sleep_exec"):
        ways = {way: [r for r in found["cycles"] if r["method"] == way and r["resume"] == 0] for way in ("driver", "alone")}
        what = f"`vllm serve`, {most(ways['driver'], 'gpu_mib') / 1024:.0f} GiB, all of it kept; its first suspend takes {ways['driver'][0]['suspend_wall_s']:.1f} s"
        left = most(ways["driver"], "left_mib")
        rows.append(f"| {what} | {both(ways['alone'])} | **{both(ways['driver'])}** | {left} MiB | {source('vllm_sleep_exec')} |")
    if found := result("vllm_sleep"):
        ways = {way: [r for r in found["cycles"] if r["method"] == way and r["resume"] == 0] for way in ("driver", "auto")}
        what = f"`vllm serve`, {most(ways['auto'], 'gpu_mib') / 1024:.0f} GiB; its KV cache is dropped, its first suspend takes {ways['auto'][0]['suspend_wall_s']:.1f} s"
        rows.append(
            f"| {what} | {both(ways['driver'])} | **{both(ways['auto'])}** | {most(ways['auto'], 'left_mib')} MiB | {source('vllm_sleep')} |"
        )
    if found := result("vllm_sleep_pool_exec"):
        ways = {way: [r for r in found["cycles"] if r["method"] == way and r["resume"] == 0] for way in ("driver", "auto")}
        what = f"the same with `gpuckpt exec` and `GPUCKPT_POOL=1`, {most(ways['auto'], 'gpu_mib') / 1024:.0f} GiB; its first suspend takes {ways['auto'][0]['suspend_wall_s']:.1f} s"
        rows.append(
            f"| {what} | {both(ways['driver'])} with the library | **{both(ways['auto'])}** | {most(ways['auto'], 'left_mib')} MiB | {source('vllm_sleep_pool_exec')} |"
        )
    if found := result("vllm_tp2"):
        ways = {way: [r for r in found["cycles"] if r["method"] == way] for way in ("driver", "auto")}
        gib, left = (
            sum(map(max, zip(*(r["running_mib"] for r in found["cycles"]), strict=True))) / 1024,
            max(max(r["left_mib"]) for r in found["cycles"]),
        )
        what = f"`vllm serve -tp 2` with NCCL, {gib:.0f} GiB on two GPUs; and with its KV cache dropped"
        rows.append(
            f"| {what} | cannot be restored | **{both(ways['driver'])}**; **{both(ways['auto'])}** | {left} MiB | {source('vllm_tp2')} |"
        )
    if found := result("two_ranks"):
        runs = found["cycles"]
        left = max(max(r["left_mib"]) for r in runs)
        rows.append(
            f"| torch job of two ranks, three NCCL communicators each | cannot be restored | **{both(runs)}** | {left} MiB | {source('two_ranks')} |"
        )
    if found := result("run_vllm"):
        runs = [r for r in found["cycles"] if r["same"]]
        down, up = (statistics.median(r["steps_s"][f"{way} whole"] for r in runs) for way in ("suspend", "resume"))
        first = statistics.median(r["beyond_resume_ms"] for r in runs)
        what = f"`gpuckpt run --idle -- vllm serve`, {most(runs, 'awake_mib') / 1024:.0f} GiB; first byte {first:.0f} ms after the resume; a cold start takes {found['start_m_s']:.0f} s"
        rows.append(f"| {what} | | **{down:.1f} / {up:.1f}** | {most(runs, 'suspended_mib')} MiB | {source('run_vllm')} |")
    return "\n".join(
        [
            *rows,
            "",
            f"Medians of the whole command's wall time, on {machine()}. After each resume: the same answers, bit by bit. [All figures, with their spread](docs/figures.md).",
        ]
    )


def tested() -> str:
    """What ran on a GPU, and what did not."""
    rows = ["| on a GPU | result |", "|---|---|"]
    for name, what in (
        ("cycles", "a torch process, again and again: same answers, nothing left on the GPU, no growth"),
        ("cycles_thp_always", "the same, with another setting of huge pages"),
        ("cycles_preload", "the same, started by `gpuckpt exec`"),
        ("bad_days_sigterm", "SIGTERM while a checkpoint is under way; the card is empty at the end"),
        ("bad_days", "busy, stopped, managed memory, no room, exported memory, Ctrl-C, kill -9 of the command and of its callers"),
        ("overhead", "the driver's calls and gpuckpt side by side"),
        ("permissions", "who may touch whose process"),
        ("containers", "from within and from outside of containers: pid namespaces, Docker's capabilities, rootless"),
        ("vllm_serve", "`vllm serve` on one GPU, another process on the freed GPU in between"),
        ("vllm_tp2", "`vllm serve -tp 2` on two GPUs, other processes on both in between, requests in flight and while suspended"),
        (
            "vllm_sleep",
            "`vllm serve --enable-sleep-mode`: by its allocator and the driver, by the driver alone, by its allocator alone; a request in flight",
        ),
        ("vllm_sleep_exec", "the same started by `gpuckpt exec`: by the driver with the preload library and without it, in turn"),
        ("vllm_sleep_pool_exec", "the same with the preload library and `GPUCKPT_POOL=1`: weights, KV cache and graphs in gpuckpt's pool"),
        ("vllm_levels", "and suspended while it sleeps at either level, woken up in each order; the cost of a dropped cache"),
        ("vllm_levels_lora", "a model and its adapter (LoRA) after three suspends"),
        ("vllm_residue", "20 suspends by the pool alone, whose rest does not grow, and suspends by pool and driver between them"),
        ("vllm_residue_tp2", "the same on two GPUs, `-tp 2`"),
        ("vllm_residue_tp2_again", "and on two others, of another host"),
        ("sleep_denied", "a `vllm serve` that sleeps while another program takes more of the GPU than it gives up, and denies its sleep"),
        ("two_ranks", "a torch job of two ranks with three NCCL communicators each, eager and in a CUDA graph"),
        ("two_ranks_looks", "the same, 17 cycles, by agents that look on the program's own thread"),
        (
            "two_hosts",
            "such a job by two coordinators, as on two hosts; one that never comes; kill -9 of one at the commit (two GPUs of one machine)",
        ),
        ("run_vllm", "`gpuckpt run --idle -- vllm serve`: suspended by itself, woken by requests; streams, held requests, leases, SIGTERM"),
        ("run_vllm_leases", "and 20 leases of the whole GPU, a training in each"),
        ("run_vllm_tp", "`gpuckpt run --idle -- vllm serve -tp 2`: rehearsed; three cycles, a long stream, SIGTERM"),
        (
            "with_trainer",
            "`suspend --with`: a trainer gives up its communicators with a server, and stands still until they are back (two GPUs)",
        ),
        ("awake_cost", "`vllm serve -tp 2` awake, with what makes it suspendable and without"),
        ("awake_pool", "`vllm serve` awake, with the pool and the preload library and without, fresh and after a cycle"),
        ("what_stays", "what stays on the GPU, by class, after each way to empty it"),
        ("what_stays_told", "and what a report tells of it, beside NVML and torch"),
        ("comparison", "16 GiB by the driver, by gpuckpt in each way, by torch_memory_saver, in turn"),
        ("comparison_48", "48 GiB by the pool, by the driver, by torch_memory_saver and the driver"),
        ("comparison_vllm", "one `vllm serve` by the driver, by vLLM's sleep, by gpuckpt, in turn"),
        ("ranks_bad_days", "kill -9 of gpuckpt anywhere in a suspend and a resume of two ranks, then `recover`"),
        (
            "ranks_bad_days_filled",
            "somebody takes the GPU of one rank while both are suspended: none is restored, and both once it is free",
        ),
        ("ranks_bad_days_deaths", "a rank that dies in the communicators' suspend, locked, in a checkpoint, while suspended"),
        ("ranks_bad_days_deaths_late", "a rank that dies in a restore, in the way back of its communicators"),
        ("ranks_bad_days_hanging", "a rank that hangs in a suspend, in a restore, in the way back of its communicators"),
        (
            "run_two_models",
            f"two models that do not fit on one GPU together, `--share`, an unmodified `openai` client, {swaps()} swaps; a lease",
        ),
        ("vllm_dp", "a mixture of experts by `vllm serve -dp 2 --enable-expert-parallel` on two GPUs: both engines or none"),
        ("preload", "the preload library: who maps the image, an image that cannot be mapped; a library of before, which populated only"),
        ("preload_torch", "suspends with the preload library and without it, in turn, of a torch process"),
        ("preload_plain", "and of a plain C program"),
        ("reserve_plain", "a plain C program: the driver alone, with the preload library, and with memory kept ready for it as well"),
        ("reserve_torch", "and a torch process"),
        ("reserve_auto", "memory kept ready by itself, in `exec` and `run`"),
        ("image", "images on disk and in memory, in turn"),
        ("pool", "the pool: sleeps, wakes, levels, graphs, a suspend while it sleeps; what ends while it sleeps"),
        ("pool_128", "and once more, with fingerprints of 128 bits"),
        ("other_card", "resume on the other card, both ways (two GPUs)"),
        ("faults_gpu", faults_said()),
        ("soak", "a server under bursts of requests, suspended between and within them, others on the freed GPU"),
    ):
        rows.append(f"| {what} | {outcome(name)} |")
    return "\n".join(rows)


def swaps() -> int:
    """How often one model made way for the other, for a request."""
    asked = [row["model"] for row in (result("run_two_models") or {}).get("rows", ())]
    return sum(a != b for a, b in itertools.pairwise(asked))


def faults_said() -> str:
    done, left = (len((result("faults_gpu") or {}).get(key, ())) for key in ("cases", "left_out"))
    return f"{done} of {done + left} faults before a step of a suspend or a resume, or in the middle of its call ([faults](docs/faults.md))"


def outcome(name: str) -> str:
    found = result(name)
    if found is None:
        return UNTESTED
    checks = found["checks"]
    failed = [k for k, v in checks.items() if not v["ok"]]
    if not checks:
        words = f"{len(found.get('cycles', []))} cycles, then cut short before its last checks"
    elif failed:
        words = f"{len(checks) - len(failed)} of {len(checks)} checks pass; not: {'; '.join(failed)}"
    else:
        words = f"{len(checks)} of {len(checks)} checks pass" if len(checks) > 1 else "measured"
    return f"{words} · {source(name)}"


def comparison() -> str:
    """Ways off a GPU and back, of one run."""
    found = result("comparison") or result("comparison_48")
    if found is None:
        return "Not yet measured side by side: [tests/gpu/comparison.py](tests/gpu/comparison.py) does it in one run."
    lines = [compared(found, "one torch process of its own each"), "", "![Ways off a GPU and back](docs/img/comparison.svg)", ""]
    if server := result("comparison_vllm"):
        lines += [
            compared(server, "one `vllm serve` by each in turn"),
            "",
            "![Ways off a GPU and back, of a server](docs/img/comparison_vllm.svg)",
        ]
    else:
        lines.append(
            "The same with vLLM's sleep, of one server, is not yet measured: [tests/gpu/comparison_vllm.py](tests/gpu/comparison_vllm.py) does it."
        )
    return "\n".join(lines)


def compared(found: dict[str, Any], what: str) -> str:
    rows = [f"| {what}; seconds | suspend, first / later | resume, first / later | left on the GPU | host memory | same answers |"]
    rows.append("|---|---|---|---|---|---|")
    # Processes of one making: when one came after another NVML may still have counted that. One process holds a little less after some of these ways.
    several, held = found["name"] != "comparison_vllm", max(r["held_mib"] for r in found["rows"])
    for tool, f in found["summary"].items():
        down, up = (f"{f[f'first_{c}_s']:.2f} / {f[f'later_{c}_s']:.2f}" for c in ("suspend", "resume"))
        mine = [r for r in found["rows"] if r["tool"] == tool]
        left = max(0, held - min(r["freed_mib"] for r in mine)) if several else f["left_mib"]
        share = f"{left:,} of {held:,} MiB"
        kept = "; kept while awake" if max(r["rss_grew_mib"] for r in mine) > held / 2 else ""
        host = f"{max(r['host_mib'] for r in mine) / 1024:.1f} GiB{kept}"
        rows.append(f"| {tool} | {down} | {up} | {share} | {host} | {f['same']} of {f['rounds']} rounds |")
    absent = f" Not there: {', '.join(found['not_there'])}." if found["not_there"] else ""
    m = found["machine"]
    rows += ["", f"{found['gib']:g} GiB, {m['gpu']}, driver {m['driver']}, {m['date']} ({source(found['name'])}).{absent}"]
    return "\n".join([*rows, "", quicker(found["summary"])])


def quicker(summary: dict[str, dict[str, Any]]) -> str:
    """Where another tool is better: later suspends and resumes that take less time than the best of gpuckpt's, and what they leave."""
    ours = [f for tool, f in summary.items() if tool.startswith("gpuckpt")]
    if not ours:
        return ""
    words = []
    for command in ("suspend", "resume"):
        best = min(f[f"later_{command}_s"] for f in ours)
        words += [
            f"{tool} ({command}: {f[f'later_{command}_s']:.2f} s beside {best:.2f}; it leaves {f['left_mib']:,} MiB)"
            for tool, f in summary.items()
            if not tool.startswith("gpuckpt") and f[f"later_{command}_s"] < best
        ]
    return f"Quicker than the best of gpuckpt here: {'; '.join(words) or 'none of the others'}."


BLOCKS: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"figures": figures, "comparison": comparison, "tested": tested},
    "docs/driver-path.md": {
        "copies": tables_image.copies,
        "side-by-side": tables_image.side_by_side,
        "reserve": tables_image.reserve,
        "preload-cost": tables_image.preload_cost,
        "on-disk": tables_image.on_disk,
    },
    "docs/figures.md": {"figures": tables.figures, "soak": tables.soak},
    "docs/how-it-works.md": {"added": tables.added, "growth": tables.growth, "killed": tables.killed},
    "docs/multi-gpu.md": {
        "tensor-parallel": tables_ranks.tensor_parallel,
        "by-ranks": tables_ranks.by_ranks,
        "awake-cost": tables_ranks.awake_cost,
    },
    "docs/pool.md": {"pool": tables.pool, "floors": tables_floors.floors, "awake-pool": tables_ranks.awake_pool},
    "docs/security.md": {"permissions": tables.permissions, "containers": tables.containers},
    "docs/vllm.md": {"vllm-versions": tables.vllm_versions},
    "docs/what-stays.md": {"what-stays": tables.what_stays},
}


def filled(name: str, text: str) -> str:
    """*text* of the document *name*, with each block as the result files say."""
    for block, write in BLOCKS[name].items():
        begin, end = f"<!-- {block} -->", f"<!-- /{block} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise SystemExit(f"{name}: {begin} and {end} must be there once")
        before, _, rest = text.partition(begin)
        after = rest.partition(end)[2]
        text = f"{before}{begin}\n{write()}\n{end}{after}"
    return text


def main(arguments: Sequence[str]) -> int:
    stale = []
    for name in BLOCKS:
        path = ROOT / name
        old = path.read_text(encoding="utf-8")
        new = filled(name, old)
        if new != old:
            stale.append(name)
            if "--check" not in arguments:
                path.write_text(new, encoding="utf-8")
    if "--check" in arguments and stale:
        print(f"{', '.join(stale)}: not what benchmarks/results say. Type: python benchmarks/readme.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
