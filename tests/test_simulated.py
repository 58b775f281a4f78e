"""The simulated driver with real processes around a directory: it behaves as the real one was measured to."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from gpuckpt.driver import simtarget
from gpuckpt.driver.api import Devices, Driver, DriverVersion
from gpuckpt.driver.simulated import SimulatedDevices, SimulatedDriver, SimulatedWorldDir, StateLostError
from gpuckpt.errors import NoDriver
from gpuckpt.model import GIB, State
from tests.test_simulated_rules import refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Target:
    """A running simtarget."""

    def __init__(self, world: SimulatedWorldDir, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gpuckpt.driver.simtarget", *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, "GPUCKPT_SIMULATE": str(world.path)},
        )
        self.pid = self.process.pid
        self.ready = self.read()

    def send(self, command: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(command + "\n")

    def read(self) -> dict[str, Any]:
        assert self.process.stdout
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def ask(self, command: str) -> dict[str, Any]:
        self.send(command)
        return self.read()

    def stop(self) -> None:
        """SIGSTOP, and wait for it: a signal takes effect when its target is next scheduled."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def end(self) -> None:
        self.process.kill()
        for stream in (self.process.stdout, self.process.stderr, self.process.stdin):
            assert stream
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        self.process.wait()


class Caller:
    """Another process that waits for ``go()`` and then runs *code* with a ``driver``."""

    def __init__(self, world: SimulatedWorldDir, code: str) -> None:
        begin = f"from gpuckpt.driver.simulated import SimulatedDriver\ndriver = SimulatedDriver({str(world.path)!r})\nprint()\ninput()\n"
        self.process = subprocess.Popen(
            [sys.executable, "-c", begin + code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
        )
        assert self.process.stdout
        self.process.stdout.readline()
        self.process.stdout.close()

    def go(self) -> None:
        assert self.process.stdin
        self.process.stdin.write(b"\n")
        self.process.stdin.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin
        self.process.stdin.close()


class Bench:
    """A simulated machine of two GPUs, and what a test starts on it."""

    def __init__(self, path: Path) -> None:
        self.world = SimulatedWorldDir.create(path, gpus=2)
        self.driver = SimulatedDriver(path)
        self.devices = SimulatedDevices(path)
        self.uuids = [g.uuid for g in self.devices.gpus()]
        self.ends: list[Callable[[], object]] = []

    def target(self, *options: str) -> Target:
        made = Target(self.world, *options)
        self.ends.append(made.end)
        return made

    def caller(self, code: str) -> Caller:
        made = Caller(self.world, code)
        self.ends.append(made.kill)
        return made

    def until_begun(self, pid: int) -> None:
        while not self.world.peek().under_way(pid):
            time.sleep(0.002)

    def suspend(self, pid: int) -> None:
        self.driver.lock(pid, 10)
        self.driver.checkpoint(pid)

    def resume(self, pid: int, gpu_map: dict[str, str] | None = None) -> None:
        self.driver.restore(pid, gpu_map or {}, initialise=False)
        self.driver.unlock(pid)

    def used(self) -> list[int]:
        return [(g.total_bytes or 0) - (g.free_bytes or 0) for g in self.devices.gpus()]

    def set(self, **facts: Any) -> None:
        with self.world.transaction() as world:
            for gpu in world.rules.gpus.values():
                for name, value in facts.items():
                    setattr(gpu, name, value)

    def slow(self, seconds_per_gib: float) -> None:
        with self.world.transaction() as world:
            world.seconds_per_gib = seconds_per_gib

    def files(self) -> dict[str, int]:
        return {part: sum(p.is_file() for p in (self.world.path / part).rglob("*")) for part in ("gpu", "host", "calls")}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path / "sim")
    yield made
    for end in made.ends:
        end()


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
