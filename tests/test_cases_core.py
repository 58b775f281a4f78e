"""What went wrong for users of other tools, by the public report of each: gpuckpt must not do the same."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from gpuckpt.inspect import ranks
from gpuckpt.model import Call, Rank, State
from tests.simulated_machine import eventually
from tests.test_cli_concurrent import waits_for

if TYPE_CHECKING:
    from tests.simulated_machine import Machine, Target


def test_a_failed_memory_query_is_not_an_empty_card(machine: Machine) -> None:
    """Case 33, ollama/ollama#6637: the query failed, and a second model was loaded as if the card were empty."""
    target = machine.target("--gib", "40")
    assert machine.gpuckpt("suspend", target.pid).code == 0
    filler = machine.target("--gib", "60")
    for answer in ("fails", "zero"):
        machine.gpu(0, memory_query=answer)
        result = machine.gpuckpt("resume", target.pid, "--wait", "300ms")
        assert (result.code, result.error["code"]) == (6, "gpu-unknown")
        assert "unknown is not free" in result.error["message"]
        assert target.state is State.CHECKPOINTED
    resume = machine.begin("resume", target.pid, "--wait", "30s")
    eventually(lambda: machine.holds_gpu(0), "it waits")
    filler.kill()
    machine.gpu(0, memory_query="ok")
    assert resume.end().code == 0
    assert target.unharmed()


def test_a_card_that_falls_off_the_bus(machine4: Machine) -> None:
    """Case 34, leptonai/gpud#604, NVIDIA/open-gpu-kernel-modules#1151: one GPU of several is lost, and queries for it raise."""
    one, two = machine4.target("--gpu", "1"), machine4.target("--gpu", "2")
    for target in (one, two):
        assert machine4.gpuckpt("suspend", target.pid).code == 0
    machine4.gpu(2, lost=True)
    result = machine4.gpuckpt("ps")
    assert [g["lost"] for g in result.document["gpus"]] == [False, False, True, False]
    assert {p["state"] for p in result.document["processes"]} == {"suspended"}
    assert machine4.gpuckpt("ps", json=False).stdout.count("lost: it fell off the bus") == 1
    assert machine4.gpuckpt("doctor").document["checks"]
    assert machine4.gpuckpt("resume", one.pid).code == 0
    assert one.unharmed()
    refused = machine4.gpuckpt("resume", two.pid)
    assert (refused.code, refused.error["code"], refused.error["gpu"]) == (6, "gpu-lost", machine4.uuids[2])
    assert "resume again" in refused.error["hint"]
    moved = machine4.gpuckpt("resume", two.pid, "--gpu", machine4.uuids[3])
    assert (moved.code, moved.error["code"]) == (2, "usage"), "the driver's map has no place for it"
    assert f"{machine4.uuids[2]} is lost" in moved.error["message"]
    assert two.state is State.CHECKPOINTED
    machine4.gpu(2, lost=False)
    assert machine4.gpuckpt("resume", two.pid).code == 0
    assert two.unharmed()


def oom_score_adj(target: Target) -> int:
    return int(Path(f"/proc/{target.pid}/oom_score_adj").read_text())


def test_the_largest_process_can_be_spared(machine: Machine) -> None:
    """Case 37, rfjakob/earlyoom#155: with its image in host memory a process is the largest, and the killer takes it first."""
    one, two = machine.target("--gib", "2"), machine.target("--gib", "1")
    before = oom_score_adj(one)
    asked = min(1000, before + 300)  # up: to go down takes a capability
    down = machine.gpuckpt("suspend", "--no-tree", "--accept-loss", "possible-import", one.pid, "--oom-score-adj", str(asked))
    assert (down.code, oom_score_adj(one), oom_score_adj(two)) == (0, asked, before)
    again = machine.gpuckpt("suspend", one.pid, "--no-tree", "--oom-score-adj", "0")
    assert (again.code, oom_score_adj(one)) == (0, asked)
    assert "stays as it is" in again.document["warnings"][0]
    assert machine.gpuckpt("resume", one.pid).code == 0
    assert oom_score_adj(one) == before
    assert one.unharmed()
    assert machine.gpuckpt("suspend", one.pid, "--oom-score-adj", "1001").code == 2


def test_a_spared_process_is_set_back_by_recover(machine: Machine) -> None:
    target = machine.target("--gib", "2")
    before = oom_score_adj(target)
    assert machine.gpuckpt("suspend", target.pid, "--oom-score-adj", str(min(1000, before + 300))).code == 0
    machine.slow(0.5)
    running = machine.begin("resume", target.pid)
    eventually(lambda: target.under_way(Call.RESTORE), "the restore begins")
    running.process.kill()
    running.end()
    eventually(lambda: not machine.world.peek().operations, "the driver completes what was begun")
    assert machine.gpuckpt("recover").code == 0
    assert oom_score_adj(target) == before
    assert target.unharmed()


def test_suspended_processes_are_remembered(machine: Machine) -> None:
    """Case 35, gke-labs/open-rl PR#132: targets vanish from the card's list of processes once they are suspended."""
    one, two, three = (machine.target() for _ in range(3))
    assert machine.gpuckpt("suspend", one.pid, two.pid, three.pid).code == 0
    two.kill()
    rows = {p["pid"]: p["state"] for p in machine.gpuckpt("ps").document["processes"]}
    assert rows == {one.pid: "suspended", two.pid: "gone", three.pid: "suspended"}
    result = machine.gpuckpt("resume", three.pid)  # by any of them
    assert result.states == {one.pid: "running", two.pid: "gone", three.pid: "running"}
    assert one.unharmed()
    assert three.unharmed()
    assert machine.records() == []

    assert machine.gpuckpt("suspend", one.pid, three.pid).code == 0
    machine.rewrite(boot_id="another-boot")
    warnings = machine.gpuckpt("ps").document["warnings"]
    assert len(warnings) == 1
    assert "started anew" in warnings[0]
    assert machine.gpuckpt("ps").document["warnings"] == []


