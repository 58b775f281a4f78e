"""Runs that do not fit on one GPU together: they take turns, are swapped, and leave it to a lease."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpuckpt.supervisor.share import chosen_gpus
from tests.conftest import COMMAND, eventually
from tests.serving import Serving, Stage, stage

__all__ = ["stage"]

#: Two of these are more than the 80 GiB of the card; asleep, they would fit.
LARGE = ("--gib", "50", "--sleep-frees", "45")


def pair(stage: Stage, *options: str, **more: tuple[str, ...]) -> tuple[Serving, Serving]:
    """Two runs that share, the second awake."""
    words = ("--share", "--least-awake", "100ms", *options)
    a = stage.run(*words, fake=(*LARGE, *more.get("fake", ())), name="a").awake()
    b = stage.run(*words, fake=(*LARGE, *more.get("fake", ())), name="b").awake()
    return a, b


def swaps(*runs: Serving) -> int:
    return sum(r.stderr.count(": suspended\n") for r in runs)


def sound(*runs: Serving) -> None:
    """Nobody computed asleep, or woke to a full card."""
    for r in runs:
        assert not r.notes("computed asleep")
        assert not r.notes("out of memory")


def test_two_models_take_turns_on_one_gpu(stage: Stage) -> None:
    a, b = pair(stage)
    assert a.state == "suspended", "it left for the other to start"
    for n in range(3):
        for run in (a, b):
            answer = run.complete(id=n)
            assert (answer.status, answer.json["id"]) == (200, n)
    sound(a, b)
    assert a.facts["gpu_bytes"] == b.facts["gpu_bytes"] == {stage.machine.uuids[0]: 50 << 30}
    assert swaps(a, b) >= 6


def test_a_resume_leaves_room_for_the_wake(stage: Stage) -> None:
    """Without --share too: what vLLM takes when it wakes up must be free before the driver restores anything."""
    a = stage.run("--hold", "400ms", fake=LARGE, name="a").awake().suspended()
    other = stage.machine.target("--gib", "60")
    assert a.complete(id=1).status == 503
    eventually(lambda: a.facts["state"] == "suspended", "it is suspended again")
    assert a.facts["last_error"]["code"] == "gpu-memory"
    other.kill()
    eventually(lambda: a.complete(id=2).status == 200, "it serves again")
    sound(a)


def test_a_run_with_requests_running_is_not_asked_to_leave(stage: Stage) -> None:
    a, b = pair(stage)
    stream = b.begin(stream=True, chunks=4, seconds=2.0)
    eventually(lambda: b.facts["requests_running"], "it runs")
    first = a.begin(id=1)
    assert stream.result().body.endswith(b"[DONE]\n\n")
    assert first.result().status == 200
    assert first.ended > stream.ended
    assert not b.notes("cut")
    assert b.notes("sleep")[-1]["running"] == 0
    sound(a, b)


def test_the_least_recently_used_leaves(stage: Stage) -> None:
    words = ("--share", "--least-awake", "100ms")
    runs = [stage.run(*words, fake=("--gib", "30"), name=n).awake() for n in ("a", "b", "c")]
    a, b, c = runs
    if a.state == "suspended":  # it left for the start of another
        assert a.complete(id=0).status == 200
    for run in (b, a):
        assert run.complete(id=1).status == 200
    before = [r.facts["state"] for r in runs]
    assert before.count("awake") == 2
    assert c.state == "suspended" or c.facts["used_at"] < a.facts["used_at"]
    if c.state == "awake":
        pytest.fail(f"{before}: c, which nobody used, was not the one that left")
    assert c.complete(id=1).status == 200
    assert (a.facts["state"], b.facts["state"]) == ("awake", "suspended"), "b was used before a"


def test_a_pinned_run_stays(stage: Stage) -> None:
    a = stage.run("--share", "--least-awake", "100ms", "--hold", "1s", fake=LARGE, name="a").awake().suspended()
    b = stage.run("--share", "--pin", "--least-awake", "100ms", fake=LARGE, name="b").awake()
    assert a.complete(id=1).status == 503
    assert b.state == "awake"
    result = stage.gpuckpt("swap", "b", "a")
    assert result.code == 0, "what a person types is done"
    assert a.complete(id=2).status == 200


def test_a_requester_that_gives_up(stage: Stage) -> None:
    """Case 9: mostlygeek/llama-swap#727"""
    a, b = pair(stage)
    b.suspended()
    stage.machine.slow(0.15)
    body = '{"id": "gone"}'
    with a.dial(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}"):
        a.until("resuming")
    answer = b.complete(id="here")
    assert answer.json["id"] == "here"
    eventually(lambda: a.facts["state"] == "suspended", "it is suspended again")
    assert not [n for n in a.notes("begin") if n["path"] == "/v1/completions"]
    sound(a, b)


