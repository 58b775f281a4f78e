"""Where an agent is called, one connection with a controller, and who may have one."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuckpt.agent import protocol
from gpuckpt.inspect.mark import Mark
from gpuckpt.inspect.processes import peer_of

_REQUEST_MAX_BYTES = 1 << 16
_FDS_MAX = 1
#: How long to wait before a connection that could not be taken is tried again, in seconds.
_NO_DESCRIPTOR_S = 0.05


@dataclass(eq=False, slots=True)
class Connection:
    sock: socket.socket
    received: bytes = b""
    asked: str = ""  # the call that this connection waits for
    number: int = 0  # of that request
    until: float = 0.0
    told: frozenset[tuple[Any, ...]] | None = None  # the ranks that it has heard of
    keeps: bool = False  # it leaves the communicators as they are
    accepts: bool = False  # it takes on whatever hazard there is

    def read(self, handle: Callable[[dict[str, Any], list[int]], None], refuse: Callable[[str], None]) -> bool:
        """Take in what was sent: *handle* gets each request, with the descriptors that came along, and takes out those that it keeps.
        False when the other side has gone, or sends no requests."""
        fds: list[int] = []
        try:
            data, fds, _, _ = socket.recv_fds(self.sock, _REQUEST_MAX_BYTES, _FDS_MAX)
        except OSError:
            data = b""
        self.received += data
        while b"\n" in self.received:
            line, _, self.received = self.received.partition(b"\n")
            try:
                handle(json.loads(line), fds)
            except (ValueError, LookupError, TypeError) as e:
                refuse(f"not a request: {e!r}")
        for fd in fds:  # nobody wanted it
            os.close(fd)
        return bool(data) and len(self.received) < _REQUEST_MAX_BYTES

    def send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self.sock.send(protocol.encode(message))


class Listener:
    """The socket at *path* on which an agent is called."""

    def __init__(self, path: Path) -> None:
        """Listens. Raises ``OSError`` where the socket cannot be made."""
        self.path = path
        protocol.sweep(path.parent)
        self.sock = self._listen()

    @property
    def there(self) -> bool:
        """Whether who looks for it at its path finds it: a cleaner of ``/tmp`` may have taken it away."""
        return self._mark.there

    def be_found(self, selector: selectors.BaseSelector) -> None:
        """Listen at its path again where it is not there, if that can be now. *selector* reads from ``sock``, which is another one then."""
        if self.there:
            return
        selector.unregister(self.sock)
        self._again()
        selector.register(self.sock, selectors.EVENT_READ, None)

    def _again(self) -> None:
        was = self.sock
        with contextlib.suppress(OSError):
            protocol.make_private(self.path.parent, os.geteuid())
            self.sock = self._listen()
            was.close()

    def _listen(self) -> socket.socket:
        unheard = self.path.with_suffix(".new")  # until somebody listens on it another's sweep would take it away
        unheard.unlink(missing_ok=True)
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.bind(str(unheard))
            unheard.chmod(0o600)
            sock.listen(8)
            unheard.rename(self.path)
            self._mark = Mark.of(self.path)
        except OSError:
            sock.close()
            raise
        return sock


def accept(listener: socket.socket) -> Connection | None:
    """Whoever calls, if it is root or of our own user."""
    try:
        sock, _ = listener.accept()
    except OSError:  # the program has no descriptor left: whoever calls waits until there is one
        time.sleep(_NO_DESCRIPTOR_S)
        return None
    _, uid = peer_of(sock)
    if uid not in (0, os.geteuid()):
        sock.close()
        return None
    return Connection(sock)
