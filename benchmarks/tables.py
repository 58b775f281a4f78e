"""The tables of docs/, each from a result file."""

from __future__ import annotations

import json
import re
import statistics
from typing import Any

from documents import DOCS, ROOT, UNTESTED, huge_pages, machine, most, noted, result, source, spread


def figures() -> str:
    """The table of speeds."""
    rows = ["| what | suspend | left on the GPU | resume | source |", "|---|---|---|---|---|"]
    torch_runs: list[dict[str, Any]] = []
    notes, cut = [], []
    for name in ("cycles", "cycles_thp_always", "cycles_preload"):
        cycles = result(name)
        if cycles is None:
            continue
        runs = cycles["cycles"]
        gib = max(r["gpu_bytes"] for r in runs) / 2**30
        how = "**started by `gpuckpt exec`** " if name == "cycles_preload" else f"huge pages {huge_pages(cycles)} "
        rows.append(
            f"| torch process with {gib:.1f} GiB, streams, pinned memory, 64 CUDA graphs; {len(runs)} cycles, {how}"
            f"| {spread([r['suspend_wall_s'] for r in runs])} | {most(runs, 'suspended_gpu_mib')} MiB "
            f"| {spread([r['resume_wall_s'] for r in runs])} | {source(name, DOCS)} |"
        )
        torch_runs += runs
        if not cycles["checks"]:
            cut.append(f"{source(name, DOCS)} after {len(runs)} cycles")
    if torch_runs:
        same = sum(r["same"] for r in torch_runs)
        rss = [max(r[k] for r in torch_runs) / 1024 for k in ("rss_mib", "suspended_rss_mib")]
        notes.append(
            f"After {same} of {len(torch_runs)} resumes the torch process gave bit-identical answers. Its host memory goes from {rss[0]:.1f} GiB "
            f"to {rss[1]:.1f} GiB while it is suspended."
        )
    if vllm := result("vllm_serve"):
        runs = [r for r in vllm["cycles"] if r["suspend"] == r["resume"] == 0]
        if runs:
            rows.append(
                f"| `vllm serve` with {most(runs, 'gpu_mib') / 1024:.1f} GiB; {len(runs)} cycles, each time another process fills the GPU, huge pages {huge_pages(vllm)} "
                f"| {spread([r['suspend_wall_s'] for r in runs])} | {most(runs, 'suspended_gpu_mib')} MiB "
                f"| {spread([r['resume_wall_s'] for r in runs])} | {source('vllm_serve', DOCS)} |"
            )
            same = sum(r["same_text"] and r["same_logprobs"] for r in runs)
            notes.append(f"After {same} of {len(runs)} resumes `vllm serve` gave the same text and the same logprobs.")
    for name, ways in (
        ("vllm_sleep", {"driver": "by the driver alone", "auto": "vLLM's own allocator first, then the driver: the cache is dropped"}),
        (
            "vllm_sleep_exec",
            {"alone": "by the driver, all of it kept", "driver": "**started by `gpuckpt exec`**, by the driver, all of it kept"},
        ),
        (
            "vllm_sleep_pool_exec",
            {
                "driver": "**started by `gpuckpt exec`**, by the driver",
                "auto": "**and with `GPUCKPT_POOL=1`**: the pool first, then the driver",
            },
        ),
    ):
        if sleep := result(name):
            for method, how in ways.items():
                runs = [r for r in sleep["cycles"] if r["method"] == method and r["resume"] == 0]
                rows.append(
                    f"| `vllm serve --enable-sleep-mode` with {most(runs, 'gpu_mib') / 1024:.1f} GiB, {how}; {len(runs)} cycles in turn "
                    f"| {spread([r['suspend_wall_s'] for r in runs])} | {most(runs, 'left_mib')} MiB "
                    f"| {spread([r['resume_wall_s'] for r in runs])} | {source(name, DOCS)} |"
                )
    if tp2 := result("vllm_tp2"):
        held = sum(max(r["running_mib"][gpu] for r in tp2["cycles"]) for gpu in (0, 1)) / 1024
        for method, how in (("driver", "nothing moved beforehand"), ("auto", "vLLM's own allocator first")):
            runs = [r for r in tp2["cycles"] if r["method"] == method]
            rows.append(
                f"| **`vllm serve -tp 2`** with {held:.1f} GiB on two GPUs and its NCCL communicator, **started by `gpuckpt exec`**, {how}; {len(runs)} cycles, "
                f"each time other processes fill both GPUs "
                f"| {spread([r['suspend_wall_s'] for r in runs])} | {max(max(r['left_mib']) for r in runs)} MiB "
                f"| {spread([r['resume_wall_s'] for r in runs])} | {source('vllm_tp2', DOCS)} |"
            )
        same = sum(r["same_text"] and r["same_logprobs"] for r in tp2["cycles"])
        notes.append(
            f"After {same} of {len(tp2['cycles'])} resumes `vllm serve -tp 2` gave the same text and the same logprobs; no request was lost."
        )
    if ranks := result("two_ranks"):
        runs = ranks["cycles"]
        held = sum(max(r["running_mib"][gpu] for r in runs) for gpu in (0, 1)) / 1024
        rows.append(
            f"| torch job of two ranks with {held:.1f} GiB on two GPUs and three NCCL communicators each, **started by `gpuckpt exec`**; {len(runs)} cycles "
            f"| {spread([r['suspend_wall_s'] for r in runs])} | {max(max(r['left_mib']) for r in runs)} MiB "
            f"| {spread([r['resume_wall_s'] for r in runs])} | {source('two_ranks', DOCS)} |"
        )
    if run := result("run_vllm"):
        runs = [r for r in run["cycles"] if r["same"]]
        whole = {way: [r["steps_s"][f"{way} whole"] for r in runs] for way in ("suspend", "resume")}
        rows.append(
            f"| **`gpuckpt run --idle -- vllm serve`** with {most(runs, 'awake_mib') / 1024:.0f} GiB, of which the KV cache is dropped; {len(runs)} cycles; from cold it starts in "
            f"{run['start_m_s']:.0f} s | {spread(whole['suspend'])} | {most(runs, 'suspended_mib')} MiB | {spread(whole['resume'])} | {source('run_vllm', DOCS)} |"
        )
        first = statistics.median(r["beyond_resume_ms"] for r in runs)
        notes.append(
            f"A request that wakes the run has its first byte {first:.0f} ms after the resume, beside {1000 * run['warm_first_byte_m_s']:.0f} ms "
            f"while it is awake; {len(runs)} of {len(run['cycles'])} answers after a wake were the same as before."
        )
    if along := result("with_trainer"):
        runs = along["cycles"]
        rows.append(
            f"| `suspend SERVER --with TRAINER`: a torch rank on each of two GPUs, three communicators between them; {len(runs)} cycles, each time another process fills the server's GPU "
            f"| {spread([r['suspend_s'] for r in runs])} | {max(r['left_mib'][0] for r in runs)} MiB, the trainer's, on the server's GPU "
            f"| {spread([r['resume_s'] for r in runs])} | {source('with_trainer', DOCS)} |"
        )
    for kind, what in (("torch", "torch process"), ("plain", "plain C program")):
        if preload := result(f"preload_{kind}"):
            rows += preload_rows(preload, kind, what)
    if overhead := result("overhead"):
        alone, ours = overhead["driver_alone_median_s"], overhead["gpuckpt_median_s"]
        rows.append(
            f"| small torch process, the driver's calls alone (time inside them) | {alone['Lock'] + alone['Checkpoint']:.2f} s | "
            f"| {alone['Restore'] + alone['Unlock']:.2f} s | {source('overhead', DOCS)} |"
        )
        rows.append(
            f"| the same process, `gpuckpt` (the whole command) | {ours['suspend_wall']:.2f} s | | {ours['resume_wall']:.2f} s | {source('overhead', DOCS)} |"
        )
    if cut:
        notes.append(f"Runs that were cut short: {', '.join(cut)}.")
    return "\n".join([*rows, "", f"Wall time of the whole command, median (least–most), on {machine()}.", *notes])


