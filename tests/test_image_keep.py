"""`gpuckpt suspend --keep-in DIR` by the command line: the image is on disk, comes back, and is never lost on the way."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpuckpt.image import preload
from gpuckpt.model import State
from tests.simulated_machine import Machine, Result, Target, eventually


@pytest.fixture
def target(machine: Machine, image_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Target:
    return with_library(machine, image_folder, monkeypatch)


def with_library(machine: Machine, image_folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> Target:
    """A program as `gpuckpt exec` starts it, with something by the name of libcuda."""
    with monkeypatch.context() as m:
        m.setenv("LD_PRELOAD", preload.environment({"LD_PRELOAD": str(image_folder / "libcuda.so.1")})["LD_PRELOAD"])
        return machine.target("--gib", "2", *options)


def keep(machine: Machine, target: Target, place: Path, **environ: str) -> Result:
    return machine.gpuckpt("suspend", target.pid, "--keep-in", place, **environ)


def process(result: Result) -> dict[str, Any]:
    (found,) = result.document["processes"]
    return dict(found)


def dropped(machine: Machine) -> bool:
    return any((machine.world.path / "kept").glob("*/dropped"))


def test_there_and_back(machine: Machine, target: Target, place: Path) -> None:
    down = keep(machine, target, place)
    assert down.code == 0, down
    seen = process(down)
    assert (seen["state"], seen["host_bytes"], seen["disk_bytes"]) == ("suspended", 0, 2 << 30)
    assert (seen["image"]["in"], seen["image"]["bytes"]) == (str(place), 2 << 30)
    assert [s["name"] for s in down.document["steps"]][-3:] == ["verify", "store", "drop"]
    assert dropped(machine)
    row = process(machine.gpuckpt("status", target.pid))
    assert (row["state"], row["host_bytes"], row["disk_bytes"]) == ("suspended", 0, 2 << 30)
    assert "2.0 GiB on disk" in machine.gpuckpt("status", target.pid, json=False).stdout
    assert re.search(r"DISK", machine.gpuckpt("ps", json=False).stdout)
    up = machine.gpuckpt("resume", target.pid)
    assert up.code == 0, up
    assert "load" in [s["name"] for s in up.document["steps"]]
    assert target.unharmed()
    assert not dropped(machine)
    assert list(place.iterdir()) == []


def test_in_words(machine: Machine, target: Target, place: Path) -> None:
    said = machine.gpuckpt("suspend", target.pid, "--keep-in", place, json=False)
    assert "2.0 GiB on disk" in said.stdout
    assert "in host memory" not in said.stdout


def test_in_memory_as_ever(machine: Machine, target: Target) -> None:
    seen = process(machine.gpuckpt("suspend", target.pid, "--keep-in", "ram"))
    assert (seen["host_bytes"], seen["disk_bytes"], seen["image"]["in"]) == (2 << 30, 0, "ram")
    assert seen["image"]["path"] == "driver", "a simulated driver maps nothing"
    assert machine.gpuckpt("resume", target.pid).code == 0
    assert target.unharmed()


def test_moved_to_disk_later(machine: Machine, target: Target, place: Path) -> None:
    assert machine.gpuckpt("suspend", target.pid).code == 0
    moved = keep(machine, target, place)
    assert (moved.code, process(moved)["disk_bytes"]) == (0, 2 << 30)
    again = keep(machine, target, place)
    assert (again.code, process(again)["disk_bytes"]) == (0, 2 << 30), "asked for twice it is done once"
    assert again.document["already"]
    assert again.document["warnings"] == []
    plain = machine.gpuckpt("suspend", target.pid)
    assert plain.document["already"]
    assert (process(plain)["host_bytes"], process(plain)["disk_bytes"]) == (0, 2 << 30)
    assert machine.gpuckpt("resume", target.pid).code == 0
    assert target.unharmed()


def test_on_disk_already_and_asked_for_elsewhere_or_where_it_was(machine: Machine, target: Target, place: Path, tmp_path: Path) -> None:
    """It stays where it is, and a directory that serves no more is no reason to refuse what is done."""
    assert keep(machine, target, place).code == 0
    elsewhere = keep(machine, target, tmp_path)
    assert (elsewhere.code, elsewhere.document["already"], process(elsewhere)["image"]["in"]) == (0, True, str(place))
    assert f"on disk already, in {place}, and stays there" in " ".join(elsewhere.document["warnings"])
    place.rmdir()
    again = keep(machine, target, place)
    assert (again.code, again.document["already"]) == (0, True), again
    assert machine.gpuckpt("resume", target.pid).code == 0
    assert target.unharmed()


def test_dry_runs_tell_of_the_disk(machine: Machine, target: Target, place: Path) -> None:
    def steps(result: Result) -> list[str]:
        return [s["name"] for s in result.document["plan"]["steps"]]

    dry = ["suspend", target.pid, "--dry-run", "--keep-in", place]
    assert steps(machine.gpuckpt(*dry)) == ["lock", "checkpoint", "store", "drop"]
    assert machine.gpuckpt("suspend", target.pid).code == 0
    assert steps(machine.gpuckpt(*dry)) == ["store", "drop"]
    assert keep(machine, target, place).code == 0
    assert machine.gpuckpt(*dry).document["already"]
    up = machine.gpuckpt("resume", target.pid, "--dry-run")
    assert steps(up) == ["load", "restore", "unlock"]
    assert (process(up)["host_bytes"], process(up)["disk_bytes"], up.document["plan"]["host_bytes_needed"]) == (0, 2 << 30, 2 << 30)
    assert "if host memory has room for the 2.0 GiB" in machine.gpuckpt("resume", target.pid, "--dry-run", json=False).stdout


def test_more_than_once(machine: Machine, target: Target, place: Path) -> None:
    for _ in range(2):
        assert keep(machine, target, place).code == 0
        assert machine.gpuckpt("resume", target.pid).code == 0
        target.sum = target.ask("step")["sum"]
    assert list(place.iterdir()) == []


# Refused: nothing was touched.


def test_without_the_library(machine: Machine, place: Path) -> None:
    target = machine.target("--gib", "2")
    refused = keep(machine, target, place)
    assert (refused.code, refused.error["code"]) == (6, "no-preload")
    assert "gpuckpt exec" in refused.error["hint"]
    assert target.state is State.RUNNING
    assert keep(machine, target, place, GPUCKPT_PRELOAD="0").error["code"] == "no-preload"


def test_with_the_library_and_not_wanted(machine: Machine, target: Target, place: Path) -> None:
    refused = keep(machine, target, place, GPUCKPT_PRELOAD="0")
    assert (refused.code, refused.error["code"], refused.error["hint"]) == (6, "no-preload", "suspend it without --keep-in")
    assert "GPUCKPT_PRELOAD=0 is set here" in refused.error["message"]


def test_no_such_directory(machine: Machine, target: Target, place: Path) -> None:
    (place / "file").touch()
    assert keep(machine, target, "").error["code"] == "usage"  # type: ignore[arg-type]
    for wrong in (place / "none", place / "file"):
        refused = keep(machine, target, wrong)
        assert (refused.code, refused.error["code"]) == (6, "image-directory")
    assert target.state is State.RUNNING
    dry = machine.gpuckpt("suspend", "--dry-run", target.pid, "--keep-in", place / "none")
    assert dry.document["plan"]["refused"]["code"] == "image-directory"


def test_a_directory_that_is_full_or_has_half_the_quota(machine: Machine, target: Target, place: Path) -> None:
    """Case 55: found before Lock. A file system of 64 MiB for an image of 2 GiB."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount one")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", place], check=True)
    try:
        refused = keep(machine, target, place)
        assert (refused.code, refused.error["code"]) == (6, "image-directory")
        assert "No space left" in refused.error["message"]
        assert target.state is State.RUNNING
        assert list(place.iterdir()) == []
    finally:
        subprocess.run(["umount", place], check=True)


