"""The parent of a supervised command: a small init that forwards signals, reaps, and ends the whole tree when its supervisor dies.

It is a process of its own because the supervisor cannot clean up after its own SIGKILL. As a subreaper it inherits every orphan of
the tree, also those that made a session of their own, so none can be overlooked. It speaks JSON lines over the socket that
``GPUCKPT_KEEPER_FD`` names: first the order to start, then ``{"signal": N}``, ``{"stop": N, "grace_s": S}`` or ``{"kill": true}``;
it answers ``{"started": PID}`` or ``{"failed": ERRNO, "what": …}``, and at last ``{"exited": STATUS}`` (as ``os.waitpid`` gives it).

Where the child shall outlive its supervisor, the keeper listens on a socket for the next one (:mod:`gpuckpt.supervisor.offer`): whoever
of the same user connects gets ``{"started": PID}`` again, with the descriptors that hold the run's name, and is the supervisor from
then on.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuckpt.driver.forked import end_with, prctl
from gpuckpt.inspect.processes import KEEPER, below, send

if TYPE_CHECKING:
    from gpuckpt.supervisor.offer import Offer

#: How long what is left of the tree may take after the command itself has ended, in seconds.
LEFTOVER_GRACE_S = 3.0
#: How long a killed process may take to disappear before the keeper stops waiting for it, in seconds.
DEATH_S = 30.0
#: How often it looks whether the next supervisor would find it, in seconds.
LOOK_S = 1.0
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.02


class Keeper:
    """One command from its start to the end of its last descendant."""

    def __init__(self, supervisor: socket.socket, offer: Offer | None = None) -> None:
        self._supervisor: socket.socket | None = supervisor
        self._offer = offer
        self._look_at = time.monotonic()
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
        if self._offer is not None:
            with contextlib.suppress(OSError):
                self._offer.withdraw()

    def _wait(self) -> None:
        """Until something happens: an order, the supervisor's death, a child's, the end of the grace, or time to look at the offer."""
        now = time.monotonic()
        if self._offer is not None and now >= self._look_at:
            self._offer.look(alone=self._supervisor is None)
            self._look_at = now + LOOK_S
        wakes = [at for at in (self._kill_at, None if self._offer is None else self._look_at) if at is not None]
        watched: list[int | socket.socket] = [self._woken]
        if other := self._supervisor or (self._offer and self._offer.listener):
            watched.append(other)
        ready, _, _ = select.select(watched, [], [], max(0.0, min(wakes) - now) if wakes else None)
        if self._woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._woken, 4096)
        if self._supervisor is not None and self._supervisor in ready:
            self._receive()
        elif self._offer is not None and self._offer.listener and self._offer.listener in ready:
            self._supervisor = self._offer.accept(self.child)
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
            if self._offer is None:
                self._kill_at = time.monotonic()
            return
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            self._obey(json.loads(line))

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


def _become(command: list[str], environ: dict[str, str], writer: int, parent: int) -> None:
    """In the fork: turn into the command, in a session of its own, which does not outlive its keeper."""
    try:
        os.setsid()
        end_with(parent, signal.SIGKILL)
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
    offer = None
    if path := order["adopt_at"]:
        from gpuckpt.supervisor.offer import Offer

        offer = Offer(Path(path), order["name_fd"], order["server"])
    Keeper(supervisor, offer).run(order["command"], order["environ"])


if __name__ == "__main__":
    main()
    sys.stdout.flush()
