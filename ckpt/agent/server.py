"""The agent: a thread in the program that carries messages. GPU and NCCL work runs on the program's own thread, at its safe point.

Stages (``protocol.MOVES``): running → quiesced (the program stands at its safe point) → offloaded, where its own allocator has something
to take off the GPU → communicators suspended → disarmed.
A controller that vanishes before *disarm* leaves a process that goes back by itself, on every rank; after it nothing happens
until a controller comes, since from then on the process may be locked, checkpointed, or on another GPU. A new controller is answered
only when all that others had sent, and their end, has been taken in: a late request of a dead one cannot overtake its look.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import queue
import selectors
import socket
import termios
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpuckpt.agent import protocol
from gpuckpt.agent.communicators import AsFoundError, Communicators
from gpuckpt.agent.memory import Memory, PoolMemory
from gpuckpt.inspect.processes import peer_of
from gpuckpt.model import State

_REQUEST_MAX_BYTES = 1 << 16
_FDS_MAX = 1
#: How long to wait before a connection that could not be taken is tried again, in seconds.
_NO_DESCRIPTOR_S = 0.05


_ON_THE_PROGRAMS_THREAD = frozenset({"offload", "comms", "comms-resume", "onload"})  # and "quiesce", by its coming to the safe point


class _HalfWayError(Exception):
    """An offload that failed, and could not be taken back."""


@dataclass(eq=False, slots=True)
class _Connection:
    sock: socket.socket
    received: bytes = b""
    asked: str = ""  # the call that this connection waits for
    number: int = 0  # of that request
    until: float = 0.0


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A call that begins when its pipe has a byte."""

    connection: _Connection
    number: int
    call: str
    pipe: int
    seconds: float