def test_nobody_is_swapped_out_for_a_client_that_left(stage: Stage) -> None:
    """Case 9"""
    a, b = pair(stage)
    stream = b.begin(stream=True, chunks=4, seconds=2.0)
    eventually(lambda: b.facts["requests_running"], "it runs")
    body = '{"id": "gone"}'
    with a.dial(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}"):
        a.until("resuming")
    a.until("suspended")
    assert stream.result().status == 200
    assert b.state == "awake"


def test_twenty_jobs_and_one_chat(stage: Stage) -> None:
    """Case 10: mostlygeek/llama-swap#588"""
    a, b = pair(stage, "--least-awake", "300ms", fake=("--at-once", "1", "--slow-sleep", "0.1", "--slow-wake", "0.1"))
    before = swaps(a, b)
    jobs = []
    for n in range(20):
        jobs.append(a.begin({"X-N": str(n)}, id=n, seconds=0.05))
        eventually(lambda n=n: a.facts["requests_waiting"] + a.facts["requests_running"] > n or a.notes("begin"), "it came")
    chat = b.begin(id="chat")
    assert chat.result().json["id"] == "chat"
    assert [j.result().json["id"] for j in jobs] == list(range(20))
    assert swaps(a, b) - before <= 3
    sound(a, b)


def test_contention_serves_everybody(stage: Stage) -> None:
    """Three runs, clients on each all the time: each is served, in bounded time, by a bounded number of swaps."""
    words = ("--share", "--least-awake", "100ms")
    runs = [stage.run(*words, fake=LARGE, name=n).awake() for n in ("a", "b", "c")]
    before, begun = swaps(*runs), time.monotonic()
    clients = [run.begin(id=n, seconds=0.1) for n in range(5) for run in runs]
    for n in range(2):
        clients += [run.begin(id=n) for run in runs]
        assert all(c.result().status == 200 for c in clients)
    assert swaps(*runs) - before <= (time.monotonic() - begun) / 0.1
    sound(*runs)


def test_kill_9_of_the_one_that_waits(stage: Stage) -> None:
    a, b = pair(stage)
    stream = b.begin(stream=True, chunks=4, seconds=1.5)
    eventually(lambda: b.facts["requests_running"], "it runs")
    a.begin(id=1)
    a.until("resuming")
    a.process.kill()
    assert stream.result().status == 200
    assert b.complete(id=2).status == 200


def test_a_suspend_that_fails_half_way_does_not_wake_to_a_full_card(stage: Stage) -> None:
    """What it gave up asleep another has taken meanwhile: it sleeps on, and is woken when there is room."""
    a, b = pair(stage)
    assert b.complete(id=0).status == 200
    stage.machine.world.add_fault("lock", pid=b.child, result="UNKNOWN", delay_s=2.0)
    first = a.begin(id=1)
    assert first.result().status == 200
    eventually(lambda: "it sleeps on" in b.stderr, "its suspend failed, and there was no room for it to wake up")
    assert b.complete(id=2).status == 200
    sound(a, b)


