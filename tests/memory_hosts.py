"""Several machines in memory, an operation on each, and one store between them: threads that hand on a baton, so that a seed decides all.

Each call of an operation on its world or journal, and each on the store, is a point at which another host may be next. Clocks run
apart by no more than a moment: who is furthest behind goes on.
"""

from __future__ import annotations

import itertools
import random
import threading
from dataclasses import dataclass, field
from typing import Any

from gpuckpt import errors
from gpuckpt.errors import GpuckptError, exit_code
from gpuckpt.model import Inventory, Rank, Report
from gpuckpt.operation import Operation
from gpuckpt.recovery import recover_all
from gpuckpt.rendezvous.host import Rendezvous
from gpuckpt.rendezvous.seal import Seal
from tests.memory_machine import Fault, Machine
from tests.memory_world import Crash, MemoryWorld
from tests.schedules import ACCEPT, FIRST_PID, Player, Proc, Schedule

NEVER = 10**9


class MemoryStore:
    """Registers in memory. From operation number ``gone_at`` on it answers nobody; operation ``torn_at`` acts and its answer is lost."""

    open_to_others = ends = serving = False

    def __init__(self, gone_at: int = NEVER, torn_at: int = NEVER) -> None:
        self.values: dict[str, bytes] = {}
        self.calls = 0
        self.gone_at, self.torn_at = gone_at, torn_at

    def get(self, key: str) -> bytes | None:
        self._count()
        return self.values.get(key)

    def compare_set(self, key: str, value: bytes) -> bytes:
        torn = self.calls == self.torn_at
        self._count()
        held = self.values.setdefault(key, value)
        if torn:
            raise errors.RendezvousLost("the answer was lost")
        return held

    def close(self) -> None: ...

    def _count(self) -> None:
        self.calls += 1
        if self.calls > self.gone_at:
            raise errors.RendezvousLost("the store cannot be reached")


class Baton:
    """Lets one thread at a time go on, from point to point."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._main = threading.Semaphore(0)
        self._go: dict[int, threading.Semaphore] = {}
        self._machines: dict[int, Machine] = {}

    def add(self, host: int, machine: Machine) -> None:
        self._go[host], self._machines[host] = threading.Semaphore(0), machine

    def point(self, host: int) -> None:
        if host in self._go:
            self._main.release()
            self._go[host].acquire()

    def run(self, work: dict[int, threading.Thread]) -> None:
        for thread in work.values():
            thread.start()
        while self._go:
            host = min(self._go, key=lambda h: self._machines[h].clock + self._random.random() * 0.05)
            self._go[host].release()
            self._main.acquire()

    def begin(self, host: int) -> None:
        self._go[host].acquire()

    def end(self, host: int) -> None:
        del self._go[host]
        self._main.release()


class HostWorld(MemoryWorld):
    """One host's world; each of its points is one at which the baton may go on."""

    def __init__(self, host: Host, baton: Baton, faults: tuple[Fault, ...]) -> None:
        self.host, self.baton = host, baton
        super().__init__(host.machine, faults, host.on_point)

    def point(self, name: str) -> None:
        self.baton.point(self.host.number)
        super().point(name)

    def inspect(self, *args: Any, **kwargs: Any) -> Inventory:
        """With the rank of each in the communicator that all agents of all hosts share, if they share one."""
        found, host = super().inspect(*args, **kwargs), self.host
        here = [p for p in found.processes if p.agent and p.pid in host.ranks]
        return found._replace(ranks=tuple(Rank(p.pid, "job", host.ranks[p.pid], host.size) for p in here))


class Shared:
    """A host's view of the store: a point before each call."""

    open_to_others = ends = serving = False

    def __init__(self, store: MemoryStore, world: HostWorld) -> None:
        self.store, self.world = store, world

    def get(self, key: str) -> bytes | None:
        self.world.point("get")
        return self.store.get(key)

    def compare_set(self, key: str, value: bytes) -> bytes:
        self.world.point("compare_set")
        return self.store.compare_set(key, value)

    def close(self) -> None: ...


@dataclass(frozen=True)
class Trouble:
    """What goes wrong on a host: *what* at the *point* of its command. crash, interrupt, die (its first process), kill-all."""

    point: int
    what: str


