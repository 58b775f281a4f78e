"""A run and its child on bad days: names and sockets that are taken, deaths, suspends and resumes that fail."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuckpt import errors
from gpuckpt.model import State
from gpuckpt.supervisor import control, share
from tests.serving import FAKE, PATIENCE_S, Serving, Stage, alive, make_stage, stage
from tests.simulated_machine import COMMAND, eventually

__all__ = ["stage"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """One run for the tests that leave it as it was."""
    made = make_stage(tmp_path_factory.mktemp("plain"))
    yield next(made).run().awake()
    next(made, None)


def test_the_same_name_at_once_after_kill_9(stage: Stage) -> None:
    """Case 20: XTLS/Xray-core#5028, vllm-project/vllm#9737"""
    run = stage.run().awake()
    run.process.kill()
    run.process.wait()
    run = stage.run().awake()
    assert run.complete(id=1).status == 200
    (private,) = stage.runtime.glob("m.????????")  # those of the dead are gone
    assert private.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("what", ["symlink", "server", "file"])
def test_what_is_not_ours_is_never_replaced(stage: Stage, what: str) -> None:
    """Case 20: XTLS/Xray-core#5028"""
    path, elsewhere = stage.runtime / "m.sock", stage.runtime / "precious"
    with contextlib.ExitStack() as held:
        if what == "symlink":
            elsewhere.write_text("x")
            path.symlink_to(elsewhere)
        elif what == "file":
            path.write_text("x")
        else:
            server = held.enter_context(socket.socket(socket.AF_UNIX))
            server.bind(str(path))
            server.listen()
        run = stage.run()
        assert run.end() == 125
        assert "[name-taken]" in run.stderr
        assert path.is_symlink() == (what == "symlink")
        assert path.exists()


def test_two_runs_of_one_name(plain: Serving) -> None:
    second = plain.stage.run()
    assert second.end() == 125
    assert "already called 'm'" in second.stderr
    assert plain.complete(id=1).status == 200


def test_the_port_is_taken(stage: Stage) -> None:
    """Who has it is named, by its pid or as a run, and what to type next."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port, me = s.getsockname()[1], os.getpid()
        words = ("run", "--json", "--name", "m", "--adapter", "vllm", "--listen", port, "--", *FAKE)
        result = stage.machine.gpuckpt(*words, json=False, GPUCKPT_RUNTIME_DIR=str(stage.runtime))
        assert result.code == 125
        error = json.loads(result.stdout)["error"]
        assert (error["code"], error["pid"]) == ("cannot-listen", me)
        assert f"cannot listen on 127.0.0.1:{port}: pid {me} (" in error["message"]
        assert "the command had been started, and was ended" in error["message"]
        assert error["hint"] == f"another port by --listen, or the command's --port; or end it: kill {me}"
    assert stage.machine.used() == 0
    first = stage.run("--listen", "0").awake()
    token = stage.machine.path / "token"
    token.write_text("secret")
    token.chmod(0o600)
    second = stage.run("--admin", f"127.0.0.1:{first.port}", "--admin-token-file", str(token), name="n")
    assert second.end() == 125
    assert f"cannot listen on 127.0.0.1:{first.port}: the run 'm' (pid {first.process.pid}) listens there" in second.stderr
    assert "another port by --admin; or end it: gpuckpt stop m" in second.stderr
    assert "[cannot-listen]" in second.stderr


def test_an_address_that_is_not_ours(stage: Stage) -> None:
    run = stage.run("--listen", "192.0.2.1:0")
    assert run.end() == 125
    assert "192.0.2.1 is no address of this machine" in run.stderr


def test_a_server_that_is_not_ours_is_not_spoken_to(tmp_path: Path) -> None:
    """Case 19: llm-d-incubation/llm-d-fast-model-actuation#388"""

    from gpuckpt.errors import ServerRefused
    from gpuckpt.supervisor.upstream import Connector, Upstream

    with socket.socket(socket.AF_UNIX) as s:
        s.bind(path := f"/tmp/gf-{os.getpid()}")
        try:
            s.listen()

            async def call() -> None:
                upstream = Upstream("http://x", Connector(path, lambda _: False))
                try:
                    await upstream.call("POST", "/sleep", within_s=5)
                finally:
                    await upstream.close()

            with pytest.raises(ServerRefused, match="not part of this run"):
                asyncio.run(call())
        finally:
            Path(path).unlink()


def test_another_user_is_not_answered(plain: Serving) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can be somebody else")
    runtime = plain.stage.runtime
    runtime.chmod(0o755)
    (runtime / "m.sock").chmod(0o777)
    script = (
        "import socket,sys; s=socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]);"
        ' s.sendall(b\'{"schema":1,"command":"stop"}\\n\'); print(s.recv(65536).decode())'
    )
    done = subprocess.run(
        ["/usr/bin/python3", "-c", script, str(runtime / "m.sock")],
        user=65534,
        group=65534,
        capture_output=True,
        text=True,
        check=False,
    )
    assert json.loads(done.stdout)["error"]["code"] == "permission", done
    assert plain.facts["state"] == "awake"


