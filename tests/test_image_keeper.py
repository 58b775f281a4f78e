"""The keeper: gives pages back and gets them anew when it is asked, holds a file, and costs the program nothing."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpuckpt.image import keeper, page, preload, reserve
from gpuckpt.image.keeper import Keeper, Unanswered
from gpuckpt.image.page import Unavailable
from gpuckpt.model import ProcessId
from tests.image_machine import MIB, Mapped, Program, Start, is_plain
from tests.simulated_machine import eventually

SIZE = 64 * MIB


@pytest.fixture
def program(start_program: Start) -> Program:
    made = start_program()
    made.announce()
    return made


@pytest.fixture
def image(program: Program) -> Mapped:
    found = program.map("image", SIZE)
    assert program.ask(f"zero {found.address:x} {SIZE}") == ["0"], "and now it is full of something"
    return found


@pytest.fixture
def ours(program: Program, image: Mapped) -> Iterator[Keeper]:
    with keeper.of(program.id) as found:
        yield found


def end_of(image: Mapped) -> int:
    return image.address + SIZE


def test_pages_given_back_and_got_anew(program: Program, image: Mapped, ours: Keeper) -> None:
    before = program.rss()
    assert not ours.dropped
    ours.drop(image.address, end_of(image))
    assert ours.dropped
    assert program.rss() < before - SIZE + 2 * MIB
    ours.fill(image.address, end_of(image))
    assert ours.dropped, "until all content is there"
    assert program.rss() >= before - 2 * MIB
    ours.loaded()
    assert not ours.dropped
    assert program.ask(f"zero {image.address:x} {SIZE}") == ["0"]


def test_half_of_it(program: Program, image: Mapped, ours: Keeper) -> None:
    ours.drop(image.address, image.address + SIZE // 2)
    assert program.ask(f"zero {image.address + SIZE // 2:x} {SIZE // 2}") == [str(SIZE // 2 // 8)]


def test_it_waits_on_nothing_of_the_programs(program: Program, image: Mapped, ours: Keeper) -> None:
    """Its table has a pipe of its own and nothing else: an end of a pipe that the program closes is closed."""
    held = [os.readlink(f) for f in Path(f"/proc/{program.pid}/task/{ours.tid}/fd").iterdir()]
    assert len(held) == 2
    assert all(h.startswith("pipe:") for h in held)
    assert not set(held) & {os.readlink(f) for f in Path(f"/proc/{program.pid}/fd").iterdir()}
    status = Path(f"/proc/{program.pid}/task/{ours.tid}/status").read_text()
    blocked = re.search(r"SigBlk:\s+(\w+)", status)
    assert blocked is not None
    assert blocked[1] == "fffffffffffbfeff", "all but SIGKILL and SIGSTOP"
    assert Path(f"/proc/{program.pid}/task/{ours.tid}/comm").read_text() == "gpuckpt-image\n"


def test_it_holds_a_file_that_ends_with_the_process(program: Program, ours: Keeper, tmp_path: Path) -> None:
    path = tmp_path / "a file"
    path.write_bytes(b"content")
    assert ours.hold(path, path.stat())
    assert not any(str(path) in os.readlink(f) for f in Path(f"/proc/{program.pid}/fd").iterdir()), "the program cannot close it"
    path.unlink()
    assert ours.holds is not None
    assert ours.holds.read_bytes() == b"content"
    ours.let_go()
    assert ours.holds is None


def test_what_it_may_not_hold(ours: Keeper, tmp_path: Path) -> None:
    path, other, pipe = tmp_path / "file", tmp_path / "other", tmp_path / "pipe"
    path.touch(), other.touch(), os.mkfifo(pipe)
    link = tmp_path / "link"
    link.symlink_to(path)
    for wanted, is_file in ((other, path), (link, path), (tmp_path / "none", path), (Path("/" + "x" * 2000), path), (pipe, pipe)):
        assert not ours.hold(wanted, is_file.stat())
        assert ours.holds is None


def test_while_it_has_the_only_copy_it_lets_go_of_nothing(program: Program, image: Mapped, ours: Keeper, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    assert ours.hold(path, path.stat())
    ours.drop(image.address, image.address + 4096)
    for act in (ours.let_go, ours.end):
        with pytest.raises(OSError, match="busy"):
            act()
    preload.forget(program.id)
    assert ours.holds is not None
    with pytest.raises(Unavailable, match="is on disk"):
        program.announce()
    ours.loaded()
    ours.end()


def test_a_stopped_program_does_not_answer_and_settles_when_it_goes_on(
    program: Program, image: Mapped, ours: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    program.stop()
    monkeypatch.setattr(keeper, "RANGE_S", 0.05)
    with pytest.raises(Unanswered, match="stopped"):
        ours.drop(image.address, end_of(image))
    os.kill(program.pid, signal.SIGCONT)
    ours.settle()
    first = ours.dropped
    assert program.ask(f"zero {image.address:x} {SIZE}") in (["0"], [str(SIZE // 8)])
    assert ours.dropped is first, "what was asked before acts no more"


def test_pages_that_may_go_any_moment_count_as_given_back(
    program: Program, image: Mapped, ours: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drop was asked of a program that was stopped: nobody restores it before that is settled."""
    assert not keeper.dropped(program.id)
    program.stop()
    monkeypatch.setattr(keeper, "RANGE_S", 0.05)
    monkeypatch.setattr(keeper, "ANSWER_S", 0.05)
    with pytest.raises(Unanswered):
        ours.drop(image.address, end_of(image))
    assert not ours.dropped
    assert keeper.dropped(program.id)
    os.kill(program.pid, signal.SIGCONT)
    eventually(lambda: keeper.dropped(program.id) is ours.dropped, "it is settled")