@dataclass(eq=False, slots=True)
class Agent:
    """One a process. ``wanted`` is the only thing that the program's loop reads while nothing goes on."""

    communicators: Communicators
    path: Path
    summon: Callable[[int], None] | None = None  # told of the visit that begins, and 0 when it is over
    safe_point: str = "gpuckpt.agent.checkpoint_here()"  # what to call it
    memory: Memory = field(default_factory=PoolMemory)
    wanted: bool = False
    idle: Callable[[], None] | None = None  # makes the program's device current in a thread of ours: the program uses no GPU for now
    stage: State = State.RUNNING
    operation: str = ""
    visits: int = 0  # how often the program has come to its safe point
    _owner: _Connection | None = None
    _connections: list[_Connection] = field(default_factory=list)
    _standing: threading.Lock = field(default_factory=threading.Lock)  # held by who stands at the safe point
    _visit: int = 0  # counts the quiesces: what belongs to an earlier one must not count for this one
    _jobs: queue.SimpleQueue[tuple[int, str, Callable[[], Any] | None]] = field(default_factory=queue.SimpleQueue)  # None: go on
    _done: queue.SimpleQueue[tuple[int, str, str, Any]] = field(
        default_factory=queue.SimpleQueue
    )  # (visit, call, error words or "", result)
    _prepared: _Prepared | None = None
    _greeted: list[tuple[_Connection, int]] = field(default_factory=list)  # they said hello, and have no answer yet
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _running: str = ""  # the job that the program's thread has been given
    _offloaded: bool = False  # something may have left the GPU, and has to come back
    _comms_kept: bool = False  # its communicators were to be left alone
    _broken: str = ""  # how its communicators failed: it stays where it is until a controller has heard of it
    _listener: socket.socket = field(default_factory=lambda: socket.socket(socket.AF_UNIX))
    _woken: tuple[socket.socket, socket.socket] = field(default_factory=socket.socketpair)

    def start(self) -> None:
        """Listen. Raises ``OSError`` where the socket cannot be made."""
        protocol.sweep(self.path.parent)
        unheard = self.path.with_suffix(".new")  # until somebody listens on it another's sweep would take it away
        unheard.unlink(missing_ok=True)
        self._listener.bind(str(unheard))
        unheard.chmod(0o600)
        self._listener.listen(8)
        unheard.rename(self.path)
        threading.Thread(target=self._serve, name="gpuckpt-agent", daemon=True).start()

    def close_in_child(self) -> None:
        """After a fork the child has no agent: it must not answer in its parent's name."""
        self._standing = threading.Lock()  # whoever held it stayed behind
        for sock in (self._listener, *self._woken, *(c.sock for c in self._connections)):
            with contextlib.suppress(OSError):
                sock.close()

    # The program's thread.

    def park(self) -> None:
        """Stand at the safe point, doing what the operation needs done on this thread, until it ends."""
        with self._standing:
            if self.wanted:
                self._stand()

    def stand_in(self) -> None:
        """Let a thread of ours stand there, as long as the program is idle."""

        def stand() -> None:
            with self._standing:
                if self.wanted and self.idle is not None:
                    self.idle()
                    self._stand()

        threading.Thread(target=stand, name="gpuckpt-stand-in", daemon=True).start()

    def end_idle(self) -> None:
        """The program wants to go on with its GPU: returns when nobody stands for it any more."""
        with self._standing:
            self.idle = None

    def _stand(self) -> None:
        visit = self._visit
        self.communicators.synchronise()
        self._finish("quiesce", "", visit)
        while True:
            when, call, work = self._jobs.get()
            if when != visit:
                continue  # of a visit that was given up before we came
            if work is None:
                return
            try:
                self._finish(call, "", visit, work())
            except Exception as e:  # noqa: BLE001 - the controller must hear of it, the program must not
                self._finish(call, _words(e), visit, isinstance(e, (_HalfWayError, AsFoundError)))

    def _finish(self, call: str, error: str, visit: int, result: Any = None) -> None:
        self._done.put((visit, call, error, result))
        self._wake()

    # The agent's thread.

    def _serve(self) -> None:
        selector = self._selector
        selector.register(self._listener, selectors.EVENT_READ, None)
        selector.register(self._woken[0], selectors.EVENT_READ, None)
        while True:
            waits = [c.until for c in self._connections if c.asked == "quiesce"]
            timeout = max(0.0, min(waits) - time.monotonic()) if waits else None
            events = selector.select(0.0 if self._greeted else timeout)
            if not events:
                self._greet()  # nobody has more to say
            for key, _ in events:
                if key.fileobj is self._listener:
                    if connection := self._accept():
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

    def _accept(self) -> _Connection | None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # the program has no descriptor left: whoever calls waits until there is one
            time.sleep(_NO_DESCRIPTOR_S)
            return None
        _, uid = peer_of(sock)
        if uid not in (0, os.geteuid()):
            sock.close()
            return None
        connection = _Connection(sock)
        self._connections.append(connection)
        return connection

    def _read(self, connection: _Connection) -> bool:
        pipes: list[int] = []
        try:
            data, pipes, _, _ = socket.recv_fds(connection.sock, _REQUEST_MAX_BYTES, _FDS_MAX)
        except OSError:
            data = b""
        connection.received += data
        while b"\n" in connection.received:
            line, _, connection.received = connection.received.partition(b"\n")
            try:
                self._handle(connection, json.loads(line), pipes)
            except (ValueError, LookupError, TypeError) as e:
                self._answer(connection, 0, "FAILED", f"not a request: {e!r}")
        for pipe in pipes:  # nobody wanted it
            os.close(pipe)
        return bool(data) and len(connection.received) < _REQUEST_MAX_BYTES

    def _greet(self) -> None:
        for connection, number in self._greeted:
            try:
                seen = {"communicators": self.communicators.describe(), "hazards": self.communicators.hazards()}
                movable = self.memory.describe() if self.stage is State.RUNNING and not self.wanted else None
            except Exception as e:  # noqa: BLE001 - whatever the program's libraries raise, this thread goes on
                self._answer(connection, number, "FAILED", f"{type(e).__name__}: {e}")
                continue
            self._answer(connection, number, "SUCCESS", "", **seen, movable=movable, offloaded=self._offloaded)
        self._greeted.clear()

    def _handle(self, connection: _Connection, request: dict[str, Any], pipes: list[int]) -> None:
        """Take in one *request*. One that is prepared keeps its pipe, taken out of *pipes*."""
        call, operation, number = request["call"], request.get("operation", ""), int(request.get("number", 0))
        if call == "hello":
            self._greeted.append((connection, number))
            return
        if request.get("version") != protocol.VERSION or call not in protocol.MOVES:
            self._answer(connection, number, "FAILED", f"this agent speaks version {protocol.VERSION} and does not know {call!r}")
            return
        seconds = float(request["seconds"])
        may_begin_in = protocol.MOVES[call][0]
        alone = call == self._running and self._owner is None  # it is at it already, since its controller was gone
        if (self.stage not in may_begin_in or self._running or self._prepared or (self.wanted and call == "quiesce")) and not alone:
            is_in = f"still in its {self._running}" if self._running else str(self.stage)
            needs = " or ".join(may_begin_in)
            self._answer(connection, number, "ILLEGAL_STATE", f"{call} needs a process that is {needs}; this one is {is_in}")
            return
        if self._owner is not connection and self._owner is not None and call != "arm":
            self._answer(connection, number, "ILLEGAL_STATE", "another controller is at work on this process")
            return
        if call == "quiesce":
            self.memory.announce(bool(request.get("offload")))
        elif call == "comms":
            self._comms_kept = bool(request.get("keep"))
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

    def _begin(self, connection: _Connection, number: int, call: str, seconds: float) -> None:
        connection.asked, connection.number, connection.until = call, number, time.monotonic() + seconds
        if call == self._running:
            return  # it will be done
        if self.stage is protocol.leads_to(call, self._offloaded):
            self._done_with(connection, "SUCCESS", "")  # and now it is
            return
        if call == "quiesce":
            self._visit += 1
            self.wanted = True  # the program's thread answers, when it comes to its safe point
            if self.idle is not None:
                self.stand_in()
            if self.summon is not None:
                self.summon(self._visit)
        elif call in _ON_THE_PROGRAMS_THREAD:
            self._give(call)
        else:
            self.stage = protocol.MOVES[call][1]
            words = ""
            if call == "unquiesce":  # the program goes on, and finds out for itself; the controller must not think that all is well
                words, self._broken = self._broken, ""
                self._release()
            self._finish(call, words, self._visit)

    def _give(self, call: str) -> None:
        """Have *call* done by the program's thread."""
        work: dict[str, Callable[[], Any]] = {
            "offload": self._offload,
            "comms": _nothing if self._comms_kept else self.communicators.suspend,
            "comms-resume": _nothing if self._comms_kept else self.communicators.resume,
            "onload": self.memory.onload,
        }
        self._running = call
        self._offloaded = self._offloaded or call == "offload"
        self._jobs.put((self._visit, call, work[call]))

    def _offload(self) -> dict[str, int]:
        """On the program's thread. What fails half-way is taken back at once; where that fails too, it is for a later ``onload``."""
        try:
            return self.memory.offload()
        except Exception as error:
            try:
                self.memory.onload()
            except Exception as e:
                raise _HalfWayError(f"{_words(error)}; and what had left could not come back: {_words(e)}") from e
            raise

    def _collect(self) -> None:
        """Take in what the program's thread has done."""
        while not self._done.empty():
            visit, call, error, result = self._done.get()
            if visit != self._visit or (call == "quiesce" and not self.wanted):
                continue  # it came when the visit had been given up, and has been told to go on
            self._running = ""
            refused = call == "comms" and bool(error and result)
            if call in ("comms", "comms-resume"):
                self._broken = "" if refused else error
            if call == "offload" and error:
                self._offloaded = result
                self.stage = State.OFFLOADED if result else self.stage
            if not error and (call == "quiesce" or call in _ON_THE_PROGRAMS_THREAD):
                self.stage = protocol.leads_to(call, self._offloaded)
                self._offloaded = self._offloaded and call != "onload"
            owner = self._owner
            if owner is not None and owner.asked == call:
                more = {"moved": result} if call == "offload" and not error else {}
                self._done_with(owner, "REFUSED" if refused else "FAILED" if error else "SUCCESS", error, **more)
                if call == "unquiesce":
                    self._owner = None
            elif owner is None and not (call == "onload" and error):  # without room it waits for somebody who made some
                self._go_back()

    def _expire(self) -> None:
        """A program that has not come to its safe point in time goes on as if nobody had asked."""
        for connection in self._connections:
            if connection.asked == "quiesce" and self.stage is State.RUNNING and time.monotonic() >= connection.until:
                self._release()
                self._owner = None
                seen = "has not come to" if self.visits else "never came to"
                self._done_with(connection, "NOT_READY", f"the program {seen} its safe point ({self.safe_point})")

    def _lost(self, connection: _Connection) -> None:
        self._connections.remove(connection)
        connection.sock.close()
        self._greeted = [greeted for greeted in self._greeted if greeted[0] is not connection]
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
        elif self.stage is State.QUIESCED or (self.stage is State.RUNNING and self.wanted):
            self.stage = State.RUNNING
            self._release()

    def _release(self) -> None:
        self.wanted = False
        self._jobs.put((self._visit, "", None))
        if self.summon is not None:
            self.summon(0)

    def _done_with(self, connection: _Connection, result: str, words: str, **more: Any) -> None:
        """Answer the call that *connection* waits for."""
        connection.asked = ""
        self._answer(connection, connection.number, result, words, **more)

    def _answer(self, connection: _Connection, number: int, result: str, words: str, **more: Any) -> None:
        answer = {"version": protocol.VERSION, "number": number, "result": result, "stage": self.stage, "message": words}
        with contextlib.suppress(OSError):
            connection.sock.send(protocol.encode({**answer, "visits": self.visits, **more}))

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._woken[1].send(b"x")


def _nothing() -> None: ...


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
