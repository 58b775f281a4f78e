"""Host memory that runs may fill together, and what a run tells of its memory."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpuckpt import errors
from gpuckpt.cli.common import Size
from gpuckpt.image import preload
from gpuckpt.supervisor import budget
from gpuckpt.supervisor.budget import Budget
from tests.serving import Stage, stage
from tests.simulated_machine import COMMAND, Machine, eventually

__all__ = ["stage"]


def test_what_does_not_fit_is_refused_and_names_who_holds_it(stage: Stage) -> None:
    stage.machine.slow(0.1)
    runs = [stage.run("--host-budget", "12GiB", name=n).awake() for n in ("a", "b")]
    gpu = f'gpuckpt_gpu_bytes{{gpu="{stage.machine.uuids[0]}"}} '.encode()
    eventually(lambda: gpu + b"8.589934592e+09" in runs[0].get("/metrics").body, "it is known")
    orders = [
        subprocess.Popen([COMMAND, "suspend", r.name], env=stage.environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for r in runs
    ]
    assert sorted(o.wait(60) for o in orders) == [0, 6], "two at once do not both take the last of it"
    assert f"GPUCKPT_HOST_BUDGET={12 << 30}" in Path(f"/proc/{runs[0].child}/environ").read_text().split("\0"), "its pool keeps to it"
    away, here = sorted(runs, key=lambda r: r.facts["state"] != "suspended")
    slept = len(here.notes("sleep"))
    result = stage.gpuckpt("suspend", here.name)
    assert (result.code, result.error["code"]) == (6, "host-memory")
    assert f"the host budget of 12.0 GiB leaves 4.0 GiB; it holds {away.name} 8.0 GiB" in result.error["message"]
    assert len(here.notes("sleep")) == slept, "the second time it is known before it sleeps"
    assert here.complete(id=1).status == 200
    metrics = away.get("/metrics").body
    assert gpu + b"0.0" in metrics
    assert b"gpuckpt_host_bytes 8.589934592e+09" in metrics


@pytest.mark.skipif(bool(preload.problem()), reason="installed without a compiler")
def test_an_image_on_disk_takes_no_host_memory(stage: Stage, image_folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "images"
    place.mkdir()
    run = stage.run("--keep-in", str(place), LD_PRELOAD=str(image_folder / "libcuda.so.1")).awake().suspended()
    assert b"gpuckpt_host_bytes 0.0" in run.get("/metrics").body
    status = stage.gpuckpt("status", str(run.child)).document["processes"]
    assert [(p["state"], p["host_bytes"], p["disk_bytes"]) for p in status] == [("suspended", 0, 8 << 30)]
    assert run.complete(id=1).status == 200
    place.rmdir()
    result = stage.gpuckpt("suspend", "m")
    assert (result.code, result.error["code"]) == (6, "image-directory")
    assert run.complete(id=2).status == 200


@pytest.mark.parametrize(
    ("words", "said"), [(("--keep-in", "/nowhere"), "no directory"), (("--keep-in", "/tmp", "--without", "preload"), "preload library")]
)
def test_a_place_that_would_never_do_is_refused_at_once(machine: Machine, words: tuple[str, ...], said: str) -> None:
    result = machine.gpuckpt("run", *words, "--", "true", json=False, GPUCKPT_RUNTIME_DIR=str(machine.path / "r"))
    assert result.code == 125
    assert said in result.stderr


def test_a_run_that_never_comes_to_its_decision_keeps_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its supervisor is stopped, say, in the middle of it."""
    monkeypatch.setattr(budget, "DECIDE_S", 0.05)

    async def decide(within: Budget) -> None:
        async with within.deciding():
            pass

    async def both() -> None:
        first, second = (Budget(environ={"GPUCKPT_RUNTIME_DIR": str(tmp_path / "r")}) for _ in range(2))
        async with first.deciding() as decided:
            with pytest.raises(errors.Busy, match=f"the run with pid {os.getpid()} has been deciding for 0.05 s") as caught:
                await decide(second)
            assert caught.value.pid == os.getpid()
            decided()
            await decide(second)

    asyncio.run(both())


def test_the_budget(machine: Machine) -> None:
    there: list[dict[str, Any]] = []

    async def others() -> list[dict[str, Any]]:
        return there

    def left(limit: int | None = None, own: int = 0) -> tuple[int, str]:
        return asyncio.run(Budget(limit, others, {"GPUCKPT_SIMULATE": str(machine.world.path)}).left(own))

    machine.host_memory(64, 10)
    assert left() == (10 << 30, "10.0 GiB of host memory are available; it holds no other run")
    there.append({"name": "a", "host_bytes": 4 << 30, "state": "suspended"})
    assert left() == (10 << 30, "10.0 GiB of host memory are available; it holds a 4.0 GiB")
    there.append({"name": "b", "host_bytes": 6 << 30, "state": "suspending"})
    assert left()[0] == 4 << 30, "what another is about to take is not free"
    assert left(12 << 30, 1 << 30) == (1 << 30, "the host budget of 12.0 GiB leaves 1.0 GiB; it holds b 6.0 GiB, a 4.0 GiB")
    assert left(100 << 30)[0] == 4 << 30
    there.append({"name": "c", "host_bytes": 0, "reserved_bytes": 1 << 30, "state": "ready"})
    assert left(12 << 30)[0] == 1 << 30, "memory kept ready by a run that is awake counts"
    ready = Budget(None, others, {"GPUCKPT_SIMULATE": str(machine.world.path)}, ready=lambda: 3 << 30)
    assert asyncio.run(ready.left())[0] == 7 << 30, "what it keeps ready itself is there"
    with pytest.raises(errors.HostMemory, match="needs 5"):
        asyncio.run(Budget(None, others, {"GPUCKPT_SIMULATE": str(machine.world.path)}).check(5 << 30))


@pytest.mark.parametrize(
    ("text", "nbytes"), [("64GiB", 64 << 30), ("64g", 64 << 30), ("1.5 GB", 1_500_000_000), ("4096", 4096), ("2T", 2 << 40)]
)
def test_sizes(text: str, nbytes: int) -> None:
    assert Size().convert(text, None, None) == nbytes