# Swap.


def test_swap(stage: Stage) -> None:
    a, b = stage.run(fake=LARGE, name="a").awake().suspended(), stage.run(fake=LARGE, name="b").awake()
    result = stage.gpuckpt("swap", "b", "a")
    assert result.code == 0, result
    assert (a.facts["state"], b.facts["state"]) == ("awake", "suspended")
    assert (result.document["out"], result.document["in"]) == ("b", "a")
    assert stage.gpuckpt("swap", "a", "a").code == 2
    assert stage.gpuckpt("swap", "a", "no-such").error["code"] == "usage"
    assert a.facts["state"] == "awake"
    sound(a, b)


def test_where_in_fails_out_comes_back(stage: Stage) -> None:
    stage.run(fake=("--status", "/wake_up=500"), name="a").awake().suspended()
    b = stage.run(name="b").awake()
    result = stage.gpuckpt("swap", "b", "a", json=False)
    assert result.code == 1
    assert "b is awake again" in result.stderr
    assert b.facts["state"] == "awake"
    b.suspended()
    result = stage.gpuckpt("swap", "b", "a", json=False)
    assert "b is suspended, as it was" in result.stderr
    assert b.facts["state"] == "suspended"


def test_swap_of_pids(stage: Stage) -> None:
    one, two = stage.machine.target("--gib", "50"), stage.machine.target("--gib", "20")
    assert stage.gpuckpt("suspend", two.pid).code == 0
    assert stage.gpuckpt("swap", str(one.pid), str(two.pid)).code == 0
    assert two.unharmed()
    assert stage.gpuckpt("swap", str(two.pid), str(one.pid)).code == 0
    assert one.unharmed()


# Lease.


def lease(stage: Stage, *words: str, options: tuple[str, ...] = ("--gpu", "0")) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [COMMAND, "lease", *options, "--", *words], env=stage.environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    stage.machine.commands.append(process)
    return process


def test_a_lease_holds_the_wakes_and_lets_them_back(stage: Stage) -> None:
    a, b = pair(stage)
    held = lease(stage, "cat")
    b.until("suspended")
    eventually(lambda: a.facts["held_by"] and b.facts["held_by"], "both are held")
    assert stage.machine.used() == 0
    clients = [run.begin(id=1) for run in (a, b)]
    eventually(lambda: a.facts["requests_waiting"] and b.facts["requests_waiting"], "they wait")
    for command in ("resume", "swap"):
        result = stage.gpuckpt(command, *(["b"] if command == "resume" else ["a", "b"]))
        assert (result.code, result.error["code"]) == (1, "leased")
        assert f"pid {held.pid}" in result.error["message"]
    assert stage.machine.used() == 0
    assert held.communicate("")[0] == ""
    assert held.returncode == 0
    assert [c.result().status for c in clients] == [200, 200]
    sound(a, b)


def test_an_idle_run_is_back_after_the_lease(stage: Stage) -> None:
    a = stage.run(name="a").awake()
    b = stage.run(name="b").awake().suspended()
    done = lease(stage, "sh", "-c", "exit 7")
    assert done.wait(30) == 7
    eventually(lambda: a.facts["state"] == "awake" and not a.facts["held_by"], "it is back")
    assert b.facts["state"] == "suspended", "as it was found"


@pytest.mark.parametrize("who", ["while it waits", "while it holds"])
def test_kill_9_of_a_lease(stage: Stage, who: str) -> None:
    a = stage.run(name="a").awake()
    stream = a.begin(stream=True, chunks=3, seconds=2.0) if who == "while it waits" else None
    eventually(lambda: a.facts["requests_running"] == (stream is not None), "it runs")
    held = lease(stage, "sleep", "600")
    eventually(lambda: a.facts["held_by"], "it is held")
    if stream is None:
        a.until("suspended")
        eventually(lambda: Path(f"/proc/{held.pid}/comm").read_text() == "sleep\n", "the command runs")
    held.kill()
    held.wait()
    if stream is not None:
        assert stream.result().body.endswith(b"[DONE]\n\n")
    assert a.complete(id=1).status == 200
    eventually(lambda: a.facts["held_by"] is None, "it is free")


