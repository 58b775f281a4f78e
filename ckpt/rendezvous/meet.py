"""From what a person typed to a rendezvous: which store, which key, and who this host is."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gpuckpt import errors
from gpuckpt.inspect import processes
from gpuckpt.model import ProcessId
from gpuckpt.rendezvous.coordinator import Body
from gpuckpt.rendezvous.host import Clock, Rendezvous
from gpuckpt.rendezvous.prompt import ANSWER_DEADLINE_S, Prompt, within
from gpuckpt.rendezvous.seal import Seal, read_key

if TYPE_CHECKING:
    from gpuckpt.rendezvous.store import Store

_C10D = re.compile(r"c10d://(?P<host>\[[0-9A-Fa-f:.]+\]|[\w.-]+):(?P<port>\d{1,5})/(?P<name>[\w.-]{1,64})")
_FILE = re.compile(r"file://(?P<directory>/.*)/(?P<name>[\w-][\w.-]{0,63})")
_FORMS = "c10d://HOST:PORT/NAME or file:///SHARED/DIRECTORY/NAME"
#: How long a host waits for the one that serves the store, where the user gave no --timeout, in seconds.
CONNECT_S = 60.0


def rendezvous(
    clock: Clock,
    url: str,
    *,
    command: str,
    nodes: int,
    node: int | None,
    key_file: str,
    me: ProcessId,
    boot_id: str,
    timeout_s: float | None,
) -> Rendezvous:
    """The rendezvous at *url*, not yet reached. Raises :class:`gpuckpt.errors.Usage` for words that make no sense."""
    c10d, file = _C10D.fullmatch(url), _FILE.fullmatch(url)
    if not c10d and not file:
        raise errors.Usage(f"--rendezvous {url}: {_FORMS}")
    if nodes < 2:
        raise errors.Usage(f"--nodes {nodes}: a rendezvous is of two hosts or more")
    if node is not None and not 0 <= node < nodes:
        raise errors.Usage(f"--node-rank {node}: from 0 to {nodes - 1} with --nodes {nodes}")
    name = (c10d or file or {"name": ""})["name"]
    key = read_key(key_file) if key_file else b""
    until = clock.now() + (timeout_s or CONNECT_S)
    answer_s = min(ANSWER_DEADLINE_S, timeout_s or ANSWER_DEADLINE_S)

    def connect() -> Store:
        if c10d:
            from gpuckpt.rendezvous.c10d import C10dStore

            where = f"{c10d['host']}:{c10d['port']}"
            host, port = c10d["host"].strip("[]"), int(c10d["port"])
            store: Store = C10dStore(host, port, c10d["name"], lambda: _wait(clock, where, until), answer_s)
        else:
            from gpuckpt.rendezvous.file import FileStore

            assert file is not None
            directory = Path(file["directory"]) / file["name"]
            try:
                store = within(answer_s, lambda: FileStore(directory))
            except TimeoutError:
                said = f"the rendezvous directory {directory} does not answer; nothing was touched"
                raise errors.RendezvousLost(said, hint="whether its file server is there: ls " + file["directory"]) from None
        if store.open_to_others and not key:
            store.close()
            raise errors.RendezvousKey(
                f"others can write into the rendezvous {url}, so its values must be authenticated; nothing was touched",
                hint="--rendezvous-key FILE, the same on every host: (umask 077; head -c 32 /dev/urandom | base64 > FILE)",
            )
        return Prompt(store, url, answer_s)

    identity = {"host": os.uname().nodename, "machine": f"{boot_id} {_pid_namespace()}", "pid": me.pid, "start_ticks": me.start_ticks}
    return Rendezvous(
        clock,
        connect,
        Seal(name, key),
        url=url,
        command=command,
        nodes=nodes,
        node=node,
        me=identity,
        dead=_dead_on(identity["machine"]),
        fresh_id=lambda: os.urandom(6).hex(),
        key_file=str(Path(key_file).absolute()) if key_file else "",
    )


def _dead_on(machine: object) -> Callable[[Body], bool]:
    """Whether a host's command is known to have ended: only on our own machine can that be seen."""
    return lambda who: who["machine"] == machine and not processes.is_same(ProcessId(who["pid"], who["start_ticks"]))


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _wait(clock: Clock, where: str, until: float) -> None:
    if clock.interruptions:
        raise errors.Interrupted("interrupted; everything is as it was found", signum=clock.interruptions[0])
    if clock.now() >= until:
        raise errors.RendezvousLost(
            f"no store answers at {where}; nothing was touched", hint="start the command on that host first; or a longer --timeout"
        )
    clock.wait((), min(until, clock.now() + 0.2))
