"""The journal on bad days: a reboot, a pid that was reused, a directory that cannot be written or vanished; who did what."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from gpuckpt.driver.simulated import SimulatedDriver
from gpuckpt.journal import state_directory
from gpuckpt.model import GIB, Call, State
from tests.simulated_machine import eventually
from tests.test_cli_targets import no_pid

if TYPE_CHECKING:
    from tests.simulated_machine import Machine

#: Another user, who can read the interpreter wherever it lies.
STRANGER = "setpriv --reuid 12345 --regid 12345 --clear-groups --inh-caps +dac_read_search --ambient-caps +dac_read_search".split()
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="takes root")


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "full"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "none", path], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        (path / "state/groups").mkdir(parents=True)
        (path / "filler").write_bytes(bytes(8192))
        for n in range(64):
            try:
                (path / f"filler{n}").write_bytes(bytes(4096))
            except OSError:
                break
        yield path / "state"
    finally:
        subprocess.run(["umount", path], check=True)


def member(record: dict[str, Any], **changes: Any) -> list[dict[str, Any]]:
    """The first member of *record* with its id changed, then the others."""
    first, *rest = record["members"]
    return [{**first, "id": {**first["id"], **changes}}, *rest]


@pytest.mark.parametrize("case", ["in its place", "in its place, and it does not unlock", "by somebody else"])
def test_a_stranger_with_the_pid_of_one_that_was_being_locked(machine: Machine, case: str) -> None:
    """Everything of gpuckpt was killed after the lock, and before anybody saw that the pid was another process by then."""
    target = machine.target()
    machine.world.add_fault("lock", hang=True)
    running = machine.begin("suspend", target.pid)
    eventually(lambda: not machine.faults_left(), "it is being locked")
    running.process.kill()
    running.end()
    machine.kill_callers()
    SimulatedDriver(machine.world.path).lock(target.pid, 5.0)
    (record,) = machine.records()
    begun, until = record["locking"]
    born = {} if case == "by somebody else" else {"locking": [0.0, until]}  # this one was there before
    assert begun < until
    machine.rewrite(members=member(record, start_ticks=record["members"][0]["id"]["start_ticks"] - 1), **born)
    if case.endswith("unlock"):
        machine.world.add_fault("unlock", result="UNKNOWN")
        failed = machine.gpuckpt("recover")
        assert (failed.code, failed.error["code"], failed.error["pid"]) == (3, "not-as-found", target.pid)
        assert "could not be unlocked" in failed.error["message"]
    (row,) = machine.gpuckpt("ps").document["processes"]
    assert (row["pid"], row["state"]) == (target.pid, "locked")
    recovered = machine.gpuckpt("recover")
    (said,) = recovered.document["recovered"]
    assert recovered.code == 0, recovered
    assert f"pid {target.pid} (" in said
    if case == "by somebody else":
        assert said.endswith(f"and is locked, not by this suspend. Unless another tool is at work on it: gpuckpt resume {target.pid}")
        assert target.state is State.LOCKED
        assert machine.gpuckpt("resume", target.pid).code == 0
    else:
        assert said.endswith("and was locked in its place: unlocked")
    assert target.unharmed()
    assert not machine.records()


@pytest.mark.parametrize("command", ["ps", "status", "recover"])
def test_a_reboot_voids_the_record_and_is_said_once(machine: Machine, command: str) -> None:
    target = machine.target()
    machine.gpuckpt("suspend", target.pid)
    target.kill()
    machine.rewrite(boot_id="another-boot")
    result = machine.gpuckpt(command)
    assert result.code == 0
    (warning,) = result.document["warnings"]
    assert "started anew" in warning
    assert f"pid {target.pid}" in warning
    assert result.document["processes"] == []
    assert machine.records() == []
    assert machine.gpuckpt(command).document["warnings"] == []


@pytest.mark.parametrize("command", ["resume", "status"])
def test_a_process_from_before_the_reboot(machine: Machine, command: str) -> None:
    target = machine.target()
    machine.gpuckpt("suspend", target.pid)
    target.kill()
    machine.rewrite(boot_id="another-boot")
    result = machine.gpuckpt(command, target.pid)
    assert (result.code, result.error["code"]) == (4, "no-such-process")
    assert "started anew" in result.error["message"] + " ".join(result.document["warnings"])
    assert machine.records() == []


def test_a_pid_that_was_reused(machine: Machine) -> None:
    """Another process has the number of one that died while suspended: it is not taken for it."""
    gone, other = machine.target(), machine.target()
    machine.gpuckpt("suspend", gone.pid, other.pid)
    newcomer = machine.target("--gib", "2")
    (record,) = machine.records()
    first = next(m for m in record["members"] if m["id"]["pid"] == gone.pid)
    second = next(m for m in record["members"] if m["id"]["pid"] == other.pid)
    machine.rewrite(members=[{**first, "id": {"pid": newcomer.pid, "start_ticks": 1}}, second])
    gone.kill()
    result = machine.gpuckpt("resume", newcomer.pid)
    assert (result.code, result.document["already"], result.states) == (0, True, {newcomer.pid: "running"})
    assert other.state is State.CHECKPOINTED
    (row,) = machine.gpuckpt("status", newcomer.pid).document["processes"]
    assert (row["pid"], row["state"], row["group"]) == (newcomer.pid, "running", "")
    assert machine.gpuckpt("suspend", newcomer.pid).states == {newcomer.pid: "suspended"}
    assert len(machine.records()) == 2
    assert machine.gpuckpt("resume", other.pid).states[other.pid] == "running"
    assert newcomer.state is State.CHECKPOINTED
    assert machine.gpuckpt("resume", newcomer.pid).code == 0
    assert newcomer.unharmed()
    assert machine.records() == []


def test_the_state_directory_vanished(machine: Machine) -> None:
    target = machine.target("--gib", "4")
    machine.gpuckpt("suspend", target.pid)
    shutil.rmtree(machine.state_dir)
    (row,) = machine.gpuckpt("ps").document["processes"]
    assert (row["state"], row["host_bytes"], row["by"]) == ("suspended", 4 * GIB, "")
    assert machine.gpuckpt("is-suspended", target.pid).code == 0
    assert machine.gpuckpt("resume", target.pid).states == {target.pid: "running"}
    assert target.unharmed()


def test_a_file_in_place_of_the_directory(machine: Machine) -> None:
    target = machine.target()
    machine.state_dir.write_text("")
    result = machine.gpuckpt("suspend", target.pid)
    assert (result.code, result.error["code"]) == (1, "journal")
    assert str(machine.state_dir) in result.error["message"]
    assert "nothing was touched" in result.error["message"]
    assert "GPUCKPT_STATE_DIR" in result.error["hint"]
    assert target.state is State.RUNNING
    assert machine.gpuckpt("ps").code == 0


@ROOT
def test_a_full_disk(machine: Machine, full_disk: Path) -> None:
    target = machine.target()
    result = machine.gpuckpt("suspend", target.pid, GPUCKPT_STATE_DIR=str(full_disk))
    assert (result.code, result.error["code"]) == (1, "journal")
    assert "No space left" in result.error["message"]
    assert target.state is State.RUNNING
    assert target.unharmed()


def test_unwritable_half_way(machine: Machine) -> None:
    """What was begun goes on; the report says that the journal is behind."""
    target = machine.target("--gib", "2")
    machine.slow(0.5)
    suspend = machine.begin("suspend", target.pid)
    eventually(lambda: target.under_way(Call.CHECKPOINT), "the checkpoint")
    machine.state_dir.rename(machine.path / "moved")
    machine.state_dir.write_text("")
    result = suspend.end()
    assert (result.code, result.states) == (0, {target.pid: "suspended"})
    assert "cannot be written" in " ".join(result.document["warnings"])
    machine.state_dir.unlink()
    (machine.path / "moved").rename(machine.state_dir)
    assert machine.gpuckpt("recover").states == {target.pid: "suspended"}
    assert machine.gpuckpt("resume", target.pid).code == 0
    assert target.unharmed()


def test_a_record_of_a_newer_version(machine: Machine) -> None:
    target = machine.target("--gib", "4")
    machine.gpuckpt("suspend", target.pid)
    machine.rewrite(schema=4, members="unheard of")
    for command in (("ps",), ("recover",), ("resume", target.pid)):
        result = machine.gpuckpt(*command)
        assert result.code == 0
        assert "written by a newer gpuckpt (schema 4)" in " ".join(result.document["warnings"]), command
    assert target.unharmed()
    assert len(machine.records()) == 1, "not ours to remove"


def test_a_file_that_is_no_record(machine: Machine) -> None:
    target = machine.target()
    groups = machine.state_dir / "groups"
    groups.mkdir(parents=True)
    for name, text in (("a.json", "{"), ("b.json", "[]"), ("c.json", '{"schema": 1}'), (".d.123", "{")):
        (groups / name).write_text(text)
    result = machine.gpuckpt("ps")
    assert result.code == 0
    assert len(result.document["warnings"]) == 3
    assert machine.gpuckpt("suspend", target.pid).code == 0
    assert machine.gpuckpt("resume", target.pid).code == 0


def test_only_the_user_can_read_it(machine: Machine) -> None:
    machine.gpuckpt("suspend", machine.target().pid)
    for path in (machine.state_dir / "groups", machine.state_dir / "audit.log"):
        assert path.stat().st_mode & 0o077 == 0


def test_every_operation_leaves_an_audit_line(machine: Machine) -> None:
    target = machine.target("--trait", "managed")
    other = machine.target()
    for command in (("suspend", target.pid), ("suspend", other.pid), ("suspend", other.pid), ("resume", other.pid)):
        machine.gpuckpt(*command)
    lines = machine.audit()
    assert [(line["command"], line["outcome"], line["pids"]) for line in lines] == [
        ("suspend", "managed-memory", [target.pid]),
        ("suspend", "done", [other.pid]),
        ("suspend", "already", [other.pid]),
        ("resume", "done", [other.pid]),
    ]
    assert all(f"(uid {os.geteuid()})" in line["by"] for line in lines)
    assert lines[0]["states"] == {str(target.pid): "running"}


@ROOT
@pytest.mark.parametrize("command", ["suspend", "resume"])
def test_somebody_elses_process(machine: Machine, command: str) -> None:
    target = machine.target()
    if command == "resume":
        machine.gpuckpt("suspend", target.pid)
    for path in (machine.path, *machine.path.rglob("*")):
        path.chmod(0o777)
    theirs = {"GPUCKPT_STATE_DIR": str(machine.path / "theirs")}
    result = machine.begin(command, target.pid, prefix=tuple(STRANGER), **theirs).end()
    assert (result.code, result.error["code"], result.error["pid"]) == (5, "permission", target.pid)
    assert "belongs to root" in result.error["message"]
    assert result.error["hint"] == f"sudo gpuckpt {command} {target.pid}"
    assert not (machine.path / "theirs").exists()


@pytest.mark.parametrize("command", ["suspend", "resume"])
def test_a_process_that_the_driver_does_not_let_us_touch(machine: Machine, command: str) -> None:
    """A container without CAP_SYS_PTRACE, say: no call is under way that would end."""
    target = machine.target()
    if command == "resume":
        machine.gpuckpt("suspend", target.pid)
    machine.world.add_fault("state", result="OPERATING_SYSTEM", times=100)
    (row,) = machine.gpuckpt("status", target.pid).document["processes"]
    assert (row["state"], row["note"]) == ("unknown", "the driver does not let us ask (gpuckpt doctor explains)")
    result = machine.gpuckpt(command, target.pid)
    assert (result.code, result.error["code"], result.error["pid"]) == (5, "permission", target.pid)
    assert "CAP_SYS_PTRACE" in result.error["hint"]
    planned = machine.gpuckpt(command, "--dry-run", target.pid)
    assert planned.document["plan"]["refused"]["code"] == "permission"
    assert set(planned.states.values()) == {"unknown"}
    (machine.world.path / "faults.json").write_text("[]")
    assert machine.gpuckpt(command, target.pid).code == 0


@ROOT
def test_somebody_elses_process_without_cuda(machine: Machine) -> None:
    for path in (machine.path, *machine.path.rglob("*")):
        path.chmod(0o777)
    idle = subprocess.Popen(["sleep", "60"])
    try:
        result = machine.begin("suspend", idle.pid, prefix=tuple(STRANGER)).end()
        assert (result.code, result.error["code"]) == (5, "permission")
    finally:
        idle.kill()
        idle.wait()


def test_the_dead_are_recovered(machine: Machine) -> None:
    target = machine.target()
    machine.gpuckpt("suspend", target.pid)
    (record,) = machine.records()
    machine.rewrite(members=member(record, pid=no_pid()))
    assert "ended; the entry was removed" in machine.gpuckpt("recover").document["recovered"][0]
    assert machine.records() == []


def test_simulated_processes_are_not_in_the_journal_of_real_ones(tmp_path: Path) -> None:
    one, other = {"GPUCKPT_SIMULATE": str(tmp_path / "a")}, {"GPUCKPT_SIMULATE": str(tmp_path / "b")}
    assert len({state_directory(environ, 0) for environ in ({}, one, other)}) == 3
    assert state_directory({**one, "GPUCKPT_STATE_DIR": "/chosen"}, 0) == Path("/chosen")


def test_a_journal_that_depends_on_where_one_stands_is_refused(machine: Machine) -> None:
    target = machine.target()
    result = machine.gpuckpt("suspend", target.pid, GPUCKPT_STATE_DIR="here")
    assert (result.code, result.error["code"]) == (2, "usage")
    assert result.error["hint"] == f"GPUCKPT_STATE_DIR={machine.path}/here"
