"""`gpuckpt suspend --keep-in DIR` on a disk that fails under the real command, or is slow, on what is no disk, or in a place that goes.

The disk is a double of the calls to it, preloaded into gpuckpt itself and its callers (``failing_disk.c``).
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpuckpt.errors import JournalError
from gpuckpt.image import preload
from gpuckpt.model import State
from gpuckpt.walk import Walk
from tests.conftest import BuiltOnce
from tests.image_machine import SHARED
from tests.memory_machine import Fault
from tests.schedules import Player, Proc, Schedule, Step
from tests.simulated_machine import Machine, Target, eventually
from tests.test_image_keep import dropped, keep, process, with_library

pytestmark = pytest.mark.skipif(bool(preload.problem()), reason="installed without a compiler")


@pytest.fixture(scope="session")
def double(built_once: BuiltOnce) -> Path:
    gcc = [*SHARED, Path(__file__).with_name("failing_disk.c"), "-ldl"]
    return built_once("disk", lambda folder: subprocess.run([*gcc, "-o", folder / "failing_disk.so"], check=True)) / "failing_disk.so"


@pytest.fixture
def target(machine: Machine, image_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Target:
    return with_library(machine, image_folder, monkeypatch)


def disk(double: Path, place: Path, fault: str) -> dict[str, str]:
    both = f"{place}:{place.with_name('sim')}/kept"  # what a simulated process holds is a link there
    return {"LD_PRELOAD": str(double), "DISK": both, "DISK_FAULT": fault, "DISK_SLOW": str(place.with_name("written"))}


@pytest.mark.parametrize(
    "fault",
    [
        f"write {errno.EDQUOT} 0",
        f"write {errno.ENOSPC} 1",  # the content is there, the header is not
        f"flush {errno.EIO} 0",  # what was written is not on the disk
        f"read {errno.EIO} 0",  # the header, before the pages go
    ],
)
def test_the_disk_fails_or_fills_up_meanwhile(machine: Machine, target: Target, place: Path, double: Path, fault: str) -> None:
    failed = keep(machine, target, place, **disk(double, place, fault))
    assert (failed.code, failed.error["code"], failed.error["pid"]) == (3, "image-not-stored", target.pid)
    assert os.strerror(int(fault.split()[1])) in failed.error["message"]
    assert (process(failed)["state"], process(failed)["host_bytes"]) == ("suspended", 2 << 30)
    assert not dropped(machine)
    assert list(place.iterdir()) == []
    assert machine.gpuckpt("resume", target.pid).code == 0
    assert target.unharmed()


@pytest.mark.parametrize("nth", [0, 1], ids=["header", "content"])
def test_a_read_error_leaves_it_on_disk_and_can_be_tried_again(
    machine: Machine, target: Target, place: Path, double: Path, nth: int
) -> None:
    assert keep(machine, target, place).code == 0
    refused = machine.gpuckpt("resume", target.pid, **disk(double, place, f"read {errno.EIO} {nth}"))
    assert (refused.code, refused.error["code"], refused.error["pid"]) == (3, "image-unreadable", target.pid)
    assert "Input/output error" in refused.error["message"]
    assert target.state is State.CHECKPOINTED
    assert process(machine.gpuckpt("status", target.pid))["disk_bytes"] == 2 << 30
    assert machine.gpuckpt("resume", target.pid).code == 0
    assert target.unharmed()


def test_a_slow_disk_is_waited_for_and_can_be_given_up(machine: Machine, target: Target, place: Path, double: Path) -> None:
    written = place.with_name("written")
    running = machine.begin("suspend", target.pid, "--keep-in", place, **disk(double, place, "slow 700 0"))
    eventually(written.exists, "it is being written")
    row = process(machine.gpuckpt("status", target.pid))
    assert (row["state"], row["disk_bytes"]) == ("in-flight", 0), "what is not on disk yet is not said to be"
    running.signal(signal.SIGINT)
    ended = running.end()
    assert (ended.code, ended.error["code"]) == (3, "image-not-stored")
    assert machine.gpuckpt("resume", target.pid).code == 0
    assert target.unharmed()
    assert list(place.iterdir()) == []
    assert keep(machine, target, place, **disk(double, place, "slow 100 0")).code == 0
    assert machine.gpuckpt("resume", target.pid).code == 0
    assert target.unharmed()


def test_a_directory_by_a_link_and_from_here(machine: Machine, target: Target, place: Path) -> None:
    """Its name is relative, and a symbolic link, which goes away: the file keeps its name, and is found by it."""
    link = machine.path / "link"
    link.symlink_to(place)
    machine.world.add_fault("link", result="EXDEV")
    kept = keep(machine, target, Path("link"))
    assert (kept.code, process(kept)["image"]["in"]) == (0, str(place))
    link.unlink()
    assert machine.gpuckpt("resume", target.pid).code == 0
    assert target.unharmed()
    assert list(place.iterdir()) == []


def test_a_journal_that_is_lost_or_anothers(machine: Machine, target: Target, place: Path) -> None:
    """Nobody knows of the file but the process, which holds it: that is enough."""
    assert keep(machine, target, place).code == 0
    shutil.rmtree(machine.state_dir)
    back = machine.gpuckpt("resume", target.pid)
    assert (back.code, process(back)["state"]) == (0, "running"), back
    assert target.unharmed()
    assert not dropped(machine)
    assert not any((machine.world.path / "kept").glob("*/held"))


def test_a_quota_is_found_before_anything_is_locked(machine: Machine, target: Target, place: Path, double: Path) -> None:
    """case 55. Of a user or a project, by which the file system refuses the room."""
    refused = keep(machine, target, place, **disk(double, place, f"room {errno.EDQUOT} 0"))
    assert (refused.code, refused.error["code"]) == (6, "image-directory")
    assert os.strerror(errno.EDQUOT) in refused.error["message"]
    assert "it takes" in refused.error["message"]
    assert target.state is State.RUNNING
    assert list(place.iterdir()) == []


def test_on_a_containers_writable_layer(machine: Machine, target: Target, place: Path) -> None:
    """case 55: a real overlay. It works, and what it costs is said."""
    layers = [place.with_name(name) for name in ("lower", "upper", "work")]
    for layer in layers:
        layer.mkdir()
    options = "lowerdir={},upperdir={},workdir={}".format(*layers)
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "overlay", "-o", options, "none", place], check=False).returncode:
        pytest.skip("no overlay can be mounted here")
    try:
        done = keep(machine, target, place)
        assert done.code == 0, done
        assert "ephemeral storage" in " ".join(done.document["warnings"])
        assert process(done)["disk_bytes"] == 2 << 30
        assert machine.gpuckpt("resume", target.pid).code == 0
        assert target.unharmed()
        assert list(place.iterdir()) == []
    finally:
        subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.parametrize("written", [False, True], ids=["before the file", "before the memory goes"])
def test_a_journal_that_cannot_say_where_the_file_is_leaves_it_in_memory(monkeypatch: pytest.MonkeyPatch, written: bool) -> None:
    """It says so before there is a file, and which it is before the memory goes: whoever comes after a kill -9 looks there."""
    real = Walk.save

    def save(self: Walk, *, required: bool = False, **changes: Any) -> None:
        if required and self.record is not None and any(m.image and ("inode" in m.image) is written for m in self.record.members):
            raise JournalError("the journal cannot be written (No space left on device)")
        real(self, required=required, **changes)

    monkeypatch.setattr(Walk, "save", save)
    player = Player.of(Schedule((Proc(gib=8),), ()))
    played = player.play(Step("suspend", keep=True))
    assert played.error is not None
    assert (played.code, played.error.code, "No space left" in played.error.message) == (3, "image-not-stored", True)
    assert set(played.after.values()) == {State.CHECKPOINTED}
    assert player.machine.dropped == set()
    monkeypatch.undo()
    assert player.play(Step("resume")).code == 0


def test_a_disk_too_slow_for_the_deadline_leaves_it_in_memory() -> None:
    """In a clock of its own: the write would take hours, and is given up 30 s and 10 s a GiB after the deadline."""
    player = Player.of(Schedule((Proc(gib=8),), ()))
    played = player.play(Step("suspend", faults=(Fault(2, seconds=1e5),), timeout_s=20, keep=True))
    assert played.code == 3
    assert played.error is not None
    assert (played.error.code, "deadline" in played.error.message) == ("image-not-stored", True)
    assert set(played.after.values()) == {State.CHECKPOINTED}
    assert played.reports[0].seconds < 20 + 30 + 80 + 5
    assert player.machine.dropped == set()
    assert player.play(Step("resume")).code == 0
    assert set(player.states().values()) == {State.RUNNING}
