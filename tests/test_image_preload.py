"""The preload library acts on the driver's image and on nothing else, and never is why a mapping fails."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpuckpt.driver import caller
from gpuckpt.driver.api import CallError
from gpuckpt.errors import DriverTooOld
from gpuckpt.image import preload
from gpuckpt.image.preload import Unavailable, Verdict
from gpuckpt.model import ProcessId
from tests.image_machine import MIB, Mapped, Program, build

MAP_PRIVATE, MAP_FIXED, MAP_ANONYMOUS, MAP_NORESERVE, MAP_POPULATE = 0x02, 0x10, 0x20, 0x4000, 0x8000
IMAGE = MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE
SIZE = 256 * MIB
POPULATE_WRITE = 23

Start = Callable[..., Program]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("image") / "built")


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    started = []

    def begin(prefix: tuple[str, ...] = (), **environ: str) -> Program:
        with_ours = preload.environment({**os.environ, **environ})
        started.append(Program(folder, with_ours, prefix))
        return started[-1]

    yield begin
    for program in started:
        program.process.kill()
        program.process.communicate()


def is_image(found: Mapped, nbytes: int = SIZE) -> bool:
    """Altered as meant, and populated as the program asked."""
    return {"hg", "dd"} <= found.flags and found.rss >= nbytes and found.error == 0


def is_plain(found: Mapped, nbytes: int = SIZE) -> bool:
    """As the kernel makes it of MAP_POPULATE by itself."""
    return not found.altered and found.rss >= nbytes and found.error == 0


# What it does.


def test_the_image_has_huge_pages_is_populated_and_stays_out_of_core_dumps(start: Start) -> None:
    program = start()
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


def test_it_is_zero_and_its_end_returns_the_memory(start: Start) -> None:
    program = start()
    program.announce()
    before = program.rss()
    found = program.map()
    assert program.ask(f"zero {found.address:x} {SIZE}") == ["0"]
    assert program.rss() >= before + SIZE
    assert program.ask(f"unmap {found.address:x} {SIZE}") == ["0"]
    assert program.rss() < before + 2 * MIB
    again = program.map()
    assert program.ask(f"zero {again.address:x} {SIZE}") == ["0"]


def test_helpers_are_gone_and_no_signal_is_lost_to_them(start: Start) -> None:
    program = start()
    threads = program.threads()
    program.announce()
    assert is_image(program.map())
    assert program.threads() == threads


@pytest.mark.parametrize("nbytes", [32 * MIB, 33 * MIB + 4096, 100 * MIB - 4096, 129 * MIB + 4096])
def test_odd_sizes(start: Start, nbytes: int) -> None:
    program = start()
    program.announce()
    found = program.map("image", nbytes)
    assert is_image(found, nbytes)
    assert program.ask(f"zero {found.address:x} {nbytes}") == ["0"]


def test_more_images_than_it_notes(start: Start) -> None:
    program = start()
    program.announce()
    for _ in range(18):
        found = program.map("image", 32 * MIB)
        program.ask(f"unmap {found.address:x} {32 * MIB}")
    assert (program.result.seen, len(program.result.images)) == (18, 16)


# When it does nothing.


def test_nothing_without_an_announcement(start: Start) -> None:
    program = start()
    assert is_plain(program.map())
    assert (program.result.operation, program.result.seen) == (0, 0)


@pytest.mark.parametrize(
    ("who", "verdict"), [("thread", Verdict.OTHER_THREAD), ("caller", Verdict.OTHER_CALLER), ("both", Verdict.OTHER_THREAD)]
)
def test_nothing_for_another_thread_or_caller(start: Start, who: str, verdict: Verdict) -> None:
    program = start()
    program.announce()
    assert is_plain(program.map(who))
    assert (program.result.seen, program.result.last, program.result.images) == (1, verdict, ())


def test_what_it_saw_tells_who_the_caller_was(start: Start) -> None:
    program = start()
    program.announce()
    program.map("caller")
    caller, tid = program.result.last_caller, program.result.last_tid
    assert tid == program.restore_tid
    mapped = Path(f"/proc/{program.pid}/maps").read_text().splitlines()
    (where,) = [line for line in mapped if (r := line.split()[0].split("-")) and int(r[0], 16) <= caller < int(r[1], 16)]
    assert where.endswith("/program")


def test_nothing_when_withdrawn(start: Start) -> None:
    program = start()
    operation = program.announce()
    assert is_image(program.map())
    preload.withdraw(program.id, operation)
    assert is_plain(program.map())
    assert len(program.result.images) == 1, "what it did before stays to be read"


def test_nothing_when_the_announcement_is_stale(start: Start) -> None:
    program = start()
    program.announce(seconds=0.0)
    assert is_plain(program.map())
    assert (program.result.last, program.result.images) == (Verdict.EXPIRED, ())


def test_nothing_where_it_is_switched_off(start: Start) -> None:
    program = start(GPUCKPT_PRELOAD="0")
    assert not preload.loaded(program.pid)
    with pytest.raises(Unavailable, match="no preload library"):
        program.announce()
    assert is_plain(program.map())


def test_switched_off_though_it_was_preloaded(folder: Path, start: Start) -> None:
    program = Program(folder, {**preload.environment(), "GPUCKPT_PRELOAD": "0"})
    assert preload.loaded(program.pid)
    with pytest.raises(Unavailable, match="GPUCKPT_PRELOAD=0"):
        program.announce()
    assert is_plain(program.map())
    program.end()


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
def test_nothing_to_other_mappings_of_the_driver(start: Start, what: str, nbytes: int, flags: int, protection: int) -> None:
    program = start()
    program.announce()
    found = program.map("image", nbytes, flags, protection)
    assert found.error == 0
    assert not found.altered
    assert (found.rss >= nbytes) == bool(flags & MAP_POPULATE and protection & 2), "what is only read is the kernel's one page of zeros"
    assert program.result.seen == 0


def test_nothing_to_a_fixed_mapping(start: Start) -> None:
    program = start()
    program.announce()
    there = program.map("image", SIZE, MAP_PRIVATE | MAP_ANONYMOUS, 0)
    found = program.map("image", SIZE, IMAGE | MAP_FIXED, 3, hex(there.address))
    assert found.address == there.address
    assert is_plain(found)


def test_a_hint_is_passed_on_and_so_is_noreserve(start: Start) -> None:
    program = start()
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
def test_errors_are_those_of_the_kernel(folder: Path, start: Start, call: tuple[int | str, ...]) -> None:
    with_ours, without = start(), Program(folder, dict(os.environ))
    with_ours.announce()
    one, other = with_ours.map("image", *call), without.map("image", *call)  # type: ignore[arg-type]
    assert (one.address, other.address) == (0, 0)
    assert one.error == other.error != 0
    without.end()


# Bad days: the plain path.


def test_no_address_space(start: Start) -> None:
    program = start()
    program.announce()
    program.ask(f"rlimit as {SIZE}")
    found = program.map()
    assert (found.address, found.error) == (0, errno.ENOMEM)
    (image,) = program.result.images
    assert (image.address, image.verdict, image.error) == (0, Verdict.NO_MAPPING, errno.ENOMEM)
    assert program.map("image", 32 * MIB).error == 0


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS, errno.EINVAL, errno.ENOMEM, errno.EAGAIN])
@pytest.mark.parametrize("advice", [(), (POPULATE_WRITE,)], ids=["all advice", "populate only"])
def test_a_seccomp_filter_that_forbids_madvise(start: Start, error: int, advice: tuple[int, ...]) -> None:
    program = start()
    program.announce()
    assert program.ask(" ".join(map(str, ("deny madvise", error, *advice)))) == ["0"]
    before = program.rss()
    found = program.map()
    assert is_plain(found)
    assert program.rss() < before + SIZE + 8 * MIB, "what could not be populated was undone"
    assert [(i.address, i.verdict, i.error) for i in program.result.images] == [(found.address, Verdict.NO_POPULATE, error)]
    assert program.ask(f"zero {found.address:x} {SIZE}") == ["0"]


def test_no_thread_to_be_had(start: Start) -> None:
    program = start()
    program.announce()
    assert program.ask(f"deny clone {errno.EAGAIN}") == ["0"]
    assert is_image(program.map())
    assert program.result.threads == 1


def test_one_cpu_allowed_is_one_thread(start: Start) -> None:
    program = start(("taskset", "-c", "0"))
    program.announce()
    assert is_image(program.map())
    assert program.result.threads == 1


def test_a_memory_cgroup_that_is_too_small(start: Start) -> None:
    """The kernel ends the program, as it does where it populates by itself."""
    fs = Path("/sys/fs/cgroup")
    parent, limit = (fs / "memory", "memory.limit_in_bytes") if (fs / "memory").is_dir() else (fs, "memory.max")
    group = parent / f"gpuckpt-test-{os.getpid()}"
    if not os.access(parent, os.W_OK) or not (parent / "cgroup.procs").exists():
        pytest.skip("no cgroup can be made here")
    group.mkdir()
    try:
        if not (group / limit).exists():
            pytest.skip("no memory controller here")
        (group / limit).write_text(str(64 * MIB))
        for announced in (False, True):
            program = start()
            (group / "cgroup.procs").write_text(str(program.process.pid))
            if announced:
                program.announce()
            assert program.process.stdin is not None
            program.process.stdin.write(f"map image {SIZE}\n")
            assert program.process.wait(60) == -signal.SIGKILL
    finally:
        group.rmdir()


@pytest.mark.parametrize("storm", ["fork", "vfork", "threads", "signals"])
@pytest.mark.parametrize("announced", [True, False])
def test_storms(start: Start, storm: str, announced: bool) -> None:
    program = start()
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


def test_a_child_that_inherits_an_announcement_is_not_meant(start: Start) -> None:
    program = start()
    program.announce()
    assert program.ask("fork") == ["0"]
    assert program.result.seen == 0
    assert is_image(program.map())


# Among others.


def test_it_calls_no_malloc(start: Start, folder: Path) -> None:
    program = start(LD_PRELOAD=str(folder / "malloc.so"))
    program.announce()
    found = program.map()
    assert is_image(found)
    assert found.mallocs == 0


def test_other_preloads_are_kept_and_see_every_mapping(start: Start, folder: Path) -> None:
    program = start(LD_PRELOAD=f"{folder}/mmap.so {folder}/nowhere.so")
    program.announce()
    assert is_image(program.map())
    assert is_plain(program.map("thread"))
    seen = program.end()
    assert seen.count("interposed") == 2
    assert "nowhere.so" in seen, "the loader says so, as it did before"


def test_an_interposer_before_ours_hides_the_caller(folder: Path, start: Start) -> None:
    """It calls the kernel itself: nothing is altered, and nothing goes wrong."""
    ours = preload.environment()["LD_PRELOAD"]
    program = Program(folder, {**os.environ, "LD_PRELOAD": f"{folder}/mmap.so:{ours}"})
    program.announce()
    assert is_plain(program.map())
    assert program.result.seen == 0
    program.end()


def test_where_the_library_cannot_be_seen_only_the_loader_says_so(tmp_path: Path) -> None:
    """A child in a mount namespace or a chroot without it."""
    ours = preload.library()
    assert ours is not None
    hidden = tmp_path / "gone" / ours.name
    ran = subprocess.run(["/bin/echo", "runs"], env={"LD_PRELOAD": str(hidden)}, capture_output=True, text=True, check=True)
    assert ran.stdout == "runs\n"
    assert len(ran.stderr.splitlines()) == 1
    assert "ld.so" in ran.stderr
    if os.geteuid() != 0:
        return
    script = f"mount -t tmpfs none {ours.parent} && /bin/echo runs"
    ran = subprocess.run(["unshare", "-m", "sh", "-c", script], env=preload.environment(), capture_output=True, text=True, check=True)
    assert ran.stdout == "runs\n"
    assert all("ld.so" in line for line in ran.stderr.splitlines())


def test_beside_a_library_that_the_machine_preloads(start: Start, folder: Path, tmp_path: Path) -> None:
    """By /etc/ld.so.preload, which the loader takes after LD_PRELOAD."""
    if os.geteuid() != 0:
        pytest.skip("only root can lay one out")
    script = tmp_path / "with-preload"
    upper, work = tmp_path / "tmpfs/upper", tmp_path / "tmpfs/work"
    upper.parent.mkdir()
    script.write_text(
        f"#!/bin/sh\nset -e\nmount -t tmpfs none {upper.parent}\nmkdir {upper} {work}\necho {folder}/mmap.so > {upper}/ld.so.preload\n"
        f'mount -t overlay none -o lowerdir=/etc,upperdir={upper},workdir={work} /etc\nexec "$@"\n'
    )
    script.chmod(0o755)
    if subprocess.run(["unshare", "-m", script, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no overlay can be mounted here")
    program = start(("unshare", "-m", str(script)))
    program.announce()
    assert is_image(program.map())
    assert program.end().count("interposed") == 1


def test_it_needs_no_newer_c_library_than_the_oldest_in_use() -> None:
    """A container that inherits LD_PRELOAD and sees the file would end at its start."""
    text = subprocess.run(["readelf", "-V", str(preload.library())], capture_output=True, text=True, check=True).stdout
    versions = {tuple(map(int, v.split("."))) for v in re.findall(r"GLIBC_([\d.]+)", text)}
    assert versions
    assert max(versions) <= (2, 17)


def test_a_setuid_program_does_not_load_it(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make one")
    program = tmp_path / "setuid"
    program.write_bytes(Path("/bin/cat").read_bytes())
    program.chmod(0o4755)
    tmp_path.chmod(0o755)
    command = ["setpriv", "--reuid=65534", "--clear-groups", str(program), "/proc/self/maps"]
    ran = subprocess.run(command, env=preload.environment(), capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        pytest.skip(f"cannot be run here: {ran.stderr}")
    assert preload.NAME not in ran.stdout
    assert ran.stderr == ""


def test_a_static_program_runs_without_it(tmp_path: Path) -> None:
    source = tmp_path / "static.c"
    source.write_text('#include <stdio.h>\nint main(void) { puts("runs"); return 0; }\n')
    if subprocess.run(["gcc", "-static", "-o", tmp_path / "static", source], capture_output=True, check=False).returncode != 0:
        pytest.skip("no static C library here")
    assert subprocess.check_output([tmp_path / "static"], env=preload.environment()) == b"runs\n"


# A checkpoint by gpuckpt.


class Backend:
    """A driver whose checkpoint has the program map an image."""

    def __init__(self, program: Program, **answers: Exception) -> None:
        self.program, self.answers, self.found = program, answers, Mapped(0, 0)

    def restore_thread(self, pid: int) -> int:
        assert pid == self.program.pid
        if "restore_thread" in self.answers:
            raise self.answers["restore_thread"]
        return self.program.restore_tid

    def checkpoint(self, pid: int) -> None:
        assert pid == self.program.pid
        self.found = self.program.map()
        if "checkpoint" in self.answers:
            raise self.answers["checkpoint"]


def test_a_checkpoint_is_announced_while_it_lasts(start: Start) -> None:
    program = start()
    backend = Backend(program)
    caller._checkpoint(backend, program.id)  # type: ignore[arg-type]
    assert is_image(backend.found)
    assert (program.result.operation, len(program.result.images)) == (0, 1)
    assert is_plain(program.map())


def test_a_checkpoint_without_it_for_once(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    program = start()
    monkeypatch.setenv("GPUCKPT_PRELOAD", "0")
    backend = Backend(program)
    caller._checkpoint(backend, program.id)  # type: ignore[arg-type]
    assert is_plain(backend.found)


def test_a_checkpoint_that_fails_is_withdrawn_too(start: Start) -> None:
    program = start()
    with pytest.raises(CallError, match="UNKNOWN"):
        caller._checkpoint(Backend(program, checkpoint=CallError("checkpoint", "UNKNOWN")), program.id)  # type: ignore[arg-type]
    assert program.result.operation == 0


@pytest.mark.parametrize("error", [CallError("restore-thread", "NOT_SUPPORTED"), DriverTooOld("no such function")])
def test_a_restore_thread_that_cannot_be_had_keeps_no_checkpoint(start: Start, error: Exception) -> None:
    program = start()
    backend = Backend(program, restore_thread=error)
    caller._checkpoint(backend, program.id)  # type: ignore[arg-type]
    assert is_plain(backend.found)


def test_a_program_without_the_library_is_not_asked(folder: Path) -> None:
    program = Program(folder, dict(os.environ))
    backend = Backend(program, restore_thread=AssertionError("asked"))
    caller._checkpoint(backend, program.id)  # type: ignore[arg-type]
    assert is_plain(backend.found)
    program.end()


# The other side.


def test_environment_puts_ours_first_once_and_keeps_the_rest() -> None:
    ours = str(preload.library())
    assert preload.environment({})["LD_PRELOAD"] == ours
    assert preload.environment({"LD_PRELOAD": "/a.so /b.so", "A": "1"}) == {"LD_PRELOAD": f"{ours}:/a.so:/b.so", "A": "1"}
    twice = preload.environment(preload.environment({"LD_PRELOAD": "/a.so"}))
    assert twice["LD_PRELOAD"] == f"{ours}:/a.so"
    off = {"LD_PRELOAD": "/a.so", "GPUCKPT_PRELOAD": "0"}
    assert preload.environment(off) == off


def test_a_missing_or_broken_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(preload, "library", lambda: None)
    assert "C compiler" in preload.problem({})
    assert preload.environment({"A": "1"}) == {"A": "1"}
    broken = tmp_path / "broken.so"
    broken.write_text("no library")
    monkeypatch.setattr(preload, "library", lambda: broken)
    assert "broken.so" in preload.problem({})
    monkeypatch.setattr(preload, "library", lambda: tmp_path / "a b" / "it.so")
    assert "space" in preload.problem({})


def test_programs_that_do_not_have_it() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as program:
        ours = preload.processes.read(program.pid)
        assert ours is not None
        assert not preload.loaded(program.pid)
        with pytest.raises(Unavailable, match="no preload library"):
            preload.announce(ours.id, program.pid)
        with preload.announced(ours.id, program.pid) as operation:
            assert operation == 0
        with pytest.raises(Unavailable, match="is gone"):
            preload.announce(ProcessId(program.pid, ours.start_ticks + 1), program.pid)
        program.communicate()
    with pytest.raises(Unavailable):
        preload.result(ours.id)
    preload.withdraw(ours.id, 1)
    assert not preload.loaded(program.pid)


def test_a_program_without_libcuda_or_without_that_thread(folder: Path, start: Start) -> None:
    program = start()
    with pytest.raises(Unavailable, match="no thread 1"):
        program.announce(tid=1)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, env=preload.environment()) as cat:
        until = time.monotonic() + 20
        while not preload.loaded(cat.pid) and time.monotonic() < until:
            time.sleep(0.01)
        ours = preload.processes.read(cat.pid)
        assert ours is not None
        with pytest.raises(Unavailable, match=r"libcuda|starting"):
            preload.announce(ours.id, cat.pid)
        cat.communicate()


def test_an_announcement_that_fails_withdraws_what_was_there(start: Start) -> None:
    program = start()
    program.announce()
    with pytest.raises(Unavailable):
        program.announce(tid=1)
    assert is_plain(program.map())


def test_another_version_is_left_alone(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    program = start()
    monkeypatch.setattr(preload, "_VERSION", 2)
    with pytest.raises(Unavailable, match="another gpuckpt"):
        program.announce()


def test_a_page_that_the_program_overwrote(start: Start) -> None:
    program = start()
    program.announce()
    with preload._page(program.id) as (memory, at):
        os.pwrite(memory, b"\xff" * 16, at + preload._RESULT_AT)
    with pytest.raises(Unavailable, match="no sense"):
        _ = program.result


def test_a_stopped_program_can_be_announced_to_and_read(start: Start) -> None:
    program = start()
    os.kill(program.pid, signal.SIGSTOP)
    program.announce()
    os.kill(program.pid, signal.SIGCONT)
    assert is_image(program.map())


def test_in_a_pid_namespace_of_its_own(folder: Path, start: Start) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make one")
    program = start(("unshare", "--pid", "--fork", "--kill-child"))
    assert program.pid == 1, "as it sees itself"
    (child,) = Path(f"/proc/{program.process.pid}/task/{program.process.pid}/children").read_text().split()
    inside = preload.processes.read(int(child))
    assert inside is not None
    restore = [int(t) for t in os.listdir(f"/proc/{child}/task") if t != child]
    preload.announce(inside.id, *restore)
    assert program.ask(f"map image {SIZE}")[1] == "0"
    assert [i.verdict for i in preload.result(inside.id).images] == [Verdict.FAST]


def test_threads_by_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "proc/7").mkdir(parents=True)
    (tmp_path / "proc/7/cgroup").write_text("0::/a/b\n")
    for name, text in {"a/b": "max 100000", "a": "250000 100000"}.items():
        (tmp_path / "sys/fs/cgroup" / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys/fs/cgroup" / name / "cpu.max").write_text(text + "\n")
    assert preload.host.cpu_quota(7, tmp_path) == 3
    (tmp_path / "proc/7/cgroup").write_text("4:cpu,cpuacct:/c\n")
    (tmp_path / "sys/fs/cgroup/cpu/c").mkdir(parents=True)
    for name, text in {"cpu.cfs_quota_us": "150000", "cpu.cfs_period_us": "100000"}.items():
        (tmp_path / "sys/fs/cgroup/cpu/c" / name).write_text(text + "\n")
    assert preload.host.cpu_quota(7, tmp_path) == 2
    (tmp_path / "sys/fs/cgroup/cpu/c/cpu.cfs_quota_us").write_text("-1\n")
    assert preload.host.cpu_quota(7, tmp_path) == sys.maxsize
    monkeypatch.setattr(preload.os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(preload.host, "cpu_quota", lambda _: 40)
    assert preload.threads(7) == 16
