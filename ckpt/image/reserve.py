"""Memory kept ready in a process for the image of its next checkpoint: how much there is, and having more of it or less.

The preload library keeps it (``_reserve.c``), in a process that was started with ``GPUCKPT_RESERVE`` and uses a GPU. How much the machine
and the cgroups can give is seen from here. So it is asked for by small steps, each after another look, and no more where a margin would
be touched.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpuckpt.image import keeper, page
from gpuckpt.image.keeper import Unanswered
from gpuckpt.image.page import Unavailable
from gpuckpt.inspect import host
from gpuckpt.model import GIB, MIB, ProcessId
from gpuckpt.words import size

VARIABLE = "GPUCKPT_RESERVE"
AUTO, FIXED = "auto", "fixed"

#: What must stay available besides, by each limit, in bytes.
MARGIN_BYTES = GIB
#: Where less than this is left, what is only kept ready is given back, until the margin is there again.
LEAST_ROOM_BYTES = MARGIN_BYTES // 2
STEP_BYTES = 256 * MIB
#: An image is about 10 MiB larger than what the process holds on its GPUs (benchmarks/results/driver-facts.json).
MORE_BYTES = 32 * MIB
_GPU_MEMORY = b"/dev/nvidia-uvm"  # mapped while the process is not suspended
#: After how long without a page more it is given up, in seconds: the thread has the lowest priority.
STALLED_S = 60.0


@dataclass(frozen=True, slots=True)
class Reserve:
    """Memory kept ready in a process, in bytes. ``wanted``: what was asked for. ``ready``: what is there; of it the first ``dirty`` are
    still to be zeroed, and an image has the first ``taken``. ``auto``: after an image, as much as that took. ``error``: the errno that
    kept the process from having more. ``returned``: images whose memory has come back."""

    auto: bool
    error: int
    returned: int
    wanted: int
    ready: int
    dirty: int
    taken: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an order came to: ``ready`` bytes, and ``why`` not all, or ""."""

    ready: int
    why: str = ""


def environment(environ: Mapping[str, str], *, auto: bool) -> dict[str, str]:
    """*environ* for a program that shall be able to keep memory ready."""
    return {**environ, VARIABLE: AUTO if auto else FIXED}


def image_bytes(held: Mapping[str, int | None]) -> int:
    """How large an image is of a process that holds so much on each GPU; 0 where that is not known."""
    nbytes = sum(n or 0 for n in held.values())
    return nbytes + MORE_BYTES if nbytes else 0


def look(process: ProcessId) -> Reserve:
    """Raises :class:`Unavailable` where none can be kept: another library, none, not started for it, or no GPU memory yet."""
    with _keeper(process) as found:
        _, auto, error, returned, wanted, ready, dirty, taken, _ = found.reserve()
    return Reserve(bool(auto), error, returned, wanted, ready, dirty, taken)


@contextlib.contextmanager
def _keeper(process: ProcessId) -> Iterator[keeper.Keeper]:
    with page.opened(process) as (memory, at):
        kept, *_ = page.read(memory, page.RESERVE, at + page.RESERVE_AT)
        inside, *_ = page.read(memory, page.KEEPER, at + page.KEEPER_AT)
    if not kept:
        raise Unavailable(f"pid {process} was not started to keep memory ready")
    if not inside:
        raise Unavailable(f"pid {process} has used no GPU yet: memory can be kept ready once it does (on Linux 5.9 or newer)")
    with keeper.of(process) as found:
        yield found


def ready_bytes(process: ProcessId) -> int:
    """Host memory that the next image of *process* need not take from the machine, as it has it already. 0 where the library is not wanted
    for this suspend, or not there."""
    if os.environ.get(page.VARIABLE) == "0":
        return 0
    with contextlib.suppress(Unavailable, Unanswered, OSError), page.opened(process) as (memory, at):
        kept, _, _, _, _, ready, _, taken, _ = page.read(memory, page.RESERVE, at + page.RESERVE_AT)
        return 0 if taken or not kept else int(ready)
    return 0


def order(
    process: ProcessId, nbytes: int, *, auto: bool = False, root: Path = host.ROOT, goes_on: Callable[[], bool] = lambda: True
) -> Outcome:
    """Have *nbytes* ready in *process*, by steps; 0 gives all back. Returns when they are there, or no more can be had, or *goes_on*
    says no.

    Raises:
        Unavailable: as :func:`look`.
        Unanswered: the process is stopped.
    """
    with _keeper(process) as found:
        if nbytes and not page.mappings(process.pid, _GPU_MEMORY):
            return Outcome(0, _words(errno.EBUSY))

        def ready() -> int:
            return int(found.reserve()[5])

        while True:
            now = ready()
            step = min(nbytes, now + STEP_BYTES)
            if step > now and (why := _short(process.pid, step - now, root)):
                return Outcome(now, why)
            try:
                found.have_ready(step, auto=auto)
            except OSError as error:
                return Outcome(now, _words(error.errno or 0))
            if why := _filled(found, step):
                return Outcome(ready(), why)
            if step >= nbytes:
                return Outcome(ready())
            if not goes_on():
                return Outcome(ready(), "the time for it is over")


def too_much(process: ProcessId, root: Path = host.ROOT) -> int:
    """How many of the bytes that are ready should be given back, as memory got short by some limit."""
    room = host.host_room(process.pid, root).available_bytes
    return max(0, MARGIN_BYTES - room) if room < LEAST_ROOM_BYTES else 0


def _filled(found: keeper.Keeper, wanted: int) -> str:
    """Wait until that much is there. Returns why it is not."""
    last, until = -1, time.monotonic() + STALLED_S
    while True:
        _, _, error, _, now_wanted, ready, _, taken, _ = found.reserve()
        if error:
            return _words(error)
        if ready >= wanted or now_wanted < wanted:  # given back, by somebody else
            return ""
        if taken:
            return _words(errno.EBUSY)
        if ready != last:
            last, until = ready, time.monotonic() + STALLED_S
        elif time.monotonic() >= until:
            return f"no memory came within {STALLED_S:g} s"
        time.sleep(0.005)


def _short(pid: int, nbytes: int, root: Path) -> str:
    """Why *nbytes* more may not be kept, by the tightest limit, or ""."""
    room = host.host_room(pid, root)
    if room.available_bytes >= nbytes + MARGIN_BYTES:
        return ""
    return f"{room.limit} leaves {size(room.available_bytes)}, of which {size(MARGIN_BYTES)} are left alone"


def _words(error: int) -> str:
    if error == errno.EBUSY:
        return "it is suspended, or about to be"
    if error == errno.EDQUOT:
        return "its address space is limited (ulimit -v or -d)"
    return os.strerror(error)
