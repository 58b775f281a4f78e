"""The tables of docs/driver-path.md: what the preload library costs and gains, memory kept ready, images on disk."""

from __future__ import annotations

import statistics

from documents import DOCS, UNTESTED, result, source


def preload_cost() -> str:
    """What the preload library costs a program that is awake."""
    found = result("preload_cost")
    if found is None:
        return UNTESTED
    pairs = found["mmap_and_munmap_us"]
    rows = ["| awake, nothing announced; median | without | with |", "|---|---|---|"]
    for name, what in (
        ("small", "`mmap` and `munmap` of 64 KiB"),
        ("large", "of 64 MiB, not populated"),
        ("large_populated", "of 64 MiB, populated"),
    ):
        rows.append(f"| {what} | {pairs[name]['without']:,.2f} µs | {pairs[name]['with']:,.2f} µs |")
    rows.append(f"| start and end of `/bin/true` | {found['start_ms']['without']:.2f} ms | {found['start_ms']['with']:.2f} ms |")
    on = (
        f"{found['rounds']} rounds in turn, on {found['cores']} cores without a GPU, Linux {found['kernel'].split('-')[0]}, {found['date']}"
    )
    return "\n".join([*rows, "", f"{on} ({source('preload_cost', DOCS)})."])


def copies() -> str:
    """What threads make of a checkpoint and of a restore."""
    found = result("copies")
    if found is None:
        return UNTESTED
    rows = ["| threads | checkpoint | of it getting the memory | restore |", "|---|---|---|---|"]
    for c in sorted(found["cycles"], key=lambda c: c["threads"]):
        rows.append(f"| {c['threads']} | {c['checkpoint_s']:.2f} s | {c['populate_s']:.2f} s | {c['restore_s']:.2f} s |")
    on = f"A plain C program with {found['gib']} GiB, one process, one cycle each, same answers after each"
    return "\n".join([*rows, "", f"{on} ({source('copies', DOCS)})."])


def side_by_side() -> str:
    """The driver as it is, and with the preload library."""
    rows = [
        "| | checkpoint | | restore | | cycles of each |",
        "|---|---|---|---|---|---|",
        "| | driver alone | with the library | driver alone | with the library | |",
    ]
    for kind, what in (("torch", "torch"), ("plain", "plain C program")):
        if found := result(f"preload_{kind}"):
            cycles, median = found[f"{kind}_cycles"]["with"], found[f"{kind}_median_s"]
            gib = cycles[0]["library"]["images"][0]["mib"] / 1024
            numbers = [f"{median[side][call]:.2f} s" for call in ("checkpoint", "restore") for side in ("without", "with")]
            rows.append(f"| {what}, {gib:.1f} GiB ({source(f'preload_{kind}', DOCS)}) | {' | '.join(numbers)} | {len(cycles)} |")
    return "\n".join([*rows, *_of_a_server()])


def _of_a_server() -> list[str]:
    """The same of one `vllm serve`, in turn: its library is told of nothing, or of all."""
    found = result("vllm_sleep_exec")
    cycles = [c for c in found["cycles"] if c.get("resume") == 0] if found else []
    sides = [[c for c in cycles if c["method"] == method] for method in ("alone", "driver")]
    if not all(sides):
        return ["", "Of a `vllm serve` of 44 GiB: not yet measured side by side (`EXEC=1` [vllm_sleep.py](../tests/gpu/vllm_sleep.py))."]
    numbers = [
        f"{statistics.median(c[way][call] for c in side):.2f} s"
        for way, call in (("down", "checkpoint"), ("up", "restore"))
        for side in sides
    ]
    gib = max(c["gpu_mib"] for c in cycles) / 1024
    return [f"| `vllm serve`, {gib:.1f} GiB ({source('vllm_sleep_exec', DOCS)}) | {' | '.join(numbers)} | {min(map(len, sides))} |"]


def reserve() -> str:
    """The driver as it is, with the preload library, and with memory kept ready for it."""
    rows = ["| | driver alone | with the library | and memory kept ready | processes of each |", "|---|---|---|---|---|"]
    for kind, what in (("plain", "plain C program"), ("torch", "torch")):
        if found := result(f"reserve_{kind}"):
            arms = found[f"{kind}_arms"]["reserve"]
            gib = found[f"{kind}_reserve"][0]["asked_mib"] / 1024
            for when in ("first", "later"):
                median = found[f"{kind}_{when}_median_s"]
                numbers = [f"{median[arm]['checkpoint']:.2f} / {median[arm]['restore']:.2f} s" for arm in ("without", "with", "reserve")]
                name = f"{what}, {gib:.1f} GiB, {when} checkpoint / restore ({source(f'reserve_{kind}', DOCS)})"
                rows.append(f"| {name} | {' | '.join(numbers)} | {len(arms)} |")
    return "\n".join(rows)


def on_disk() -> str:
    """Images in memory and on disk, in turn on one process, beside dd."""
    found = result("image")
    if found is None:
        return UNTESTED
    ram, disk = found["cycles"]["ram"], found["cycles"]["disk"]
    gib = disk[0]["bytes"] / 2**30
    dd = {way: statistics.median(r[f"{way}_gib_s"] for r in found["dd"]) for way in ("write", "read")}

    def middle(step: str) -> str:
        both = ([r[step] for r in rows if r[step] is not None] for rows in (ram, disk))
        return " | ".join(f"{statistics.median(seconds):.2f} s" if seconds else "" for seconds in both)

    rows = ["| median | kept in memory | kept on disk |", "|---|---|---|"]
    rows += [f"| {step} | {middle(step)} |" for step in ("checkpoint", "store", "drop", "load", "restore")]
    rows += [
        f"| written, `dd` beside it | | {found['rates']['write_gib_s']:.2f} GiB/s, {dd['write']:.2f} |",
        f"| read back, `dd` | | {found['rates']['read_gib_s']:.2f} GiB/s, {dd['read']:.2f} |",
        f"| the suspended process, beside before | {max(r['suspended_rss_grew_mib'] for r in ram):+,} MiB | {max(r['suspended_rss_grew_mib'] for r in disk):+,} MiB |",
    ]
    failed = [what for what, check in found["checks"].items() if not check["ok"]]
    words = f"; not: {'; '.join(failed)}" if failed else ""
    m = found["machine"]
    rounds = f"{len(disk)} rounds of each in turn on one torch process of {gib:.1f} GiB, {found['file_system']}, `dd` with direct I/O"
    return "\n".join([*rows, "", f"{rounds}; {m['gpu']}, driver {m['driver']}, {m['date']} ({source('image', DOCS)}){words}."])
