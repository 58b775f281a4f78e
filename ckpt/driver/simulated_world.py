"""A simulated machine as a document: who holds what (:class:`Rules`), which driver calls are under way, and which are to fail."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, field

from gpuckpt.driver.simulated_proc import look, now_s
from gpuckpt.driver.simulated_rules import Rules, SimulatedProcess
from gpuckpt.model import GIB, Call, State

FIXED_S = 0.003  # of every checkpoint and restore
SUCCESS = "SUCCESS"


class StateLostError(Exception):
    """A CUDA call of a process whose GPU state is gone."""


@dataclass
class Operation:
    """A driver call under way. Times are seconds of :func:`now_s`; those during which the target is stopped do not count."""

    id: str
    call: Call
    pid: int
    start_ticks: int
    owner_pid: int
    owner_ticks: int
    due_s: float
    deadline_s: float  # of a lock
    gpu_map: dict[str, str] = field(default_factory=dict)
    initialise: bool = False
    received: bool = False  # by the target: what a stopped target never received dies with the caller
    paused_s: float | None = None  # since when the target is seen stopped
    result: str | None = None  # for the caller to fetch; None while under way


@dataclass
class Fault:
    """What goes wrong at the next *times* matching calls; *call* may also be "state".

    ``delay_s`` first, then ``hang`` for ever, then ``result`` is raised: without acting (*before*) or after the call was made.
    """

    call: str
    pid: int | None = None
    result: str | None = None
    hang: bool = False
    delay_s: float = 0.0
    times: int = 1
    before: bool = True

    def meant(self, call: str, pid: int) -> bool:
        return self.call == call and self.pid in (None, pid) and self.times > 0


@dataclass
class World:
    """What ``machine.json`` says, inside a transaction."""

    rules: Rules
    seconds_per_gib: float = 0.0  # of checkpoint and restore
    operations: list[Operation] = field(default_factory=list)

    def under_way(self, pid: int) -> list[Operation]:
        return [o for o in self.operations if o.pid == pid and o.result is None]

    def begin(
        self, call: Call, process: SimulatedProcess, timeout_s: float = 0.0, gpu_map: dict[str, str] | None = None, initialise: bool = False
    ) -> Operation:
        """Put a call of ours under way: due at once, but for the work of a checkpoint or restore."""
        due = now_s()
        if process.state is {Call.CHECKPOINT: State.LOCKED, Call.RESTORE: State.CHECKPOINTED}.get(call):
            due += FIXED_S + self.seconds_per_gib * sum(process.held_bytes.values()) / GIB
        me = os.getpid()
        owner = look(me) or ("", 0)
        op = Operation(
            os.urandom(8).hex(), call, process.pid, process.start_ticks, me, owner[1], due, due + timeout_s, gpu_map or {}, initialise
        )
        self.operations.append(op)
        return op

    def to_text(self) -> str:
        operations = [dataclasses.asdict(o) for o in self.operations]
        return json.dumps({**self.rules.to_json(), "seconds_per_gib": self.seconds_per_gib, "operations": operations}, indent=1)

    @classmethod
    def from_text(cls, text: str) -> World:
        data = json.loads(text)
        operations = [Operation(**{**o, "call": Call(o["call"])}) for o in data.get("operations", [])]
        return cls(Rules.from_json(data, alive=lambda pid: look(pid) is not None), data.get("seconds_per_gib", 0.0), operations)
