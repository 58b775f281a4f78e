"""A run and its child on bad days: deaths, suspends and resumes that fail, what is left when it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpuckpt.model import State
from tests.serving import Stage, alive, stage
from tests.simulated_machine import COMMAND, eventually

__all__ = ["stage"]


def test_the_child_dies_while_suspended(stage: Stage) -> None:
    run = stage.run().awake().suspended()
    os.kill(run.child, signal.SIGKILL)
    assert run.end() == 137
    run.nothing_left()


def test_the_child_dies_while_requests_are_held(stage: Stage) -> None:
    run = stage.run(fake=("--slow-wake", "20")).awake().suspended()
    client = run.begin(id=1)
    eventually(lambda: run.notes("begin")[-1]["path"] == "/wake_up", "it wakes up")
    os.kill(run.child, signal.SIGKILL)
    answer = client.result()
    assert answer.status == 502
    assert "ended with exit code 137" in answer.error["message"]
    assert run.end() == 137


def test_the_child_dies_in_an_answer(stage: Stage) -> None:
    run = stage.run().awake()
    client = run.begin(stream=True, chunks=3, seconds=0.3, dies_at=1)
    client.join(30)
    assert client.answer is None, "an answer that was cut short must not look whole"
    assert run.end() == 67


def test_an_engine_that_dies_behind_a_healthy_front_ends_the_run(stage: Stage) -> None:
    run = stage.run(fake=("--engine",)).awake()
    engine = next(p for p in run.tree if b"VLLM::" in Path(f"/proc/{p}/cmdline").read_bytes())
    os.kill(engine, signal.SIGKILL)
    assert run.end() == 125
    assert f"pid {engine}, an engine of the server, died" in run.stderr
    run.nothing_left()


def test_no_room_at_resume(stage: Stage) -> None:
    """Held requests get 503; the image is kept; it works when there is room. sgl-project/sglang#14092"""
    run = stage.run("--hold", "500ms").awake().suspended()
    other = stage.machine.target("--gib", "76")
    clients = [run.begin(id=n) for n in range(3)]
    answers = [c.result() for c in clients]
    assert {a.status for a in answers} == {503}
    assert all(1 <= int(a.headers["retry-after"]) <= 120 for a in answers)
    eventually(lambda: run.facts["state"] == "suspended", "it is suspended again")
    assert stage.machine.world.peek().rules.state(run.child) is State.CHECKPOINTED
    assert run.facts["last_error"]["code"] == "gpu-memory"
    result = stage.gpuckpt("resume", "m")
    assert (result.code, result.error["code"]) == (6, "gpu-memory")
    other.kill()
    eventually(lambda: run.complete(id=9).status == 200, "it serves again")
    assert not run.notes("computed asleep")


def test_who_holds_the_card_is_named_with_its_run(stage: Stage) -> None:
    """Case 40, llm-d-fast-model-actuation#720: memory of a dead instance stayed, and nothing said whose it was. Nothing is ended for it."""
    run = stage.run("--keep-child", name="other", fake=("--gib", "70")).awake()
    child = run.child
    run.suspended()
    away = stage.run("--hold", "300ms", name="m", fake=("--gib", "70")).awake().suspended()
    assert run.ask("resume")["ok"]
    run.process.kill()
    run.process.wait()
    error = away.ask("resume")["error"]
    assert error["code"] == "gpu-memory"
    assert f"pid {child} (" in error["message"]
    assert "run other), started " in error["message"]
    assert f"kill {child}" in error["hint"]
    assert stage.machine.world.peek().rules.state(child) is State.RUNNING
    os.kill(child, signal.SIGKILL)
    eventually(lambda: away.complete(id=9).status == 200, "it serves again")


def test_a_failed_restore_ends_the_run(stage: Stage) -> None:
    run = stage.run().awake().suspended()
    stage.machine.world.add_fault("restore", result="OUT_OF_MEMORY", times=9, before=False)
    with stage.machine.world.transaction() as world:
        world.rules.processes[run.child].lost = True
    answer = run.complete(id=1)
    assert answer.status in (502, 503)
    assert run.end() == 125, run.stderr
    run.nothing_left()


