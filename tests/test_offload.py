"""Programs with memory in a pool: it leaves the GPU before the driver's checkpoint, or without one, and comes back last."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from gpuckpt.model import GIB, State
from gpuckpt.reporting import growing
from tests.simulated_machine import eventually
from tests.test_agent import stages

if TYPE_CHECKING:
    from tests.simulated_machine import Machine, Result, Target

POOL = ("--gib", "2", "--pool", "weights=6", "--pool", "cache=4")
ALL, REST = 12 * GIB, 2 * GIB
BY_POOL = "suspended (pool)"


def steps(result: Result) -> list[str]:
    return [s["name"] for s in result.document["steps"] if s["name"] not in ("inspect", "re-inspect", "verify", "room")]


def suspended(machine: Machine, target: Target, *options: str) -> Result:
    result = machine.gpuckpt("suspend", target.pid, *options)
    assert result.code == 0, result
    return result


def resumed(machine: Machine, target: Target) -> Result:
    result = machine.gpuckpt("resume", target.pid)
    assert result.code == 0, result
    return result


def test_a_pool_leaves_first_and_comes_back_last(machine: Machine) -> None:
    target = machine.target(*POOL)
    for _ in range(2):
        down = suspended(machine, target)
        assert steps(down) == ["quiesce", "offload", "comms", "disarm", "lock", "checkpoint"]
        (p,) = down.document["processes"]
        assert p["moved"] == {"kept_bytes": 10 * GIB, "dropped_bytes": 0}
        assert (p["state"], p["host_bytes"], p["retained_bytes"]) == ("suspended", ALL, 0)
        assert down.document["method"]["why"] == f"10.0 GiB of pid {target.pid} by gpuckpt.pool; then the driver takes the rest"
        (row,) = machine.gpuckpt("ps").document["processes"]
        assert (row["state"], row["host_bytes"]) == ("suspended", ALL)
        (record,) = machine.records()
        assert record["schema"] == 3
        assert machine.used() == 0
        up = resumed(machine, target)
        assert steps(up) == ["restore", "unlock", "arm", "comms-resume", "onload", "unquiesce"]
        assert target.unharmed()
        assert machine.used() == ALL


def test_a_program_without_a_pool_has_no_such_step(machine: Machine) -> None:
    target = machine.target("--agent", "alone", "0", "1")
    down = suspended(machine, target)
    assert "offload" not in steps(down) + steps(resumed(machine, target))
    assert down.document["method"] == {"asked": "auto", "taken": "driver", "why": "nothing lies in a pool that is awake"}
    assert machine.gpuckpt("suspend", target.pid, "--method", "pool").error["code"] == "no-pool"
    assert target.unharmed()


def test_only_those_ranks_that_have_one(machine4: Machine) -> None:
    ranks = machine4.job(("--gpu", "0", "--agent", "tp", "0", "2", "--pool", "weights=6"), ("--gpu", "1", "--agent", "tp", "1", "2"))
    down = suspended(machine4, ranks[1])
    by_pid = {s["name"]: set(s["seconds_by_pid"]) for s in down.document["steps"]}
    assert by_pid["offload"] == {str(ranks[0].pid)}
    assert by_pid["comms"] == {str(r.pid) for r in ranks}
    up = resumed(machine4, ranks[0])
    by_pid = {s["name"]: set(s["seconds_by_pid"]) for s in up.document["steps"]}
    assert by_pid["onload"] == {str(ranks[0].pid)}
    assert all(r.unharmed() for r in ranks)


@pytest.mark.parametrize("tags", ["", "weights"])
def test_what_sleeps_by_the_programs_own_call_is_left_asleep(machine: Machine, tags: str) -> None:
    target = machine.target(*POOL)
    asleep = target.ask(f"sleep {tags}")["asleep"]
    before = target.ask("check")["sum"]
    down = suspended(machine, target)
    assert ("offload" in steps(down)) is (tags == "weights")
    resumed(machine, target)
    assert target.ask("check")["sum"] == before
    assert asleep == ([tags] if tags else ["cache", "weights"])
    assert machine.used() == ALL - (10 if not tags else 6) * GIB
    target.ask("wake")
    assert target.unharmed()


@pytest.mark.parametrize("half_way", [False, True])
def test_no_host_memory_takes_everything_back(machine: Machine, half_way: bool) -> None:
    target = machine.target(*POOL)
    machine.world.add_fault("offload", result="no memory", before=not half_way)
    result = machine.gpuckpt("suspend", target.pid)
    assert (result.code, result.error["code"]) == (1, "offload-failed"), result
    assert "NoHostMemory: no memory" in result.error["message"]
    assert result.states == {target.pid: "running"}
    assert target.unharmed()
    assert machine.used() == ALL
    assert not machine.records()
    suspended(machine, target)


def test_what_cannot_come_back_stands_still_and_is_named(machine: Machine) -> None:
    """Half of it had left, and had no room to come back: neither at once, nor at the undo, nor when the command is gone."""
    target = machine.target(*POOL)
    machine.world.add_fault("offload", result="no memory", before=False)
    machine.world.add_fault("onload", result="full", times=3)
    result = machine.gpuckpt("suspend", target.pid)
    assert (result.code, result.error["code"]) == (3, "not-as-found"), result
    assert result.states == {target.pid: "offloaded"}
    eventually(lambda: not machine.faults_left(), "it has tried once more by itself")
    assert stages([target]) == {"offloaded"}
    assert machine.gpuckpt("recover").code == 0
    assert target.unharmed()
    assert not machine.records()


@pytest.mark.parametrize("call", ["offload", "onload"])
def test_a_controller_killed_meanwhile_is_not_missed(machine: Machine, call: str) -> None:
    target = machine.target(*POOL)
    if call == "onload":
        suspended(machine, target)
    machine.world.add_fault(call, delay_s=0.5)
    running = machine.begin("suspend" if call == "offload" else "resume", target.pid)
    eventually(lambda: not machine.faults_left(), f"{call} begins")
    running.process.kill()
    running.end()
    eventually(lambda: stages([target]) == {"running"}, "it goes back by itself")
    assert target.unharmed()
    assert machine.gpuckpt("recover").code == 0
    assert not machine.records()
    assert machine.used() == ALL


def test_a_deadline_in_the_middle_of_an_offload_takes_it_back(machine: Machine) -> None:
    target = machine.target(*POOL)
    machine.world.add_fault("offload", delay_s=3.0)
    result = machine.gpuckpt("suspend", target.pid, "--timeout", "2s")
    assert result.code == 124, result
    assert target.unharmed()
    assert machine.used() == ALL


def test_a_ctrl_c_in_the_middle_of_an_offload_takes_it_back(machine: Machine) -> None:
    """What had left comes back."""
    target = machine.target(*POOL)
    machine.world.add_fault("offload", delay_s=1.0)
    running = machine.begin("suspend", target.pid, json=False)
    eventually(lambda: not machine.faults_left(), "it begins")
    running.signal(signal.SIGINT)
    result = running.end()
    assert result.code == 130, result
    assert "stopping: a offload cannot be interrupted; waiting for it" in result.stderr
    assert target.unharmed()
    assert machine.used() == ALL


def test_a_failed_checkpoint_brings_the_pool_back(machine: Machine) -> None:
    target = machine.target(*POOL)
    machine.world.add_fault("checkpoint", result="UNKNOWN")
    result = machine.gpuckpt("suspend", target.pid)
    assert result.code == 1, result
    assert [s for s in steps(result) if s in ("offload", "onload")] == ["offload", "onload"]
    assert target.unharmed()
    assert machine.used() == ALL


def test_nobody_is_restored_into_room_that_a_pool_may_take_back(machine: Machine) -> None:
    """A suspend that is not through yet may still be undone, by the agent alone if need be: its room is not free."""
    other = machine.target("--gib", "60")
    suspended(machine, other)
    target = machine.target("--gib", "2", "--pool", "weights=60", "--agent", "alone", "0", "1")
    machine.world.add_fault("comms", delay_s=1.5)
    running = machine.begin("suspend", target.pid)
    eventually(lambda: "offloaded" in stages([target]), "its pool has left")
    running.signal(signal.SIGSTOP)  # so it stays, however long the next command takes to start
    refused = machine.gpuckpt("resume", other.pid, "--timeout", "1s")
    running.signal(signal.SIGCONT)
    assert refused.error["code"] == "concurrent-operation", refused
    assert "may still take its memory back" in refused.error["message"]
    assert machine.gpuckpt("resume", other.pid, "--wait", "10s").code == 0
    assert running.end().code == 0
    assert other.unharmed()
    other.kill()
    resumed(machine, target)
    assert target.unharmed()


@pytest.mark.parametrize("step", ["offload", "lock"])
def test_host_memory_that_others_take_meanwhile(machine4: Machine, step: str) -> None:
    """Between the plan and NCCL's backups, or the image: all goes back in order, and both numbers are said."""
    backup = ("--backup-gib", "3", "--pool", "weights=6")
    ranks = machine4.job(*(("--gpu", str(r), "--agent", "tp", str(r), "2", *backup) for r in range(2)))
    machine4.host_memory(128, 64)
    machine4.world.add_fault(step, pid=ranks[0].pid, delay_s=0.5)
    running = machine4.begin("suspend", ranks[0].pid)
    eventually(lambda: not machine4.faults_left(), f"{step} begins")
    running.signal(signal.SIGSTOP)
    machine4.host_memory(128, 1.5)
    running.signal(signal.SIGCONT)
    result = running.end()
    assert (result.code, result.error["code"]) == (6, "host-memory"), result
    of = "NCCL's backups of suspended communicators need 6.0" if step == "offload" else "the image needs 2.3"
    assert f"{of} GiB of host memory, MemAvailable leaves 1.5 GiB" in result.error["message"]
    assert ("comms" in steps(result)) is (step == "lock")
    assert result.states == {r.pid: "running" for r in ranks}
    assert all(r.unharmed() for r in ranks)
    assert not machine4.records()
    assert [machine4.used(index) for index in (0, 1)] == [7 * GIB] * 2
    machine4.host_memory(128, 64)
    suspended(machine4, ranks[1])


