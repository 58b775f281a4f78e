"""Where a run keeps its sockets: a private directory, one name a run, taken for as long as anything of it lives.

The name is held by a ``flock`` that the supervisor and the keeper of its child share, so that it is free again only when the whole
tree is gone. A dead socket is replaced; a live one, or anything that is no socket of ours, never. What is swept away while the run lives
is made anew (:mod:`gpuckpt.supervisor.swept`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuckpt import errors
from gpuckpt.inspect import processes
from gpuckpt.model import ProcessId
from gpuckpt.supervisor.swept import Hold, is_private, private

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")
#: Bytes that the path of a unix socket may have (sockaddr_un.sun_path, with its final zero).
SOCKET_PATH_BYTES = 107
#: Descriptors that a keeper hands on at most: of the name, two, and of the server's socket.
FDS_MOST = 3
#: How long a new run waits for the last one of its name to be gone, in seconds: a tree that is killed takes a moment to end.
TAKEN_WAIT_S = 5.0


def is_name(text: str) -> bool:
    """Whether *text* can name a run: letters, digits, ``.``, ``_`` and ``-``, at most 32, and not all digits (that is a pid)."""
    return NAME.fullmatch(text) is not None and not text.isdigit()


def name_for(command: list[str]) -> str:
    """A name for a run of *command*: the model of ``vllm serve MODEL``, else the program."""
    words = [w for w in command if not w.startswith("-")]
    chosen = words[words.index("serve") + 1] if "serve" in words[:-1] else Path(command[0]).name
    text = re.sub(r"[^A-Za-z0-9._-]+", "-", chosen.rstrip("/").rsplit("/", 1)[-1]).strip("-._")[:32].rstrip("-._")
    return text if is_name(text) else "run"


def runtime_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """``GPUCKPT_RUNTIME_DIR``, else below ``XDG_RUNTIME_DIR``, else ``/run/gpuckpt`` for root, else ``/tmp/gpuckpt-UID``."""
    if chosen := environ.get("GPUCKPT_RUNTIME_DIR"):
        return Path(chosen).absolute()
    if base := environ.get("XDG_RUNTIME_DIR"):
        return Path(base) / "gpuckpt"
    return Path("/run/gpuckpt") if os.geteuid() == 0 else Path(f"/tmp/gpuckpt-{os.geteuid()}")  # noqa: S108 - checked to be ours alone


def lock_path(name: str, environ: Mapping[str, str] = os.environ) -> Path:
    return runtime_directory(environ) / f"{name}.lock"


def control_path(name: str, environ: Mapping[str, str] = os.environ) -> Path:
    return runtime_directory(environ) / f"{name}.sock"


def with_sockets(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The names of runs that have, or had, a socket; none where the directory is not ours: what others made there is not to be asked."""
    directory = runtime_directory(environ)
    try:
        return sorted(p.stem for p in directory.glob("*.sock")) if is_private(directory) else []
    except OSError:
        return []


