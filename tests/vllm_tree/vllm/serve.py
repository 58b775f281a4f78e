"""``python -m vllm.serve``: the front. A line ``generate NAME TOKENS`` on its input is a request; its tokens are printed at its end.

With ``--port`` it answers HTTP instead, as far as ``tests/gpu/vllm_tp2.py`` asks.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

from vllm.plugins import load_general_plugins
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.coordinator import DPCoordinator

UTILITIES = ("sleep", "wake_up", "reset_prefix_cache", "pause_scheduler", "resume_scheduler")


class Engines:
    """What the front sends to its engines; those that step together have a coordinator, which it tells of a request while they stand."""

    def __init__(self, requests: list[Any], inbox: Any) -> None:
        self.requests, self.coordinator = requests, None
        if inbox is not None:
            self.coordinator = DPCoordinator(inbox, requests)
            threading.Thread(target=self.coordinator.process_input_socket, daemon=True).start()

    def add(self, name: str, n: int, engine: int = 0) -> None:
        wave, running = (self.coordinator.current_wave, self.coordinator.engines_running) if self.coordinator else (0, True)
        self.requests[engine].put((EngineCoreRequestType.ADD, ((name, n), wave)))
        if self.coordinator and not running:
            self.coordinator.inbox.put((None, (engine, wave)))

    def call_utility(self, name: str) -> int:
        """Ask all of them; returns how many will answer."""
        for requests in self.requests:
            requests.put((EngineCoreRequestType.UTILITY, name))
        return len(self.requests)


class Answers:
    """Prints when a request has begun, and its tokens when it has as many as were wanted."""

    def __init__(self) -> None:
        self.wanted: dict[str, int] = {}
        self.tokens: dict[str, list[int]] = {}
        self.lock = threading.Lock()

    def ask(self, name: str, n: int) -> None:
        with self.lock:
            self.wanted[name], self.tokens[name] = n, []

    def read(self, answers: Any) -> None:
        while True:
            said = answers.get()
            with self.lock:
                got = self.tokens[said["request"]]
                got.append(said["token"])
                if len(got) == 1:
                    print(json.dumps({"begun": said["request"]}), flush=True)
                if len(got) == self.wanted[said["request"]]:
                    print(json.dumps({"done": said["request"], "tokens": got}), flush=True)


class Front:
    """HTTP: each prompt is a request to the engine."""

    def __init__(self, engines: Engines, answers: list[Any], port: int) -> None:
        self.engines, self.begun = engines, 0
        self.got: dict[str, list[int]] = {}
        self.changed = threading.Condition()
        for one in answers:
            threading.Thread(target=self.read, args=(one,), daemon=True).start()
        front = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send({})

            def do_POST(self) -> None:
                if (utility := self.path.strip("/").partition("?")[0]) in UTILITIES:
                    front.complete([], len(front.engines.requests), utility=utility)
                    self.send({})
                    return
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                prompts = asked["prompt"] if isinstance(asked["prompt"][0], list) else [asked["prompt"]]
                tokens = front.complete(prompts, asked["max_tokens"], int(self.headers.get("X-data-parallel-rank", 0)))
                choices = [{"text": str(t), "logprobs": {"token_logprobs": [x / 2**32 for x in t]}} for t in tokens]
                self.send({"choices": choices, "usage": {"completion_tokens": sum(map(len, tokens))}})

            def send(self, document: Any) -> None:
                body = json.dumps(document).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()

    def read(self, answers: Any) -> None:
        while True:
            said = answers.get()
            with self.changed:
                self.got[said["request"]].append(said["token"])
                self.changed.notify_all()

    def complete(self, prompts: list[list[int]], n: int, engine: int = 0, utility: str = "") -> list[list[int]]:
        with self.changed:
            self.begun += 1
            names = [utility] if utility else [f"{self.begun}-{i}" for i in range(len(prompts))]
            self.got.update({name: [] for name in names})
        if utility:
            self.engines.call_utility(utility)
        for name in [] if utility else names:
            self.engines.add(name, n, engine)
        with self.changed:
            self.changed.wait_for(lambda: all(len(self.got[name]) == n for name in names))
        return [self.got[name] for name in names]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("-tp", type=int, default=2)
    parser.add_argument("-dp", type=int, default=1)
    parser.add_argument("--enable-sleep-mode", action="store_true")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--enable-expert-parallel", action="store_true", help="the model is a mixture of experts")
    parser.add_argument("--enable-eplb", action="store_true")
    parser.add_argument("--enable-elastic-ep", action="store_true")
    parser.add_argument("--enable-fault-tolerance", action="store_true")
    options = parser.parse_args()
    load_general_plugins()
    from vllm.v1.engine.core import start, start_together

    context = multiprocessing.get_context(os.environ["VLLM_WORKER_MULTIPROC_METHOD"])
    together = options.enable_expert_parallel and options.dp > 1
    shared = SimpleNamespace(
        parallel_config=SimpleNamespace(
            data_parallel_size=options.dp if together else 1,
            enable_elastic_ep=options.enable_elastic_ep,
            enable_eplb=options.enable_eplb,
            enable_fault_tolerance=options.enable_fault_tolerance,
            eplb_config=SimpleNamespace(use_async=True),
        ),
        model_config=SimpleNamespace(enable_sleep_mode=options.enable_sleep_mode, sleep_mode_backend="cumem"),
        cache_config=SimpleNamespace(cache_dtype=options.kv_cache_dtype),
        kv_transfer_config=None,
    )
    config = {"tp": options.tp, "object": shared, "coordinated": "offline" not in os.environ.get("FAKE_ENGINES", "")}
    kept: dict[str, Any] = {}
    if together:
        started, kept = start_together(context, options.dp, config)
    else:
        started = [start(context, {**config, "first_gpu": i * options.tp}) for i in range(options.dp)]
    ready = [answers.get(timeout=30) for _, _, answers in started]
    engines = Engines([requests for _, requests, _ in started], kept.get("coordinator"))
    if options.port:
        Front(engines, [answers for _, _, answers in started], options.port)
    asked = Answers()
    for _, _, answers in started:
        threading.Thread(target=asked.read, args=(answers,), daemon=True).start()
    children = [e["engine"] for e in ready], [p for e in ready for p in e["workers"]]
    print(json.dumps({"ready": True, "pid": os.getpid(), "sum": "", "forked": children[0], "children": children[1]}), flush=True)
    for line in sys.stdin:
        command, *words = line.split()
        if command.partition("=")[0] in UTILITIES:
            asked.ask(command, len(started))
            engines.call_utility(command)
            continue
        name, n, *engine = words
        asked.ask(name, int(n))
        engines.add(name, int(n), int(engine[0]) if engine else 0)
    for process, _, _ in started:
        process.kill()
    os._exit(0)


if __name__ == "__main__":
    main()
