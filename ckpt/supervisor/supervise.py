"""``gpuckpt run``, put together: a child, its state, the gate, the idle clock and the control socket, until the child ends."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import logging
import os
import resource
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import aiohttp

from gpuckpt import errors
from gpuckpt.inspect.host import BUDGET_VARIABLE
from gpuckpt.inspect.processes import RUN_VARIABLE
from gpuckpt.model import Report
from gpuckpt.supervisor import adopt, again, idle, logs, paths, vllm
from gpuckpt.supervisor.admin import Admin
from gpuckpt.supervisor.answering import ControlServer, Peer
from gpuckpt.supervisor.between import Childless
from gpuckpt.supervisor.budget import Budget
from gpuckpt.supervisor.cache import Cache
from gpuckpt.supervisor.child import EXIT_OWN_FAILURE, Child
from gpuckpt.supervisor.engines import Engines
from gpuckpt.supervisor.gate import Gate, announce
from gpuckpt.supervisor.lease import Lease
from gpuckpt.supervisor.listening import check_free, listen, where
from gpuckpt.supervisor.metrics import Metrics
from gpuckpt.supervisor.mishaps import tell_safely
from gpuckpt.supervisor.model import Policy, RunState, Server
from gpuckpt.supervisor.notify import AGAIN_S, Notifier, notify, still
from gpuckpt.supervisor.operate import Worker
from gpuckpt.supervisor.places import Adopted, Place
from gpuckpt.supervisor.probe import Probe
from gpuckpt.supervisor.share import Share, Sharing, chosen_gpus, moved_to_disk, others
from gpuckpt.supervisor.spill import Spill
from gpuckpt.supervisor.state import Run
from gpuckpt.supervisor.traffic import Traffic
from gpuckpt.supervisor.upstream import Connector, Silent, Upstream

log = logging.getLogger("gpuckpt.run")

#: Signals that end the child in order, and those that it just gets.
ENDING = (signal.SIGTERM, signal.SIGINT)
FORWARDED = (signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH, signal.SIGCONT)
#: How long answers that are under way may take after the child has ended, in seconds.
LAST_ANSWERS_S = 0.5
#: How long a run that shares waits for its GPUs before it starts, in seconds: another may be starting on them.
START_S = 600.0
#: After a failure the command is started again so often in a row, first after so many seconds, then after twice as many each time.
RESTARTS = 5
RESTART_S = 1.0
RESTART_MOST_S = 60.0
#: A run that has lived for so long, in seconds, counts its failures anew.
SOUND_S = 600.0


@dataclass(frozen=True)
class Options:
    """What a person asked for. Times in seconds."""

    name: str
    adapter: str = "none"  # "vllm", "url" or "none"
    upstream: str = ""
    health: str = "/health"
    listen: tuple[str, int] = ("127.0.0.1", 8000)
    idle_s: float | None = None
    hold_s: float = 50.0
    max_waiting: int = 1000
    keep_child: bool = False
    policy: Policy = field(default_factory=Policy)
    sharing: Sharing = field(default_factory=Sharing)
    host_budget_bytes: int | None = None
    restart: bool = False  # after a failure
    comments_s: float | None = None  # to streams that are held
    admin: tuple[str, int] | None = None
    admin_token: str = ""
    keeps_cache: bool = False
    command: tuple[str, ...] = ()  # as it was typed


async def supervise(options: Options, prepared: vllm.Prepared, place: Place, environ: Mapping[str, str] = os.environ) -> int:
    """Run the command to its end, again after a failure if so chosen, and return what to exit with."""
    signals: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(logs.of_the_loop())
    for signum in (*ENDING, *FORWARDED):
        if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup means it
            loop.add_signal_handler(signum, signals.put_nowait, signum)
    childless = Childless(signals, ENDING)
    control = ControlServer(place.control, childless.answer)
    try:
        await control.listen()
    except OSError as e:
        place.leave = place.adopted is not None
        raise errors.CannotListen(f"cannot listen on {place.control}: {e.strerror or e}; nothing was started") from None
    watch = asyncio.create_task(again.keep(place, control))
    try:
        return await _Lives(options, prepared, place, environ, signals, control, childless).until_the_end()
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await control.close()


@dataclass
class _Lives:
    """A run from its first start to its last end: the command may be started again."""

    options: Options
    prepared: vllm.Prepared
    place: Place
    environ: Mapping[str, str]
    signals: asyncio.Queue[int]
    control: ControlServer
    childless: Childless

    async def until_the_end(self) -> int:
        """Returns what to exit with."""
        failures = 0
        while True:
            begun = time.monotonic()
            code, ended, address = await self._live(await self._begin())
            failures = 1 if time.monotonic() - begun > SOUND_S else failures + 1
            if ended or code == 0 or not self.options.restart or failures > RESTARTS:
                return code
            delay_s = min(RESTART_MOST_S, RESTART_S * 2 ** (failures - 1))
            log.warning("it ended with %d; started again in %g s (%d of %d)", code, delay_s, failures, RESTARTS)
            notify(f"STATUS=ended with {code}, is started again")
            if await self.childless.until_again(code, delay_s):
                return code
            if address is not None:  # its port may have been chosen for it; the host stays as given, for it may be several addresses
                self.options = dataclasses.replace(self.options, listen=(self.options.listen[0], address[1]))
            self.place.clear()

    async def _begin(self) -> _Supervised:
        """Adopt the child that is there, or start one, once its GPU is free."""
        options, prepared, place = self.options, self.prepared, self.place
        adopted, place.adopted = place.adopted, None
        if adopted is not None:
            child = await Child.adopt(adopted.connection, adopted.child)
            log.info("adopted pid %d as run %s", child.pid, options.name)
            return _Supervised(options, prepared, place, child, adopted)
        if options.adapter == "url":
            await check_free(options.upstream)
        lease = None
        if options.sharing.shares:
            room = _make_room_to_start(options, prepared, self.environ)
            lease = await self.childless.unless_told_to_end(room, AGAIN_S, lambda: still("waiting for its GPU"))
        adopt_at = place.keeper if options.keep_child else None
        server = str(place.upstream) if options.adapter == "vllm" and prepared.gate else ""
        budget = {BUDGET_VARIABLE: str(options.host_budget_bytes)} if options.host_budget_bytes is not None else {}
        environ = {**self.environ, **prepared.environ, **budget, RUN_VARIABLE: options.name}
        child = await Child.start(prepared.command, environ, name_fd=place.hold.fds[0], adopt_at=adopt_at, server=server)
        log.info("started pid %d as run %s%s", child.pid, options.name, ", preload library on" if "preload" in prepared.changes else "")
        supervised = _Supervised(options, prepared, place, child)
        if lease is not None:
            supervised.run.stand_by(_release_when_started(supervised.run, lease))
        return supervised

    async def _live(self, supervised: _Supervised) -> tuple[int, bool, tuple[str, int] | None]:
        """To the child's end: what to exit with, whether it was told to end, and where the gate was."""
        childless, control = self.childless, self.control
        _many_files()
        gc.freeze()  # what is there now stays to the end: no collection need look through it while requests wait
        control.answer = supervised.answer
        if childless.told_to_stop:  # while the command was being started
            supervised.run.told_to_stop = True
            await supervised.run.stop()
        try:
            code = await supervised.live(self.signals)
        finally:
            childless.words = lambda: "the command has ended"
            control.answer = childless.answer
            await supervised.close()
        ended = supervised.run.told_to_stop or childless.told_to_stop
        return code, ended, supervised.gate.address if supervised.gate else None


