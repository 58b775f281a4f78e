"""Where a keeper waits for the next supervisor of a child that has lost its own (``--keep-child``), and what it hands on to that one."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from pathlib import Path

from gpuckpt import errors
from gpuckpt.inspect.mark import Mark
from gpuckpt.inspect.processes import peer_of
from gpuckpt.supervisor.swept import Hold, Way, private


class Offer:
    """A socket at *path*; the name of the run, by its descriptor; and the way to the socket *server* (a path, "" if there is none) on which
    the child listens, which reaches it also where that path is gone."""

    def __init__(self, path: Path, name_fd: int, server: str) -> None:
        self._path, self._way = path, Way(Path(server)) if server else None
        self._hold = Hold(path.with_suffix(".lock"), [name_fd])
        self._mark: Mark | None = None
        self.listener: socket.socket | None = None  # None: it cannot be made now
        self.look(alone=False)

    def look(self, *, alone: bool) -> None:
        """Make anew what was swept away: the socket, and, *alone* with the child, the lock too, which is its supervisor's affair else. What
        cannot be made is tried again at the next look."""
        with contextlib.suppress(OSError, errors.PermissionDenied):
            if not (self._mark and self._mark.there):
                private(self._path.parent)
                with contextlib.suppress(FileNotFoundError):
                    self._path.unlink()
                was, self.listener = self.listener, self._listen()
                if was is not None:
                    was.close()
            if alone and not self._hold.whole:
                self._hold.again()
        if self._way is not None:
            self._way.look()

    def accept(self, child: int) -> socket.socket | None:
        """Whoever comes for *child*, if it is of our own user or root, with all that it needs."""
        assert self.listener is not None
        try:
            new, _ = self.listener.accept()
        except OSError:
            return None
        try:
            _, uid = peer_of(new)
            if uid in (0, os.geteuid()):
                fds = [*self._hold.fds, *([self._way.fd] if self._way is not None and self._way.fd is not None else [])]
                socket.send_fds(new, [json.dumps({"started": child, "names": len(self._hold.fds)}).encode() + b"\n"], fds)
                return new
        except OSError:
            pass  # it has left already
        new.close()
        return None

    def withdraw(self) -> None:
        if self._mark and self._mark.there:
            self._path.unlink()

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(str(self._path))
            listener.listen()
            self._mark = Mark.of(self._path)
        except OSError:
            listener.close()
            raise
        return listener
