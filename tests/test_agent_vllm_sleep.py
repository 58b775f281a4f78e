"""vLLM servers with sleep mode: weights and KV cache leave by vLLM's own allocator, from inside, before the driver's checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from gpuckpt.model import GIB, State
from tests.simulated_machine import eventually
from tests.test_agent_vllm import serve
from tests.test_offload import steps

if TYPE_CHECKING:
    from tests.simulated_machine import Machine, Result
    from tests.test_agent_vllm import Server

ALONE = ("-tp", "1", "--enable-sleep-mode")
WEIGHTS, CACHE, REST = 4 * GIB, 8 * GIB, 2 * GIB


def cycle(server: Server, *options: str) -> tuple[Result, Result]:
    down = server.suspend(*options)
    assert down.code == 0, down
    up = server.resume()
    assert up.code == 0, up
    return down, up


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_and_cache_leave_before_the_driver(machine2: Machine, ranks: int) -> None:
    """Case 47: the prefix cache is reset with the KV cache that was dropped, and the same prompt gets the same tokens."""
    server = serve(machine2, "-tp", str(ranks), "--enable-sleep-mode", method="spawn")
    reference = server.ask("first")
    assert server.ask("from-the-prefix-cache") == reference
    for i in range(2):
        down = server.suspend()
        assert down.code == 0, down
        assert steps(down) == ["quiesce", "offload", "comms", "disarm", "lock", "checkpoint"]
        assert [machine2.used(0), machine2.used(1)] == [0, 0]
        for p in down.document["processes"]:
            assert p["moved"] == {"kept_bytes": WEIGHTS, "dropped_bytes": CACHE}
            assert p["host_bytes"] == WEIGHTS + REST
            assert p["gpus"][0]["bytes_before"] == WEIGHTS + CACHE + REST
        method = down.document["method"]
        assert (method["asked"], method["taken"]) == ("auto", "pool, driver")
        assert f"12.0 GiB of pid {server.workers[0]} by vLLM's sleep mode, 8.0 GiB of it dropped" in method["why"]
        waiting = server.send(f"meanwhile-{i}")
        up = server.resume()
        assert up.code == 0, up
        assert steps(up) == ["restore", "unlock", "arm", "comms-resume", "onload", "unquiesce"]
        assert server.tokens(waiting) == reference
        assert server.ask(f"after-{i}") == reference
    assert machine2.used(0) == WEIGHTS + CACHE + REST


@pytest.mark.parametrize("pooled", ["", "1"])
def test_a_newer_vllm_has_more_under_tags(machine: Machine, pooled: str) -> None:
    """Tags that vLLM 0.32 knows are kept, one inside another too; and there is nobody to tell that the cache is back."""
    server = serve(machine, *ALONE, GPUCKPT_POOL=pooled, FAKE_POOL=pooled, FAKE_VLLM="newer")
    reference = server.ask("first")
    kept = WEIGHTS + GIB + (2 * GIB if pooled else 0)  # and graphs and workspaces, where torch's memory is simulated
    for i in range(2):
        down, _ = cycle(server)
        assert down.document["processes"][0]["moved"] == {"kept_bytes": kept, "dropped_bytes": CACHE}
        assert server.ask(f"after-{i}") == reference
    assert not (machine.world.path / "woken").exists()


def test_requests_in_flight_are_computed_anew_and_none_is_lost(machine: Machine) -> None:
    server = serve(machine, *ALONE)
    reference = server.ask("alone", 150)
    names = [server.send(f"r{i}", 150) for i in range(5)]
    server.until_begun(names[-1])
    cycle(server)
    assert all(server.tokens(name) == reference for name in names)


def test_the_driver_takes_all_where_it_is_asked_to(machine: Machine) -> None:
    """And the prefix cache is not dropped for it."""
    server = serve(machine, *ALONE)
    reference = server.ask("first")
    down, up = cycle(server, "--method", "driver")
    assert "offload" not in steps(down)
    assert "onload" not in steps(up)
    assert down.document["processes"][0]["moved"] is None
    assert down.document["processes"][0]["host_bytes"] == WEIGHTS + CACHE + REST
    assert down.document["method"] == {"asked": "driver", "taken": "driver", "why": "it was asked for"}
    assert not (machine.world.path / "woken").exists()
    assert server.ask("after") == reference


def test_without_sleep_mode_it_is_as_ever(machine: Machine) -> None:
    server = serve(machine, "-tp", "1")
    down, up = cycle(server)
    assert "offload" not in steps(down) + steps(up)
    assert down.document["method"]["taken"] == "driver"


def test_a_server_that_sleeps_by_its_own_call_is_left_asleep(machine: Machine) -> None:
    server = serve(machine, *ALONE)
    reference = server.ask("first")
    server.ask_of_the_engine("sleep")
    down, up = cycle(server)
    assert "offload" not in steps(down) + steps(up)
    assert machine.used() == REST
    server.ask_of_the_engine("wake_up")
    assert machine.used() == WEIGHTS + CACHE + REST
    assert server.ask("after") == reference


@pytest.mark.parametrize("pooled", ["", "1"])
def test_weights_awake_and_the_cache_asleep(machine: Machine, pooled: str) -> None:
    """Case 48: a request between the two wakes is held by its engine, through a suspend and a resume in between, too."""
    server = serve(machine, *ALONE, GPUCKPT_POOL=pooled, FAKE_POOL=pooled)
    graphs = 2 * GIB if pooled else 0
    reference = server.ask("first")
    server.ask_of_the_engine("sleep")
    server.ask_of_the_engine("wake_up=weights")
    waiting = server.send("between-the-two")
    down, up = cycle(server)
    assert "offload" not in steps(down) + steps(up)
    assert machine.used() == WEIGHTS + graphs + REST, "the weights are awake and the cache is asleep, as before"
    server.ask_of_the_engine("wake_up=weights")  # naming what is awake is no error
    assert not server.begun & {waiting}
    server.ask_of_the_engine("wake_up=kv_cache")
    assert server.tokens(waiting) == reference


def test_a_cache_that_cannot_be_forgotten_is_not_dropped(machine: Machine) -> None:
    server = serve(machine, *ALONE, FAKE_CACHE="stuck")
    reference = server.ask("first")
    result = server.suspend()
    assert (result.code, result.error["code"]) == (1, "offload-failed"), result
    assert "cannot forget what is in the KV cache" in result.error["message"]
    assert result.error["hint"].endswith("--method driver")
    assert machine.used() == WEIGHTS + CACHE + REST
    assert server.ask("after") == reference
    cycle(server, "--method", "driver")
    assert server.ask("at-last") == reference


def test_a_quantised_cache_is_kept(machine: Machine) -> None:
    server = serve(machine, *ALONE, "--kv-cache-dtype", "fp8_e4m3")
    reference = server.ask("first")
    down, _ = cycle(server)
    assert down.document["processes"][0]["moved"] == {"kept_bytes": WEIGHTS + CACHE, "dropped_bytes": 0}
    assert not (machine.world.path / "woken").exists()
    assert server.ask("after") == reference


def test_no_host_memory_half_way(machine: Machine) -> None:
    """The weights had left when there was none for the cache: they come back."""
    server = serve(machine, *ALONE, "--kv-cache-dtype", "fp8")
    reference = server.ask("first")
    (machine.world.path / "pinned").write_text(str(WEIGHTS))
    result = server.suspend()
    assert (result.code, result.error["code"]) == (1, "offload-failed"), result
    assert "out of memory (cudaHostAlloc)" in result.error["message"]
    assert machine.used() == WEIGHTS + CACHE + REST
    assert server.states() == {State.RUNNING}
    assert server.ask("after") == reference
    (machine.world.path / "pinned").unlink()
    cycle(server)
    assert server.ask("at-last") == reference


def test_no_room_for_the_weights_at_resume(machine: Machine) -> None:
    """Somebody took the room after it was looked at. The server stands still, is named, and comes back when there is room."""
    server = serve(machine, *ALONE)
    reference = server.ask("first")
    assert server.suspend().code == 0
    machine.world.add_fault("unlock", delay_s=1.0)
    command = machine.begin("resume", server.pid)
    eventually(lambda: not machine.faults_left(), "it is restored")
    filler = machine.target("--gib", "77")
    result = command.end()
    assert (result.code, result.error["code"]) == (3, "not-as-found"), result
    assert "out of memory" in result.error["message"]
    assert result.states == {server.workers[0]: "offloaded"}
    (row,) = machine.gpuckpt("status", server.pid).document["processes"]
    assert (row["state"], row["note"]) == ("offloaded", "left in the middle (resuming): gpuckpt recover")
    refused = server.resume()
    assert (refused.code, refused.error["code"]) == (6, "gpu-memory"), refused
    filler.kill()
    assert server.resume().code == 0
    assert server.ask("after") == reference
    assert machine.used() == WEIGHTS + CACHE + REST


@pytest.mark.parametrize("call", ["comms", "checkpoint", "comms-resume"])
def test_a_controller_killed_at_any_step(machine2: Machine, call: str) -> None:
    server = serve(machine2, "-tp", "2", "--enable-sleep-mode")
    reference = server.ask("first")
    going_up = call == "comms-resume"
    if going_up:
        assert server.suspend().code == 0
    machine2.world.add_fault(call, pid=server.workers[1], delay_s=0.4)
    command = machine2.begin("resume" if going_up else "suspend", server.pid)
    eventually(lambda: not machine2.faults_left(), f"{call} begins")
    command.process.kill()
    command.end()
    machine2.kill_callers()
    eventually(lambda: machine2.gpuckpt("recover").code == 0, "recovered")
    if State.CHECKPOINTED in server.states():
        assert server.resume().code == 0
    assert server.ask("after") == reference
    assert [machine2.used(0), machine2.used(1)] == [WEIGHTS + CACHE + REST] * 2


def test_only_what_is_kept_needs_host_memory(machine: Machine) -> None:
    server = serve(machine, *ALONE)
    machine.host_memory(64, 8)
    refused = server.suspend("--method", "driver")
    assert (refused.code, refused.error["code"]) == (6, "host-memory")
    cycle(server)
    machine.host_memory(64, 3)  # the pinned copies of the first time are there, and are used again
    cycle(server)
    machine.host_memory(64, 2)
    assert server.suspend().error["code"] == "host-memory"


def test_a_pool_alone_leaves_the_rest(machine: Machine) -> None:
    server = serve(machine, *ALONE)
    reference = server.ask("first")
    down = server.suspend("--method", "pool")
    assert down.code == 0, down
    assert steps(down) == ["quiesce", "offload", "comms", "disarm"]
    (p,) = down.document["processes"]
    assert (p["state"], p["retained_bytes"], p["host_bytes"]) == ("suspended (pool)", REST, WEIGHTS)
    assert machine.used() == REST
    waiting = server.send("meanwhile")
    assert server.resume().code == 0
    assert server.tokens(waiting) == reference


@pytest.mark.parametrize("problem", ["", "torch sees no GPU"])
def test_a_pool_of_ours_in_place_of_vllms_allocator(machine: Machine, problem: str) -> None:
    """By pid and by the server's own endpoints, its graphs and workspaces with it; where the pool cannot be had vLLM has its own."""
    server = serve(machine, *ALONE, GPUCKPT_POOL="1", FAKE_POOL="1", FAKE_POOL_PROBLEM=problem)
    kept = WEIGHTS + (0 if problem else 2 * GIB)  # a GiB of graphs, and one of workspace
    reference = server.ask("first")
    down, _ = cycle(server)
    assert ("gpuckpt.pool" in down.document["method"]["why"]) is (problem == "")
    assert down.document["processes"][0]["moved"] == {"kept_bytes": kept, "dropped_bytes": CACHE}
    assert server.ask("after") == reference
    server.ask_of_the_engine("sleep")
    assert machine.used() == REST
    assert "offload" not in steps(cycle(server)[0])
    server.ask_of_the_engine("wake_up")
    assert server.ask("at-last") == reference
    assert machine.used() == kept + CACHE + REST


def test_graphs_that_cannot_be_had_stay_with_torch(machine: Machine) -> None:
    server = serve(machine, *ALONE, GPUCKPT_POOL="1", FAKE_POOL="1", FAKE_POOL_GRAPHS="no")
    reference = server.ask("first")
    down, _ = cycle(server)
    assert down.document["processes"][0]["moved"] == {"kept_bytes": WEIGHTS + GIB, "dropped_bytes": CACHE}
    assert server.ask("after") == reference