class _Supervised:
    """A started child and all that stands around it."""

    def __init__(self, options: Options, prepared: vllm.Prepared, place: Place, child: Child, adopted: Adopted | None = None) -> None:
        self.options, self.child, self._place, self._prepared = options, child, place, prepared
        self.traffic = Traffic(hold_s=options.hold_s, max_waiting=options.max_waiting)
        self.upstream: Upstream | None = None
        server: Server = Silent()
        probe: Probe | None = None
        if options.adapter == "vllm" and prepared.gate:
            key = prepared.keys[0] if prepared.keys else ""
            self.upstream = Upstream(
                "http://vllm", Connector(str(place.upstream), child.owns, adopted.server if adopted else None), key=key
            )
            server = served = vllm.Vllm(self.upstream, prepared.sleeps, options.keeps_cache)
            probe = Probe(served)
        elif options.adapter == "url":
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            server = self.upstream = Upstream(options.upstream, connector, health=options.health)
        self.run = Run(child, server, self.traffic, options.policy)
        self.run.probe = probe
        if adopted is not None:
            adopt.recall(self.run.holdings, adopted.facts)
            self.run.find = lambda: adopt.find(child.pid, self.run.holdings, server)
        self.share = Share(self.run, options.name, options.sharing)
        if adopted is not None:
            self.share.adopted(bool(adopted.facts.get("comes_back")))
        tell_safely(self._note, self.run.state)
        self.run.changed.append(self._note)
        self.spill = Spill(self.run, options.policy.move_to)
        self.run.holdings.budget = Budget(
            options.host_budget_bytes, lambda: others(options.name), move=lambda n: moved_to_disk(n, options.name), ready=self._reserved
        )
        self.metrics = Metrics(self.run)
        self.engines = Engines(self.run)
        self.run.changed.append(Notifier(self.run).changed)
        self.run.finished.append(logs.outcome)
        self.cache = Cache(self.run.holdings, options.keeps_cache)
        self.run.changed.append(self.cache.changed)
        self.run.finished.append(self.cache.finished)
        self.run.changed.append(lambda state: log.info("%s", state))  # last: who reads it finds the rest said and done
        self.gate: Gate | None = None
        if self.upstream is not None:
            self.gate = Gate(
                self.run,
                self.upstream,
                self.metrics,
                keys=prepared.keys,
                hidden=prepared.hidden,
                websockets=paths.WEBSOCKETS if options.adapter == "vllm" else None,
                comments_s=options.comments_s,
            )
        self.admin = Admin(self.run, options.admin_token) if options.admin is not None else None

    async def live(self, signals: asyncio.Queue[int]) -> int:
        try:
            await self._listen()
        except errors.CannotListen as e:
            if self.run.find is not None:
                self._place.leave = True
                e.message += f"; pid {self.child.pid} was adopted, and is left alive for the next try"
            else:
                await self.run.stop()
                await self.child.exited
                e.message += "; the command had been started, and was ended"
            raise
        self.run.stand_by(self._obey(signals))
        if self.options.idle_s is not None:
            self.run.stand_by(idle.watch(self.run, self.options.idle_s))
        endings: set[asyncio.Future[Any]] = {self.child.exited, self.run.lost}
        await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
        if not self.child.exited.done():
            log.error("%s; the run ends", self.run.lost.result().message)
            await asyncio.sleep(LAST_ANSWERS_S)
            await self.run.stop()
            await self.child.exited
            return EXIT_OWN_FAILURE
        code = self.child.exited.result()
        if self.child.keeper_killed:
            log.error("somebody killed the keeper of the command, pid %d, which ends the command too", self.child.keeper_pid)
            self.engines.kill()
        if self.run.killed_for is not None:
            code = 128 + self.run.killed_for
        log.info("the command ended with %d", code)
        await self.run.until(RunState.ENDED)
        await self.traffic.quiet(LAST_ANSWERS_S)
        await asyncio.sleep(0.05)  # what held requests are told is on its way
        return code

    async def _listen(self) -> None:
        if self.admin is not None and self.options.admin is not None:
            await listen(self.admin.listen, self.options.admin, "--admin")
            log.info("admin listener on http://%s", where(self.admin.address))
        if self.gate is not None:
            option = "--listen, or the command's --port" if self.options.adapter == "vllm" else "--listen"
            await listen(partial(announce, self.gate), self.options.listen, option)

    def _note(self, _: RunState) -> None:
        self._place.note(
            self.child.pid, command=list(self.options.command), comes_back=self.share.comes_back, **adopt.noted(self.run.holdings)
        )

    async def close(self) -> None:
        self.engines.close()
        if self.admin is not None:
            await self.admin.close()
        if self.gate is not None:
            await self.gate.close()
        await self.run.close()
        if self.upstream is not None:
            await self.upstream.close()

    def _reserved(self) -> int:
        from gpuckpt import follow

        return follow.ready_bytes(self.child.pid) if "reserve" in self._prepared.changes else 0

    async def _obey(self, signals: asyncio.Queue[int]) -> None:
        stops = set()
        while True:
            signum = await signals.get()
            if signum in ENDING:
                self.run.told_to_stop = True
                stops.add(asyncio.create_task(self.run.stop(signum)))
            else:
                self.child.send(signum)

    async def answer(self, order: dict[str, Any], peer: Peer) -> dict[str, Any]:
        """What the control socket answers."""
        match order["command"]:
            case "suspend":
                report = await self.run.suspend("command", order.get("drain_s"))
            case "resume":
                report = await self.run.resume("command")
            case "give-way":
                report = await self.share.give_way(order["within_s"])
            case "hold":
                report = await self.share.hold(order["gpus"], order["by"], order["within_s"], peer)
            case "to-disk":
                report = await self.spill.to_disk(order["by"])
                self._note(self.run.state)
            case "stop":
                self.run.told_to_stop = True
                await self.run.stop()
                await self.child.exited
                report = Report("stop", True, False)
            case _:
                report = Report("status", True, False)
        report = dataclasses.replace(report, simulated=bool(os.environ.get("GPUCKPT_SIMULATE")))
        return {**report.as_dict(), "acted": True, "run": self.facts()}

    def facts(self) -> dict[str, Any]:
        error = self.run.last_error
        return {
            "name": self.options.name,
            "state": str(self.run.state),
            "state_seconds": time.monotonic() - self.run.since,
            "supervisor_pid": os.getpid(),
            "child_pid": self.child.pid,
            "requests_running": self.traffic.running,
            "requests_waiting": self.traffic.waiting,
            "listen": where(self.gate.address) if self.gate else None,
            "idle_seconds": self.options.idle_s,
            "last_error": error.as_dict() if error else None,
            "movable_bytes": self.spill.movable_bytes,
            "reserved_bytes": self._reserved(),
            "cache": self.cache.facts(),
            **self.share.facts(),
        }


