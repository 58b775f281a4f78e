"""`vllm serve -dp 2 --enable-expert-parallel` of a small mixture of experts, suspended and resumed by its pid: its engines step together, and all stand after the same step. usage: vllm_dp.py MODEL [CYCLES] [-- VLLM ARGS]

MODEL has a tokenizer; if its model is no mixture of experts, a small one with that tokenizer is made below $OUT, with random weights. Each of CYCLES (5): the
engines idle, one of them or both with a request in flight; other processes on both GPUs meanwhile, a request sent to each engine; then the same text and logprobs.
Ends itself after LIMIT_S (280). ``RANKS=4``: each engine on two GPUs. With GPUCKPT_SIMULATE it runs against tests/vllm_tree, on two simulated GPUs: that tries the script, and nothing else.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import vllm_contract
from job import Asking, Budget, by_rank, fill, steps, tail
from lab import HERE, OUT, SIMULATED, Results, gpuckpt, used_mib

words = sys.argv[1:]
extra = words[words.index("--") + 1 :] if "--" in words else []
words = words[: words.index("--")] if "--" in words else words
source, cycles = Path(words[0]), int(words[1]) if len(words) > 1 else 5
RANKS = int(os.environ.get("RANKS", "2"))
PORT, GPUS, ENGINES, STEP_S = 8127, tuple(range(RANKS)), (0, 1), 60.0
FLIGHT_S = 1.5 if SIMULATED else 4.0  # how long the requests shall take that are in flight when the suspend comes
BUSY: tuple[tuple[int, ...], ...] = ((), (0, 1), (1,))  # the engines with a request in flight, in turn
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 3072, "moe_intermediate_size": 512, "num_experts": 16, "num_experts_per_tok": 4,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "router_aux_loss_coef": 0.001, "output_router_logits": False,
}  # fmt: skip
r = Results("vllm_dp" if RANKS == 2 else f"vllm_dp_{RANKS}")
log = OUT / "vllm_dp.log"
log.write_text("")
budget = Budget(r, float(os.environ.get("LIMIT_S", "280")), lambda: tail(log))


def experts() -> Path:
    """A mixture of experts with the tokenizer of *source*, or *source* itself where it is one."""
    config = json.loads((source / "config.json").read_text())
    if "num_experts" in config or "num_local_experts" in config:
        return source
    made = OUT / "vllm_dp_model"
    made.mkdir(exist_ok=True)
    for path in source.glob("*token*"):
        shutil.copy(path, made)
    (made / "config.json").write_text(json.dumps({**config, **EXPERTS}))
    return made


def http(path: str, data: object = None, engine: int | None = None, timeout: float = STEP_S) -> Any:
    headers = {"Content-Type": "application/json", **({} if engine is None else {"X-data-parallel-rank": str(engine)})}
    body = json.dumps(data).encode() if data is not None else None
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", data=body, headers=headers)
    with urllib.request.urlopen(request, timeout=min(timeout, budget.left(keep_s=3.0))) as f:
        text = f.read().decode()
    return json.loads(text) if text.strip().startswith("{") else text


def complete(engine: int) -> tuple[list[str], list[Any]]:
    """Texts and logprobs of one engine, a prompt after the other: what of several comes into the first batch is left to chance."""
    texts, logprobs = [], []
    for prompt in (list(range(100, 140)), list(range(900, 1100)), [5, 6, 7]):
        answer = http("/v1/completions", {"model": "m", "prompt": prompt, "max_tokens": 32, "temperature": 0, "logprobs": 1}, engine)
        texts.append(answer["choices"][0]["text"])
        logprobs.append(answer["choices"][0]["logprobs"]["token_logprobs"])
    return texts, logprobs


def long(engine: int, tokens: int) -> int:
    """Tokens that a request for so many got."""
    data = {"model": "m", "prompt": [7, 8, 9], "max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True, "temperature": 0}
    return http("/v1/completions", data, engine)["usage"]["completion_tokens"]


def up(server: subprocess.Popen[Any]) -> bool:
    while server.poll() is None and budget.allows(30):
        try:
            http("/health", timeout=2)
            return True
        except OSError:
            time.sleep(0.5)
    return False


def cycle(i: int, server_pid: int, flight: int, reference: list[Any], empty: list[int]) -> bool:
    busy = BUSY[i % len(BUSY)]
    row: dict[str, Any] = {"cycle": i, "busy": busy}
    rows.append(row)
    flying = [Asking(lambda e=e: long(e, flight)) for e in busy]
    if busy:
        time.sleep(0.3)
    code, down, row["suspend_wall_s"] = gpuckpt("suspend", server_pid, "--method", "driver", timeout=STEP_S)
    row |= {"suspend": code, "down": steps(down), "down_by_rank": by_rank(down), "left_mib": [used_mib(g) for g in GPUS]}
    row |= {"error": down.get("error"), "warnings": down.get("warnings"), "in_flight": [f.is_alive() for f in flying]}
    if code:
        return False
    waiting = [Asking(lambda e=e: complete(e)) for e in ENGINES]
    row["filler_mib"] = fill(GPUS, budget.started)
    row["answered_while_suspended"] = [not w.is_alive() for w in waiting]
    code, back, row["resume_wall_s"] = gpuckpt("resume", server_pid, "--wait", "20s", timeout=STEP_S)
    row |= {"resume": code, "up": steps(back), "up_by_rank": by_rank(back), "error": back.get("error")}
    if code:
        return False
    for asking in (*waiting, *flying):
        asking.join(STEP_S)
    row["waited"] = [len(w.answer[0]) if isinstance(w.answer, tuple) else w.answer for w in waiting]
    row["in_flight_tokens"] = [f.answer for f in flying]
    answers = [complete(e) for e in ENGINES]
    row["same_text"] = [a[0] == b[0] for a, b in zip(answers, reference, strict=True)]
    row["same_logprobs"] = [a[1] == b[1] for a, b in zip(answers, reference, strict=True)]
    row["running_mib"] = [used_mib(g) for g in GPUS]
    return (
        all(row["same_text"] + row["same_logprobs"])
        and row["waited"] == [3] * len(ENGINES)
        and not any(row["answered_while_suspended"])
        and row["in_flight_tokens"] == [flight] * len(busy)
        and all(left <= e for left, e in zip(row["left_mib"], empty, strict=True))
        and all(isinstance(f, list) and f[0] > 0.95 * f[1] for f in row["filler_mib"])
    )


rows: list[dict[str, Any]] = []
try:
    budget.step("what is relied upon, by name")
    if not SIMULATED:
        root = vllm_contract.root_of("vllm")
        assert root is not None, "vLLM is not installed"
        parts = (vllm_contract.checks, vllm_contract.checks_of_together, vllm_contract.checks_of_nccl, vllm_contract.checks_of_experts)
        broken = [what for part in parts for what, ok in part(root).items() if not ok]
        if not r.check("vLLM is as gpuckpt knows it", not broken, broken):
            raise SystemExit
    made = json.loads(subprocess.run(["gpuckpt", "env", "--vllm", "--json"], capture_output=True, text=True, timeout=60, check=True).stdout)
    environ = {**os.environ, **made["environment"], "VLLM_SERVER_DEV_MODE": "1"}
    empty = [used_mib(g) for g in GPUS]
    r.note("empty_mib", empty)

    ours = ["-dp", "2", "--enable-expert-parallel", "--port", str(PORT)]
    if SIMULATED:
        command = [sys.executable, "-m", "vllm.serve", "-tp", str(RANKS // 2), *ours]
        environ |= {"PYTHONPATH": str(HERE.parent / "vllm_tree"), "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    else:
        ours += ["-tp", str(RANKS // 2), "--disable-custom-all-reduce", "--host", "127.0.0.1", "--load-format", "dummy", "--served-model-name", "m", "--max-model-len", "4096"]
        ours += ["--max-num-seqs", "16", "--cudagraph-capture-sizes", "1", "2", "4", "8", "16"]
        if "--gpu-memory-utilization" not in extra:
            ours += ["--gpu-memory-utilization", "0.08"]
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(experts()), *ours, *extra]
    r.note("command", command)
    budget.step("the server starts")
    with log.open("w") as out:
        server = subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=environ)
    budget.started.append(server)
    if not r.check("vllm serve -dp 2 --enable-expert-parallel came up", up(server), tail(log, 3000) if server.poll() is not None else None):
        raise SystemExit
    budget.step("reference answers of each engine")
    for e in ENGINES:
        complete(e)
    reference = [complete(e) for e in ENGINES]
    r.check("each engine answers twice alike", [complete(e) for e in ENGINES] == reference, [used_mib(g) for g in GPUS])
    begun = time.monotonic()
    r.check("a long request", long(0, 256) == 256)
    flight = min(3500, int(256 * FLIGHT_S / (time.monotonic() - begun)))
    r.note("tokens_in_flight", flight)
    code, plan, _ = gpuckpt("suspend", server.pid, "--dry-run", timeout=60)
    names = [s["name"] for s in ((plan.get("plan") or {}).get("steps") or [])]
    fine = code == 0 and not plan["plan"]["refused"] and "comms" in names and len(plan["processes"]) == RANKS
    if not r.check("dry run: both engines, by their agents, nothing in the way", fine, plan):
        raise SystemExit
    r.note_nccl(p["pid"] for p in plan["processes"])
    r.note("running_mib", [used_mib(g) for g in GPUS])
    for i in range(cycles):
        if not budget.allows(45):
            r.note("left_out", f"cycles from {i} on: no time")
            break
        budget.step(f"cycle {i}, requests in flight on {list(BUSY[i % len(BUSY)])}")
        good = cycle(i, server.pid, flight, reference, empty)
        r.note("cycles", rows)
        if not r.check(f"cycle {i}", good, None if good else rows[-1]):
            r.note("log", tail(log, 6000))
            break
    whole = [x for x in rows if "same_text" in x]
    r.check(f"{cycles} cycles", len(whole) == cycles, len(whole))
    r.check("requests were in flight at a suspend, on each engine", any(len(x["in_flight"]) == 2 and all(x["in_flight"]) for x in whole) or cycles < 2)
    r.note("log_complaints", [line[:300] for line in log.read_text().splitlines() if "ERROR" in line][-10:])
    budget.step("the server ends")
    server.send_signal(signal.SIGTERM)
    try:
        r.note("ended", server.wait(20))
    except subprocess.TimeoutExpired:
        r.note("ended", "not within 20 s")
except subprocess.TimeoutExpired as e:
    r.check("every command returned in time", False, [str(e), tail(log)])
except SystemExit:
    pass
except Exception as e:  # noqa: BLE001 - the result file says what stood in the way
    r.check("the script went through", False, [f"{type(e).__name__}: {e}", tail(log)])
finally:
    budget.end()
budget.step("done")
r.finish()