def test_a_lease_waits_for_what_runs_and_gives_up_in_time(stage: Stage) -> None:
    a = stage.run(name="a").awake()
    stream = a.begin(stream=True, chunks=3, seconds=2.5)
    eventually(lambda: a.facts["requests_running"], "it runs")
    hasty = lease(stage, "true", options=("--gpu", "0", "--timeout", "300ms"))
    assert hasty.wait(30) == 125
    assert lease(stage, "true").wait(30) == 0
    assert stream.result().body.endswith(b"[DONE]\n\n")
    assert a.complete(id=1).status == 200


def test_a_lease_that_cannot_be(stage: Stage) -> None:
    run = stage.run("--pin", name="a").awake()
    assert lease(stage, "no-such-program").wait(30) == 127
    assert lease(stage, "true", options=("--gpu", "7")).wait(30) == 125
    assert lease(stage, "true").wait(30) == 125, "pinned"
    assert run.state == "awake"


def test_two_leases_come_one_after_the_other(stage: Stage) -> None:
    first = lease(stage, "cat")
    eventually(lambda: Path(f"/proc/{first.pid}/comm").read_text() == "cat\n", "it runs")
    assert lease(stage, "true", options=("--gpu", "0", "--timeout", "300ms")).wait(30) == 125
    first.communicate("")
    assert lease(stage, "true").wait(30) == 0


def test_a_lease_in_python(stage: Stage) -> None:
    a = stage.run(name="a").awake()
    script = (
        "import gpuckpt, sys\n"
        "with gpuckpt.lease(0, timeout_s=20) as held:\n    print(held.runs, flush=True); sys.stdin.readline()\n"
        "print('out', flush=True); sys.stdin.readline()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], env=stage.environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    stage.machine.commands.append(process)
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == "['a']\n"
    assert stage.machine.used() == 0
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "out\n"
    eventually(lambda: a.facts["state"] == "awake", "it is back while the program lives on")


def test_attach(stage: Stage) -> None:
    a = stage.run(name="a").awake().suspended()
    attached = subprocess.Popen([COMMAND, "attach", "a"], env=stage.environ)
    stage.machine.commands.append(attached)  # type: ignore[arg-type]
    a.until("awake")
    assert a.complete(id=1).status == 200
    attached.send_signal(signal.SIGTERM)
    assert attached.wait(30) == 0
    assert a.facts["state"] == "suspended"
    attached = subprocess.Popen([COMMAND, "attach", "a"], env=stage.environ)
    stage.machine.commands.append(attached)  # type: ignore[arg-type]
    a.until("awake")
    os.kill(a.process.pid, signal.SIGTERM)
    assert attached.wait(30) == 1


def test_which_gpus_a_command_will_use() -> None:
    gpus = [{"uuid": f"GPU-{c}", "index": i} for i, c in enumerate("abcd")]
    assert chosen_gpus(gpus, {}, 1) == ["GPU-a"]
    assert chosen_gpus(gpus, {}, None) == ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]
    assert chosen_gpus(gpus, {"CUDA_VISIBLE_DEVICES": "2,1"}, 2) == ["GPU-c", "GPU-b"]
    assert chosen_gpus(gpus, {"CUDA_VISIBLE_DEVICES": "GPU-d, 0"}, None) == ["GPU-d", "GPU-a"]
    assert chosen_gpus(gpus, {"CUDA_VISIBLE_DEVICES": ""}, None) == []
    assert json.dumps(chosen_gpus(gpus, {"CUDA_VISIBLE_DEVICES": "9"}, None)) == "[]"
