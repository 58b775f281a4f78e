"""This host in an operation of several: implements :class:`gpuckpt.barrier.Barrier` by a coordinator, a store and a clock."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from gpuckpt import errors
from gpuckpt.barrier import END, Part
from gpuckpt.errors import GpuckptError
from gpuckpt.model import Call, Inventory, Membership, Rank
from gpuckpt.rendezvous import judge, words
from gpuckpt.rendezvous.coordinator import Body, Coordinator, Ended, Get, Moment, Put, Steps
from gpuckpt.rendezvous.seal import Seal
from gpuckpt.rendezvous.store import Store

T = TypeVar("T")
#: First and longest pause between two looks at the store, in seconds; each is half as long again as the one before.
PAUSE_FIRST_S, PAUSE_LONGEST_S = 0.002, 0.1
#: How long another host may be late beyond what its driver calls may take, in seconds.
LATE_S = 1.0
#: How long the way back waits for hosts that had nothing checkpointed, in seconds.
BACK_WAIT_S = 30.0
#: How long the host that serves the store waits for the others to have read it, in seconds.
LEAVE_S = 5.0
#: The steps of the way back that need every host to have done the one before, by the call that they precede.
_BACK = {Call.UNLOCK: "back-unlock", Call.ARM: "back-arm"}
_UP = (Call.RESTORE, Call.UNLOCK, Call.ARM, Call.COMMS_RESUME, Call.ONLOAD, Call.UNQUIESCE, END)


class Clock(Protocol):
    """What is needed of :class:`gpuckpt.world.World`."""

    def now(self) -> float: ...

    @property
    def interruptions(self) -> Sequence[int]: ...

    def wait(self, pending: Collection[Any], until: float) -> None: ...


class Rendezvous:
    """Use as a context manager round one operation, which it outlives by the leave-taking."""

    several = True

    def __init__(
        self,
        clock: Clock,
        connect: Callable[[], Store],
        seal: Seal,
        *,
        url: str,
        command: str,
        nodes: int,
        node: int | None,
        me: Body,
        dead: Callable[[Body], bool],
        fresh_id: Callable[[], str],
        key_file: str = "",
    ) -> None:
        self._clock, self._connect, self._seal, self._url, self._key_file = clock, connect, seal, url, key_file
        self._store: Store | None = None
        judged = {"suspend": judge.suspend, "resume": judge.resume}[command]
        self._hosts = Coordinator(command, nodes, node, me, dead, judged, fresh_id)
        self._names: tuple[str, ...] = ()
        self._ranks: Mapping[int, list[str]] = {}
        self._pid = 0
        self._phase = "joined"
        self._group = ""
        self._deadline = clock.now()
        self._patience_s = 0.0
        self._spans = False  # a communicator has ranks on several hosts
        self._note: Callable[[Membership], None] = lambda _: None
        self._back: list[str] | None = None  # steps of the way back that are still to be agreed on; None on the way forward
        self._stuck: GpuckptError | None = None  # why a process here cannot go back
        self._over = False

    def __enter__(self) -> Rendezvous:
        """Reach the store. Raises :class:`gpuckpt.errors.RendezvousLost`."""
        self._store = self._connect()
        return self

    def __exit__(self, *_: object) -> None:
        if self._store is not None:
            if self._store.ends:
                with contextlib.suppress(GpuckptError):
                    self._drive(self._hosts.leave(self._clock.now() + LEAVE_S, serving=self._store.serving))
            self._store.close()
            self._store = None

    @property
    def committed(self) -> bool:
        return self._hosts.committed

    @property
    def membership(self) -> Membership | None:
        if self._hosts.node is None or not self._names:
            return None
        return Membership(self._group, self._url, self._hosts.node, self._names, self._phase, self._key_file, self._spans)

    def check(self, membership: Membership | None, pid: int) -> None:
        if membership is None:
            return
        hosts = self._hosts
        if len(membership.hosts) != hosts.nodes or hosts.node not in (None, membership.node):
            raise errors.SeveralHosts(
                f"pid {pid} was suspended as {membership.label}; nothing was touched",
                hint=f"--nodes {len(membership.hosts)} --node-rank {membership.node}",
                pid=pid,
            )
        hosts.node = membership.node

    def join(
        self,
        inventory: Inventory,
        pid: int,
        *,
        already: bool,
        part: Part,
        deadline: float,
        patience_s: float,
        note: Callable[[Membership], None],
    ) -> bool:
        self._deadline, self._note = deadline, note
        self._pid = pid
        self._ranks = _by_pid(inventory)
        info = {
            "already": already,
            "group": part.group,
            "committed": part.committed,
            "journal": list(part.journal),
            "patience_s": patience_s,
            "pids": [p.pid for p in inventory.processes],
            "ranks": [_rank(r) for r in inventory.ranks],
            "outside": [[_rank(o.rank), o.who, o.near] for o in inventory.outside],
        }
        try:
            verdict = self._drive(self._hosts.join(info, deadline))
        except Ended as e:
            self._over = True
            raise words.no_place(e.kind, e.body, self._clock.interruptions, self._hosts.nodes) from None
        if not verdict["go"]:
            self._over = True
            raise words.ended(verdict["cause"], self._where, self._hosts.earlier, self._clock.interruptions)
        self._names = tuple(verdict["hosts"])
        self._group = verdict["group"] or self._hosts.id
        self._patience_s, self._spans = verdict["patience_s"], verdict["spans"]
        if verdict["already"]:
            self._drive(self._hosts.end({"node": None, "code": "already", "message": "nothing was left to do"}, held=True))
            self._over = True
        return bool(verdict["already"])

    def before(self, step: str, cause: GpuckptError | None = None) -> None:
        if self._back is not None:
            self._before_on_the_way_back(step, cause or self._stuck)
            return
        steps = self._hosts.steps
        while self._hosts.passed < (steps.index(step) + 1 if step in steps else 1):
            if cause is not None:
                self.fail(cause)
                raise cause
            self._pass(steps[self._hosts.passed])

    def fail(self, cause: GpuckptError) -> None:
        with contextlib.suppress(GpuckptError):
            if not self._over and not isinstance(cause, errors.Held):
                self._over = True
                self._drive(self._hosts.end(self._as_body(cause), held=self._hosts.command == "resume" and self.committed))

    def back(self, cause: GpuckptError, *, stuck: bool) -> None:
        hosts = self._hosts
        self._stuck = cause if stuck else None
        if isinstance(cause, errors.Held):
            raise cause
        if not self._over:
            self._over = True
            try:
                self._drive(hosts.end(self._as_body(cause)))
            except GpuckptError as e:
                if hosts.voted:
                    raise self._held(f"{cause.message}; and {e.message}, so that nobody can be told") from e
        self._back = []
        if hosts.verdict is None:
            return  # without a store everybody goes back alone: nobody can have voted for more than a lock
        if hosts.verdict.get("held"):
            raise self._held(words.reason(hosts.verdict["cause"], self._where))
        if self.committed:
            self._back.append(_BACK[Call.UNLOCK])
        if self._spans and hosts.passed >= hosts.steps.index("lock"):
            self._back.append(_BACK[Call.ARM])

    # Inside.

    def _pass(self, step: str) -> None:
        """Agree on the next step. The commit is written down on both sides of its vote."""
        hosts = self._hosts
        commits = step == hosts.steps[hosts.commit]
        if commits and hosts.command == "suspend":
            self._set_phase("voted")
        late = self.committed
        until = max(self._deadline, self._clock.now()) + self._patience_s + LATE_S if late else self._deadline
        stays = late and (hosts.command == "resume" or step == END)
        try:
            verdict = self._drive(hosts.vote(step, until, held=stays, patience=1 if late and hosts.command == "resume" else 0))
        except GpuckptError as e:
            self._over = True
            if hosts.voted:
                raise self._held(e.message) from e
            raise
        if verdict["go"]:
            if commits and hosts.command == "suspend":
                self._set_phase("committed")
            self._over = step == END
            return
        self._over = True
        if verdict.get("held"):
            raise self._held(words.reason(verdict["cause"], self._where))
        raise words.ended(verdict["cause"], self._where, None, self._clock.interruptions)

    def _before_on_the_way_back(self, step: str, cause: GpuckptError | None) -> None:
        last = _UP.index(step)
        while self._back and [*_BACK.values()].index(self._back[0]) + 1 <= last:
            due = self._back.pop(0)
            wait_s = self._patience_s if self.committed else min(BACK_WAIT_S, self._patience_s)
            try:
                if cause is not None:
                    self._drive(self._hosts.end_step(due, self._as_body(cause)))
                    raise cause
                verdict = self._drive(self._hosts.vote(due, self._clock.now() + wait_s + LATE_S, held=True, patience=1))
            except GpuckptError as e:
                if e is cause:
                    raise
                verdict = {"go": False, "cause": {"node": None, "code": e.code, "message": e.message}}
            if not verdict["go"]:
                self._back.clear()
                if step != END:  # at the end everything here is back, whatever the others do
                    raise self._held(words.reason(verdict["cause"], self._where))

    def _held(self, reason: str) -> errors.Held:
        membership = self.membership
        hint = f"on this host, and likewise on each other one: {membership.resume_command(self._pid)}" if membership else "gpuckpt recover"
        return errors.Held(f"{reason}; the processes here wait as they are for a resume of all hosts", hint=hint, pid=self._pid or None)

    def _set_phase(self, phase: str) -> None:
        self._phase = phase
        membership = self.membership
        assert membership is not None
        self._note(membership)

    def _where(self, node: int | None, host: str = "") -> str:
        if node is None:
            return "the rendezvous"
        known = self._names[node] if node < len(self._names) else host
        return f"host {known} (node {node})" if known else f"node {node}"

    def _as_body(self, cause: GpuckptError) -> Body:
        signum = cause.signum if isinstance(cause, errors.Interrupted) else 0
        ranks = self._ranks.get(cause.pid or 0, [])
        return {"node": self._hosts.node, "host": self._hosts.me["host"], "ranks": ranks, "signum": signum, **cause.as_dict()}

    def _drive(self, steps: Steps[T]) -> T:
        """Do what *steps* asks for, until it returns."""
        answer: object = None
        pause = PAUSE_FIRST_S
        assert self._store is not None
        try:
            while True:
                wish = steps.send(answer)
                if isinstance(wish, Get):
                    data = self._store.get(wish.key)
                    answer = None if data is None else self._seal.open(wish.key, data)
                elif isinstance(wish, Put):
                    data = self._store.compare_set(wish.key, self._seal.close(wish.key, wish.body))
                    answer = self._seal.open(wish.key, data)
                    pause = PAUSE_FIRST_S
                else:
                    self._clock.wait((), self._clock.now() + pause)
                    pause = min(PAUSE_LONGEST_S, pause * 1.5)
                    answer = Moment(self._clock.now(), len(self._clock.interruptions))
        except StopIteration as e:
            found: T = e.value
            return found


def _rank(r: Rank) -> list[Any]:
    return [r.pid, r.communicator, r.rank, r.size, r.nccl]


def _by_pid(inventory: Inventory) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for r in inventory.ranks:
        found.setdefault(r.pid, []).append(f"rank {r.rank} of {r.communicator}")
    return found
