"""One GPU, several runs: whose turn it is, who gives way, and who is kept away while somebody else has the GPU.

There is no daemon. The runs of one user find each other by the control sockets in their runtime directory, and each decides for
itself. Who waits for a GPU comes to its turn by the time at which it began to wait, so one at a time asks others to leave;
whoever was asked leaves in its own time: not before it was awake for a moment, and with its requests answered. So each swap
serves what waited, and nobody is swapped out by somebody who came later.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuckpt import errors, plan
from gpuckpt.model import Report
from gpuckpt.supervisor import control, places
from gpuckpt.supervisor.answering import Peer
from gpuckpt.supervisor.lease import leased
from gpuckpt.supervisor.model import RunState
from gpuckpt.supervisor.state import Run
from gpuckpt.words import size

log = logging.getLogger("gpuckpt.run")

#: A run that got no request for so long is idle enough to leave at once, in seconds: a client that sends one after the other is quicker.
IDLE_MOMENT_S = 0.5
#: While requests keep coming a run may stay so many times its least time awake before it takes no more and lets the next one in.
BUSY_TURNS = 5
#: A run takes no more requests for the sake of another only while none has been running for so long, and for at most so long, in
#: seconds: those that run are then likely to end at once, and who comes meanwhile is hardly late if they do not.
DOOR_S = 2.0
#: How long one question to another run may take, in seconds; it is asked again.
ANSWER_S = 2.0
#: And to one that did not answer the last time, until it does: its supervisor is stopped, or gone half-way, and delays nobody again.
SILENT_ANSWER_S = 0.1
ASK_S = 1.0
POLL_S = 0.05
#: After somebody left: the driver shows the room at once, and whoever waits for it looks every 0.2 s.
SETTLE_S = 0.4
#: How often an adopted run looks whether the lease that it was found under has ended, in seconds.
LEASE_POLL_S = 0.2
#: A run that could not leave is not asked again for so long, in seconds.
REFUSED_S = 30.0


@dataclass(frozen=True)
class Sharing:
    """What a person chose. *shares*: ask others for room, and be asked. *pinned*: never leave for another run or a lease."""

    shares: bool = False
    pinned: bool = False
    least_awake_s: float = 2.0


class Share:
    """The part of one run in it."""

    def __init__(self, run: Run, name: str, sharing: Sharing) -> None:
        self.run, self.name, self.sharing = run, name, sharing
        self._not_before = 0.0  # it is not asked to leave, after it could not
        self.comes_back = False  # after the lease that holds it: it was awake before
        self._refused: dict[str, float] = {}  # others that could not leave, and until when they are left alone
        if sharing.shares:
            run.turn, run.make_room = self.turn, self.make_room

    def facts(self) -> dict[str, Any]:
        """What other runs must know. Times on the machine's monotonic clock."""
        traffic = self.run.traffic
        return {
            "shares": self.sharing.shares,
            "pinned": self.sharing.pinned,
            "gpu_bytes": self.run.holdings.gpu_bytes,
            "dropped_bytes": self.run.holdings.dropped_bytes,
            "host_bytes": self.run.holdings.host_bytes,
            "wants_since": self.run.wants_since,
            "used_at": time.monotonic() if traffic.running or traffic.waiting else traffic.last_end,
            "held_by": next(iter(self.run.holds.values()), None),
        }

    # As the one that wants a GPU.

    async def turn(self) -> bool:
        """Whether no other run waits for one of our GPUs for longer than we do."""
        mine = (self.run.wants_since or 0.0, self.name)
        return not any(
            n["wants_since"] is not None and (n["wants_since"], n["name"]) < mine
            for n in await others(self.name)
            if n["shares"] and self._meets(n)
        )

    async def make_room(self) -> None:
        """Ask one run to leave our GPUs: one that is idle, and of these the one that was not used for longest. Returns when it has
        left, or is not ready to."""
        now = time.monotonic()
        asked = [
            n
            for n in await others(self.name)
            if n["shares"] and not n["pinned"] and n["state"] in ("awake", "draining", "suspending") and self._meets(n)
            if self._refused.get(n["name"], 0.0) <= now
        ]
        if not asked:
            await asyncio.sleep(POLL_S)
            return
        chosen = min(asked, key=lambda n: (n["requests_running"] > 0, n["used_at"]))["name"]
        answer = await ask(chosen, "give-way", within_s=ASK_S, by=self.name)
        error = (answer or {}).get("error")
        if answer is not None and error is None:
            log.info("%s left the GPU for us", chosen)
            await asyncio.sleep(SETTLE_S)
        elif error is None or error["code"] not in (errors.RunNotReady.code, errors.StillServing.code):
            log.warning("%s could not leave the GPU: %s", chosen, error["message"] if error else "it does not answer")
            self._refused[chosen] = now + REFUSED_S

    def _meets(self, other: Mapping[str, Any]) -> bool:
        """Whether it is on a GPU of ours. What is not known yet may be anywhere."""
        ours, theirs = self.run.holdings.gpu_bytes, other["gpu_bytes"]
        return not ours or not theirs or bool(ours.keys() & theirs.keys())

    # As the one that is asked.

    async def give_way(self, within_s: float) -> Report:
        """Leave the GPUs for another run. Raises :class:`gpuckpt.errors.RunNotReady` where the moment does not come in time."""
        if self.sharing.pinned or not self.sharing.shares:
            raise errors.Usage(f"the run {self.name!r} does not leave its GPU for others", hint="it needs --share, and no --pin")
        until = time.monotonic() + within_s
        while not self._may_leave():
            if time.monotonic() >= until:
                raise errors.RunNotReady(f"the run {self.name!r} is {self.run.state} and has not been so for long enough to leave")
            await asyncio.sleep(POLL_S)
        try:
            return await self.run.suspend("share", min(DOOR_S, self.run.policy.drain_s))
        except errors.StillServing:
            self._not_before = time.monotonic() + REFUSED_S
            raise

    def _may_leave(self) -> bool:
        run, now = self.run, time.monotonic()
        if run.state is not RunState.AWAKE:
            return run.state in (RunState.DRAINING, RunState.SUSPENDING, RunState.SUSPENDED)
        idle = not run.traffic.running and now - run.traffic.last_end >= IDLE_MOMENT_S
        if idle:
            return now >= run.since + self.sharing.least_awake_s
        return run.traffic.longest_s < DOOR_S and now >= max(run.since + self.sharing.least_awake_s * BUSY_TURNS, self._not_before)

    # As the one that is kept away.

    async def hold(self, gpus: Sequence[str] | None, by: str, within_s: float, peer: Peer) -> Report:
        """Be suspended, and stay so until *peer* closes its connection; then come back if it was awake and *peer* does not say otherwise.

        Only if it is on one of *gpus* (None: wherever it is): ``details["held"]`` says whether it was.
        """
        run = self.run
        until = time.monotonic() + within_s
        if run.state is RunState.STARTING:
            try:
                await asyncio.wait_for(run.until(*set(RunState) - {RunState.STARTING}), within_s)
            except TimeoutError:
                raise errors.Deadline(f"the run {self.name!r} was still starting after {within_s:g} s") from None
        if gpus is not None and not run.holdings.gpu_bytes and run.state is RunState.AWAKE:
            with contextlib.suppress(errors.NoCudaState):  # it holds nothing on any of them
                await run.holdings.look()
        known = run.holdings.gpu_bytes
        elsewhere = gpus is not None and not known.keys() & set(gpus) and (bool(known) or run.state is not RunState.SUSPENDED)
        if run.over or run.child.owns(peer.pid) or elsewhere:
            return Report("hold", True, False, details={"held": False})
        if self.sharing.pinned and gpus is not None:
            raise errors.RunNotReady(f"the run {self.name!r} is pinned to its GPU", hint=f"gpuckpt suspend {self.name}, or stop it")
        was_awake = run.state is not RunState.SUSPENDED
        run.holds[peer] = by
        self.comes_back |= was_awake
        try:
            await self._suspended_by(until)
        except BaseException:
            self._let_go(peer)
            raise

        async def then() -> Report:
            self._let_go(peer)
            if was_awake and peer.said.get("back", True) and not run.holds and not run.over:
                return await run.resume("hold")
            return Report("hold", True, False, already=True)

        peer.then = then
        return Report("hold", True, False, details={"held": True})

    async def _suspended_by(self, until: float) -> None:
        """Suspend the run; again if that was cut short by the shorter patience of another, whose suspend was under way."""
        while True:
            left = until - time.monotonic()
            try:
                await self.run.suspend("hold", max(0.001, left))
                return
            except errors.StillServing:
                if time.monotonic() >= until:
                    raise

    def adopted(self, comes_back: bool) -> None:
        """A lease that held the run when its last supervisor died, or began since, holds it still: its connection ended with that one, its
        lock on the GPUs did not. Then the run comes back if it was awake before."""
        if leased(self.run.holdings.gpu_bytes):
            self.comes_back = comes_back
            self.run.holds[self] = "a lease that began before the run had this supervisor"
            self.run.stand_by(self._sit_out())

    async def _sit_out(self) -> None:
        run = self.run
        await run.until(*set(RunState) - {RunState.STARTING})
        while leased(run.holdings.gpu_bytes):
            await asyncio.sleep(LEASE_POLL_S)
        comes_back = self.comes_back
        self._let_go(self)
        if comes_back and run.state is RunState.SUSPENDED and not run.holds:
            with contextlib.suppress(errors.GpuckptError):  # it is in the log, and who waits is told
                await run.resume("hold")

    def _let_go(self, peer: object) -> None:
        self.run.holds.pop(peer, None)
        self.comes_back = self.comes_back and bool(self.run.holds)
        if self.run.traffic.waiting and self.run.state is RunState.SUSPENDED:
            self.run.want_awake()


