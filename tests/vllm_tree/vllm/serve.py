"""``python -m vllm.serve``: the front. A line ``generate NAME TOKENS`` on its input is a request; its tokens are printed at its end."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import threading
from types import SimpleNamespace
from typing import Any

from vllm.plugins import load_general_plugins


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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-tp", type=int, default=2)
    parser.add_argument("-dp", type=int, default=1)
    options = parser.parse_args()
    load_general_plugins()
    from vllm.v1.engine.core import start

    context = multiprocessing.get_context(os.environ["VLLM_WORKER_MULTIPROC_METHOD"])
    replicas = int(os.environ.get("FAKE_MOE_REPLICAS", "1"))
    shared = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=replicas))
    engines = [start(context, {"tp": options.tp, "first_gpu": i * options.tp, "object": shared}) for i in range(options.dp)]
    ready = [answers.get(timeout=30) for _, _, answers in engines]
    wanted: dict[str, int] = {}
    for _, _, answers in engines:
        threading.Thread(target=answer, args=(answers, wanted), daemon=True).start()
    children = [e["engine"] for e in ready], [p for e in ready for p in e["workers"]]
    print(json.dumps({"ready": True, "pid": os.getpid(), "sum": "", "forked": children[0], "children": children[1]}), flush=True)
    for line in sys.stdin:
        _, name, n, *engine = line.split()
        wanted[name] = int(n)
        engines[int(engine[0]) if engine else 0][1].put((name, int(n)))
    for process, _, _ in engines:
        process.kill()
    os._exit(0)


if __name__ == "__main__":
    main()