def test_signals_reach_the_command(plain: Serving) -> None:
    assert os.getsid(plain.child) == plain.child != os.getsid(plain.process.pid), "a session of its own"
    plain.signal(signal.SIGUSR1)
    eventually(lambda: plain.notes("usr1"), "it got the signal")


def test_a_supervisor_that_is_stopped_is_named(plain: Serving) -> None:
    run = plain
    assert run.complete(id=1).status == 200
    os.kill(run.process.pid, signal.SIGSTOP)
    try:
        result = run.stage.gpuckpt("suspend", "m", "--timeout", "300ms")
        assert (result.code, result.error["code"], result.error["pid"]) == (124, "deadline", run.process.pid)
        assert f"its supervisor (pid {run.process.pid}) is stopped" in result.error["message"]
        assert result.error["hint"] == f"kill -CONT {run.process.pid}"
    finally:
        os.kill(run.process.pid, signal.SIGCONT)
    run.until("suspended")


def test_a_run_is_waited_for_as_long_as_it_says_how_it_is(plain: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a deadline what is waited for is said, and a run that never answers is an error, also where its queue is full."""
    monkeypatch.setenv("GPUCKPT_RUNTIME_DIR", str(plain.stage.runtime))
    assert plain.complete(id=1).status == 200
    monkeypatch.setattr(control, "LOOK_S", 0.05)
    client = plain.begin(seconds=0.5)
    eventually(lambda: plain.facts["requests_running"], "it runs")
    said: list[str] = []
    assert control.ask("m", "suspend", told=said.append)["ok"]
    assert "it is draining, requests running: 1" in said
    assert client.result().status == 200
    monkeypatch.setattr(control, "ANSWER_S", 0.1)
    pid, waiting = plain.process.pid, contextlib.ExitStack()
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(errors.RunSilent, match=rf"nor say within 0.1 s how it is; its supervisor \(pid {pid}\) is stopped") as caught:
            control.ask("m", "resume")
        assert caught.value.hint == f"kill -CONT {pid}"
        monkeypatch.setattr(share, "ANSWER_S", 0.1)
        assert asyncio.run(asyncio.wait_for(share.ask("m", "give-way", within_s=1.0), 20)) is None
        with waiting, contextlib.suppress(BlockingIOError):
            while True:
                s = waiting.enter_context(socket.socket(socket.AF_UNIX))
                s.setblocking(False)
                s.connect(str(plain.stage.runtime / "m.sock"))
        result = plain.stage.gpuckpt("status", "m", "--timeout", "300ms")
        assert (result.code, result.error["code"], result.error["pid"]) == (124, "deadline", pid)
        result = plain.stage.gpuckpt("lease", "--gpu", "0", "--timeout", "300ms", "--json", "--", "true", json=False)
        assert json.loads(result.stdout)["error"]["hint"] == f"kill -CONT {pid}"
    finally:
        os.kill(pid, signal.SIGCONT)
    assert plain.complete(id=2).status == 200


def test_who_no_longer_waits_for_a_run_is_told_that_it_goes_on(plain: Serving) -> None:
    run = plain
    assert run.complete(id=1).status == 200
    client = run.begin(seconds=1.0)
    eventually(lambda: run.facts["requests_running"], "it runs")
    asking = run.stage.machine.begin("suspend", "m", GPUCKPT_RUNTIME_DIR=str(run.stage.runtime))
    run.until("draining")
    asking.signal(signal.SIGINT)
    result = asking.end()
    assert (result.code, result.error["code"]) == (130, "interrupted")
    assert "the run 'm' goes on with the suspend that it was asked for" in result.error["message"]
    assert client.result().status == 200
    run.until("suspended")


def test_a_control_request_that_makes_no_sense_touches_nothing(plain: Serving) -> None:
    assert plain.complete(id=1).status == 200
    drained = plain.stderr.count(": draining\n")
    told: list[object] = [
        *({"command": "suspend", "drain_s": d} for d in ("abc", -1, True, [], float("nan"), float("inf"), 1e300)),
        *({"command": c} for c in (["suspend"], {}, None, 1, "sleep")),
        *([], 1, "suspend", None, {}, {"command": "suspend", "schema": 2}),
        *({"command": "give-way", **w} for w in ({}, {"within_s": "soon"}, {"within_s": None})),
        {"command": "hold"},
        {"command": "hold", "gpus": None, "by": "x"},
        {"command": "hold", "gpus": "GPU-0", "by": "x", "within_s": 1},
        {"command": "hold", "gpus": [1], "by": "x", "within_s": 1},
        {"command": "hold", "gpus": None, "by": 1, "within_s": 1},
        {"command": "to-disk"},
    ]
    lines = [json.dumps({"schema": 1, **t} if isinstance(t, dict) else t) for t in told]
    for line in (*lines, "[" * 100_000):
        with socket.socket(socket.AF_UNIX) as s:
            s.settimeout(PATIENCE_S)
            s.connect(str(plain.stage.runtime / "m.sock"))
            s.sendall(line.encode() + b"\n")
            answer = json.loads(s.makefile("rb").readline())
        assert answer["error"]["code"] == "usage", (line[:100], answer)
    assert plain.facts["state"] == "awake"
    assert plain.stderr.count(": draining\n") == drained
    assert plain.suspended().complete(id=1).status == 200


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
