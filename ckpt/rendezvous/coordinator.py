"""How hosts agree: every host votes before each step, node 0 counts the votes, and one record, which is written once, decides the step.

Pure: each operation is a generator that yields what it wants of a store or of time (:class:`Get`, :class:`Put`, :class:`Pause`) and is
sent the answer. Nothing is read twice as a rule, so that a step costs each host a vote and a look, and node 0 a look at each vote.

Who has not voted for a step knows that nobody has begun it, so until then each host may go back by itself. Whatever ends an operation
is written as the verdict of the step that it ends; of two that write, the first decides. The verdict on the *commit* step is the commit.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gpuckpt.barrier import END

Body = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Get:
    """Asks what *key* holds; the answer is its body, or None."""

    key: str


@dataclass(frozen=True, slots=True)
class Put:
    """Writes where nothing was written yet; the answer is the body that *key* holds from now on."""

    key: str
    body: Body


@dataclass(frozen=True, slots=True)
class Pause:
    """A little time; the answer is a :class:`Moment`."""


@dataclass(frozen=True, slots=True)
class Moment:
    now: float
    interruptions: int


Wish = Get | Put | Pause
Steps = Generator[Wish, Any, T]

#: Steps in order. A step is voted for by who is ready to begin it. The first two are the meeting: each host has looked at its part; and is
#: still there, since a vote for the first may be that of a command that was killed while it waited.
MEETING = ("inspect", "begin")
STEPS: dict[str, tuple[str, ...]] = {
    "suspend": (*MEETING, "comms", "disarm", "lock", "checkpoint", END),
    "resume": (*MEETING, "restore", "unlock", "arm", "comms-resume", "unquiesce", END),
}
COMMIT = {"suspend": "checkpoint", "resume": "restore"}
#: A host that does not count the votes leaves it to node 0 to find out who is missing, for so long, in seconds.
GRACE_S = 0.5


class Ended(Exception):
    """The operation cannot be joined: ``kind`` is "busy", "other-nodes", "place-taken" or "interrupted"; ``body`` tells of who is there."""

    def __init__(self, kind: str, body: Body) -> None:
        super().__init__(kind)
        self.kind, self.body = kind, body


@dataclass(eq=False, slots=True)
class Coordinator:
    """One host's side. *me* says who it is, and *dead* whether another one's process has ended, as far as can be seen from here.

    ``judge`` makes the verdict of the meeting from what every host told there.
    """

    command: str
    nodes: int
    node: int | None
    me: Body
    dead: Callable[[Body], bool]
    judge: Callable[[Mapping[int, Body]], Body]
    fresh_id: Callable[[], str]
    id: str = ""
    earlier: Body | None = None  # how the operation before ours ended, if another host ended it at the meeting
    passed: int = 0  # steps whose verdict was "go"
    voted: bool = False  # for the commit: from now on the others may have begun what we cannot take back alone
    verdict: Body | None = None  # that ended the operation
    _votes: dict[str, dict[int, Body]] = field(default_factory=dict)

    @property
    def steps(self) -> tuple[str, ...]:
        return STEPS[self.command]

    @property
    def commit(self) -> int:
        return self.steps.index(COMMIT[self.command])

    @property
    def committed(self) -> bool:
        return self.passed > self.commit

    def join(self, info: Body, until: float) -> Steps[Body]:
        """Meet the others, and return the verdict of the meeting. Raises :class:`Ended` where there is no place for us by *until*."""
        while True:
            yield from self._enter({**self.me, **info}, until)
            verdict = met = self._take((yield from self._verdict("inspect", until)))
            if verdict["go"]:
                verdict = yield from self.vote("begin", until)
            if not verdict.get("superseded"):
                return met if verdict["go"] else verdict

    def vote(self, step: str, until: float, *, held: bool = False, patience: int = 0) -> Steps[Body]:
        """Vote for *step*, and return its verdict. At *until*, or after more interruptions than *patience*, try to end the operation:
        with *held*, what has been done stays done."""
        self.voted = self.voted or step == self.steps[self.commit]
        yield Put(f"{self.id}.{step}.{self.node}", {"node": self.node})
        return self._take((yield from self._verdict(step, until, held=held, patience=patience)), counts=step in self.steps)

    def end(self, cause: Body, *, held: bool = False) -> Steps[Body | None]:
        """End the operation for *cause* at the step that we have not voted for. The verdict, if not ours, was quicker. None: it is over."""
        if not self.id:
            last = yield from self._last()
            op = (yield Get(str(last))) if last >= 0 else None
            if op is None or (yield from self._stands_at(op)) is None:
                op = yield Put(str(last + 1), self._new())
            if self._fits(op) and not (yield from self._holder(op)):  # else nobody waits for us there
                self._take((yield Put(f"{op['id']}.inspect.all", {"go": False, "held": False, "cause": cause})))
            return self.verdict
        while self.verdict is None and self.passed < len(self.steps):
            self._take((yield Put(f"{self.id}.{self.steps[self.passed]}.all", {"go": False, "held": held, "cause": cause})))
        return self.verdict

    def end_step(self, step: str, cause: Body) -> Steps[Body]:
        """End *step* of the way back, and leave everything as it is."""
        verdict: Body = yield Put(f"{self.id}.{step}.all", {"go": False, "held": True, "cause": cause})
        return verdict

    def leave(self, until: float, *, serving: bool) -> Steps[None]:
        """Say that we have read all we want; who serves the store waits for all to say so."""
        if not self.id or self.node is None:
            return
        yield Put(f"{self.id}.bye.{self.node}", {})
        for node in range(self.nodes) if serving else ():
            while (yield Get(f"{self.id}.bye.{node}")) is None:
                moment: Moment = yield Pause()
                if moment.now >= until:
                    return

    # Which operation.

    def _enter(self, info: Body, until: float) -> Steps[None]:
        """Find the operation that waits for us, or begin one, and take our place in it."""
        self.id, self.passed, self.verdict, self._votes = "", 0, None, {}
        last = yield from self._last()
        op = (yield Get(str(last))) if last >= 0 else None
        while True:
            stands_at = None if op is None else (yield from self._stands_at(op))
            if op is None or stands_at is None:
                last += 1
                op = yield Put(str(last), self._new())
                continue
            taken: Body = {}
            if self._fits(op):
                taken = yield from self._take_place(op, info)
                if self.id:
                    return
            elif op["command"] == self.command:
                raise Ended("other-nodes", op)
            else:
                taken = yield from self._holder(op)
            if taken.get("dead"):  # that command was killed, or its host: nobody will end what it began
                cause = {"node": taken.get("node"), "host": taken["host"], "code": "other-host", "message": "its command was started anew"}
                steps = STEPS[op["command"]]
                held = steps.index(stands_at) > steps.index(COMMIT[op["command"]])
                yield Put(f"{op['id']}.{stands_at}.all", {"go": False, "held": held, "superseded": True, "cause": cause})
                continue
            moment: Moment = yield Pause()
            if moment.interruptions:
                raise Ended("interrupted", {})
            if moment.now >= until:
                raise Ended("place-taken", taken) if taken and self._fits(op) else Ended("busy", op)

    def _new(self) -> Body:
        return {"id": self.fresh_id(), "command": self.command, "nodes": self.nodes, "by": self.me["host"]}

    def _fits(self, op: Body) -> bool:
        return bool(op["command"] == self.command and op["nodes"] == self.nodes)

    def _last(self) -> Steps[int]:
        """The number of the newest operation, -1 if there was none: they are numbered without a gap."""
        if (yield Get("0")) is None:
            return -1
        low, high = 0, 1
        while (yield Get(str(high))) is not None:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            if (yield Get(str(middle))) is None:
                high = middle
            else:
                low = middle
        return low

    def _stands_at(self, op: Body) -> Steps[str | None]:
        """The first step of *op* without a verdict, None if it is over."""
        for step in STEPS[op["command"]]:
            verdict = yield Get(f"{op['id']}.{step}.all")
            if verdict is None:
                return step
            if not verdict["go"]:
                if step in MEETING and not verdict.get("superseded"):
                    self.earlier = verdict.get("cause")
                return None
        return None

    def _take_place(self, op: Body, info: Body) -> Steps[Body]:
        """Vote at the meeting, which is to take a place. Returns {} with ``id`` set, or who has the place, with "dead" if it has ended."""
        holder: Body = {}
        for node in range(self.nodes) if self.node is None else (self.node,):
            holder = yield Put(f"{op['id']}.inspect.{node}", {**info, "node": node})
            if holder == {**info, "node": node}:
                self.id, self.node = op["id"], node
                return {}
            if self.dead(holder):
                return {**holder, "dead": True}
        return holder

    def _holder(self, op: Body) -> Steps[Body]:
        """Who has the place in *op* that would be ours, with "dead" if it has ended; {} if there is one for us."""
        holder: Body | None = None
        for node in range(op["nodes"]) if self.node is None else (self.node,):
            holder = yield Get(f"{op['id']}.inspect.{node}")
            if holder is None:
                return {}
            if self.dead(holder):
                return {**holder, "dead": True}
        return holder or {}

    # One step.

    def _verdict(self, step: str, until: float, *, held: bool = False, patience: int = 0) -> Steps[Body]:
        key = f"{self.id}.{step}"
        until += 0 if self.node == 0 else GRACE_S
        while True:
            verdict = yield Get(f"{key}.all")
            if verdict is not None:
                return dict(verdict)
            if self.node == 0 and (yield from self._all_voted(step)):
                counted = self._votes[step]
                return dict((yield Put(f"{key}.all", self.judge(counted) if step == "inspect" else {"go": True})))
            moment: Moment = yield Pause()
            cause: Body | None = None
            if moment.interruptions > patience:
                cause = {**self._mine(), "code": "interrupted", "message": "interrupted"}
            elif moment.now >= until:
                yield from self._all_voted(step, to_the_end=True)
                missing = [n for n in range(self.nodes) if n not in self._votes[step]]
                cause = {**self._mine(), "code": "host-missing", "step": step, "missing": missing, "message": ""}
            if cause is not None:
                return dict((yield Put(f"{key}.all", {"go": False, "held": held, "cause": cause})))

    def _all_voted(self, step: str, *, to_the_end: bool = False) -> Steps[bool]:
        """Whether every vote is there. Each is read once; the first that is missing ends it, unless all that are missing matter."""
        votes = self._votes.setdefault(step, {})
        for node in range(self.nodes):
            if node not in votes:
                vote = yield Get(f"{self.id}.{step}.{node}")
                if vote is not None:
                    votes[node] = vote
                elif not to_the_end:
                    return False
        return len(votes) == self.nodes

    def _take(self, verdict: Body, *, counts: bool = True) -> Body:
        if counts and verdict["go"]:
            self.passed += 1
        elif counts:
            self.verdict = verdict
        return verdict

    def _mine(self) -> Body:
        return {"node": self.node, "host": self.me["host"]}
