"""What the gate lets pass, and in what order: paths, and the door between it and the server, without either."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from gpuckpt import errors
from gpuckpt.supervisor import paths
from gpuckpt.supervisor.traffic import Expired, Full, Traffic, Unavailable


@pytest.mark.parametrize(
    ("path", "read"),
    [
        ("/v1/models/Qwen%2FQwen3", "/v1/models/Qwen/Qwen3"),
        ("/v1/models/a%20b", "/v1/models/a b"),
        ("/%252e%252e/sleep", None),
        ("/v1/%2e%2e", None),
        ("/a%00", None),
        ("/%25252573leep", None),
        ("//sleep", None),
        ("*", None),
        ("", None),
    ],
)
def test_a_path_with_two_readings_is_none(path: str, read: str | None) -> None:
    assert paths.plain(path) == read


def test_what_users_call_passes() -> None:
    """The rest, dev endpoints of later versions too, does not."""
    for path in ("/v1/completions", "/v2/rerank", "/generative_scoring", "/inference/v1/generate", "/", "/tokenize"):
        assert paths.may_pass(path, hidden=True)
    for path in ("/pause", "/scale_elastic_ep", "/server_info", "/start_profile", "/vx/sleep"):
        assert not paths.may_pass(path, hidden=True)
        assert paths.may_pass(path, hidden=False)


class TestTraffic:
    """The door, without a server."""

    def run(self, body: Any) -> Any:
        return asyncio.run(asyncio.wait_for(body(), 10))

    def test_in_order_and_counted_before_anybody_else_looks(self) -> None:
        async def body() -> None:
            door, order, begun = Traffic(hold_s=5, max_waiting=10), list[int](), list[float]()

            async def client(n: int) -> None:
                begun.append(await door.enter())
                order.append(n)

            clients = [asyncio.create_task(client(n)) for n in range(5)]
            await asyncio.sleep(0)
            assert (door.waiting, door.running) == (5, 0)
            door.open()
            assert (door.waiting, door.running) == (0, 5)
            door.close()
            await asyncio.gather(*clients)
            assert order == list(range(5))
            assert not await door.quiet(0.01)
            for each in reversed(begun):
                assert door.longest_s > 0
                door.leave(each)
            assert door.longest_s == 0
            assert await door.quiet(0.01)

        self.run(body)

    def test_full_expired_and_failed(self) -> None:
        async def body() -> None:
            wanted = []
            door = Traffic(hold_s=0.05, max_waiting=1, wanted=lambda: wanted.append(1))
            first = asyncio.create_task(door.enter())
            await asyncio.sleep(0)
            with pytest.raises(Full):
                await door.enter()
            with pytest.raises(Expired):
                await first
            assert (door.waiting, wanted) == (0, [1])
            second = asyncio.create_task(door.enter())
            await asyncio.sleep(0)
            door.fail(errors.GpuMemory("none"))
            with pytest.raises(Unavailable):
                await second
            door.open()
            await door.enter()
            door.fail(errors.GpuMemory("none"), for_good=True)
            with pytest.raises(Unavailable):
                await door.enter()

        self.run(body)

    def test_a_client_that_leaves_as_it_is_let_in_is_not_counted(self) -> None:
        async def body() -> None:
            door = Traffic(hold_s=5, max_waiting=10)
            client = asyncio.create_task(door.enter())
            await asyncio.sleep(0)
            door.open()
            client.cancel()
            await asyncio.gather(client, return_exceptions=True)
            assert (door.running, door.waiting) == (0, 0)
            assert await door.quiet(0.01)

        self.run(body)

    def test_its_clock_is_monotonic(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Case 2, mostlygeek/llama-swap#25: the date may jump."""

        async def body() -> None:
            door = Traffic(hold_s=5, max_waiting=10)
            door.open()
            begun = await door.enter()
            monkeypatch.setattr(time, "time", lambda: 0.0)
            door.leave(begun)
            assert abs(door.last_end - time.monotonic()) < 1

        self.run(body)
