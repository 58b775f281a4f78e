"""A `vllm serve` that is measured while it is awake: shared by awake_cost.py and awake_pool.py."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from job import Budget, kill, tail
from lab import HERE, SIMULATED, used_mib, wait_for


class Server:
    """Up from ``with`` on; at its end killed, and its GPUs as empty as before."""

    def __init__(self, budget: Budget, log: Path, port: int, gpus: tuple[int, ...], words: list[str], environ: dict[str, str], *, under: tuple[str, ...] = ()) -> None:
        """*under*: what stands before the command. Simulated, it is tests/vllm_tree with as many ranks as *gpus*."""
        self.budget, self.log, self.port, self.gpus = budget, log, port, gpus
        self.environ = environ
        self.command = [*under, sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *words, "--port", str(port), "--host", "127.0.0.1"]
        if SIMULATED:
            self.command = [*under, sys.executable, "-m", "vllm.serve", "-tp", str(len(gpus)), "--port", str(port), *[w for w in words if w == "--enable-sleep-mode"]]
            self.environ = {**environ, "PYTHONPATH": str(HERE.parent / "vllm_tree"), "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
        self.empty = self.mib()
        self.start_s = 0.0

    def __enter__(self) -> Server:
        begun = time.monotonic()
        with self.log.open("w") as out:
            self.p = subprocess.Popen(self.command, start_new_session=True, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=self.environ)
        self.budget.started.append(self.p)
        while True:
            try:
                self.http("/health", timeout=2)
                break
            except Exception as e:  # noqa: BLE001 - until it answers
                if self.p.poll() is not None or not self.budget.allows(10):
                    self.__exit__()
                    raise RuntimeError(f"no server: {tail(self.log, 3000)}") from e
                time.sleep(0.25)
        self.start_s = round(time.monotonic() - begun, 1)
        return self

    def __exit__(self, *_: object) -> None:
        kill(self.p)
        self.p.wait(10)
        wait_for(lambda: self.mib() == self.empty, 15)

    def mib(self) -> list[int]:
        return [used_mib(g) for g in self.gpus]

    def http(self, path: str, data: object = None, timeout: float = 120.0) -> Any:
        body = json.dumps(data).encode() if data is not None else None
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data=body, headers={"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=min(timeout, self.budget.left(keep_s=3.0))) as f:
            text = f.read().decode()
        return json.loads(text) if text.strip().startswith("{") else text

    def complete(self, tokens: int, first: int = 7) -> tuple[float, Any]:
        """Seconds that one request of so many tokens takes, and its text with its logprobs."""
        begun = time.perf_counter()
        data = {"model": "m", "prompt": [first, 8, 9, *range(100, 164)], "max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True, "temperature": 0}
        answer = self.http("/v1/completions", data)
        seconds = time.perf_counter() - begun
        got = answer["usage"]["completion_tokens"]
        if got != tokens:
            raise ValueError(f"{got} tokens for {tokens}")
        return seconds, answer["choices"][0]["text"]

    def per_token_ms(self, tokens: int) -> float:
        """Of one stream alone: what a token costs after the first."""
        return round(1000 * (self.complete(tokens + 1)[0] - self.complete(1)[0]) / tokens, 4)

    def throughput(self, streams: int, tokens: int) -> tuple[float, list[Any]]:
        """Tokens a second of *streams* requests at once, and the answer of each."""
        failed: list[BaseException] = []
        answers: list[Any] = [None] * streams

        def one(i: int) -> None:
            try:
                answers[i] = self.complete(tokens, 10 + i)[1]
            except BaseException as e:  # noqa: BLE001 - told below
                failed.append(e)

        threads = [threading.Thread(target=one, args=(i,), daemon=True) for i in range(streams)]
        begun = time.perf_counter()
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        if failed:
            raise failed[0]
        return round(streams * tokens / (time.perf_counter() - begun), 1), answers


def taken_in_turn(starts: int) -> list[bool]:
    """With, without, without, with …: so the spread between starts is seen beside the difference, and no drift falls on one side."""
    return [(i + 1) // 2 % 2 == 0 for i in range(2 * starts)]
