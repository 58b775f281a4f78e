"""Why a run cannot listen at an address, or its command cannot, in words: who has the port, and what to do about it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Awaitable, Callable

from yarl import URL

from gpuckpt import errors
from gpuckpt.inspect import processes
from gpuckpt.supervisor import places

#: How long whoever listens where the command is to serve may take to accept a connection, in seconds.
CONNECT_S = 1.0


async def listen(begin: Callable[[str, int], Awaitable[None]], address: tuple[str, int], option: str) -> None:
    """*begin* to listen at *address*, which *option* has chosen. Raises :class:`gpuckpt.errors.CannotListen`."""
    try:
        await begin(*address)
    except OSError as e:
        raise _why(*address, option, e) from None


async def check_free(url: str) -> None:
    """Raise :class:`gpuckpt.errors.CannotListen` where somebody listens at *url* already: the command, which is to listen there, has not
    been started, so its health and its answers would be another's."""
    at = URL(url)
    with contextlib.suppress(OSError, TimeoutError):
        _, writer = await asyncio.wait_for(asyncio.open_connection(at.host, at.port), CONNECT_S)
        writer.close()
        who, end, pid = _who(at.port or 0)
        words = f"{who} listens at {url}, where the command is to serve once it has been started; nothing was started"
        raise errors.CannotListen(words, hint=f"another port, for the command and in --upstream; or {end}", pid=pid)


def where(address: tuple[str, int]) -> str:
    """ "HOST:PORT", with brackets for an IPv6 address."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _why(host: str, port: int, option: str, error: OSError) -> errors.CannotListen:
    words = f"cannot listen on {where((host, port))}"
    if error.errno == errno.EADDRINUSE:
        who, end, pid = _who(port)
        return errors.CannotListen(f"{words}: {who} listens there", hint=f"another port by {option}; or {end}", pid=pid)
    if error.errno == errno.EACCES:
        return errors.CannotListen(f"{words}: ports below 1024 are root's", hint=f"another port by {option}")
    # Without a number from Python 3.13 on: asyncio has tried each address that the host stands for, and none was to be had.
    if error.errno in (errno.EADDRNOTAVAIL, None) or isinstance(error, socket.gaierror):
        return errors.CannotListen(f"{words}: {host} is no address of this machine", hint=f"another address by {option}, or a port alone")
    return errors.CannotListen(f"{words}: {error.strerror or error}", hint=f"another address by {option}")


def _who(port: int) -> tuple[str, str, int | None]:
    """Who listens on the TCP *port*, how to end that, and its pid, if it can be seen."""
    pid = _listener(port)
    run = next((n for n in places.running() if places.supervisor_of(n) == pid), "")
    if run:
        return f"the run {run!r} (pid {pid})", f"end it: gpuckpt stop {run}", pid
    if pid:
        return f"pid {pid} ({processes.command(pid)})", f"end it: kill {pid}", pid
    return "a process that cannot be seen", f"sudo ss -ltnp 'sport = :{port}' names it", None


def _listener(port: int) -> int | None:
    """The pid that listens on the TCP *port*, if we may see it."""
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        found = psutil.net_connections("tcp")
        return next((c.pid for c in found if c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == port and c.pid), None)
    return None
