"""Runs that do not fit on one GPU together: they take turns, are swapped, and leave it to a lease."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving import Serving, Stage, stage
from tests.simulated_machine import COMMAND, eventually

__all__ = ["stage"]

#: Two of these are more than the 80 GiB of the card; asleep, they would fit.
LARGE = ("--gib", "50", "--sleep-frees", "45")


@pytest.fixture(scope="module")
def couple(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Serving, Serving]]:
    """Two runs that share a GPU, for the tests that leave them as they were: serving, wherever each is."""
    made = stage.__wrapped__(tmp_path_factory.mktemp("couple"))  # type: ignore[attr-defined]
    place: Stage = next(made)
    words = ("--share", "--least-awake", "100ms")
    a = place.run(*words, fake=LARGE, name="a").awake()
    b = place.run(*words, fake=(*LARGE, "--at-once", "1"), name="b").awake()
    assert a.state == "suspended", "it left for the other to start"
    yield a, b
    for run in (a, b):
        assert not run.notes("computed asleep")
        assert not run.notes("out of memory")
    next(made, None)


def swaps(*runs: Serving) -> int:
    return sum(r.stderr.count(": suspended\n") for r in runs)


@contextlib.contextmanager
def client_of(run: Serving) -> Iterator[None]:
    """One that asks, and leaves."""
    body = '{"id": "gone"}'
    with run.dial(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}"):
        yield


def only_here(run: Serving) -> None:
    """It is the one on the GPU."""
    assert run.complete(id="here").status == 200


def test_two_models_take_turns_on_one_gpu(couple: tuple[Serving, Serving]) -> None:
    for run in (*couple, couple[0]):
        answer = run.complete(id=run.name)
        assert (answer.status, answer.json["id"]) == (200, run.name)
    a, b = couple
    assert a.facts["gpu_bytes"] == b.facts["gpu_bytes"] == {a.stage.machine.uuids[0]: 50 << 30}


def test_a_run_with_requests_running_is_not_asked_to_leave(couple: tuple[Serving, Serving]) -> None:
    """Nor is a run swapped out for a client that has left meanwhile (case 9)."""
    a, b = couple
    only_here(b)
    stream = b.begin(stream=True, chunks=4, seconds=1.2)
    eventually(lambda: b.facts["requests_running"], "it runs")
    served = len(a.notes("begin"))
    with client_of(a):
        eventually(lambda: a.facts["state"] == "resuming", "it wants to wake")
    eventually(lambda: a.facts["state"] == "suspended", "it does not any more")
    assert len(a.notes("begin")) == served
    first = a.begin(id=1)
    assert stream.result().body.endswith(b"[DONE]\n\n")
    assert first.result().status == 200
    assert first.ended > stream.ended
    assert not b.notes("cut")
    assert b.notes("sleep")[-1]["running"] == 0


def test_a_requester_that_gives_up_in_a_resume(couple: tuple[Serving, Serving]) -> None:
    """Case 9: mostlygeek/llama-swap#727"""
    a, b = couple
    only_here(b)
    b.suspended()
    a.stage.machine.slow(0.1)
    with client_of(a):
        a.until("resuming")
    try:
        assert b.complete(id="next").json["id"] == "next"
    finally:
        a.stage.machine.slow(0.0)
    eventually(lambda: a.facts["state"] == "suspended", "it is suspended again")


def test_twenty_jobs_and_one_chat(couple: tuple[Serving, Serving]) -> None:
    """Case 10: mostlygeek/llama-swap#588"""
    a, b = couple
    only_here(a)
    before, done = swaps(a, b), len(b.notes("begin"))
    jobs = []
    for n in range(20):
        jobs.append(b.begin({"X-N": str(n)}, id=n, seconds=0.03))
        eventually(lambda n=n: b.facts["requests_waiting"] + b.facts["requests_running"] > n or len(b.notes("begin")) > done, "it came")
    chat = a.begin(id="chat")
    assert chat.result().json["id"] == "chat"
    assert [j.result().json["id"] for j in jobs] == list(range(20))
    assert swaps(a, b) - before <= 3
    asked = [n["headers"]["X-N"] for n in b.notes("begin")[done:] if "X-N" in n["headers"]]
    assert asked == [str(n) for n in range(20)]


