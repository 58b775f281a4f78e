"""The runtime directory of a run is swept away while it lives: its user has logged out, or a cleaner of /tmp came by."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import socket
from pathlib import Path

import pytest

from gpuckpt import errors
from gpuckpt.inspect import processes
from gpuckpt.supervisor import lease, places, swept
from gpuckpt.supervisor.upstream import Connector
from tests.serving import Serving, Stage, alive, stage
from tests.simulated_machine import eventually

__all__ = ["stage"]

ANEW = "were removed by somebody else, and are made anew"


def serve_all(run: Serving, n: int = 4) -> None:
    """More requests at once than there are connections that could be used again."""
    assert [c.result().status for c in [run.begin(id=i) for i in range(n)]] == [200] * n, run.stderr


def test_it_serves_on_and_is_found_again(stage: Stage) -> None:
    """Requests reach the server at once; its name is taken all the while; then all commands find it again."""
    run = stage.run().awake()
    shutil.rmtree(stage.runtime)
    serve_all(run)
    eventually(lambda: ANEW in run.stderr, "it is made anew")
    assert stage.gpuckpt("suspend", "m").code == 0
    assert stage.machine.used() == 0
    assert stage.gpuckpt("lease", "--gpu", "0", "--", "true", json=False).code == 0
    serve_all(run)
    assert stage.gpuckpt("stop", "m").code == 0
    run.end()
    run.nothing_left()
    assert list(stage.runtime.glob("m.*")) == [stage.runtime / "m.lock"]


def test_its_name_stays_taken(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can have it between the sweep and the making anew, however long that takes."""
    monkeypatch.setattr(places, "TAKEN_WAIT_S", 0.1)
    environ = {"GPUCKPT_RUNTIME_DIR": str(stage.runtime)}
    run = stage.run().awake()
    run.signal(signal.SIGSTOP)
    try:
        shutil.rmtree(stage.runtime)
        for _ in range(2):  # the first leaves a lock file of its own
            with pytest.raises(errors.NameTaken, match=f"pid {run.process.pid}, its child is pid {run.child}"):
                places.Place("m", environ)
        with places.Place("n", environ):
            pass
    finally:
        run.signal(signal.SIGCONT)
    eventually(lambda: ANEW in run.stderr, "it is made anew")
    assert stage.gpuckpt("status", "m").code == 0


def test_a_kept_child_is_adopted_all_the_same(stage: Stage) -> None:
    """Its keeper makes the offer anew, alone too, and hands on the way to a server whose socket has no path any more."""
    run = stage.run("--keep-child").awake()
    child = run.child
    keeper = Path(f"/proc/{processes.table()[child].ppid}/fd")
    eventually(lambda: any(str(fd.readlink()).endswith("http.sock") for fd in keeper.iterdir()), "the keeper knows the way")
    shutil.rmtree(stage.runtime)
    eventually(lambda: ANEW in run.stderr and (stage.runtime / "m.keeper").exists(), "it is made anew")
    run.process.kill()
    run.process.wait()
    shutil.rmtree(stage.runtime)
    eventually(lambda: places.orphan_facts("m", {"GPUCKPT_RUNTIME_DIR": str(stage.runtime)}), "the offer is there again")
    run = stage.run("--keep-child")
    assert run.complete_when_it_listens(id=1).status == 200, run.stderr
    assert f"adopted pid {child}" in run.stderr
    serve_all(run)
    run.suspended()
    run.signal(signal.SIGTERM)
    assert run.end() == 143
    eventually(lambda: not alive(child), "it ended")


def test_where_somebody_else_made_something_it_is_not_used(stage: Stage, tmp_path: Path) -> None:
    """It goes to sleep and wakes up all the same, and who is attached to it stays so."""
    run = stage.run("--idle", "300ms").awake()
    attached = stage.machine.begin("attach", "m", json=False, GPUCKPT_RUNTIME_DIR=str(stage.runtime))
    assert attached.process.stderr is not None
    assert "m is awake" in attached.process.stderr.readline()
    shutil.rmtree(stage.runtime)
    stage.runtime.symlink_to(tmp_path)
    run.until("suspended")
    assert run.complete(id=1).status == 200
    eventually(lambda: "is not a directory of ours. It serves on" in run.stderr, "that is said")
    assert f"kill {run.process.pid} ends it in order" in run.stderr
    assert not list(tmp_path.glob("*.sock"))
    assert places.with_sockets({"GPUCKPT_RUNTIME_DIR": str(stage.runtime)}) == []
    other = stage.run(name="o")
    assert other.end() == 125
    assert "is not a directory of ours; nothing was started" in other.stderr
    stage.runtime.unlink()
    eventually(lambda: ANEW in run.stderr, "it is made anew")
    assert attached.process.poll() is None
    attached.signal(signal.SIGTERM)
    assert attached.end().code == 0
    assert run.state == "suspended"


def test_a_lock_that_cannot_be_written_now_can_be_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full for a while: what was begun then is in the way of nobody."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    hold = swept.Hold(tmp_path / "m.lock")
    assert hold.take(0.0) is None
    hold.write("who it is")
    hold.path.unlink()
    with monkeypatch.context() as patched:
        patched.setattr(swept, "_write", full)
        for _ in range(2):
            with pytest.raises(OSError, match="No space left"):
                hold.again()
    hold.again()
    assert hold.whole
    assert hold.read() == "who it is"
    hold.close()


def test_a_server_is_reached_where_it_listens_now_or_listened_last(tmp_path: Path) -> None:
    path = tmp_path / "s"

    def listener() -> socket.socket:
        made = socket.socket(socket.AF_UNIX)
        made.bind(str(path))
        made.listen()
        return made

    async def connect() -> None:
        connector = Connector(str(path), lambda _: True)
        with pytest.raises(FileNotFoundError):
            await connector.dial()
        for _ in range(2):
            with contextlib.closing(listener()) as server:
                for gone in (False, True):
                    if gone:
                        path.unlink()
                    protocol = await connector.dial()
                    server.accept()[0].close()
                    protocol.close()
        connector.way.forget()
        await connector.close()

    asyncio.run(connect())


def test_a_lease_whose_lock_was_swept_away_holds(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUCKPT_RUNTIME_DIR", str(stage.runtime))
    words = ("lease", "--gpu", "0", "--", "sh", "-c", "touch started; exec sleep 60")
    holding = stage.machine.begin(*words, json=False, GPUCKPT_RUNTIME_DIR=str(stage.runtime))
    try:
        eventually((stage.machine.path / "started").exists, "it holds its GPU")
        uuid = next(stage.runtime.glob("*.lease")).stem
        shutil.rmtree(stage.runtime)
        with pytest.raises(errors.Busy, match=f"{uuid} is leased already by pid {holding.process.pid}"):
            lease.Lease([uuid], within_s=0.05)
    finally:
        os.kill(holding.process.pid, signal.SIGKILL)
