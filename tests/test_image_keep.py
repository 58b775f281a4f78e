"""`gpuckpt suspend --keep-in DIR` by the command line: the image is on disk, and comes back; what cannot be is said beforehand."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpuckpt.image import preload
from gpuckpt.model import State
from tests.simulated_machine import Machine, Result, Target


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
