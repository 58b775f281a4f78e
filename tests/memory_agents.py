"""Agents in memory: each holds its process at a stage for one controller, and goes back by itself when that one is gone too early."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuckpt.agent.protocol import MOVES, leads_to
from gpuckpt.driver.api import CallError
from gpuckpt.model import Call, Movable, Outcome, ProcessId, State

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.memory_machine import Fault, Machine

QUICK_S = 0.01
EARLY = (State.QUIESCED, State.OFFLOADED, State.COMMS_SUSPENDED)  # a controller that is gone now is not waited for


@dataclass(eq=False)
class AgentCall:
    """Implements :class:`gpuckpt.world.Pending`."""

    call: Call
    process: ProcessId
    caller_pid: int = 0
    outcome: Outcome | None = None

    give_up: Callable[[], None] = lambda: None

    def keep(self) -> None: ...

    def release(self) -> None:
        if self.call is Call.QUIESCE and self.outcome is None:
            self.give_up()


@dataclass(eq=False)
class Agent:
    machine: Machine
    pid: int
    stage: State = State.RUNNING
    pool_bytes: int = 0
    offloaded: bool = False  # they are in host memory
    owner: object = None
    working: AgentCall | None = None
    stuck: bool = False  # it went back by itself as far as there was room
    lost: bool = False  # its thread ended, or its socket is gone: nobody hears it, and its program stays where it is

    @property
    def unsettled(self) -> bool:
        """At work, or on its way back from a controller that is gone."""
        return not self.lost and (self.working is not None or (self.owner is None and self.stage in EARLY and not self.stuck))

    @property
    def movable(self) -> Movable | None:
        return Movable(self.pool_bytes) if self.pool_bytes and self.stage is State.RUNNING else None

    def refusal(self, call: Call, controller: object) -> str:
        if self.lost:
            return "agent:VANISHED"
        if self.working or self.stage not in MOVES[call][0] or (self.owner not in (None, controller) and call is not Call.ARM):
            return "agent:ILLEGAL_STATE"
        return ""

    def ask(self, asked: AgentCall, controller: object, fault: Fault, timeout_s: float) -> None:
        if why := self.refusal(asked.call, controller):
            asked.outcome = Outcome(why)
            return
        self.owner, self.working, self.stuck = controller, asked, False
        asked.give_up = lambda: self.lose(controller)
        seconds, late = fault.seconds or QUICK_S, bool(fault.result)
        if asked.call is Call.QUIESCE:
            late = late or seconds > timeout_s
            seconds = min(seconds, timeout_s)
        elif asked.call in (Call.DISARM, Call.ARM, Call.UNQUIESCE):
            self._end(asked, failed=False)  # the agent's own thread, which nothing holds up
            return
        self.machine.at(seconds, lambda: self._end(asked, late, half_way=fault.acted))

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

    def _end(self, asked: AgentCall, failed: bool, half_way: bool = False) -> None:
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
        if asked.call is Call.OFFLOAD and (half_way or not failed):
            self._release()
        elif asked.call is Call.ONLOAD and not failed:
            failed = not self._take_back()
        if asked.call is Call.UNQUIESCE and process.lost:
            self.stage, failed = State.RUNNING, True  # it goes on, and says what is wrong with it
        if failed:
            asked.outcome = Outcome("agent:NOT_READY" if asked.call is Call.QUIESCE else "agent:FAILED")
            self.owner = None if asked.call is Call.QUIESCE else self.owner
        else:
            self.stage = leads_to(asked.call, self.offloaded)
            asked.outcome = Outcome("SUCCESS", moved={"kept_bytes": self.pool_bytes, "dropped_bytes": 0})
        if self.owner is None:
            self._go_back()

    def _release(self) -> None:
        if self.machine.rules.processes[self.pid].state is not State.RUNNING:
            self.machine.wrongs.append(f"offload of {self.pid} while the driver has it")
        self.machine.rules.release(self.pid, self.pool_bytes)
        self.stage, self.offloaded = State.OFFLOADED, True

    def _take_back(self) -> bool:
        """Whether there was room; its process is quiesced then."""
        try:
            self.machine.rules.alloc(self.pid, self.pool_bytes)
        except CallError as e:
            if e.result != "OUT_OF_MEMORY":
                self.machine.wrongs.append(f"onload of {self.pid}: {e.result}")
            return False
        self.stage, self.offloaded = State.QUIESCED, False
        return True

    def _go_back(self) -> None:
        process = self.machine.rules.processes.get(self.pid)
        if self.stage in EARLY and not self.lost and not (process and process.lost):  # with broken communicators it waits, to be heard
            self.machine.at(QUICK_S, self._gone_back)

    def _gone_back(self) -> None:
        if self.owner is None and self.stage in EARLY and not (self.lost or self.working) and self.pid in self.machine.rules.processes:
            self.stuck = self.offloaded and not self._take_back()
            self.stage = State.OFFLOADED if self.stuck else State.RUNNING