def test_contention_serves_everybody(couple: tuple[Serving, Serving]) -> None:
    before, begun = swaps(*couple), time.monotonic()
    clients = [run.begin(id=n, seconds=0.05) for n in range(3) for run in couple]
    assert all(c.result().status == 200 for c in clients)
    assert swaps(*couple) - before <= 1 + (time.monotonic() - begun) / 0.1


def test_a_suspend_that_fails_half_way_does_not_wake_to_a_full_card(couple: tuple[Serving, Serving]) -> None:
    """What it gave up asleep another has taken meanwhile: it sleeps on, and is woken when there is room."""
    a, b = couple
    only_here(b)
    b.stage.machine.world.add_fault("lock", pid=b.child, result="UNKNOWN", delay_s=1.5)
    assert a.complete(id=1).status == 200
    eventually(lambda: "it sleeps on" in b.stderr, "its suspend failed, and there was no room for it to wake up")
    assert b.complete(id=2).status == 200


def test_a_resume_leaves_room_for_the_wake(couple: tuple[Serving, Serving]) -> None:
    """What vLLM takes when it wakes up must be free before the driver restores anything."""
    a, b = couple
    only_here(b)
    b.suspended()
    other = a.stage.machine.target("--gib", "60")
    client = a.begin(id=1)
    eventually(lambda: a.facts["state"] == "resuming", "it waits for room")
    assert a.stage.machine.used() == 60 << 30
    other.kill()
    assert client.result().status == 200


def test_swap(couple: tuple[Serving, Serving]) -> None:
    a, b = couple
    only_here(b)
    result = a.stage.gpuckpt("swap", "b", "a")
    assert result.code == 0, result
    assert (a.facts["state"], b.facts["state"]) == ("awake", "suspended")
    assert (result.document["out"], result.document["in"]) == ("b", "a")
    other = a.stage.machine.target("--gib", "20")
    assert a.stage.gpuckpt("suspend", other.pid).code == 0
    slept = len(a.notes("sleep"))
    for nobody, code in (("no-such", 2), ("4194305", 4)):
        assert a.stage.gpuckpt("swap", "a", nobody).code == code
    assert len(a.notes("sleep")) == slept, "nothing is moved for somebody who is not there"
    other.stop()
    result = a.stage.gpuckpt("swap", "a", str(other.pid), json=False)
    assert result.code == 6
    assert "a is awake again" in result.stderr
    assert len(a.notes("sleep")) == slept + 1
    assert a.facts["state"] == "awake", "where IN fails OUT comes back"
    other.signal(signal.SIGCONT)
    filler = a.stage.machine.target("--gib", "25")
    result = a.stage.gpuckpt("swap", "b", str(other.pid), json=False)
    assert result.code == 6
    assert "b is suspended, as it was" in result.stderr
    filler.kill()
    assert a.stage.gpuckpt("swap", "a", str(other.pid)).code == 0
    assert other.unharmed()
    other.kill()


# Lease.


def lease(where: Stage, *words: str, options: tuple[str, ...] = ("--gpu", "0")) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [COMMAND, "lease", *options, "--", *words], env=where.environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    where.machine.commands.append(process)
    return process


