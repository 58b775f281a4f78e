"""One machine in memory, with a clock of its own: what outlives every controller. GPUs, processes, driver calls under way, claims, records.

The driver's truth is :class:`Rules`; this adds time: a call takes seconds, waits for a busy target, hangs on a stopped one,
and goes on in the target when its caller is killed.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gpuckpt.driver.api import CallError
from gpuckpt.driver.simulated_rules import Rules, SimulatedGpu
from gpuckpt.journal import Record, counting
from gpuckpt.model import GIB, IMAGE_CALLS, Call, Outcome, ProcessId, State

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tests.memory_agents import Agent

QUICK_S = 0.01  # a lock or unlock
SLOW_S = 1.0  # a checkpoint or restore


@dataclass(frozen=True)
class Fault:
    """What is special about the *nth* call that a controller starts.

    ``result``: it fails with this, before or (*acted*) after its effect; "NO_CALLER": no caller comes to life.
    ``caller_dies_s``: its caller is killed so much later, and the call itself goes on in the target.
    """

    nth: int
    seconds: float | None = None
    result: str = ""
    acted: bool = False
    caller_dies_s: float | None = None


PLAIN = Fault(-1)


@dataclass(eq=False)
class Claim:
    """Held for as long as any holder is left: its controller, and the callers that inherited it."""

    machine: Machine
    keys: tuple[str, ...]
    holders: set[object]
    controller: object

    def release(self) -> None:
        self.drop(self.controller)

    def drop(self, holder: object) -> None:
        self.holders.discard(holder)
        if not self.holders:
            for key in self.keys:
                if self.machine.claims.get(key) is self:
                    del self.machine.claims[key]


@dataclass(eq=False)
class DriverCall:
    """A call, its caller, and the controller's end of their socket: implements :class:`gpuckpt.world.Pending`."""

    machine: Machine
    call: Call
    process: ProcessId
    controller: object
    fault: Fault = PLAIN
    timeout_s: float = 0.0
    gpu_map: Mapping[str, str] = field(default_factory=dict)
    initialise: bool = False
    claims: tuple[Claim, ...] = ()
    caller_pid: int = 0
    outcome: Outcome | None = None
    caller_alive: bool = True
    wanted: bool = True  # the controller still has its end of the socket
    granted: bool = False  # a lock that stands by until the controller decides
    begun: bool = False  # received by the target
    left_s: float = 0.0
    result: str = ""  # "NOT_READY": a lock that will not be granted
    turn: int = 0  # an end scheduled before the target was stopped is void
    image: Mapping[str, Any] = field(default_factory=dict)

    def keep(self) -> None:
        if self.granted:
            self.granted = False
            self._caller_ends()

    def release(self) -> None:
        self.wanted = False
        if self.call in (Call.STORE, Call.LOAD) and self.outcome is None:
            self.kill_caller()  # it gives up by itself
        if self.granted:
            self.granted = False
            self.machine.enqueue(DriverCall(self.machine, Call.UNLOCK, self.process, None, claims=self.claims, caller_pid=self.caller_pid))
            self._caller_ends()

    def kill_caller(self) -> None:
        if not self.caller_alive:
            return
        if self.outcome is None:
            self.outcome = Outcome("VANISHED")
        self.granted = False
        self._caller_ends()
        if not self.begun or self.call in (Call.STORE, Call.LOAD):
            self.machine.drop(self)  # a stopped target never received it; what is read and written its caller reads and writes

    def end(self, result: str) -> None:
        """The driver answers."""
        if not self.caller_alive:
            return
        self.outcome = Outcome(result, image=self.stored() if self.call is Call.STORE else None)
        if self.call is Call.LOCK and result == "SUCCESS" and self.controller is not None:
            self.granted = True
            if not self.wanted:
                self.release()
        else:
            self._caller_ends()

    def stored(self) -> dict[str, Any]:
        return {**self.image, "path": f"/images/{self.process}", "held": True, "nbytes": GIB, "inode": [1, self.process.pid]}

    def _caller_ends(self) -> None:
        self.caller_alive = False
        for claim in self.claims:
            claim.drop(self)


