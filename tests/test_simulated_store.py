"""What simulated GPUs keep in their directory, the faults that a test asks them for, and the programs that run on them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from gpuckpt.driver.simulated import SimulatedDevices, SimulatedDriver, SimulatedWorldDir, StateLostError
from gpuckpt.driver.simulated_comms import SimulatedCommunicator
from gpuckpt.errors import NoDriver
from gpuckpt.model import GIB, State
from tests.simulated_bench import Bench
from tests.test_simulated_rules import refusal

if TYPE_CHECKING:
    pass


class TestStore:
    def test_a_machine_is_made_once(self, bench: Bench) -> None:
        with pytest.raises(FileExistsError):
            SimulatedWorldDir.create(bench.world.path)

    @pytest.mark.parametrize("suspended", [False, True])
    @pytest.mark.parametrize("reaped", [False, True])
    def test_the_dead_hold_nothing(self, bench: Bench, suspended: bool, reaped: bool) -> None:
        target = bench.target()
        if suspended:
            bench.suspend(target.pid)
        target.process.kill()
        if reaped:
            target.process.wait()
        else:
            os.waitid(os.P_PID, target.pid, os.WEXITED | os.WNOWAIT)
        assert bench.driver.state(target.pid) is State.GONE
        assert (bench.used(), bench.devices.loaded([target.pid])) == ([0, 0], set())
        assert bench.files() == {"gpu": 0, "host": 0, "calls": 0}
        assert refusal(bench.driver.restore, target.pid, {}, initialise=False) == "OPERATING_SYSTEM"

    def test_another_process_under_the_same_number(self, bench: Bench) -> None:
        target = bench.target()
        with bench.world.transaction() as world:
            world.rules.processes[target.pid].start_ticks -= 1
        assert bench.driver.state(target.pid) is State.NONE

    def test_quitting_gives_everything_back(self, bench: Bench) -> None:
        target = bench.target()
        target.send("quit")
        assert target.process.wait() == 0
        assert not bench.world.peek().rules.processes

    def test_a_move_cut_short_is_made_up_for(self, bench: Bench) -> None:
        target = bench.target()
        bench.suspend(target.pid)
        (image,) = [p for p in bench.world.path.glob("host/*/*") if p.is_file()]
        (place,) = bench.world.path.glob("gpu/*")
        image.rename(place / image.parent.name)
        bench.resume(target.pid)
        assert target.ask("check")["sum"] == target.ready["sum"]

    def test_registering_a_dead_process(self, bench: Bench) -> None:
        with pytest.raises(ProcessLookupError):
            bench.world.register(4_194_000, {})

    def test_a_call_of_a_process_that_was_forgotten(self, bench: Bench) -> None:
        bench.world.register(os.getpid(), {bench.uuids[0]: 5})
        with bench.world.cuda_call(os.getpid()) as contents:
            assert len(contents) == 1
        bench.world.unregister(os.getpid())
        with pytest.raises(StateLostError), bench.world.cuda_call(os.getpid()):
            pass

    def test_a_fork_in_mid_transaction_holds_nothing_up(self, bench: Bench) -> None:
        with bench.world.transaction():
            child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False)
        assert bench.used() == [0, 0]
        child.communicate(b"\n")

    def test_a_rank_that_is_stopped_in_its_communicator_s_call_holds_nothing_up(self, bench: Bench) -> None:
        """It never has the world's lock there: so it gets on while somebody else has it, and sees nothing of it."""
        bench.world.register(os.getpid(), {bench.uuids[0]: 5})
        rank = SimulatedCommunicator(bench.world, os.getpid(), "own", 0, 1)
        with bench.world.transaction() as world:
            assert "communicator" in world.rules.processes[os.getpid()].traits
            rank.suspend()
        with bench.world.transaction() as world:
            assert "communicator" not in world.rules.processes[os.getpid()].traits
        rank.resume()
        with bench.world.transaction() as world:
            assert "communicator" in world.rules.processes[os.getpid()].traits