# The pool alone.


def test_what_grows_from_one_suspend_to_the_next_is_told(machine: Machine) -> None:
    """Case 45: a GiB beside the pool more each time. A process of its own keeps what it leaves for itself."""
    target, told = machine.target(*POOL), []
    for _ in range(4):
        down = suspended(machine, target, "--method", "pool")
        told.append([w for w in down.document["warnings"] if "more and more" in w])
        resumed(machine, target)
        assert "error" not in target.ask("alloc 1")
    assert told[:3] == [[], [], []]
    assert told[3] == [
        f"pid {target.pid} leaves more and more on its GPUs when it is suspended: "
        "2048 MiB, and 5120 MiB 3 suspends later: 1024 MiB more each time"
    ]


def test_what_counts_as_growing() -> None:
    """Case 45, over twenty suspends."""
    assert growing([n * GIB for n in range(1, 21)]) == "1024 MiB, and 20480 MiB 19 suspends later: 1024 MiB more each time"
    assert growing([2 * GIB] * 20) == growing([GIB, 3 * GIB, 2 * GIB, 4 * GIB, 3 * GIB]) == growing([]) == ""


def test_the_pool_alone_leaves_the_rest_where_it_is(machine: Machine) -> None:
    target = machine.target(*POOL)
    down = suspended(machine, target, "--method", "pool")
    assert steps(down) == ["quiesce", "offload", "comms", "disarm"]
    (p,) = down.document["processes"]
    assert (p["state"], p["retained_bytes"], p["host_bytes"]) == (BY_POOL, REST, 10 * GIB)
    assert p["gpus"] == [{"uuid": machine.uuids[0], "bytes_before": ALL, "bytes_after": REST}]
    assert target.state is State.RUNNING
    assert machine.used() == REST
    (row,) = machine.gpuckpt("status", target.pid).document["processes"]
    assert (row["state"], row["host_bytes"], row["gpus"]) == (BY_POOL, 10 * GIB, [{"uuid": machine.uuids[0], "bytes": REST}])
    assert machine.gpuckpt("is-suspended", target.pid).code == 0
    assert machine.gpuckpt("recover").document["recovered"] == []
    for method in ("auto", "pool"):
        again = suspended(machine, target, "--method", method)
        assert again.document["already"]
        assert again.document["processes"][0]["state"] == BY_POOL
        assert again.document["processes"][0]["retained_bytes"] == REST
    for more in (("--method", "driver"), ("--keep-in", "/tmp")):
        on_top = machine.gpuckpt("suspend", target.pid, *more)
        assert (on_top.code, on_top.error["code"]) == (6, "refused")
    words = machine.gpuckpt("suspend", target.pid, json=False)
    assert words.stdout == f"already suspended (pool): pid {target.pid} ({p['name']})\n"
    up = resumed(machine, target)
    assert steps(up) == ["arm", "comms-resume", "onload", "unquiesce"]
    assert up.states == {target.pid: "running"}
    assert target.unharmed()
    assert machine.gpuckpt("is-suspended", target.pid).code == 1
    assert not machine.records()


