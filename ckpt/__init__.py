"""Free a GPU without killing what runs on it.

>>> import gpuckpt
>>> gpuckpt.suspend(4242, timeout_s=30)        # doctest: +SKIP
>>> gpuckpt.resume(4242)                       # doctest: +SKIP

Each call returns a :class:`gpuckpt.model.Report`, or raises a :class:`gpuckpt.errors.GpuckptError` whose ``report``
(if the operation had begun to act) tells how every process was left. An argument that makes no sense is a
:class:`gpuckpt.errors.Usage`: nothing was looked at, and nothing touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from gpuckpt.model import Report
    from gpuckpt.overview import Overview
    from gpuckpt.supervisor.lease import Lease
    from gpuckpt.telling import Progress

__all__ = ["is_suspended", "lease", "recover", "resume", "status", "suspend"]


def lease(*gpus: int | str, timeout_s: float = 300.0) -> Lease:
    """Have *gpus* (indices or UUIDs) without runs: ``with gpuckpt.lease(0): train()``.

    The runs of this user on them (``gpuckpt run``) are suspended, once their running requests have ended, and stay so until the
    ``with`` block or this process ends, even by ``kill -9``. Then those that were awake are resumed.

    Raises
    ------
    gpuckpt.errors.Busy, gpuckpt.errors.Deadline
        A GPU is leased already, or a run was not suspended within *timeout_s*; what had been suspended comes back.
    gpuckpt.errors.GpuckptError
        A run refused.
    """
    from gpuckpt import asked
    from gpuckpt.supervisor.lease import Lease, uuids

    asked.check("lease", timeout_s=timeout_s)
    return Lease(uuids(gpus), within_s=timeout_s)


def suspend(
    *pids: int,
    timeout_s: float | None = None,
    tree: bool = True,
    accept_loss: Collection[str] = (),
    along: Collection[int] = (),
    method: str = "auto",
    keep_in: str = "ram",
    oom_score_adj: int | None = None,
    rendezvous: str | None = None,
    nodes: int | None = None,
    node_rank: int | None = None,
    rendezvous_key: str | None = None,
    dry_run: bool = False,
    tell: Callable[[Progress], None] | None = None,
) -> Report:
    """Move everything that the groups of *pids* hold on their GPUs to host memory.

    Before: the processes run. After: each is alive, holds no GPU memory, and waits at its next CUDA call. A process that was
    already suspended stays so (``Report.already``).

    Parameters
    ----------
    timeout_s
        Deadline for the whole operation in seconds. When it passes everything goes back. Default: 60 and 2 for each GiB.
    tree
        False: only the processes named, under the same hazards.
    accept_loss
        Kinds of hazards taken on, such as ``"possible-import"``.
    along
        Pids that are taken along (``--with``): they give up the communicators that they share with the groups, and stand still until the
        resume, their memory where it is.
    method
        "auto": what lies in a pool of the program leaves first, the driver takes the rest. "driver": it takes all of it. "pool": no call
        of the driver; what lies in no pool stays on the GPU.
    keep_in
        A directory: the images are moved into files there, and their host memory given back. "ram": they stay in host memory.
    oom_score_adj
        Of the processes while they are suspended, -1000 to 1000: whom the kernel ends first where memory runs out.
    rendezvous, nodes, node_rank, rendezvous_key
        One operation with the same call on other hosts: ``c10d://HOST:PORT/NAME`` or ``file:///SHARED/DIRECTORY/NAME``, on how many
        hosts, which of them this is (by default a free place), and the file with the key that all of them have.
    dry_run
        Nothing is touched: ``details["plan"]`` of the report has what would be done, and under "refused" why it would not.
    tell
        Called with a :class:`gpuckpt.telling.Progress` while driver calls run.

    Raises
    ------
    gpuckpt.errors.Refused
        A hazard; nothing was touched.
    gpuckpt.errors.Deadline, gpuckpt.errors.Interrupted, gpuckpt.errors.OtherHost
        Everything is as it was found.
    gpuckpt.errors.Held
        Another host fell silent after the commit: the processes here wait for a resume of all hosts.
    gpuckpt.errors.GpuckptError
        With ``exit_code`` 3: the report names each process that is not as it was found.
    """
    from gpuckpt import asked, early
    from gpuckpt.local import LocalWorld
    from gpuckpt.operation import Operation
    from gpuckpt.preview import Preview
    from gpuckpt.rendezvous.choice import Choice

    asked.check("suspend", pids, along=along, accept_loss=accept_loss, method=method, oom_score_adj=oom_score_adj, timeout_s=timeout_s)
    hosts = Choice(rendezvous, nodes, node_rank, rendezvous_key)
    hosts.check(dry_run=dry_run)
    with (
        LocalWorld(start=early.begin(timeout_s=timeout_s)) as world,
        world.interruptible(restore=True),
        hosts.barrier(world, "suspend", timeout_s, me=world.me, boot_id=world.journal.boot_id) as barrier,
    ):
        operation = (Preview if dry_run else Operation)(
            world, "suspend", timeout_s=timeout_s, accept=frozenset(accept_loss), tell=tell, barrier=barrier
        )
        return operation.suspend(pids, tree=tree, along=along, by=method, keep_in=keep_in, oom_score_adj=oom_score_adj)


def resume(
    *pids: int,
    timeout_s: float | None = None,
    tree: bool = True,
    wait_s: float = 0.0,
    gpus: Mapping[str, str] | None = None,
    to_gpu: str = "",
    rendezvous: str | None = None,
    nodes: int | None = None,
    node_rank: int | None = None,
    rendezvous_key: str | None = None,
    dry_run: bool = False,
    tell: Callable[[Progress], None] | None = None,
) -> Report:
    """Put the groups of *pids* back on their GPUs, at the same addresses, and let them go on.

    Restore is called only when every GPU has room for what it gets; *wait_s* waits for that. *gpus* maps old to new GPU UUIDs,
    *to_gpu* names the new GPU of a group that was on one. Without *tree* only the processes named, refused where they were suspended
    together with others. *rendezvous* and what follows it are as for :func:`suspend`: a group of several hosts comes back on all of them.
    With *dry_run* nothing is touched: ``details["plan"]`` says what would be done.

    Raises
    ------
    gpuckpt.errors.Refused
        No room, a GPU that is lost, changed or cannot be queried; the processes stay suspended, intact.
    gpuckpt.errors.Lost
        The driver could not restore a process; the report says which.
    """
    from gpuckpt import asked, early
    from gpuckpt.local import LocalWorld
    from gpuckpt.operation import Operation
    from gpuckpt.preview import Preview
    from gpuckpt.rendezvous.choice import Choice

    asked.check("resume", pids, timeout_s=timeout_s, wait_s=wait_s)
    hosts = Choice(rendezvous, nodes, node_rank, rendezvous_key)
    hosts.check(dry_run=dry_run)
    with (
        LocalWorld(command="resume", start=early.begin(timeout_s=timeout_s)) as world,
        world.interruptible(restore=True),
        hosts.barrier(world, "resume", timeout_s, me=world.me, boot_id=world.journal.boot_id) as barrier,
    ):
        operation = (Preview if dry_run else Operation)(world, "resume", timeout_s=timeout_s, tell=tell, barrier=barrier)
        return operation.resume(pids, tree=tree, wished=gpus, to_gpu=to_gpu, wait_s=wait_s)


def status(*pids: int) -> Overview:
    """Every process on the GPUs or suspended; with *pids*, those that these stand for.

    Raises
    ------
    gpuckpt.errors.NoSuchProcess, gpuckpt.errors.NoCudaState
        None of *pids* stands for anything.
    """
    from gpuckpt import asked
    from gpuckpt.local import LocalWorld
    from gpuckpt.overview import overview

    asked.check("status", pids or None)
    with LocalWorld(command="status") as world:
        return overview(world, pids)


def is_suspended(pid: int) -> bool:
    """Whether all that *pid* stands for is suspended. Raises as :func:`status` does where there is no such process."""
    return status(pid).suspended


def recover(*, timeout_s: float | None = None) -> list[Report]:
    """Finish or undo every operation that a crash left in the middle; one report for each, with ``error`` set where that failed."""
    from gpuckpt import asked, early, keeping
    from gpuckpt.local import LocalWorld
    from gpuckpt.recovery import recover_all

    asked.check("recover", timeout_s=timeout_s)
    with LocalWorld(start=early.begin(timeout_s=timeout_s)) as world, world.interruptible(restore=True):
        world.void()
        keeping.sweep(world.journal.records())
        return recover_all(world, timeout_s=timeout_s)
