"""The driver's copies into an image and out of it are shared among threads, and no other copy is."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from pathlib import Path

import pytest

from gpuckpt.image import keeper, page, preload
from tests.image_machine import COMPILE, MIB, Program, Start, build
from tests.simulated_machine import eventually

SIZE = 64 * MIB


def right(program: Program, what: str, address: int, nbytes: int = SIZE, seed: int = 1, who: str = "image") -> bool:
    return program.ask(f"{what} {who} {address:x} {nbytes} {seed}") == ["0"]


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few CPUs there are here."""
    monkeypatch.setattr(preload, "threads", lambda _: 4)


@pytest.mark.parametrize("nbytes", [SIZE, 33 * MIB, 45 * MIB + 12345])
def test_into_an_image_and_out_of_it(start_program: Start, nbytes: int) -> None:
    program = start_program()
    operation = program.announce()
    image = program.map("image", nbytes)
    assert right(program, "fill", image.address, nbytes)
    large = nbytes // (2 * MIB) * 2 * MIB
    assert program.result.copied in (large, nbytes)
    assert (program.result.copies, program.result.copy_threads) == (-(-program.result.copied // (2 * MIB)), 4)
    preload.withdraw(program.id, operation)
    preload.announce_restore(program.id, program.restore_tid)
    assert right(program, "check", image.address, nbytes)
    assert program.result.copied in (2 * large, 2 * nbytes)


def test_many_times_over_with_other_content(start_program: Start) -> None:
    program = start_program()
    program.announce()
    image = program.map("image", 64 * MIB)
    for seed in range(8):
        assert right(program, "fill", image.address, 64 * MIB, seed)
        assert right(program, "check", image.address, 64 * MIB, seed)
    assert program.result.copied == 16 * 64 * MIB


def test_by_a_libcuda_whose_imports_are_bound_when_used(start_program: Start, tmp_path: Path) -> None:
    program = start_program(folder=build(tmp_path / "lazy", "lazy"))
    program.announce()
    image = program.map("image", SIZE)
    for seed in range(2):
        assert right(program, "fill", image.address, seed=seed)
        assert right(program, "check", image.address, seed=seed)
    assert program.result.copied == 4 * SIZE


def test_a_helper_that_comes_late_takes_nothing_of_the_next_copy(tmp_path: Path) -> None:
    """It would count as a piece that was copied, and the copy be called done with one missing."""
    program = tmp_path / "late"
    subprocess.run([*COMPILE, "-o", program, Path(__file__).with_name("copy_late.c"), "-ldl"], check=True)
    assert subprocess.run([program], capture_output=True, text=True, check=True).stdout == "0\n"


def test_nobody_else_copies_so(start_program: Start) -> None:
    program = start_program()
    operation = program.announce()
    image, other = program.map("image", SIZE), program.map("both")
    assert right(program, "fill", other.address), "no image"
    assert right(program, "fill", image.address, who="thread"), "another thread"
    preload.withdraw(program.id, operation)
    assert right(program, "fill", image.address), "not announced"
    preload.announce_restore(program.id, program.restore_tid, seconds=-1)
    assert right(program, "fill", image.address), "expired"
    assert program.result.copied == 0
    preload.announce_restore(program.id, program.restore_tid)
    assert right(program, "fill", image.address)
    assert program.result.copied == SIZE, "or all this shows nothing"


def test_once_restored_libcuda_has_its_own_memcpy_again(start_program: Start) -> None:
    program = start_program()
    before = imports(program)
    threads = program.threads()
    for _ in range(2):
        program.announce()
        image = program.map("image", SIZE)
        assert right(program, "fill", image.address)
        assert imports(program) != before
        assert readonly(program) == {"r--p"}
        preload.forget(program.id)
        eventually(lambda: program.threads() == threads, "helpers and keeper end")
        assert imports(program) == before
        assert readonly(program) == {"r--p"}
        program.ask(f"unmap {image.address:x} {SIZE}")


def test_what_somebody_else_has_put_there_since_stays(start_program: Start) -> None:
    program = start_program()
    before, threads = imports(program), program.threads()
    program.announce()
    program.map("image", SIZE)
    ours, theirs = imports(program), b"somebody"
    at = next(i for i in range(0, len(before), 8) if before[i : i + 8] != ours[i : i + 8])
    (begin,) = (a for a, _, permissions, _ in mapped(program)[-2:-1] if permissions == "r--p")
    with open(f"/proc/{program.pid}/mem", "r+b", buffering=0) as memory:
        os.pwrite(memory.fileno(), theirs, begin + at)
    preload.forget(program.id)
    eventually(lambda: program.threads() == threads, "helpers and keeper end")
    assert imports(program) == before[:at] + theirs + before[at + 8 :]


@pytest.mark.parametrize("binding", ["now", "lazy"])
@pytest.mark.parametrize("reused", [False, True])
def test_a_libcuda_that_was_unloaded_meanwhile(
    start_program: Start, image_folder: Path, tmp_path: Path, binding: str, reused: bool
) -> None:
    """Another tool restored the program, which unloads libcuda then: where its imports were is nothing, or memory of the program's."""
    folder = image_folder if binding == "now" else build(tmp_path / "lazy", binding)
    program = start_program(folder=folder, name="closing")
    program.ask("open")
    program.announce()
    program.ask(f"map {SIZE}")
    begin = min(start for start, _, _, path in page.mappings(program.pid, b"/libcuda.so"))
    assert program.ask("close") == ["0"]
    assert not page.mappings(program.pid, b"/libcuda.so")
    if reused:
        assert program.ask(f"mine {begin:x}") == ["1"]
    keeper.end(program.id)
    if reused:
        assert program.ask(f"write {begin:x}") == ["0"]
    program.ask("open")
    program.announce()
    program.ask(f"map {SIZE}")
    assert [i.verdict for i in program.result.images] == [preload.Verdict.FAST]


def test_signals_while_copies_are_shared(start_program: Start) -> None:
    """Helpers take none, and a handler in the restore thread that is in the middle of a copy sees it go on afterwards."""
    program = start_program()
    program.announce()
    image = program.map("image", SIZE)
    assert program.ask("often")  # SIGALRM each half millisecond, with a handler that maps and unmaps
    for seed in range(3):
        assert right(program, "fill", image.address, seed=seed)
        assert right(program, "check", image.address, seed=seed)
    assert program.result.copied == 6 * SIZE


def test_where_no_thread_is_to_be_had(start_program: Start) -> None:
    program = start_program()
    program.announce()
    image = program.map("image", SIZE)
    assert program.ask(f"deny clone {errno.EAGAIN}") == ["0"]
    assert right(program, "fill", image.address)
    assert right(program, "check", image.address)


def test_a_child_copies_by_itself(start_program: Start) -> None:
    """It inherits the import, the announcement and the numbers of threads that are not there."""
    program = start_program()
    program.announce()
    image = program.map("image", SIZE)
    assert right(program, "fill", image.address)
    assert right(program, "forked", image.address)
    assert right(program, "check", image.address)


def test_stopped_and_continued_in_the_middle(start_program: Start) -> None:
    program = start_program()
    program.announce()
    image = program.map("image", SIZE)
    assert program.process.stdin is not None
    assert program.process.stdout is not None
    program.process.stdin.write(f"fill image {image.address:x} {SIZE} 3\n")
    for _ in range(20):
        program.stop()
        os.kill(program.pid, signal.SIGCONT)
    assert program.process.stdout.readline() == "0\n"
    assert right(program, "check", image.address, seed=3)


def imports(program: Program) -> bytes:
    """What libcuda's writable and relocated data holds."""
    found = [(a, b) for a, b, permissions, path in mapped(program) if permissions in ("r--p", "rw-p") and a]
    with open(f"/proc/{program.pid}/mem", "rb", buffering=0) as memory:
        return b"".join(os.pread(memory.fileno(), b - a, a) for a, b in found[-2:-1])


def readonly(program: Program) -> set[str]:
    """Permissions of the part that the loader made read-only."""
    return {permissions for _, _, permissions, _ in mapped(program)[-2:-1]}


def mapped(program: Program) -> list[tuple[int, int, str, str]]:
    lines = [line.split() for line in Path(f"/proc/{program.pid}/maps").read_text().splitlines() if "/libcuda.so" in line]
    return [(*(int(x, 16) for x in line[0].split("-")), line[1], line[-1]) for line in lines]  # type: ignore[misc]
