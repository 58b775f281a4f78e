"""`--reserve` of programs, and `gpuckpt reserve`: memory is kept ready in the processes that use a GPU, and in no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuckpt import errors, follow, host_room
from gpuckpt.cli import ps, status
from gpuckpt.cli import reserve as command
from gpuckpt.image import keeper, preload, reserve
from gpuckpt.image.page import Unavailable
from gpuckpt.inspect import processes
from gpuckpt.model import GIB, GpuBytes, GpuProcess, HostRoom, ProcessId, Report, State
from gpuckpt.overview import Overview, Row
from tests.image_machine import MIB, Program, Start
from tests.machines import Machine as Laid
from tests.simulated_machine import COMMAND, eventually

SIZE = 32 * MIB


@pytest.fixture
def program(start_program: Start, uvm: Path) -> Program:
    found = start_program(**{reserve.VARIABLE: reserve.FIXED})
    assert found.ask(f"gpu {uvm}") == ["0"]
    return found


def gpuckpt(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *words], capture_output=True, text=True, env={**os.environ, **environ}, timeout=60, check=False)


def speaking(folder: Path, words: list[str]) -> subprocess.Popen[str]:
    """What runs the program of *folder* in the end, and lines to and from it."""
    environ = {**os.environ, "LD_LIBRARY_PATH": str(folder)}
    pipe = subprocess.PIPE
    return subprocess.Popen(words, cwd=folder, stdin=pipe, stdout=pipe, stderr=pipe, text=True, bufsize=1, env=environ)


def followers(root: int) -> list[int]:
    ours = []
    for pid in processes.table():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"gpuckpt.follow" in words and str(root).encode() in words:
            ours.append(pid)
    return ours


# By exec.


def test_of_many_programs_only_those_that_use_a_gpu(image_folder: Path, uvm: Path) -> None:
    """A shell, what it starts and waits for, and a program that gets GPU memory only later."""
    words = ["exec", "--reserve", "32MiB", "--", "sh", "-c", "/bin/true; ./program; exit 7"]
    with speaking(image_folder, [COMMAND, *words]) as shell:
        assert shell.stdin is not None
        assert shell.stdout is not None
        pid = int(shell.stdout.readline().split()[0])
        ours, shells = (identity(p) for p in (pid, shell.pid))
        for process in (ours, shells):
            with pytest.raises(Unavailable, match="no GPU yet"):
                reserve.look(process)
        print(f"gpu {uvm}", file=shell.stdin)
        assert shell.stdout.readline() == "0\n"
        assert eventually(lambda: kept(ours) == SIZE, "it is ready")
        with pytest.raises(Unavailable, match="no GPU yet"):
            reserve.look(shells)
        (follower,) = followers(shell.pid)
        assert processes.read(follower) is not None
        children = Path(f"/proc/{shell.pid}/task/{shell.pid}/children").read_text().split()
        assert children == [str(pid)], "a program has no children that it did not start"
        _, said = shell.communicate()
    assert shell.returncode == 7
    assert "32 MiB of host memory are kept ready in each process that uses a GPU" in said
    eventually(lambda: not followers(shell.pid), "it ends with the program")


IN_A_CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
WAITS = "import os\ntry:\n    os.wait()\nexcept ChildProcessError:\n    print('has no child')"


def test_as_the_first_process_of_a_container(image_folder: Path, uvm: Path) -> None:
    """Whoever has lost its parent is a child of the first process: one that waits for all of its children would wait for ever."""
    if os.geteuid() != 0:
        pytest.skip("only root can make a pid namespace")
    words = [*IN_A_CONTAINER, COMMAND, "exec", "--reserve", "32MiB", "--"]
    waited = subprocess.run([*words, sys.executable, "-c", WAITS], capture_output=True, text=True, timeout=30, check=True)
    assert waited.stdout == "has no child\n"
    with speaking(image_folder, [*words, "./program"]) as container:
        assert container.stdin is not None
        assert container.stdout is not None
        assert container.stdout.readline().split()[0] == "1"
        (first,) = Path(f"/proc/{container.pid}/task/{container.pid}/children").read_text().split()
        print(f"gpu {uvm}", file=container.stdin)
        assert container.stdout.readline() == "0\n"
        ours = identity(int(first))
        assert eventually(lambda: kept(ours) == SIZE, "it is ready")
        container.communicate()
    assert container.returncode == 0


def identity(pid: int) -> ProcessId:
    found = processes.read(pid)
    assert found is not None
    return found.id


def kept(process: ProcessId) -> int:
    try:
        return reserve.look(process).ready
    except Unavailable:
        return 0


def test_without_the_library_it_is_ignored_in_words() -> None:
    ran = gpuckpt("exec", "--reserve", "1GiB", "--", "sh", "-c", "echo [$GPUCKPT_RESERVE]", GPUCKPT_PRELOAD="0")
    assert (ran.returncode, ran.stdout) == (0, "[]\n")
    assert "--reserve does nothing without it" in ran.stderr


def test_switched_off_though_it_was_asked_for(start_program: Start, uvm: Path, image_folder: Path) -> None:
    program = Program(image_folder, {**preload.environment(), reserve.VARIABLE: reserve.AUTO, "GPUCKPT_PRELOAD": "0"})
    threads = program.threads()
    assert program.ask(f"gpu {uvm}") == ["0"]
    assert program.threads() == threads
    program.end()


@pytest.mark.parametrize("word", ["0", "x", "-1", "", "5 parsecs", "nan"])
def test_wrong_sizes(word: str) -> None:
    assert gpuckpt("exec", f"--reserve={word}", "--", "true").returncode == 125, "a status that no command is expected to have"
    if word != "0":
        ran = gpuckpt("reserve", "4242", "--json", "--", word)
        assert (ran.returncode, json.loads(ran.stdout)["error"]["code"]) == (2, "usage")


def test_a_run_tells_of_it_before_it_starts() -> None:
    ran = gpuckpt("run", "--reserve", "auto", "--dry-run", "--json", "--", "sleep", "1")
    found = json.loads(ran.stdout)
    assert found["environment"][reserve.VARIABLE] == "auto"
    assert "as many bytes as an image takes" in found["changes"]["reserve"]
    off = json.loads(gpuckpt("run", "--reserve", "auto", "--without", "preload", "--dry-run", "--json", "--", "sleep", "1").stdout)
    assert off["warnings"] == ["--reserve does nothing without the preload library"]
    assert gpuckpt("run", "--reserve", "0", "--dry-run", "--", "sleep", "1").returncode == 125


# By order.


def test_ordered_told_and_given_back(program: Program) -> None:
    told = json.loads(gpuckpt("reserve", str(program.pid), "32MiB", "--json").stdout)
    row = {"pid": program.pid, "reserved_bytes": SIZE, "wanted_bytes": SIZE, "zeroed_bytes": SIZE, "image_bytes": 0, "auto": False}
    assert (told["ok"], told["reserved"]) == (True, [row])
    assert gpuckpt("reserve", str(program.pid)).stdout == f"pid {program.pid}: 32 MiB ready\n"
    assert gpuckpt("reserve", str(program.pid), "0").stdout == f"pid {program.pid}: 0 ready\n"
    assert reserve.look(program.id).ready == 0


def test_where_none_can_be_kept(start_program: Start) -> None:
    program = start_program()
    ran = gpuckpt("reserve", str(program.pid), "1GiB", "--json")
    error = json.loads(ran.stdout)["error"]
    assert (ran.returncode, error["code"]) == (6, "no-preload")
    assert "gpuckpt exec --reserve" in error["hint"]
    assert "was not started to keep memory ready" in error["message"]


def test_no_such_process() -> None:
    assert gpuckpt("reserve", str(1 << 22), "1GiB").returncode == 4


def test_more_than_there_is_is_said(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reserve.host, "host_room", lambda *_: HostRoom(GIB, "MemAvailable"))
    report = command._reserve(str(program.pid), SIZE, lambda: True)
    (said,) = report.warnings
    assert said == f"pid {program.id}: 0 of 32 MiB are ready: MemAvailable leaves 1.0 GiB, of which 1.0 GiB are left alone"


# By following.


Held = dict[int, dict[str, int | None]]


def follower(program: Program, nbytes: int | None, held: Callable[[], Held] = dict) -> follow.Follower:
    return follow.Follower(program.id, nbytes, held)


def test_what_was_given_back_stays_so(program: Program) -> None:
    ours = follower(program, SIZE)
    assert ours.look()
    assert reserve.look(program.id).ready == SIZE
    reserve.order(program.id, 0)
    assert ours.look()
    assert reserve.look(program.id).ready == 0


def test_auto_is_what_it_holds_once_that_stays(program: Program) -> None:
    held: Held = {program.pid: {"GPU-1": 8 * MIB, "GPU-2": None}}
    ours = follower(program, None, lambda: held)
    ours.look()
    assert reserve.look(program.id).ready == 0, "it may be growing"
    ours.look()
    assert reserve.look(program.id).ready == 8 * MIB + reserve.MORE_BYTES
    held[program.pid]["GPU-1"] = 16 * MIB
    ours.look()
    ours.look()
    now = reserve.look(program.id)
    assert (now.ready, now.auto) == (16 * MIB + reserve.MORE_BYTES, True)


def test_short_of_memory_it_asks_again_later(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    room = HostRoom(GIB, "MemAvailable")
    monkeypatch.setattr(reserve.host, "host_room", lambda *_: room)
    ours = follower(program, SIZE)
    assert ours.look()
    room = HostRoom(2 * GIB, "MemAvailable")
    assert ours.look()
    assert reserve.look(program.id).ready == 0
    ours._not_before.clear()
    assert ours.look()
    assert reserve.look(program.id).ready == SIZE


def test_where_memory_gets_short_later_it_is_given_back(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program grows, or others do: what is only kept ready is not what somebody is killed for."""
    room = HostRoom(2 * GIB, "memory.max of /a")
    monkeypatch.setattr(reserve.host, "host_room", lambda *_: room)
    ours = follower(program, SIZE)
    ours.look()
    room = HostRoom(reserve.MARGIN_BYTES - 16 * MIB, "memory.max of /a")
    ours.look()
    assert reserve.look(program.id).ready == SIZE, "it is not worth while"
    room = HostRoom(reserve.LEAST_ROOM_BYTES - 1, "memory.max of /a")
    ours.look()
    now = reserve.look(program.id)
    assert 0 < now.ready < SIZE
    assert program.rss() < SIZE
    room = HostRoom(2 * GIB, "memory.max of /a")
    ours.look()
    assert reserve.look(program.id) == now, "for a while"
    ours._not_before.clear()
    ours.look()
    assert reserve.look(program.id).ready == SIZE


