"""Host memory that is short: the run that was not used for longest leaves it to others, and moves what it has there to disk."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import gpuckpt
from gpuckpt import errors
from gpuckpt.image import preload
from gpuckpt.model import ProcessReport, Report
from gpuckpt.supervisor.budget import Budget
from gpuckpt.supervisor.holdings import Holdings
from gpuckpt.supervisor.operate import Worker
from tests.serving import Serving, Stage, stage
from tests.simulated_machine import Machine, eventually

__all__ = ["stage"]

GIB = 1 << 30


def moves(stage: Stage, image_folder: Path, place: Path, name: str) -> Serving:
    """One that keeps 8 GiB in host memory, of 12 GiB for all, and moves them to *place* when asked."""
    words = ("--host-budget", "12GiB", "--keep-in", f"ram,{place}")
    return stage.run(*words, name=name, LD_PRELOAD=str(image_folder / "libcuda.so.1"))


def lies(run: Serving) -> tuple[int, int]:
    """GiB of its image in host memory, and on disk."""
    with pytest.MonkeyPatch.context() as here:
        for name in ("GPUCKPT_SIMULATE", "GPUCKPT_STATE_DIR"):
            here.setenv(name, run.stage.environ[name])
        (p,) = gpuckpt.status(run.child).rows
    return p.host_bytes // GIB, p.disk_bytes // GIB


@pytest.mark.skipif(bool(preload.problem()), reason="installed without a compiler")
def test_the_least_recently_used_leaves_host_memory(stage: Stage, image_folder: Path, place: Path) -> None:
    a, b = (moves(stage, image_folder, place, n) for n in ("a", "b"))
    for run in (a, b):
        run.awake()
    assert a.suspended().facts["movable_bytes"] == 8 * GIB
    assert lies(a) == (8, 0)
    b.suspended()
    assert (lies(a), lies(b)) == ((0, 8), (8, 0))
    assert (a.facts["host_bytes"], a.facts["movable_bytes"]) == (0, 0)
    assert "moved 8.0 GiB to" in a.stderr
    assert "a moved 8.0 GiB to disk for us" in b.stderr
    assert a.complete(id=1).status == 200
    a.suspended()
    assert (lies(a), lies(b)) == ((8, 0), (0, 8)), "and the other way round"
    # Called off as soon as it is wanted: what the move was about to do is where it was.
    assert b.complete(id=2).status == 200
    stage.machine.world.add_fault("hold", delay_s=0.7)
    asked = Asked(b)
    eventually(lambda: list(place.iterdir()), "it is being written")
    assert a.complete(id=3).status == 200
    assert asked.code in ("", "host-memory"), "there is room as soon as it is back"
    assert b.complete(id=4).status == 200
    # Where it cannot be moved: refused as ever, and nothing is lost.
    a.suspended()
    place.rename(place.with_name("gone"))
    refused = stage.gpuckpt("suspend", "b")
    assert (refused.code, refused.error["code"]) == (6, "host-memory")
    assert "did not move its image to disk" in b.stderr
    assert lies(a) == (8, 0)
    assert a.complete(id=5).status == b.complete(id=6).status == 200


class Asked:
    """A suspend that is under way."""

    def __init__(self, run: Serving) -> None:
        from threading import Thread

        self._run, self.answer = run, {}
        self._thread = Thread(target=lambda: self.answer.update(run.ask("suspend")), daemon=True)
        self._thread.start()

    @property
    def code(self) -> str:
        """Of its error, "" where it was done."""
        self._thread.join(30)
        return str((self.answer["error"] or {}).get("code", ""))


def test_who_is_asked_and_when(machine: Machine) -> None:
    there: list[dict[str, Any]] = []
    asked: list[str] = []

    async def others() -> list[dict[str, Any]]:
        return there

    async def move(other: Any) -> bool:
        asked.append(other["name"])
        if other["name"] != "stuck":
            other["host_bytes"], other["movable_bytes"] = 0, 0
        return other["name"] != "stuck"

    def room(need_gib: float, limit_gib: int | None = 10, **more: Any) -> bool:
        budget = Budget(limit_gib and limit_gib << 30, others, {"GPUCKPT_SIMULATE": str(machine.world.path)}, move)
        return asyncio.run(budget.make_room(int(need_gib * GIB), **more))

    def run(name: str, used_at: float, movable: int, host: int = 3) -> dict[str, Any]:
        return {"name": name, "used_at": used_at, "movable_bytes": movable * GIB, "host_bytes": host * GIB, "state": "suspended"}

    machine.host_memory(64, 32)
    there[:] = [run("new", 30, 3), run("old", 10, 3), run("keeps", 5, 0)]
    assert (room(1), asked) == (False, []), "it fits: nobody is asked"
    assert (room(9), asked) == (False, []), "all of it would not be enough"
    assert (room(3), asked) == (True, ["old"])
    assert (room(7), asked) == (True, ["old", "new"])
    there[:] = [run("stuck", 10, 3), run("new", 30, 3)]
    asked.clear()
    assert (room(6.5, own_bytes=GIB), asked) == (False, ["stuck"]), "it cannot, and without it all would not be enough"
    asked.clear()
    assert (room(6, own_bytes=GIB), asked) == (True, ["stuck", "new"])
    there[:] = [run("new", 30, 3), {"name": "older version", "host_bytes": 9 * GIB, "state": "suspended"}]
    asked.clear()
    assert (room(5, whatever_the_limit=True), asked) == (False, []), "for a moment there is more than the budget"
    with pytest.raises(errors.HostMemory):
        asyncio.run(Budget(10 << 30, others, {"GPUCKPT_SIMULATE": str(machine.world.path)}, move).check(9 * GIB))


@pytest.mark.parametrize("makes_room", [True, False])
def test_an_image_on_disk_comes_back_once_others_made_room(monkeypatch: pytest.MonkeyPatch, *, makes_room: bool) -> None:
    calls: list[str] = []

    class Room(Budget):
        async def make_room(self, need_bytes: int, own_bytes: int = 0, *, whatever_the_limit: bool = False) -> bool:
            calls.append(f"{need_bytes >> 30} GiB, {own_bytes}, {whatever_the_limit}")
            return makes_room

    async def run(_: Worker, command: str, *_args: Any, **_more: Any) -> Report:
        calls.append(command)
        if command == "resume" and calls.count("resume") == 1:
            raise errors.HostMemory("no room for it on its way back")
        return Report(command, True, True, (ProcessReport(7, "x", "suspended", (), 0, disk_bytes=5 * GIB),))

    monkeypatch.setattr(Worker, "run", run)

    async def there_and_back() -> Holdings:
        holdings = Holdings(7, timeout_s=None, accept=())
        holdings.budget = Room()
        await holdings.suspend()
        assert holdings.disk_bytes == 5 * GIB
        if makes_room:
            await holdings.resume(0.0, Worker())
        else:
            with pytest.raises(errors.HostMemory):
                await holdings.resume(0.0, Worker())
        return holdings

    holdings = asyncio.run(there_and_back())
    assert calls == ["suspend", "resume", "5 GiB, 0, True", *(["resume"] if makes_room else [])]
    assert (holdings.down, holdings.disk_bytes) == ((False, 0) if makes_room else (True, 5 * GIB))
