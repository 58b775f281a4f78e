"""Why a run cannot listen at an address, in words: who has the port, and what to do about it."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Awaitable, Callable

from gpuckpt import errors
from gpuckpt.inspect import processes
from gpuckpt.supervisor import places


async def listen(begin: Callable[[str, int], Awaitable[None]], address: tuple[str, int], option: str) -> None:
    """*begin* to listen at *address*, which *option* has chosen. Raises :class:`gpuckpt.errors.CannotListen`."""
    try:
        await begin(*address)
    except OSError as e:
        raise _why(*address, option, e) from None


def where(address: tuple[str, int]) -> str:
    """ "HOST:PORT", with brackets for an IPv6 address."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _why(host: str, port: int, option: str, error: OSError) -> errors.CannotListen:
    words, pid = f"cannot listen on {where((host, port))}", None
    if error.errno == errno.EADDRINUSE:
        pid = _listener(port)
        run = next((n for n in places.running() if places.supervisor_of(n) == pid), "")
        who = f"the run {run!r} (pid {pid})" if run else f"pid {pid} ({processes.command(pid)})" if pid else "a process that cannot be seen"
        look = f"sudo ss -ltnp 'sport = :{port}' names it"
        end = f"end it: gpuckpt stop {run}" if run else f"end it: kill {pid}" if pid else look
        return errors.CannotListen(f"{words}: {who} listens there", hint=f"another port by {option}; or {end}", pid=pid)
    if error.errno == errno.EACCES:
        return errors.CannotListen(f"{words}: ports below 1024 are root's", hint=f"another port by {option}")
    # Without a number from Python 3.13 on: asyncio has tried each address that the host stands for, and none was to be had.
    if error.errno in (errno.EADDRNOTAVAIL, None) or isinstance(error, socket.gaierror):
        return errors.CannotListen(f"{words}: {host} is no address of this machine", hint=f"another address by {option}, or a port alone")
    return errors.CannotListen(f"{words}: {error.strerror or error}", hint=f"another address by {option}")


def _listener(port: int) -> int | None:
    """The pid that listens on the TCP *port*, if we may see it."""
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        found = psutil.net_connections("tcp")
        return next((c.pid for c in found if c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == port and c.pid), None)
    return None
