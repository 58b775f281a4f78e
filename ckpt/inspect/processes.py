"""Operating-system processes: who they are, who started whom, and which belong together. Reads ``/proc``.

Cgroups are read below ``root``, so that a test can lay them out in a directory.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import socket
import struct
from pathlib import Path
from typing import NamedTuple

from gpuckpt.model import ProcessId
from gpuckpt.words import FROZEN, STOPPED

ROOT = Path("/")

#: Programs that start unrelated work for a living: what they started has nothing else in common.
LAUNCHERS = frozenset(
    "systemd init sshd sshd-session login su sudo doas tmux screen containerd-shim containerd-shim-runc-v2 conmon tini dumb-init "
    "docker-init catatonit runit s6-svscan supervisord cron crond atd slurmstepd gnome-terminal- konsole xterm kitty wezterm-gui "
    "alacritty code code-server jupyter-lab jupyterhub-sin".split()
)
#: The parent of a command that `gpuckpt run` supervises: what it started is one tree, and has nothing in common with other runs.
KEEPER = "gpuckpt-keeper"
#: What `gpuckpt run` puts its name into, for the command and all that it starts.
RUN_VARIABLE = "GPUCKPT_RUN"
_PF_EXITING, _PF_KTHREAD = 0x00000004, 0x00200000  # include/linux/sched.h
SHELLS = frozenset("sh bash zsh fish dash tcsh csh ksh mksh nu xonsh pwsh".split())


class Proc(NamedTuple):
    """One line of the process table. ``state`` is the kernel's letter, ``tty`` 0 without a terminal.

    In a pid namespace a process may have pid 2, or a process group or session 0 (that of somebody outside): ``kernel`` alone tells
    a kernel thread.
    """

    pid: int
    ppid: int
    pgrp: int
    session: int
    tty: int
    state: str
    start_ticks: int
    comm: str
    kernel: bool = False
    exiting: bool = False
    headless: bool = False  # its main thread has ended, others go on: /proc shows neither its files nor its mappings

    @property
    def id(self) -> ProcessId:
        return ProcessId(self.pid, self.start_ticks)

    @property
    def stopped(self) -> bool:
        """Stopped by a signal or a tracer: every driver call on it would hang."""
        return self.state in "Tt"

    @property
    def dead(self) -> bool:
        return self.state in "ZX"


def read(pid: int) -> Proc | None:
    """The process *pid*, or None if there is none (a zombie counts as none). Where its main thread alone has ended (``pthread_exit``), its
    state is that of another one."""
    try:
        proc = _parse(_bytes(f"/proc/{pid}/stat"))
        if proc.headless:
            threads = [_parse(_bytes(f"/proc/{pid}/task/{tid}/stat")) for tid in os.listdir(f"/proc/{pid}/task")]
            proc = proc._replace(state=next((t.state for t in threads if not (t.dead or t.exiting)), "Z"))
    except OSError:
        return None
    return None if proc.dead else proc


def table() -> dict[int, Proc]:
    """All live processes that ``/proc`` shows us, by pid."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdecimal() and (proc := read(int(name))):
            found[proc.pid] = proc
    return found


def is_same(process: ProcessId) -> bool:
    """True if *process* still lives, and the pid was not reused."""
    proc = read(process.pid)
    return proc is not None and proc.start_ticks == process.start_ticks


def halted(process: ProcessId, root: Path = ROOT) -> str:
    """Why every driver call on *process* would hang: ``words.STOPPED``, ``words.FROZEN``; "" if neither is so."""
    proc = read(process.pid)
    if proc is None or proc.start_ticks != process.start_ticks:
        return ""
    if proc.stopped:
        return STOPPED
    return FROZEN if frozen(process.pid, root) else ""


def send(process: ProcessId, signum: int) -> bool:
    """Send *signum* to exactly *process*, never to one that has its pid by now. False if it has ended. Raises ``PermissionError``."""
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    except OSError:  # Linux before 5.3: what is left of the race is the time of one call
        if not is_same(process):
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signum)
            return True
        return False
    try:
        if not is_same(process):
            return False
        signal.pidfd_send_signal(fd, signum)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Pid and effective uid of the other end of a Unix socket, by the kernel. Raises ``OSError`` where there is none."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def thread_group(pid: int) -> int | None:
    """The process that the thread *pid* belongs to; *pid* itself for a process, None if there is no such thread."""
    value = _status(pid, "Tgid")
    return int(value) if value else None


def uid_of(pid: int) -> int:
    """Effective uid of *pid*; -1 if it is gone."""
    value = _status(pid, "Uid")
    return int(value.split()[1]) if value else -1


def run_of(pid: int) -> str:
    """The name of the `gpuckpt run` that *pid* belongs to, as its environment tells; "" for none, or where we may not look."""
    try:
        environ = _bytes(f"/proc/{pid}/environ")
    except OSError:
        return ""
    begin = f"{RUN_VARIABLE}="
    found = next((v for v in environ.decode(errors="replace").split("\0") if v.startswith(begin)), begin)
    return found[len(begin) :] if found.isprintable() else ""


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def command(pid: int, limit: int = 60) -> str:
    """What a person would call it: its command line without the interpreter's path, at most *limit* characters."""
    try:
        words = _bytes(f"/proc/{pid}/cmdline").rstrip(b"\0").decode(errors="replace").split("\0")
    except OSError:
        words = [""]
    if not words[0]:
        proc = read(pid)
        return proc.comm if proc else "?"
    words[0] = words[0].rsplit("/", 1)[-1]
    text = "".join(c if c.isprintable() else " " for c in " ".join(words))
    return text if len(text) <= limit else text[: limit - 1] + "…"


