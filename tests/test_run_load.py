"""A run under load: many streams, slow readers, random suspends and faults beneath a flow of requests."""

from __future__ import annotations

import asyncio
import json
import random
import resource
import time
from collections import Counter
from pathlib import Path

import aiohttp

from tests.serving import Stage, stage
from tests.simulated_machine import eventually

__all__ = ["stage"]

STREAMS = 2000


def test_two_thousand_streams_at_once(stage: Stage) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 4 * STREAMS)
    count = min(STREAMS, wanted // 2 - 100)
    run = stage.run("--max-waiting", "5000", fake=("--backlog", "64")).awake().suspended()

    async def one(session: aiohttp.ClientSession, n: int) -> bytes:
        body = {"id": n, "stream": True, "chunks": 2, "seconds": 2}
        async with session.post(f"http://127.0.0.1:{run.port}/v1/completions", json=body) as answer:
            assert answer.status == 200
            return await answer.read()

    async def all_of_them() -> list[bytes]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=90)) as session:
            return await asyncio.gather(*(one(session, n) for n in range(count)))

    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    try:
        answers = asyncio.run(all_of_them())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert all(a.endswith(b"[DONE]\n\n") for a in answers)
    assert len(answers) == count
    eventually(lambda: run.facts["requests_running"] == 0, "all are over")


def test_a_slow_reader_holds_back_only_itself(stage: Stage) -> None:
    """Its answer waits at the server, not in the gate's memory."""
    run = stage.run("--drain", "300ms").awake()
    body = json.dumps({"stream": True, "chunks": 10_000, "pad": 1 << 17, "seconds": 0})
    with run.dial(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}") as s:
        s.recv(10)
        begun = time.monotonic()
        assert run.complete(id=1).status == 200
        assert time.monotonic() - begun < 5
        result = stage.gpuckpt("suspend", "m")
        assert result.error["code"] == "still-serving", "a stream is never cut"
        assert int(Path(f"/proc/{run.process.pid}/statm").read_text().split()[1]) * 4096 < 150 << 20, "it is not kept here"
    eventually(lambda: run.facts["requests_running"] == 0, "it was cut when its reader left", 5)


def test_whatever_happens_every_error_is_json_that_a_client_understands(stage: Stage) -> None:
    """Case 12: mostlygeek/llama-swap#635"""
    seed = random.SystemRandom().randrange(1 << 30)
    dice = random.Random(seed)
    run = stage.run("--hold", "1s", "--max-waiting", "20", "--drain", "500ms").awake()
    seen: Counter[int] = Counter()

    async def one(session: aiohttp.ClientSession, n: int) -> None:
        await asyncio.sleep(dice.random() * 6)
        body = {"id": n, "seconds": dice.choice([0, 0, 0.05, 0.3]), "stream": dice.random() < 0.3}
        async with session.post(f"http://127.0.0.1:{run.port}/v1/completions", json=body) as answer:
            text = await answer.read()
            seen[answer.status] += 1
            if answer.status != 200:
                assert answer.status in (429, 502, 503), (seed, answer.status, text)
                error = json.loads(text)["error"]
                assert error["message"], (seed, text)
                assert error["code"], (seed, text)

    async def trouble() -> None:
        for _ in range(9):
            await asyncio.sleep(dice.random() * 0.8)
            match dice.choice(["suspend", "suspend", "resume", "fault"]):
                case "fault":
                    call, result = dice.choice([("lock", "NOT_READY"), ("checkpoint", "UNKNOWN")])
                    await asyncio.to_thread(stage.machine.world.add_fault, call, result=result)
                case command:
                    await asyncio.to_thread(run.ask, command)

    async def both() -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            await asyncio.gather(trouble(), *(one(session, n) for n in range(250)))

    asyncio.run(both())
    assert seen[200] > 0, (seed, seen)
    eventually(lambda: run.complete(id="last").status == 200, f"it serves at the end (seed {seed})")
    assert not run.notes("computed asleep"), seed
