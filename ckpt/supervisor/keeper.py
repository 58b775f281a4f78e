"""The parent of a supervised command: a small init that forwards signals, reaps, and ends the whole tree when its supervisor dies.

It is a process of its own because the supervisor cannot clean up after its own SIGKILL. As a subreaper it inherits every orphan of
the tree, also those that made a session of their own, so none can be overlooked. It speaks JSON lines over the socket that
``GPUCKPT_KEEPER_FD`` names: first the order to start, then ``{"signal": N}``, ``{"stop": N, "grace_s": S}`` or ``{"kill": true}``;
it answers ``{"started": PID}`` or ``{"failed": ERRNO, "what": …}``, and at last ``{"exited": STATUS}`` (as ``os.waitpid`` gives it).

Where the child shall outlive its supervisor, the keeper listens on a socket for the next one: whoever of the same user connects gets
``{"started": PID}`` again, with the descriptor that holds the run's name, and is the supervisor from then on.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from gpuckpt.inspect.processes import KEEPER, below, peer_of, send

#: How long what is left of the tree may take after the command itself has ended, in seconds.
LEFTOVER_GRACE_S = 3.0
#: How long a killed process may take to disappear before the keeper stops waiting for it, in seconds.
DEATH_S = 30.0
PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.02


class Keeper:
    """One command from its start to the end of its last descendant."""

    def __init__(self, supervisor: socket.socket, listener: socket.socket | None = None, name_fd: int = -1) -> None:
        self._supervisor: socket.socket | None = supervisor
        self._listener, self._name_fd = listener, name_fd
        self._unread = b""
        self._status: int | None = None
        self._kill_at: float | None = None
        self.child = 0
        self._woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def run(self, command: list[str], environ: dict[str, str]) -> None:
        reader, writer = os.pipe2(os.O_CLOEXEC)
        me = os.getpid()
        self.child = os.fork()
        if self.child == 0:
            _become(command, environ, writer, me)
        os.close(writer)
        failure = os.read(reader, 64)
        os.close(reader)
        if failure:
            os.waitpid(self.child, 0)
            self._tell(failed=int(failure))
            return
        self._tell(started=self.child)
        while self._status is None:
            self._wait()
        self._end_rest()
        self._tell(exited=self._status)
        if self._supervisor is not None:
            self._supervisor.close()
        if self._listener is not None:
            with contextlib.suppress(OSError):
                Path(self._listener.getsockname()).unlink()

    def _wait(self) -> None:
        """Until something happens: an order, the supervisor's death, a child's, or the end of the grace."""
        timeout = None if self._kill_at is None else max(0.0, self._kill_at - time.monotonic())
        watched: list[int | socket.socket] = [self._woken]
        if other := self._supervisor or self._listener:
            watched.append(other)
        ready, _, _ = select.select(watched, [], [], timeout)
        if self._woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._woken, 4096)
        if self._supervisor is not None and self._supervisor in ready:
            self._receive()
        elif self._listener is not None and self._listener in ready:
            self._accept()
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self.kill()
            self._kill_at = time.monotonic() + 0.2  # until the command is gone
        self._reap()

    def _receive(self) -> None:
        assert self._supervisor is not None
        try:
            data = self._supervisor.recv(65536)
        except OSError:
            data = b""
        if not data:
            self._supervisor.close()
            self._supervisor = None
            self._unread = b""
            if self._listener is None:
                self._kill_at = time.monotonic()
            return
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            self._obey(json.loads(line))

    def _accept(self) -> None:
        """A supervisor comes for a child that has lost its own."""
        assert self._listener is not None
        with contextlib.suppress(OSError):
            new, _ = self._listener.accept()
            _, uid = peer_of(new)
            if uid not in (0, os.geteuid()):
                new.close()
                return
            socket.send_fds(new, [json.dumps({"started": self.child}).encode() + b"\n"], [self._name_fd])
            self._supervisor = new

    def _obey(self, order: dict[str, Any]) -> None:
        if "signal" in order:
            self._signal(order["signal"])
        elif "stop" in order:
            self._signal(order["stop"])
            self._kill_at = time.monotonic() + order["grace_s"]
        elif "kill" in order:
            self._kill_at = time.monotonic()

    def _signal(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child, signum)

    def kill(self) -> None:
        """SIGKILL to every descendant: its group first, then whoever made a session of its own."""
        self._signal(signal.SIGKILL)
        for process in below(os.getpid()):
            send(process, signal.SIGKILL)

    def _reap(self) -> bool:
        """Reap who ended. False once there is no child left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.child:
                self._status = status

    def _end_rest(self) -> None:
        """After the command: its other processes get a moment to end by themselves."""
        grace_ends = time.monotonic() + (0.0 if self._kill_at is not None else LEFTOVER_GRACE_S)
        given_up = grace_ends + DEATH_S
        while self._reap() and time.monotonic() < given_up:
            if time.monotonic() >= grace_ends:
                for process in below(os.getpid()):
                    send(process, signal.SIGKILL)
            time.sleep(_POLL_S)

    def _tell(self, **message: Any) -> None:
        if self._supervisor is not None:
            with contextlib.suppress(OSError):
                self._supervisor.sendall(json.dumps(message).encode() + b"\n")


def descendants(pid: int) -> list[int]:
    """The pid of every live process below *pid*, parents first."""
    return [p.pid for p in below(pid)]


def prctl(option: int, argument: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(argument), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def _become(command: list[str], environ: dict[str, str], writer: int, parent: int) -> None:
    """In the fork: turn into the command, in a session of its own, which does not outlive its keeper."""
    try:
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(125)
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(signum, signal.SIG_DFL)
        os.execvpe(command[0], command, environ)  # noqa: S606 - the command that was typed, as it was typed
    except OSError as e:
        os.write(writer, str(e.errno or 1).encode())
    finally:
        os._exit(125)


def main() -> None:
    supervisor = socket.socket(fileno=int(os.environ.pop("GPUCKPT_KEEPER_FD")))
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if int(name) > 2:
                os.set_inheritable(int(name), False)  # the name of the run is held by us, not by the command
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # whoever ends the supervisor's group must leave us our work
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as f:
        f.write(KEEPER)
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with supervisor.makefile("rb", buffering=0) as stream:
        order = json.loads(stream.readline())
    listener = None
    if path := order["adopt_at"]:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen()
    Keeper(supervisor, listener, order["name_fd"]).run(order["command"], order["environ"])


if __name__ == "__main__":
    main()
    sys.stdout.flush()
