"""The supervised command as its supervisor sees it: started, signalled, stopped in order, and what it exited with.

The process itself hangs on a :mod:`gpuckpt.supervisor.keeper`, so that the tree dies with the supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpuckpt import errors
from gpuckpt.inspect import processes
from gpuckpt.model import ProcessId

EXIT_OWN_FAILURE, EXIT_CANNOT_RUN, EXIT_NOT_FOUND = 125, 126, 127


class Child:
    """One command. ``exited`` becomes its exit code (128+n for a signal) when the last process of its tree is gone; with ``keeper_killed``
    what made a session of its own may be left, for nobody has it for a child."""

    def __init__(
        self, keeper_pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pid: int, keeper: subprocess.Popen[bytes] | None
    ) -> None:
        self.keeper_pid, self._reader, self._writer, self._keeper = keeper_pid, reader, writer, keeper
        self.pid = pid
        self.keeper_killed = False
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._listener = asyncio.create_task(self._listen())

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        environ: Mapping[str, str],
        *,
        name_fd: int | None = None,
        adopt_at: Path | None = None,
        server: str = "",
    ) -> Child:
        """Start *command*. The keeper holds the descriptor *name_fd* open until the whole tree is gone; with *adopt_at* the tree outlives
        this supervisor, and the next one comes for it there, and gets the way to the socket *server* of the command.

        Raises :class:`gpuckpt.errors.CannotStart`, whose ``status`` is 126 or 127, where there is no such program.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                keeper = subprocess.Popen(
                    [sys.executable, "-P", "-m", "gpuckpt.supervisor.keeper"],
                    env={**os.environ, "GPUCKPT_KEEPER_FD": str(theirs.fileno())},
                    pass_fds=[theirs.fileno(), *([] if name_fd is None else [name_fd])],
                    start_new_session=True,
                )
            except OSError as e:
                ours.close()
                error = errors.CannotStart(f"the keeper of {command[0]} cannot be started: {e.strerror or e}; nothing was started")
                error.status = EXIT_OWN_FAILURE
                raise error from None
        reader, writer = await asyncio.open_connection(sock=ours)
        order: dict[str, Any] = {"command": list(command), "environ": dict(environ)}
        order |= {"name_fd": name_fd if name_fd is not None else -1, "adopt_at": str(adopt_at or ""), "server": server}
        writer.write(json.dumps(order).encode() + b"\n")
        line = b""
        with contextlib.suppress(OSError):  # it ended before it had read its order
            line = await reader.readline()
        answer = json.loads(line or b"{}")
        if "started" not in answer:
            writer.close()
            keeper.wait()
            code = answer.get("failed", 0)
            reason = os.strerror(code) if code else "its keeper ended"
            hint = "check the command after --" if code else "see what was written on stderr"
            error = errors.CannotStart(f"{command[0]} cannot be started: {reason}", hint=hint)
            error.status = {errno.ENOENT: EXIT_NOT_FOUND, 0: EXIT_OWN_FAILURE}.get(code, EXIT_CANNOT_RUN)
            raise error
        return cls(keeper.pid, reader, writer, answer["started"], keeper)

    @classmethod
    async def adopt(cls, connection: socket.socket, pid: int) -> Child:
        """The child *pid* of an earlier supervisor, by a *connection* to its keeper."""
        keeper_pid, _ = processes.peer_of(connection)
        reader, writer = await asyncio.open_connection(sock=connection)
        return cls(keeper_pid, reader, writer, pid, None)

    @property
    def alive(self) -> bool:
        return not self.exited.done()

    def tree(self) -> list[ProcessId]:
        """The command and all that descends from it, parents first."""
        return processes.below(self.keeper_pid)

    def owns(self, pid: int) -> bool:
        """Whether *pid* belongs to the tree."""
        return self.keeper_pid in processes.ancestors(pid, processes.table())

    def send(self, signum: int) -> None:
        """Send a signal to the command's process group."""
        self._order(signal=signum)

    def stop(self, grace_s: float, signum: int = signal.SIGTERM) -> None:
        """Ask it to end; what still lives after *grace_s* is killed, with all that descends from it."""
        self._order(stop=signum, grace_s=grace_s)

    def kill(self) -> None:
        self._order(kill=True)

    def _order(self, **order: Any) -> None:
        if not self._writer.is_closing():
            self._writer.write(json.dumps(order).encode() + b"\n")

    async def _listen(self) -> None:
        line = b""
        try:
            line = await self._reader.readline()
        except OSError:
            pass
        finally:
            self._writer.close()
        code = 128 + signal.SIGKILL  # the keeper itself was killed, and the command with it
        self.keeper_killed = not line
        if line:
            status = json.loads(line)["exited"]
            code = os.waitstatus_to_exitcode(status)
            code = 128 - code if code < 0 else code
        if self._keeper is not None:
            await asyncio.to_thread(self._keeper.wait)
        if not self.exited.done():
            self.exited.set_result(code)
