"""Memory kept ready for images: it is zero, it comes back, and nobody else has any of it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from gpuckpt.driver import mappings
from gpuckpt.image import keeper, memory, preload, reserve
from gpuckpt.image.page import Unavailable
from gpuckpt.image.preload import Verdict
from gpuckpt.model import Call
from tests.image_machine import MIB, Program, Start, is_image, is_plain
from tests.image_suspended import NBYTES, Suspended
from tests.simulated_machine import eventually

SIZE = 64 * MIB


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preload, "threads", lambda _: 2)


@pytest.fixture
def ready(start_program: Start, uvm: Path) -> Program:
    """A program with GPU memory, that keeps 64 MiB ready."""
    return begin(start_program, uvm)


def begin(start_program: Start, uvm: Path, how: str = reserve.FIXED, nbytes: int = SIZE) -> Program:
    program = start_program(**{reserve.VARIABLE: how})
    assert program.ask(f"gpu {uvm}") == ["0"]
    if nbytes:
        assert reserve.order(program.id, nbytes, auto=how == reserve.AUTO) == reserve.Outcome(nbytes)
    return program


def suspend(program: Program, nbytes: int = SIZE) -> tuple[int, int]:
    """As libcuda does it: the image's address, and how many bytes of it were ready. It is zero, and then full of something."""
    program.announce()
    found = program.map("image", nbytes)
    assert is_image(found, nbytes)
    assert program.ask(f"zero {found.address:x} {nbytes}") == ["0"]
    return found.address, program.result.from_reserve


def resume(program: Program, address: int, nbytes: int = SIZE) -> None:
    assert program.ask(f"back {address:x} {nbytes}") == ["0"]
    preload.forget(program.id)


def zeroed(program: Program) -> bool:
    now = reserve.look(program.id)
    return not now.dirty and now.ready >= now.wanted


def area(program: Program) -> int:
    """Where the memory that is ready begins."""
    with keeper.of(program.id) as found:
        return found.reserve()[8]


# What it does.


def test_the_first_image_needs_no_page(ready: Program) -> None:
    threads = ready.threads()
    address, from_reserve = suspend(ready)
    assert from_reserve == SIZE
    assert ready.threads() == threads, "the keeper was there"
    described = preload.described(ready.id)
    assert (described["path"], described["from_reserve_bytes"]) == ("preload", SIZE)
    assert [(i.address, i.nbytes, i.verdict) for i in ready.result.images] == [(address, SIZE, Verdict.FAST)]


def test_its_memory_returns_zeroed_and_is_what_the_next_one_gets(ready: Program) -> None:
    rss = ready.rss()
    for turn in range(3):
        address, from_reserve = suspend(ready)
        assert from_reserve == SIZE, turn
        resume(ready, address)
        assert reserve.look(ready.id).returned == turn + 1
        eventually(lambda: zeroed(ready), "it is zeroed in the background")
        assert ready.rss() >= rss, "nothing was given to the kernel"
    assert ready.rss() < rss + 4 * MIB


def test_what_is_not_zeroed_yet_is_never_given_away(ready: Program) -> None:
    """The next image comes in the moment in which the last one goes: hardly any of it can be zeroed."""
    address, _ = suspend(ready)
    for _ in range(5):
        before = ready.result.from_reserve
        (where, error, _) = ready.ask(f"again {address:x} {SIZE}")
        assert (address, error) == (int(where, 16), "0")
        assert is_image(ready.look(address, 0, 0), SIZE)
        assert ready.result.from_reserve - before < SIZE, "or this shows nothing"
        assert ready.ask(f"zero {address:x} {SIZE}") == ["0"]


def test_it_is_got_at_the_lowest_priority(ready: Program) -> None:
    """In a thread that is there as long as it takes: until one was seen."""

    def niceness() -> set[int]:
        found = set()
        for task in Path(f"/proc/{ready.pid}/task").iterdir():
            with contextlib.suppress(OSError):
                if (task / "comm").read_text() == "gpuckpt-reserve\n":
                    found.add(int((task / "stat").read_text().rpartition(")")[2].split()[16]))
        return found

    def seen() -> bool:
        with keeper.of(ready.id) as found:
            found.have_ready(0, auto=False)
            found.have_ready(256 * MIB, auto=False)
            while found.reserve()[5] < 256 * MIB:
                if 19 in niceness():
                    return True
        return False

    eventually(seen, "it has the lowest priority")