def cgroup(pid: int, root: Path = ROOT) -> str:
    """The cgroup of *pid* (the unified hierarchy, or systemd's), "" where that says nothing about who belongs together."""
    lines = _text(f"{root}/proc/{pid}/cgroup").splitlines()
    paths = {line.split(":", 2)[1]: line.split(":", 2)[2] for line in lines}
    path = paths.get("") or paths.get("name=systemd") or ""
    leaf = path.rsplit("/", 1)[-1]
    shared = leaf == "" or leaf.startswith("session-") or leaf.endswith(".slice") or leaf in ("init.scope", "user.slice")
    return "" if shared else path


def frozen(pid: int, root: Path = ROOT) -> bool:
    """True if *pid* lies in a frozen cgroup, of either version."""
    fs = root / "sys/fs/cgroup"
    for line in _text(f"{root}/proc/{pid}/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        within = path.lstrip("/")
        if not controllers:
            if any("frozen 1" in _text(mount / within / "cgroup.events") for mount in (fs, fs / "unified")):
                return True
        elif "freezer" in controllers.split(",") and _text(fs / "freezer" / within / "freezer.state").strip() == "FROZEN":
            return True
    return False


def ancestors(pid: int, procs: dict[int, Proc]) -> list[int]:
    """Parents of *pid*, nearest first, without init."""
    found: list[int] = []
    proc = procs.get(pid)
    while proc and proc.ppid > 1 and proc.ppid not in found:
        found.append(proc.ppid)
        proc = procs.get(proc.ppid)
    return found


def below(pid: int) -> list[ProcessId]:
    """Every live process below *pid*, parents first."""
    children: dict[int, list[ProcessId]] = {}
    for proc in table().values():
        children.setdefault(proc.ppid, []).append(proc.id)
    found: list[ProcessId] = []
    frontier = [pid]
    while frontier:
        for child in children.get(frontier.pop(), []):
            found.append(child)
            frontier.append(child.pid)
    return found


def relatives(pid: int, procs: dict[int, Proc], root: Path = ROOT) -> dict[int, str]:
    """Every process that shares the tree, session, cgroup or a non-init ancestor with *pid*, and which of these it is.

    Pid 1 started them all. Login infrastructure and a person's interactive shell do not count as common ancestors: a shell's jobs are
    told apart by their process groups. Two runs have nothing in common, though one container holds both. Among these a CUDA import is
    possible, and nothing shows it from outside.
    """
    if pid not in procs:
        return {}
    roots: dict[int, int] = {}
    top, job, group = _root(pid, procs, roots), _job(procs[pid], procs), cgroup(pid, root)
    run = procs[top].comm == KEEPER
    found = {}
    for other, proc in procs.items():
        if other == pid or proc.kernel:
            continue
        if other == 1:
            found[other] = "process tree"  # of a container, it may well be the program itself
            continue
        above = _root(other, procs, roots)
        if above == top:
            found[other] = "process tree"
        elif _job(proc, procs) == job:
            found[other] = "session"
        elif group and not (run and procs[above].comm == KEEPER) and cgroup(other, root) == group:
            found[other] = "cgroup"
    return found


def _root(pid: int, procs: dict[int, Proc], known: dict[int, int]) -> int:
    """The highest ancestor of *pid* below init and below anything that merely launches; within a run, its keeper."""
    path = []
    here = pid
    while here not in known:
        path.append(here)
        parent = procs.get(procs[here].ppid)
        if parent is None or parent.pid == 1 or _launches(parent) or procs[here].comm == KEEPER:
            known[here] = here
        else:
            here = parent.pid
    for p in path:
        known[p] = known[here]
    return known[pid]


def _launches(proc: Proc) -> bool:
    return proc.comm in LAUNCHERS or proc.comm.startswith(("tmux:", "(sd-")) or _interactive_shell(proc)


def _interactive_shell(proc: Proc) -> bool:
    return proc.comm.lstrip("-") in SHELLS and proc.tty != 0 and proc.pid == proc.session


def _job(proc: Proc, procs: dict[int, Proc]) -> tuple[str, int]:
    leader = procs.get(proc.session)
    if proc.session == 0 or (leader is not None and _interactive_shell(leader)):
        return ("pgrp", proc.pgrp)
    return ("session", proc.session)


def _parse(data: bytes) -> Proc:
    opening, closing = data.index(b"("), data.rindex(b")")
    rest = data[closing + 2 :].split()
    return Proc(
        pid=int(data[:opening]),
        ppid=int(rest[1]),
        pgrp=int(rest[2]),
        session=int(rest[3]),
        tty=int(rest[4]),
        state=rest[0].decode(),
        start_ticks=int(rest[19]),
        comm=data[opening + 1 : closing].decode(errors="replace"),
        kernel=bool(int(rest[6]) & _PF_KTHREAD),
        exiting=bool(int(rest[6]) & _PF_EXITING),
        headless=rest[0] in (b"Z", b"X") and int(rest[17]) > 1,
    )


def _status(pid: int, key: str) -> str:
    for line in _text(f"/proc/{pid}/status").splitlines():
        if line.startswith(key + ":"):
            return line.split(":", 1)[1].strip()
    return ""


def _text(path: str | Path) -> str:
    try:
        return _bytes(path).decode(errors="replace")
    except OSError:
        return ""


def _bytes(path: str | Path) -> bytes:
    """A file of ``/proc``, without what a file object costs: a machine has hundreds of processes."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = b""
        while part := os.read(fd, 1 << 16):
            found += part
        return found
    finally:
        os.close(fd)
