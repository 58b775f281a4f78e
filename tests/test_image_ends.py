"""An image in a file, and who ends, stops, is upgraded or is lost meanwhile: the process, whoever moves it, the journal."""

from __future__ import annotations

import contextlib
import os
import signal
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuckpt import claims, errors, keeping
from gpuckpt.driver.cuda import CudaDriver
from gpuckpt.image import file, keeper, memory, page
from gpuckpt.model import Call, Outcome
from tests.image_machine import MIB
from tests.image_suspended import NBYTES, Suspended


@pytest.mark.parametrize("call", [Call.STORE, Call.LOAD])
def test_the_process_is_killed_while_its_image_is_moved(suspended: Suspended, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of the dead reads as empty and takes nothing, without an error: whoever goes on until all is moved never ends."""
    if call is Call.LOAD:
        suspended.keep()
    empty = 0

    def killing(real: Callable[..., int]) -> Callable[..., int]:
        def move(fd: int, data: Any, offset: int) -> int:
            nonlocal empty
            part = os.readlink(f"/proc/self/fd/{fd}").endswith("/mem") and sum(map(len, data if isinstance(data, list) else [data])) >= MIB
            if part:
                suspended.program.process.kill()
                suspended.program.process.wait()
            moved = real(fd, data, offset)
            empty += part and moved == 0
            assert empty < 100, "it goes on for ever"
            return moved

        return move

    monkeypatch.setattr(os, "preadv", killing(os.preadv))
    monkeypatch.setattr(os, "pwrite", killing(os.pwrite))
    with pytest.raises(errors.GpuckptError, match="No such process"):
        suspended.call(call)
    assert list(suspended.directory.iterdir()) == []


def test_a_writer_that_is_killed_leaves_no_disk_taken(suspended: Suspended) -> None:
    """The file has lost its name by then, and only its process could tell of it."""
    suspended.call(Call.STORE)
    path, process = suspended.opened(), suspended.program.id
    killed = types.SimpleNamespace(outcome=Outcome("VANISHED"))
    world = types.SimpleNamespace(interruptions=[], now=lambda: 0.0, start=lambda *_, **__: killed)
    walk: Any = types.SimpleNamespace(
        world=world, step=contextlib.nullcontext, record=world, deadline=types.SimpleNamespace(at=0.0), nbytes=0, claims=()
    )
    _, (failure,) = keeping._calls(walk, Call.STORE, {process: {}})
    assert "the process of ours that did it was killed" in failure.error.message
    assert not path.exists()
    assert suspended.whole()


def test_a_file_that_nobody_needs_is_let_go_by_recover(suspended: Suspended, monkeypatch: pytest.MonkeyPatch) -> None:
    """kill -9 of everything between the file and its memory: both are whole, and one is enough. Once the memory went, none is let go."""

    def record() -> Any:
        member = types.SimpleNamespace(id=suspended.program.id, image=suspended.spec)
        return types.SimpleNamespace(members=[member])

    suspended.spec = suspended.call(Call.STORE)
    path = suspended.opened()
    with keeping._claimed(suspended.program.id):
        assert keeping.sweep([record()]) == [], "another command is at it"
    assert path.exists()
    real = keeper.dropped
    claimed = []
    monkeypatch.setattr(keeper, "dropped", lambda p: claimed.append(claims.taken(f"/proc/{p.pid}")) or real(p))
    assert str(suspended.program.pid) in " ".join(keeping.sweep([record()]))
    assert not path.exists()
    assert keeping.sweep([record()]) == []
    assert all(claimed), "and none can come in between"
    assert suspended.call(Call.LOAD) == {"loaded_bytes": 0}
    suspended.keep()
    assert keeping.sweep([record()]) == []
    suspended.call(Call.LOAD)
    assert suspended.whole()


def test_what_a_load_that_was_killed_had_got_is_given_back_by_recover(suspended: Suspended) -> None:
    """kill -9 of everything in the middle of it: the image is on disk, and memory is taken all the same."""
    suspended.keep()
    record: Any = types.SimpleNamespace(members=[types.SimpleNamespace(id=suspended.program.id, image=suspended.spec)])
    assert keeping.sweep([record]) == []
    with keeper.of(suspended.program.id) as ours:
        ours.fill(suspended.address, suspended.address + NBYTES)
    assert suspended.in_memory() >= NBYTES
    assert "a resume was killed" in " ".join(keeping.sweep([record]))
    assert suspended.in_memory() == 0
    suspended.call(Call.LOAD)
    assert suspended.whole()


def test_named_files_of_the_dead_are_swept_and_no_others(named: Suspended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named.keep()
    stranger = tmp_path / named.path.name.replace(file._here(), "00000000")
    stranger.touch(), (tmp_path / "else").touch()
    assert file.sweep(tmp_path) == []
    named.program.process.kill()
    named.program.process.wait()
    with monkeypatch.context() as somebody:
        somebody.setattr(os, "geteuid", lambda: os.getuid() + 1000)
        assert file.sweep(tmp_path) == [], "that of another user"
    assert file.sweep(tmp_path) == [named.path]
    assert {p.name for p in tmp_path.iterdir()} == {stranger.name, "else"}


def test_gpuckpt_is_upgraded_while_an_image_is_on_disk(suspended: Suspended, monkeypatch: pytest.MonkeyPatch) -> None:
    """The older library is asked nothing any more; but whether the memory is whole it tells, or a restore would lose the process."""
    process = suspended.program.id
    suspended.spec = suspended.call(Call.STORE)
    monkeypatch.setattr(page, "_VERSION", 99)
    assert not CudaDriver.image_dropped(Any, process), "it is in memory"  # type: ignore[arg-type]
    monkeypatch.undo()
    suspended.call(Call.DROP)
    monkeypatch.setattr(page, "_VERSION", 99)
    assert CudaDriver.image_dropped(Any, process)  # type: ignore[arg-type]
    with pytest.raises(memory.Unavailable, match="another gpuckpt"):
        suspended.call(Call.LOAD)
    monkeypatch.undo()
    suspended.call(Call.LOAD)
    assert suspended.whole()


def test_by_what_the_process_holds_where_no_journal_tells(suspended: Suspended, monkeypatch: pytest.MonkeyPatch) -> None:
    suspended.keep()
    suspended.spec = {}
    with monkeypatch.context() as nothing_held:
        nothing_held.setattr(keeper.Keeper, "holds", None)
        with pytest.raises(errors.ImageUnreadable, match="does not say where") as caught:
            suspended.call(Call.LOAD)
    assert "GPUCKPT_STATE_DIR" in caught.value.hint
    assert suspended.call(Call.LOAD) == {"loaded_bytes": NBYTES}
    assert suspended.whole()


def test_a_file_that_is_held_ends_with_the_process(suspended: Suspended) -> None:
    suspended.keep()
    path = suspended.opened()
    assert path.stat().st_nlink == 0, "nobody has to clean up"
    suspended.program.process.kill()
    suspended.program.process.wait()
    assert not path.exists()


def test_a_controller_that_is_gone_ends_it(suspended: Suspended) -> None:
    class Gone(Exception):
        pass

    def check() -> None:
        raise Gone

    with pytest.raises(Gone):
        suspended.call(Call.STORE, check)
    assert suspended.whole()
    assert list(suspended.directory.iterdir()) == []


def test_a_controller_that_went_while_the_disk_was_flushed(suspended: Suspended, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not know of the file: what it takes of the disk would be nobody's until the resume."""
    flushed: list[int] = []

    class Gone(Exception):
        pass

    def check() -> None:
        if len(flushed) == 2:
            raise Gone

    monkeypatch.setattr(os, "fsync", flushed.append)
    with pytest.raises(Gone):
        suspended.call(Call.STORE, check)
    assert list(suspended.directory.iterdir()) == []
    with keeper.of(suspended.program.id) as ours:
        assert ours.holds is None


def test_a_stopped_process(suspended: Suspended, monkeypatch: pytest.MonkeyPatch) -> None:
    with keeper.of(suspended.program.id):
        pass  # it has come to life
    suspended.program.stop()
    with monkeypatch.context() as short:
        short.setattr(keeper, "ANSWER_S", 0.05)
        with pytest.raises(errors.ImageNotStored, match="stopped"):
            suspended.call(Call.STORE)
    os.kill(suspended.program.pid, signal.SIGCONT)
    suspended.spec = suspended.call(Call.STORE)
    suspended.program.stop()
    with monkeypatch.context() as short:
        short.setattr(keeper, "ANSWER_S", 0.05)
        short.setattr(keeper, "RANGE_S", 0.05)
        with pytest.raises(errors.ImageNotStored, match="not given back"):
            suspended.call(Call.DROP)
        with pytest.raises(errors.ImageUnreadable, match="stopped"):
            suspended.call(Call.LOAD)
    os.kill(suspended.program.pid, signal.SIGCONT)
    suspended.call(Call.LOAD)
    assert suspended.whole(), "whether or not the pages went when it went on"