@dataclass
class Machine:
    rules: Rules
    clock: float = 0.0
    claims: dict[str, Claim] = field(default_factory=dict)
    records: dict[str, Record] = field(default_factory=dict)
    queues: dict[int, list[DriverCall]] = field(default_factory=dict)
    groups: dict[int, int] = field(default_factory=dict)  # pid -> number of its group
    agents: dict[int, Agent] = field(default_factory=dict)
    stopped: set[int] = field(default_factory=set)
    busy_until: dict[int, float] = field(default_factory=dict)
    may_be_lost: set[int] = field(default_factory=set)  # by a failure that the schedule put there
    wrongs: list[str] = field(default_factory=list)  # what must never happen, and did
    files: dict[int, str] = field(default_factory=dict)  # pid -> the operation that wrote its image, whole, to disk
    dropped: set[int] = field(default_factory=set)  # whose image is not in memory
    journal_full: bool = False
    blind: bool = False  # NVML answers nothing but errors
    host_short: bool = False  # the image of whoever would be suspended does not fit into host memory
    takers: int = 0
    grabbed: set[str] = field(default_factory=set)  # GPUs that somebody filled after the last look at them
    idle: set[object] = field(default_factory=set)  # controllers that wait for room just now
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _serial: Any = field(default_factory=itertools.count)

    @classmethod
    def of(cls, gpus: int, gpu_gib: int) -> Machine:
        return cls(Rules.of([SimulatedGpu(f"GPU-{i}", i, total_bytes=gpu_gib * GIB) for i in range(gpus)]))

    # Time.

    def at(self, after_s: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.clock + after_s, next(self._serial), do))

    def run(self, until: float, done: Callable[[], bool] = lambda: False) -> None:
        """Let time pass until *done*, at most to *until* (infinite: until nothing is due any more)."""
        while not done():
            if not self._events or self._events[0][0] > until:
                if until < math.inf:
                    self.clock = max(self.clock, until)
                return
            due, _, do = heapq.heappop(self._events)
            self.clock = max(self.clock, due)
            do()

    def counting(self) -> list[Record]:
        """The journal as every command reads it."""
        return counting(sorted(self.records.values(), key=lambda r: r.id))

    # Driver calls.

    def enqueue(self, call: DriverCall) -> None:
        """Calls on one process wait for one another."""
        for claim in call.claims:
            claim.holders.add(call)
        if call.fault.caller_dies_s is not None:
            self.at(call.fault.caller_dies_s, call.kill_caller)
        queue = self.queues.setdefault(call.process.pid, [])
        queue.append(call)
        if len(queue) == 1:
            self._begin(call)

    def drop(self, call: DriverCall) -> None:
        queue = self.queues.get(call.process.pid, [])
        if call in queue:
            first = queue[0] is call
            queue.remove(call)
            if first and queue:
                self._begin(queue[0])

    def under_way(self, pid: int) -> bool:
        return bool(self.queues.get(pid))

    def restoring(self, uuid: str) -> list[DriverCall]:
        """Restores in flight onto a GPU."""
        found = []
        for queue in self.queues.values():
            for call in queue:
                process = self.rules.processes.get(call.process.pid)
                if call.call is Call.RESTORE and process and uuid in {call.gpu_map.get(u, u) for u in process.held_bytes}:
                    found.append(call)
        return found

    def _begin(self, call: DriverCall) -> None:
        pid = call.process.pid
        call.left_s = SLOW_S if call.call in (Call.CHECKPOINT, Call.RESTORE, Call.STORE, Call.LOAD) else QUICK_S
        if call.call is Call.LOAD and pid not in self.dropped:
            call.left_s = QUICK_S
        if call.fault.seconds is not None:
            call.left_s = call.fault.seconds
        if call.call is Call.LOCK and pid in self.rules.processes and self.rules.processes[pid].state is State.RUNNING:
            drain_s = max(call.left_s, self.busy_until.get(pid, 0.0) - self.clock)
            call.result = "" if drain_s <= call.timeout_s else "NOT_READY"
            call.left_s = min(drain_s, call.timeout_s)
        if pid not in self.stopped:
            self._go_on(call)

    def _go_on(self, call: DriverCall) -> None:
        call.begun = True
        turn = call.turn
        due = self.clock + call.left_s
        self.at(call.left_s, lambda: self._end(call) if call.turn == turn else None)
        call.left_s = due

    def _end(self, call: DriverCall) -> None:
        if call not in self.queues.get(call.process.pid, []):
            return
        try:
            self._act(call)
            result = "SUCCESS"
        except CallError as e:
            result = e.result
        self.drop(call)
        call.end(result)

    def _act(self, call: DriverCall) -> None:
        pid, rules = call.process.pid, self.rules
        failure = call.result or call.fault.result
        if failure and not call.fault.acted:
            process = rules.check(Call.RESTORE if call.call in IMAGE_CALLS else call.call, pid)
            if call.call is Call.RESTORE and pid not in self.dropped:
                process.lost = True
                self.may_be_lost.add(pid)
            raise CallError(call.call, failure)
        if call.call in IMAGE_CALLS:
            self._move(call)
        elif call.call is Call.RESTORE:
            if pid in self.dropped:
                self.wrongs.append(f"restore of {pid} while its image is on disk")
                raise CallError(call.call, "UNKNOWN")
            rules.restore(pid, call.gpu_map, initialise=call.initialise)
            self.files.pop(pid, None)
        else:
            {Call.LOCK: rules.lock, Call.CHECKPOINT: rules.checkpoint, Call.UNLOCK: rules.unlock}[call.call](pid)
        if failure:
            raise CallError(call.call, failure)

    def _move(self, call: DriverCall) -> None:
        """Its image between memory and disk."""
        pid, operation = call.process.pid, call.image.get("operation", "")
        self.rules.check(Call.RESTORE, pid)
        if call.call is Call.STORE:
            if pid in self.dropped:
                self.wrongs.append(f"the image of {pid} is written from memory that it is not in")
            self.files[pid] = operation
        elif self.files.get(pid) != operation:
            if call.call is Call.DROP or pid in self.dropped:
                self.wrongs.append(f"{call.call} of {pid} with a file that is not its image's")
        elif call.call is Call.DROP:
            self.dropped.add(pid)
        else:
            self.dropped.discard(pid)

    # What happens outside.

    def stop(self, pid: int) -> None:
        if pid in self.rules.processes and pid not in self.stopped:
            self.stopped.add(pid)
            for call in self.queues.get(pid, [])[:1]:
                call.turn += 1
                call.left_s = max(0.0, call.left_s - self.clock)

    def cont(self, pid: int) -> None:
        if pid in self.stopped:
            self.stopped.discard(pid)
            for call in self.queues.get(pid, [])[:1]:
                self._go_on(call)

    def die(self, pid: int) -> None:
        self.dropped.discard(pid)
        self.files.pop(pid, None)
        self.rules.forget(pid)
        self.stopped.discard(pid)
        for call in list(self.queues.pop(pid, [])):
            call.end("OPERATING_SYSTEM")

    def kill_callers(self, pid: int) -> None:
        for call in list(self.queues.get(pid, [])):
            call.kill_caller()

    def may_allocate(self, uuid: str) -> bool:
        """Nobody else allocates between a restore's last look at its GPU and its end: nothing could be done about that."""
        claim = self.claims.get(f"gpu {uuid}")
        looked = claim is not None and claim.controller not in self.idle
        return not looked and not self.restoring(uuid)

    def take(self, uuid: str, leave_gib: int) -> None:
        """Somebody else takes room."""
        nbytes = self.rules.free(uuid) - leave_gib * GIB
        if nbytes > 0 and self.may_allocate(uuid):
            self.takers += 1
            self.rules.register(9000 + self.takers, 1, {uuid: nbytes})

    def grab(self, uuid: str, leave_gib: int) -> None:
        """As ``take``, at whatever moment: what is restored onto it meanwhile is lost, and nobody can help it."""
        nbytes = self.rules.free(uuid) - leave_gib * GIB
        if nbytes > 0 and not self.may_allocate(uuid):
            self.grabbed.add(uuid)
            self.may_be_lost |= {pid for pid, p in self.rules.processes.items() if uuid in p.held_bytes and not p.on_gpu}
            self.takers += 1
            self.rules.register(9000 + self.takers, 1, {uuid: nbytes})
        else:
            self.take(uuid, leave_gib)

    def free(self, uuid: str) -> None:
        self.grabbed.discard(uuid)
        for pid, process in list(self.rules.processes.items()):
            if pid > 9000 and uuid in process.held_bytes:
                self.rules.forget(pid)

    def mend(self) -> None:
        """What a user does after trouble: stopped processes go on, GPUs are free and answer, the disk has space; what is under way ends."""
        for pid in list(self.stopped):
            self.cont(pid)
        for uuid, gpu in self.rules.gpus.items():
            self.free(uuid)
            gpu.memory_query = "ok"
        self.journal_full = self.host_short = self.blind = False
        self.run(math.inf)

    def state(self, pid: int) -> State:
        """The driver's word, and while it runs its agent's."""
        state = self.rules.processes[pid].state
        return self.agents[pid].stage if state is State.RUNNING and self.has_agent(pid) else state

    def has_agent(self, pid: int) -> bool:
        """Whether it has an agent that answers."""
        return pid in self.agents and not self.agents[pid].lost

    def note_agent(self, call: DriverCall) -> None:
        """A process is about to be locked or checkpointed: its agent must have made it ready."""
        agent = self.agents.get(call.process.pid)
        if agent and agent.stage is not State.DISARMED and call.process.pid in self.rules.processes:
            self.wrongs.append(f"{call.call} of {call.process} while its agent says {agent.stage}")

    def note_restore(self, call: DriverCall) -> None:
        """A restore is about to be called: is there room, and nobody else at it?"""
        process = self.rules.processes.get(call.process.pid)
        if process is None or process.state is not State.CHECKPOINTED or process.lost:
            return
        for old, nbytes in process.held_bytes.items():
            uuid = call.gpu_map.get(old, old)
            others = self.restoring(uuid)
            if any(c.controller is not call.controller for c in others):
                self.wrongs.append(f"two controllers restore onto {uuid} at once")
            coming = sum(self.rules.processes[c.process.pid].held_bytes.get(old, 0) for c in others)
            if self.rules.free(uuid) - coming < nbytes and uuid not in self.grabbed:
                self.wrongs.append(f"restore of {call.process} without room on {uuid}")