_silent: set[str] = set()  # the runs that did not answer in time when they were asked last


async def others(name: str) -> list[dict[str, Any]]:
    """The facts of every other run of this user that answers."""
    answers = await asyncio.gather(*(ask(n, "status") for n in places.with_sockets() if n != name))
    return [a["run"] for a in answers if a is not None and "shares" in a.get("run", {})]


async def moved_to_disk(other: Mapping[str, Any], by: str) -> bool:
    """Whether the run of these facts moved its image to disk for the run *by*."""
    limit_s = plan.default_timeout_s(other["movable_bytes"]) + plan.image_call_s(other["movable_bytes"])
    try:
        answer = await asyncio.wait_for(ask(other["name"], "to-disk", by=by), limit_s)
    except TimeoutError:
        answer = None
    error = (answer or {}).get("error")
    if answer is None or error is not None:
        log.warning("%s did not move its image to disk: %s", other["name"], error["message"] if error else "it does not answer")
        return False
    log.info("%s moved %s to disk for us", other["name"], size(other["movable_bytes"]))
    return True


async def ask(name: str, command: str, **options: Any) -> dict[str, Any] | None:
    """As :func:`gpuckpt.supervisor.control.ask`, without waiting in its way. None if nobody answers; an operation is waited for."""
    try:
        reader, writer = await asyncio.open_unix_connection(str(places.control_path(name)), limit=1 << 20)
        try:
            writer.write(json.dumps({"schema": control.SCHEMA, "command": command, **options}).encode() + b"\n")
            line = await (_in_time(name, reader) if command == "status" else _at_last(name, reader))
        finally:
            writer.close()
        answer: dict[str, Any] = json.loads(line)
    except (OSError, ValueError, TimeoutError):
        return None
    return answer