def test_a_lease_holds_the_wakes_and_lets_them_back(couple: tuple[Serving, Serving]) -> None:
    a, b = couple
    only_here(b)
    held = lease(b.stage, "cat")
    eventually(lambda: a.facts["held_by"] and b.facts["state"] == "suspended", "both are held")
    eventually(lambda: Path(f"/proc/{held.pid}/comm").read_text() == "cat\n", "the command runs")
    clients = [run.begin(id=1) for run in couple]
    eventually(lambda: a.facts["requests_waiting"] and b.facts["requests_waiting"], "they wait")
    result = b.stage.gpuckpt("resume", "b")
    assert (result.code, result.error["code"]) == (1, "leased")
    assert f"pid {held.pid}" in result.error["message"]
    assert f"kept off its GPU: pid {held.pid} (cat) has a lease" in b.stage.gpuckpt("status", "b", json=False).stdout
    assert lease(b.stage, "true", options=("--gpu", "0", "--timeout", "200ms")).wait(30) == 125, "one at a time"
    assert b.stage.machine.used() == 0
    held.communicate("")
    assert held.returncode == 0
    assert [c.result().status for c in clients] == [200, 200]


def test_a_run_that_holds_no_gpu_is_passed_over(couple: tuple[Serving, Serving]) -> None:
    _, b = couple
    words = [COMMAND, "run", "--name", "cpu", "--", "sleep", "100"]
    with subprocess.Popen(words, env=b.stage.environ, stderr=subprocess.DEVNULL) as cpu:
        try:
            eventually((b.stage.runtime / "cpu.sock").exists, "it is there")
            held = lease(b.stage, "true")
            assert held.wait(30) == 0
            assert b.stage.gpuckpt("status", "cpu").document["run"]["state"] == "awake"
        finally:
            cpu.terminate()


def test_a_lease_of_a_command_that_closes_what_it_inherited(couple: tuple[Serving, Serving]) -> None:
    """As sudo does. The lease ends with the command all the same, and leaves it no child to wait for."""
    _, b = couple
    only_here(b)
    script = "import os, sys\nos.closerange(3, 100)\ntry: os.wait()\nexcept ChildProcessError: print('alone', flush=True)\nsys.stdin.read()"
    held = lease(b.stage, sys.executable, "-c", script)
    assert held.stdout is not None
    assert held.stdout.readline() == "alone\n"
    assert b.ask("resume")["error"]["code"] == "leased"
    assert b.state == "suspended"
    held.communicate("")
    eventually(lambda: b.facts["state"] == "awake" and b.facts["held_by"] is None, "it is back")


def test_a_run_that_does_not_answer_is_named(couple: tuple[Serving, Serving]) -> None:
    """It is the second that is stopped, and the first that is late because of it, or not."""
    a, b = couple
    only_here(a)
    os.kill(b.process.pid, signal.SIGSTOP)
    try:
        result = a.stage.gpuckpt("lease", "--gpu", "0", "--timeout", "300ms", "--json", "--", "true", json=False)
    finally:
        os.kill(b.process.pid, signal.SIGCONT)
    assert result.code == 125
    error = json.loads(result.stdout)["error"]
    assert (error["code"], error["pid"]) == ("deadline", b.process.pid)
    assert error["hint"] == f"kill -CONT {b.process.pid}"
    eventually(lambda: not a.facts["held_by"] and not b.facts["held_by"], "neither is held")


@pytest.mark.parametrize("running", [True, False])
def test_kill_9_of_a_lease(couple: tuple[Serving, Serving], running: bool) -> None:
    a, b = couple
    only_here(b)
    stream = b.begin(stream=True, chunks=3, seconds=1.5) if running else None
    eventually(lambda: b.facts["requests_running"] == running, "it runs")
    held = lease(b.stage, "sleep", "600")
    eventually(lambda: b.facts["held_by"], "it is held")
    if stream is None:
        eventually(lambda: Path(f"/proc/{held.pid}/comm").read_text() == "sleep\n", "the command runs")
        assert b.facts["state"] == "suspended"
    held.kill()
    held.wait()
    if stream is not None:
        assert stream.result().body.endswith(b"[DONE]\n\n")
    eventually(lambda: b.facts["state"] == "awake" and b.facts["held_by"] is None, "it is back, though nobody asked")
    assert a.facts["held_by"] is None


