"""The agent: a thread in the program that carries messages. GPU and NCCL work runs on the program's own thread, at its safe point.

Stages (``protocol.MOVES``): running → quiesced (the program stands at its safe point) → offloaded, where its own allocator has something
to take off the GPU → communicators suspended → disarmed.
A controller that vanishes before *disarm* leaves a process that goes back by itself, on every rank; after it nothing happens
until a controller comes, since from then on the process may be locked, checkpointed, or on another GPU. A new controller is answered
only when all that others had sent, and their end, has been taken in: a late request of a dead one cannot overtake its look.

What communicators are and hold the program's thread tells (:class:`gpuckpt.agent.place.Seen`): when a hello asks for it, if it comes by
soon enough, and in any case when it stands. So what was told of a running program may be old, and is held against what is seen then.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import fcntl
import os
import selectors
import socket
import termios
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from gpuckpt.agent import protocol, stays
from gpuckpt.agent.communicators import Communicators
from gpuckpt.agent.memory import Memory, PoolMemory
from gpuckpt.agent.place import Done, HalfWayError, Place, Seen, words
from gpuckpt.agent.wire import Connection, Listener, accept
from gpuckpt.model import State

_ON_THE_PROGRAMS_THREAD = frozenset({"offload", "comms", "comms-resume", "onload"})  # and "quiesce", by its coming to the safe point
#: Stages in which the communicators must not be touched.
_SUSPENDED = frozenset({State.COMMS_SUSPENDED, State.DISARMED})


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A call that begins when its pipe has a byte."""

    connection: Connection
    number: int
    call: str
    pipe: int
    seconds: float


@dataclass(eq=False, slots=True)
class _Greeted:
    """Who said hello, and has no answer yet. ``look_s``: how long it would wait for the program to come by; ``until``: it does."""

    connection: Connection
    number: int
    look_s: float
    until: float | None = None
    unseen: str = ""


