"""What a run is called by, and who may talk to it: its name, its sockets, its ports, its control socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuckpt import errors
from gpuckpt.supervisor import control, share
from tests.serving import FAKE, PATIENCE_S, Serving, Stage, make_stage, stage
from tests.simulated_machine import eventually

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
    for command in ("suspend", "stop"):
        assert "the runs of yours are m" in plain.stage.gpuckpt(command, "none").error["hint"]
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


def test_a_server_that_is_there_already_is_not_taken_for_ours(stage: Stage) -> None:
    """Case 19: llm-d-incubation/llm-d-fast-model-actuation#388. Case 21: dryvist/nix-ai#1182. By its URL alone it could not be told."""
    with socket.create_server(("127.0.0.1", 0)) as s:
        at = f"http://127.0.0.1:{s.getsockname()[1]}"
        words = ("run", "--json", "--upstream", at, "--listen", "0", "--", "touch", "started")
        result = stage.machine.gpuckpt(*words, json=False, GPUCKPT_RUNTIME_DIR=str(stage.runtime))
    assert (result.code, result.error["code"], result.error["pid"]) == (125, "cannot-listen", os.getpid())
    assert f"listens at {at}, where the command is to serve once it has been started; nothing was started" in result.error["message"]
    assert not (stage.machine.path / "started").exists()


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