@pytest.mark.parametrize("nbytes", [33 * MIB + 4096, 100 * MIB, 300 * MIB + 12288])
def test_an_image_smaller_or_larger_than_what_is_ready(ready: Program, nbytes: int) -> None:
    address, from_reserve = suspend(ready, nbytes)
    assert from_reserve == min(nbytes, SIZE)
    assert lies_in(ready, address, nbytes) == 1, "in one mapping"
    resume(ready, address, nbytes)
    eventually(lambda: zeroed(ready), "it is zeroed")
    assert reserve.look(ready.id).ready == SIZE, "not more than was asked for"
    assert suspend(ready) == (address, SIZE)


def lies_in(program: Program, address: int, nbytes: int) -> int:
    """How many mappings it takes to hold that."""
    spans = [tuple(int(x, 16) for x in line.split()[0].split("-")) for line in Path(f"/proc/{program.pid}/maps").read_text().splitlines()]
    return sum(begin < address + nbytes and end > address for begin, end in spans)


def test_two_images_and_one_that_goes_first(ready: Program) -> None:
    ready.announce()
    one, other = ready.map("image", 40 * MIB), ready.map("image", 48 * MIB)
    assert is_image(one, 40 * MIB)
    assert is_image(other, 48 * MIB)
    assert ready.result.from_reserve == 64 * MIB
    for found, nbytes in ((one, 40 * MIB), (other, 48 * MIB)):
        assert ready.ask(f"zero {found.address:x} {nbytes}") == ["0"]
    assert ready.ask(f"back {one.address:x} {40 * MIB}") == ["0"]
    assert reserve.look(ready.id).taken == 88 * MIB
    assert ready.look(other.address, 0, 0).rss >= 48 * MIB
    resume(ready, other.address, 48 * MIB)
    eventually(lambda: zeroed(ready), "it is zeroed")
    assert suspend(ready)[1] == SIZE


def test_auto_is_what_the_last_image_took(start_program: Start, uvm: Path) -> None:
    program = begin(start_program, uvm, reserve.AUTO, 0)
    address, from_reserve = suspend(program, 80 * MIB)
    assert from_reserve == 0
    resume(program, address, 80 * MIB)
    eventually(lambda: zeroed(program), "it is zeroed")
    assert suspend(program, 80 * MIB) == (address, 80 * MIB)
    resume(program, address, 80 * MIB)
    eventually(lambda: zeroed(program), "it is zeroed")
    address, from_reserve = suspend(program, 40 * MIB)
    resume(program, address, 40 * MIB)
    assert (from_reserve, reserve.look(program.id).ready) == (40 * MIB, 40 * MIB)


# Who has it.


def test_only_a_process_with_gpu_memory_has_any(start_program: Start, uvm: Path) -> None:
    program = start_program(**{reserve.VARIABLE: reserve.FIXED})
    threads = program.threads()
    with pytest.raises(Unavailable, match="no GPU yet"):
        reserve.order(program.id, SIZE)
    other = uvm.with_name("nvidiactl")
    other.write_bytes(bytes(4096))
    assert program.ask(f"gpu {other}") == ["0"]
    assert program.threads() == threads
    assert program.ask(f"gpu {uvm}") == ["0"]
    assert program.threads() == threads + 1
    assert program.ask(f"gpu {uvm}") == ["0"]
    assert program.threads() == threads + 1, "once"


def test_a_program_that_was_not_started_for_it(start_program: Start, uvm: Path) -> None:
    program = start_program()
    threads = program.threads()
    assert program.ask(f"gpu {uvm}") == ["0"]
    assert program.threads() == threads
    program.announce()
    assert is_image(program.map())
    with pytest.raises(Unavailable, match="not started to keep"):
        reserve.order(program.id, SIZE)
    assert reserve.ready_bytes(program.id) == 0


