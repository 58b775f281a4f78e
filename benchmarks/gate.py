"""What the gate of `gpuckpt run` costs: the same server asked directly and through the gate, in turn, in one run.

Open loop: requests leave at a stated rate, whether earlier ones are answered or not, and count from when they were due. The server is
a small one that answers after a stated service time; no GPU. Writes results/gate.json. usage: gate.py [quick] [first]

With "first" the client, the server and the gate go before everything else on the machine (SCHED_RR, all three alike) while requests
are timed: for a machine that others work on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from aiohttp import web

from gpuckpt.supervisor.keeper import descendants

HERE = Path(__file__).parent
QUICK = "quick" in sys.argv[1:]
FIRST = "first" in sys.argv[1:]
SERVICE_S = 0.020
RATES = (100.0, 1000.0, 2500.0)  # requests a second; and half of what the gate can do
BREATH_S = 1.0  # between two blocks, for others
BLOCK_S = 2.0 if QUICK else 3.0
BLOCKS = 3 if QUICK else 12
CAPACITY_S = 2.0
STREAMS, TOKENS, TOKEN_S = 64, 60 if QUICK else 200, 0.020
MEMORY_REQUESTS = 5_000 if QUICK else 100_000
BODY = json.dumps({"model": "m", "prompt": "x" * 2000, "max_tokens": 16}).encode()


# The server.


async def serve(uds: str, port: int) -> None:
    async def complete(request: web.Request) -> web.StreamResponse:
        order = await request.json()
        if not order.get("stream"):
            if order.get("max_tokens"):
                await asyncio.sleep(SERVICE_S)
            return web.json_response({"choices": [{"text": "forty-two" * 20}]})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        due = time.monotonic()
        for n in range(TOKENS):
            await response.write(b'data: {"choices": [{"text": "%d"}]}\n\n' % n)
            due += TOKEN_S
            await asyncio.sleep(max(0.0, due - time.monotonic()))
        await response.write(b"data: [DONE]\n\n")
        return response

    async def healthy(_: web.Request) -> web.StreamResponse:
        return web.Response()

    app = web.Application()
    app.add_routes([web.post("/v1/completions", complete), web.get("/health", healthy)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.UnixSite(runner, uds, backlog=4096).start()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
    await asyncio.Event().wait()


# The client: one connection a request under way, kept for the next.


class Connections:
    def __init__(self, port: int) -> None:
        self.port = port
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, body: bytes = BODY) -> None:
        if not self._free:
            self._free.append(await asyncio.open_connection("127.0.0.1", self.port))
        reader, writer = self._free.pop()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        found = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        assert found, head
        await reader.readexactly(int(found[1]))
        self._free.append((reader, writer))

    async def stream(self) -> list[float]:
        """When each token came."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        body = json.dumps({"stream": True}).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        times = []
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
        writer.close()
        assert len(times) == TOKENS, len(times)
        return times

    def close(self) -> None:
        for _, writer in self._free:
            writer.close()


async def open_loop(connections: Connections, rate: float, seconds: float) -> list[float]:
    """Milliseconds from when each request was due."""
    begun, taken = time.perf_counter(), []

    async def one(due: float) -> None:
        await connections.ask()
        taken.append((time.perf_counter() - due) * 1e3)

    tasks = []
    for n in range(int(rate * seconds)):
        due = begun + n / rate
        if (early := due - time.perf_counter()) > 0:
            await asyncio.sleep(early)
        tasks.append(asyncio.create_task(one(due)))
    await asyncio.gather(*tasks)
    return taken


async def closed_loop(connections: Connections, seconds: float, clients: int = 32, most: int = 1 << 60) -> float:
    """Requests a second that *clients* get, one after the other, without a service time."""
    body = b'{"max_tokens": 0}'
    begun, done = time.perf_counter(), 0

    async def one() -> None:
        nonlocal done
        while time.perf_counter() - begun < seconds and done < most:
            done += 1
            await connections.ask(body)

    await asyncio.gather(*(one() for _ in range(clients)))
    return done / (time.perf_counter() - begun)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def undisturbed(supervisor: int) -> Iterator[None]:
    """The three of them before others, if so chosen."""
    pids = [os.getpid(), supervisor, *descendants(supervisor)] if FIRST else []
    for pid in pids:
        os.sched_setscheduler(pid, os.SCHED_RR, os.sched_param(1))
    try:
        yield
    finally:
        for pid in pids:
            os.sched_setscheduler(pid, os.SCHED_OTHER, os.sched_param(0))


