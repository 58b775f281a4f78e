"""The controller's side: finds the agents of a group, keeps one connection to each for the operation, and makes their calls."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gpuckpt.agent import protocol
from gpuckpt.inspect import processes
from gpuckpt.model import Call, Movable, Outcome, ProcessId, State

#: How long an agent may take to say hello, or that it is ready, in seconds: its thread does nothing else.
HELLO_DEADLINE_S = 5.0
_ANSWER_MAX_BYTES = 1 << 20
#: How often is looked whether somebody would not wait any more, in seconds.
_STOP_S = 0.25


class Hello(NamedTuple):
    """What an agent says of its process: its stage, its communicators, what it cannot vouch for, and what memory it can move or has."""

    stage: State
    communicators: tuple[dict[str, Any], ...]
    hazards: tuple[str, ...]
    movable: Movable | None = None
    offloaded: bool = False
    looks: bool = False  # there is more to know, by asking NCCL
    unseen: str = ""  # why its communicators are told of as they were seen before
    blind: bool = False  # and it may have others by now


@dataclass(eq=False, slots=True)
class AgentPending:
    """A call that an agent was asked for. ``release`` leaves it alone: the connection stays, and what it does next is its own affair.

    One that was to come to its safe point, and has not, goes on as if nobody had asked: its connection is closed.
    """

    call: Call
    process: ProcessId
    link: Link
    number: int = 0  # of the request, which its answers carry
    caller_pid: int = 0
    outcome: Outcome | None = None

    @property
    def sock(self) -> socket.socket:
        return self.link.sock

    def receive(self) -> None:
        answer = self.link.answer(self.number)
        if answer is not None:
            result = "SUCCESS" if answer["result"] == "SUCCESS" else f"agent:{answer['result']}"
            stays = tuple(answer.get("stays") or ())
            self.outcome = Outcome(result, message=answer["message"], moved=answer.get("moved"), stays=stays)

    def ready(self, until: float) -> bool:
        """Whether the agent says by *until* that it can begin; what it says else is the outcome."""
        if self.outcome is not None:
            return False
        answer = self.link.wait_for_answer(until, self.number)
        if answer is None:
            self.outcome = Outcome("agent:SILENT", message="its agent does not answer: the program does not let other threads run")
        elif answer["result"] != "READY":
            self.outcome = Outcome(f"agent:{answer['result']}", message=answer["message"])
        return self.outcome is None

    def keep(self) -> None: ...

    def release(self) -> None:
        if self.call is Call.QUIESCE and self.outcome is None:
            self.link.sock.close()


@dataclass(eq=False, slots=True)
class Link:
    """One connection. While it is open before *disarm*, the agent knows that its controller lives.

    Requests are numbered, and each answer carries the number of its own: one that comes after its question was given up answers no other.
    """

    sock: socket.socket
    received: bytes = b""
    sent: int = 0

    @property
    def open(self) -> bool:
        return self.sock.fileno() >= 0

    def ask(self, call: str, pipe: int | None = None, **more: Any) -> int:
        """Send a request; returns its number."""
        self.sent += 1
        with contextlib.suppress(OSError):
            message = protocol.encode({"version": protocol.VERSION, "number": self.sent, "call": call, **more})
            socket.send_fds(self.sock, [message], [] if pipe is None else [pipe])
        return self.sent

    def wait_for_answer(self, until: float, number: int | None = None, stop: Callable[[], bool] = lambda: False) -> dict[str, Any] | None:
        """The answer to request *number*, or to the last; None if there is none by *until*, or before somebody says *stop*."""
        answer, poll = None, select.poll()
        poll.register(self.sock, select.POLLIN)
        while answer is None and not stop():
            left_s = max(0.0, until - time.monotonic())
            if poll.poll(1000 * min(left_s, _STOP_S)):
                answer = self.answer(number)
            elif not left_s:
                break
        return answer

    def answer(self, number: int | None = None) -> dict[str, Any] | None:
        """The answer, once it is whole; a lost connection answers for itself. What answers an earlier request is dropped."""
        number = self.sent if number is None else number
        try:
            data = self.sock.recv(_ANSWER_MAX_BYTES)
        except OSError:
            data = b""
        if not data:
            return {"result": "VANISHED", "message": "the agent ended", "stage": State.RUNNING}
        *lines, self.received = (self.received + data).split(b"\n")
        answers: list[dict[str, Any]] = [json.loads(line) for line in lines]
        return next((a for a in answers if a.get("number", number) == number), None)  # an older agent's has none


@dataclass(slots=True)
class Agents:
    """The agents that this controller talks to."""

    links: dict[ProcessId, Link] = field(default_factory=dict)
    silent: set[ProcessId] = field(default_factory=set)  # they have an agent, which did not answer when it was last said hello to

    def hello(self, process: ProcessId) -> Hello | None:
        return self.hellos([process]).get(process)

    def hellos(self, processes_: Iterable[ProcessId]) -> dict[ProcessId, Hello]:
        """What the agents of *processes_* say of them, all asked at once; without those that have none, or none that answers in time
        (:attr:`silent`) and can be trusted. Their communicators are told of as they were seen last."""
        return self._hellos(processes_, 0.0)

    def looks(
        self, found: Mapping[ProcessId, Hello], look_s: float, stop: Callable[[], bool] = lambda: False
    ) -> dict[ProcessId, Hello | None]:
        """*found* again, once the programs have come by and looked at their communicators, for which each waits up to *look_s*; None for
        one that answers no more. Where somebody says *stop* meanwhile, they are told of as they were seen before."""
        asked = [p for p, hello in found.items() if hello.looks and look_s > 0]
        seen = self._hellos(asked, look_s, stop)
        stopped = stop()
        return {p: seen.get(p, hello if stopped or p not in asked else None) for p, hello in found.items()}

    def _hellos(self, processes_: Iterable[ProcessId], look_s: float, stop: Callable[[], bool] = lambda: False) -> dict[ProcessId, Hello]:
        processes_ = list(processes_)
        self.silent.difference_update(processes_)
        asked = {p: link for p in processes_ if (link := self._connect(p))}
        for link in asked.values():
            link.ask("hello", look_s=look_s)
        until, found = time.monotonic() + HELLO_DEADLINE_S + look_s, {}
        for process, link in asked.items():
            answer = link.wait_for_answer(until, stop=stop)
            if answer is None and stop():
                continue  # what it says later answers no other question
            if answer is None or answer["result"] == "VANISHED":
                self.links.pop(process).sock.close()
                if answer is None:
                    self.silent.add(process)
            elif answer["result"] != "SUCCESS":
                found[process] = Hello(State(answer["stage"]), (), (f"its agent cannot look at it: {answer['message']}",))
            else:
                seen = answer.get("movable")  # an agent of an earlier version knows nothing of it
                movable = Movable(**{**seen, "tags": tuple(seen.get("tags", ()))}) if seen else None
                ranks, hazards = tuple(answer["communicators"]), tuple(answer["hazards"])
                found[process] = Hello(
                    State(answer["stage"]),
                    ranks,
                    hazards,
                    movable,
                    offloaded=bool(answer.get("offloaded")),
                    looks=bool(answer.get("looks")),
                    unseen=str(answer.get("unseen", "")),
                    blind=bool(answer.get("blind")),
                )
        return found

    def start(
        self,
        call: Call,
        processes_: Sequence[ProcessId],
        operation: str,
        timeout_s: float,
        movable: Collection[ProcessId] = (),
        keep: bool = False,
        accept: bool = False,
        measure: bool = False,
    ) -> dict[ProcessId, AgentPending]:
        """Ask the agents of *processes_* for *call*. Of what they do together either all have been told to begin, or none.

        A quiesce tells those that are *movable* that an offload follows; with *keep* the communicators are left alone, with *accept* their
        hazards are taken on. After comms they tell what stays on the GPU, to *measure* it.
        """
        if call not in protocol.TOGETHER:
            said = {"keep": keep, "accept": accept}
            more = {p: {"offload": p in movable, **said} if call is Call.QUIESCE else {} for p in processes_}
            return {p: self._ask(call, p, operation, timeout_s, **more[p]) for p in processes_}
        ours, theirs = os.pipe()  # theirs is what we write to: closed by our death, too
        try:
            said = {"keep": keep, "measure": measure} if call is Call.COMMS else {}
            calls = {p: self._ask(call, p, operation, timeout_s, ours, **said) for p in processes_}
            until = time.monotonic() + HELLO_DEADLINE_S
            ready = [c.ready(until) for c in calls.values()]
            if all(ready):
                os.write(theirs, b"!")
        finally:
            os.close(theirs)
            os.close(ours)
        for p, c in calls.items():
            if c.outcome is not None and c.outcome.result == "agent:SILENT":
                self.links.pop(p).sock.close()  # what it says later is not for the next question
        return calls

    def _ask(self, call: Call, process: ProcessId, operation: str, timeout_s: float, pipe: int | None = None, **more: Any) -> AgentPending:
        link = self._connect(process)
        if link is None:
            gone = Link(socket.socketpair()[0])
            return AgentPending(call, process, gone, outcome=Outcome("agent:VANISHED", message="the agent does not answer"))
        return AgentPending(call, process, link, link.ask(call, pipe, operation=operation, seconds=timeout_s, **more))

    def close(self) -> None:
        for link in self.links.values():
            link.sock.close()
        self.links.clear()

    def _connect(self, process: ProcessId) -> Link | None:
        if process in self.links and self.links[process].open:
            return self.links[process]
        uid = processes.uid_of(process.pid)
        path = protocol.find(process, uid)
        if path is None:
            return None
        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)  # a stopped process with more callers than its socket takes would keep us for ever
        try:
            sock.connect(str(path))
            sock.setblocking(True)
            pid, peer = processes.peer_of(sock)
        except OSError:
            sock.close()
            return None
        if pid != process.pid or peer != uid or os.geteuid() not in (0, uid):
            sock.close()  # somebody else listens in its place
            return None
        self.links[process] = Link(sock)
        return self.links[process]