def test_a_child_has_none_of_it(ready: Program) -> None:
    assert ready.ask(f"heir {area(ready):x}") == ["0"]
    address, _ = suspend(ready)
    assert ready.ask(f"heir {address:x}") == ["1"], "an image is as the driver mapped it"
    resume(ready, address)
    eventually(lambda: zeroed(ready), "it is zeroed")
    assert ready.ask(f"heir {address:x}") == ["0"]
    assert ready.ask("fork") == ["0"], "it maps and unmaps by itself"
    assert suspend(ready) == (address, SIZE)


def test_a_child_that_unmaps_the_image_takes_nothing_back(ready: Program) -> None:
    address, _ = suspend(ready)
    assert ready.ask(f"forked image {address:x} {SIZE} 1") == ["0"]
    assert reserve.look(ready.id).taken == SIZE


# Giving it back.


def test_given_back_when_asked(ready: Program) -> None:
    rss = ready.rss()
    assert reserve.ready_bytes(ready.id) == SIZE
    assert reserve.order(ready.id, 32 * MIB).ready == 32 * MIB
    assert ready.rss() < rss - 28 * MIB
    assert reserve.order(ready.id, 0).ready == 0
    assert ready.rss() < rss - 60 * MIB
    assert area(ready) == 0
    address, from_reserve = suspend(ready)
    assert from_reserve == 0
    resume(ready, address)
    assert ready.rss() < rss - 60 * MIB, "nothing is kept that nobody asked for"


def test_given_back_while_an_image_has_it(ready: Program) -> None:
    rss = ready.rss()
    address, _ = suspend(ready, 40 * MIB)
    assert reserve.order(ready.id, SIZE).why == "it is suspended, or about to be"
    assert reserve.order(ready.id, 0).why == ""
    assert ready.rss() < rss - 20 * MIB, "what the image does not have"
    assert ready.look(address, 0, 0).rss >= 40 * MIB
    resume(ready, address, 40 * MIB)
    assert ready.rss() < rss - 60 * MIB


def test_no_area_is_mapped_while_it_is_suspended(start_program: Start, uvm: Path) -> None:
    """It might lie where the driver had GPU memory, and wants it again. Whoever asks looks first, and may be late."""
    program = begin(start_program, uvm, nbytes=0)
    program.announce()
    with keeper.of(program.id) as ours:
        with pytest.raises(OSError, match="busy"):
            ours.have_ready(SIZE, auto=False)
        address, _ = suspend(program)
        preload.withdraw(program.id, program.result.operation)
        with pytest.raises(OSError, match="busy"):
            ours.have_ready(SIZE, auto=False)
        assert (ours.reserve()[8], ours.reserve()[3]) == (0, 0)
        resume(program, address)
        ours.have_ready(SIZE, auto=False)
        assert ours.reserve()[8] != 0


def test_an_image_that_goes_to_disk_takes_what_is_ready_along(ready: Program) -> None:
    rss = ready.rss()
    address, _ = suspend(ready, 40 * MIB)
    with keeper.of(ready.id) as found:
        found.drop(address, address + 40 * MIB)
        assert ready.rss() < rss - 60 * MIB
        found.fill(address, address + 40 * MIB)
        found.loaded()
    assert ready.look(address, 0, 0).rss >= 40 * MIB
    resume(ready, address, 40 * MIB)
    eventually(lambda: not reserve.look(ready.id).dirty, "it is zeroed")
    now = reserve.look(ready.id)
    assert (now.wanted, now.ready) == (40 * MIB, 40 * MIB)
    assert reserve.order(ready.id, SIZE).ready == SIZE


def test_by_way_of_a_file(ready: Program, tmp_path: Path) -> None:
    rss = ready.rss()
    suspended = Suspended(ready, tmp_path)
    assert ready.result.from_reserve == NBYTES
    suspended.keep()
    assert ready.rss() < rss - 60 * MIB
    suspended.call(Call.LOAD)
    assert suspended.whole()
    resume(ready, suspended.address, NBYTES)
    eventually(lambda: zeroed(ready), "it is zeroed")
    assert suspend(ready, NBYTES) == (suspended.address, NBYTES)