def running(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Those of them whose supervisor lives. Nobody is asked."""
    return [n for n in with_sockets(environ) if _lives(holder(lock_path(n, environ)), "supervisor")]


@dataclass(frozen=True)
class Adopted:
    """A child that had lost its supervisor: a connection to its keeper, and what that supervisor had written down. ``server``: a
    descriptor (``O_PATH``) of the socket that its server listens on, as far as the keeper has seen it."""

    connection: socket.socket
    child: int
    facts: Mapping[str, Any]
    server: int | None


class Place:
    """The name of a run, held. Use as a context manager. ``adopted`` is there if a child of that name had lost its supervisor."""

    def __init__(self, name: str, environ: Mapping[str, str] = os.environ) -> None:
        self.name = name
        self.directory = private(runtime_directory(environ))
        self.control = self.directory / f"{name}.sock"
        self.keeper = self.directory / f"{name}.keeper"
        self.hold = Hold(lock_path(name, environ))
        self.adopted: Adopted | None = None
        self.leave = False  # the child and what belongs to it, for the next supervisor
        if orphan(name, environ) and self._adopt():
            return
        self.private: Path | None = None
        try:
            self._take()
            check_socket_path(self.control)
            clear(self.control)
            clear(self.keeper)
            self._clear_left()
            self.private = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=self.directory))
            self.note()
        except BaseException as e:
            self.hold.close()
            if isinstance(e, OSError):
                words = f"nothing can be made in {self.directory}: {e.strerror or e}; nothing was started"
                raise errors.CannotListen(words, hint="make room there, or set GPUCKPT_RUNTIME_DIR to another directory") from None
            raise

    @property
    def upstream(self) -> Path:
        """Where the child's server listens: in a directory that nobody else may enter."""
        assert self.private is not None
        return check_socket_path(self.private / "http.sock")

    def note(self, child: int | None = None, **facts: Any) -> None:
        """Write down who this run is, for whoever finds its name taken, or an orphan; and *facts* for who adopts its child."""
        who = {"supervisor": os.getpid(), **({} if child is None else {"child": child})}
        ticks = {f"{name}_ticks": proc.start_ticks for name, pid in who.items() if (proc := processes.read(pid))}
        self.hold.write(json.dumps({**who, **ticks, "private": str(self.private), **facts}))

    @property
    def whole(self) -> bool:
        """Whether all of it is still where others look for it."""
        return self.hold.whole and self.private is not None and self.private.is_dir()

    def again(self) -> None:
        """Make what was swept away anew: the directories and the lock. Raises ``OSError`` or :class:`gpuckpt.errors.PermissionDenied`
        where that cannot be, now."""
        private(self.directory)
        if not self.hold.whole:
            self.hold.again()
        if self.private is not None:
            private(self.private)  # a child that is started later listens there

    def _adopt(self) -> bool:
        """Take over the child of a supervisor that is gone, from its keeper. False where nobody offers it."""
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(TAKEN_WAIT_S)
        fds: list[int] = []
        try:
            connection.connect(str(self.keeper))
            line, fds, _, _ = socket.recv_fds(connection, 4096, FDS_MOST)
            offer = json.loads(line)
            names = offer.get("names", 1)  # an earlier version knows of one
            hold = Hold(self.hold.path, fds[:names])
            facts = _facts(hold.read())
            left = Path(facts["private"])
            if offer["started"] != facts["child"]:
                raise ValueError(f"the child of another: {offer['started']}")
        except (OSError, ValueError, LookupError):
            for fd in fds:
                os.close(fd)
            connection.close()
            return False
        self.hold = hold
        self.private = left
        self.adopted = Adopted(connection, facts["child"], facts, next(iter(fds[names:]), None))
        clear(self.control)
        return True

    def clear(self) -> None:
        """Take away the sockets of a child that has ended, before another is started."""
        for path in (self.keeper, self.upstream):
            with contextlib.suppress(OSError):  # whoever cannot listen there says so
                clear(path)

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave nothing but the lock file: removing that would let two hold the same name. What others made in our place is left alone."""
        ours = is_private(self.directory)
        for path in (self.control, *(() if self.leave else (self.keeper,))) if ours else ():
            with contextlib.suppress(OSError):
                path.unlink()
        if ours and self.private is not None and not self.leave:
            shutil.rmtree(self.private, ignore_errors=True)
        self.hold.close()

    def _take(self) -> None:
        taken = self.hold.take(time.monotonic() + TAKEN_WAIT_S)
        if taken is None:
            return
        facts, name = _facts(taken.text), self.name
        who = f"pid {facts['supervisor']}, its child is pid {facts['child']}" if "child" in facts else "it is starting"
        hint = f"gpuckpt status {name}; choose another --name, or end it: gpuckpt stop {name}"
        if _lives(facts, "child") and not _lives(facts, "supervisor"):
            who = f"its supervisor is gone, its child, pid {facts['child']}, lives on"
            hint = f"gpuckpt run --name {name} again in a moment, which adopts it if it was started with --keep-child"
        raise errors.NameTaken(f"a run is already called {name!r} ({who}); nothing was started", hint=hint)

    def _clear_left(self) -> None:
        """Private directories of an earlier run of this name, which ended without a word. We hold its name: it is gone."""
        for left in self.directory.glob(f"{self.name}.????????"):
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left, ignore_errors=True)


def check_socket_path(path: Path) -> Path:
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES:
        raise errors.Usage(
            f"{path} is too long for a unix socket ({SOCKET_PATH_BYTES} bytes at most)",
            hint="choose a shorter --name, or set GPUCKPT_RUNTIME_DIR to a directory with a short path",
        )
    return path


def clear(path: Path) -> None:
    """Make *path* free for a socket: remove one that nobody listens on. Raises :class:`gpuckpt.errors.NameTaken` for anything else."""
    try:
        found = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return
    what = ""
    if stat.S_ISLNK(found.st_mode):
        what = "a symbolic link"
    elif not stat.S_ISSOCK(found.st_mode):
        what = "no socket"
    elif alive(path):
        what = "a socket that a program listens on"
    if what:
        raise errors.NameTaken(f"{path} is {what}; it was left alone, nothing was started", hint="choose another --name, or remove it")
    path.unlink()


def alive(path: Path) -> bool:
    """Whether somebody listens on the socket at *path*."""
    with socket.socket(socket.AF_UNIX) as s:
        s.settimeout(1.0)
        try:
            s.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True  # it does not answer, but somebody is there
    return True


def orphan(name: str, environ: Mapping[str, str] = os.environ) -> str:
    """In words, if the run *name* has lost its supervisor and its child lives on; else ""."""
    facts = holder(lock_path(name, environ))
    if not _lives(facts, "child") or _lives(facts, "supervisor"):
        return ""
    child = facts["child"]
    adopt = f"the same gpuckpt run --name {name} adopts it; " if (runtime_directory(environ) / f"{name}.keeper").exists() else ""
    return (
        f"run {name}: its supervisor is gone, its child, pid {child} ({processes.command(child)}), lives on: {adopt}gpuckpt status {child}"
    )


def orphan_facts(name: str, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """What the supervisor of the run *name* had written down, if it is gone and its child waits to be adopted; else {}."""
    waits = orphan(name, environ) and (runtime_directory(environ) / f"{name}.keeper").exists()
    return holder(lock_path(name, environ)) if waits else {}


def child_of(name: str, environ: Mapping[str, str] = os.environ) -> int:
    """The pid of what the run *name* has started, 0 where nobody knows it."""
    facts = holder(lock_path(name, environ))
    return int(facts["child"]) if _lives(facts, "child") else 0


def supervisor_of(name: str, environ: Mapping[str, str] = os.environ) -> int:
    """The pid of the supervisor of the run *name*, 0 where nobody knows it."""
    facts = holder(lock_path(name, environ))
    return int(facts["supervisor"]) if _lives(facts, "supervisor") else 0


def orphans(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Every run of ours that lost its supervisor, in words."""
    try:
        names = sorted(p.stem for p in runtime_directory(environ).glob("*.lock"))
    except OSError:
        return []
    return [words for n in names if (words := orphan(n, environ))]


def _lives(facts: Mapping[str, Any], who: str) -> bool:
    return who in facts and processes.is_same(ProcessId(facts[who], facts.get(f"{who}_ticks", -1)))


def holder(lock_path: Path) -> dict[str, Any]:
    """What the holder of a name wrote down about itself; {} if nothing yet."""
    try:
        return _facts(lock_path.read_text())
    except (OSError, ValueError):
        return {}


def _facts(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
