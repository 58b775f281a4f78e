"""How the workers of a program tell the process that gives them work that they are to stand still, and for which visit.

A worker's :class:`Ring` connects to its engine's :class:`Bell` and says the number of its visit; the connection stays for as long as the
worker is to stand still. Both ends are of one user, and each knows the other's pid from the kernel.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from gpuckpt.inspect import processes

#: How long a worker waits for the engine's thread to take its connection, in seconds.
CONNECT_S = 1.0
_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG = 1, 2


def address(pid: int) -> str | None:
    """The abstract socket of the engine *pid*: without a file, it ends with the engine. None if there is no such process."""
    engine = processes.read(pid)
    return f"\0gpuckpt-engine-{pid}-{engine.start_ticks:x}" if engine else None


@dataclass(eq=False, slots=True)
class Bell:
    """The engine's side. When all *workers* have rung, *wake* is called, on a thread of its own."""

    workers: int
    wake: Callable[[], None]
    _rung: dict[socket.socket, tuple[int, int]] = field(
        default_factory=dict
    )  # pid and visit: a worker's next may come before its last has gone
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def start(self) -> None:
        """Listen. Raises ``OSError`` where somebody else has the address."""
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address(os.getpid()) or "")
        listener.listen(64)
        threading.Thread(target=self._serve, args=(listener,), name="gpuckpt-bell", daemon=True).start()

    def all_rung(self) -> dict[int, int] | None:
        """The visit of each worker, by pid; None until all have rung."""
        with self._changed:
            rung = dict(self._rung.values())
        return rung if len(rung) == self.workers else None

    def wait_for_silence(self, called: dict[int, int]) -> None:
        """Return when none of the visits in *called* is wanted any more."""
        with self._changed:
            self._changed.wait_for(lambda: not called.items() & set(self._rung.values()))

    def _serve(self, listener: socket.socket) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ, None)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is listener:
                        sock, _ = listener.accept()
                        pid, uid = processes.peer_of(sock)
                        if uid == os.geteuid():
                            selector.register(sock, selectors.EVENT_READ, pid)
                        else:
                            sock.close()
                    elif not self._read(key.fileobj, key.data):  # type: ignore[arg-type]  # what was registered is a socket
                        selector.unregister(key.fileobj)
                        key.fileobj.close()  # type: ignore[union-attr]

    def _read(self, sock: socket.socket, pid: int) -> bool:
        """Take in what a worker says, in one message; False when it has gone."""
        try:
            visit = int(sock.recv(64))
        except (OSError, ValueError):
            visit = 0
        with self._changed:
            if visit:
                self._rung[sock] = (pid, visit)
            else:
                self._rung.pop(sock, None)
                self._changed.notify_all()
        if visit and self.all_rung():
            self.wake()
        return bool(visit)


@dataclass(eq=False, slots=True)
class Ring:
    """The worker's side; called by its agent with the visit that begins, and with 0 when it is over."""

    engine_pid: int
    visit: int = 0
    _sock: socket.socket | None = None

    def __call__(self, visit: int) -> None:
        if self._sock is not None:
            self._sock.close()
        self.visit, self._sock = visit, self._connect() if visit else None
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.send(b"%d" % visit)

    def heard(self) -> bool:
        """Whether the engine listens."""
        sock = self._connect()
        if sock is None:
            return False
        sock.close()
        return True

    def _connect(self) -> socket.socket | None:
        name = address(self.engine_pid)
        if name is None:
            return None
        with contextlib.ExitStack() as undo, contextlib.suppress(OSError):
            sock = undo.enter_context(socket.socket(socket.AF_UNIX))
            sock.settimeout(CONNECT_S)
            sock.connect(name)
            if processes.peer_of(sock) == (self.engine_pid, os.geteuid()):
                undo.pop_all()
                return sock
        return None  # nobody is there, or somebody else in its place


@contextlib.contextmanager
def ending_with(pid: int) -> Iterator[None]:
    """Meanwhile this process ends with its parent *pid*, whose end it would not see: nobody else could ever give it work."""
    if pid == os.getpid():
        yield
        return
    prctl, before = ctypes.CDLL(None).prctl, ctypes.c_int()
    prctl(_PR_GET_PDEATHSIG, ctypes.byref(before))
    prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != pid:
        raise SystemExit(1)  # it ended just before
    yield
    prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(before.value))
