"""What the pool's suspends and resumes could take at the least, beside what they took."""

from __future__ import annotations

import statistics
from typing import Any

from documents import DOCS, UNTESTED, result, source

_CALL = {"suspend": ("checkpoint", "down"), "resume": ("restore", "up")}


def floors() -> str:
    """Bytes over the link and the driver's own call, the seconds beside it, and what the rest is."""
    link, server, torch = result("pool_128"), result("vllm_sleep_pool_exec"), result("comparison_48")
    if link is None or server is None or torch is None:
        return UNTESTED
    rows = ["| | bytes over the link | the driver's call | together, the floor | took | the rest |", "|---|---|---|---|---|---|"]
    limit = {way: link["limit_gib_s"][way] for _, way in _CALL.values()}
    calls = {command: statistics.median(r["steps"][call] for r in link["suspended_asleep"]) for command, (call, _) in _CALL.items()}
    gib, pool, changed = torch["gib"], torch["summary"]["gpuckpt pool"], torch["summary"]["gpuckpt pool, changed"]
    start = "the command's start, looking, fingerprints, mapping"
    for what, command, moved, took, rest in (
        (
            "suspend, first, of two processes",
            "suspend",
            gib,
            (changed["first_suspend_s"], pool["first_suspend_s"]),
            "and host memory that nobody has touched yet",
        ),
        ("suspend, all of it changed", "suspend", gib, (changed["later_suspend_s"],), ""),
        ("suspend, nothing changed", "suspend", 0, (pool["later_suspend_s"],), ""),
        ("resume", "resume", gib, (changed["later_resume_s"],), ""),
    ):
        over, call = moved / limit[_CALL[command][1]], calls[command]
        left, seconds = ("; ".join(f"{t - less:.2f} s" for t in took) for less in (over + call, 0.0))
        said = f"{left}: {start} {rest}".rstrip()
        rows.append(f"| torch, {gib:.0f} GiB in tags: {what} | {over:.2f} s | {call:.2f} s | {over + call:.2f} s | {seconds} | {said} |")
    cycles = [c for c in server["cycles"] if c["method"] == "auto" and not c["suspend"] and not c["resume"]]
    for what, command, some, copies in (
        ("suspend, first", "suspend", cycles[:1], True),
        ("suspend, later", "suspend", cycles[1:], False),
        ("resume", "resume", cycles, True),
    ):
        rows.append(_of_a_server(f"vLLM, {sum(server['tags_mib'].values()) / 1024:.1f} GiB: {what}", command, some, copies, limit))
    whole = (
        f"{link['machine']['gpu']}, driver {link['machine']['driver']}; medians: of torch by the clock, of vLLM of `seconds` in the reports"
    )
    sources = ", ".join(source(name, DOCS) for name in ("comparison_48", "vllm_sleep_pool_exec"))
    return "\n".join(
        [
            *rows,
            "",
            f"{whole} ({sources}). The link's rate, and the driver's call for a torch process whose pool sleeps, are those of {source('pool_128', DOCS)}; for vLLM the call is the step of the same suspend.",
        ]
    )


def _of_a_server(what: str, command: str, cycles: list[dict[str, Any]], copies: bool, limit: dict[str, float]) -> str:
    """*copies*: what is kept goes over the link; weights that have not changed leave without."""
    call, way = _CALL[command]

    def step(name: str) -> float:
        return statistics.median(c[way][name] for c in cycles if name in c[way]) if any(name in c[way] for c in cycles) else 0.0

    took = statistics.median(c[f"{command}_s"] for c in cycles)
    over = statistics.median(c["moved"][0]["kept_bytes"] for c in cycles) / 2**30 / limit[way] if copies else 0.0
    moving, looking = step("offload" if command == "suspend" else "onload") - over, step("inspect") + step("re-inspect")
    rest = took - over - step(call)
    other = rest - moving - looking
    said = f"{rest:.2f} s: the pool beside its copies {moving:.2f}, looking {looking:.2f}, all else {other:.2f}"
    return f"| {what} | {over:.2f} s | {step(call):.2f} s | {over + step(call):.2f} s | {took:.2f} s | {said} |"