def preload_rows(document: dict[str, Any], kind: str, what: str) -> list[str]:
    """A process as the driver suspends it, and one started by ``gpuckpt exec``, in turn."""
    rows = []
    for side, how in (("without", "as the driver does it"), ("with", "**started by `gpuckpt exec`**")):
        runs = document[f"{kind}_cycles"][side]
        held = max(i["mib"] for r in document[f"{kind}_cycles"]["with"] for i in r["library"]["images"]) / 1024
        down, up = ([r[k] for r in runs] for k in ("suspend_wall_s", "resume_wall_s"))
        rows.append(
            f"| {what} with {held:.1f} GiB, {how}; {len(runs)} cycles | {spread(down)} | | {spread(up)} | {source(f'preload_{kind}', DOCS)} |"
        )
    return rows


def growth() -> str:
    """Fixed cost and slope of a suspend and of a resume."""
    found = result("growth")
    if found is None:
        return "Not yet measured: [tests/gpu/growth.py](../tests/gpu/growth.py) does."
    rows = ["| the whole command, later cycles; 95 % intervals | fixed | for each |", "|---|---|---|"]
    for key, f in found["fits"].items():
        if f:
            command, _, axis = key.partition("_by_")
            unit = {"gib": "GiB", "processes": "process", "graphs": "CUDA graph"}[axis]
            rows.append(
                f"| {command}, by {axis if axis != 'gib' else 'GiB'} ({f['points']} sizes) | {f['fixed']:.2f} ± {f['fixed_plus_minus']:.2f} s "
                f"| {f['slope'] * 1000:.1f} ± {f['slope_plus_minus'] * 1000:.1f} ms a {unit} |"
            )
    return "\n".join([*rows, "", f"({noted('growth', found)})", "", "![How the time grows](img/growth.svg)"])


