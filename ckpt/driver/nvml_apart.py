"""NVML in a process of its own: of all that a command loads ``pynvml`` takes longest, and there it is loaded beside the rest."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
from typing import TYPE_CHECKING, Any, TypeVar

from gpuckpt import errors
from gpuckpt.driver import forked, mappings
from gpuckpt.driver.api import DriverVersion
from gpuckpt.driver.nvml import NvmlDevices
from gpuckpt.model import Gpu

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_PIECE_BYTES = 1 << 16


class NvmlApart(NvmlDevices):
    """As its base, of which it says the same; another process asks NVML. Where that has ended, NVML is asked here. Only where that is
    :meth:`possible`."""

    @staticmethod
    def possible() -> bool:
        """Whether this process can be forked, and has no NVML, whose descriptors a fork would share and not have."""
        return forked.possible() and not mappings.has_nvml(os.getpid())

    def __init__(self, *, looks: bool = True) -> None:
        """*looks*: at the GPUs from now on; else it touches none until it is asked. Raises ``OSError`` where no process can be had."""
        super().__init__()
        self._sock, theirs = socket.socketpair()
        me = os.getpid()
        with theirs:
            self._pid = forked.start("gpuckpt-nvml", theirs, lambda: _serve(theirs, looks, me))
        self._pidfd = os.pidfd_open(self._pid)

    def version(self) -> DriverVersion:
        return self._ask("version", lambda told: DriverVersion(tuple(told[0]), told[1]), super().version)

    def gpus(self) -> tuple[Gpu, ...]:
        return self._ask("gpus", lambda told: tuple(Gpu(**gpu) for gpu in told), super().gpus)

    def processes(self) -> dict[int, dict[str, int | None]]:
        return self._ask("processes", lambda told: {int(pid): on for pid, on in told.items()}, super().processes)

    def helper(self) -> int:
        return self._pid

    def close(self) -> None:
        """End the other process, whatever it does: what it is asked changes nothing."""
        if self._pid == 0:
            return
        pid, self._pid = self._pid, 0
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # who still waits for an answer gets none
        self._sock.close()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        os.close(self._pidfd)
        forked.reap(pid)  # one that hangs in the driver ends when that lets it

    def _ask(self, question: str, made: Callable[[Any], T], here: Callable[[], T]) -> T:
        line, asked = b"", self._pid
        if asked:
            with contextlib.suppress(OSError):
                self._sock.sendall(question.encode() + b"\n")
                while not line.endswith(b"\n") and (more := self._sock.recv(_PIECE_BYTES)):
                    line += more
        if not line.endswith(b"\n"):
            if self._pid != asked:
                raise errors.GpuckptError("nobody waits for NVML's answer any more")
            self.close()
            return here()
        told = json.loads(line)
        if error := told.get("error"):
            cls = errors.by_code().get(error.pop("code"), errors.GpuckptError)
            raise cls(error.pop("message"), **error)
        return made(told["answer"])


def _serve(sock: socket.socket, looks: bool, asker: int) -> None:
    forked.end_with(asker, signal.SIGKILL)
    import pynvml  # noqa: F401 - this is what takes so long

    devices = NvmlDevices()
    if looks:
        with contextlib.suppress(Exception):
            devices.gpus()  # the first look at a GPU takes 7 ms
    for line in sock.makefile("rb"):
        try:
            answer: dict[str, Any] = {"answer": getattr(devices, line.decode().strip())()}
        except errors.GpuckptError as e:
            answer = {"error": e.as_dict()}
        sock.sendall(json.dumps(answer, default=dataclasses.asdict).encode() + b"\n")