def test_a_run_that_is_adopted_under_a_lease_stays_away(stage: Stage) -> None:
    """The lease's connection ended with the supervisor; its lock did not."""
    run = stage.run("--keep-child").awake()
    held = lease(stage, "cat")
    eventually(lambda: Path(f"/proc/{held.pid}/comm").read_text() == "cat\n", "the command runs")
    run.process.kill()
    run.process.wait()
    run = stage.run("--keep-child")
    run.until("suspended")
    eventually(lambda: run.port, "the gate listens")
    client = run.begin(id=1)
    eventually(lambda: run.facts["requests_waiting"], "it waits")
    assert run.ask("resume")["error"]["code"] == "leased"
    assert stage.machine.used() == 0
    run.process.kill()
    run.process.wait()
    client.join(20)
    run = stage.run("--keep-child")
    run.until("suspended")
    held.communicate("")
    run.until("awake")
    assert run.facts["held_by"] is None
    assert stage.machine.used() > 0


def test_a_lease_waits_for_what_runs_and_gives_up_in_time(couple: tuple[Serving, Serving]) -> None:
    _, b = couple
    only_here(b)
    stream = b.begin(stream=True, chunks=3, seconds=2.0)
    eventually(lambda: b.facts["requests_running"], "it runs")
    assert lease(b.stage, "true", options=("--gpu", "0", "--timeout", "200ms")).wait(30) == 125
    script = "import gpuckpt\nwith gpuckpt.lease(0, timeout_s=20) as held:\n    print(*held.runs)\n"
    done = subprocess.run([sys.executable, "-c", script], env=b.stage.environ, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "a b\n", done.stderr
    assert stream.result().body.endswith(b"[DONE]\n\n")
    eventually(lambda: b.facts["state"] == "awake", "it is back")


def test_a_driver_that_does_not_answer_ends_a_lease_in_time(stage: Stage) -> None:
    with stage.machine.slow_look():
        result = stage.gpuckpt("lease", "--gpu", "0", "--timeout", "300ms", "--json", "--", "true", json=False)
    assert (result.code, result.error["code"]) == (125, "deadline")


def test_pinned_attached_and_gone(stage: Stage) -> None:
    run = stage.run("--pin").awake()
    assert lease(stage, "no-such-program").wait(30) == 127
    assert lease(stage, "true", options=("--gpu", "7")).wait(30) == 125
    assert lease(stage, "true").wait(30) == 125, "pinned"
    assert run.state == "awake"
    run.suspended()
    attached = subprocess.Popen([COMMAND, "attach", "m"], env=stage.environ)
    run.until("awake")
    attached.send_signal(signal.SIGTERM)
    assert attached.wait(30) == 0
    assert run.facts["state"] == "suspended"
    attached = subprocess.Popen([COMMAND, "attach", "m"], env=stage.environ)
    run.until("awake")
    os.kill(run.process.pid, signal.SIGTERM)
    assert attached.wait(30) == 1


def test_a_run_that_waits_for_its_gpu_can_be_told_to_end(couple: tuple[Serving, Serving]) -> None:
    """It has started nothing yet, and answers all the same; the one that is served there is not disturbed."""
    _, b = couple
    only_here(b)
    stream = b.begin(stream=True, chunks=4, seconds=2.0)
    eventually(lambda: b.facts["requests_running"], "it runs")
    c = b.stage.run("--share", name="c")
    eventually(lambda: b.facts["held_by"], "c waits for b")
    assert c.ask("status")["error"]["message"] == "the run waits for its GPU, and has started nothing yet"
    assert c.ask("stop")["ok"]
    assert c.end() == 143
    assert "told to end by gpuckpt stop while it waited for its GPU" in c.stderr
    assert stream.result().body.endswith(b"[DONE]\n\n")
    eventually(lambda: b.facts["state"] == "awake" and not b.facts["held_by"], "b is let go")