#: What a soak looks at, and in what.
GROWTH = {
    "gpu_mib": ("GPU", "MiB"),
    "rss_mib": ("host memory", "MiB"),
    "fds": ("descriptors", ""),
    "probe_s": ("an answer", "s"),
    "suspend_wall_s": ("suspend", "s"),
    "resume_wall_s": ("resume", "s"),
}


def soak() -> str:
    """Each uninterrupted run of a soak: what was asked and answered, and the slopes an iteration with their 95 % intervals."""
    found = result("soak")
    if found is None:
        return "Not yet run on a GPU: [tests/gpu/soak.py](../tests/gpu/soak.py) does it."
    rows = [
        f"| a run | iterations | requests made, answered | the same answers | {' | '.join(w for w, _ in GROWTH.values())} |",
        "|---|---|---|---|" + "---|" * len(GROWTH),
    ]
    for run in found["runs"]:
        mine, slopes = run["rows"], run.get("slopes") or {}
        made, answered = (sum(r[key] for r in mine) for key in ("requests", "answered"))
        grew = [
            f"{slopes[key]['per_step']:+.3f} ± {slopes[key]['plus_minus']:.3f} {unit}".rstrip() if key in slopes else "too short"
            for key, (_, unit) in GROWTH.items()
        ]
        same = sum(r["same"] for r in mine)
        rows.append(f"| {run['begun']} | {len(mine)} | {made:,}, {answered:,} | {same} of {len(mine)} | {' | '.join(grew)} |")
    return "\n".join(
        [
            *rows,
            "",
            f"Growth an iteration, by least squares, with its 95 % interval; each run is one process without interruption ({noted('soak', found)}).",
        ]
    )


def added() -> str:
    """What gpuckpt costs beside the driver's calls."""
    found = result("overhead")
    if found is None:
        return UNTESTED
    ours, own, start = found["gpuckpt_median_s"], found["added"], found["startup_median_s"]
    status = statistics.median(found["status_wall_s"])
    rows = [
        "| seconds, median | suspend | resume |",
        "|---|---|---|",
        f"| the whole command | {ours['suspend_wall']:.2f} | {ours['resume_wall']:.2f} |",
        f"| of it outside its own driver calls | {own['suspend_beyond_its_own_calls_s']:.2f} | {own['resume_beyond_its_own_calls_s']:.2f} |",
        f"| more than the driver's calls alone, side by side | {own['suspend_s']:.2f} | {own['resume_s']:.2f} |",
        "",
        f"`gpuckpt status` takes {status:.2f} s, `gpuckpt --help` {start['gpuckpt --help'] - start['python -c pass']:.2f} s more than "
        f"`python -c pass`. gpuckpt is in {found['gpuckpt_environment']} environment "
        f"({noted('overhead', found)}).",
    ]
    if tree := result("inspect_tree"):
        rows[-1] += (
            f" The inspection of a tree of {tree['processes']:,} processes takes {tree['inspect_median_s']:.2f} s on {tree['cores']} cores "
            f"with simulated GPUs, and reading the mappings of them all another {tree['real_adapter_adds_s']:.2f} s "
            f"({source('inspect_tree', DOCS)})."
        )
    return "\n".join(rows)