def test_a_driver_call_that_hangs_does_not_hang_the_gate(stage: Stage) -> None:
    run = stage.run("--timeout", "1s").awake()
    stage.machine.world.add_fault("checkpoint", hang=True)
    order = subprocess.Popen([COMMAND, "suspend", "m", "--json"], env=stage.environ, stdout=subprocess.PIPE, text=True)
    while order.poll() is None:
        assert run.get("/v1/models").status == 200
        assert run.get("/health").status in (200, 503)
        time.sleep(0.2)
    document = json.loads(order.communicate()[0])
    assert (order.returncode, document["error"]["code"]) == (3, "in-flight")
    assert run.facts["state"] == "failed"
    assert run.get("/health").status == 503
    assert run.complete(id=1).status == 200, "the next request tried again, and the driver answered"


def test_what_refuses_a_suspend_or_a_wake_loses_nothing(stage: Stage) -> None:
    """Host memory, and the server itself. Where it does not wake it has failed, and can be asked again."""
    run = stage.run().awake()
    stage.machine.host_memory(16, 1)
    result = stage.gpuckpt("suspend", "m")
    assert (result.code, result.error["code"]) == (6, "host-memory")
    assert run.complete(id=1).status == 200
    assert len(run.notes("woken")) == 1
    assert run.facts["last_error"]["code"] == "host-memory"
    stage.machine.host_memory(512, 256)
    run.set(status={"/sleep": "500"})
    assert run.ask("suspend")["error"]["code"] == "server-refused"
    assert run.complete(id=1).status == 200
    run.set(status={"/sleep": "", "/wake_up": "500"})
    answer = run.suspended().complete(id=1)
    assert (answer.status, answer.error["code"]) == (503, "server-refused")
    assert run.facts["state"] == "failed"
    assert run.get("/health").status == 503
    result = stage.gpuckpt("resume", "m")
    assert (result.code, result.error["code"]) == (1, "server-refused")
    run.signal(signal.SIGTERM)
    assert run.end() == 0


def test_what_is_refused_in_any_case_is_refused_before_it_sleeps(stage: Stage) -> None:
    """It would lose its cache for nothing."""
    run = stage.run("--idle", "300ms", fake=("--workers", "1")).awake()
    eventually(lambda: stage.machine.used() > 8 << 30, "the worker is there")
    result = stage.gpuckpt("suspend", "m")
    assert (result.code, result.error["code"]) == (6, "possible-import")
    eventually(lambda: "idle, but not suspended" in run.stderr, "the idle clock was refused too")
    assert run.state == "awake"
    assert not run.notes("sleep")
    assert run.complete(id=1).status == 200


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["sh", "-c", "exit 3"], 3),
        (["sh", "-c", "kill -9 $$"], 137),
        (["sh", "-c", "kill -15 $$"], 143),
        (["/etc/passwd"], 126),
        (["no-such-program"], 127),
    ],
)
def test_exit_codes(stage: Stage, command: list[str], code: int) -> None:
    done = subprocess.run([COMMAND, "run", "--", *command], env=stage.environ, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr


def test_children_that_were_left_are_ended_and_orphans_reaped(stage: Stage) -> None:
    script = "import os\nfor _ in range(20):\n    if os.fork() == 0:\n        os.fork()\n        os._exit(0)\n    os.wait()\n"
    left = "import subprocess,sys; p = subprocess.Popen(['sleep', '600'], start_new_session=True); print(p.pid, flush=True)"
    for text in (script, left):
        done = subprocess.run(
            [COMMAND, "run", "--", sys.executable, "-c", text], env=stage.environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        for pid in map(int, done.stdout.split()):
            assert not alive(pid)


def test_two_runs_of_one_parent_are_not_one_group(stage: Stage) -> None:
    """Each run is a tree of its own, whoever started it, and in one container too."""
    one, two = stage.run(name="one").awake(), stage.run(name="two").awake()
    stage.machine.lay({f"proc/{pid}/cgroup": "0::/pod/a\n" for pid in (*one.tree, *two.tree)})
    assert stage.gpuckpt("suspend", "one").code == 0
    assert two.complete(id=1).status == 200
    assert one.complete(id=1).status == 200
