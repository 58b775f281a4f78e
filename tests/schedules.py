"""Schedules: which processes there are, which commands are typed, and what goes wrong when. And the runner that plays one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar
from unittest import mock

from hypothesis import strategies as st

from gpuckpt import keeping
from gpuckpt.driver.api import CallError
from gpuckpt.errors import GpuckptError, exit_code
from gpuckpt.model import GIB, Report, State
from gpuckpt.operation import Operation
from gpuckpt.recovery import recover_all
from tests.memory_agents import Agent
from tests.memory_machine import Fault, Machine
from tests.memory_world import Crash, MemoryWorld

ACCEPT = frozenset({"possible-import", "nccl-communicator"})
FIRST_PID = 101
FIRST_PIDS = range(FIRST_PID, FIRST_PID + 4)
ROOMY_GIB = 80
TIGHT_GIB = 12


@dataclass(frozen=True)
class Proc:
    """One process at the start. Those of one group belong together."""

    group: int = 0
    gpus: tuple[int, ...] = (0,)
    gib: int = 4
    found: State = State.RUNNING
    trait: str = ""
    busy_s: float = 0.0
    agent: bool = False
    pool_gib: int = 0  # of its GPU memory: what its agent can move


@dataclass(frozen=True)
class Event:
    """*what* happens *after_s* seconds after the *point* of its command, to process or GPU number *which*.

    To the controller: crash, interrupt, kill-all (its callers are killed with it). To a process: die, stop, cont, kill-callers,
    born (a new one in its group). To a GPU: take, free, query-fails, query-works. To all of them: blind, seen (NVML fails, and works
    again). To the journal: full, writable. And whole commands of another controller, on a process: suspend, resume, recover; with a
    *crash_at* they are killed at that point.
    """

    point: int
    what: str
    which: int = 0
    after_s: float = 0.0
    crash_at: int | None = None


@dataclass(frozen=True)
class Step:
    """A command that is typed: suspend, resume or recover."""

    command: str
    targets: tuple[int, ...] = (0,)
    events: tuple[Event, ...] = ()
    faults: tuple[Fault, ...] = ()
    timeout_s: float | None = None
    wait_s: float = 0.0
    keep: bool = False  # a suspend keeps its images on disk
    by: str = "auto"  # the method of a suspend


@dataclass(frozen=True)
class Schedule:
    processes: tuple[Proc, ...]
    steps: tuple[Step, ...]
    gpus: int = 2
    gpu_gib: int = ROOMY_GIB


@dataclass
class Played:
    """How a command ended: its exit code (None: killed) and what it said, and the states before and after."""

    step: Step
    code: int | None
    reports: list[Report]
    before: dict[int, State]
    after: dict[int, State]
    disturbed: bool  # another command ran meanwhile, or a call of an earlier one
    points: int = 0
    error: GpuckptError | None = None

    @property
    def words(self) -> dict[int, str]:
        """pid -> how the command's reports say that it was left."""
        return {p.pid: p.state for r in self.reports for p in r.processes}


