"""A run of a server on two GPUs: its workers suspended as one, by their agents; a rehearsal before anybody is served."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

from tests.serving import Serving, Stage, stage2
from tests.simulated_machine import eventually

__all__ = ["stage2"]

TP2 = ("-tp", "2")


def workers(run: Serving) -> dict[str, int]:
    """Title -> pid."""
    found = {}
    for pid in run.tree:
        with contextlib.suppress(FileNotFoundError):
            found[Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0].decode()] = pid
    return found


def used(stage: Stage) -> list[int]:
    return [stage.machine.used(0), stage.machine.used(1)]


def text(answer: Any) -> str:
    assert answer.status == 200, answer
    return str(answer.json["choices"][0]["text"])


def test_rehearsed_idle_and_back(stage2: Stage) -> None:
    """By default, without a word: suspended and resumed before it is ready, then whenever it is idle, and the same answers."""
    run = stage2.run("--idle", "500ms", fake=TP2).awake()
    assert "rehearsed in" in run.stderr
    assert len(run.notes("sleep")) == len(run.notes("woken")) == 1
    assert not run.became("suspending"), "that was before it was ready"
    reference = text(run.complete(id=1))
    assert len(set(reference.split()[1:])) == 2, "each worker has a part in it"
    for cycle in (1, 2):
        eventually(lambda n=cycle: run.became("suspended", n), "it is idle")
        assert used(stage2) == [0, 0]
        assert run.get("/v1/models").status == 200
        held = [run.begin(id=n) for n in range(4)]
        assert {text(c.result()) for c in held} == {reference}
        assert all(used(stage2))
    down = next(x for x in run.stderr.splitlines() if "suspend (idle) in" in x)
    up = next(x for x in run.stderr.splitlines() if "resume (request) in" in x)
    in_order(down, "drain", "sleep", "inspect", "quiesce", "comms", "disarm", "lock", "re-inspect", "checkpoint", "verify")
    in_order(up, "inspect", "room", "restore", "unlock", "arm", "comms-resume", "unquiesce", "wake")
    eventually(lambda: run.became("suspended", 3), "it is idle")
    run.signal(signal.SIGTERM)
    assert run.end() == 143
    run.nothing_left()


def in_order(line: str, *steps: str) -> None:
    assert [part.split()[0] for part in line.partition(" s: ")[2].split(", ")] == list(steps)


def test_a_worker_that_dies_while_suspended(stage2: Stage) -> None:
    """The front answers as if nothing had happened. (Not rehearsed, as chosen.)"""
    run = stage2.run("--no-rehearse", fake=TP2).awake()
    assert not run.notes("sleep")
    reference = text(run.complete(id=1))
    run.suspended()
    assert text(run.complete(id=2)) == reference
    run.suspended()
    assert run.get("/health").status == 200
    os.kill(workers(run)["VLLM::Worker_TP1"], signal.SIGKILL)
    assert run.end() == 125, run.stderr
    assert "an engine of the server, died" in run.stderr
    run.nothing_left()


def test_what_cannot_be_suspended_serves_on(stage2: Stage) -> None:
    """Without an agent in its workers nobody vouches for their communicator: the rehearsal says so, and nothing is lost."""
    run = stage2.run("--without", "agent", "--idle", "1s", fake=TP2).awake()
    assert "it cannot be suspended, and will not be" in run.stderr
    assert text(run.complete(id=1))
    refused = run.ask("suspend")["error"]
    assert refused["code"] == "nccl-communicator", refused
    assert text(run.complete(id=2))
    assert all(used(stage2))


def test_a_rehearsal_whose_communicator_breaks_ends_the_run(stage2: Stage) -> None:
    """What cannot be proven beforehand is lost while nobody is served yet, and not with the first idle night. Here no option tells that
    there are several processes, as where a file of options has that: they are counted."""
    stage2.machine.world.add_fault("comms-resume", result="INTERNAL_ERROR", times=2)
    run = stage2.run("--restart", "on-failure", FAKE_RANKS="2", GPUCKPT_AGENT="1")
    eventually(lambda: "started again" in run.stderr, "the run gave it up")
    assert not run.became("awake"), "nobody was let in"
    run.awake()
    assert text(run.complete(id=1))
