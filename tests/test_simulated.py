"""The simulated driver with real processes around a directory: it behaves as the real one was measured to."""

from __future__ import annotations

import concurrent.futures
import os
import random
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from gpuckpt.driver import simtarget
from gpuckpt.driver.api import Devices, Driver, DriverVersion
from gpuckpt.model import GIB, State
from tests.simulated_bench import Bench
from tests.test_simulated_rules import refusal

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def pool() -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    with concurrent.futures.ThreadPoolExecutor(8) as made:
        yield made


def hangs(call: concurrent.futures.Future[Any], seconds: float = 0.15) -> bool:
    return not concurrent.futures.wait([call], timeout=seconds).done


class TestCycle:
    def test_is_what_is_asked_of_a_driver(self, bench: Bench) -> None:
        driver: Driver = bench.driver
        devices: Devices = bench.devices
        assert driver.state(os.getpid()) is State.NONE
        assert devices.version() == DriverVersion((13, 0), "580.159.04")

    def test_keeps_the_sum_and_frees_the_gpu(self, bench: Bench) -> None:
        target = bench.target("--gib", "3")
        stepped = target.ask("step")["sum"]
        assert stepped != target.ready["sum"]
        assert bench.used() == [3 * GIB, 0]
        bench.suspend(target.pid)
        assert (bench.driver.state(target.pid), bench.used()) == (State.CHECKPOINTED, [0, 0])
        assert (bench.devices.processes(), bench.devices.image_bytes(target.pid)) == ({}, 3 * GIB)
        assert bench.files() == {"gpu": 0, "host": 1, "calls": 1}
        target.send("check")
        bench.resume(target.pid)
        assert target.read()["sum"] == stepped
        assert bench.devices.processes() == {target.pid: {bench.uuids[0]: 3 * GIB}}

    def test_steps_are_deterministic(self, bench: Bench) -> None:
        one, other = bench.target(), bench.target()
        contents = [p for p in bench.world.path.glob("gpu/*/*") if p.is_file()]
        contents[0].write_bytes(contents[1].read_bytes())
        assert one.ask("step") == other.ask("step")

    def test_a_call_waits_while_the_process_is_locked(self, bench: Bench, pool: concurrent.futures.ThreadPoolExecutor) -> None:
        target = bench.target()
        bench.driver.lock(target.pid, 1)
        answer = pool.submit(target.ask, "check")
        assert hangs(answer)
        bench.driver.unlock(target.pid)
        assert answer.result()["sum"] == target.ready["sum"]

    def test_swapped_gpus_keep_the_sum(self, bench: Bench) -> None:
        a, b = bench.uuids
        target = bench.target("--gpu", "0", "--gpu", "1")
        assert target.ask("alloc 2") == {"bytes": 4 * GIB}
        for gpu_map in ({a: b, b: a}, {}, {a: b, b: a}):
            bench.suspend(target.pid)
            bench.resume(target.pid, gpu_map)
            assert target.ask("check")["sum"] == target.ready["sum"]
        assert bench.used() == [3 * GIB, GIB]

    def test_too_little_room_destroys_the_content(self, bench: Bench) -> None:
        target = bench.target("--gib", "50")
        bench.suspend(target.pid)
        assert bench.target("--gib", "50").ask("alloc 31") == {"error": "OUT_OF_MEMORY"}
        assert refusal(bench.driver.restore, target.pid, {}, initialise=False) == "OUT_OF_MEMORY"
        assert (bench.driver.state(target.pid), bench.files()["host"]) == (State.CHECKPOINTED, 0)
        target.send("check")
        assert target.process.wait() == simtarget.EXIT_LOST
        assert target.process.stderr
        assert "lost" in target.process.stderr.read()

    def test_no_room_to_start(self, bench: Bench) -> None:
        process = subprocess.run(
            [sys.executable, "-m", "gpuckpt.driver.simtarget", "--gib", "81"],
            env={**os.environ, "GPUCKPT_SIMULATE": str(bench.world.path)},
            capture_output=True,
            check=False,
        )
        assert (process.returncode, b"OUT_OF_MEMORY" in process.stderr) == (1, True)

    def test_processes_side_by_side(self, bench: Bench, pool: concurrent.futures.ThreadPoolExecutor) -> None:
        targets = [bench.target("--gpu", str(i % 2)) for i in range(4)]
        for step in (bench.suspend, bench.resume, bench.suspend, bench.resume):
            list(pool.map(step, [t.pid for t in targets]))
        assert [t.ask("check")["sum"] for t in targets] == [t.ready["sum"] for t in targets]
        assert bench.used() == [2 * GIB, 2 * GIB]

    def test_an_exported_handle_and_managed_memory(self, bench: Bench) -> None:
        target = bench.target("--exported-gib", "0.5")
        bench.suspend(target.pid)
        assert (bench.used()[0], bench.devices.processes()) == (GIB // 2, {})
        bench.resume(target.pid)
        assert bench.used()[0] == 3 * GIB // 2
        managed = bench.target("--trait", "managed")
        bench.driver.lock(managed.pid, 1)
        assert refusal(bench.driver.checkpoint, managed.pid) == "NOT_SUPPORTED"
        bench.driver.unlock(managed.pid)
        assert managed.ask("check")["sum"] == managed.ready["sum"]


class TestBlocking:
    def test_busy(self, bench: Bench) -> None:
        target = bench.target()
        target.ask("busy 60")
        assert refusal(bench.driver.lock, target.pid, 0.05) == "NOT_READY"
        assert bench.driver.state(target.pid) is State.RUNNING
        target.ask("busy 0.2")
        bench.driver.lock(target.pid, 20)
        assert bench.driver.state(target.pid) is State.LOCKED
        assert refusal(bench.driver.lock, target.pid, 20) == "ILLEGAL_STATE"

    def test_busy_from_the_start(self, bench: Bench) -> None:
        assert refusal(bench.driver.lock, bench.target("--busy-s", "60").pid, 0.0) == "NOT_READY"

    def test_a_stopped_target_hangs_lock_and_state(self, bench: Bench, pool: concurrent.futures.ThreadPoolExecutor) -> None:
        target = bench.target()
        target.stop()
        lock = pool.submit(bench.driver.lock, target.pid, 0.01)
        state = pool.submit(bench.driver.state, target.pid)
        assert hangs(lock)
        assert hangs(state)
        os.kill(target.pid, signal.SIGCONT)
        lock.result()
        assert bench.driver.state(target.pid) is State.LOCKED

    def test_a_target_that_dies_while_stopped(self, bench: Bench, pool: concurrent.futures.ThreadPoolExecutor) -> None:
        target = bench.target()
        target.stop()
        call = pool.submit(bench.driver.lock, target.pid, 0.01)
        bench.until_begun(target.pid)
        target.process.kill()
        assert refusal(call.result) == "OPERATING_SYSTEM"

    def test_a_lock_that_a_stopped_target_never_received_dies_with_its_caller(self, bench: Bench) -> None:
        target = bench.target()
        target.stop()
        caller = bench.caller(f"driver.lock({target.pid}, 60)")
        caller.go()
        bench.until_begun(target.pid)
        caller.kill()
        os.kill(target.pid, signal.SIGCONT)
        assert bench.driver.state(target.pid) is State.RUNNING
        assert target.ask("check")["sum"] == target.ready["sum"]

    @pytest.mark.parametrize("call", ["checkpoint", "restore"])
    def test_a_killed_caller_does_not_end_the_call(self, bench: Bench, call: str) -> None:
        target = bench.target()
        bench.driver.lock(target.pid, 1)
        if call == "restore":
            bench.driver.checkpoint(target.pid)
        bench.slow(0.3)
        caller = bench.caller(
            f"driver.checkpoint({target.pid})" if call == "checkpoint" else f"driver.restore({target.pid}, {{}}, initialise=False)"
        )
        caller.go()
        bench.until_begun(target.pid)
        caller.kill()
        assert bench.world.peek().under_way(target.pid)
        assert bench.driver.state(target.pid) is (State.CHECKPOINTED if call == "checkpoint" else State.LOCKED)
        assert not bench.world.peek().operations
        if call == "checkpoint":
            bench.driver.restore(target.pid, {}, initialise=False)
        bench.driver.unlock(target.pid)
        assert target.ask("check")["sum"] == target.ready["sum"]

    def test_a_killed_callers_lock_is_ended_by_the_target_itself(self, bench: Bench) -> None:
        target = bench.target()
        caller = bench.caller(f"driver.lock({target.pid}, 60)")
        target.ask("busy 0.5")
        caller.go()
        bench.until_begun(target.pid)
        caller.kill()
        target.send("check")
        while bench.world.peek().rules.state(target.pid) is not State.LOCKED:  # nobody else looks: a peek changes nothing
            time.sleep(0.005)
        bench.driver.unlock(target.pid)
        assert target.read()["sum"] == target.ready["sum"]

    @pytest.mark.parametrize(("timeout_s", "state"), [(0.05, State.RUNNING), (60, State.LOCKED)])
    def test_the_end_of_a_lock_does_not_depend_on_who_looks(self, bench: Bench, timeout_s: float, state: State) -> None:
        target = bench.target()
        caller = bench.caller(f"driver.lock({target.pid}, {timeout_s})")
        target.ask("busy 0.5")
        caller.go()
        bench.until_begun(target.pid)
        caller.kill()
        assert bench.driver.state(target.pid) is state

    def test_state_waits_for_a_call_under_way(self, bench: Bench, pool: concurrent.futures.ThreadPoolExecutor) -> None:
        target = bench.target()
        bench.driver.lock(target.pid, 1)
        bench.slow(0.3)
        call = pool.submit(bench.driver.checkpoint, target.pid)
        bench.until_begun(target.pid)
        assert bench.driver.state(target.pid) is State.CHECKPOINTED
        call.result()

    def test_a_stop_in_mid_checkpoint_only_delays_it(self, bench: Bench, pool: concurrent.futures.ThreadPoolExecutor) -> None:
        target = bench.target()
        bench.driver.lock(target.pid, 1)
        bench.slow(0.5)
        call = pool.submit(bench.driver.checkpoint, target.pid)
        bench.until_begun(target.pid)
        target.stop()
        assert hangs(call, 0.6)
        os.kill(target.pid, signal.SIGCONT)
        call.result()

    def test_a_target_killed_in_mid_checkpoint(self, bench: Bench, pool: concurrent.futures.ThreadPoolExecutor) -> None:
        target = bench.target()
        bench.driver.lock(target.pid, 1)
        bench.slow(60)
        call = pool.submit(bench.driver.checkpoint, target.pid)
        bench.until_begun(target.pid)
        target.process.kill()
        assert refusal(call.result) == "OPERATING_SYSTEM"

    def test_callers_killed_anywhere_leave_a_state_that_can_be_gone_on_from(self, bench: Bench) -> None:
        target = bench.target()
        chance = random.Random(5)
        cycle = f"""
while True:
    driver.lock({target.pid}, 9)
    driver.checkpoint({target.pid})
    driver.restore({target.pid}, {{}}, initialise=False)
    driver.unlock({target.pid})
"""
        for _ in range(10):
            caller = bench.caller(cycle)
            caller.go()
            bench.until_begun(target.pid)
            time.sleep(chance.random() * 0.04)
            caller.kill()
            state = bench.driver.state(target.pid)
            if state is State.CHECKPOINTED:
                bench.driver.restore(target.pid, {}, initialise=False)
            if state is not State.RUNNING:
                bench.driver.unlock(target.pid)
            assert target.ask("check")["sum"] == target.ready["sum"]
