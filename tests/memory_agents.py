"""Agents in memory: each holds its process at a stage for one controller, and goes back by itself when that one is gone too early."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuckpt import plan
from gpuckpt.agent.protocol import MOVES
from gpuckpt.model import Call, Outcome, ProcessId, State

if TYPE_CHECKING:
    from tests.memory_machine import Fault, Machine

QUICK_S = 0.01
EARLY = (State.QUIESCED, State.COMMS_SUSPENDED)  # a controller that is gone now is not waited for


@dataclass(eq=False)
class AgentCall:
    """Implements :class:`gpuckpt.world.Pending`."""

    call: Call
    process: ProcessId
    caller_pid: int = 0
    outcome: Outcome | None = None

    def keep(self) -> None: ...

    def release(self) -> None: ...


@dataclass(eq=False)
class Agent:
    machine: Machine
    pid: int
    stage: State = State.RUNNING
    owner: object = None
    working: AgentCall | None = None
    lost: bool = False  # its thread ended, or its socket is gone: nobody hears it, and its program stays where it is

    @property
    def unsettled(self) -> bool:
        """At work, or on its way back from a controller that is gone."""
        return not self.lost and (self.working is not None or (self.owner is None and self.stage in EARLY))

    def refusal(self, call: Call, controller: object) -> str:
        if self.lost:
            return "agent:VANISHED"
        needs, _ = MOVES[call]
        if self.working or self.stage is not needs or (self.owner not in (None, controller) and call is not Call.ARM):
            return "agent:ILLEGAL_STATE"
        return ""

    def ask(self, asked: AgentCall, controller: object, fault: Fault, timeout_s: float) -> None:
        if why := self.refusal(asked.call, controller):
            asked.outcome = Outcome(why)
            return
        self.owner, self.working = controller, asked
        seconds, late = fault.seconds or QUICK_S, bool(fault.result)
        if asked.call is Call.QUIESCE:
            late = late or seconds > timeout_s
            seconds = min(seconds, timeout_s)
        elif asked.call in (Call.DISARM, Call.ARM, Call.UNQUIESCE):
            self._end(asked, failed=False)  # the agent's own thread, which nothing holds up
            return
        self.machine.at(seconds, lambda: self._end(asked, late))

    def vanish(self) -> None:
        """Whoever waits for it finds its connection closed."""
        self.lost = True
        if self.stage is not State.RUNNING:
            self.machine.may_be_lost |= set(self.machine.agents)  # its program stands where it is, and the others wait for it
        if self.working is not None:
            self.working.outcome = Outcome("agent:VANISHED")
            self.working = None

    def lose(self, controller: object) -> None:
        """The connection of *controller* closed."""
        if self.owner is controller:
            self.owner = None
            if self.working is None:
                self._go_back()

    def _end(self, asked: AgentCall, failed: bool) -> None:
        process = self.machine.rules.processes.get(self.pid)
        if self.lost:
            return
        self.working = None
        if process is None:
            asked.outcome = Outcome("agent:VANISHED")
            return
        if asked.call in (Call.COMMS, Call.COMMS_RESUME):
            if process.state is not State.RUNNING:
                self.machine.wrongs.append(f"{asked.call} in pid {self.pid} while it is {process.state}")
            failed = failed or process.lost
            if failed:
                process.lost = True  # its communicators are
                self.machine.may_be_lost.add(self.pid)
        if asked.call is Call.UNQUIESCE and process.lost:
            self.stage, failed = State.RUNNING, True  # it goes on, and says what is wrong with it
        if failed:
            asked.outcome = Outcome("agent:NOT_READY" if asked.call is Call.QUIESCE else "agent:FAILED")
            self.owner = None if asked.call is Call.QUIESCE else self.owner
        else:
            self.stage = plan.RESULT[asked.call]
            asked.outcome = Outcome("SUCCESS")
        if self.owner is None:
            self._go_back()

    def _go_back(self) -> None:
        process = self.machine.rules.processes.get(self.pid)
        if self.stage in EARLY and not self.lost and not (process and process.lost):  # with broken communicators it waits, to be heard
            self.machine.at(QUICK_S, self._gone_back)

    def _gone_back(self) -> None:
        if self.owner is None and self.stage in EARLY and not self.lost:
            self.stage = State.RUNNING