async def _at_last(name: str, reader: asyncio.StreamReader) -> bytes:
    """The line that the run *name* answers with, however long that takes, as long as it says how it is. Raises :class:`TimeoutError`."""
    reading = asyncio.ensure_future(reader.readline())
    try:
        while not (await asyncio.wait({reading}, timeout=control.LOOK_S))[0]:
            if await ask(name, "status") is None:
                raise TimeoutError
        return reading.result()
    finally:
        reading.cancel()


async def _in_time(name: str, reader: asyncio.StreamReader) -> bytes:
    """The line that the run *name* answers with. Raises :class:`TimeoutError`."""
    try:
        line = await asyncio.wait_for(reader.readline(), SILENT_ANSWER_S if name in _silent else ANSWER_S)
    except TimeoutError:
        _silent.add(name)
        raise
    _silent.discard(name)
    return line


def chosen_gpus(gpus: Sequence[Mapping[str, Any]], environ: Mapping[str, str], count: int | None) -> list[str]:
    """The UUIDs of the GPUs that a program with *environ* will use: the first *count* that it sees, None for all."""
    words = environ.get("CUDA_VISIBLE_DEVICES")
    seen = [g["uuid"] for g in sorted(gpus, key=lambda g: g["index"])]
    if words is not None:
        by_index = {str(g["index"]): g["uuid"] for g in gpus}
        named = [by_index.get(w.strip()) or next((u for u in seen if w.strip() and u.startswith(w.strip())), "") for w in words.split(",")]
        seen = [u for u in named if u]
    return seen[:count]
