"""The directory that simulated GPUs live in: who holds what, the content of their memory, and the driver calls under way.

``machine.json`` holds the :class:`Rules` and the calls under way; whoever reads it under ``lock`` first carries on what is due, as
the thread inside a target does on real hardware. So a call ends as it would whether or not its caller lives.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from gpuckpt.driver.api import CallError, DriverVersion
from gpuckpt.driver.simulated_proc import active, alive, killed, look, now_s, stopped
from gpuckpt.driver.simulated_rules import DEFAULT_DRIVER, Rules, SimulatedGpu, SimulatedProcess
from gpuckpt.driver.simulated_world import SUCCESS, Fault, Operation, StateLostError, World
from gpuckpt.errors import Usage
from gpuckpt.model import GIB, Call, State

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

POLL_S = 0.005
CONTENT_BYTES = 4096


class SimulatedWorldDir:
    """The directory. Everything that changes it happens in a :meth:`transaction`; a reader without one sees the last that ended."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        gpus: int = 1,
        gib: float = 80,
        *,
        name: str = "Simulated GPU",
        driver: DriverVersion | None = DEFAULT_DRIVER,
        seconds_per_gib: float = 0.0,
    ) -> SimulatedWorldDir:
        """A new machine of equal, empty GPUs. Raises ``FileExistsError`` where there is one already."""
        made = cls(path)
        made.path.mkdir(parents=True, exist_ok=True)
        if made._machine.exists():
            raise FileExistsError(made._machine)
        for part in ("gpu", "host", "calls"):
            (made.path / part).mkdir(exist_ok=True)
        uuids = [f"GPU-51{index:06x}-0000-4000-8000-000000000000" for index in range(gpus)]
        rules = Rules.of([SimulatedGpu(uuid, index, name, round(gib * GIB)) for index, uuid in enumerate(uuids)])
        rules.driver = driver
        made._save(World(rules, seconds_per_gib).to_text())
        return made

    @contextlib.contextmanager
    def transaction(self) -> Iterator[World]:
        """The world, alone: the dead forgotten, what is due carried on. Saved at the end, unless the block raises."""
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(_flocked(self.path / "lock"))
                before = self._machine.read_text()
            except FileNotFoundError:
                raise Usage(f"GPUCKPT_SIMULATE={self.path}: no simulated machine is there", hint="unset GPUCKPT_SIMULATE") from None
            world = World.from_text(before)
            self._settle(world)  # a caller may have been killed between saving and moving
            self._forget_dead(world)
            self._see_communicators(world)
            self._carry_on(world, held)
            yield world
            self._carry_on(world, held)
            after = world.to_text()
            if after != before:
                self._save(after)
                self._settle(world)

    def peek(self) -> World:
        """The world as the last transaction left it, without waiting."""
        return World.from_text(self._machine.read_text())

    def register(self, pid: int, bytes_by_uuid: Mapping[str, int], traits: Iterable[str] = (), exported_bytes: int = 0) -> SimulatedProcess:
        """Give the live process *pid* CUDA state and random content in its GPU memory. Raises :class:`CallError` without room."""
        seen = look(pid)
        if seen is None:
            raise ProcessLookupError(pid)
        with self.transaction() as world:
            process = world.rules.register(pid, seen[1], bytes_by_uuid, traits, exported_bytes)
            for uuid in process.held_bytes:
                path = self._on_gpu(process, uuid)
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(os.urandom(CONTENT_BYTES))
        return process

    def unregister(self, pid: int) -> None:
        """As if *pid* had ended."""
        with self.transaction() as world:
            if pid in world.rules.processes:
                self._forget(world, pid)

    def mark_communicator(self, pid: int, *, suspended: bool) -> None:
        """That the live process *pid* has communicators, and whether they are suspended. It counts from the next transaction on.

        The process itself says so, and without the world's lock: it may be stopped at any instruction, and must not stop the world with it.
        """
        seen = look(pid)
        if seen is None:
            raise ProcessLookupError(pid)
        mark = self._communicators(pid, seen[1])
        mark.mkdir(parents=True, exist_ok=True)
        if suspended:
            (mark / "suspended").touch()
        else:
            (mark / "suspended").unlink(missing_ok=True)

    def add_fault(
        self,
        call: str,
        *,
        pid: int | None = None,
        result: str | None = None,
        hang: bool = False,
        delay_s: float = 0.0,
        times: int = 1,
        before: bool = True,
    ) -> None:
        with self._faults() as faults:
            faults.append(Fault(call, pid, result, hang, delay_s, times, before))

    def take_fault(self, call: str, pid: int) -> Fault | None:
        """The first fault that matches, used up once. The world's lock is taken only where there is one: see :meth:`mark_communicator`."""
        if any(fault.meant(call, pid) for fault in self._read_faults()):
            with self._faults() as faults:
                for fault in faults:
                    if fault.meant(call, pid):
                        fault.times -= 1
                        return fault
        return None

    def _communicators(self, pid: int, start_ticks: int) -> Path:
        return self.path / "communicators" / f"{pid}-{start_ticks:x}"

    def _see_communicators(self, world: World) -> None:
        for process in world.rules.processes.values():
            mark = self._communicators(process.pid, process.start_ticks)
            if mark.exists():
                change = process.traits.discard if (mark / "suspended").exists() else process.traits.add
                change("communicator")

    @contextlib.contextmanager
    def cuda_call(self, pid: int) -> Iterator[list[Path]]:
        """A CUDA call made by *pid* itself: waits until it is running; meanwhile it is not locked. Yields its content in device order.

        Raises :class:`StateLostError`. Leaves the world's lock alone while anybody else makes progress: *pid* may be stopped at any
        instruction, and must not stop the world with it.
        """
        while True:
            with self._in_call(pid):
                world = self.peek()
                process = world.rules.processes.get(pid)
                if process is None or process.lost:
                    raise StateLostError(f"the GPU state of process {pid} is lost")
                under_way = world.under_way(pid)
                if process.state is State.RUNNING and not any(o.received for o in under_way):
                    yield [self._on_gpu(process, uuid) for uuid in process.held_bytes]
                    return
            # With nobody left to wait for it, the target's own driver thread ends the call.
            if any(not active(o.owner_pid, o.owner_ticks) and o.due_s <= now_s() for o in under_way):
                with self.transaction():
                    pass
            time.sleep(POLL_S)

    def make_busy(self, pid: int, seconds: float) -> None:
        """*pid* queues kernels that take *seconds*: it cannot be locked before they are done."""
        with self.cuda_call(pid):
            self._call_path(pid).write_text(f"{now_s() + seconds:.6f}")

    @property
    def _machine(self) -> Path:
        return self.path / "machine.json"

    def _save(self, text: str) -> None:
        _replace(self._machine, text)

    @contextlib.contextmanager
    def _faults(self) -> Iterator[list[Fault]]:
        with _flocked(self.path / "lock"):
            before = self._read_faults()
            after = [dataclasses.replace(f) for f in before]
            yield after
            if after != before:
                _replace(self.path / "faults.json", json.dumps([dataclasses.asdict(f) for f in after if f.times > 0], indent=1))

    def _read_faults(self) -> list[Fault]:
        path = self.path / "faults.json"
        return [Fault(**f) for f in json.loads(path.read_text())] if path.exists() else []

    def _call_path(self, pid: int) -> Path:
        """Locked by *pid* during its own CUDA calls; says until when it is busy."""
        return self.path / "calls" / str(pid)

    def _in_call(self, pid: int) -> contextlib.AbstractContextManager[None]:
        return _flocked(self._call_path(pid))

    def _drained(self, pid: int, by_s: float, held: contextlib.ExitStack) -> bool:
        """Whether *pid* makes no call, and its kernels were done by then. If so it makes none until *held* is closed."""
        with contextlib.ExitStack() as call:
            try:
                call.enter_context(_flocked(self._call_path(pid), fcntl.LOCK_NB))
            except BlockingIOError:
                return False
            drained = float(self._call_path(pid).read_text() or 0) <= by_s
            if drained:
                held.push(call.pop_all())
            return drained

    def _on_gpu(self, process: SimulatedProcess, uuid: str) -> Path:
        return self.path / "gpu" / uuid / f"{process.pid}-{process.start_ticks}"

    def _on_host(self, process: SimulatedProcess) -> Path:
        return self.path / "host" / f"{process.pid}-{process.start_ticks}"

    def kept(self, pid: int, start_ticks: int) -> Path:
        """What is known of its image on disk (``simulated_image``)."""
        return self.path / "kept" / f"{pid}-{start_ticks}"

    def _settle(self, world: World) -> None:
        """Put all content where the saved world says it is. Does nothing the second time, so a killed caller's rest is made up for."""
        for process in world.rules.processes.values():
            host = self._on_host(process)
            if process.lost:
                _remove(host)
                continue
            for ordinal, uuid in enumerate(process.held_bytes):
                gpu, image = self._on_gpu(process, uuid), host / str(ordinal)
                source, target = (image, gpu) if process.on_gpu else (gpu, image)
                if not target.exists() and source.exists():
                    target.parent.mkdir(exist_ok=True)
                    source.rename(target)
            if process.on_gpu:
                (self.kept(process.pid, process.start_ticks) / "held").unlink(missing_ok=True)

    def _forget_dead(self, world: World) -> None:
        for process in list(world.rules.processes.values()):
            seen = look(process.pid)
            if seen is None or seen[1] != process.start_ticks:
                self._forget(world, process.pid)

    def _forget(self, world: World, pid: int) -> None:
        process = world.rules.processes[pid]
        for uuid in process.held_bytes:
            self._on_gpu(process, uuid).unlink(missing_ok=True)
        _remove(self._on_host(process))
        self._call_path(pid).unlink(missing_ok=True)
        for name in ("held", "dropped"):
            (self.kept(pid, process.start_ticks) / name).unlink(missing_ok=True)
        world.rules.forget(pid)

    def _carry_on(self, world: World, held: contextlib.ExitStack) -> None:
        """End every call that is due; drop those that nobody waits for any more. *held* is closed once the world is saved."""
        now = now_s()
        for op in list(world.operations):
            if (op.result is not None or not op.received) and not alive(op.owner_pid, op.owner_ticks):
                world.operations.remove(op)
            elif op.result is None:
                self._advance(world, op, now, held)

    def _advance(self, world: World, op: Operation, now: float, held: contextlib.ExitStack) -> None:
        process = world.rules.processes.get(op.pid)
        if process is None or process.start_ticks != op.start_ticks:
            op.result = "OPERATING_SYSTEM"
            return
        if stopped(op.pid) or (op.paused_s is not None and killed(op.pid)):
            op.paused_s = now if op.paused_s is None else op.paused_s
            return
        if op.paused_s is not None:
            op.due_s += now - op.paused_s
            op.deadline_s += now - op.paused_s
            op.paused_s = None
        op.received = True
        if now >= op.due_s:
            try:
                op.result = SUCCESS if self._act(world.rules, op, now, held) else None
            except CallError as error:
                op.result = error.result

    def _act(self, rules: Rules, op: Operation, now: float, held: contextlib.ExitStack) -> bool:
        """Make the call; False if a lock has to wait."""
        if op.call is Call.CHECKPOINT:
            rules.checkpoint(op.pid)
        elif op.call is Call.RESTORE:
            rules.restore(op.pid, op.gpu_map, initialise=op.initialise)
        elif op.call is Call.UNLOCK:
            rules.unlock(op.pid)
        else:
            rules.check(op.call, op.pid)
            # Nobody may have looked for a while: what counts is what came first, the end of the queue or of the timeout.
            if not self._drained(op.pid, min(now, op.deadline_s), held):
                if now >= op.deadline_s:
                    raise CallError(op.call, "NOT_READY")
                return False
            rules.lock(op.pid)
        return True


@contextlib.contextmanager
def _flocked(path: Path, flags: int = 0) -> Iterator[None]:
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | flags)
        try:
            yield
        finally:
            # Closing alone would leave it locked for as long as a child forked meanwhile has the descriptor.
            fcntl.flock(file, fcntl.LOCK_UN)


def _replace(path: Path, text: str) -> None:
    """Callers hold the lock, so one temporary name is enough."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.rename(path)


def _remove(directory: Path) -> None:
    import shutil  # takes as long to import as all the rest here

    shutil.rmtree(directory, ignore_errors=True)