class TestFaults:
    def test_a_result_before_and_after_acting(self, bench: Bench) -> None:
        target = bench.target()
        bench.world.add_fault("lock", result="UNKNOWN")
        bench.world.add_fault("checkpoint", result="UNKNOWN", pid=target.pid, before=False)
        assert refusal(bench.driver.lock, target.pid, 1) == "UNKNOWN"
        assert bench.driver.state(target.pid) is State.RUNNING
        bench.driver.lock(target.pid, 1)
        assert refusal(bench.driver.checkpoint, target.pid) == "UNKNOWN"
        assert bench.driver.state(target.pid) is State.CHECKPOINTED

    def test_counts_and_pids(self, bench: Bench) -> None:
        one, other = bench.target(), bench.target()
        bench.world.add_fault("lock", result="UNKNOWN", pid=one.pid, times=2)
        bench.driver.lock(other.pid, 1)
        assert [refusal(bench.driver.lock, one.pid, 1) for _ in range(2)] == ["UNKNOWN", "UNKNOWN"]
        bench.driver.lock(one.pid, 1)
        assert json.loads((bench.world.path / "faults.json").read_text()) == []

    def test_a_hang_acts_not_at_all(self, bench: Bench) -> None:
        target = bench.target()
        bench.world.add_fault("lock", hang=True)
        caller = bench.caller(f"driver.lock({target.pid}, 1)")
        caller.go()
        while json.loads((bench.world.path / "faults.json").read_text()):
            time.sleep(0.005)
        with pytest.raises(subprocess.TimeoutExpired):
            caller.process.wait(0.1)
        assert bench.driver.state(target.pid) is State.RUNNING

    def test_a_delay(self, bench: Bench) -> None:
        target = bench.target()
        bench.world.add_fault("lock", delay_s=0.1)
        begun = time.monotonic()
        bench.driver.lock(target.pid, 1)
        assert time.monotonic() - begun >= 0.1

    def test_a_process_that_we_may_not_ask(self, bench: Bench) -> None:
        target = bench.target()
        bench.world.add_fault("state", result="OPERATING_SYSTEM", times=2)
        assert bench.driver.state(target.pid) is State.DENIED
        target.process.kill()
        target.process.wait()
        assert bench.driver.state(target.pid) is State.GONE


class TestDevices:
    @pytest.mark.parametrize(
        ("facts", "total", "free"),
        [({}, 80 * GIB, 79 * GIB), ({"lost": True}, None, None), ({"memory_query": "fails"}, None, None), ({"memory_query": "zero"}, 0, 0)],
    )
    def test_memory(self, bench: Bench, facts: dict[str, Any], total: int | None, free: int | None) -> None:
        bench.target()
        bench.set(**facts)
        gpu = bench.devices.gpus()[0]
        assert (gpu.total_bytes, gpu.free_bytes, gpu.lost) == (total, free, "lost" in facts)
        assert (gpu.index, gpu.minor) == (0, 0)

    def test_who_has_the_driver_loaded(self, bench: Bench) -> None:
        target, contextless = bench.target(), bench.target("--trait", "contextless")
        assert bench.devices.loaded([os.getpid(), target.pid, contextless.pid]) == {target.pid, contextless.pid}
        assert set(bench.devices.processes()) == {target.pid}
        assert bench.driver.state(contextless.pid) is State.RUNNING

    def test_a_lock_file_for_each_gpu(self, bench: Bench) -> None:
        paths = {bench.devices.gpu_lock_path(g) for g in bench.devices.gpus()}
        assert len(paths) == 2
        assert all(Path(p).is_file() for p in paths)

    def test_a_machine_without_a_driver(self, tmp_path: Path) -> None:
        SimulatedWorldDir.create(tmp_path, driver=None)
        devices = SimulatedDevices(tmp_path)
        for ask in (devices.gpus, devices.processes, devices.version, lambda: SimulatedDriver(tmp_path).state(1)):
            with pytest.raises(NoDriver) as caught:
                ask()
            assert caught.value.message
            assert caught.value.hint


class TestTargets:
    def test_a_tree(self, bench: Bench) -> None:
        target = bench.target("--spawn", "1", "--fork", "2", "--gpu", "1", "--gib", "2")
        (spawned,), forked = target.ready["children"], target.ready["forked"]
        assert bench.devices.loaded([target.pid, spawned, *forked]) == {target.pid, spawned}
        assert bench.used() == [0, 4 * GIB]
        assert [bench.driver.state(pid) for pid in forked] == [State.NONE, State.NONE]
        (answer,) = target.ask("children check")["children"]
        assert answer["pid"] == spawned
        os.kill(spawned, signal.SIGKILL)
        (answer,) = target.ask("children check")["children"]
        assert answer["error"] == "exited with -9"
        target.process.kill()
        while any(bench.driver.state(pid) is not State.GONE for pid in forked):
            time.sleep(0.005)

    def test_a_communicator_shows_its_socket(self, bench: Bench) -> None:
        target = bench.target("--nccl-socket", "--trait", "communicator")
        inodes = {line.split()[6] for line in Path("/proc/net/unix").read_text().splitlines() if "@tmp/nccl-socket-0-" in line}
        links = {str(f.readlink()) for f in Path(f"/proc/{target.pid}/fd").iterdir()}
        assert links & {f"socket:[{i}]" for i in inodes}

    def test_a_daemon_outlives_its_input(self, bench: Bench) -> None:
        target, daemon = bench.target(), bench.target("--daemon")
        for each in (target, daemon):
            assert each.process.stdin
            each.process.stdin.close()
        assert target.process.wait() == 0
        bench.suspend(daemon.pid)
        bench.resume(daemon.pid)
        assert daemon.process.poll() is None

    def test_an_unknown_command(self, bench: Bench) -> None:
        assert "unknown" in bench.target().ask("dance")["error"]
