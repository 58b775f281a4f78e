"""The preload library from outside: what is announced to it, when, and what it says it did."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gpuckpt.driver import caller
from gpuckpt.driver.api import CallError
from gpuckpt.errors import DriverTooOld
from gpuckpt.image import keeper, memory, page, preload
from gpuckpt.image.preload import Unavailable, Verdict
from gpuckpt.inspect import processes
from gpuckpt.model import Call, ProcessId, State
from tests.image_machine import SIZE, Mapped, Program, Start, is_image, is_plain

# A checkpoint by gpuckpt.


class Backend:
    """A driver whose checkpoint has the program map an image."""

    def __init__(self, program: Program, **answers: Exception) -> None:
        self.program, self.answers, self.found = program, answers, Mapped(0, 0)
        self.now, self.first = State.LOCKED, 0

    def restore_thread(self, pid: int) -> int:
        assert pid == self.program.pid
        if "restore_thread" in self.answers:
            raise self.answers["restore_thread"]
        return self.program.restore_tid

    def state(self, pid: int) -> State:
        return self.now

    def image(self, process: ProcessId) -> Any:
        return memory.of(process)

    def image_dropped(self, process: ProcessId) -> bool:
        return keeper.dropped(process)

    def restore(self, pid: int, gpu_map: dict[str, str], *, initialise: bool) -> None:
        (zero,) = self.program.ask(f"zero {self.found.address:x} {SIZE}")
        assert zero == str(SIZE // 8), "its image is whole"
        self.program.ask(f"unmap {self.found.address:x} {SIZE}")
        self.now = State.LOCKED

    def checkpoint(self, pid: int) -> None:
        assert pid == self.program.pid
        self.found = self.program.map()
        self.first = self.first or self.found.address
        if "checkpoint" in self.answers:
            raise self.answers["checkpoint"]
        self.now = State.CHECKPOINTED


def test_a_checkpoint_is_announced_while_it_lasts(start_program: Start) -> None:
    program = start_program()
    backend = Backend(program)
    caller._checkpoint(backend, program.id)  # type: ignore[arg-type]
    assert is_image(backend.found)
    assert (program.result.operation, len(program.result.images)) == (0, 1)
    assert is_plain(program.map())


def test_a_checkpoint_without_it_for_once(start_program: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    program = start_program()
    monkeypatch.setenv("GPUCKPT_PRELOAD", "0")
    backend = Backend(program)
    caller._checkpoint(backend, program.id)  # type: ignore[arg-type]
    assert is_plain(backend.found)


def test_a_checkpoint_that_fails_is_withdrawn_too(start_program: Start) -> None:
    program = start_program()
    with pytest.raises(CallError, match="UNKNOWN"):
        caller._checkpoint(Backend(program, checkpoint=CallError("checkpoint", "UNKNOWN")), program.id)  # type: ignore[arg-type]
    assert program.result.operation == 0


def call(backend: Backend, call: Call, **image: Any) -> dict[str, Any]:
    """What a caller answers."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        found = processes.read(backend.program.pid)
        assert found is not None
        request = {"call": call, "pid": found.pid, "start_ticks": found.start_ticks, "gpu_map": {}, "initialise": False, "image": image}
        caller._serve(request, theirs, backend, None)  # type: ignore[arg-type]
        answer: dict[str, Any] = json.loads(ours.recv(1 << 16))
        return answer


