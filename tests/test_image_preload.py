"""The preload library acts on the driver's image and on nothing else, and never is why a mapping fails."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from pathlib import Path

import pytest

from gpuckpt.image import keeper, page, preload
from gpuckpt.image.preload import Unavailable, Verdict
from gpuckpt.inspect import processes
from tests.image_machine import MIB, SIZE, Program, Start, is_image, is_plain, memory_cgroup
from tests.simulated_machine import eventually

MAP_PRIVATE, MAP_FIXED, MAP_ANONYMOUS, MAP_NORESERVE, MAP_POPULATE = 0x02, 0x10, 0x20, 0x4000, 0x8000
IMAGE = MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE
POPULATE_WRITE = 23


# What it does.


def test_the_image_has_huge_pages_is_populated_and_stays_out_of_core_dumps(start_program: Start) -> None:
    program = start_program()
    operation = program.announce()
    found = program.map()
    assert is_image(found)
    if "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        assert found.huge >= SIZE - 4 * MIB
    result = program.result
    assert result.operation == operation
    assert [(i.address, i.nbytes, i.verdict, i.error) for i in result.images] == [(found.address, SIZE, Verdict.FAST, 0)]
    assert (result.seen, result.last, result.last_tid, result.last_nbytes) == (1, Verdict.FAST, program.restore_tid, SIZE)
    assert 0 < result.populate_s < 60
    assert result.threads == preload.threads(program.pid)


def test_it_is_zero_and_its_end_returns_the_memory(start_program: Start) -> None:
    program = start_program()
    program.announce()
    before = program.rss()
    found = program.map()
    assert program.ask(f"zero {found.address:x} {SIZE}") == ["0"]
    assert program.rss() >= before + SIZE
    assert program.ask(f"unmap {found.address:x} {SIZE}") == ["0"]
    assert program.rss() < before + 2 * MIB
    again = program.map()
    assert program.ask(f"zero {again.address:x} {SIZE}") == ["0"]


def test_helpers_are_gone_but_for_the_keeper(start_program: Start) -> None:
    program = start_program()
    threads = program.threads()
    program.announce()
    assert is_image(program.map())
    assert program.threads() == threads + 1
    program.map("image", 32 * MIB)
    assert program.threads() == threads + 1, "one keeper for all images"
    preload.forget(program.id)
    eventually(lambda: program.threads() == threads, "the keeper ends when the process is restored")
    assert (program.result.images, program.result.count) == ((), 0)


@pytest.mark.parametrize("nbytes", [32 * MIB, 33 * MIB + 4096, 100 * MIB - 4096, 129 * MIB + 4096])
def test_odd_sizes(start_program: Start, nbytes: int) -> None:
    program = start_program()
    program.announce()
    found = program.map("image", nbytes)
    assert is_image(found, nbytes)
    assert program.ask(f"zero {found.address:x} {nbytes}") == ["0"]


def test_more_images_than_it_notes(start_program: Start) -> None:
    program = start_program()
    program.announce()
    for _ in range(18):
        found = program.map("image", 32 * MIB)
        program.ask(f"unmap {found.address:x} {32 * MIB}")
    assert (program.result.seen, len(program.result.images)) == (18, 16)


# When it does nothing.


def test_nothing_without_an_announcement(start_program: Start) -> None:
    program = start_program()
    assert is_plain(program.map())
    assert (program.result.operation, program.result.seen) == (0, 0)


def test_a_program_that_checkpoints_itself_and_then_is_suspended(start_program: Start) -> None:
    """Its own image is the driver's affair alone, and no hindrance to ours."""
    program = start_program()
    own = program.map()
    assert is_plain(own)
    assert program.ask(f"unmap {own.address:x} {SIZE}") == ["0"]
    program.announce()
    assert is_image(program.map())


@pytest.mark.parametrize(
    ("who", "verdict"), [("thread", Verdict.OTHER_THREAD), ("caller", Verdict.OTHER_CALLER), ("both", Verdict.OTHER_THREAD)]
)
def test_nothing_for_another_thread_or_caller(start_program: Start, who: str, verdict: Verdict) -> None:
    program = start_program()
    program.announce()
    assert is_plain(program.map(who))
    assert (program.result.seen, program.result.last, program.result.images) == (1, verdict, ())


def test_what_it_saw_tells_who_the_caller_was(start_program: Start) -> None:
    program = start_program()
    program.announce()
    program.map("caller")
    caller, tid = program.result.last_caller, program.result.last_tid
    assert tid == program.restore_tid
    mapped = Path(f"/proc/{program.pid}/maps").read_text().splitlines()
    (where,) = [line for line in mapped if (r := line.split()[0].split("-")) and int(r[0], 16) <= caller < int(r[1], 16)]
    assert where.endswith("/program")