async def _make_room_to_start(options: Options, prepared: vllm.Prepared, environ: Mapping[str, str]) -> Lease:
    """The GPUs that the command will start on, without other runs. Raises where one of them does not leave in time."""
    worker = Worker()
    found = (await worker.run("gpus")).details["gpus"]
    await worker.finish()
    gpus = chosen_gpus(found, {**environ, **prepared.environ}, prepared.gpu_count)
    loop, done = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def take() -> None:
        try:
            made = Lease(gpus, by=f"run {options.name} is starting", within_s=START_S, but=options.name)
            loop.call_soon_threadsafe(done.set_result, made)
        except BaseException as e:  # noqa: BLE001 - it is raised where it is waited for
            loop.call_soon_threadsafe(done.set_exception, e)

    threading.Thread(target=take, daemon=True).start()  # none that the end of this program would wait for
    lease: Lease = await done
    if lease.runs:
        log.info("kept off the GPU while it starts: %s", ", ".join(lease.runs))
    return lease


async def _release_when_started(run: Run, lease: Lease) -> None:
    try:
        await run.until(*set(RunState) - {RunState.STARTING})
    finally:
        lease.release(back=False)


def _many_files() -> None:
    """Each request takes two descriptors. Done after the child has been started: its limits are its own affair."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