def test_it_ends_with_the_program(program: Program) -> None:
    ours = follower(program, SIZE)
    program.process.kill()
    program.process.communicate()
    assert not ours.look()


# What it is good for.


def test_what_is_ready_is_not_needed_once_more(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    reserve.order(program.id, SIZE)
    member = GpuProcess(program.id, "program", 0, State.RUNNING, (GpuBytes("GPU-1", GIB),))
    needed, _, short = host_room.for_images([member], "driver", Path("/"))
    assert (needed > GIB, short) == (True, [])
    for available, refused in ((needed - 1, True), (needed, False)):
        room = HostRoom(available - SIZE, "MemAvailable")
        monkeypatch.setattr(host_room.host, "host_rooms", lambda *_, room=room: [room])
        assert bool(host_room.for_images([member], "driver", Path("/"))[2]) is refused


def test_status_and_ps_tell_what_is_ready(capsys: pytest.CaptureFixture[str]) -> None:
    row = Row(7, "train", "alice", "running", reserved_bytes=SIZE)
    status.show(Report("status", True, False, details={"_overview": Overview((), (row,))}))
    assert capsys.readouterr().out == "running: pid 7 (train, alice)  32 MiB of host memory kept ready\n"
    assert ps.row_dict(row)["reserved_bytes"] == SIZE


def test_the_doctor_tells_what_is_ready(program: Program, tmp_path: Path) -> None:
    reserve.order(program.id, SIZE)
    machine = Laid(tmp_path / "machine")
    machine.process(program.pid, 1, "trainer", maps=f"7f0000000000-7f0000001000 r-xp 00000000 08:01 7 {preload.library()}\n")
    assert f"kept ready for images: 0.0 GiB in {program.pid} (trainer)" in machine.line("preload library").message


# Bad days.


def test_a_gpuckpt_that_is_killed_in_the_middle(program: Program) -> None:
    """What it had asked for last is all that comes, and the next one goes on from there."""
    with keeper.of(program.id) as found:
        found.have_ready(SIZE // 2, auto=False)
    eventually(lambda: reserve.look(program.id).ready == SIZE // 2, "the step that was asked for")
    assert reserve.order(program.id, SIZE) == reserve.Outcome(SIZE)


def test_ctrl_c_says_that_what_is_ready_stays(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> reserve.Outcome:
        raise KeyboardInterrupt

    monkeypatch.setattr(reserve, "order", interrupted)
    monkeypatch.setattr(command, "execute", lambda _name, _as_json, body, _show: body())
    assert command.reserve.callback is not None
    with pytest.raises(errors.Interrupted, match="what is ready by now stays so"):
        command.reserve.callback(str(program.pid), SIZE, 1.0, as_json=False)


def test_a_program_that_is_killed_takes_its_memory_along(program: Program) -> None:
    with keeper.of(program.id) as found:
        found.have_ready(512 * MIB, auto=False)  # it is being populated
    program.process.kill()
    program.process.communicate()
    with pytest.raises(Unavailable):
        reserve.look(program.id)
    assert reserve.ready_bytes(program.id) == 0


def test_a_program_that_is_stopped_is_said_to_be(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reserve.look(program.id).ready == 0
    monkeypatch.setattr(keeper, "ANSWER_S", 0.05)
    program.stop()
    with pytest.raises(keeper.Unanswered, match="stopped"):
        reserve.order(program.id, SIZE)
    with pytest.raises(errors.Stopped, match="nothing was asked of it") as caught:
        command._reserve(str(program.pid), SIZE, lambda: True)
    assert caught.value.hint == f"kill -CONT {program.pid}"
