"""When a run is idle, and when it is not; commands that are no vLLM. Cases of other tools are named by their public reports."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from tests.serving import Serving, Stage, free_port, make_stage, stage

__all__ = ["stage"]

#: Requests at so many offsets around the idle moment; case 1 asks for 300, which takes three minutes.
ROUNDS = int(os.environ.get("GPUCKPT_IDLE_ROUNDS", "8"))


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """One run for the tests that find it asleep, or on its way there, and leave it so."""
    made = make_stage(tmp_path_factory.mktemp("idle"))
    yield next(made).run("--idle", "500ms").awake()
    next(made, None)


def test_a_server_that_nobody_calls_is_suspended_and_comes_back_by_a_request(idle: Serving) -> None:
    """Case 3: sablierapp/sablier#23"""
    idle.until("suspended")
    assert idle.stage.machine.used() == 0
    asleep = len(idle.notes("sleep"))
    first, second = idle.complete(id=1), idle.complete(id=1)
    assert (first.status, second.status) == (200, 200)
    assert first.json["choices"] == second.json["choices"]
    idle.until("suspended")
    assert len(idle.notes("sleep")) == asleep + 1
    assert not idle.notes("computed asleep")


def test_idle_counts_from_the_last_byte(idle: Serving) -> None:
    """Case 2: mostlygeek/llama-swap#25"""
    idle.until("suspended")
    asleep = len(idle.notes("sleep"))
    client = idle.begin(seconds=1.2, stream=True, chunks=3)
    assert client.result().status == 200
    assert len(idle.notes("sleep")) == asleep
    idle.until("suspended")
    assert idle.notes("sleep")[-1]["at"] - client.ended >= 0.4


def test_scraping_does_not_keep_it_awake(idle: Serving) -> None:
    """Case 4: ggml-org/llama.cpp#20227"""
    served = idle.complete(id=1).json["served"]
    until = time.monotonic() + 10
    while idle.state != "suspended":
        assert time.monotonic() < until
        for path in ("/metrics", "/health", "/v1/models", "/version", "/load"):
            assert idle.get(path).status == 200
        time.sleep(0.02)
    scraped = idle.get("/metrics")
    assert f"vllm:requests_total {served}\n".encode() in scraped.body
    assert b'gpuckpt_state{state="suspended"} 1.0' in scraped.body
    assert idle.get("/v1/models").json["data"][0]["id"] == "model"
    assert idle.state == "suspended"


def test_idle_moments_and_requests_at_every_offset(stage: Stage) -> None:
    """Case 1: mostlygeek/llama-swap#946"""
    run = stage.run("--idle", "250ms", fake=("--slow-sleep", "0.05")).awake()
    for n in range(ROUNDS):
        time.sleep(0.2 + n * 0.36 / ROUNDS)
        answer = run.complete(id=n)
        assert (answer.status, answer.json["id"]) == (200, n), answer
    assert not run.notes("computed asleep")
    run.until("suspended")
    assert run.facts["state"] == "suspended"
    assert b'gpuckpt_state{state="suspended"} 1.0' in run.get("/metrics").body
    assert run.complete(id="last").status == 200


def test_another_server_by_its_url(stage: Stage) -> None:
    """Any HTTP server: it is not asked to sleep, the driver takes all it holds."""
    port = free_port()
    run = stage.run("--upstream", f"http://127.0.0.1:{port}", "--listen", "0", fake=("--port", port)).awake()
    run.suspended()
    assert stage.machine.used() == 0
    assert run.complete(id=1).status == 200
    assert not run.notes("sleep")


def test_a_command_without_a_server(stage: Stage) -> None:
    """Named, suspended and resumed by name; no gate."""
    run = stage.run("--adapter", "none", fake=("--port", "0"))
    run.until("awake")
    assert run.child
    assert run.suspended().facts["listen"] is None
    assert stage.machine.used() == 0
    assert stage.gpuckpt("resume", "m").code == 0
