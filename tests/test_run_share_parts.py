"""The parts of sharing a GPU: whose turn it is, who is asked to leave, and who may."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpuckpt import early, errors
from gpuckpt.driver.simulated_store import SimulatedWorldDir
from gpuckpt.errors import Busy
from gpuckpt.local import LocalWorld
from gpuckpt.supervisor import share
from gpuckpt.supervisor.model import RunState
from gpuckpt.supervisor.share import Share, Sharing, chosen_gpus
from gpuckpt.supervisor.world import ReservingWorld


def test_which_gpus_a_command_will_use() -> None:
    gpus = [{"uuid": f"GPU-{c}", "index": i} for i, c in enumerate("abcd")]
    assert chosen_gpus(gpus, {}, 1) == ["GPU-a"]
    assert chosen_gpus(gpus, {}, None) == ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]
    assert chosen_gpus(gpus, {"CUDA_VISIBLE_DEVICES": "2,1"}, 2) == ["GPU-c", "GPU-b"]
    assert chosen_gpus(gpus, {"CUDA_VISIBLE_DEVICES": "GPU-d, 0"}, None) == ["GPU-d", "GPU-a"]
    assert chosen_gpus(gpus, {"CUDA_VISIBLE_DEVICES": ""}, None) == []
    assert chosen_gpus(gpus, {"CUDA_VISIBLE_DEVICES": "9"}, None) == []


def made(**facts: Any) -> dict[str, Any]:
    """The facts of another run."""
    usual = {"shares": True, "pinned": False, "state": "awake", "gpu_bytes": {"G": 1}, "wants_since": None, "used_at": 0.0}
    return {**usual, "requests_running": 0, **facts}


def test_whose_turn_it_is_and_who_is_asked_to_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    there: list[dict[str, Any]] = []
    asked: list[str] = []

    async def others(_: str) -> list[dict[str, Any]]:
        return there

    async def ask(name: str, *_: Any, **__: Any) -> dict[str, Any]:
        asked.append(name)
        return {"error": {"code": "host-memory", "message": "no"}} if name == "full" else {"error": None}

    monkeypatch.setattr(share, "others", others)
    monkeypatch.setattr(share, "ask", ask)
    monkeypatch.setattr(share, "SETTLE_S", 0.0)
    run: Any = SimpleNamespace(holdings=SimpleNamespace(gpu_bytes={"G": 1}), wants_since=5.0, turn=None, make_room=None)
    mine = Share(run, "m", Sharing(shares=True))

    def turn(**facts: Any) -> bool:
        there[:] = [made(name="o", **facts)]
        return asyncio.run(mine.turn())

    assert turn()
    assert not turn(wants_since=4.0)
    assert turn(wants_since=6.0)
    assert turn(wants_since=4.0, gpu_bytes={"H": 1})
    assert not turn(wants_since=4.0, gpu_bytes={})
    assert turn(wants_since=4.0, shares=False)

    def chosen(*candidates: dict[str, Any]) -> list[str]:
        there[:] = candidates
        asked.clear()
        asyncio.run(mine.make_room())
        return list(asked)

    old, new = made(name="old", used_at=1.0), made(name="new", used_at=2.0)
    assert chosen(new, old) == ["old"]
    assert chosen({**old, "requests_running": 1}, new) == ["new"]
    assert chosen({**old, "requests_running": 1}) == ["old"]
    assert chosen({**old, "pinned": True}, {**new, "shares": False}) == []
    assert chosen({**old, "state": "suspended"}, {**new, "gpu_bytes": {"H": 1}}) == []
    assert chosen(made(name="full"), new) == ["full"]
    assert chosen(made(name="full"), new) == ["new"], "one that cannot leave is not asked again at once"


def test_a_run_that_does_not_answer_is_waited_for_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GPUCKPT_RUNTIME_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)  # paths of sockets are short
    monkeypatch.setattr(share.places, "control_path", lambda name: Path(f"{name}.sock"))
    monkeypatch.setattr(share, "ANSWER_S", 0.05)
    answers = False

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        if answers:
            writer.write(b'{"run": {"shares": true}}\n')
        await reader.read()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    async def body() -> None:
        nonlocal answers
        async with await asyncio.start_unix_server(answer, "stopped.sock"):
            assert await share.others("m") == []
            monkeypatch.setattr(share, "ANSWER_S", 3600.0)
            for _ in range(3):
                assert await asyncio.wait_for(share.others("m"), 20) == []
            answers = True
            monkeypatch.setattr(share, "SILENT_ANSWER_S", 20.0)
            assert await share.others("m") == [{"shares": True}]
            monkeypatch.setattr(share, "SILENT_ANSWER_S", 0.0)
            assert await share.others("m") == [{"shares": True}], "it is waited for again"
            await asyncio.sleep(0.01)  # its last connection ends

    asyncio.run(body())


def test_a_door_that_closes_for_another_is_soon_open_again() -> None:
    """Case 10: requests that keep coming end in their turn, and one that takes long stalls nobody beside it."""
    drains: list[float | None] = []

    async def suspend(_: str, drain_s: float | None = None) -> None:
        drains.append(drain_s)
        raise errors.StillServing("1 request was still running")

    now = time.monotonic()
    traffic = SimpleNamespace(running=1, last_end=now, longest_s=0.1)
    run: Any = SimpleNamespace(state=RunState.AWAKE, since=now - 99, traffic=traffic, policy=SimpleNamespace(drain_s=30.0), suspend=suspend)
    one = Share(run, "m", Sharing(shares=True))
    with pytest.raises(errors.StillServing):
        asyncio.run(one.give_way(0.1))
    assert drains == [share.DOOR_S]
    with pytest.raises(errors.RunNotReady):
        asyncio.run(one.give_way(0.1))
    assert len(drains) == 1, "and it stays open for a while"
    traffic.running, traffic.last_end = 0, now - 10
    assert one._may_leave(), "but idle it leaves at once"


def test_when_a_run_may_leave() -> None:
    now = time.monotonic()
    traffic = SimpleNamespace(running=0, last_end=now - 10, longest_s=0.0)
    run: Any = SimpleNamespace(state=RunState.AWAKE, since=now - 3, traffic=traffic)
    one = Share(run, "m", Sharing(shares=True, least_awake_s=2.0))
    assert one._may_leave(), "idle, and awake for long enough"
    traffic.running = 1
    assert not one._may_leave(), "busy, and not awake for five times as long"
    run.since = now - 11
    assert one._may_leave()
    traffic.longest_s = share.DOOR_S
    assert not one._may_leave(), "a request that takes long is left alone, and so is who comes beside it"
    traffic.running, run.since = 0, now - 1
    assert not one._may_leave(), "idle, and not awake for long enough"
    for sharing in (Sharing(shares=False), Sharing(shares=True, pinned=True)):
        with pytest.raises(errors.Usage):
            asyncio.run(Share(run, "m", sharing).give_way(0.1))


def test_gpus_that_were_let_go_can_be_held_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They are held beyond the claim of their resume, but not while that waits for another's way back."""
    SimulatedWorldDir.create(tmp_path / "sim")
    monkeypatch.setenv("GPUCKPT_SIMULATE", str(tmp_path / "sim"))
    with ReservingWorld("resume", {}, None, lambda _: None, early.begin()) as world:
        claim = world.claim_gpus(world.gpus(), world.now())
        claim.release()
        with pytest.raises(Busy):
            world.claim_gpus(world.gpus(), world.now())
        world.let_go(claim)
        world.claim_gpus(world.gpus(), world.now()).release()


def test_the_death_of_a_supervisor_counts_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The kernel tells it once for each thread that the worker is handed to. A second signal left the call in hand, and the next
    supervisor found its child locked, in the middle of a resume."""
    SimulatedWorldDir.create(tmp_path / "sim")
    monkeypatch.setenv("GPUCKPT_SIMULATE", str(tmp_path / "sim"))
    for made, told in ((ReservingWorld("resume", {}, None, lambda _: None, early.begin()), 1), (LocalWorld(start=early.begin()), 2)):
        with made as world, world.interruptible(restore=True):
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)
            assert list(world.interruptions) == [signal.SIGTERM] * told
