"""A child that outlives its supervisor, and the next one that comes for it."""

from __future__ import annotations

import signal
import socket
import subprocess

from tests.serving import Stage, alive, stage
from tests.simulated_machine import COMMAND, eventually

__all__ = ["stage"]


def test_keep_child(stage: Stage) -> None:
    run = stage.run("--keep-child").awake()
    child = run.child
    run.process.kill()
    run.process.wait()
    result = stage.gpuckpt("status", "m")
    assert (result.code, result.error["code"]) == (2, "usage")
    assert f"its child, pid {child}" in result.error["message"]
    result = stage.gpuckpt("recover")
    assert f"its child, pid {child}" in result.document["warnings"][0]
    assert "the same gpuckpt run --name m adopts it" in result.document["warnings"][0]
    for command in ("suspend", "resume"):
        assert stage.gpuckpt(command, str(child)).code == 0
    assert alive(child)
    second = stage.run(fake=("--golden", "another"))
    assert second.end() == 125
    assert "[name-taken]" in second.stderr
    assert str(child) in second.stderr


def test_a_kept_child_is_adopted(stage: Stage) -> None:
    """An upgrade of gpuckpt costs no cold start, whatever it was doing when the last one died."""
    stage.machine.slow(0.05)
    run = stage.run("--keep-child", fake=("--sleep-frees", "6")).awake()
    child = run.child
    for state in ("awake", "suspended by pid", "suspended", "suspending", "resuming"):
        if state in ("suspended", "resuming"):
            run.suspended()
        if state in ("suspending", "resuming"):
            words = [COMMAND, {"suspending": "suspend", "resuming": "resume"}[state], "m"]
            order = subprocess.Popen(words, env=stage.environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            stage.machine.commands.append(order)  # type: ignore[arg-type]
            run.until(state)
        run.process.kill()
        run.process.wait()
        if state == "suspended by pid":
            assert stage.gpuckpt("suspend", str(child)).code == 0
        run = stage.run("--keep-child", fake=("--sleep-frees", "6"))
        assert run.complete_when_it_listens(id=state).status == 200, (state, run.stderr)
        assert f"adopted pid {child}" in run.stderr
        assert len(run.notes("ready")) == 1, "no other was started"
    assert not run.notes("computed asleep")
    run.suspended()
    assert stage.machine.used() == 0
    run.signal(signal.SIGTERM)
    assert run.end() == 143
    eventually(lambda: not alive(child), "it ended")
    assert list(stage.runtime.glob("m.*")) == [stage.runtime / "m.lock"]


def test_an_adoption_that_fails_leaves_the_child_alone(stage: Stage) -> None:
    run = stage.run("--keep-child", "--listen", "0").awake()
    child = run.child
    run.process.kill()
    run.process.wait()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        failed = stage.run("--keep-child", "--listen", str(s.getsockname()[1]))
        assert failed.end() == 125
    assert alive(child)
    assert stage.run("--listen", "0").complete_when_it_listens(id=1).status == 200