def test_rays_memory_monitor(machine: Machine) -> None:
    """Case 36, OpenRLHF/OpenRLHF#1013, hiyouga/EasyR1#185: with GPU memory in host memory, Ray killed the worker."""
    target = machine.target("--gib", "8")
    machine.host_memory(100, 12)  # 88 % in use, 96 % with the image
    machine.lay(
        {
            f"proc/{target.pid}/stat": f"{target.pid} (python) S 777 0",
            "proc/777/stat": "777 (raylet) S 1 0",
            "proc/777/comm": "raylet\n",
            "proc/777/environ": "RAY_memory_usage_threshold=0.95\0",
        }
    )
    result = machine.gpuckpt("suspend", target.pid)
    assert (result.code, result.error["code"], result.error["step"]) == (6, "host-memory", "inspect")
    for words in ("96%", "95%", "RAY_memory_usage_threshold", "raylet, pid 777"):
        assert words in result.error["message"]
    assert "RAY_memory_monitor_refresh_ms=0" in result.error["hint"]
    assert target.state is State.RUNNING
    assert machine.gpuckpt("suspend", target.pid, "--accept-loss", "host-memory").code == 0


def test_a_retried_resume_is_one_resume(machine: Machine) -> None:
    """Case 39, sgl-project/sglang#14092: resume ran out of memory while somebody held it, and was called again by timeout."""
    target = machine.target("--gib", "50")
    assert machine.gpuckpt("suspend", target.pid).code == 0
    filler = machine.target("--gib", "60")
    resumes = [machine.begin("resume", target.pid, "--wait", "60s") for _ in range(3)]
    eventually(lambda: machine.holds_gpu(0) and all(waits_for(r, target) for r in resumes), "all three wait")
    impatient = machine.gpuckpt("resume", target.pid, "--timeout", "1s")
    assert (impatient.code, impatient.error["code"]) == (124, "concurrent-operation")
    assert "at work" in impatient.error["message"]
    resumes[0].signal(signal.SIGKILL)  # a caller that gave up
    resumes[0].end()
    assert target.state is State.CHECKPOINTED, "no restore before there is room"
    filler.kill()
    results = [r.end() for r in resumes[1:]]
    assert [(r.code, r.states) for r in results] == [(0, {target.pid: "running"})] * 2
    assert sorted(r.document["already"] for r in results) == [False, True]
    assert target.unharmed()


def test_who_holds_the_memory(machine: Machine) -> None:
    """Case 40, llm-d-incubation/llm-d-fast-model-actuation#720, #709: an orphan kept GPU memory, and every later start failed."""
    target = machine.target("--gib", "40")
    assert machine.gpuckpt("suspend", target.pid).code == 0
    orphan = machine.target("--gib", "60")
    result = machine.gpuckpt("resume", target.pid)
    assert (result.code, result.error["code"]) == (6, "gpu-memory")
    assert f"pid {orphan.pid} ({Path(sys.executable).name} -m gpuckpt.driver.simtarget" in result.error["message"]
    for words in ("60.0 GiB", "started", f"kill {orphan.pid}"):
        assert words in result.error["message"] + result.error["hint"]
    assert orphan.unharmed(), "it kills nothing by itself"


def test_one_rank_alone(machine: Machine) -> None:
    """Case 43, NVIDIA/cuda-checkpoint#47: one of two ranks was checkpointed alone and could not be restored."""
    parent = machine.target("--spawn", "1", "--trait", "communicator")
    for options in ((), ("--no-tree",)):
        result = machine.gpuckpt("suspend", parent.children[0], *options)
        assert (result.code, result.error["code"]) == (6, "possible-import")
        assert str(parent.pid) in result.error["message"]
    assert parent.unharmed()


def test_a_communicator_that_reaches_outside_of_the_group() -> None:
    """Case 42, huggingface/trl#6797, sgl-project/sglang#4096: a trainer is in a communicator of the server for its weights.

    Where nobody knows more, what is not in the group shows by its rank alone; with pid and host, and the way to take it along:
    ``test_agent_along.py``.
    """
    server = [Rank(w, "tp", w, 2) for w in (0, 1)] + [Rank(w, "weights", w, 3) for w in (0, 1)]
    (outside,) = ranks.hazards({"": server})
    assert (outside.kind, outside.acceptable, outside.pid) == ("nccl-communicator", False, 0)
    assert "communicator weights of pid 0 reaches outside of this group: rank 2 of 3 is not in it" in outside.message
    assert "the whole job" in outside.hint
    assert not ranks.hazards({"": [*server, Rank(2, "weights", 2, 3)]})


def test_an_open_rdma_device_is_named_before_the_checkpoint(machine: Machine) -> None:
    """Case 52, vllm-project/vllm PR#29569, fzyzcjy/torch_memory_saver PR#48: memory that a NIC has registered."""
    double = machine.path / "dev/infiniband/uverbs0"
    double.parent.mkdir(parents=True)
    double.touch()
    target = machine.target(f"5<{double}")  # the shell opens it for the program
    result = machine.gpuckpt("suspend", target.pid)
    assert (result.code, result.error["code"], result.error["pid"]) == (6, "rdma", target.pid)
    assert "an RDMA device open (/dev/infiniband/)" in result.error["message"]
    assert machine.gpuckpt("suspend", target.pid, "--accept-loss", "rdma").code == 0
