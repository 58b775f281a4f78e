"""Hosts for tests: simulated machines with real processes, each with a journal of its own, and a directory that they share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from gpuckpt.driver.simulated import SimulatedDriver
from gpuckpt.driver.simulated_store import SimulatedWorldDir
from gpuckpt.model import State
from gpuckpt.rendezvous import judge
from gpuckpt.rendezvous.coordinator import Body, Coordinator, Get, Moment, Put, Steps
from gpuckpt.rendezvous.file import FileStore
from gpuckpt.rendezvous.seal import Seal
from gpuckpt.rendezvous.store import Store
from tests.simulated_machine import DEADLINE_S, Machine, Result, Running, Target, eventually

T = TypeVar("T")


@dataclass
class Cluster:
    """*nodes* hosts; with ``puppets`` some of them are played by the test."""

    path: Path
    nodes: int
    machines: list[Machine] = field(default_factory=list)
    ranks: list[list[Target]] = field(default_factory=list)
    name: str = "job"
    address: str = ""  # HOST:PORT of a c10d store; without one they meet in a directory

    @classmethod
    def make(cls, path: Path, hosts: int, *, puppets: int = 0, gpus: int = 2) -> Cluster:
        made = cls(path, hosts + puppets)
        (path / "shared").mkdir(parents=True)
        (path / "meet").mkdir()
        for h in range(hosts):
            place = path / f"host{h}"
            place.mkdir()
            machine = Machine(place, SimulatedWorldDir.create(place / "sim", gpus=gpus, gib=80))
            machine.host_memory(512, 256)
            made.machines.append(machine)
        return made

    @property
    def url(self) -> str:
        return f"c10d://{self.address}/{self.name}" if self.address else f"file://{self.path}/shared/{self.name}"

    def store(self) -> Store:
        """For a puppet, or who looks on."""
        if not self.address:
            return FileStore(self.path / "shared" / self.name)
        from gpuckpt.rendezvous.c10d import C10dStore

        host, _, port = self.address.partition(":")
        return C10dStore(host, int(port), self.name, lambda: None)

    @property
    def targets(self) -> list[Target]:
        return [t for here in self.ranks for t in here]

    def one_job(self, each: int, size: int | None = None, *, nccl: tuple[str, ...] = ()) -> None:
        """*each* ranks a host, of one communicator over all."""
        size = len(self.machines) * each if size is None else size
        meet = ("--nccl-socket", "--meet-in", str(self.path / "meet"))
        for h, machine in enumerate(self.machines):
            version = ("--nccl", nccl[h]) if nccl else ()
            options = [("--gpu", str(r), *meet, *version, "--agent", "tp", str(h * each + r), str(size)) for r in range(each)]
            self.ranks.append(machine.job(*options))

    def own_jobs(self, agents: bool = True) -> None:
        """A process a host, alone in its communicator if it has one."""
        for h, machine in enumerate(self.machines):
            self.ranks.append(machine.job(("--agent", f"own{h}", "0", "1") if agents else ()))

    def begin(
        self,
        host: int,
        command: str,
        *options: object,
        timeout: str = "20s",
        nodes: int | None = None,
        place: bool = True,
        json: bool = True,
    ) -> Running:
        words = ["--rendezvous", self.url, "--nodes", nodes or self.nodes, "--timeout", timeout, *options]
        words += ["--node-rank", host] if place else []
        afresh = ("env",) if self.address else ()  # with a torch that is not the tests' own
        return self.machines[host].begin(command, self.ranks[host][0].pid, *map(str, words), json=json, prefix=afresh)

    def all(self, command: str, *options: object, place: bool = True) -> list[Result]:
        """*command* on every host; without *place* each takes one that is free."""
        running = [self.begin(h, command, *options, place=place) for h in range(len(self.machines))]
        return [r.end() for r in running]

    def states(self) -> list[State]:
        return [SimulatedDriver(m.world.path).state(t.pid) for m, here in zip(self.machines, self.ranks, strict=True) for t in here]

    def whole(self) -> bool:
        return all(t.unharmed() for t in self.targets)

    def puppet(self, command: str = "suspend") -> Puppet:
        return Puppet(self, self.nodes - 1, command)

    def close(self) -> None:
        for machine in self.machines:
            machine.close()


class Puppet:
    """A host without processes, which votes when the test says so."""

    def __init__(self, cluster: Cluster, node: int, command: str) -> None:
        self.cluster, self.node = cluster, node
        self.store, self.seal = cluster.store(), Seal(cluster.name)
        judged = {"suspend": judge.suspend, "resume": judge.resume}[command]
        me = {"host": "puppet", "machine": "puppet", "pid": 1, "start_ticks": 1}
        self.coordinator = Coordinator(command, cluster.nodes, node, me, lambda _: False, judged, lambda: f"puppet{time.monotonic_ns()}")

    def join(self, group: str = "") -> Body:
        info = {"already": bool(group), "group": group, "committed": False, "journal": [], "patience_s": 1.0}
        return self._drive(self.coordinator.join({**info, "pids": [], "ranks": []}, self._until()))

    def vote(self, step: str) -> Body:
        return self._drive(self.coordinator.vote(step, self._until()))

    def votes(self, *steps: str) -> None:
        for step in steps:
            verdict = self.vote(step)
            assert verdict["go"], verdict

    def give_up(self, step: str, *, held: bool) -> Body:
        """At *step* its deadline passes, and node 1 is not there; node 0 is."""
        self.wait_for_votes(step, 0)
        verdict = self._drive(self.coordinator.vote(step, 0.0, held=held))
        assert verdict["cause"]["missing"] == [1], verdict
        return verdict

    def wait_for_votes(self, step: str, *nodes: int) -> None:
        """Until every other host, or *nodes*, have voted for *step*, and wait for us."""
        until = self._until()
        for node in nodes or range(self.cluster.nodes):
            while node != self.node and self.store.get(f"{self.coordinator.id}.{step}.{node}") is None:
                assert time.monotonic() < until, f"node {node} does not come to {step}"
                time.sleep(0.005)

    def _until(self) -> float:
        return time.monotonic() + DEADLINE_S

    def _drive(self, steps: Steps[T]) -> T:
        answer: Any = None
        try:
            while True:
                match steps.send(answer):
                    case Get(key):
                        data = self.store.get(key)
                        answer = None if data is None else self.seal.open(key, data)
                    case Put(key, body):
                        answer = self.seal.open(key, self.store.compare_set(key, self.seal.close(key, body)))
                    case _:
                        time.sleep(0.005)
                        answer = Moment(time.monotonic(), 0)
        except StopIteration as e:
            return e.value


Step = Callable[[Cluster], None]


def waits(c: Cluster, node: int) -> None:
    place = c.path / "shared" / c.name
    eventually(
        lambda: place.is_dir() and any(p.name.endswith(f"inspect.{node}") for p in place.iterdir()), f"node {node} waits for the others"
    )
