"""Forks of this process that serve it over a socket: quicker than an interpreter that starts, and what hangs there hangs nobody else."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable

#: How long the end of one that was told to end is waited for, in seconds: a zombie would be left to a program that lives on.
REAP_S = 0.02

_left: list[int] = []  # handles on those that had not ended by then


PR_SET_PDEATHSIG = 1


def prctl(option: int, argument: int) -> None:
    """Raises ``OSError``."""
    import ctypes  # which most commands need not load

    if ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(argument), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def end_with(parent: int, signum: int) -> None:
    """From now on *signum* comes when *parent*, which started this process, dies. Where it is dead already, as no signal tells, this
    process ends. Raises ``OSError``."""
    prctl(PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os._exit(125)


def possible() -> bool:
    """Whether a fork of this process is safe: it has one thread, and so no CUDA that is initialised."""
    return len(os.listdir("/proc/self/task")) == 1


def start(name: str, sock: socket.socket, act: Callable[[], object]) -> int:
    """Have a fork *act*, and end. It has a session of its own, *sock* and no other descriptor, and is ended by SIGKILL alone. The pid."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            keep_only(sock.fileno())  # no claim of ours may live on in it
            unheeding(name)
            act()
        finally:
            os._exit(0)
    return pid


def reap(pid: int) -> None:
    """Wait for the end of a child that was told to end, for a moment; one that ends later is seen to at the next occasion."""
    mine, until = -1, time.monotonic() + REAP_S
    with contextlib.suppress(OSError):  # whoever imported us may have waited for it
        _left.append(mine := os.pidfd_open(pid))
    while True:
        for fd in [fd for fd in _left if _ended(fd)]:
            _left.remove(fd)
            os.close(fd)
        if mine not in _left or time.monotonic() >= until:
            return
        time.sleep(0.0005)


def _ended(fd: int) -> bool:
    try:
        return os.waitid(os.P_PIDFD, fd, os.WEXITED | os.WNOHANG) is not None
    except OSError:
        return True


def unheeding(name: str) -> None:
    """From now on this process is called *name*, and goes on where its controller is told to end."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    named(name)


def named(text: str) -> None:
    """Call this process so, where anybody lists processes."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as f:
        f.write(text[:15])


def keep_only(fd: int) -> None:
    """Close every descriptor but *fd*; read from and write to nothing. A process that was left to itself must not hold a pipe open
    that somebody reads our output from."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != fd:
            with contextlib.suppress(OSError):
                os.close(int(name))
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.close(null)
