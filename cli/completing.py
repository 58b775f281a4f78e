"""What a shell offers for a NAME or a TARGET: the runs of this user, and the pids of CUDA processes; for a GPU, and for a CODE.

It asks nobody: neither a run nor the driver, which would make a shell wait for whatever they are at. Runs are the sockets in the runtime
directory whose supervisor lives; CUDA processes those that have the driver's memory device open, and those in the journal; GPUs those that
the driver has written down below ``/proc``, by bus address, as NVML counts them.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import click
from click.shell_completion import CompletionItem

#: A machine may have very many processes, and each of them very many files: what was found until then is offered, in seconds.
LOOK_S = 0.3
_DEVICE = "/dev/nvidia-uvm"
_GPUS = "/proc/driver/nvidia/gpus"


def names(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The runs whose names begin so."""
    from gpuckpt.supervisor import places

    return [CompletionItem(n, help="run") for n in places.running() if n.startswith(incomplete)]


def codes(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The codes that begin so, with what each exits with."""
    from gpuckpt import errors

    found = sorted(errors.by_code().items())
    return [CompletionItem(code, help=f"exit {cls.exit_code}") for code, cls in found if code.startswith(incomplete)]


def gpus(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The indices and UUIDs that begin so, of GPUs that were not typed yet."""
    typed = set(ctx.params.get(param.name or "") or ())
    known = [(str(index), uuid) for index, uuid in enumerate(_uuids()) if not {str(index), uuid} & typed]
    items = [CompletionItem(index, help=uuid) for index, uuid in known] + [
        CompletionItem(uuid, help=f"GPU {index}") for index, uuid in known
    ]
    return [i for i in items if i.value.startswith(incomplete)]


def targets(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The runs, and the pids, that begin so."""
    from gpuckpt.inspect import processes

    offered = names(ctx, param, incomplete)
    if incomplete and not incomplete.isdecimal():
        return offered
    typed = set(ctx.params.get(param.name or "") or ())
    pids = sorted({p for p in _pids() if str(p).startswith(incomplete) and str(p) not in typed})
    seen = {p: processes.read(p) for p in pids}  # not its command line: to read that one may have to wait for the driver
    return offered + [CompletionItem(str(p), help=proc.comm) for p, proc in seen.items() if proc is not None]


def _uuids() -> list[str]:
    if simulated := os.environ.get("GPUCKPT_SIMULATE"):
        from gpuckpt.driver.simulated_store import SimulatedWorldDir

        with contextlib.suppress(OSError, ValueError):
            return [g.uuid for g in sorted(SimulatedWorldDir(simulated).peek().rules.gpus.values(), key=lambda g: g.index)]
        return []
    found = []
    for path in sorted(Path(_GPUS).glob("*/information")):
        with contextlib.suppress(OSError):
            lines = (line.partition(":") for line in path.read_text(errors="replace").splitlines())
            found += [value.strip() for name, _, value in lines if name == "GPU UUID"]
    return found


def _pids() -> Iterator[int]:
    from gpuckpt.inspect import processes
    from gpuckpt.journal import Journal, boot_id, state_directory

    with contextlib.suppress(Exception):  # whatever it is, a command that is typed says so
        for record in Journal(state_directory(os.environ, os.geteuid()), boot_id()).records():
            yield from (m.id.pid for m in record.members if processes.is_same(m.id))
    if simulated := os.environ.get("GPUCKPT_SIMULATE"):
        from gpuckpt.driver.simulated_store import SimulatedWorldDir

        with contextlib.suppress(OSError, ValueError):
            yield from (p for p in SimulatedWorldDir(simulated).peek().rules.processes if processes.read(p))
        return
    until = time.monotonic() + LOOK_S
    for name in os.listdir("/proc"):
        if time.monotonic() >= until:
            return
        if name.isdecimal() and _has_device(name):
            yield int(name)


def _has_device(pid: str) -> bool:
    with contextlib.suppress(OSError):  # it has gone, or is somebody else's
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{fd}") == _DEVICE:
                    return True
    return False
