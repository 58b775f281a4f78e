"""A tiny program that behaves like ``vllm serve`` as far as a gate can see: a front that answers HTTP, an engine that holds GPU memory.

``fake_vllm.py serve MODEL [OPTIONS]``. What it does is on record in ``--log FILE``, a JSON line for each request begun, ended or cut.
The engine is this process's simulated GPU memory: whatever needs it waits while the process is suspended, everything else answers.
With ``-tp N`` it is N workers, each on a GPU of its own with an agent and a communicator, and what it says depends on what they hold.
``--slow-sleep S`` and its like make a call take so long; ``--status PATH=CODE`` answers a path so; ``--golden TEXT`` is what it says.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from typing import Any

from aiohttp import web

from gpuckpt.driver.api import CallError
from gpuckpt.driver.simulated_store import SimulatedWorldDir

GIB = 1 << 30
#: A program with a title of its own does not know its environment any more.
SIMTARGET = (
    f"import runpy, site; site.addsitedir({sysconfig.get_path('purelib')!r}); "
    "runpy.run_module('gpuckpt.driver.simtarget', run_name='__main__')"
)


class Server:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.world = SimulatedWorldDir(os.environ["GPUCKPT_SIMULATE"])
        self.log = open(options.log, "a", buffering=1)  # noqa: SIM115 - for as long as it lives
        self.sleeping = False  # it begins nothing new
        self.away = False  # and what it had on the GPU is not there
        self.unaware = False  # so it is, and its executor does not know
        self.denials = options.denies_sleep
        self.reloads = False  # its weights are gone since a sleep of level 2, until they are loaded again
        self.wakes = 0
        self.running = 0
        self.at_work = 0  # on what its clients do not wait for
        self.served = 0
        self.status = dict(s.split("=") for s in options.status)
        self.gate = asyncio.Semaphore(options.at_once)
        ranks = int(os.environ.get("FAKE_RANKS", options.tensor_parallel_size))  # as a file of options would say
        self.workers = [self._worker(rank, ranks) for rank in range(ranks if ranks > 1 else 0)]
        self.gpu_pids = [w.pid for w in self.workers] or [os.getpid()]
        self.helpers: list[subprocess.Popen[bytes]] = []
        self.asked = threading.Lock()
        self.engine = asyncio.Lock()  # it does one thing after the other, whoever waits for it

    def _worker(self, rank: int, ranks: int) -> subprocess.Popen[str]:
        words = [f"VLLM::Worker_TP{rank}", "-c", SIMTARGET, "--gpu", str(rank), "--gib", str(self.options.gib), "--nccl-socket"]
        if os.environ.get("GPUCKPT_AGENT") == "1":
            words += ["--agent", "tp", str(rank), str(ranks)]
        made = subprocess.Popen(words, executable=sys.executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert made.stdout is not None
        made.stdout.readline()
        return made

    def helper(self, *words: str) -> subprocess.Popen[bytes]:
        """Another process with GPU memory, which it has when this returns."""
        made = subprocess.Popen([sys.executable, "-c", SIMTARGET, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert made.stdout is not None
        made.stdout.readline()
        self.helpers.append(made)
        return made

    def usr1(self) -> None:
        """Its helpers, asked to end, do so with 0; in the place of one that was killed another is started."""
        self.note("usr1")
        for each in list(self.helpers):
            assert each.stdin is not None
            if each.poll() is None:
                each.stdin.write(b"quit\n")
                each.stdin.close()
            else:
                self.note("another", pid=self.helper().pid)

    def note(self, what: str, **facts: Any) -> None:
        self.log.write(json.dumps({"what": what, "at": time.monotonic(), **facts}) + "\n")

    async def gpu(self) -> str:
        """Needs the engine: waits while it is suspended, and dies if it computes asleep."""
        if self.sleeping or self.away:
            self.note("computed asleep")
            os._exit(66)
        return await asyncio.to_thread(self._call)

    def _take(self, gib: float) -> None:
        """More of the GPU, or less."""
        with self.world.transaction() as world:
            for pid in self.gpu_pids:
                world.rules.alloc(pid, round(gib * GIB))

    def _call(self) -> str:
        """What the workers hold, once they run."""
        if not self.workers:
            with self.world.cuda_call(os.getpid()):
                return ""
        sums = []
        with self.asked:
            for worker in self.workers:
                assert worker.stdin is not None
                assert worker.stdout is not None
                worker.stdin.write("check\n")
                worker.stdin.flush()
                sums.append(json.loads(worker.stdout.readline())["sum"][:8])
        return " ".join(["", *sums])

    @web.middleware
    async def middleware(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.note("begin", method=request.method, path=request.path_qs, headers=dict(request.headers))
        keys = self.options.api_key or list(filter(None, [os.environ.get("VLLM_API_KEY")]))
        if keys and request.path != "/health" and request.headers.get("Authorization") not in [f"Bearer {k}" for k in keys]:
            return web.json_response({"error": "Unauthorized"}, status=401)
        if self.status.get(request.path):
            return web.json_response({"error": {"message": "as asked", "code": "fake"}}, status=int(self.status[request.path]))
        try:
            answer: web.StreamResponse = await handler(request)
        except asyncio.CancelledError:
            self.note("cut", path=request.path)
            raise
        self.note("end", path=request.path)
        return answer

    async def complete(self, request: web.Request) -> web.StreamResponse:
        self.running += 1
        try:
            async with self.gate:
                return await self._complete(request)
        finally:
            self.running -= 1

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if changes := body.get("set"):  # options, from now on
            self.status.update(changes.pop("status", {}))
            vars(self.options).update(changes)
            return web.json_response({})
        held = await self.gpu()
        self.served += 1
        if after := body.get("background"):  # work that goes on after the answer
            self.at_work += 1
            asyncio.get_running_loop().call_later(after, self.done)
        seconds = float(body.get("seconds", 0))
        if body.get("drops") and request.transport is not None:
            request.transport.abort()
        if body.get("status"):
            return web.json_response(
                {"error": {"message": "over the limit", "code": "limit"}}, status=body["status"], headers={"X-Limit": "1"}
            )
        if not body.get("stream"):
            await asyncio.sleep(seconds)
            golden = "nonsense" if self.reloads else self.options.golden + held
            if self.wakes >= self.options.forgets_at and body.get("model") in self.options.forgets:
                golden = f"not {golden}"
            return web.json_response({"id": body.get("id"), "choices": [{"text": golden}], "served": self.served})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        count = int(body.get("chunks", 5))
        for n in range(count):
            await self.gpu()
            await response.write(f"data: {json.dumps({'n': n})}{' ' * body.get('pad', 0)}\n\n".encode())
            await asyncio.sleep(seconds / count)
            if n == body.get("dies_at", -1):
                os._exit(67)
        await response.write(b"data: [DONE]\n\n")
        return response

    def done(self) -> None:
        self.at_work -= 1

    async def in_turn(self, request: web.Request) -> web.StreamResponse:
        """What the engine is asked: it goes on with it, also if whoever asked has left."""
        handler = {"/sleep": self.sleep, "/wake_up": self.wake, "/is_sleeping": self.is_sleeping}[request.path]

        async def one() -> web.StreamResponse:
            if request.path == "/sleep":  # it takes new orders meanwhile, and sleeps in any case once it is idle
                self.sleeping |= request.query["level"] == "0"
                while self.at_work:
                    await asyncio.sleep(0.01)
            async with self.engine:
                return await handler(request)

        return await asyncio.shield(asyncio.create_task(one()))

    async def sleep(self, request: web.Request) -> web.StreamResponse:
        if request.query["level"] == "0":  # no new work, and nothing more
            self.note("pause", query=dict(request.query))
            return web.Response()
        self.note("sleep", running=self.running, query=dict(request.query))
        await asyncio.sleep(self.options.slow_sleep)
        await asyncio.to_thread(self._call)
        if not self.away:
            self._take(-self.options.sleep_frees)
        if self.denials:
            self.denials, self.sleeping, self.away, self.unaware = self.denials - 1, True, True, True
            return web.Response(status=500, text="Internal Server Error")
        self.reloads |= request.query["level"] == "2"
        self.sleeping = self.away = True
        return web.Response()

    async def wake(self, request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(self.options.slow_wake)
        await asyncio.to_thread(self._call)
        try:
            if self.away and not self.unaware and request.query.get("tags") != "scheduling":
                self._take(self.options.sleep_frees)
                self.away = False
        except CallError:
            self.note("out of memory")
            return web.json_response({"error": "out of memory"}, status=500)
        self.sleeping = False
        self.wakes += 1
        self.note("woken")
        return web.Response()

    async def collective_rpc(self, request: web.Request) -> web.StreamResponse:
        method = (await request.json())["method"]
        self.note("collective_rpc", method=method)
        if method == "wake_up":
            self._take(self.options.sleep_frees)
            self.away = self.unaware = False
        self.reloads &= method != "reload_weights"
        return web.json_response({"results": [None]})

    async def is_sleeping(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"is_sleeping": self.sleeping})

    async def health(self, request: web.Request) -> web.StreamResponse:
        return web.Response()

    async def models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [{"id": name} for name in (self.options.model, *self.options.lora)]})

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text=f"# TYPE vllm:requests counter\nvllm:requests_total {self.served}\n")

    async def upload(self, request: web.Request) -> web.StreamResponse:
        """How many bytes came, without keeping them."""
        nbytes = 0
        async for chunk in request.content.iter_any():
            nbytes += len(chunk)
        return web.json_response({"bytes": nbytes})

    async def socket(self, request: web.Request) -> web.StreamResponse:
        ws = web.WebSocketResponse(protocols=("realtime",))
        await ws.prepare(request)
        async for message in ws:
            if message.data == "bye":
                await ws.close(code=4001)
            elif message.type is web.WSMsgType.TEXT:
                await ws.send_str(f"echo {message.data}")
            else:
                await ws.send_bytes(message.data)
        return ws


async def main() -> None:
    options = parse(sys.argv[1:])
    await asyncio.sleep(options.slow_load)
    server = Server(options)
    uuids = sorted(server.world.peek().rules.gpus)
    if not server.workers:
        server.world.register(os.getpid(), {uuids[0]: round(options.gib * GIB)})
    if options.engine:  # a process of its own session, as an orphan would be
        title = ["VLLM::EngineCore", "-c", "import time; time.sleep(600)"]
        subprocess.Popen(title, executable=sys.executable, start_new_session=True)
    for _ in range(options.workers):
        server.helper("--daemon")
    app = web.Application(middlewares=[server.middleware], client_max_size=1 << 40)
    dev = os.environ.get("VLLM_SERVER_DEV_MODE") == "1"
    app.add_routes(
        [
            web.post("/v1/completions", server.complete),
            web.post("/v1/chat/completions", server.complete),
            web.post("/v1/audio/transcriptions", server.upload),
            web.get("/v1/realtime", server.socket),
            web.get("/health", server.health),
            web.get("/v1/models", server.models),
            web.get("/metrics", server.metrics),
            web.get("/version", server.models),
            web.get("/load", server.models),
            *(
                [
                    web.post("/sleep", server.in_turn),
                    web.post("/wake_up", server.in_turn),
                    web.get("/is_sleeping", server.in_turn),
                    web.post("/collective_rpc", server.collective_rpc),
                ]
                if dev
                else []
            ),
        ]
    )
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    if options.uds:
        await web.UnixSite(runner, options.uds, backlog=options.backlog).start()
    else:
        await web.TCPSite(runner, options.host, options.port).start()
    server.note("ready", pid=os.getpid(), argv=sys.argv[1:])
    ended = asyncio.Event()
    if options.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, server.usr1)
    await ended.wait()
    server.note("terminated")
    os._exit(0)


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("serve")
    parser.add_argument("model")
    parser.add_argument("--uds")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--log", required=True)
    parser.add_argument("--api-key", nargs="+")
    parser.add_argument("--enable-sleep-mode", action="store_true")
    parser.add_argument("--disable-custom-all-reduce", action="store_true")
    parser.add_argument("-tp", "--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--compilation-config")
    parser.add_argument("--gib", type=float, default=8.0)
    parser.add_argument("--sleep-frees", type=float, default=0.0, help="GiB, which it takes again when it wakes")
    parser.add_argument("--denies-sleep", type=int, default=0, help="so many times: it sleeps, and says that it cannot")
    parser.add_argument("--slow-sleep", type=float, default=0.0)
    parser.add_argument("--slow-wake", type=float, default=0.0)
    parser.add_argument("--slow-load", type=float, default=0.0)
    parser.add_argument("--status", action="append", default=[])
    parser.add_argument("--golden", default="forty-two")
    parser.add_argument("--lora", action="append", default=[], help="one more model")
    parser.add_argument("--forgets", action="append", default=[], help="a model that answers otherwise once it was asleep")
    parser.add_argument("--forgets-at", type=int, default=1, help="so many times")
    parser.add_argument("--at-once", type=int, default=10000)
    parser.add_argument("--backlog", type=int, default=128)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--engine", action="store_true")
    parser.add_argument("--stubborn", action="store_true")
    return parser.parse_args(words)


if __name__ == "__main__":
    asyncio.run(main())