@dataclass(eq=False, slots=True)
class Agent:
    """One a process."""

    communicators: Communicators
    path: Path
    summon: Callable[[int], None] | None = None  # told of the visit that begins, and 0 when it is over
    safe_point: str = "gpuckpt.agent.checkpoint_here()"  # what to call it
    memory: Memory = field(default_factory=PoolMemory)
    stage: State = State.RUNNING
    operation: str = ""
    place: Place = field(init=False)
    _done: SimpleQueue[Done] = field(default_factory=SimpleQueue)  # by the program's thread
    _seen: Seen = field(default_factory=Seen)
    _owner: Connection | None = None
    _connections: list[Connection] = field(default_factory=list)
    _prepared: _Prepared | None = None
    _greeted: list[_Greeted] = field(default_factory=list)
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _running: str = ""  # the job that the program's thread has been given
    _offloaded: bool = False  # something may have left the GPU, and has to come back
    _comms_kept: bool = False  # its communicators were to be left alone
    _measures: bool = False  # what stays is to be told
    _broken: str = ""  # how its communicators failed: it stays where it is until a controller has heard of it
    _listener: Listener = field(init=False)
    _look_at: float = 0.0
    _woken: tuple[socket.socket, socket.socket] = field(default_factory=socket.socketpair)

    def __post_init__(self) -> None:
        self.place = Place(self.communicators, self._finish)

    def start(self) -> None:
        """Listen. Raises ``OSError`` where the socket cannot be made."""
        self._listener = Listener(self.path)
        threading.Thread(target=self._serve, name="gpuckpt-agent", daemon=True).start()

    def close_in_child(self) -> None:
        """After a fork the child has no agent: it must not answer in its parent's name."""
        self.place.in_child()
        for sock in (self._listener.sock, *self._woken, *(c.sock for c in self._connections)):
            with contextlib.suppress(OSError):
                sock.close()

    def _finish(self, done: Done) -> None:
        """On the program's thread."""
        self._done.put(done)
        with contextlib.suppress(OSError):
            self._woken[1].send(b"x")

    # The agent's thread.

    def _serve(self) -> None:
        selector = self._selector
        selector.register(self._listener.sock, selectors.EVENT_READ, None)
        selector.register(self._woken[0], selectors.EVENT_READ, None)
        while True:
            events = selector.select(self._timeout())
            if not events:
                self._greet()  # nobody has more to say
            for key, _ in events:
                if key.fileobj is self._listener.sock:
                    if connection := accept(self._listener.sock):
                        self._connections.append(connection)
                        selector.register(connection.sock, selectors.EVENT_READ, connection)
                elif key.fileobj is self._woken[0]:
                    self._woken[0].recv(4096)
                elif isinstance(key.data, _Prepared):
                    self._decided(key.data)
                elif not self._read(key.data):
                    selector.unregister(key.data.sock)
                    self._lost(key.data)
            self._collect()
            self._expire()
            self._be_found()

    def _be_found(self) -> None:
        """Now and then: whoever removed its socket must not keep it from being called, suspended or not."""
        if time.monotonic() >= self._look_at:
            self._listener.be_found(self._selector)
            self._look_at = time.monotonic() + protocol.FOUND_S

    def _timeout(self) -> float:
        """How long there is nothing to do unless somebody says something, in seconds."""
        if any(g.until is None for g in self._greeted):
            return 0.0
        waits = [self._look_at, *(c.until for c in self._connections if c.asked == "quiesce")]
        waits += [g.until for g in self._greeted if g.until is not None]
        return max(0.0, min(waits) - time.monotonic())

    def _read(self, connection: Connection) -> bool:
        return connection.read(lambda r, fds: self._handle(connection, r, fds), lambda why: self._answer(connection, 0, "FAILED", why))

    # Who says hello.

    def _greet(self) -> None:
        """Answer all that need not wait for the program."""
        for greeted in [g for g in self._greeted if g.until is None]:
            try:
                if (patience_s := self._patience_s(greeted.look_s)) > 0:
                    greeted.until = time.monotonic() + patience_s
                    self.place.ask_to_look()
                    continue
                movable = self.memory.describe() if self.stage is State.RUNNING and not self.place.called else None
                obstacles, blind = self.communicators.obstacles(), self.stage is State.RUNNING and self._changed()
                looks = blind or (self.stage is State.RUNNING and bool(self._seen.communicators or self._seen.hazards))
            except Exception as e:  # noqa: BLE001 - whatever the program's libraries raise, this thread goes on
                self._answer(greeted.connection, greeted.number, "FAILED", words(e))
            else:
                suspended = self.stage in _SUSPENDED
                hazards = [self._broken] if self._broken else [] if suspended else list(self._seen.hazards)
                communicators = [{**c, "host_bytes": 0} if suspended else c for c in self._seen.communicators]
                greeted.connection.told = self._seen.ranks
                seen = {"communicators": communicators, "hazards": [*obstacles, *hazards], "unseen": greeted.unseen}
                more = {"looks": looks, "blind": blind, "movable": movable, "offloaded": self._offloaded}
                self._answer(greeted.connection, greeted.number, "SUCCESS", "", **seen, **more)
            self._greeted.remove(greeted)

    def _patience_s(self, look_s: float) -> float:
        """How long to wait for the program to come by, if a controller waits for *look_s*: long where nothing is known otherwise."""
        if look_s <= 0 or self.stage is not State.RUNNING:
            return 0.0
        if self._changed() or self._seen.hazards:
            return look_s
        return min(look_s, protocol.LOOK_S) if self._seen.communicators else 0.0

    def _changed(self) -> bool:
        """Whether there may be other communicators than those that were seen last."""
        return self.communicators.sockets() != self._seen.sockets

    def _saw(self, seen: Seen) -> None:
        """The program's thread has looked: whoever waits for it is answered once nobody has more to say."""
        self._seen = seen
        self.place.looked()
        for g in self._greeted:
            g.look_s, g.until = 0.0, None

    # What a controller asks for.

    def _handle(self, connection: Connection, request: dict[str, Any], pipes: list[int]) -> None:
        """Take in one *request*. One that is prepared keeps its pipe, taken out of *pipes*."""
        call, operation, number = request["call"], request.get("operation", ""), int(request.get("number", 0))
        if call == "hello":
            self._greeted.append(_Greeted(connection, number, float(request.get("look_s", 0.0))))
            return
        if request.get("version") != protocol.VERSION or call not in protocol.MOVES:
            self._answer(connection, number, "FAILED", f"this agent speaks version {protocol.VERSION} and does not know {call!r}")
            return
        seconds = float(request["seconds"])
        may_begin_in = protocol.MOVES[call][0]
        alone = call == self._running and self._owner is None  # it is at it already, since its controller was gone
        if (self.stage not in may_begin_in or self._running or self._prepared or (self.place.called and call == "quiesce")) and not alone:
            is_in = f"still in its {self._running}" if self._running else str(self.stage)
            needs = " or ".join(may_begin_in)
            self._answer(connection, number, "ILLEGAL_STATE", f"{call} needs a process that is {needs}; this one is {is_in}")
            return
        if self._owner is not connection and self._owner is not None and call != "arm":
            self._answer(connection, number, "ILLEGAL_STATE", "another controller is at work on this process")
            return
        if call == "quiesce":
            self.memory.announce(bool(request.get("offload")))
            connection.keeps, connection.accepts = bool(request.get("keep")), bool(request.get("accept"))
        elif call == "comms":
            self._comms_kept, self._measures = bool(request.get("keep")), bool(request.get("measure"))
        if call in protocol.TOGETHER:
            self._prepared = _Prepared(connection, number, call, pipes.pop(), seconds)
            self._selector.register(self._prepared.pipe, selectors.EVENT_READ, self._prepared)
        self._owner, self.operation = connection, operation
        if call in protocol.TOGETHER:
            self._answer(connection, number, "READY", "")
        else:
            self._begin(connection, number, call, seconds)

    def _decided(self, prepared: _Prepared) -> None:
        """All ranks do it now, or none does: the pipe has a byte, or it was closed without one."""
        waiting = array.array("i", [0])
        fcntl.ioctl(prepared.pipe, termios.FIONREAD, waiting)
        self._selector.unregister(prepared.pipe)
        os.close(prepared.pipe)
        self._prepared = None
        if waiting[0]:
            self._begin(prepared.connection, prepared.number, prepared.call, prepared.seconds)
        elif self._owner is None:
            self._go_back()
        else:
            self._answer(prepared.connection, prepared.number, "DROPPED", "another rank was not ready; nothing was begun")

    def _begin(self, connection: Connection, number: int, call: str, seconds: float) -> None:
        connection.asked, connection.number, connection.until = call, number, time.monotonic() + seconds
        if call == self._running:
            return  # it will be done
        if self.stage is protocol.leads_to(call, self._offloaded):
            self._done_with(connection, "SUCCESS", "")  # and now it is
            return
        if call == "quiesce":
            visit = self.place.call()  # the program's thread answers, when it comes to its safe point
            if self.summon is not None:
                self.summon(visit)
        elif call in _ON_THE_PROGRAMS_THREAD:
            self._give(call)
        else:
            self.stage = protocol.MOVES[call][1]
            error = ""
            if call == "unquiesce":  # the program goes on, and finds out for itself; the controller must not think that all is well
                error, self._broken = self._broken, ""
                self._release()
            self._finish(Done(self.place.visit, call, error))

    def _give(self, call: str) -> None:
        """Have *call* done by the program's thread."""
        work: dict[str, Callable[[], Any]] = {
            "offload": self._offload,
            "comms": self._comms,
            "comms-resume": (lambda: None) if self._comms_kept else self.communicators.resume,
            "onload": self.memory.onload,
        }
        self._running = call
        self._offloaded = self._offloaded or call == "offload"
        self.place.give(call, work[call])

    def _offload(self) -> dict[str, Any]:
        """On the program's thread. What fails half-way is taken back at once; where that fails too, it is for a later ``onload``."""
        try:
            return {"moved": self.memory.offload()}
        except Exception as error:
            try:
                self.memory.onload()
            except Exception as e:
                raise HalfWayError(f"{words(error)}; and what had left could not come back: {words(e)}") from e
            raise

    def _comms(self) -> dict[str, Any]:
        """On the program's thread."""
        if not self._comms_kept:
            self.communicators.suspend()
        return {"stays": stays.classes(self.communicators, self.memory)} if self._measures else {}

    def _collect(self) -> None:
        """Take in what the program's thread has done."""
        while not self._done.empty():
            done = self._done.get()
            if done.call == "look":
                self._saw(done.result)
                continue
            if done.visit != self.place.visit or (done.call == "quiesce" and not self.place.called):
                continue  # it came when the visit had been given up, and has been told to go on
            if done.call == "quiesce":
                self._saw(done.result)
            self._take(done)

    def _take(self, done: Done) -> None:
        call, error, owner = done.call, done.error, self._owner
        self._running = ""
        refused = call == "comms" and bool(error and done.result)
        if call in ("comms", "comms-resume"):
            self._broken = "" if refused else error
            if self._broken:
                self._seen = dataclasses.replace(self._seen, hazards=(error,))
        if call == "offload" and error:
            self._offloaded = done.result
            self.stage = State.OFFLOADED if done.result else self.stage
        if call == "quiesce" and owner is not None and (refusal := self._refusal(owner)):
            self._release()
            self._owner = None
            self._done_with(owner, *refusal)
            return
        if not error and (call == "quiesce" or call in _ON_THE_PROGRAMS_THREAD):
            self.stage = protocol.leads_to(call, self._offloaded)
            self._offloaded = self._offloaded and call != "onload"
        if owner is not None and owner.asked == call:
            more = done.result if call in ("offload", "comms") and not error else {}
            self._done_with(owner, "REFUSED" if refused else "FAILED" if error else "SUCCESS", error, **more)
            if call == "unquiesce":
                self._owner = None
        elif owner is None and not (call == "onload" and error):  # without room it waits for somebody who made some
            self._go_back()

    def _refusal(self, owner: Connection) -> tuple[str, str] | None:
        """Why the program, which stands, is not suspended: it is not what its controller was told, or was told too little."""
        if owner.keeps:
            return None
        if self._seen.hazards and not owner.accepts:
            return "REFUSED", "; ".join(self._seen.hazards)
        if owner.told is not None and owner.told != self._seen.ranks:
            names = ", ".join(sorted({str(name) for name, _, _ in owner.told ^ self._seen.ranks}))
            return "CHANGED", f"its communicators are not those that it had when the suspend began ({names})"
        return None

    def _expire(self) -> None:
        """A program that has not come to its safe point in time goes on as if nobody had asked."""
        now = time.monotonic()
        seen = "has not come to" if self.place.visits else "never came to"
        unseen = f"the program {seen} its safe point ({self.safe_point})"
        for g in self._greeted:
            if g.until is not None and now >= g.until:
                g.look_s, g.until, g.unseen = 0.0, None, unseen  # what it sees when it comes is for the next
        for connection in self._connections:
            if connection.asked == "quiesce" and self.stage is State.RUNNING and now >= connection.until:
                self._release()
                self._owner = None
                self._done_with(connection, "NOT_READY", unseen)

    def _lost(self, connection: Connection) -> None:
        self._connections.remove(connection)
        connection.sock.close()
        self._greeted = [greeted for greeted in self._greeted if greeted.connection is not connection]
        if connection is self._owner:
            self._owner = None
            if not self._running and not self._prepared:  # else its end decides
                self._go_back()

    def _go_back(self) -> None:
        """Nobody is at work on us any more. Every rank sees the same, so the collective way back completes."""
        if self._broken:
            return
        if self.stage is State.COMMS_SUSPENDED:
            self._give("comms-resume")
        elif self.stage is State.OFFLOADED:
            self._give("onload")
        elif self.stage is State.QUIESCED or (self.stage is State.RUNNING and self.place.called):
            self.stage = State.RUNNING
            self._release()

    def _release(self) -> None:
        self.place.dismiss()
        if self.summon is not None:
            self.summon(0)

    def _done_with(self, connection: Connection, result: str, said: str, **more: Any) -> None:
        """Answer the call that *connection* waits for."""
        connection.asked = ""
        self._answer(connection, connection.number, result, said, **more)

    def _answer(self, connection: Connection, number: int, result: str, said: str, **more: Any) -> None:
        answer = {"version": protocol.VERSION, "number": number, "result": result, "stage": self.stage, "message": said}
        connection.send({**answer, "visits": self.place.visits, **more})
