"""Says no to what cannot be operated on, and why: before anything has been touched."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NoReturn

from gpuckpt import errors
from gpuckpt.driver.api import OLDEST_CUDA, OLDEST_MAPS, DriverVersion, no_maps
from gpuckpt.inspect import processes
from gpuckpt.inspect.processes import Proc
from gpuckpt.journal import Record, no_process


def check_driver(version: DriverVersion) -> None:
    """Raise :class:`gpuckpt.errors.DriverTooOld` for one that cannot checkpoint processes."""
    if version.cuda < OLDEST_CUDA:
        raise errors.DriverTooOld(
            f"the NVIDIA driver {version.package} (CUDA {version.cuda[0]}.{version.cuda[1]}) cannot checkpoint processes: that takes "
            f"CUDA {OLDEST_CUDA[0]}.{OLDEST_CUDA[1]}; nothing was touched",
            hint="update the NVIDIA driver to 570 or newer; gpuckpt doctor explains",
        )


def check_maps(version: DriverVersion) -> None:
    """Raise :class:`gpuckpt.errors.DriverTooOld` for one that cannot restore onto other GPUs."""
    if version.cuda < OLDEST_MAPS:
        raise no_maps(version)


def check_target(pid: int, me: int, command: str, procs: dict[int, Proc], void: Sequence[Record]) -> None:
    """Raise if the process *me* may not do *command* to *pid*, or if there is none. *void*: what earlier boots had of such numbers."""
    if pid in procs:
        if pid == 1:
            explain_init(())
        if pid == me:
            raise errors.ProtectedProcess(f"pid {pid} is gpuckpt itself", hint="gpuckpt ps lists what can be suspended", pid=pid)
        if pid in processes.ancestors(me, procs):
            raise errors.ProtectedProcess(
                f"pid {pid} ({processes.command(pid)}) started this gpuckpt: suspending it would stop the command as well",
                hint="run gpuckpt from outside of it, or name one of its children",
                pid=pid,
            )
        if procs[pid].kernel:
            raise errors.NotAProcess(f"pid {pid} is a kernel thread", hint="gpuckpt ps lists what can be suspended", pid=pid)
        return
    explain_missing(pid, command, void)


def explain_missing(pid: int, command: str, void: Sequence[Record]) -> NoReturn:
    """Raise for a *pid* that no process has: a thread has it, or nobody."""
    group = processes.thread_group(pid)
    if group is not None and group != pid:
        raise errors.NotAProcess(
            f"{pid} is a thread of pid {group} ({processes.command(group)})", hint=f"gpuckpt {command} {group}", pid=pid
        )
    raise errors.NoSuchProcess(no_process(pid, void), hint="gpuckpt ps lists what can be suspended", pid=pid)


def explain_init(targets: Sequence[int]) -> NoReturn:
    """Raise for pid 1 as the target, or as a relative of *targets* that holds GPU memory, as a container's first program may."""
    if not targets:
        raise errors.ProtectedProcess(
            "pid 1 is init: it is never suspended",
            hint="gpuckpt ps lists what can be; a container's first program: from outside of it",
            pid=1,
        )
    raise errors.ProtectedProcess(
        f"pid 1 ({processes.command(1)}) holds GPU memory and started pid {targets[0]}, so they go together, and pid 1 is never suspended "
        "from within; nothing was touched",
        hint="run gpuckpt outside of the container, or start the container with an init (docker run --init)",
        pid=1,
    )


def explain_nothing(targets: Sequence[int], command: str) -> NoReturn:
    """Raise for *targets* of which none holds GPU memory, as far as may be seen."""
    for pid in targets:
        uid = processes.uid_of(pid)
        if os.geteuid() not in (0, uid):
            raise errors.PermissionDenied(
                f"pid {pid} ({processes.command(pid)}) belongs to {processes.user_name(uid)}; nothing was touched",
                hint=f"sudo gpuckpt {command} {pid}",
                pid=pid,
            )
    names = ", ".join(f"{p} ({processes.command(p)})" for p in targets)
    raise errors.NoCudaState(
        f"neither {names} nor any process that belongs to it holds GPU memory",
        hint="gpuckpt ps lists the processes on the GPUs",
        pid=targets[0],
    )
