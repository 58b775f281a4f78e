"""The state of a run, and its one writer: orders come from the gate, the idle clock, the control socket and signals, and are carried
out here one at a time, in the order in which they came.

=========== ==================================== ==================================== ===============================
state       suspend                              resume                               stop
=========== ==================================== ==================================== ===============================
STARTING    refused                              waits in the gate, refused else      TERM, grace, KILL
AWAKE       drain, sleep, checkpoint             done already                         TERM, grace, KILL
DRAINING    joins the one under way              after it                             TERM, grace, KILL
SUSPENDING  joins the one under way              after it                             back first, then TERM; else KILL
SUSPENDED   done already                         restore, wake up, health             KILL: the GPU may be full
RESUMING    after it                             joins the one under way              back first, then TERM; else KILL
FAILED      refused                              tried again                          KILL
STOPPING    refused                              refused                              KILL
ENDED       refused                              refused                              nothing
=========== ==================================== ==================================== ===============================
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from gpuckpt import errors
from gpuckpt.errors import GpuckptError
from gpuckpt.inspect import processes
from gpuckpt.model import Report
from gpuckpt.supervisor.child import Child
from gpuckpt.supervisor.holdings import Holdings
from gpuckpt.supervisor.keeper import DEATH_S
from gpuckpt.supervisor.mishaps import known, tell_safely, words_of
from gpuckpt.supervisor.model import Policy, RunState, Server
from gpuckpt.supervisor.order import Order
from gpuckpt.supervisor.probe import Probe
from gpuckpt.supervisor.rehearsal import HEALTH_POLL_S, Rehearsal, woken
from gpuckpt.supervisor.room import Finder, nothing_to_ask
from gpuckpt.supervisor.traffic import Traffic

log = logging.getLogger("gpuckpt.run")

#: How long a stop waits for an operation to go back, in seconds. It is killed as it is then.
GO_BACK_S = 20.0
_NOT_BEGUN = (errors.Interrupted, errors.Leased)  # a resume that was given up before it touched anything
#: A process that closed its connections because it dies is gone within this time, in seconds.
DYING_S = 0.1
#: How long a server may take at least to end what no client waits for any more, in seconds. That of a client that has left ends at once,
#: but vLLM's data-parallel engines agree only each 32 steps that they are done.
FINISH_S = 3.0


class Run:
    """One supervised child. ``changed`` is called after each change of state."""

    def __init__(self, child: Child, server: Server, traffic: Traffic, policy: Policy) -> None:
        self.child, self.server, self.traffic, self.policy = child, server, traffic, policy
        self.state = RunState.STARTING
        self.since = time.monotonic()
        self.killed_for: int | None = None  # the signal for whose sake a suspended child was killed
        self.told_to_stop = False  # by a person, or by what started us
        self.resume_s = 0.0  # what the last resume took
        self.last_error: GpuckptError | None = None
        self.lost: asyncio.Future[GpuckptError] = asyncio.get_running_loop().create_future()
        self.changed: list[Callable[[RunState], None]] = []
        self.finished: list[Callable[[str, str, Report | GpuckptError, float], None]] = []  # command, reason, outcome, seconds
        self._orders: asyncio.Queue[Order] = asyncio.Queue()
        self._last: Order | None = None
        self._current: asyncio.Task[Report] | None = None
        self.holdings = Holdings(child.pid, timeout_s=policy.timeout_s, accept=policy.accept, keep_in=policy.keep_in, method=policy.method)
        self.holds: dict[object, str] = {}  # who keeps it from its GPUs, in words: until they let go it is not resumed
        self.wants_since: float | None = None  # when the resume that is under way was asked for
        self.turn: Callable[[], Awaitable[bool]] | None = None  # of a run that shares: whether it may take its GPUs now
        self.make_room: Callable[[], Awaitable[None]] = nothing_to_ask  # and what it does when they are full
        self.probe: Probe | None = None
        self.find: Callable[[], Awaitable[RunState]] | None = None  # of a child that was adopted: in what state it is
        self._news = asyncio.Event()
        traffic.wanted = self.want_awake
        self._tasks: list[asyncio.Task[None]] = []
        for part in (self._start(), self._carry_out(), self._end()):
            self.stand_by(part)

    def stand_by(self, part: Coroutine[Any, Any, None]) -> None:
        """Keep *part* going until the run is closed. Should it break, the run ends: half of a supervisor is worse than none."""
        task = asyncio.create_task(part)
        task.add_done_callback(self._part_ended)
        self._tasks.append(task)

    def _part_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a part of the supervisor broke", exc_info=error)
            self.give_up(GpuckptError(f"a part of the supervisor broke: {words_of(error)}"))

    def give_up(self, error: GpuckptError) -> None:
        """The run cannot go on: whoever waits for :attr:`lost` ends it."""
        self.traffic.fail(error, for_good=True)
        if not self.lost.done():
            self.lost.set_result(error)

    # Orders.

    async def suspend(self, reason: str, drain_s: float | None = None) -> Report:
        """Free the GPUs. See the table above; raises a :class:`GpuckptError` where it was not done."""
        return await self._order("suspend", reason, self.policy.drain_s if drain_s is None else drain_s)

    async def resume(self, reason: str) -> Report:
        """Have the server serve again."""
        return await self._order("resume", reason, 0.0)

    def want_awake(self) -> None:
        """A request waits."""
        waking = self._last is not None and self._last.kind == "resume" and not self._last.done.done()
        if self.state is RunState.STARTING or waking or self.holds:
            return
        order = self._enqueue("resume", "request", 0.0)
        order.done.add_done_callback(lambda f: f.cancelled() or f.exception())  # those who wait are told through the door

    async def stop(self, signum: int = signal.SIGTERM) -> None:
        """End the child. Asked again: at once."""
        if self.over:
            self.child.kill()
            return
        was = self.state
        self._enter(RunState.STOPPING)
        self.traffic.fail(errors.RunNotReady("the server is being stopped"), for_good=True)
        if self._current is not None:
            if self.holdings.interrupt():
                await asyncio.wait({self._current}, timeout=GO_BACK_S)
            else:
                self._current.cancel()
                await asyncio.wait({self._current}, timeout=1.0)
        if self.holdings.down:
            log.info("stopping: it was %s, so it is killed without being restored", was)
            self.killed_for = signum
            self.child.kill()
        else:
            self.child.stop(self.policy.grace_s, signum)

    @property
    def over(self) -> bool:
        """Whether it is being stopped, or has ended."""
        return self.state in (RunState.STOPPING, RunState.ENDED)

    async def until(self, *states: RunState) -> None:
        while self.state not in states:
            self._news.clear()
            await self._news.wait()

    async def close(self) -> None:
        doomed = [*self._tasks, *([self._current] if self._current else [])]
        for task in doomed:
            task.cancel()
        await asyncio.gather(*doomed, return_exceptions=True)
        await self.holdings.close()

    async def _order(self, kind: str, reason: str, drain_s: float) -> Report:
        last = self._last
        if last is not None and last.kind == kind and not last.done.done():
            return await asyncio.shield(last.done)
        return await asyncio.shield(self._enqueue(kind, reason, drain_s).done)

    def _enqueue(self, kind: str, reason: str, drain_s: float) -> Order:
        self._last = Order(kind, reason, drain_s)
        self._orders.put_nowait(self._last)
        return self._last

    # The writer.

    async def _carry_out(self) -> None:
        while True:
            order = await self._orders.get()
            work = self._suspend(order) if order.kind == "suspend" else self._resume(order)
            begun = time.monotonic()
            self._current = asyncio.create_task(work)
            await asyncio.wait({self._current})
            task, self._current = self._current, None
            error = errors.RunNotReady("the run is being stopped") if task.cancelled() else task.exception()
            if error is None:
                report = order.told(task.result())
                if not report.already:
                    self._tell(order, report, begun)
                if not order.done.done():
                    order.done.set_result(report)
                continue
            error = known(error)
            if not isinstance(error, (errors.RunNotReady, *_NOT_BEGUN)):
                self._tell(order, error, begun)
            if not order.done.done():
                order.done.set_exception(error)
                order.done.exception()  # nobody need be listening
            if isinstance(error, _NOT_BEGUN) and self.traffic.waiting and not self.over:
                self.want_awake()  # for somebody who came as it was given up

    async def _suspend(self, order: Order) -> Report:
        if self.state is RunState.SUSPENDED and self.holdings.down:
            return Report("suspend", True, False, already=True)
        if self.state not in (RunState.AWAKE, RunState.SUSPENDED):
            raise errors.RunNotReady(
                f"the run is {self.state}: it cannot be suspended now", hint="gpuckpt status NAME tells when it is awake"
            )
        slept = self.state is RunState.SUSPENDED  # the last suspend failed, and there was no room for it to wake up
        try:
            if not slept:
                with order.step("drain"):
                    await self._drain(order)
                    slept = True
                    await self._finish(order)
                self._enter(RunState.SUSPENDING)
                await self.holdings.get_ready()  # while the server goes to sleep
                with order.step("sleep"):
                    await self.holdings.sleep(self.server)
            report = await self.holdings.suspend()
        except errors.RunNotReady:
            raise
        except Exception as e:  # noqa: BLE001 - whatever it was, it goes back
            error = self.last_error = known(e)
            if self.state is not RunState.AWAKE:
                await self._back(error, slept)
            raise error from None
        finally:
            await self.holdings.let_go()
        self.last_error = None
        self._enter(RunState.SUSPENDED)
        if self.traffic.waiting:
            self.want_awake()
        await self.holdings.get_ready()
        return report

    async def _drain(self, order: Order) -> None:
        """Return with the door closed and nobody inside. What will be refused in any case is refused while requests still run: the
        server is not put to sleep for nothing, which would cost it its cache."""
        begun = time.monotonic()
        await self.holdings.check()
        if self.over:
            raise errors.RunNotReady(f"the run is {self.state}")
        if order.reason == "idle" and (self.traffic.running or self.traffic.last_end > begun):
            raise errors.RunNotReady("a request came: it is not idle any more")
        self.traffic.close()
        self._enter(RunState.DRAINING)
        if not await self.traffic.quiet(order.drain_s):
            raise errors.StillServing(
                f"{self.traffic.running} requests were still running after {order.drain_s:g} s; the server was left awake",
                hint="wait for them, or give a longer --drain",
            )

    async def _finish(self, order: Order) -> None:
        """Return when the server has nothing more to do, of what no client waits for either."""
        within_s = max(FINISH_S, self.since + order.drain_s - time.monotonic())
        if not await self.server.quiet(within_s):
            raise errors.StillServing(
                f"the server was still at work after {within_s:.0f} s, for clients that have left or ask later; it was not suspended",
                hint="wait for it, or give a longer --drain",
            )

    async def _back(self, cause: GpuckptError, slept: bool) -> None:
        """After a suspend that did not come about: serve again, if the child is as it was found."""
        if self.over:
            return
        if self.holdings.down:
            self._fail(cause)
            return
        try:
            if slept:
                await self.holdings.room()
                await woken(self.server, gone=self.holdings.gone)
        except errors.ServerRefused as e:
            cause.add_note(f"and then it did not wake up: {e.message}")
            self._fail(e)
        except Exception as e:  # noqa: BLE001 - whatever it was, it sleeps on
            why = "since another took what it had left" if isinstance(e, errors.Refused) else "and the next request tries again"
            cause.add_note(f"and it sleeps on, {why}: {known(e).message}")
            self._enter(RunState.SUSPENDED)
            if self.traffic.waiting:
                self.want_awake()
        else:
            self._awake()

    async def _resume(self, order: Order) -> Report:
        if self.state is RunState.AWAKE:
            return Report("resume", True, False, already=True)
        if self.state not in (RunState.SUSPENDED, RunState.FAILED):
            raise errors.RunNotReady(f"the run is {self.state}: it cannot be resumed now", hint="gpuckpt status NAME")
        begun = time.monotonic()
        self.wants_since = order.asked
        self._enter(RunState.RESUMING)
        finder = Finder(lambda: self.unwanted(order), self.make_room)
        try:
            await finder.come_to_turn(self.turn)
            async with finder:
                bring = self.holdings.resume if self.holdings.down else self.holdings.room
                report = await bring(self.traffic.hold_s, finder.worker)
            with order.step("wake"):
                await woken(self.server, gone=self.holdings.gone)
            if self.policy.probe and self.probe is not None:
                with order.step("probe"):
                    await self.probe.check()
        except (errors.Interrupted, errors.Leased):
            if finder.waits:
                words = f"{finder.waits}, until nobody wanted it awake any more; it stays suspended, intact"
                self.last_error = errors.GpuMemory(words, hint="free the GPU; the next request tries again")
            self._enter(RunState.SUSPENDED)  # it had not begun: who waits for it goes on waiting
            raise
        except Exception as e:  # noqa: BLE001 - whatever it was, it stays suspended
            error = self.last_error = known(e)
            await self._told_if_dead()
            if isinstance(error, errors.ServerRefused | errors.WrongAnswer) or (self.holdings.down and error.exit_code == 3):
                self._fail(error)
            else:
                self._enter(RunState.SUSPENDED)
                self.traffic.fail(error)
            raise error from None
        finally:
            self.wants_since = None
            await self.holdings.let_go()
        self.resume_s = time.monotonic() - begun
        self._awake()
        return report

    def unwanted(self, order: Order) -> str:
        """Why a resume that has not begun to restore should not; "" if it should."""
        if self.holds:
            return f"its GPUs are held: {next(iter(self.holds.values()))}"
        return "whoever asked for it has left" if order.reason == "request" and not self.traffic.waiting else ""

    async def _told_if_dead(self) -> None:
        """Where a failure may be the child's death, wait for its keeper's word: that is the better reason to give."""
        await asyncio.sleep(DYING_S)
        if processes.read(self.child.pid) is None:
            await asyncio.wait({self.child.exited}, timeout=DEATH_S)

    def _awake(self) -> None:
        self._enter(RunState.AWAKE)
        if not self.over:
            self.traffic.open()

    def _fail(self, error: GpuckptError) -> None:
        self._enter(RunState.FAILED)
        self.traffic.fail(error)
        if isinstance(error, errors.Lost):
            self.give_up(error)

    def _enter(self, state: RunState) -> None:
        if self.state is RunState.ENDED or (self.state is RunState.STOPPING and state is not RunState.ENDED):
            return  # these are left for nothing else
        self.state, self.since = state, time.monotonic()
        self._news.set()
        for tell in self.changed:
            tell_safely(tell, state)

    def _tell(self, order: Order, outcome: Report | GpuckptError, begun: float) -> None:
        for tell in self.finished:
            tell_safely(tell, order.kind, order.reason, outcome, time.monotonic() - begun)

    # Beginning and end.

    async def _start(self) -> None:
        try:
            if self.find is not None and await self.find() is RunState.SUSPENDED:
                self._enter(RunState.SUSPENDED)
                if self.traffic.waiting:
                    self.want_awake()
                return
        except GpuckptError as e:
            self.last_error, self.holdings.down = e, True
            self._fail(e)
            return
        while not await self.server.healthy():
            await asyncio.sleep(HEALTH_POLL_S)
        rehearsal = Rehearsal(self.holdings, self.server, self.probe, lambda: self.over)
        wanted = self.policy.rehearse if self.find is None else False  # one that was adopted has been through it
        self._current = asyncio.create_task(rehearsal.hold(wanted, probes=self.policy.probe))
        await asyncio.wait({self._current})
        task, self._current = self._current, None
        if self.over or task.cancelled():
            return
        if (error := task.exception()) is not None:
            self._fail(known(error))
            self.give_up(known(error))
            return
        if self.state is RunState.STARTING:
            self._awake()

    async def _end(self) -> None:
        code = await asyncio.shield(self.child.exited)
        was = self.state
        self._enter(RunState.ENDED)
        self.traffic.fail(errors.RunNotReady(f"the server ended with exit code {code} while it was {was}"), for_good=True)
        if not self.holdings.interrupt() and self._current is not None:
            self._current.cancel()
        while not self._orders.empty():
            order = self._orders.get_nowait()
            with contextlib.suppress(asyncio.InvalidStateError):
                order.done.set_exception(errors.RunNotReady("the run has ended"))
                order.done.exception()