def killed() -> str:
    """What the driver does when the caller of a call is killed."""
    found = result("driver-facts")
    if found is None:
        return UNTESTED
    rows = ["| call | its caller killed after | state, when the driver answered again | after the rest of the way |", "|---|---|---|---|"]
    for key, case in found.items():
        if match := re.fullmatch(r"caller_killed_in_(\w+)_after_([\d.]+)", key):
            _, state, waited = case["states"][0]
            answer = "same answers" if case["answer"] == "True" else "NOT the same answers"
            rows.append(f"| {match[1]} | {match[2]} s | {state.rsplit('_', 1)[-1].lower()}, {waited:.1f} s later | {answer} |")
    return "\n".join([*rows, "", f"({source('driver-facts', DOCS)})"])


def permissions() -> str:
    """Who may ask the driver for the state of whose process."""
    found = result("permissions")
    if found is None:
        return UNTESTED
    cells: dict[str, dict[str, str]] = {}
    for words, answer in found["get_state"].items():
        caller, _, owner = words.partition(" on a target of ")
        cells.setdefault(caller, {})[owner] = "may" if answer == "CUDA_SUCCESS" else "may not"
    owners = list(dict.fromkeys(o for row in cells.values() for o in row))
    rows = ["| caller | " + " | ".join(f"process of {o}" for o in owners) + " |", "|---" * (len(owners) + 1) + "|"]
    rows += [f"| {caller} | " + " | ".join(row.get(o, "") for o in owners) + " |" for caller, row in cells.items()]
    yama = "without Yama" if found["yama"] is None else f"with Yama ptrace_scope {found['yama']}"
    return "\n".join([*rows, "", f"Driver {found['machine']['driver']}, a kernel {yama} ({source('permissions', DOCS)})."])


def containers() -> str:
    """From where a process in a container was suspended and resumed."""
    found = result("containers")
    if found is None:
        return UNTESTED
    rows = ["| gpuckpt, and the process | |", "|---|---|"]
    rows += [f"| {layout} | {outcome} |" for layout, outcome in found["layouts"].items()]
    return "\n".join([*rows, "", f"Driver {found['machine']['driver']} ({source('containers', DOCS)})."])


def pool() -> str:
    """What the pool was measured to do beside the driver alone, on one process."""
    found = result("pool")
    if found is None:
        return UNTESTED
    s, limit = found["summary"], found["summary"]["limit"]
    asleep, awake = s["suspended_asleep"], s["suspended_awake"]
    best, changed = found["best"], s["changed"]
    copying = {way: changed[way]["bytes"] / 2**30 / changed[way]["phases"]["copy"] for way in ("down", "up")}
    rows = [
        f"| torch process, {found['gib']:.0f} GiB in tags, graphs | down | up |",
        "|---|---|---|",
        f"| `gpuckpt suspend` and `resume` while it is awake: the driver alone | {awake['suspend_s']:.2f} s | {awake['resume_s']:.2f} s |",
        f"| `pool.sleep()` with nothing changed since the last, then `gpuckpt suspend`; `resume`, then `pool.wake()` "
        f"| {asleep['sleep_s']:.3f} + {asleep['suspend_s']:.2f} s | {asleep['resume_s']:.2f} + {asleep['wake_s']:.2f} s |",
        f"| the first `pool.sleep()` of the process, and a wake | {s['first']['down_s']:.2f} s | {s['first']['up_s']:.2f} s |",
        f"| a later `pool.sleep()` with all of it changed, and a wake ({best}); the copying in it "
        f"| {changed['down']['seconds']:.2f} s; {copying['down']:.1f} GiB/s | {changed['up']['seconds']:.2f} s; {copying['up']:.1f} GiB/s |",
        f"| pinned copies in the same run: the limit | {limit['down']:.1f} GiB/s | {limit['up']:.1f} GiB/s |",
    ]
    checks = list(found["checks"].values())
    ok = sum(c["ok"] for c in checks)
    words = f"{ok} of {len(checks)} checks pass; not: {'; '.join(k for k, v in found['checks'].items() if not v['ok'])}"
    return "\n".join([*rows, "", f"{found['machine']['gpu']}, driver {found['machine']['driver']}; {words} ({source('pool', DOCS)})."])