async def measure(direct: Connections, gate: Connections, supervisor: int) -> dict[str, object]:
    sides = {"direct": direct, "gate": gate}
    for each in sides.values():
        await open_loop(each, RATES[0], 1.0)

    with undisturbed(supervisor):
        capacity = {name: round(await closed_loop(each, CAPACITY_S)) for name, each in sides.items()}
    found: dict[str, object] = {"capacity_per_second": capacity}
    rows: list[dict[str, object]] = []
    for rate in sorted({*RATES, capacity["gate"] / 2}):
        taken: dict[str, list[list[float]]] = {name: [] for name in sides}
        for _ in range(BLOCKS):
            with undisturbed(supervisor):
                for name, each in sides.items():
                    taken[name].append(await open_loop(each, rate, BLOCK_S if rate == RATES[0] else BLOCK_S / 2))
            await asyncio.sleep(BREATH_S if FIRST else 0)
        row: dict[str, object] = {"rate_per_second": round(rate), "half_of_the_capacity": rate not in RATES}
        row |= {"service_ms": SERVICE_S * 1e3, "requests": sum(map(len, taken["gate"]))}
        for name, share in (("p50", 0.5), ("p99", 0.99)):
            by_block = {side: [percentile(b, share) for b in blocks] for side, blocks in taken.items()}
            row[f"{name}_ms"] = {side: round(statistics.median(v), 3) for side, v in by_block.items()}
            more = [g - d for g, d in zip(by_block["gate"], by_block["direct"], strict=True)]
            row[f"added_{name}_ms"] = round(statistics.median(more), 3)
            row[f"added_{name}_ms_of_each_block"] = [round(m, 3) for m in more]
        rows.append(row)
        print(row, flush=True)
    found["rates"] = rows

    spent: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(1 if QUICK else 3):
        with undisturbed(supervisor):
            for name, each in sides.items():
                times = await asyncio.gather(*(each.stream() for _ in range(STREAMS)))
                spent[name].append(statistics.mean((t[-1] - t[0]) / (len(t) - 1) for t in times) * 1e3)
    per_token = {name: round(statistics.median(v), 4) for name, v in spent.items()}
    found["streaming"] = {
        "streams": STREAMS,
        "token_ms": TOKEN_S * 1e3,
        "ms_per_token": per_token,
        "ratio": round(per_token["gate"] / per_token["direct"], 4),
    }
    print(found["streaming"], flush=True)

    cpu_s, done = cpu_seconds(supervisor), 500 if QUICK else 5000
    await closed_loop(gate, 3600, clients=1, most=done)
    found["cpu_ms_of_the_gate_per_request"] = round((cpu_seconds(supervisor) - cpu_s) / done * 1e3, 3)
    print("cpu", found["cpu_ms_of_the_gate_per_request"], flush=True)

    points = []
    step = MEMORY_REQUESTS // 20
    for n in range(20):
        await closed_loop(gate, 3600, most=step)
        points.append(((n + 1) * step, rss_bytes(supervisor)))
    later = points[10:]
    mean_x, mean_y = statistics.mean(p[0] for p in later), statistics.mean(p[1] for p in later)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in later) / sum((x - mean_x) ** 2 for x, _ in later)
    found["memory"] = {
        "requests": MEMORY_REQUESTS,
        "rss_mib": [round(y / 2**20, 2) for _, y in points],
        "bytes_per_request_in_the_second_half": round(slope, 2),
    }
    print(found["memory"], flush=True)
    return found


@contextlib.contextmanager
def running(port: int) -> Iterator[tuple[int, int]]:
    """The server behind a gate: (port of the gate, pid of the supervisor)."""
    folder = tempfile.mkdtemp(prefix="gr-", dir="/tmp")
    log = Path(folder) / "log"
    command = [
        sys.executable,
        __file__,
        "serve",
        "--direct-port",
        str(port),
        "--host",
        "127.0.0.1",
        "--port",
        "0",
        *(["quick"] if QUICK else []),
    ]
    words = [
        str(Path(sys.executable).parent / "gpuckpt"),
        "run",
        "--name",
        "bench",
        "--adapter",
        "vllm",
        "--without",
        "dev-mode",
        "--",
        *command,
    ]
    with open(log, "w") as file:
        environ = {**os.environ, "GPUCKPT_RUNTIME_DIR": folder, "GPUCKPT_SIMULATE": os.environ.get("GPUCKPT_SIMULATE", folder)}
        process = subprocess.Popen(words, stderr=file, env=environ)
    try:
        until = time.monotonic() + 30
        while ": awake" not in log.read_text():
            if time.monotonic() > until or process.poll() is not None:
                raise SystemExit(log.read_text())
            time.sleep(0.05)
        found = re.search(r"listening on http://127.0.0.1:(\d+)", log.read_text())
        assert found
        yield int(found[1]), process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        shutil.rmtree(folder)


async def main() -> None:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with running(port) as (gate_port, supervisor):
        direct, gate = Connections(port), Connections(gate_port)
        try:
            found = await measure(direct, gate, supervisor)
        finally:
            direct.close()
            gate.close()
    result = {
        "name": "gate",
        "date": time.strftime("%Y-%m-%d"),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load_average_at_the_end": os.getloadavg()[0],
        "before_everything_else_on_the_machine": FIRST,
        "block_s": BLOCK_S,
        "blocks": BLOCKS,
        **found,
    }
    if QUICK:
        print(json.dumps(result, indent=1))
    else:
        (HERE / "results" / "gate.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    if "serve" in sys.argv[1:]:
        words = sys.argv
        asyncio.run(serve(words[words.index("--uds") + 1], int(words[words.index("--direct-port") + 1])))
    else:
        asyncio.run(main())
