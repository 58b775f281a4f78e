"""The fault campaign: each fault at each moment of each step of each command, on simulated GPUs in memory, and how each of them ended.

What must hold is what ``test_properties.check`` holds every schedule against; this module enumerates, and counts the ends.
``benchmarks/faults.py`` writes the counts and docs/faults.md, ``tests/gpu/faults.py`` does some of it on a real driver.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple
from unittest import mock

from gpuckpt.model import Call, State
from gpuckpt.plan import AGENT_CALLS
from gpuckpt.rendezvous.host import Rendezvous
from gpuckpt.walk import Walk
from tests.memory_hosts import Hosts, MemoryStore, Part
from tests.memory_machine import Fault
from tests.memory_world import MemoryWorld
from tests.schedules import FIRST_PID, Event, Played, Player, Proc, Schedule, Step
from tests.test_properties import check
from tests.test_rendezvous_properties import check as check_hosts

#: Two ranks with agents, on a GPU each; the first has a pool.
JOB = (Proc(agent=True, pool_gib=2), Proc(gpus=(1,), agent=True))
SUSPEND = Step("suspend", keep=True)

FAULTS = {
    "kill -9 of the command": "also together with its callers, as the end of a service or a container does",
    "kill -9 of a caller": "of the helper in which a driver call is made",
    "kill -9 of a target": "as the out-of-memory killer does, too",
    "SIGSTOP of a target": "continued after the command has ended",
    "a call fails": "the driver's or NCCL's, before or after its effect",
    "a call hangs": "until long after the command has given up",
    "out of host memory": "no caller can be started; the driver, or the agent, cannot get memory",
    "out of GPU memory": "another process fills the GPU, also between the last look and the restore",
    "store lost": "the rendezvous of two hosts answers nobody any more, or acts and its answer is lost",
    "agent lost": "the thread in the target that answers for it ends",
}
#: All steps, in their order.
ORDER = (
    *(
        "meet",
        "inspect",
        "room",
        "load",
        "quiesce",
        "offload",
        "comms",
        "disarm",
        "lock",
        "re-inspect",
        "checkpoint",
        "verify",
        "store",
        "drop",
    ),
    *("restore", "unlock", "arm", "comms-resume", "onload", "unquiesce", "end"),
)
#: What a step is, where the word does not say it.
STEPS = {
    "inspect": "look at the group, hold it, write the journal",
    "meet": "the hosts find each other",
    "end": "the hosts tell each other that all is done",
}
#: Why what was lost could not be saved, by call and fault. An end that is not explained here fails.
UNAVOIDABLE = {
    (Call.RESTORE, "a call fails"): "a restore that the driver refuses is final: it refuses every later one",
    (Call.RESTORE, "out of host memory"): "a restore that the driver refuses is final: it refuses every later one",
    (
        Call.RESTORE,
        "out of GPU memory",
    ): "nothing in the driver reserves room: somebody took it between the last look and the end of the restore",
    ("inspect", "out of GPU memory"): "the restore of the command before was still under way in the driver, which reserves no room",
    (Call.COMMS, "a call fails"): "NCCL has no way back from a suspend that broke half-way",
    (Call.COMMS, "out of host memory"): "NCCL has no way back from a suspend that broke half-way",
    (Call.COMMS_RESUME, "a call fails"): "NCCL has no way back from a resume that broke half-way",
    (Call.COMMS_RESUME, "out of host memory"): "NCCL has no way back from a resume that broke half-way",
}
#: Why a process may be left where it is, named, when all else is over.
HELD_WHY = {
    "agent lost": "its program stands at its safe point, and nobody else can tell it to go on; what it had is there, or in its pool's copy",
    "store lost": "a host that cannot ask the others leaves its part as it is; the same command on all brings it back, by a new store too",
}
#: How long into a call something happens to it, in seconds: into a quick one (a lock), and into a slow one (a checkpoint).
INTO_S = (0.005, 0.5)
AS_FOUND, SUSPENDED, RUNNING, HELD, LOST = "as found", "suspended", "running", "named, held", "named, lost"
ENDS = (AS_FOUND, SUSPENDED, RUNNING, HELD, LOST)


@dataclass(frozen=True)
class Way:
    """The last of *steps* is disturbed. *wanted*: where it leads if nothing happens; *since*: the first of its steps that counts."""

    name: str
    steps: tuple[Step, ...]
    wanted: str
    since: str = ""
    down: State = State.CHECKPOINTED  # what the suspended are


@dataclass(frozen=True)
class Case:
    """*fault* in the *step* of a way, and how it ended."""

    way: str
    step: str
    fault: str
    end: str


class Moment(NamedTuple):
    """A point of a command: the step that it is at, and how many calls it has made before."""

    step: str
    calls: int


@dataclass
class Disturbed(Player):
    """A player that hears which step its command is at, and takes down in which one something happened."""

    accept: ClassVar[frozenset[str]] = frozenset()
    heard: ClassVar[list[str]] = []
    points: list[Moment] = field(default_factory=list)  # of the command in question
    left: int = 0  # commands to play up to and with that one
    struck: str = ""  # the step at which the event came
    active: bool = False
    said: dict[int, str] = field(default_factory=dict)  # pid -> the code of the first error that was about it

    @classmethod
    def of(cls, schedule: Schedule) -> Disturbed:
        player = super().of(schedule)
        assert isinstance(player, Disturbed)
        player.left = len(schedule.steps)
        return player

    def play(self, step: Step) -> Played:
        self.heard[:] = ["inspect"]
        self.left -= 1
        self.active = self.left == 0
        with mock.patch.object(MemoryWorld, "point", self._noting(MemoryWorld.point)) if self.active else nullcontext():
            played = super().play(step)
        self.active = False
        played.disturbed |= any(a.lost for a in self.machine.agents.values())  # what it holds nobody can tell from outside
        if played.error is not None and played.error.pid is not None:
            self.said.setdefault(played.error.pid, played.error.code)
        for report in played.reports:
            if report.error and report.error["pid"]:
                self.said.setdefault(report.error["pid"], report.error["code"])
        return played

    def _noting(self, plain: Any) -> Any:
        def point(world: MemoryWorld, name: str) -> None:
            self.points.append(Moment(self.heard[-1], world.started))
            plain(world, name)

        return point

    def _happen(self, event: Event, world: MemoryWorld) -> None:
        pid = FIRST_PID + event.which
        if world.dead or not self.active:
            if event.what in ("crash", "kill-all"):
                super()._happen(event, world)
            return
        if event.what == "kill-callers" and not any(c.caller_alive for c in self.machine.queues.get(pid, [])):
            return  # it has none
        self.struck = self.heard[-1]
        if event.what == "take":
            self.machine.grab(f"GPU-{event.which}", leave_gib=2)
        elif event.what == "scarce":
            self.machine.host_short = True
        elif event.what == "lose-agent":
            self.machine.agents[pid].vanish()
        else:
            super()._happen(event, world)


@contextmanager
def listening() -> Iterator[None]:
    """Tell the players of each step that is begun."""
    plain = Walk.step
    under_way: list[str] = []

    @contextmanager
    def step(walk: Walk, name: str) -> Iterator[None]:
        if not under_way:
            Disturbed.heard.append(str(name))
        under_way.append(str(name))
        try:
            with plain(walk, name):
                yield
        finally:
            under_way.pop()

    with mock.patch.object(Walk, "step", step):
        yield


def exhaustive() -> list[Case]:
    """All of it."""
    return [case for way in WAYS for case in campaign(way)] + [
        case for command in ("suspend", "resume") for case in store_campaign(command)
    ]


def campaign(way: Way) -> list[Case]:
    """Every fault at every moment of *way*, one at a time. Fails as soon as one ends as none may."""
    cases: list[Case] = []
    points: list[Moment] = []
    last = way.steps[-1]
    with listening():
        play(way, last, lambda player, _: points.extend(player.points))
        begins = next(n for n, at in enumerate(points) if way.since in ("", at.step))
        for fault, disturbed in itertools.chain(by_event(last, points, begins), by_call(last, points, begins)):
            nth = disturbed.faults[-1].nth if disturbed.faults != last.faults else None

            def at_the_end(player: Disturbed, named: dict[int, str], fault: str = fault, nth: int | None = nth) -> None:
                step = player.struck if nth is None else step_of(nth, points)
                if step:
                    cases.append(Case(way.name, step, fault, judged(way, player, named, step, fault)))

            play(way, disturbed, at_the_end)
    return cases


class NotingStore(MemoryStore):
    """Takes down before which step the hosts were agreeing when it went."""

    heard: ClassVar[list[str]] = []
    struck: str = ""

    def _count(self) -> None:
        if self.calls in (self.gone_at, self.torn_at):
            self.struck = self.heard[-1]
        super()._count()


@contextmanager
def agreeing() -> Iterator[None]:
    """Tell the stores of each step that is about to be agreed on."""
    join, before, back = Rendezvous.join, Rendezvous.before, Rendezvous.back

    def noting_join(self: Rendezvous, *arguments: Any, **more: Any) -> bool:
        NotingStore.heard.append("meet")
        return join(self, *arguments, **more)

    def noting_before(self: Rendezvous, step: str, cause: Any = None) -> None:
        NotingStore.heard.append(str(step))
        before(self, step, cause)

    def noting_back(self: Rendezvous, cause: Any, *, stuck: bool) -> None:
        NotingStore.heard.append("the way back")
        back(self, cause, stuck=stuck)

    with (
        mock.patch.object(Rendezvous, "join", noting_join),
        mock.patch.object(Rendezvous, "before", noting_before),
        mock.patch.object(Rendezvous, "back", noting_back),
        mock.patch("tests.test_rendezvous_properties.MemoryStore", NotingStore),
    ):
        yield


def store_campaign(command: str, every: int = 1) -> list[Case]:
    """The store of two hosts with a rank each is lost, or an answer of it, at *every* n-th of its calls during *command*."""
    cases: list[Case] = []
    resume = command == "resume"
    done, undone = (State.RUNNING, State.CHECKPOINTED) if resume else (State.CHECKPOINTED, State.RUNNING)

    def at_the_end(hosts: Hosts, store: MemoryStore) -> None:
        assert isinstance(store, NotingStore)
        states = {s for h in hosts.hosts for s in h.player.states().values()}
        end = {undone: AS_FOUND, done: RUNNING if resume else SUSPENDED}.get(states.pop(), HELD) if len(states) == 1 else HELD
        if store.struck:
            cases.append(Case(f"{command} on two hosts", store.struck, "store lost", end))

    with agreeing():
        known = -1
        for call in itertools.count(step=every):
            if known == len(cases):
                break  # it was not asked so often
            known = len(cases)
            for moments in ({"gone_at": call}, {"torn_at": call}):
                NotingStore.heard[:] = ["meet"]
                check_hosts((Part(), Part()), resume=resume, at_the_end=at_the_end, **moments)  # type: ignore[arg-type]
    return cases


def by_event(last: Step, points: list[Moment], begins: int) -> Iterator[tuple[str, Step]]:
    """Something happens from outside: at each point, and in the middle of each call."""
    events: dict[str, tuple[str, ...]] = {
        "kill -9 of the command": ("crash", "kill-all"),
        "kill -9 of a caller": ("kill-callers",),
        "kill -9 of a target": ("die",),
        "SIGSTOP of a target": ("stop",),
        "out of host memory": ("scarce",),
        "out of GPU memory": ("take",),
        "agent lost": ("lose-agent",),
    }
    for point in range(begins, len(points)):
        calls_begin = point + 1 < len(points) and points[point].calls < points[point + 1].calls
        for fault, whats in events.items():
            if fault == "out of host memory" and (last.command != "suspend" or points[point].step != "inspect"):
                continue  # what comes later kills a target or a caller, or fails a call
            victims = (0,) if fault in ("kill -9 of the command", "out of host memory") else range(len(JOB))
            for what, which, after_s in itertools.product(whats, victims, (0.0, *(INTO_S if calls_begin else ()))):
                yield fault, dataclasses.replace(last, events=(*last.events, Event(point, what, which, after_s)))


def by_call(last: Step, points: list[Moment], begins: int) -> Iterator[tuple[str, Step]]:
    """Something is the matter with one call."""
    for nth in range(points[begins].calls, points[-1].calls):
        if any(f.nth == nth for f in last.faults):
            continue
        step = step_of(nth, points)
        results = {
            "a call fails": [Fault(nth, result="UNKNOWN"), Fault(nth, result="UNKNOWN", acted=True)],
            "a call hangs": [Fault(nth, 500.0)],
        }
        results["out of host memory"] = [Fault(nth, result="gpuckpt:host-memory" if step == Call.LOAD else "OUT_OF_MEMORY")]
        if step not in AGENT_CALLS:
            results["out of host memory"].append(Fault(nth, result="NO_CALLER"))
        for fault, kinds in results.items():
            for kind in kinds:
                yield fault, dataclasses.replace(last, faults=(*last.faults, kind))


def step_of(nth: int, points: list[Moment]) -> str:
    """The step in which call number *nth* was made."""
    return next(at.step for at in reversed(points) if at.calls <= nth)


def play(way: Way, last: Step, at_the_end: Callable[[Disturbed, dict[int, str]], None]) -> None:
    """*way* with *last* in place of its last step, as ``check`` plays and judges it."""

    def checked(player: Player, named: dict[int, str]) -> None:
        assert isinstance(player, Disturbed)
        at_the_end(player, named)

    check(Schedule(JOB, (*way.steps[:-1], last)), Disturbed, checked)


def judged(way: Way, player: Disturbed, named: dict[int, str], step: str, fault: str) -> str:
    """How it ended, when all trouble was over and ``gpuckpt recover`` had run. Whom the fault killed does not count."""
    states = player.states()
    where = f"{way.name}, {step}, {fault}: {states}, {named}"
    if any(p.lost for p in player.machine.rules.processes.values()):
        assert (step, fault) in UNAVOIDABLE, f"lost, and nothing says why that could not be helped: {where}"
        return LOST
    agents = player.machine.agents
    held = {pid for pid, state in states.items() if state is State.RUNNING and agents[pid].lost and agents[pid].stage is not State.RUNNING}
    if held:
        assert held <= set(player.said), f"its agent is gone and its program stands still, and nobody says so: {where}"
        return HELD
    found = way.down if way.wanted is RUNNING else State.RUNNING
    assert len(set(states.values())) == 1, f"some here, some there: {where}"
    if found in states.values():
        return AS_FOUND
    assert set(states.values()) <= {way.down, State.RUNNING}, where
    return RUNNING if State.RUNNING in states.values() else SUSPENDED


def _ways() -> tuple[Way, ...]:
    points: list[Moment] = []
    plain = Way("suspend", (SUSPEND,), SUSPENDED)
    with listening(), redirect_stdout(io.StringIO()):
        play(plain, SUSPEND, lambda player, _: points.extend(player.points))
    last_checkpoint = next(n for n in reversed(range(points[-1].calls)) if step_of(n, points) == Call.CHECKPOINT)
    fails = Fault(last_checkpoint, result="OPERATING_SYSTEM")
    pool = Step("suspend", by="pool")
    cut_off = Step("suspend", events=(Event(0, "crash", after_s=1.5),), faults=(dataclasses.replace(fails, seconds=2.0),))
    return (
        plain,
        Way("resume", (SUSPEND, Step("resume")), RUNNING),
        Way("suspend --method pool", (pool,), SUSPENDED, down=State.DISARMED),
        Way("resume after --method pool", (pool, Step("resume")), RUNNING, down=State.DISARMED),
        Way("a suspend's way back", (Step("suspend", faults=(fails,)),), AS_FOUND, since="restore"),
        Way("recover after a suspend", (cut_off, Step("recover")), AS_FOUND),
        Way(
            "recover after a resume", (Step("suspend"), Step("resume", events=(Event(0, "crash", after_s=0.5),)), Step("recover")), RUNNING
        ),
    )


WAYS = _ways()