#: step of what_stays.py -> what it brought
CLASSES = {
    "context": "the context, with nothing in it",
    "modules": "modules: the code of torch's kernels, loaded when they first run",
    "pool": "768 MiB under tags of `gpuckpt.pool`, and the pool's own",
    "cublas": "cuBLAS: its code and its workspaces",
    "local memory": "local memory, for a kernel with 4 KiB of it a thread",
    "graphs": "{} graph executables of {} nodes, their memory torch's own",
    "graphs in the pool": "as many, their memory in the pool",
    "nccl": "an NCCL communicator of one rank",
}
WAYS = {
    "running": "takes",
    "empty_cache": "left by `torch.cuda.empty_cache()`",
    "sleep": "by `pool.sleep()`",
    "pool": "by `suspend --method pool`",
    "driver": "by `suspend`",
}


def what_stays() -> str:
    """What each class adds to what a process holds, as it runs and after each way to empty it; in MiB."""
    found = result("what_stays")
    if found is None:
        return "**Not yet run on a GPU**: [what_stays.py](../tests/gpu/what_stays.py) measures it, and its table will be here."
    rows = [f"| MiB, by NVML | {' | '.join(WAYS.values())} |", "|---|" + "---|" * len(WAYS)]
    before: dict[str, int] = {}
    last: dict[str, int] = {}
    for step in found["steps"]:
        held = {way: _held(step[way]) for way in WAYS if "card_mib" in step.get(way, {}) and not step[way].get("error")}
        # where a way was not tried one step earlier, what it can have left then is all that ran
        cells = [str(held[w] - before.get(w, before.get("running", 0))) if w in held else "" for w in WAYS]
        rows.append(f"| {CLASSES[step['step']].format(*found['graphs'])} | {' | '.join(cells)} |")
        before = {**held, "running": held.get("empty_cache", held["running"])}  # from there the process went on
        last = held
    rows.append(f"| **all of it** | {' | '.join(f'**{last[w]}**' if w in last else '' for w in WAYS)} |")
    checks = [c["ok"] for c in found["checks"].values()]
    on = f"{found['machine']['gpu']}, driver {found['machine']['driver']}, torch {found['machine']['versions'].get('torch', '?')}"
    return "\n".join([*rows, "", f"{on}; {sum(checks)} of {len(checks)} checks pass ({source('what_stays', DOCS)})."])


#: What gpuckpt does with vLLM -> in words, what becomes of it where vLLM is not as known, and who ran it on a GPU.
VLLM = {
    "hold": ("all workers held between two steps of their engine", "refused", "vllm_tp2"),
    "comms": ("communicators suspended", "refused", "vllm_tp2"),
    "together": ("data-parallel engines that step together", "refused", "vllm_dp"),
    "experts": ("experts over several GPUs", "refused", "vllm_dp"),
    "offload": ("sleep mode's memory leaves before the driver's copy", "left to vLLM", "vllm_sleep"),
    "pool": ("`GPUCKPT_POOL=1`: weights and KV cache in the pool", "left to vLLM", "vllm_sleep_pool_exec"),
    "graphs": ("and graphs and workspaces", "left to vLLM", "vllm_sleep_pool_exec"),
    "run": ("`gpuckpt run`: its options and endpoints", "not known", "run_vllm"),
}


def vllm_versions() -> str:
    """Which version of vLLM is as known, by its sources, and which ran."""
    versions = json.loads((ROOT / "tests" / "vllm_versions.json").read_text())
    rows = [f"| vLLM | {' | '.join(versions)} |", "|---|" + "---|" * len(versions)]
    for feature, (what, otherwise, name) in VLLM.items():
        ran = (result(name) or {"machine": {"versions": {}}})["machine"]["versions"].get("vllm")
        cells = [
            otherwise
            if not all(record["kept"][feature].values())
            else f"[run]({DOCS}benchmarks/results/{name}.json)"
            if version == ran
            else "read"
            for version, record in versions.items()
        ]
        rows.append(f"| {what} | {' | '.join(cells)} |")
    kept = "*run*: on H200s. *read*: its sources keep all that is relied upon; **not run**. *left to vLLM*, *refused*: with one warning, or by name."
    return "\n".join([*rows, "", kept])


def _held(reading: dict[str, Any]) -> int:
    """Of the process, where NVML lists it; else what the card has beyond what it had before."""
    mine = reading["process_mib"]
    return reading["card_mib"] if mine is None else mine