@pytest.mark.parametrize("error", [errno.ENOMEM, errno.EPERM])
def test_pages_that_cannot_be_got_are_an_error(program: Program, image: Mapped, ours: Keeper, error: int) -> None:
    ours.drop(image.address, end_of(image))
    program.ask(f"deny madvise {error} 23")
    with pytest.raises(OSError, match=re.escape(os.strerror(error))):
        ours.fill(image.address, end_of(image))
    assert ours.dropped
    program.ask("zero 0 0")


def test_memory_that_is_locked_stays(program: Program, image: Mapped, ours: Keeper) -> None:
    assert program.ask(f"lock {image.address:x} {SIZE}") == ["0"]
    with pytest.raises(OSError, match="Invalid"):
        ours.drop(image.address, end_of(image))
    assert program.ask(f"zero {image.address:x} {SIZE}") == [str(SIZE // 8)]


def test_a_child_has_none(program: Program, image: Mapped) -> None:
    """It has the page of its parent, and not the thread."""
    (pid,) = program.ask("child")
    try:
        child = keeper.page.processes.read(int(pid))
        assert child is not None
        with pytest.raises(Unavailable, match="no keeper"), keeper.of(child.id):
            pass
    finally:
        os.kill(int(pid), signal.SIGKILL)


def test_by_how_many_threads_it_was_populated_is_still_told(program: Program) -> None:
    image = program.map("image", 256 * MIB)
    made = program.result.threads
    with keeper.of(program.id) as ours:
        ours.fill(image.address, image.address + 4096)
    assert program.result.threads == made == preload.threads(program.pid)


def test_one_asks_at_a_time(program: Program, image: Mapped, ours: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    """A follower orders memory kept ready, or a person does, while an image is moved: a request that another is written over would be
    answered, and not done."""
    asked = ours._words()[4]
    with keeper.of(program.id) as other, other._alone(0.0):
        monkeypatch.setattr(keeper, "ANSWER_S", 0.05)
        with pytest.raises(Unanswered, match="another gpuckpt"):
            ours.settle()
        assert keeper.dropped(program.id) is False
    assert ours._words()[4] == asked
    ours.drop(image.address, end_of(image))
    assert program.look(image.address, 0, SIZE).rss == 0


def test_storms_pass_it_by(program: Program, image: Mapped, ours: Keeper) -> None:
    """Fork, vfork, exec and signals of the program while its image is kept."""
    for storm in ("fork", "vfork"):
        assert program.ask(storm) == ["0"]
    ours.settle()
    assert is_plain(program.map("thread", SIZE), SIZE)


def test_a_page_with_nonsense_for_a_pipe_wakes_nobody(program: Program, image: Mapped, ours: Keeper, tmp_path: Path) -> None:
    os.pwrite(ours.memory, struct.pack("=i", 999), ours.at + page.KEEPER_AT + 8)
    with pytest.raises(Unanswered, match="cannot be woken"):
        ours.settle()


def test_the_end_of_the_program_is_its_end(program: Program, image: Mapped, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * MIB)
    with keeper.of(program.id) as ours:
        assert ours.hold(path, path.stat())
        fd = os.open(path, os.O_RDONLY)
        path.unlink()
        assert program.end() == ""
        assert not Path(f"/proc/{program.pid}").exists()
    os.close(fd)


@pytest.mark.parametrize("look", [preload.result, preload.described, reserve.ready_bytes, reserve.look, keeper.dropped, keeper.end])
def test_a_program_that_ends_while_it_is_looked_at(
    program: Program, image: Mapped, look: Callable[[ProcessId], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory reads as empty from then on, without an error."""
    where = page._where

    def found_then_killed(memory: int, process: ProcessId, any_version: bool) -> int:
        at = where(memory, process, any_version)
        program.process.kill()
        program.process.wait()
        return at

    monkeypatch.setattr(page, "_where", found_then_killed)
    seen: object = None
    with contextlib.suppress(Unavailable):
        seen = look(program.id)
    assert not seen or "No such process" in str(seen)


def test_a_program_that_execs_takes_it_along(program: Program, image: Mapped) -> None:
    program.process.stdin.write("exec\n")  # type: ignore[union-attr]
    assert program.process.wait(20) == 0


def test_no_keeper_where_descriptors_cannot_be_closed(start_program: Start) -> None:
    """Linux before 5.9, or a filter: a copy of the program's descriptors must not stay open."""
    program = start_program()
    program.announce()
    assert program.ask(f"deny close_range {errno.ENOSYS}") == ["0"]
    program.map()
    eventually(lambda: "gpuckpt-image" not in _threads(program.pid), "it ends at once")
    with pytest.raises(Unavailable, match="no keeper"), keeper.of(program.id):
        pass


def _threads(pid: int) -> str:
    return subprocess.run(["cat", *Path(f"/proc/{pid}/task").glob("*/comm")], capture_output=True, text=True, check=False).stdout