def open_here(device: int, inode: int) -> list[int]:
    """Our descriptors of that file."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            status = os.fstat(int(name))
            found += [int(name)] if (status.st_dev, status.st_ino) == (device, inode) else []
    return found


def test_an_image_on_disk_from_checkpoint_to_restore(start_program: Start, tmp_path: Path) -> None:
    """All calls of callers, but the driver's, on a real process."""
    program = start_program()
    backend = Backend(program)
    assert call(backend, Call.STORE, directory=str(tmp_path), operation="ab")["result"] == "gpuckpt:image-not-stored"
    assert call(backend, Call.CHECKPOINT)["result"] == "SUCCESS"
    program.ask(f"zero {backend.found.address:x} {SIZE}")
    assert preload.described(program.id)["path"] == "preload"
    stored = call(backend, Call.STORE, directory=str(tmp_path), operation="ab")
    assert (stored["result"], stored["image"]["nbytes"]) == ("SUCCESS", SIZE)
    assert call(backend, Call.DROP, **stored["image"])["result"] == "SUCCESS"
    assert preload.described(program.id)["bytes"] == SIZE, "by which a resume without a journal knows what room it takes"
    refused = call(backend, Call.RESTORE)
    assert refused["result"] == "gpuckpt:image-unreadable"
    assert call(backend, Call.CHECKPOINT)["result"] == "SUCCESS", "of a driver that allows it twice"
    assert keeper.dropped(program.id), "and nothing is forgotten"
    assert call(backend, Call.LOAD, **stored["image"])["image"] == {"loaded_bytes": SIZE}
    backend.found = program.look(backend.first, 0, SIZE)
    assert call(backend, Call.RESTORE)["result"] == "SUCCESS"
    (still,) = open_here(*stored["image"]["inode"])  # or the process would wait for the removal of the file, locked
    os.close(still)
    after = preload.described(program.id)
    assert (after["path"], after["dropped"], "no checkpoint" in after["why"]) == ("driver", False, True)
    with pytest.raises(Unavailable, match="no keeper"), keeper.of(program.id):
        pass


@pytest.mark.parametrize("error", [CallError("restore-thread", "NOT_SUPPORTED"), DriverTooOld("no such function")])
def test_a_restore_thread_that_cannot_be_had_keeps_no_checkpoint(start_program: Start, error: Exception) -> None:
    program = start_program()
    backend = Backend(program, restore_thread=error)
    caller._checkpoint(backend, program.id)  # type: ignore[arg-type]
    assert is_plain(backend.found)


def test_a_program_without_the_library_is_not_asked(image_folder: Path) -> None:
    program = Program(image_folder, dict(os.environ))
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
        ours = processes.read(program.pid)
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


def test_a_program_without_libcuda_or_without_that_thread(image_folder: Path, start_program: Start) -> None:
    program = start_program()
    with pytest.raises(Unavailable, match="no thread 1"):
        program.announce(tid=1)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, env=preload.environment()) as cat:
        until = time.monotonic() + 20
        while not preload.loaded(cat.pid) and time.monotonic() < until:
            time.sleep(0.01)
        ours = processes.read(cat.pid)
        assert ours is not None
        with pytest.raises(Unavailable, match=r"libcuda|starting"):
            preload.announce(ours.id, cat.pid)
        cat.communicate()


def test_a_library_of_which_a_part_is_mapped_so_far_is_starting(start_program: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    program = start_program()
    whole = page.mappings
    monkeypatch.setattr(page, "mappings", lambda pid, name: [m for m in whole(pid, name) if m[2] != b"rw-p"])
    assert preload.loaded(program.pid)
    with pytest.raises(Unavailable, match="is just starting"):
        program.announce()


def test_an_announcement_that_fails_withdraws_what_was_there(start_program: Start) -> None:
    program = start_program()
    program.announce()
    with pytest.raises(Unavailable):
        program.announce(tid=1)
    assert is_plain(program.map())


def test_another_version_is_left_alone(start_program: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    program = start_program()
    monkeypatch.setattr(page, "_VERSION", 99)
    with pytest.raises(Unavailable, match="another gpuckpt"):
        program.announce()


def test_a_page_that_the_program_overwrote(start_program: Start) -> None:
    program = start_program()
    program.announce()
    with page.opened(program.id) as (memory, at):
        os.pwrite(memory, b"\xff" * 16, at + page.RESULT_AT)
    with pytest.raises(Unavailable, match="no sense"):
        _ = program.result


def test_a_stopped_program_can_be_announced_to_and_read(start_program: Start) -> None:
    program = start_program()
    os.kill(program.pid, signal.SIGSTOP)
    program.announce()
    os.kill(program.pid, signal.SIGCONT)
    assert is_image(program.map())


def test_in_a_pid_namespace_of_its_own(image_folder: Path, start_program: Start) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make one")
    program = start_program(("unshare", "--pid", "--fork", "--kill-child"))
    assert program.pid == 1, "as it sees itself"
    (child,) = Path(f"/proc/{program.process.pid}/task/{program.process.pid}/children").read_text().split()
    inside = processes.read(int(child))
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
