"""`gpuckpt suspend`: what it does, says and refuses."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from gpuckpt.model import GIB, State
from tests.simulated_machine import eventually

if TYPE_CHECKING:
    from tests.simulated_machine import Machine


def test_the_bytes_leave_and_the_process_lives(machine: Machine) -> None:
    target = machine.target("--gib", "4")
    result = machine.gpuckpt("suspend", target.pid)
    assert result.code == 0
    (process,) = result.document["processes"]
    assert process["gpus"] == [{"uuid": machine.uuids[0], "bytes_before": 4 * GIB, "bytes_after": 0}]
    assert (process["state"], process["host_bytes"], process["retained_bytes"]) == ("suspended", 4 * GIB, 0)
    assert [s["name"] for s in result.document["steps"]] == ["inspect", "lock", "re-inspect", "checkpoint", "verify"]
    assert result.document["simulated"] is True
    assert machine.used() == 0
    assert target.state is State.CHECKPOINTED
    (record,) = machine.records()
    assert record["status"] == "suspended"
    assert record["by"].endswith(f"(uid {os.geteuid()})")


def test_words_for_people(machine: Machine) -> None:
    target = machine.target("--gib", "4")
    result = machine.gpuckpt("suspend", target.pid, json=False)
    assert f"suspended: pid {target.pid}" in result.stdout
    assert f"4.0 GiB → 0 on {machine.uuids[0]}" in result.stdout
    assert f"Back with: gpuckpt resume {target.pid}" in result.stdout
    assert result.stderr == ""
    again = machine.gpuckpt("suspend", target.pid, json=False)
    assert again.stdout.startswith(f"already suspended: pid {target.pid}")


def test_already_suspended(machine: Machine) -> None:
    target = machine.target()
    assert machine.gpuckpt("suspend", target.pid).document["already"] is False
    since = machine.records()[0]["since"]
    again = machine.gpuckpt("suspend", target.pid)
    assert (again.code, again.document["already"], again.states) == (0, True, {target.pid: "suspended"})
    assert [r["since"] for r in machine.records()] == [since]


def test_a_group_suspended_in_part(machine: Machine) -> None:
    parent = machine.target("--spawn", "1")
    accept = ("--accept-loss", "possible-import")
    assert machine.gpuckpt("suspend", "--no-tree", parent.pid, *accept).code == 0
    result = machine.gpuckpt("suspend", parent.pid, *accept)
    assert result.states == {parent.pid: "suspended", parent.children[0]: "suspended"}
    assert len(machine.records()) == 1
    assert machine.gpuckpt("resume", parent.pid).states == {parent.pid: "running", parent.children[0]: "running"}
    assert parent.unharmed()


def test_dry_run_touches_nothing(machine2: Machine) -> None:
    target = machine2.target("--gib", "4", "--gpu", "0", "--gpu", "1")
    result = machine2.gpuckpt("suspend", "--dry-run", target.pid)
    plan = result.document["plan"]
    assert [(s["name"], s["pids"]) for s in plan["steps"]] == [("lock", [target.pid]), ("checkpoint", [target.pid])]
    assert {g["uuid"]: g["bytes_before"] for g in result.document["processes"][0]["gpus"]} == dict.fromkeys(machine2.uuids, 4 * GIB)
    assert 8 * GIB < plan["host_bytes_needed"] < 9 * GIB
    assert (plan["host_bytes_available"], plan["host_limit"]) == (256 * GIB, "MemAvailable")
    assert (plan["refused"], plan["timeout_seconds"]) == (None, pytest.approx(76.0))
    assert target.state is State.RUNNING
    assert machine2.records() == []
    assert not machine2.state_dir.exists()
    words = machine2.gpuckpt("suspend", "--dry-run", target.pid, json=False).stdout
    assert "would go ahead; deadline 76 s" in words
    assert "host memory needed 8.2 GiB, there is 256.0 GiB by MemAvailable" in words


def test_dry_run_of_what_is_suspended(machine: Machine) -> None:
    """As the suspend itself: it would do nothing, whatever could be said against it."""
    parent = machine.target("--spawn", "1")
    machine.gpuckpt("suspend", parent.pid, "--accept-loss", "possible-import")
    real, dry = machine.gpuckpt("suspend", parent.pid), machine.gpuckpt("suspend", "--dry-run", parent.pid)
    assert (dry.code, dry.document["already"], dry.states, dry.document["hazards"]) == (0, True, real.states, real.document["hazards"])
    assert (dry.document["dry_run"], dry.document["plan"]["steps"], dry.document["plan"]["refused"]) == (True, [], None)
    words = machine.gpuckpt("suspend", "--dry-run", parent.pid, json=False).stdout
    assert words == machine.gpuckpt("suspend", parent.pid, json=False).stdout
    assert words.startswith(f"already suspended: pid {parent.pid}")


def test_dry_run_says_why_not(machine: Machine) -> None:
    parent = machine.target("--spawn", "1")
    result = machine.gpuckpt("suspend", "--dry-run", parent.pid)
    assert result.code == 0
    assert result.document["plan"]["refused"]["code"] == "possible-import"
    assert {h["kind"] for h in result.document["hazards"]} == {"possible-import"}
    words = machine.gpuckpt("suspend", "--dry-run", parent.pid, json=False).stdout
    assert "would be refused" in words
    assert "hazard possible-import: " in words


def test_an_nccl_communicator(machine: Machine) -> None:
    rank = machine.target("--nccl-socket", "--trait", "communicator")
    result = machine.gpuckpt("suspend", rank.pid)
    assert (result.code, result.error["code"], result.error["pid"]) == (6, "nccl-communicator", rank.pid)
    assert "rank 0" in result.error["message"]
    assert rank.unharmed()


def test_managed_memory_is_unlocked_again(machine: Machine) -> None:
    target = machine.target("--trait", "managed")
    result = machine.gpuckpt("suspend", target.pid)
    assert (result.code, result.error["code"], result.error["step"]) == (6, "managed-memory", "checkpoint")
    assert "cudaMallocManaged" in result.error["message"]
    assert result.states == {target.pid: "running"}
    assert target.unharmed()
    assert machine.records() == []


def test_busy_beyond_the_deadline(machine: Machine) -> None:
    target = machine.target()
    target.ask("busy 30")
    result = machine.gpuckpt("suspend", target.pid, "--timeout", "2s")
    assert (result.code, result.error["code"], result.error["step"]) == (124, "deadline", "lock")
    assert "busy" in result.error["message"]
    assert result.states == {target.pid: "running"}
    assert target.state is State.RUNNING
    assert machine.records() == []


def test_busy_for_less(machine: Machine) -> None:
    target = machine.target()
    target.ask("busy 0.5")
    assert machine.gpuckpt("suspend", target.pid, "--timeout", "20s").code == 0


def test_one_busy_member_takes_all_back(machine: Machine) -> None:
    one, two = machine.target(), machine.target()
    two.ask("busy 30")
    result = machine.gpuckpt("suspend", one.pid, two.pid, "--timeout", "2")
    assert (result.code, result.error["pid"]) == (124, two.pid)
    assert result.states == {one.pid: "running", two.pid: "running"}
    assert one.unharmed()


def test_host_memory_short(machine: Machine) -> None:
    target = machine.target("--gib", "8")
    machine.host_memory(64, 5)
    result = machine.gpuckpt("suspend", target.pid)
    assert (result.code, result.error["code"], result.error["step"]) == (6, "host-memory", "inspect")
    assert "needs 8.2 GiB" in result.error["message"]
    assert "MemAvailable leaves 5.0 GiB" in result.error["message"]
    assert machine.gpuckpt("suspend", target.pid, "--accept-loss", "host-memory").code == 0


@pytest.mark.parametrize("limit", ["memory.max", "memory.high"])
def test_the_targets_cgroup_is_short(machine: Machine, limit: str) -> None:
    target = machine.target("--gib", "8")
    machine.lay({f"proc/{target.pid}/cgroup": "0::/pod/a\n", "sys/fs/cgroup/pod/a/memory.current": GIB})
    machine.lay({f"sys/fs/cgroup/pod/{limit}": 6 * GIB, "sys/fs/cgroup/pod/memory.current": 2 * GIB})
    result = machine.gpuckpt("suspend", target.pid)
    assert (result.code, result.error["code"]) == (6, "host-memory")
    assert f"{limit} of /pod leaves 4.0 GiB" in result.error["message"]
    assert target.state is State.RUNNING


def test_several_images_share_one_limit(machine: Machine) -> None:
    one, two = machine.target("--gib", "8"), machine.target("--gib", "8")
    machine.host_memory(64, 12)
    assert machine.gpuckpt("suspend", one.pid, two.pid).error["code"] == "host-memory"
    assert machine.gpuckpt("suspend", one.pid).code == 0


def test_exported_memory_is_reported_and_counted(machine: Machine) -> None:
    target = machine.target("--gib", "4", "--exported-gib", "1")
    result = machine.gpuckpt("suspend", target.pid)
    assert (result.code, result.states) == (0, {target.pid: "suspended"})
    assert result.document["processes"][0]["retained_bytes"] == GIB
    (warning,) = result.document["warnings"]
    assert "1024 MiB stayed" in warning
    assert machine.used() == GIB
    plan = machine.gpuckpt("resume", "--dry-run", target.pid).document["plan"]
    assert plan["gpu_bytes_needed"][machine.uuids[0]] > 5 * GIB
    assert machine.gpuckpt("resume", target.pid).code == 0
    assert target.unharmed()


def test_what_stayed_is_not_counted_twice(machine: Machine) -> None:
    """The group was resumed by somebody who does not see this journal, root say."""
    target = machine.target("--gib", "4", "--exported-gib", "1")
    for left in ({machine.uuids[0]: GIB}, {}):  # what stayed the first time is there all the time
        assert machine.gpuckpt("suspend", target.pid).code == 0
        (record,) = machine.records()
        assert record["retained"] == left
        assert machine.gpuckpt("resume", target.pid, GPUCKPT_STATE_DIR=str(machine.path / "roots")).code == 0
    assert target.unharmed()


def test_stopped_before(machine: Machine) -> None:
    target = machine.target()
    target.stop()
    result = machine.gpuckpt("suspend", target.pid)
    assert (result.code, result.error["code"], result.error["hint"]) == (6, "stopped", f"kill -CONT {target.pid}")
    assert machine.records() == []


def test_in_a_frozen_cgroup(machine: Machine) -> None:
    target = machine.target()
    machine.lay({f"proc/{target.pid}/cgroup": "0::/pod/a\n", "sys/fs/cgroup/pod/a/cgroup.events": "populated 1\nfrozen 1\n"})
    result = machine.gpuckpt("suspend", target.pid)
    assert (result.code, result.error["code"]) == (6, "stopped")
    assert "frozen cgroup" in result.error["message"]
    assert "thaw" in result.error["hint"]
    (row,) = machine.gpuckpt("status", target.pid).document["processes"]
    assert (row["state"], row["note"]) == ("stopped", "in a frozen cgroup: the driver would not answer")


def test_found_locked_by_another_tool(machine: Machine) -> None:
    target = machine.target("--trait", "managed")
    with machine.world.transaction() as world:
        world.rules.lock(target.pid)
    result = machine.gpuckpt("suspend", target.pid)  # fails, and leaves it as it was found
    assert (result.code, result.states) == (6, {target.pid: "locked"})
    assert target.state is State.LOCKED
    assert machine.gpuckpt("resume", target.pid).states == {target.pid: "running"}
    assert target.unharmed()


def test_found_checkpointed_by_another_tool(machine: Machine) -> None:
    target = machine.target("--gib", "4")
    with machine.world.transaction() as world:
        world.rules.lock(target.pid)
        world.rules.checkpoint(target.pid)
    assert machine.gpuckpt("suspend", target.pid).document["already"] is True
    filler = machine.target("--gib", "78")
    refused = machine.gpuckpt("resume", target.pid)  # room is estimated from its image: unknown is not free
    assert (refused.code, refused.error["code"]) == (6, "gpu-memory")
    filler.kill()
    assert machine.gpuckpt("resume", target.pid).states == {target.pid: "running"}
    assert target.unharmed()


@pytest.mark.parametrize("command", ["suspend", "resume"])
def test_a_failed_state_is_lost(machine: Machine, command: str) -> None:
    target = machine.target()
    with machine.world.transaction() as world:
        world.rules.processes[target.pid].state = State.FAILED
    result = machine.gpuckpt(command, target.pid)
    assert (result.code, result.error["code"], result.error["pid"]) == (3, "lost", target.pid)
    assert result.error["hint"] == f"end it: kill {target.pid}"
    assert [p["state"] for p in machine.gpuckpt("ps").document["processes"]] == ["lost"]


@pytest.mark.parametrize("call", ["lock", "checkpoint"])
def test_the_driver_fails(machine: Machine, call: str) -> None:
    one, two = machine.target(), machine.target()
    machine.world.add_fault(call, pid=two.pid, result="UNKNOWN")
    result = machine.gpuckpt("suspend", one.pid, two.pid)
    assert (result.code, result.error["code"], result.error["pid"], result.error["step"]) == (1, "driver-error", two.pid, call)
    assert "CUDA_ERROR_UNKNOWN" in result.error["message"]
    assert result.states == {one.pid: "running", two.pid: "running"}
    assert one.unharmed()
    assert two.unharmed()
    assert machine.records() == []


def test_mig(machine: Machine) -> None:
    target = machine.target()
    machine.gpu(0, mig=True)
    result = machine.gpuckpt("suspend", target.pid)
    assert (result.code, result.error["code"]) == (6, "mig")


def test_a_hazard_that_cannot_be_accepted_or_is_none(machine: Machine) -> None:
    target = machine.target()
    for kind in ("stopped", "possible-imports", ""):
        result = machine.gpuckpt("suspend", target.pid, "--accept-loss", kind)
        assert result.code == 2
        assert "possible-import" in result.stderr + result.stdout, "what can be accepted is named"
    assert target.state is State.RUNNING


def test_a_child_that_starts_cuda_meanwhile_ends_the_operation(machine: Machine) -> None:
    parent = machine.target()
    machine.world.add_fault("lock", delay_s=1.0)
    suspend = machine.begin("suspend", parent.pid)
    eventually(lambda: machine.faults_left() == 0, "the lock begins")
    child = machine.target()
    machine.lay({f"proc/{p}/cgroup": "0::/pod\n" for p in (parent.pid, child.pid)})
    result = suspend.end()
    assert (result.code, result.error["code"], result.error["pid"]) == (1, "group-changed", child.pid)
    assert parent.unharmed()
    assert machine.records() == []


def test_a_target_dies_while_locked(machine: Machine) -> None:
    one, two = machine.target(), machine.target()
    machine.world.add_fault("lock", pid=one.pid, delay_s=1.0, result=None)
    suspend = machine.begin("suspend", one.pid, two.pid)
    eventually(lambda: two.state is State.LOCKED, "the other is locked")
    two.kill()
    result = suspend.end()
    assert (result.code, result.error["code"]) == (1, "group-changed")
    assert result.states[one.pid] == "running"
    assert one.unharmed()
    assert machine.records() == []


@pytest.mark.parametrize("dies", ["in its own checkpoint", "after it, in the other's"])
def test_a_target_dies_while_its_group_is_checkpointed(machine: Machine, dies: str) -> None:
    quick, slow = machine.target("--gib", "1"), machine.target("--gib", "16")
    dead, left = (slow, quick) if dies == "in its own checkpoint" else (quick, slow)
    machine.slow(0.1)
    suspend = machine.begin("suspend", quick.pid, slow.pid)
    eventually(lambda: quick.state is State.CHECKPOINTED, "one is down")
    dead.kill()
    result = suspend.end()
    assert (result.code, result.error["code"], result.error["pid"]) == (1, "group-changed", dead.pid)
    assert result.states == {left.pid: "running", dead.pid: "gone"}
    assert left.unharmed()
    assert machine.records() == []
