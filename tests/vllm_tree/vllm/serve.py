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

UTILITIES = ("sleep", "wake_up", "reset_prefix_cache")


def answer(answers: Any, wanted: dict[str, int]) -> None:
    tokens: dict[str, list[int]] = {}
    while True:
        said = answers.get()
        got = tokens.setdefault(said["request"], [])
        got.append(said["token"])
        if len(got) == 1:
            print(json.dumps({"begun": said["request"]}), flush=True)
        if len(got) == wanted[said["request"]]:
            print(json.dumps({"done": said["request"], "tokens": got}), flush=True)


class Front:
    """HTTP: each prompt is a request to the engine."""

    def __init__(self, requests: Any, answers: Any, port: int) -> None:
        self.requests, self.answers, self.begun = requests, answers, 0
        self.got: dict[str, list[int]] = {}
        self.changed = threading.Condition()
        threading.Thread(target=self.read, daemon=True).start()
        front = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send({})

            def do_POST(self) -> None:
                if (utility := self.path.strip("/").partition("?")[0]) in UTILITIES:
                    front.complete([], 1, utility)
                    self.send({})
                    return
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                prompts = asked["prompt"] if isinstance(asked["prompt"][0], list) else [asked["prompt"]]
                tokens = front.complete(prompts, asked["max_tokens"])
                choices = [{"text": str(t), "logprobs": {"token_logprobs": [x / 2**32 for x in t]}} for t in tokens]
                self.send({"choices": choices, "usage": {"completion_tokens": sum(map(len, tokens))}})

            def send(self, document: Any) -> None:
                body = json.dumps(document).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()

    def read(self) -> None:
        while True:
            said = self.answers.get()
            with self.changed:
                self.got[said["request"]].append(said["token"])
                self.changed.notify_all()

    def complete(self, prompts: list[list[int]], n: int, utility: str = "") -> list[list[int]]:
        with self.changed:
            self.begun += 1
            names = [utility] if utility else [f"{self.begun}-{i}" for i in range(len(prompts))]
            self.got.update({name: [] for name in names})
        for name in names:
            self.requests.put(name if utility else (name, n))
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
    options = parser.parse_args()
    load_general_plugins()
    from vllm.v1.engine.core import start

    context = multiprocessing.get_context(os.environ["VLLM_WORKER_MULTIPROC_METHOD"])
    replicas = int(os.environ.get("FAKE_MOE_REPLICAS", "1"))
    shared = SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_size=replicas),
        model_config=SimpleNamespace(enable_sleep_mode=options.enable_sleep_mode, sleep_mode_backend="cumem"),
        cache_config=SimpleNamespace(cache_dtype=options.kv_cache_dtype),
        kv_transfer_config=None,
    )
    engines = [start(context, {"tp": options.tp, "first_gpu": i * options.tp, "object": shared}) for i in range(options.dp)]
    ready = [answers.get(timeout=30) for _, _, answers in engines]
    if options.port:
        Front(*engines[0][1:], options.port)
    wanted: dict[str, int] = {}
    for _, _, answers in engines:
        threading.Thread(target=answer, args=(answers, wanted), daemon=True).start()
    children = [e["engine"] for e in ready], [p for e in ready for p in e["workers"]]
    print(json.dumps({"ready": True, "pid": os.getpid(), "sum": "", "forked": children[0], "children": children[1]}), flush=True)
    for line in sys.stdin:
        command, *words = line.split()
        if command in UTILITIES:
            wanted[command] = 1
            engines[0][1].put(command)
            continue
        name, n, *engine = words
        wanted[name] = int(n)
        engines[int(engine[0]) if engine else 0][1].put((name, int(n)))
    for process, _, _ in engines:
        process.kill()
    os._exit(0)


if __name__ == "__main__":
    main()