def test_a_file_system_in_memory_is_warned_of(machine: Machine, target: Target, place: Path) -> None:
    """Case 55"""
    if os.geteuid() != 0:
        pytest.skip("only root can mount one")
    subprocess.run(["mount", "-t", "tmpfs", "none", place], check=True)
    try:
        done = keep(machine, target, place)
        assert (done.code, "lies in memory" in " ".join(done.document["warnings"])) == (0, True)
        assert machine.gpuckpt("resume", target.pid).code == 0
        assert target.unharmed()
    finally:
        subprocess.run(["umount", place], check=True)


# It fails later: suspended, and in memory.


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


def test_ctrl_c_while_it_is_brought_back(machine: Machine, target: Target, place: Path) -> None:
    assert keep(machine, target, place).code == 0
    machine.world.add_fault("fill", delay_s=30.0)
    running = machine.begin("resume", target.pid)
    eventually(lambda: machine.faults_left() == 0, "the load")
    running.signal(signal.SIGINT)
    ended = running.end()
    assert (ended.code, ended.error["code"]) == (130, "interrupted")
    machine.kill_callers()
    assert target.state is State.CHECKPOINTED
    assert machine.gpuckpt("resume", target.pid).code == 0
    assert target.unharmed()


def test_killed_while_it_is_brought_back(machine: Machine, target: Target, place: Path) -> None:
    assert keep(machine, target, place).code == 0
    machine.world.add_fault("fill", delay_s=30.0)
    running = machine.begin("resume", target.pid)
    eventually(lambda: machine.faults_left() == 0, "the load")
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
