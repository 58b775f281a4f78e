"""`gpuckpt suspend --keep-in DIR` on bad days: what fails on the way to disk or back, or ends on it, is never lost without a word."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from gpuckpt.image import preload
from gpuckpt.model import State
from tests.simulated_machine import Machine, Running, Target, eventually
from tests.test_image_keep import dropped, keep, process, target

__all__ = ["target"]


@pytest.mark.parametrize(("request_", "result"), [("hold", None), ("drop", "EINVAL")])
def test_the_group_stays_suspended_where_it_cannot_be_stored(
    machine: Machine, target: Target, place: Path, request_: str, result: str | None
) -> None:
    machine.world.add_fault(request_, result=result, hang=result is None)
    failed = keep(machine, target, place)
    assert (failed.code, failed.error["code"]) == (3, "image-not-stored")
    assert (process(failed)["state"], process(failed)["host_bytes"]) == ("suspended", 2 << 30)
    assert str(target.pid) in failed.error["message"]
    assert machine.gpuckpt("is-suspended", target.pid).code == 0
    assert machine.gpuckpt("resume", target.pid).code == 0
    assert target.unharmed()
    assert list(place.iterdir()) == []


def test_ctrl_c_while_it_is_stored(machine: Machine, target: Target, place: Path) -> None:
    machine.world.add_fault("hold", delay_s=30.0)
    running = machine.begin("suspend", target.pid, "--keep-in", place)
    eventually(lambda: list(place.iterdir()), "the file is made")
    running.signal(signal.SIGINT)
    ended = running.end()
    assert (ended.code, ended.error["code"]) == (3, "image-not-stored")
    assert "interrupted" in ended.error["message"]
    machine.kill_callers()
    assert machine.gpuckpt("resume", target.pid).code == 0
    assert target.unharmed()


def test_everything_is_killed_while_it_is_stored(machine: Machine, target: Target, place: Path) -> None:
    machine.world.add_fault("hold", delay_s=30.0)
    running = machine.begin("suspend", target.pid, "--keep-in", place)
    (half,) = eventually(lambda: list(place.iterdir()), "the file is made")
    running.signal(signal.SIGKILL)
    machine.kill_callers()
    running.end()
    cleaned = machine.gpuckpt("recover", json=False)
    assert cleaned.code == 0
    assert str(half) in cleaned.stderr
    assert list(place.iterdir()) == []
    assert machine.gpuckpt("resume", target.pid).code == 0
    assert target.unharmed()


def test_everything_is_killed_and_the_target_too(machine: Machine, target: Target, place: Path) -> None:
    machine.world.add_fault("hold", delay_s=30.0)
    running = machine.begin("suspend", target.pid, "--keep-in", place)
    eventually(lambda: list(place.iterdir()), "the file is made")
    running.signal(signal.SIGKILL)
    machine.kill_callers()
    running.end()
    target.kill()
    machine.gpuckpt("recover")
    assert list(place.iterdir()) == []
    assert machine.records() == []


@pytest.mark.parametrize("held", [True, False])
def test_the_target_is_killed_while_its_image_is_on_disk(machine: Machine, target: Target, place: Path, held: bool) -> None:
    if not held:
        machine.world.add_fault("link", result="EXDEV")
    assert keep(machine, target, place).code == 0
    assert len(list(place.iterdir())) == (not held)
    target.kill()
    machine.gpuckpt("recover")
    assert list(place.iterdir()) == []
    assert not any((machine.world.path / "kept").glob("*/held"))


@pytest.mark.parametrize(("command", "request_"), [("suspend", "hold"), ("resume", "fill")])
def test_the_target_is_killed_while_its_image_is_moved(machine: Machine, target: Target, place: Path, command: str, request_: str) -> None:
    """It is not said to be suspended, and nothing of it is left."""
    if command == "resume":
        assert keep(machine, target, place).code == 0
    machine.world.add_fault(request_, delay_s=1.0)
    running = machine.begin(command, target.pid, *(["--keep-in", place] if command == "suspend" else []))
    eventually(lambda: machine.faults_left() == 0, "the move")
    target.kill()
    ended = running.end()
    assert (ended.code, ended.error["code"], ended.error["pid"]) == (1, "group-changed", target.pid)
    assert process(ended)["state"] == "gone"
    assert machine.records() == []
    assert list(place.iterdir()) == []
    assert not any((machine.world.path / "kept").glob("*/held"))


@pytest.mark.parametrize("command", ["suspend", "resume"])
def test_one_of_a_group_is_killed_while_images_are_moved(
    machine2: Machine, image_folder: Path, monkeypatch: pytest.MonkeyPatch, place: Path, command: str
) -> None:
    """The others go on without it."""
    machine = machine2
    with monkeypatch.context() as m:
        m.setenv("LD_PRELOAD", preload.environment({"LD_PRELOAD": str(image_folder / "libcuda.so.1")})["LD_PRELOAD"])
        one, two = machine.job(("--gib", "1"), ("--gib", "2", "--gpu", "1"))
    down = ["suspend", one.pid, "--accept-loss", "possible-import", "--keep-in", place]
    if command == "resume":
        assert machine.gpuckpt(*down).code == 0
    machine.world.add_fault("hold" if command == "suspend" else "fill", pid=two.pid, delay_s=1.0)
    running = machine.begin(*(down if command == "suspend" else ["resume", one.pid]))
    eventually(lambda: machine.faults_left() == 0, "the move")
    two.kill()
    ended = running.end()
    assert (ended.code, ended.document["ok"]) == (0, True), ended
    assert str(two.pid) in " ".join(ended.document["warnings"])
    assert ended.states[two.pid] == "gone"
    if command == "suspend":
        assert machine.gpuckpt("resume", one.pid).code == 0
    assert one.unharmed()
    assert list(place.iterdir()) == []


# It cannot be brought back: suspended, and on disk.


def the_file(machine: Machine) -> Path:
    (found,) = (machine.world.path / "kept").glob("*/held")
    return found


def test_a_corrupted_file_is_refused_and_can_be_tried_again(machine: Machine, target: Target, place: Path) -> None:
    assert keep(machine, target, place).code == 0
    path = the_file(machine)
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    refused = machine.gpuckpt("resume", target.pid)
    assert (refused.code, refused.error["code"]) == (3, "image-unreadable")
    assert (process(refused)["state"], process(refused)["disk_bytes"]) == ("suspended", 2 << 30)
    assert target.state is State.CHECKPOINTED
    path.write_bytes(content)
    assert machine.gpuckpt("resume", target.pid).code == 0
    assert target.unharmed()


def test_no_memory_for_it_now(machine: Machine, target: Target, place: Path) -> None:
    assert keep(machine, target, place).code == 0
    (machine.root / "proc/meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 0 kB\n")
    refused = machine.gpuckpt("resume", target.pid)
    assert (refused.code, refused.error["code"]) == (6, "host-memory")
    assert target.state is State.CHECKPOINTED
    machine.host_memory(512, 256)
    assert machine.gpuckpt("resume", target.pid).code == 0
    assert target.unharmed()


def test_no_restore_without_its_image_whoever_asks(machine: Machine, target: Target, place: Path, tmp_path: Path) -> None:
    """Another journal knows nothing of a file that the process does not hold: a restore would lose it."""
    machine.world.add_fault("link", result="EXDEV")
    assert keep(machine, target, place).code == 0
    refused = machine.gpuckpt("resume", target.pid, GPUCKPT_STATE_DIR=str(tmp_path / "another"))
    assert (refused.code, refused.error["code"]) == (3, "image-unreadable")
    assert "GPUCKPT_STATE_DIR" in refused.error["hint"]
    assert target.state is State.CHECKPOINTED
    assert machine.gpuckpt("resume", target.pid).code == 0
    assert target.unharmed()


def test_a_group_comes_back_as_one_or_not_at_all(
    machine2: Machine, image_folder: Path, monkeypatch: pytest.MonkeyPatch, place: Path
) -> None:
    machine = machine2
    with monkeypatch.context() as m:
        m.setenv("LD_PRELOAD", preload.environment({"LD_PRELOAD": str(image_folder / "libcuda.so.1")})["LD_PRELOAD"])
        one, two = machine.job(("--gib", "1"), ("--gib", "2", "--gpu", "1"))
    down = machine.gpuckpt("suspend", one.pid, "--accept-loss", "possible-import", "--keep-in", place)
    assert down.code == 0, down
    assert {p["pid"]: p["disk_bytes"] for p in down.document["processes"]} == {one.pid: 1 << 30, two.pid: 2 << 30}
    machine.world.add_fault("fill", pid=one.pid, result="ENOMEM")
    refused = machine.gpuckpt("resume", one.pid)
    assert (refused.error["code"], refused.error["pid"]) == ("image-unreadable", one.pid)
    assert len(list((machine.world.path / "kept").glob("*/dropped"))) == 2, "the other is not brought back for nothing"
    machine.world.add_fault("fill", pid=two.pid, result="ENOMEM")
    refused = machine.gpuckpt("resume", one.pid)
    assert (refused.code, refused.error["code"], refused.error["pid"]) == (3, "image-unreadable", two.pid)
    assert {one.state, two.state} == {State.CHECKPOINTED}
    assert machine.gpuckpt("resume", one.pid).code == 0
    assert one.unharmed()
    assert two.unharmed()


def being_brought_back(machine: Machine, target: Target, place: Path) -> Running:
    """A resume in the middle of reading its image from disk."""
    assert keep(machine, target, place).code == 0
    machine.world.add_fault("fill", delay_s=30.0)
    running = machine.begin("resume", target.pid)
    eventually(lambda: machine.faults_left() == 0, "the load")
    return running


def test_ctrl_c_while_it_is_brought_back(machine: Machine, target: Target, place: Path) -> None:
    running = being_brought_back(machine, target, place)
    running.signal(signal.SIGINT)
    ended = running.end()
    assert (ended.code, ended.error["code"]) == (130, "interrupted")
    machine.kill_callers()
    assert target.state is State.CHECKPOINTED
    assert machine.gpuckpt("resume", target.pid).code == 0
    assert target.unharmed()


def test_killed_while_it_is_brought_back(machine: Machine, target: Target, place: Path) -> None:
    running = being_brought_back(machine, target, place)
    running.signal(signal.SIGKILL)
    machine.kill_callers()
    running.end()
    assert dropped(machine)
    machine.gpuckpt("recover")
    assert target.state is State.CHECKPOINTED
    assert machine.gpuckpt("resume", target.pid).code == 0
    assert target.unharmed()


def test_a_machine_that_was_started_anew(machine: Machine, target: Target, place: Path) -> None:
    machine.world.add_fault("link", result="EXDEV")
    assert keep(machine, target, place).code == 0
    assert len(list(place.iterdir())) == 1
    (path,) = place.iterdir()
    renamed = path.rename(path.with_name(re.sub(r"image-\w{8}-", "image-01234567-", path.name)))  # as that boot called it
    (record,) = machine.records()
    record["members"][0]["image"]["path"] = str(renamed)
    machine.rewrite(boot_id="another", members=record["members"])
    machine.gpuckpt("ps")
    assert list(place.iterdir()) == []