@dataclass
class Player:
    """Plays steps on one machine."""

    accept: ClassVar[frozenset[str]] = ACCEPT

    machine: Machine
    schedule: Schedule
    ran: set[str] = field(default_factory=set)  # commands of all controllers
    disturbed: bool = False

    @classmethod
    def of(cls, schedule: Schedule) -> Player:
        machine = Machine.of(schedule.gpus, schedule.gpu_gib)
        for number, p in enumerate(schedule.processes):
            pid = FIRST_PID + number
            held = {f"GPU-{g % schedule.gpus}": p.gib * GIB for g in p.gpus}
            try:
                machine.rules.register(pid, 1, held, {p.trait} - {""})
            except CallError:  # no room for it
                continue
            machine.groups[pid] = p.group
            machine.busy_until[pid] = p.busy_s
            if p.agent and p.found is State.RUNNING:
                machine.agents[pid] = Agent(machine, pid, pool_bytes=min(p.pool_gib, p.gib) * GIB)
            if p.found is not State.RUNNING:
                machine.rules.lock(pid)
            if p.found is State.CHECKPOINTED and "managed" not in p.trait:
                machine.rules.checkpoint(pid)
            if p.trait in ("import", "communicator"):
                machine.may_be_lost.add(pid)
        return cls(machine, schedule)

    def play(self, step: Step) -> Played:
        machine = self.machine
        pending = sorted(step.events, key=lambda e: e.point)
        before = self.states()
        self.disturbed = any(machine.queues.values()) or any(a.unsettled for a in machine.agents.values())

        def on_point(world: MemoryWorld, number: int) -> None:
            while pending and pending[0].point <= number:
                event = pending.pop(0)
                happen = lambda event=event: self._happen(event, world)  # noqa: E731
                if event.after_s:
                    machine.at(event.after_s, happen)
                else:
                    happen()

        world = MemoryWorld(machine, step.faults, on_point)
        code, reports, error = self._command(world, step)
        return Played(step, code, reports, before, self.states(), self.disturbed, world.points, error)

    def states(self) -> dict[int, State]:
        return {pid: self.machine.state(pid) for pid in self.machine.rules.processes if pid < 9000}

    def recover(self) -> Played:
        return self.play(Step("recover"))

    def _command(self, world: MemoryWorld, step: Step) -> tuple[int | None, list[Report], GpuckptError | None]:
        self.ran.add(step.command)
        targets = [t if t >= FIRST_PID else FIRST_PID + t % len(self.schedule.processes) for t in step.targets]
        operation = Operation(world, step.command, timeout_s=step.timeout_s, accept=self.accept)
        try:
            if step.command == "recover":
                reports = recover_all(world)
                failed = [r for r in reports if not r.ok]
                return (1 if failed else 0), reports, None
            if step.command == "suspend":
                with mock.patch.object(keeping, "refuse", _let_pass):  # of directories and libraries nothing is known here
                    keep_in = "/images" if step.keep and step.by != "pool" else keeping.RAM
                    return 0, [operation.suspend(targets, by=step.by, keep_in=keep_in)], None
            return 0, [operation.resume(targets, wait_s=step.wait_s)], None
        except Crash:
            return None, [], None
        except GpuckptError as e:
            return exit_code(e), [e.report] if e.report else [], e
        finally:
            world.end()

    def _happen(self, event: Event, world: MemoryWorld) -> None:
        machine = self.machine
        pid = FIRST_PID + event.which % len(self.schedule.processes)
        uuid = f"GPU-{event.which % self.schedule.gpus}"
        match event.what:
            case "crash":
                world.kill()
            case "kill-all":
                for other in FIRST_PIDS:
                    machine.kill_callers(other)
                world.kill()
            case "interrupt":
                world.interruptions.append(2)
            case "die":
                machine.die(pid)
            case "stop":
                machine.stop(pid)
            case "cont":
                machine.cont(pid)
            case "kill-callers":
                machine.kill_callers(pid)
            case "born":
                self._born(pid)
            case "take":
                machine.take(uuid, leave_gib=2)
            case "free":
                machine.free(uuid)
            case "query-fails" | "query-works":
                machine.rules.gpus[uuid].memory_query = "fails" if event.what == "query-fails" else "ok"
            case "blind" | "seen":
                machine.blind = event.what == "blind"
            case "full" | "writable":
                machine.journal_full = event.what == "full"
            case "suspend" | "resume" | "recover":
                self.disturbed = True
                step = Step(event.what, (event.which,), timeout_s=3.0)
                other = MemoryWorld(machine, (), lambda w, n: w.kill() if n == event.crash_at else None)
                self._command(other, step)
            case _:
                raise ValueError(event.what)

    def _born(self, near: int) -> None:
        pid = 500 + len(self.machine.groups)
        uuid = "GPU-0"
        if near in self.machine.groups and self.machine.rules.free(uuid) > GIB and self.machine.may_allocate(uuid):
            self.machine.rules.register(pid, 1, {uuid: GIB})
            self.machine.groups[pid] = self.machine.groups[near]


