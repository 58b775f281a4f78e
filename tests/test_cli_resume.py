"""`gpuckpt resume`: room first, then back to where it was, or onto another card."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from gpuckpt.driver.api import DriverVersion
from gpuckpt.driver.simulated import SimulatedDriver
from gpuckpt.model import GIB, Call, State
from tests.simulated_machine import eventually

if TYPE_CHECKING:
    from tests.simulated_machine import Machine


def test_it_computes_on(machine2: Machine) -> None:
    target = machine2.target("--gib", "4", "--gpu", "0", "--gpu", "1")
    assert machine2.gpuckpt("suspend", target.pid).code == 0
    result = machine2.gpuckpt("resume", target.pid)
    assert (result.code, result.states) == (0, {target.pid: "running"})
    (process,) = result.document["processes"]
    assert {g["uuid"]: g["bytes_after"] for g in process["gpus"]} == dict.fromkeys(machine2.uuids, 4 * GIB)
    assert [s["name"] for s in result.document["steps"]] == ["inspect", "room", "restore", "unlock"]
    assert target.unharmed()
    assert machine2.records() == []


def test_words_for_people(machine: Machine) -> None:
    target = machine.target("--gib", "4")
    machine.gpuckpt("suspend", target.pid)
    result = machine.gpuckpt("resume", target.pid, json=False)
    assert f"running: pid {target.pid}" in result.stdout
    assert f"4.0 GiB on {machine.uuids[0]}" in result.stdout
    assert machine.gpuckpt("resume", target.pid, json=False).stdout.startswith(f"already running: pid {target.pid}")


def test_already_running(machine: Machine) -> None:
    target = machine.target()
    result = machine.gpuckpt("resume", target.pid)
    assert (result.code, result.document["already"], result.states) == (0, True, {target.pid: "running"})
    dry = machine.gpuckpt("resume", "--dry-run", target.pid)
    assert (dry.code, dry.document["already"], dry.states, dry.document["plan"]["steps"]) == (0, True, result.states, [])
    assert machine.gpuckpt("resume", "--dry-run", target.pid, json=False).stdout.startswith(f"already running: pid {target.pid}")
    wished = [machine.gpuckpt("resume", target.pid, "--gpu", "zzz", *dry) for dry in ((), ("--dry-run",))]
    assert [r.code for r in wished] == [2, 2]
    assert wished[0].error == wished[1].error


def test_no_room_names_the_holder_and_keeps_the_process(machine: Machine) -> None:
    target = machine.target("--gib", "40")
    machine.gpuckpt("suspend", target.pid)
    filler = machine.target("--gib", "60")
    result = machine.gpuckpt("resume", target.pid)
    assert (result.code, result.error["code"], result.error["gpu"]) == (6, "gpu-memory", machine.uuids[0])
    assert "has 20.0 GiB free, the restore needs 40.2 GiB" in result.error["message"]
    assert f"pid {filler.pid}" in result.error["message"]
    assert "--wait" in result.error["hint"]
    assert target.state is State.CHECKPOINTED
    plan = machine.gpuckpt("resume", "--dry-run", target.pid).document["plan"]
    assert plan["refused"]["code"] == "gpu-memory"
    assert machine.gpuckpt("is-suspended", target.pid).code == 0
    filler.kill()
    assert machine.gpuckpt("resume", target.pid).code == 0
    assert target.unharmed()


def test_wait_for_room(machine: Machine) -> None:
    target = machine.target("--gib", "40")
    machine.gpuckpt("suspend", target.pid)
    filler = machine.target("--gib", "60")
    short = machine.gpuckpt("resume", target.pid, "--wait", "100ms")
    assert (short.code, short.error["code"]) == (6, "gpu-memory")
    resume = machine.begin("resume", target.pid, "--wait", "30s")
    eventually(lambda: machine.holds_gpu(0), "it looks for room")
    filler.kill()
    assert resume.end().code == 0
    assert target.unharmed()


def test_who_waits_for_room_keeps_nobody_from_theirs(machine: Machine) -> None:
    large, small = machine.target("--gib", "40"), machine.target("--gib", "4")
    for target in (large, small):
        machine.gpuckpt("suspend", target.pid)
    filler = machine.target("--gib", "60")
    resume = machine.begin("resume", large.pid, "--wait", "60s")
    eventually(lambda: machine.holds_gpu(0), "it looks for room")
    assert machine.gpuckpt("resume", small.pid, "--timeout", "10s").code == 0
    assert small.unharmed()
    assert large.state is State.CHECKPOINTED
    filler.kill()
    assert resume.end().code == 0
    assert large.unharmed()


def test_the_deadline_holds_for_the_wait_too(machine: Machine) -> None:
    target = machine.target("--gib", "40")
    machine.gpuckpt("suspend", target.pid)
    filler = machine.target("--gib", "60")
    result = machine.gpuckpt("resume", target.pid, "--wait", "1h", "--timeout", "500ms")
    assert (result.code, result.error["code"]) == (6, "gpu-memory")
    assert "a longer --timeout" in result.error["hint"]
    filler.kill()
    assert machine.gpuckpt("resume", target.pid).code == 0


def test_a_process_that_filled_its_gpu_has_room_on_it(machine: Machine) -> None:
    """The margin beyond its bytes is not asked for where the GPU did not have it before."""
    target = machine.target("--gib", "79.99")
    assert machine.gpuckpt("suspend", target.pid).code == 0
    assert machine.gpuckpt("resume", target.pid).code == 0
    assert target.unharmed()


@pytest.mark.parametrize("answer", ["fails", "zero"])
def test_unknown_is_not_free(machine: Machine, answer: str) -> None:
    target = machine.target()
    machine.gpuckpt("suspend", target.pid)
    machine.gpu(0, memory_query=answer)
    result = machine.gpuckpt("resume", target.pid)
    assert (result.code, result.error["code"]) == (6, "gpu-unknown")
    assert target.state is State.CHECKPOINTED
    resume = machine.begin("resume", target.pid, "--wait", "30s")
    eventually(lambda: machine.holds_gpu(0), "it waits for an answer")
    machine.gpu(0, memory_query="ok")
    assert resume.end().code == 0
    assert target.unharmed()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"compute_mode": "prohibited"}, "compute mode is prohibited (was default)"),
        ({"compute_mode": "exclusive-process"}, "compute mode is exclusive-process (was default)"),
        ({"mig": True}, "MIG was switched on"),
    ],
)
def test_a_changed_gpu(machine: Machine, change: dict[str, object], words: str) -> None:
    target = machine.target()
    machine.gpuckpt("suspend", target.pid)
    machine.gpu(0, **change)
    for arguments in (("resume", target.pid), ("resume", "--dry-run", target.pid)):
        result = machine.gpuckpt(*arguments)
        error = result.document["error"] or result.document["plan"]["refused"]
        assert error["code"] == "gpu-changed"
        assert words in error["message"]
    assert target.state is State.CHECKPOINTED
    machine.gpu(0, compute_mode="default", mig=False)
    assert machine.gpuckpt("resume", target.pid).code == 0
    assert target.unharmed()


def test_a_gpu_that_takes_one_process_at_a_time(machine: Machine) -> None:
    """In exclusive-process mode the driver would fail the restore, however much is free, and the process would be lost."""
    machine.gpu(0, compute_mode="exclusive-process")
    one = machine.target()
    machine.gpuckpt("suspend", one.pid)
    two = machine.target()
    refused = machine.gpuckpt("resume", one.pid)
    assert (refused.code, refused.error["code"]) == (6, "gpu-memory")
    assert "exclusive-process" in refused.error["message"]
    assert f"Held by pid {two.pid}" in refused.error["message"]
    assert machine.gpuckpt("resume", "--dry-run", one.pid).document["plan"]["refused"]["code"] == "gpu-memory"
    machine.gpuckpt("suspend", two.pid)
    both = machine.gpuckpt("resume", one.pid, two.pid)
    assert (both.code, both.error["code"]) == (6, "gpu-memory")
    assert "several would come back" in both.error["message"]
    assert machine.gpuckpt("resume", one.pid).code == 0
    assert one.unharmed()
    one.kill()
    assert machine.gpuckpt("resume", two.pid).code == 0
    assert two.unharmed()


def test_a_gpu_that_is_gone(machine2: Machine) -> None:
    target, uuid = machine2.target("--gpu", "1"), machine2.uuids[1]
    machine2.gpuckpt("suspend", target.pid)
    with machine2.world.transaction() as world:
        gone = world.rules.gpus.pop(uuid)
    refused = machine2.gpuckpt("resume", target.pid, "--wait", "1h")
    assert (refused.code, refused.error["code"], refused.error["gpu"]) == (6, "gpu-lost", uuid)
    assert refused.error["message"].startswith(f"{uuid} is not on this machine any more; nothing was restored")
    with machine2.world.transaction() as world:
        world.rules.gpus[uuid] = gone
    assert machine2.gpuckpt("resume", target.pid).code == 0
    assert target.unharmed()


def test_onto_another_card_and_back(machine2: Machine) -> None:
    one, two = machine2.uuids
    target = machine2.target("--gib", "8")
    for there, wish in ((two, two), (one, f"{two}={one}")):
        assert machine2.gpuckpt("suspend", target.pid).code == 0
        dry = machine2.gpuckpt("resume", "--dry-run", target.pid, "--gpu", wish).document["plan"]
        assert set(dry["gpu_map"]) == {one, two}
        assert list(dry["gpu_bytes_needed"]) == [there]
        result = machine2.gpuckpt("resume", target.pid, "--gpu", wish)
        assert (result.code, result.states) == (0, {target.pid: "running"})
        assert {u for u, g in machine2.world.peek().rules.processes[target.pid].held_bytes.items() if g} == {there}
        assert target.unharmed()


def test_another_card_with_a_driver_that_moves_nothing(machine2: Machine) -> None:
    """To it the map is memory that must be zero: it might restore where nobody looked for room."""
    target = machine2.target()
    machine2.gpuckpt("suspend", target.pid)
    with machine2.world.transaction() as world:
        world.rules.driver = DriverVersion((12, 9), "575.57.08")
    refused = machine2.gpuckpt("resume", target.pid, "--gpu", machine2.uuids[1])
    assert (refused.code, refused.error["code"]) == (6, "driver-too-old")
    assert "without --gpu" in refused.error["hint"]
    assert target.state is State.CHECKPOINTED
    assert machine2.gpuckpt("resume", target.pid).code == 0
    assert target.unharmed()


def test_another_card_without_room(machine2: Machine) -> None:
    target = machine2.target("--gib", "40")
    filler = machine2.target("--gib", "60", "--gpu", "1")
    machine2.gpuckpt("suspend", target.pid)
    result = machine2.gpuckpt("resume", target.pid, "--gpu", machine2.uuids[1])
    assert (result.code, result.error["code"], result.error["gpu"]) == (6, "gpu-memory", machine2.uuids[1])
    assert f"pid {filler.pid}" in result.error["message"]
    assert target.state is State.CHECKPOINTED
    assert machine2.gpuckpt("resume", target.pid).code == 0


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        (("GPU-nonsense",), "no GPU of this machine has the UUID GPU-nonsense"),
        (("{0}=GPU-nonsense",), "no GPU of this machine has the UUID GPU-nonsense"),
        (("GPU-nonsense={0}",), "no GPU of this machine has the UUID GPU-nonsense"),
        (("{0}={1}", "{1}={1}"), "two GPUs cannot be restored onto one"),
        (("{0}={1}", "{0}={0}"), "names one old GPU twice"),
        (("{0}", "{1}"), "one UUID alone, or OLD=NEW"),
        (("=", "x"), "one UUID alone, or OLD=NEW"),
    ],
)
def test_wrong_wishes(machine2: Machine, wish: tuple[str, ...], words: str) -> None:
    target = machine2.target()
    machine2.gpuckpt("suspend", target.pid)
    options = [w for wished in wish for w in ("--gpu", wished.format(*machine2.uuids))]
    result = machine2.gpuckpt("resume", target.pid, *options)
    assert (result.code, result.error["code"]) == (2, "usage")
    assert words in result.error["message"]
    assert target.state is State.CHECKPOINTED


def test_one_uuid_for_a_group_on_two_gpus(machine2: Machine) -> None:
    target = machine2.target("--gpu", "0", "--gpu", "1")
    machine2.gpuckpt("suspend", target.pid)
    result = machine2.gpuckpt("resume", target.pid, "--gpu", machine2.uuids[0])
    assert result.code == 2
    assert "the group was on 2 GPUs" in result.error["message"]


def test_another_chip(machine2: Machine) -> None:
    machine2.gpu(1, name="Another GPU")
    target = machine2.target()
    machine2.gpuckpt("suspend", target.pid)
    result = machine2.gpuckpt("resume", target.pid, "--gpu", machine2.uuids[1])
    assert (result.code, result.error["code"]) == (6, "gpu-changed")
    assert "same chip" in result.error["message"]
    assert target.state is State.CHECKPOINTED


def test_a_gpu_for_a_process_that_runs(machine2: Machine) -> None:
    target = machine2.target()
    result = machine2.gpuckpt("resume", target.pid, "--gpu", machine2.uuids[1])
    assert (result.code, result.error["code"]) == (2, "usage"), "nothing moves, and that is said"
    assert machine2.gpuckpt("resume", target.pid, "--gpu", machine2.uuids[0]).code == 0, "it is there already"
    assert target.unharmed()


def test_a_failed_restore_names_the_lost_and_brings_back_the_rest(machine: Machine) -> None:
    good, importer = machine.job((), ("--trait", "import"))
    machine.gpuckpt("suspend", good.pid, "--accept-loss", "possible-import")
    result = machine.gpuckpt("resume", good.pid)
    assert (result.code, result.error["code"], result.error["pid"]) == (3, "lost", importer.pid)
    assert "INVALID_VALUE" in result.error["message"]
    assert f"kill -9 {importer.pid}" in result.error["hint"]
    assert result.states == {good.pid: "running", importer.pid: "lost"}
    assert good.unharmed()
    rows = {p["pid"]: p["state"] for p in machine.gpuckpt("ps").document["processes"]}
    assert rows == {good.pid: "running", importer.pid: "lost"}
    again = machine.gpuckpt("resume", importer.pid)
    assert (again.code, again.error["code"]) == (3, "lost")
    importer.kill()
    machine.gpuckpt("recover")
    assert machine.records() == []


def test_stopped_while_suspended(machine: Machine) -> None:
    target = machine.target()
    machine.gpuckpt("suspend", target.pid)
    target.stop()
    for command in ("suspend", "resume"):
        result = machine.gpuckpt(command, target.pid)
        assert (result.code, result.error["code"]) == (6, "stopped"), command
        assert result.error["hint"] == f"kill -CONT {target.pid}"
        refused = machine.gpuckpt(command, "--dry-run", target.pid).document["plan"]["refused"]
        assert (refused["code"], refused["hint"]) == ("stopped", f"kill -CONT {target.pid}"), command
    recovered = machine.gpuckpt("recover")
    assert (recovered.code, recovered.document["recovered"]) == (0, []), "it is suspended, and nothing was left in the middle"
    target.signal(18)
    assert machine.gpuckpt("resume", target.pid).code == 0
    assert target.unharmed()


def test_one_of_a_group_is_stopped_which_another_tool_suspended(machine: Machine) -> None:
    """The way out is not that of a suspend, which a resume does not take."""
    parent = machine.target("--spawn", "1")
    driver = SimulatedDriver(machine.world.path)
    driver.lock(parent.pid, 1.0)
    driver.checkpoint(parent.pid)
    (child,) = parent.children
    os.kill(child, signal.SIGSTOP)
    result = machine.gpuckpt("resume", parent.pid)
    assert (result.code, result.error["code"], result.error["hint"]) == (6, "stopped", f"kill -CONT {child}")
    os.kill(child, signal.SIGCONT)
    assert machine.gpuckpt("resume", parent.pid).code == 0
    assert parent.unharmed()


def test_frozen_while_suspended(machine: Machine) -> None:
    target = machine.target()
    assert machine.gpuckpt("suspend", target.pid).code == 0
    machine.lay({f"proc/{target.pid}/cgroup": "3:freezer:/pod/a\n", "sys/fs/cgroup/freezer/pod/a/freezer.state": "FROZEN\n"})
    (row,) = machine.gpuckpt("status", target.pid).document["processes"]
    assert row["state"] == "suspended"
    result = machine.gpuckpt("resume", target.pid)
    assert (result.code, result.error["code"]) == (6, "stopped")
    assert "thaw" in result.error["hint"]
    assert "kill" not in result.error["hint"]
    machine.lay({"sys/fs/cgroup/freezer/pod/a/freezer.state": "THAWED\n"})
    assert machine.gpuckpt("resume", target.pid).code == 0
    assert target.unharmed()


def test_a_deadline_that_has_passed_leaves_no_unlock_behind(machine: Machine) -> None:
    target = machine.target()
    assert machine.gpuckpt("suspend", target.pid).code == 0
    result = machine.gpuckpt("resume", target.pid, "--timeout", "1ms")
    assert (result.code, result.states) == (0, {target.pid: "running"}), result.stderr
    assert machine.records() == []
    assert target.unharmed()


def test_no_persistence_mode(machine: Machine) -> None:
    machine.gpu(0, persistence=False)
    target = machine.target()
    assert machine.gpuckpt("suspend", target.pid).code == 0
    assert machine.gpuckpt("resume", target.pid).code == 0
    assert target.unharmed()


def test_a_restore_is_not_hurried_by_its_deadline(machine: Machine) -> None:
    target = machine.target("--gib", "2")
    machine.gpuckpt("suspend", target.pid)
    machine.slow(0.5)
    result = machine.gpuckpt("resume", target.pid, "--timeout", "100ms")
    assert (result.code, result.states) == (0, {target.pid: "running"})


def test_dead_while_suspended(machine: Machine) -> None:
    target = machine.target()
    machine.gpuckpt("suspend", target.pid)
    target.kill()
    for command in ("resume", "status"):
        result = machine.gpuckpt(command, target.pid)
        assert (result.code, result.error["code"]) == (4, "no-such-process")
    result = machine.gpuckpt("recover")
    assert result.code == 0
    assert "ended" in result.document["recovered"][0]
    assert machine.records() == []


def test_dies_during_the_restore(machine: Machine) -> None:
    one, two = machine.target("--gib", "1"), machine.target("--gib", "8")
    machine.gpuckpt("suspend", one.pid, two.pid)
    machine.slow(0.2)
    resume = machine.begin("resume", one.pid)
    eventually(lambda: two.under_way(Call.RESTORE), "the restore")
    two.kill()
    result = resume.end()
    assert (result.code, result.states) == (0, {one.pid: "running", two.pid: "gone"})
    assert f"pid {two.pid}" in result.document["warnings"][0]
    assert one.unharmed()
    assert machine.records() == []
