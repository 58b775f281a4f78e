"""What a stranger meets on the first day: words that are wrong, hints that cannot be typed, options that nobody hears."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
from typing import TYPE_CHECKING

import pytest

from gpuckpt import errors
from gpuckpt.supervisor.budget import Budget
from tests.serving import Stage, stage
from tests.simulated_machine import COMMAND, DEADLINE_S, eventually

if TYPE_CHECKING:
    from pathlib import Path

    from tests.simulated_machine import Machine

__all__ = ["stage"]


def test_options_about_pids_are_not_dropped_where_a_run_is_named(stage: Stage) -> None:
    """A dry run of a run would have been the real thing."""
    run = stage.run().awake()
    for command, *options in (
        ("suspend", "--dry-run"),
        ("suspend", "--no-tree"),
        ("suspend", "--keep-in", "/tmp"),
        ("resume", "--dry-run"),
        ("resume", "--wait", "1s"),
    ):
        refused = stage.gpuckpt(command, *options, "m")
        assert (refused.code, refused.error["code"]) == (2, "usage")
        assert f"{options[0]} takes pids" in refused.error["message"]
    assert run.state == "awake"
    dry = stage.gpuckpt(*stage.gpuckpt("suspend", "--dry-run", "m").error["hint"].split()[1:])
    assert (dry.code, dry.document["dry_run"]) == (0, True), "the hint can be typed"

    done = stage.gpuckpt("suspend", str(run.child))
    assert "belongs to the run m, which does not know" in done.document["warnings"][-1]
    assert stage.gpuckpt("resume", str(run.child)).code == 0

    run.close()
    eventually(lambda: "has ended" in stage.gpuckpt("status", "m").error["message"], "its child has ended too")


def test_a_simulated_machine_has_the_memory_of_this_one(tmp_path: Path) -> None:
    """As for a suspend by pid, where the directory says nothing of its memory."""
    environ = {"GPUCKPT_SIMULATE": str(tmp_path), "GPUCKPT_RUNTIME_DIR": str(tmp_path)}
    assert Budget(environ=environ).available_bytes() > 0


def test_a_dry_run_says_why_not(machine: Machine) -> None:
    target = machine.target()
    words = machine.gpuckpt("suspend", "--dry-run", "--keep-in", "/tmp", target.pid, json=False).stdout
    refused = machine.gpuckpt("suspend", "--keep-in", "/tmp", target.pid).error
    assert f"would be refused: {refused['message']}\n  try: {refused['hint']}\n" in words
    planned = machine.gpuckpt("run", "--dry-run", "--", "/nonexistent", json=False)
    assert "/nonexistent is not here" in planned.stderr


def test_who_reads_the_beginning_alone_hears_no_complaint(machine: Machine) -> None:
    done = subprocess.run(
        ["bash", "-c", f"{COMMAND} explain | (read x; exec <&-; exit 0)"], env=machine.environ, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""


def test_a_command_that_is_soon_done_leaves_no_riddle(stage: Stage) -> None:
    done = stage.gpuckpt("run", "--name", "short", "--", "true", json=False)
    assert done.code == 0
    assert "is not known" not in done.stderr


def test_a_journal_that_cannot_be_read_says_what_to_do(machine: Machine) -> None:
    groups = machine.state_dir / "groups"
    groups.mkdir(parents=True)
    (groups / "x.json").write_text("{")
    (warning,) = machine.gpuckpt("ps").document["warnings"]
    assert warning.endswith(f"Once that is resumed: rm {groups / 'x.json'}")


def test_memory_of_somebody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpuckpt.cli import reserve

    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(errors.PermissionDenied, match="nothing was touched"):
        reserve._processes(str(os.getppid()))


@pytest.mark.parametrize("width", [40, 60])
def test_a_narrow_terminal_shows_whole_pids(machine: Machine, width: int) -> None:
    target = machine.target()
    screen = on_a_terminal(machine, "ps", width=width, term="xterm")
    assert str(target.pid) in screen
    assert "running" in screen


def test_watching_on_a_terminal_that_cannot_move_the_cursor(machine: Machine) -> None:
    target = machine.target()
    screen = on_a_terminal(machine, "ps", "--watch", "--interval", "10ms", width=100, until=f"{target.pid}")
    assert str(target.pid) in screen


def on_a_terminal(machine: Machine, *words: str, width: int, until: str = "", term: str = "dumb") -> str:
    """What it writes, to its end or until *until* is there."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    process = subprocess.Popen(
        [COMMAND, *words], env={**machine.environ, "TERM": term, "COLUMNS": str(width)}, stdin=its, stdout=its, stderr=its
    )
    os.close(its)
    seen = b""
    try:
        while not until or until.encode() not in seen:
            assert select.select([ours], [], [], DEADLINE_S)[0], "it says nothing"
            seen += os.read(ours, 65536)
    except OSError:
        pass  # it has ended
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return seen.decode()


@pytest.mark.parametrize(("command", "code"), [("status", 1), ("resume", 3)])
def test_a_fault_of_its_own_has_a_document_and_a_code(machine: Machine, command: str, code: int) -> None:
    """Nothing says that all is as it was found where nobody knows."""
    target = machine.target()
    world = machine.world.path / "machine.json"
    said = world.read_text()
    world.write_text("no JSON")
    try:
        result = machine.gpuckpt(command, target.pid)
    finally:
        world.write_text(said)
    assert (result.code, result.error["code"]) == (code, "unexpected"), result
    assert "Traceback" in result.stderr
    assert "gpuckpt status" in result.error["hint"]
