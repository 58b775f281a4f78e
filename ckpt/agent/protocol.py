"""What controller and agent say to each other: where the socket is, the calls, the stages of a process that has an agent.

One JSON object a line. A request has a number, and names a call, the operation and the seconds that are left; "quiesce" also says
whether an ``offload`` will follow, and whether it takes on what hazards there are (``accept``), it and "comms" whether the communicators
are to be left alone (``keep``), and "comms" whether to tell by class what stays on the GPU (``measure``). Its answer has that number, a
``result`` ("SUCCESS", "NOT_READY", "ILLEGAL_STATE", "DROPPED", "REFUSED", "CHANGED", "FAILED"), the ``stage`` that the agent is in now,
and words; of an offload the bytes that ``moved``, of comms what ``stays``. What was refused is as it was found.

A "hello" says how long it waits for the program to come by and look at its communicators (``look_s``), which is answered as soon as it
has. If it does not come, ``unseen`` has words for it, and what is told is what was seen before. ``looks``: a look would tell more;
``blind``: there may be others than those that are told of.

What all ranks must do or none (``TOGETHER``) comes with the read end of one pipe for all of them. An agent answers "READY" and waits:
a byte in the pipe, which nobody takes out, is the word for all at once; a pipe closed without one means that nothing was begun.
So no kill of the controller can leave some ranks waiting for others inside NCCL.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
from pathlib import Path
from typing import Any

from gpuckpt.model import ProcessId, State

VERSION = 3
#: How long a hello waits for a look at communicators that were told of before, in seconds; for others it waits as long as its sender says.
LOOK_S = 1.0
#: How often an agent looks whether it is found at its path, in seconds.
FOUND_S = 10.0

#: Agent call -> (stages that it may begin in, stage that it leads to). The way down, and the way back.
MOVES: dict[str, tuple[tuple[State, ...], State]] = {
    "quiesce": ((State.RUNNING,), State.QUIESCED),
    "offload": ((State.QUIESCED,), State.OFFLOADED),
    "comms": ((State.QUIESCED, State.OFFLOADED), State.COMMS_SUSPENDED),
    "disarm": ((State.COMMS_SUSPENDED,), State.DISARMED),
    "arm": ((State.DISARMED,), State.COMMS_SUSPENDED),
    "comms-resume": ((State.COMMS_SUSPENDED,), State.OFFLOADED),
    "onload": ((State.OFFLOADED,), State.QUIESCED),
    "unquiesce": ((State.QUIESCED,), State.RUNNING),
}


def leads_to(call: str, offloaded: bool) -> State:
    """The stage that *call* leads to: where nothing was *offloaded* the communicators come back to a process that is quiesced."""
    return State.QUIESCED if call == "comms-resume" and not offloaded else MOVES[call][1]


#: Calls that every rank makes, or none.
TOGETHER = frozenset({"comms", "disarm", "arm", "comms-resume"})


def directory(uid: int) -> Path:
    """Where agents of *uid* have their sockets, as they see it: the same place in every container, however TMPDIR is set."""
    return Path(f"/tmp/gpuckpt-agents-{uid}")  # noqa: S108 - 0700, and both sides check whose it is


def socket_name(pid: int, start_ticks: int) -> str:
    """*pid* as the process itself sees it."""
    return f"{pid}-{start_ticks:x}.sock"


def make_directory(uid: int) -> Path:
    """Raises ``OSError`` where somebody else has put something in its place."""
    return make_private(directory(uid), uid)


def make_private(path: Path, uid: int) -> Path:
    path.mkdir(mode=0o700, exist_ok=True)
    check_directory(path, uid)
    return path


def sweep(path: Path) -> None:
    """Take away the sockets of processes that ended without a word: those that nobody listens on, whatever their pid means here.

    Never waits: one that is stopped, and has more callers than its socket takes, is there.
    """
    for socket_path in sorted(path.glob("*.sock")):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            try:
                probe.connect(str(socket_path))
            except ConnectionRefusedError:
                socket_path.unlink()


def check_directory(path: Path, uid: int) -> None:
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != uid or found.st_mode & 0o077:
        raise PermissionError(f"{path} is not a private directory of uid {uid}")


def find(process: ProcessId, uid: int) -> Path | None:
    """The socket of *process*'s agent as we reach it, also into a container; None if it has none that can be trusted."""
    root = Path(f"/proc/{process.pid}/root")
    try:
        place = root / directory(_own_uid(process.pid, uid)).relative_to("/")
        own_pid = _own_pid(process.pid)
        path = place / socket_name(own_pid, process.start_ticks)
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return None
        check_directory(place, uid)
    except (OSError, ValueError):
        return None
    return path


def encode(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _own_uid(pid: int, uid: int) -> int:
    """What *uid*, whose *pid* is, is called where that lives: the root of a container, say."""
    if not Path(f"/proc/{pid}/ns/user").samefile("/proc/self/ns/user"):
        for line in Path(f"/proc/{pid}/uid_map").read_text().splitlines():
            inside, outside, count = map(int, line.split())
            if outside <= uid < outside + count:
                return inside + uid - outside
    return uid


def _own_pid(pid: int) -> int:
    """*pid* in its own, innermost namespace."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("NSpid:"):
            return int(line.split()[-1])
    return pid
