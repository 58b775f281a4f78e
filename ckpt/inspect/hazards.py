"""What makes a suspend unsafe, each by name, with its way out. Reads ``/proc``, changes nothing."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from gpuckpt import words
from gpuckpt.inspect import processes
from gpuckpt.inspect.processes import Proc
from gpuckpt.model import Gpu, GpuProcess, Hazard

#: Files whose owner has device memory mapped where neither the driver's checkpoint nor we can follow.
PINNING_FILES = {
    "/dev/infiniband/": "an RDMA device",
    "/dev/gdrdrv": "GDRCopy",
    "/dev/nvidia-fs": "GPUDirect Storage",
    "/dev/nvidia-caps-imex-channels/": "an IMEX channel",
}
_NCCL_SOCKET = re.compile(r"@tmp/nccl-socket-(\d+)-(\w+)")


def of_process(process: GpuProcess, proc: Proc, root: Path = processes.ROOT, communicators: Collection[int] | None = None) -> list[Hazard]:
    """Hazards that one process carries alone. *communicators*: its ranks in those that its agent can suspend, None without one."""
    found = []
    if halted := words.STOPPED if proc.stopped else processes.halted(process.id, root):
        said = f"pid {process.pid} is {halted}; every driver call on it would hang"
        found.append(Hazard("stopped", said, words.let_go(halted, [process.pid]), process.pid))
    try:
        targets = _open_files(process.pid)
        ranks = _nccl_ranks(process.pid, targets)
        unseen = "its main thread has ended" if proc.headless else ""
    except OSError as e:
        targets, ranks, unseen = [], [], (e.strerror or str(e)) if processes.is_same(process.id) else ""
    if unseen:
        found.append(_unseen(process, unseen))
    for part, what in PINNING_FILES.items():
        if any(part in t for t in targets):
            found.append(
                Hazard(
                    "rdma",
                    f"pid {process.pid} has {what} open ({part}): device memory registered there cannot be checkpointed",
                    "end the program's use of it, or start the program without it",
                    process.pid,
                    acceptable=True,
                )
            )
    if ranks and communicators is not None and (unknown := _beyond(ranks, communicators)):
        found.append(
            Hazard(
                "nccl-communicator",
                f"pid {process.pid} has a live NCCL communicator (rank {', '.join(dict.fromkeys(unknown))}) that its agent does not know: "
                "the driver would checkpoint it and never restore it",
                "make it known to the agent, or destroy it before the suspend",
                process.pid,
                acceptable=True,
            )
        )
    elif ranks and communicators is None:
        found.append(
            Hazard(
                "nccl-communicator",
                f"pid {process.pid} has a live NCCL communicator (rank {', '.join(dict.fromkeys(ranks))}): "
                "the driver would checkpoint it and never restore it",
                "start the job with an agent, which can suspend them (docs/multi-gpu.md), or destroy them before the suspend",
                process.pid,
                acceptable=True,
            )
        )
    return found


def _beyond(seen: Iterable[str], known: Collection[int]) -> list[str]:
    """Ranks among *seen* sockets that no communicator in *known* accounts for."""
    rest = [str(r) for r in known]
    beyond = []
    for rank in seen:
        if rank in rest:
            rest.remove(rank)
        else:
            beyond.append(rank)
    return beyond


def _unseen(process: GpuProcess, why: str) -> Hazard:
    """What cannot be looked at is not known to be safe."""
    root = f"as root: sudo gpuckpt suspend {process.pid}; or, " if os.geteuid() != 0 else ""
    return Hazard(
        "possible-import",
        f"pid {process.pid} ({process.name}): its open files cannot be looked at ({why}), so nothing shows whether it has an NCCL "
        "communicator or device memory that others use, which the driver would checkpoint and never restore",
        f"{root}if you know that it has none: gpuckpt suspend {process.pid} --accept-loss possible-import",
        process.pid,
        acceptable=True,
    )


def unvouched(process: GpuProcess, words: str) -> Hazard:
    """What an agent names that cannot be suspended."""
    return Hazard("possible-import", f"pid {process.pid}: {words}", "start the job without it (gpuckpt env)", process.pid, acceptable=True)


def silent(process: GpuProcess) -> Hazard:
    """A process with an agent that says nothing: nothing is known of what it shares."""
    return Hazard(
        "possible-import",
        f"pid {process.pid} ({process.name}) has an agent that does not answer: something in the program lets no other thread run",
        f"try again when it has let go of it; where it stands: py-spy dump --native --pid {process.pid}",
        process.pid,
        acceptable=True,
    )


def possible_imports(
    group: Mapping[int, GpuProcess], related: Mapping[int, Mapping[int, str]], agents: Collection[int] = ()
) -> list[Hazard]:
    """One hazard a process for which another related CUDA process exists. *related*: pid -> related CUDA pids -> how.
    *agents*: pids that have an agent; where some have, those without are named."""
    found = []
    for pid in sorted(group):
        others = related.get(pid, {})
        if others:
            named = ", ".join(f"{p} (same {how})" for p, how in sorted(others.items())[:8])
            outside = sorted(set(others) - set(group))
            without = [p for p in (pid, *sorted(others)) if p not in agents]
            missing = f" pid {', '.join(map(str, without))} has no agent." if agents and without else ""
            also = f"; name {' '.join(map(str, outside))} too, or leave out --no-tree" if outside else ""
            found.append(
                Hazard(
                    "possible-import",
                    'start it with agents (eval "$(gpuckpt env)", or a server by gpuckpt run; docs/multi-gpu.md) and this job can be '
                    "suspended as a whole. As it is, "
                    f"pid {pid} belongs together with {len(others)} more CUDA process{'es' if len(others) > 1 else ''}: {named}. "
                    "If one of them maps GPU memory of another, the driver would checkpoint it and never restore it, "
                    f"and nothing shows this from outside.{missing}",
                    f"agents; or, if you know that they share no GPU memory: gpuckpt suspend {pid} --accept-loss possible-import{also}",
                    pid,
                    acceptable=True,
                )
            )
    return found


def of_gpus(gpus: Iterable[Gpu], held: Iterable[str]) -> list[Hazard]:
    """Hazards of the GPUs that the group is on (*held*: their UUIDs)."""
    wanted = set(held)
    found = []
    for gpu in gpus:
        if gpu.uuid in wanted and gpu.mig:
            found.append(
                Hazard("mig", f"{gpu.label} is in MIG mode, which the driver's checkpoint does not support", "use the whole GPU", None)
            )
    return found


def mps(procs: Iterable[Proc]) -> list[Hazard]:
    """MPS clients cannot be checkpointed; a server that runs means that CUDA processes of its user are clients."""
    servers = [p.pid for p in procs if p.comm.startswith("nvidia-cuda-mp")]
    if not servers:
        return []
    return [
        Hazard(
            "mps",
            f"an MPS server runs (pid {servers[0]}); the driver cannot checkpoint its clients",
            "end it (echo quit | nvidia-cuda-mps-control) and start the program again; or, if the program is not its client, "
            "add --accept-loss mps",
            servers[0],
            acceptable=True,
        )
    ]


def _nccl_ranks(pid: int, targets: Iterable[str]) -> list[str]:
    """Ranks of the live P2P communicators of *pid*, seen by their abstract sockets. Raises ``OSError`` where these cannot be seen."""
    inodes = {t[8:-1] for t in targets if t.startswith("socket:[")}
    if not inodes:
        return []
    ranks = []  # of each socket: it may have the same rank in several
    for line in Path(f"/proc/{pid}/net/unix").read_text(errors="replace").splitlines():
        match = _NCCL_SOCKET.search(line)
        if match and line.split()[6] in inodes:
            ranks.append(match[1])
    return sorted(ranks, key=int)


def _open_files(pid: int) -> list[str]:
    """What its descriptors lead to. Raises ``OSError`` where nobody may look: they are another user's, say."""
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # closed since
            found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return found