@dataclass(frozen=True)
class Part:
    """One host of a schedule."""

    processes: tuple[Proc, ...] = (Proc(agent=True),)
    troubles: tuple[Trouble, ...] = ()
    faults: tuple[Fault, ...] = ()
    absent: bool = False


@dataclass
class Host:
    number: int
    part: Part
    machine: Machine
    player: Player
    code: int | None = None  # of its last command; None: killed
    error: GpuckptError | None = None
    report: Report | None = None
    troubled: bool = True
    ranks: dict[int, int] = field(default_factory=dict)  # by pid, in a communicator of *size* over all hosts
    size: int = 0

    def on_point(self, world: MemoryWorld, number: int) -> None:
        for trouble in self.part.troubles if self.troubled else ():
            if trouble.point == number:
                self._happen(trouble.what, world)

    def _happen(self, what: str, world: MemoryWorld) -> None:
        match what:
            case "crash":
                world.kill()
            case "kill-all":
                self.machine.kill_callers(FIRST_PID)
                world.kill()
            case "interrupt":
                world.interruptions.append(2)
            case "die":
                self.machine.die(FIRST_PID)


@dataclass
class Hosts:
    """The machines, and the commands that are typed on all of them."""

    parts: tuple[Part, ...]
    seed: int = 0
    store: MemoryStore = field(default_factory=MemoryStore)
    spans: bool = False  # their agents share a communicator
    hosts: list[Host] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)  # pids of commands, as hosts on one machine see them

    def __post_init__(self) -> None:
        self.ids = itertools.count(1)
        for number, part in enumerate(self.parts):
            player = Player.of(Schedule(part.processes, (), gpus=3))
            self.hosts.append(Host(number, part, player.machine, player))
        agents = [(h, FIRST_PID + i) for h in self.hosts for i, p in enumerate(h.part.processes) if p.agent]
        for rank, (host, pid) in enumerate(agents if self.spans else ()):
            host.ranks[pid], host.size = rank, len(agents)

    def command(self, command: str, timeout_s: float = 3.0) -> None:
        """*command* on every host that is not absent, until all have ended."""
        baton = Baton(self.seed)
        work = {}
        clock = max(h.machine.clock for h in self.hosts)
        for host in self.hosts:
            host.machine.clock = clock  # it is typed at one moment everywhere
            host.code, host.error, host.report = None, None, None
            if not (host.part.absent and host.troubled):
                baton.add(host.number, host.machine)
                work[host.number] = threading.Thread(target=self._run, args=(host, baton, command, timeout_s), daemon=True)
        baton.run(work)
        for host in self.hosts:
            host.machine.run(float("inf"))

    def calm(self) -> None:
        """From now on nothing goes wrong; commands that were killed had machines of their own, as far as one can tell."""
        for host in self.hosts:
            host.troubled = False
            host.machine.mend()
        self.store.gone_at = self.store.torn_at = NEVER

    def recover(self) -> None:
        for host in self.hosts:
            recover_all(MemoryWorld(host.machine))
            host.machine.run(float("inf"))

    def _run(self, host: Host, baton: Baton, command: str, timeout_s: float) -> None:
        baton.begin(host.number)
        world = HostWorld(host, baton, host.part.faults if host.troubled else ())
        meeting = Rendezvous(
            world,
            lambda: Shared(self.store, world),
            Seal("job", b"secret"),
            url="file:///shared/job",
            command=command,
            nodes=len(self.parts),
            node=host.number,
            me={"host": f"host{host.number}", "machine": host.number, "pid": world.me.pid, "start_ticks": 1},
            dead=lambda who: who["pid"] in self.ended,
            fresh_id=lambda: f"op{next(self.ids)}",
        )
        try:
            with meeting:
                operation = Operation(world, command, timeout_s=timeout_s, accept=ACCEPT, barrier=meeting)
                host.report = operation.suspend([FIRST_PID]) if command == "suspend" else operation.resume([FIRST_PID])
            host.code = 0
        except Crash:
            pass
        except GpuckptError as e:
            host.code, host.error, host.report = exit_code(e), e, e.report
        finally:
            self.ended.add(world.me.pid)
            try:
                world.end()
            finally:
                baton.end(host.number)