def test_nothing_when_withdrawn(start_program: Start) -> None:
    program = start_program()
    operation = program.announce()
    assert is_image(program.map())
    preload.withdraw(program.id, operation)
    assert is_plain(program.map())
    assert len(program.result.images) == 1, "what it did before stays to be read"


def test_nothing_when_the_announcement_is_stale(start_program: Start) -> None:
    program = start_program()
    program.announce(seconds=0.0)
    assert is_plain(program.map())
    assert (program.result.last, program.result.images) == (Verdict.EXPIRED, ())


def test_nothing_where_it_is_switched_off(start_program: Start) -> None:
    program = start_program(GPUCKPT_PRELOAD="0")
    assert not preload.loaded(program.pid)
    with pytest.raises(Unavailable, match="no preload library"):
        program.announce()
    assert is_plain(program.map())


def test_switched_off_though_it_was_preloaded(image_folder: Path, start_program: Start) -> None:
    program = Program(image_folder, {**preload.environment(), "GPUCKPT_PRELOAD": "0"})
    assert preload.loaded(program.pid)
    with pytest.raises(Unavailable, match="GPUCKPT_PRELOAD=0"):
        program.announce()
    assert is_plain(program.map())
    program.end()


@pytest.mark.parametrize(("after", "has_it"), [(["cat"], True), (["env", "-u", "LD_PRELOAD", "cat"], False)])
def test_where_it_lies_is_remembered_until_the_program_becomes_another_one(
    after: list[str], has_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that uses a GPU has thousands of mappings: they are searched once."""
    searched: list[int] = []
    search = page.ours
    monkeypatch.setattr(page, "ours", lambda pid: searched.append(pid) or search(pid))
    with subprocess.Popen(
        ["sh", "-c", 'read go; exec "$@"', "sh", *after], stdin=subprocess.PIPE, env=preload.environment(), text=True
    ) as process:
        found = processes.read(process.pid)
        assert found is not None
        assert process.stdin is not None
        try:
            eventually(
                lambda: preload.described(found.id)["why"].startswith("the preload library was told of no checkpoint"), "it is there"
            )
            searched.clear()
            preload.result(found.id)
            assert not keeper.dropped(found.id)
            assert not searched
            process.stdin.write("go\n")
            process.stdin.flush()
            eventually(lambda: Path(f"/proc/{process.pid}/comm").read_text() == "cat\n", "it is another program")
            if has_it:
                eventually(
                    lambda: preload.described(found.id)["why"].startswith("the preload library was told of no checkpoint"), "and found"
                )
            else:
                assert preload.described(found.id)["why"] == f"no preload library in pid {process.pid}"
            assert searched
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("what", "nbytes", "flags", "protection"),
    [
        ("small", 32 * MIB - 4096, IMAGE, 3),
        ("not populated", SIZE, MAP_PRIVATE | MAP_ANONYMOUS, 3),
        ("shared", SIZE, 0x01 | MAP_ANONYMOUS | MAP_POPULATE, 3),
        ("locked", SIZE, IMAGE | 0x2000, 3),
        ("read-only", SIZE, IMAGE, 1),
        ("executable", SIZE, IMAGE, 7),
        ("for 32 bits", SIZE, IMAGE | 0x40, 3),
        ("only reserved", SIZE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, 0),
    ],
)
def test_nothing_to_other_mappings_of_the_driver(start_program: Start, what: str, nbytes: int, flags: int, protection: int) -> None:
    program = start_program()
    program.announce()
    found = program.map("image", nbytes, flags, protection)
    assert found.error == 0
    assert not found.altered
    assert (found.rss >= nbytes) == bool(flags & MAP_POPULATE and protection & 2), "what is only read is the kernel's one page of zeros"
    assert program.result.seen == 0


def test_nothing_to_a_fixed_mapping(start_program: Start) -> None:
    program = start_program()
    program.announce()
    there = program.map("image", SIZE, MAP_PRIVATE | MAP_ANONYMOUS, 0)
    found = program.map("image", SIZE, IMAGE | MAP_FIXED, 3, hex(there.address))
    assert found.address == there.address
    assert is_plain(found)


def test_a_hint_is_passed_on_and_so_is_noreserve(start_program: Start) -> None:
    program = start_program()
    program.announce()
    free = program.map("image", SIZE, MAP_PRIVATE | MAP_ANONYMOUS, 0)
    program.ask(f"unmap {free.address:x} {SIZE}")
    found = program.map("image", SIZE, IMAGE | MAP_NORESERVE, 3, hex(free.address))
    assert found.address == free.address
    assert is_image(found)
    assert "nr" in found.flags or Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2"


@pytest.mark.parametrize(
    "call",
    [
        (0, IMAGE, 3, "0"),
        (SIZE, 0x20, 3, "0"),  # neither private nor shared
        (SIZE, IMAGE | MAP_FIXED, 3, "0x1001"),
        (1 << 62, IMAGE, 3, "0"),
        (SIZE, MAP_PRIVATE | MAP_POPULATE, 3, "0"),  # of no file
    ],
)
def test_errors_are_those_of_the_kernel(image_folder: Path, start_program: Start, call: tuple[int | str, ...]) -> None:
    with_ours, without = start_program(), Program(image_folder, dict(os.environ))
    with_ours.announce()
    one, other = with_ours.map("image", *call), without.map("image", *call)  # type: ignore[arg-type]
    assert (one.address, other.address) == (0, 0)
    assert one.error == other.error != 0
    without.end()


def test_signals_wait_while_it_is_populated_and_are_as_they_were(start_program: Start) -> None:
    """What the restore thread had blocked is blocked after it, and nothing else; the keeper takes none at all."""

    def blocked(tid: int) -> int:
        status = Path(f"/proc/{program.pid}/task/{tid}/status").read_text()
        return int(status.partition("SigBlk:")[2].split()[0], 16)

    program = start_program(("env", "--block-signal=USR1"))
    before = blocked(program.restore_tid)
    inherited = sum(1 << signum - 1 for signum in signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    assert before == inherited | 1 << signal.SIGUSR1 - 1
    program.announce()
    assert is_image(program.map())
    assert blocked(program.restore_tid) == before
    with keeper.of(program.id) as ours:
        unblockable = 1 << signal.SIGKILL - 1 | 1 << signal.SIGSTOP - 1
        assert blocked(ours.tid) == (1 << 64) - 1 & ~unblockable


# Bad days: the plain path.


def test_no_address_space(start_program: Start) -> None:
    program = start_program()
    program.announce()
    program.ask(f"rlimit as {SIZE}")
    found = program.map()
    assert (found.address, found.error) == (0, errno.ENOMEM)
    (image,) = program.result.images
    assert (image.address, image.verdict, image.error) == (0, Verdict.NO_MAPPING, errno.ENOMEM)
    assert program.map("image", 32 * MIB).error == 0


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS, errno.EINVAL, errno.ENOMEM, errno.EAGAIN])
@pytest.mark.parametrize("advice", [(), (POPULATE_WRITE,)], ids=["all advice", "populate only"])
def test_a_seccomp_filter_that_forbids_madvise(start_program: Start, error: int, advice: tuple[int, ...]) -> None:
    program = start_program()
    program.announce()
    assert program.ask(" ".join(map(str, ("deny madvise", error, *advice)))) == ["0"]
    before = program.rss()
    found = program.map()
    assert is_plain(found)
    assert program.rss() < before + SIZE + 8 * MIB, "what could not be populated was undone"
    assert [(i.address, i.verdict, i.error) for i in program.result.images] == [(found.address, Verdict.NO_POPULATE, error)]
    assert program.ask(f"zero {found.address:x} {SIZE}") == ["0"]


def test_no_thread_to_be_had(start_program: Start) -> None:
    program = start_program()
    program.announce()
    assert program.ask(f"deny clone {errno.EAGAIN}") == ["0"]
    assert is_image(program.map())
    assert program.result.threads == 1


def test_one_cpu_allowed_is_one_thread(start_program: Start) -> None:
    program = start_program(("taskset", "-c", "0"))
    program.announce()
    assert is_image(program.map())
    assert program.result.threads == 1


def test_a_memory_cgroup_that_is_too_small(start_program: Start) -> None:
    """The kernel ends the program, as it does where it populates by itself."""
    with memory_cgroup() as (group, limit, _):
        (group / limit).write_text(str(64 * MIB))
        for announced in (False, True):
            program = start_program()
            (group / "cgroup.procs").write_text(str(program.process.pid))
            if announced:
                program.announce()
            assert program.process.stdin is not None
            program.process.stdin.write(f"map image {SIZE}\n")
            assert program.process.wait(60) == -signal.SIGKILL


@pytest.mark.parametrize("storm", ["fork", "vfork", "threads", "signals"])
@pytest.mark.parametrize("announced", [True, False])
def test_storms(start_program: Start, storm: str, announced: bool) -> None:
    program = start_program()
    if announced:
        program.announce()
    *address, failures = program.ask(storm)
    assert failures == "0"
    assert {i.verdict for i in program.result.images} <= {Verdict.FAST}
    if address:
        assert program.look(int(address[0], 16), 0, 0).altered is announced
    else:
        assert program.result.seen == 0, "a child is another process"
    assert is_plain(program.map("thread"))


def test_a_child_that_inherits_an_announcement_is_not_meant(start_program: Start) -> None:
    program = start_program()
    program.announce()
    assert program.ask("fork") == ["0"]
    assert program.result.seen == 0
    assert is_image(program.map())
