"""A server that comes back is the one that left: golden answers after each resume, one rehearsal, and a new start where that fails."""

from __future__ import annotations

import signal

from tests.serving import Stage, stage
from tests.simulated_machine import eventually

__all__ = ["stage"]


def test_healthy_but_wrong(stage: Stage) -> None:
    """Case 25: vllm-project/vllm#53888, an adapter that had stopped applying."""
    options = ("--rehearse", "--probe", "--restart", "on-failure")
    run = stage.run(*options, fake=("--lora", "adapter", "--forgets", "adapter", "--forgets-at", "3")).awake()
    assert len(run.notes("sleep")) == len(run.notes("woken")) == 1, "rehearsed before it was ready"
    assert not run.became("suspending")
    assert run.suspended().complete(id=1).status == 200, "the same answer, of both"
    answer = run.suspended().complete(id="held")
    assert (answer.status, answer.error["code"]) == (503, "wrong-answer")
    assert "adapter answers 'not forty-two' where it answered 'forty-two'" in answer.error["message"]
    completions = [n["headers"]["Host"] for n in run.notes("begin") if n["path"] == "/v1/completions"]
    assert [h for h in completions if h != "vllm"] == [f"127.0.0.1:{run.port}"], "nobody was let in to the wrong one"
    eventually(lambda: run.became("awake", 3), "another was started, and rehearsed")
    assert run.complete(id=2).status == 200
    assert stage.gpuckpt("stop", "m").code == 0
    run.nothing_left()


def test_a_rehearsal_that_brings_back_another_ends_the_run(stage: Stage) -> None:
    run = stage.run("--rehearse", fake=("--forgets", "model"))
    assert run.end() == 125
    assert "model answers 'not forty-two'" in run.stderr
    run.nothing_left()


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
