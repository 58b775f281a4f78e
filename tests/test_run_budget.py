"""Host memory that runs may fill together, and what a run tells of its memory."""

from __future__ import annotations

import subprocess

import pytest

from gpuckpt.cli.common import Size
from tests.conftest import COMMAND, eventually
from tests.serving import Stage, stage

__all__ = ["stage"]


def test_what_does_not_fit_the_budget_is_refused_and_names_who_holds_it(stage: Stage) -> None:
    runs = [stage.run("--host-budget", "20GiB", name=n).awake() for n in ("a", "b", "c")]
    a, b, c = runs
    a.suspended()
    b.suspended()
    result = stage.gpuckpt("suspend", "c")
    assert (result.code, result.error["code"]) == (6, "host-memory")
    message = result.error["message"]
    assert "the host budget of 20.0 GiB leaves" in message
    assert "a 8.0 GiB" in message
    assert "b 8.0 GiB" in message
    assert c.complete(id=1).status == 200
    assert not stage.machine.world.peek().under_way(c.child)
    slept = len(c.notes("sleep"))
    assert stage.gpuckpt("suspend", "c").error["code"] == "host-memory"
    assert len(c.notes("sleep")) == slept, "the second time it is known before it sleeps"
    assert stage.gpuckpt("resume", "a").code == 0
    assert stage.gpuckpt("suspend", "c").code == 0
    assert a.complete(id=1).status == 200


def test_without_a_budget_it_is_what_is_available(stage: Stage) -> None:
    a, b = stage.run(name="a").awake().suspended(), stage.run(name="b").awake()
    stage.machine.host_memory(64, 4)
    result = stage.gpuckpt("suspend", "b")
    assert (result.code, result.error["code"]) == (6, "host-memory")
    assert "4.0 GiB of host memory are available; it holds a 8.0 GiB" in result.error["message"]
    assert "--host-budget" in result.error["hint"]
    assert b.complete(id=1).status == 200
    assert a.facts["host_bytes"] == 8 << 30


def test_two_at_once_do_not_both_take_the_last_of_it(stage: Stage) -> None:
    stage.machine.slow(0.1)
    runs = [stage.run("--host-budget", "12GiB", name=n).awake() for n in ("a", "b")]
    orders = [
        subprocess.Popen([COMMAND, "suspend", r.name], env=stage.environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for r in runs
    ]
    assert sorted(o.wait(60) for o in orders) == [0, 6]
    assert sorted(r.facts["state"] for r in runs) == ["awake", "suspended"]


def test_memory_in_the_metrics(stage: Stage) -> None:
    run = stage.run().awake()
    gpu = f'gpuckpt_gpu_bytes{{gpu="{stage.machine.uuids[0]}"}} '.encode()
    eventually(lambda: gpu + b"8.589934592e+09" in run.get("/metrics").body, "it is known")
    run.suspended()
    metrics = run.get("/metrics").body
    assert gpu + b"0.0" in metrics
    assert b"gpuckpt_host_bytes 8.589934592e+09" in metrics


@pytest.mark.parametrize(
    ("text", "nbytes"), [("64GiB", 64 << 30), ("64g", 64 << 30), ("1.5 GB", 1_500_000_000), ("4096", 4096), ("2T", 2 << 40)]
)
def test_sizes(text: str, nbytes: int) -> None:
    assert Size().convert(text, None, None) == nbytes