@pytest.mark.parametrize("why", ["mig", "managed"])
def test_the_pool_alone_where_the_driver_cannot(machine: Machine, why: str) -> None:
    target = machine.target(*POOL, *(["--trait", "managed"] if why == "managed" else []))
    machine.gpu(0, mig=why == "mig")
    result = machine.gpuckpt("suspend", target.pid)
    assert (result.code, result.error["hint"].endswith(f"gpuckpt suspend {target.pid} --method pool")) == (6, True), result
    assert target.unharmed()
    suspended(machine, target, "--method", "pool")
    resumed(machine, target)
    assert target.unharmed()


def test_room_for_a_pool_is_waited_for(machine: Machine) -> None:
    target = machine.target(*POOL)
    suspended(machine, target, "--method", "pool")
    filler = machine.target("--gib", "70")
    result = machine.gpuckpt("resume", target.pid)
    assert (result.code, result.error["code"]) == (6, "gpu-memory"), result
    assert "the restore needs 10." in result.error["message"]
    assert machine.gpuckpt("is-suspended", target.pid).code == 0
    filler.kill()
    resumed(machine, target)
    assert target.unharmed()


@pytest.mark.parametrize("call", ["offload", "onload"])
def test_a_controller_of_a_pool_alone_is_killed(machine: Machine, call: str) -> None:
    target = machine.target(*POOL)
    if call == "onload":
        suspended(machine, target, "--method", "pool")
    machine.world.add_fault(call, delay_s=0.5)
    running = machine.begin(*(("suspend", target.pid, "--method", "pool") if call == "offload" else ("resume", target.pid)))
    eventually(lambda: not machine.faults_left(), f"{call} begins")
    running.process.kill()
    running.end()
    eventually(lambda: stages([target]) == {"running"}, "it goes back by itself")
    assert machine.gpuckpt("recover").code == 0
    assert target.unharmed()
    assert not machine.records()