def test_it_stops_where_memory_is_short(start_program: Start, uvm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = begin(start_program, uvm, nbytes=0)
    rooms = iter([reserve.MARGIN_BYTES + 16 * MIB, reserve.MARGIN_BYTES + 16 * MIB, reserve.MARGIN_BYTES + 15 * MIB])
    monkeypatch.setattr(reserve.host, "host_room", lambda *_: preload.host.HostRoom(next(rooms), "memory.max of /a"))
    monkeypatch.setattr(reserve, "STEP_BYTES", 16 * MIB)
    outcome = reserve.order(program.id, SIZE)
    assert outcome.ready == 32 * MIB
    assert outcome.why.startswith("memory.max of /a leaves 1.0 GiB")
    assert suspend(program)[1] == 32 * MIB


# Bad days.


@pytest.mark.parametrize("limit", ["as", "data"])
def test_a_limited_address_space_is_left_alone(start_program: Start, uvm: Path, limit: str) -> None:
    program = begin(start_program, uvm, nbytes=0)
    program.ask(f"rlimit {limit} {1 << 42}")
    assert "ulimit" in reserve.order(program.id, SIZE).why
    assert suspend(program)[1] == 0


def test_memory_that_cannot_be_populated_is_mapped_as_the_driver_asked(ready: Program) -> None:
    ready.announce()
    assert ready.ask("deny madvise 1 23") == ["0"]
    found = ready.map("image", SIZE)
    assert is_plain(found, SIZE)
    assert ready.ask(f"zero {found.address:x} {SIZE}") == ["0"]
    assert reserve.look(ready.id).ready == 0
    assert ready.ask(f"back {found.address:x} {SIZE}") == ["0"]


def test_an_image_whose_end_was_not_seen_is_not_ours(ready: Program) -> None:
    """Unmapped by a system call, or in parts: its place may be somebody else's."""
    address, _ = suspend(ready)
    assert ready.ask(f"unmap {address:x} {SIZE}") == ["0"]
    preload.forget(ready.id)
    again, from_reserve = suspend(ready)
    assert (from_reserve, reserve.look(ready.id).ready) == (0, 0)
    resume(ready, again)
    preload.withdraw(ready.id, ready.result.operation)
    assert reserve.order(ready.id, SIZE).ready == SIZE
    address, from_reserve = suspend(ready)
    assert from_reserve == SIZE
    assert ready.ask(f"back {address:x} {8 * MIB}") == ["0"]
    assert reserve.look(ready.id).ready == 0
    assert ready.look(address + 8 * MIB, 0, 0).rss >= SIZE - 8 * MIB, "the rest is the driver's"


def test_a_checkpoint_without_the_library_does_not_use_it(ready: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_plain(ready.map("image", SIZE), SIZE)
    assert reserve.look(ready.id).ready == SIZE
    monkeypatch.setenv("GPUCKPT_PRELOAD", "0")
    assert reserve.ready_bytes(ready.id) == 0


def test_a_program_that_locks_all_its_memory(start_program: Start, uvm: Path) -> None:
    program = start_program(**{reserve.VARIABLE: reserve.FIXED})
    assert program.ask("lockall") == ["0"]
    assert program.ask(f"gpu {uvm}") == ["0"]
    rss = program.rss()
    assert reserve.order(program.id, SIZE).ready == SIZE
    assert program.rss() < rss + SIZE + 8 * MIB
    address, _ = suspend(program)
    resume(program, address)
    eventually(lambda: zeroed(program), "it is zeroed")
    assert suspend(program)[1] == SIZE


@pytest.mark.parametrize("storm", ["fork", "signals"])
def test_storms(ready: Program, storm: str) -> None:
    ready.announce()
    *_, failures = ready.ask(storm)
    assert failures == "0"


# Seen from outside.


def test_the_image_is_found_from_outside_and_what_is_ready_is_none(start_program: Start, uvm: Path) -> None:
    program = begin(start_program, uvm, nbytes=256 * MIB)
    assert mappings.image_bytes(program.pid) < 16 * MIB
    address, _ = suspend(program)
    assert mappings.image_bytes(program.pid) == SIZE
    with memory.of(program.id) as image:
        (region,) = image.regions()
        assert (region.address, region.end) == (address, address + SIZE)
        ready_too = type(region)(address, 128 * MIB)
        with pytest.raises(Unavailable, match="not for certain"):
            image.prove([ready_too])