def _let_pass(*_: object) -> None:
    """Quicker than a mock, of which the campaign would make thousands."""


# Strategies.

SECONDS = st.sampled_from([0.0, 0.005, 0.5, 1.5, 5.0, 100.0])


def ranks() -> st.SearchStrategy[tuple[Proc, ...]]:
    """Jobs of processes with agents, among them one without."""
    one = st.builds(
        Proc, gpus=st.sampled_from([(0,), (1,), (2,)]), busy_s=st.sampled_from([0.0, 0.0, 2.0]), agent=st.sampled_from([True] * 5 + [False])
    )
    return st.lists(one, min_size=1, max_size=4).map(tuple)


def pools() -> st.SearchStrategy[tuple[Proc, ...]]:
    """Processes with agents, most of them with a pool, in two groups on the same GPUs."""
    one = st.builds(
        Proc,
        group=st.sampled_from([0, 0, 1]),
        gpus=st.sampled_from([(0,), (0,), (1,)]),
        gib=st.sampled_from([4, 6]),
        busy_s=st.sampled_from([0.0, 0.0, 2.0]),
        agent=st.sampled_from([True] * 7 + [False]),
        pool_gib=st.sampled_from([0, 2, 5]),
    )
    return st.lists(one, min_size=1, max_size=4).map(tuple)


def processes() -> st.SearchStrategy[tuple[Proc, ...]]:
    one = st.builds(
        Proc,
        group=st.sampled_from([0, 0, 0, 1]),
        gpus=st.sampled_from([(0,), (0,), (1,), (2,), (0, 1), (1, 0, 2)]),
        gib=st.sampled_from([1, 4, 6]),
        found=st.sampled_from([State.RUNNING, State.RUNNING, State.RUNNING, State.LOCKED, State.CHECKPOINTED]),
        trait=st.sampled_from(["", "", "", "", "", "", "managed", "import", "communicator"]),
        busy_s=st.sampled_from([0.0, 0.0, 0.0, 2.0, 200.0]),
    )
    return st.lists(one, min_size=1, max_size=4).map(tuple)


def events() -> st.SearchStrategy[tuple[Event, ...]]:
    what = st.sampled_from(
        "crash crash kill-all interrupt interrupt die stop cont kill-callers kill-callers born take free query-fails query-works "
        "blind seen full writable suspend resume recover".split()
    )
    one = st.builds(Event, st.integers(0, 60), what, st.integers(0, 3), SECONDS, st.none() | st.integers(0, 50))
    return st.lists(one, max_size=4).map(tuple)


def faults() -> st.SearchStrategy[tuple[Fault, ...]]:
    one = st.builds(
        Fault,
        st.integers(0, 12),
        st.sampled_from([None, None, 0.2, 5.0, 500.0]),
        st.sampled_from(["", "", "", "UNKNOWN", "OUT_OF_MEMORY", "OPERATING_SYSTEM", "NO_CALLER"]),
        st.booleans(),
        st.sampled_from([None, None, None, 0.0, 0.3]),
    )
    return st.lists(one, max_size=3, unique_by=lambda f: f.nth).map(tuple)


def steps(commands: str, longest: int) -> st.SearchStrategy[tuple[Step, ...]]:
    one = st.builds(
        Step,
        st.sampled_from(commands.split()),
        st.sampled_from([(0,), (0,), (0,), (1,), (0, 1), (3, 0)]),
        events(),
        faults(),
        st.sampled_from([None, None, 0.5, 10.0]),
        st.sampled_from([0.0, 0.0, 5.0]),
        st.booleans(),
        st.sampled_from(["auto", "auto", "driver", "pool"]),
    )
    return st.lists(one, min_size=1, max_size=longest).map(tuple)


def schedules(
    commands: str = "suspend resume recover", longest: int = 3, who: st.SearchStrategy[tuple[Proc, ...]] | None = None
) -> st.SearchStrategy[Schedule]:
    return st.builds(
        Schedule, processes() if who is None else who, steps(commands, longest), st.integers(1, 3), st.sampled_from([ROOMY_GIB, TIGHT_GIB])
    )