def test_what_the_pool_alone_is_refused(machine4: Machine) -> None:
    plain = machine4.target("--gpu", "1")
    result = machine4.gpuckpt("suspend", plain.pid, "--method", "pool")
    assert (result.code, result.error["code"]) == (6, "no-pool")
    assert "has no agent" in result.error["message"]
    target = machine4.target(*POOL)
    for options in (("--keep-in", "/tmp"), ("--rendezvous", f"file://{machine4.path}/store", "--nodes", "2", "--timeout", "2s")):
        assert machine4.gpuckpt("suspend", target.pid, "--method", "pool", *options).code == 2
    suspended(machine4, target, "--method", "pool")
    moved = machine4.gpuckpt("resume", target.pid, "--gpu", machine4.uuids[2])
    assert (moved.code, moved.error["code"]) == (2, "usage")
    resumed(machine4, target)
    assert target.unharmed()


def test_communicators_that_cannot_be_suspended_stay(machine4: Machine) -> None:
    """Half of a communicator: the driver would lose it, its pool can leave all the same."""
    ranks = machine4.job(
        ("--gpu", "0", "--nccl-socket", "--agent", "tp", "0", "2", "--pool", "weights=6"),
        ("--gpu", "1", "--nccl-socket", "--agent", "tp", "1", "2"),
    )
    down = machine4.gpuckpt("suspend", ranks[0].pid, "--no-tree", "--method", "pool")
    assert down.code == 0, down
    assert "communicators keep what they hold" in down.document["warnings"][0]
    assert not (machine4.world.path / "comms").exists()
    resumed(machine4, ranks[0])
    assert all(r.unharmed() for r in ranks)


def test_a_dry_run_tells_what_would_move(machine: Machine) -> None:
    target = machine.target(*POOL)
    plan = machine.gpuckpt("suspend", "--dry-run", target.pid).document
    assert [s["name"] for s in plan["plan"]["steps"]] == ["quiesce", "offload", "comms", "disarm", "lock", "checkpoint"]
    assert plan["plan"]["movable"][str(target.pid)]["tags"] == [
        {"tag": "weights", "device": 0, "bytes": 6 * GIB, "where": "gpu"},
        {"tag": "cache", "device": 0, "bytes": 4 * GIB, "where": "gpu"},
    ]
    alone = machine.gpuckpt("suspend", "--dry-run", target.pid, "--method", "pool").document
    assert [s["name"] for s in alone["plan"]["steps"]] == ["quiesce", "offload", "comms", "disarm"]
    words = machine.gpuckpt("suspend", "--dry-run", target.pid, json=False).stdout
    assert f"method pool, driver: 10.0 GiB of pid {target.pid} by gpuckpt.pool; then the driver takes the rest" in words
    assert target.unharmed()
