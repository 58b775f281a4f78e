"""A server that comes back is the one that left: golden answers after each resume, and one rehearsal before it serves."""

from __future__ import annotations

import signal

from tests.conftest import eventually
from tests.serving import Stage, stage

__all__ = ["stage"]


def test_the_same_answers_after_each_resume(stage: Stage) -> None:
    run = stage.run("--probe", fake=("--lora", "adapter")).awake()
    for n in range(2):
        run.suspended()
        assert run.complete(id=n).status == 200
    probed = [n for n in run.notes("begin") if n["path"] == "/v1/completions"]
    assert len(probed) == 2 * 3 + 2, "two models, at the start and after two resumes; two requests"


def test_healthy_but_wrong(stage: Stage) -> None:
    """Case 25: vllm-project/vllm#53888, an adapter that had stopped applying."""
    run = stage.run("--probe", fake=("--lora", "adapter", "--forgets", "adapter")).awake().suspended()
    answer = run.complete(id="held")
    assert (answer.status, answer.error["code"]) == (503, "wrong-answer")
    assert "adapter answers 'not forty-two' where it answered 'forty-two'" in answer.error["message"]
    assert run.end() == 125
    assert not [
        n for n in run.notes("begin") if n["path"] == "/v1/completions" and "Host" in n["headers"] and n["headers"]["Host"] != "vllm"
    ]
    run.nothing_left()


def test_a_rehearsal_before_it_is_ready(stage: Stage) -> None:
    run = stage.run("--rehearse").awake()
    assert len(run.notes("sleep")) == len(run.notes("woken")) == 1
    assert "rehearsed in" in run.stderr
    assert not run.became("suspending")
    assert run.complete(id=1).status == 200


def test_a_rehearsal_that_brings_back_another_ends_the_run(stage: Stage) -> None:
    run = stage.run("--rehearse", fake=("--forgets", "model"))
    assert run.end() == 125
    assert "wrong-answer" in run.stderr or "answers 'not forty-two'" in run.stderr
    assert "awake" not in run.stderr.splitlines()[-1]
    run.nothing_left()


def test_a_rehearsal_that_is_refused_serves_on(stage: Stage) -> None:
    run = stage.run("--rehearse", fake=("--workers", "1"))
    eventually(lambda: run.port, "the gate listens")
    eventually(lambda: stage.machine.used() > 8 << 30, "the worker is there")
    run.awake()
    assert run.complete(id=1).status == 200


def test_a_rehearsal_that_loses_the_process_ends_the_run(stage: Stage) -> None:
    stage.machine.world.add_fault("restore", result="OUT_OF_MEMORY", times=99)
    run = stage.run("--rehearse")
    assert run.end() == 125, run.stderr
    run.nothing_left()


def test_sigterm_in_a_rehearsal(stage: Stage) -> None:
    run = stage.run("--rehearse", fake=("--slow-sleep", "20"))
    eventually(lambda: run.notes("sleep"), "it goes to sleep")
    run.signal(signal.SIGTERM)
    assert run.end() in (0, 143)
    run.nothing_left()
