"""A GPU to oneself for a while: the runs on it are suspended and stay so until the lease ends, however it ends.

Each run is held by a connection to its control socket, and the GPU by a lock on a file: both end with the process that has them.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from gpuckpt import claims, errors
from gpuckpt.supervisor import control, places, swept
from gpuckpt.supervisor.operate import report_or_raise

DEFAULT_S = 300.0
#: Of a lease that fails: how long a run may take to say that it is there at all, in seconds.
_ANSWER_S = 1.0
#: Stays beside a program until that ends, as nobody's child that it would have to wait for. Its argument: a pidfd.
_BESIDE = "import os, select, sys\nif os.fork() == 0:\n    p = select.poll()\n    p.register(int(sys.argv[1]), select.POLLIN)\n    p.poll()"


class Held:
    """One run, suspended and kept so for as long as its connection is open."""

    def __init__(self, name: str, gpus: Sequence[str] | None, by: str, within_s: float) -> None:
        self.name = name
        self.ended = False  # before it answered
        self.socket = socket.socket(socket.AF_UNIX)
        try:
            self.socket.settimeout(within_s)
            self.socket.connect(str(places.control_path(name)))
            order = {"schema": control.SCHEMA, "command": "hold", "gpus": gpus, "by": by, "within_s": within_s}
            self.socket.sendall(json.dumps(order).encode() + b"\n")
        except (TimeoutError, BlockingIOError):  # or so many wait for its answer that it takes no more
            self.socket.close()
            raise control.silent(name, self.socket, within_s) from None
        except BaseException:
            self.socket.close()
            raise

    def answer(self, until: float) -> dict[str, Any]:
        """Its next answer. Raises what it refused with; :class:`gpuckpt.errors.Deadline` where none comes."""
        data = b""
        try:
            while not data.endswith(b"\n"):
                self.socket.settimeout(max(0.001, until - time.monotonic()))
                more = self.socket.recv(65536)
                if not more:
                    self.ended = True
                    raise errors.RunNotReady(f"the run {self.name!r} ended before it answered")
                data += more
        except TimeoutError:
            raise errors.Deadline(
                f"the run {self.name!r} was not suspended in time; what had been suspended comes back", hint=f"gpuckpt status {self.name}"
            ) from None
        document: dict[str, Any] = json.loads(data)
        report_or_raise("hold", data)
        return document

    def release(self, *, back: bool) -> None:
        """Let it go; *back*: it is resumed if it was awake before. Its next :meth:`answer` says how that went."""
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps({"back": back}).encode() + b"\n")
            self.socket.shutdown(socket.SHUT_WR)


class Lease:
    """GPUs without runs. Use as a context manager; ``runs`` names who was suspended, or kept suspended, for it."""

    def __init__(self, gpus: Iterable[str], *, by: str = "", within_s: float = DEFAULT_S, but: str = "") -> None:
        """Take *gpus* (UUIDs) for whom *by* names, leaving the run *but* alone. Raises :class:`gpuckpt.errors.Busy`,
        :class:`gpuckpt.errors.Deadline` or what a run refused with; every run is as it was found then, or on its way back."""
        until = time.monotonic() + within_s
        self.gpus = sorted(set(gpus))
        self.by = by or f"pid {os.getpid()} ({' '.join(sys.argv)[:60]}) has a lease"
        self._held: list[Held] = []
        self._locks: list[int] = []
        try:
            self._lock(until)
            self._suspend(until, but)
        except BaseException:
            self.release()
            raise

    @property
    def runs(self) -> list[str]:
        return [h.name for h in self._held]

    def _lock(self, until: float) -> None:
        directory = swept.private(places.runtime_directory())
        for uuid in self.gpus:
            hold = swept.Hold(directory / f"{uuid}.lease")
            if (holder := hold.take(until)) is not None:
                raise errors.Busy(
                    f"{uuid} is leased already{f' by pid {holder.pid}' if holder.pid else ''}; nothing was touched",
                    hint="wait for it, or give a longer --timeout",
                    pid=holder.pid,
                    gpu=uuid,
                )
            self._locks += hold.fds

    def _suspend(self, until: float, but: str) -> None:
        asked = []
        for name in places.with_sockets():
            if name != but:
                with contextlib.suppress(ConnectionError, FileNotFoundError):  # a dead one's socket
                    asked.append(Held(name, self.gpus, self.by, max(0.001, until - time.monotonic())))
        self._held = asked
        try:
            self._held = [h for h in asked if _here(h, until)]
        except (errors.Deadline, errors.StillServing):
            for h in asked:  # one that does not answer at all is named rather than one that was late because of it
                with contextlib.suppress(errors.Usage, errors.RunNotReady):  # it ended meanwhile
                    control.ask(h.name, "status", timeout_s=_ANSWER_S)
            raise
        finally:
            for h in asked:
                if h not in self._held:
                    h.socket.close()

    def pass_on(self) -> None:
        """Let the program that this process becomes have it; it ends with that program and the last process that inherited it. A
        program may close what it inherited, as sudo does: so a process beside it holds the lease too, until the program ends."""
        fds = [*self._locks, *(h.socket.fileno() for h in self._held)]
        for fd in fds:
            os.set_inheritable(fd, True)
        with contextlib.suppress(OSError):  # Linux before 5.3 has no pidfd: then it ends where the program closes them
            pidfd = os.pidfd_open(os.getpid())
            words = [sys.executable, "-I", "-S", "-c", _BESIDE, str(pidfd)]
            nothing = subprocess.DEVNULL
            subprocess.run(
                words, pass_fds=(*fds, pidfd), stdin=nothing, stdout=nothing, stderr=nothing, cwd="/", start_new_session=True, check=False
            )
            os.close(pidfd)

    def release(self, *, back: bool = True) -> None:
        """Let the runs back: those that were awake are resumed (*back*), the others may wake when they are wanted."""
        for h in self._held:
            h.release(back=back)
            h.socket.close()
        for fd in self._locks:
            os.close(fd)
        self._held, self._locks = [], []

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def leased(gpus: Iterable[str]) -> bool:
    """Whether somebody has a lease of one of *gpus* (UUIDs); of any at all where that is empty, since unknown is not free."""
    directory = places.runtime_directory()
    paths = [directory / f"{uuid}.lease" for uuid in gpus] or [p for p in directory.glob("*.lease") if p.stem != "host-memory"]
    return any(claims.taken(str(path)) for path in paths)


def uuids(gpus: Iterable[int | str]) -> list[str]:
    """The UUIDs of GPUs given by index or UUID. Raises :class:`gpuckpt.errors.Usage` for one that is not there."""
    from gpuckpt.early import devices

    known = {g.uuid: str(g.index) for g in devices().gpus()}
    found = []
    for gpu in gpus:
        uuid = next((u for u, index in known.items() if str(gpu) in (u, index)), None)
        if uuid is None:
            raise errors.Usage(f"there is no GPU {gpu} here; nothing was touched", hint="gpuckpt ps lists the GPUs")
        found.append(uuid)
    return found


def _here(held: Held, until: float) -> bool:
    try:
        return bool(held.answer(until).get("held"))
    except errors.RunNotReady:
        if not held.ended or places.control_path(held.name).exists():
            raise
        return False
    except (ConnectionError, ValueError):
        return False
