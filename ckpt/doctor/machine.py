"""Checks of what lies round the processes: who may touch them, what a container hides, and MPS."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuckpt.doctor.check import Check, Subject
from gpuckpt.inspect import host

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CAP_SYS_PTRACE = 19
ADD_PTRACE = "`docker run --cap-add SYS_PTRACE …`, in Kubernetes `securityContext: {capabilities: {add: [SYS_PTRACE]}}`"


def mps(subject: Subject) -> Iterator[Check]:
    """No MPS daemon runs."""
    # the kernel cuts "nvidia-cuda-mps-control" and "-server" to this
    daemons = [pid for pid in host.pids(subject.root) if host.comm(pid, subject.root) == "nvidia-cuda-mps"]
    if daemons:
        yield Check(
            "MPS",
            "problem",
            f"runs (pid {', '.join(map(str, daemons))}): the driver cannot checkpoint its clients",
            "echo quit | sudo nvidia-cuda-mps-control, then start the programs again",
        )
    else:
        yield Check("MPS", "ok", "does not run")


def permission(subject: Subject) -> Iterator[Check]:
    """Who may suspend whose processes. All that is said of permission is said here."""
    uid, ptrace = _credentials(subject.root)
    yama = host.read(subject.root / "proc/sys/kernel/yama/ptrace_scope").strip()
    if uid is None:
        yield Check("permission", "warning", "could not be checked: /proc/self/status cannot be read")
    elif yama == "3":
        yield Check("permission", "warning", "yama ptrace_scope is 3: nobody may trace a process, so suspends may be refused", _yama_fix(3))
    elif ptrace:
        who = "root" if uid == 0 else f"uid {uid}"
        yield Check("permission", "ok", f"{who} with CAP_SYS_PTRACE: may suspend the processes of every user")
    elif uid == 0:
        yield Check(
            "permission",
            "warning",
            "root, but without CAP_SYS_PTRACE (a container's default): processes of other users, or with more capabilities, are refused",
            ADD_PTRACE,
        )
    elif yama in ("1", "2"):
        only = "its own descendants" if yama == "1" else "nothing without CAP_SYS_PTRACE"
        yield Check(
            "permission",
            "warning",
            f"uid {uid} without CAP_SYS_PTRACE, and yama ptrace_scope is {yama}: may suspend {only}",
            f"sudo gpuckpt …; or {_yama_fix(int(yama))}",
        )
    else:
        yield Check(
            "permission",
            "warning",
            f"uid {uid} without CAP_SYS_PTRACE: at most processes of uid {uid}, and none that changed user or capabilities",
            "sudo gpuckpt …",
        )


def _credentials(root: Path) -> tuple[int | None, bool]:
    """Our effective uid, and whether we have CAP_SYS_PTRACE."""
    uid, ptrace = None, False
    for line in host.read(root / "proc/self/status").splitlines():
        key, _, value = line.partition(":")
        if key == "Uid":
            uid = int(value.split()[1])
        elif key == "CapEff":
            ptrace = bool(int(value, 16) >> CAP_SYS_PTRACE & 1)
    return uid, ptrace


def _yama_fix(scope: int) -> str:
    if scope == 3:
        return "set kernel.yama.ptrace_scope below 3 in /etc/sysctl.d and reboot (3 cannot be taken back)"
    return "sudo sysctl kernel.yama.ptrace_scope=0 (for all programs)"


def container(subject: Subject) -> Iterator[Check]:
    """The pids that the driver gives are those that we see."""
    root, found = subject.root, False
    if (hidden := host.hidepid(root)) and not _credentials(root)[1]:
        found = True
        yield Check(
            "container" if host.in_container(root) else "hidepid",
            "warning",
            f"/proc is mounted with hidepid={hidden}: processes of other users are invisible, so a group may be seen only in part",
            "run gpuckpt as root, or `sudo mount -o remount,hidepid=0 /proc`",
        )
    if not host.pid_namespace_is_host(root):
        found = True
        foreign = len(subject.listed) - len(subject.processes)
        yield Check(
            "container",
            "warning",
            "this is a pid namespace of its own, and the driver may list pids of the host: "
            + (f"{foreign} of the processes that it lists are not here" if foreign else "what it lists now is here"),
            "to suspend processes outside, run gpuckpt on the host or with `docker run --pid=host`, in Kubernetes `hostPID: true`",
        )
    if not found:
        yield Check("container", "ok", "a container, with the pids of its kernel" if host.in_container(root) else "none")
