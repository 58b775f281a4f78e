"""Where the images of a group are kept: in host memory, where the driver put them, or in files of a directory.

A suspend that keeps them on disk is a suspend, and then two steps: ``store`` writes the files, ``drop`` gives the memory back. A resume
has a step ``load`` before its restore. What can be found out beforehand (the directory, its room, the library in the process) is
found before anything is locked; what fails later leaves the group suspended, in memory.

What deals with files is imported where it is used: every command imports this module, and few have images on disk.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gpuckpt import claims, errors, plan, words
from gpuckpt.driver.api import CallError
from gpuckpt.errors import GpuckptError
from gpuckpt.image import paths
from gpuckpt.journal import Member, Record
from gpuckpt.model import Call, GpuProcess, Outcome, ProcessId, State
from gpuckpt.walk import Failure, Walk
from gpuckpt.words import size

RAM = words.RAM
#: What a process takes by itself from one moment to the next is less.
GIVEN_BACK_LEAST = 16 << 20


class Kept(NamedTuple):
    """Where the image of a suspended process is: bytes in memory, bytes on disk, and the rest of what a report says of it."""

    host_bytes: int = 0
    disk_bytes: int = 0
    image: dict[str, Any] | None = None

    @classmethod
    def of(cls, walk: Walk, process: ProcessId, member: Member | None, nbytes: int) -> Kept:
        """*member*: what the journal has of it. Whether its memory is whole the process itself tells."""
        seen = walk.world.image(process)
        on_disk, where = bool(seen.get("dropped")), RAM
        if on_disk:  # and a journal of somebody else may know where
            where = str(Path(member.image["path"]).parent) if member is not None and member.image is not None else "?"
        path = seen.get("path", paths.DRIVER)
        told = ("why", "populate_s", "threads", "huge_pages", "copied_bytes", "copy_threads", "from_reserve_bytes")
        made = {"path": path, **{k: seen.get(k) for k in told}}
        seconds = next((s.seconds_by_pid.get(process.pid) for s in walk.steps if s.name == Call.CHECKPOINT), None)
        how = {"shared": (seen.get("copy_threads") or 0) > 1, "ready": bool(seen.get("from_reserve_bytes"))}
        estimate = None if walk.world.simulated else paths.other(path, nbytes, seconds, **how)
        made |= {"estimate": estimate and estimate.as_dict(), "in": where, "bytes": nbytes}
        return cls(0 if on_disk else nbytes, nbytes if on_disk else 0, made)


NOWHERE = Kept()


def on_disk(walk: Walk, process: ProcessId) -> bool:
    """Whether the only whole copy of its image is in a file. The process itself tells."""
    return bool(walk.world.image(process).get("dropped"))


def movable(walk: Walk, directory: str, processes: Iterable[GpuProcess]) -> list[GpuProcess]:
    """Of *processes*, which are suspended, those whose images *directory* does not have yet. One that lies elsewhere stays there, and that
    is said."""
    if directory == RAM:
        return []
    known = {m.id: m.image for r in walk.world.journal.records() for m in r.members}
    left = []
    for p in processes:
        if p.along:
            continue
        if not on_disk(walk, p.id):
            left.append(p)
        elif image := known.get(p.id):
            where = Path(image["path"]).parent
            if where != Path(directory).resolve():
                walk.warnings.append(f"the image of pid {p.pid} is on disk already, in {where}, and stays there")
    return left


def refuse(walk: Walk, directory: str, processes: Iterable[GpuProcess]) -> None:
    """Raise if the images of *processes* cannot be kept in *directory*: nothing has been touched. Warns of what a person may not expect."""
    if directory == RAM:
        return
    if not directory:
        raise errors.Usage("--keep-in: neither a directory nor ram", hint="gpuckpt suspend PID --keep-in DIR")
    from gpuckpt.image import file, preload
    from gpuckpt.image.page import Unavailable

    processes = list(processes)
    for p in processes:
        try:
            preload.refuse_missing(p.id)
        except Unavailable as error:
            raise errors.NoPreload(
                f"the image of pid {p.pid} ({p.name}) can be kept in host memory only: {error}; nothing was touched",
                hint="suspend it without --keep-in" + ("" if preload.loaded(p.pid) else "; or start it by `gpuckpt exec -- COMMAND`"),
                pid=p.pid,
            ) from error
    place = Path(directory)
    needed = sum(file.file_bytes(plan.image_need_bytes(p.gpus)) for p in processes)
    try:
        if not place.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR) if place.exists() else os.strerror(errno.ENOENT))
        file.sweep(place)
        file.try_room(place, needed)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        room = f"; it takes {size(needed)}" if full else ""
        raise errors.ImageDirectory(
            f"no image can be kept in {directory}: {error.strerror}{room}; nothing was touched",
            hint="free space there, or name another directory" if full else "name a directory that you can write: --keep-in DIR",
        ) from error
    kind = file.filesystem(place)
    if said := file.not_a_disk(kind):
        walk.warnings.append(f"{directory} ({kind}) {said}")


def store(walk: Walk, directory: str) -> GpuckptError | None:
    """Move the images of the suspended group to *directory*. Returns why not all of them are there; those that are not stay in memory.

    The journal says where a file will lie before it is made, and the pages go only when it says so.
    """
    assert walk.record is not None
    members = [m for m in walk.record.members if walk.now.get(m.id) is State.CHECKPOINTED and not m.lost and not on_disk(walk, m.id)]
    if directory == RAM or not members:
        return None
    from gpuckpt.image import file

    place = Path(directory).resolve()  # where the files are found again, whatever becomes of a link
    spec = {"directory": str(place), "operation": os.urandom(6).hex()}
    for m in members:
        _forget_file(m)
        path = str(place / file.name(m.id, spec["operation"]))
        walk.record = walk.record.with_member(m.id, image={"path": path, "operation": spec["operation"]})
    try:
        walk.save(required=True)
    except errors.JournalError as error:
        _unsaid(walk, [m.id for m in members])
        return errors.ImageNotStored(
            f"the group is suspended, its images in host memory: {error.message}", hint=error.hint, step=str(Call.STORE)
        )
    written, failures = _calls(walk, Call.STORE, {m.id: spec for m in members})
    for process, image in written.items():
        walk.record = walk.record.with_member(process, image=image)
    for m in members:
        if m.id not in written:
            _forget_file(walk.record.member(m.id) or m)  # of a process of ours that was killed
    _unsaid(walk, [f.process for f in failures])
    try:
        walk.save(required=True)
    except errors.JournalError as error:  # the file's name is in the older record, its inode is not: the pages stay
        return errors.ImageNotStored(
            f"the group is suspended, its images in host memory: {error.message}", hint=error.hint, step=str(Call.STORE)
        )
    if written:
        failures += _calls(walk, Call.DROP, written)[1]
    failures = _without_the_dead(walk, failures)
    return failures[0].error if failures else None


def load(walk: Walk, processes: Iterable[ProcessId]) -> list[Failure]:
    """Bring the images of *processes* back into memory, where they are not. Failures name those that stay on disk. One that has ended is
    a failure only if nobody of the group is left."""
    assert walk.record is not None
    wanted: dict[ProcessId, Mapping[str, Any]] = {}
    for process in processes:
        member = walk.record.member(process)
        if member is not None and member.image is not None and "inode" in member.image:
            wanted[process] = member.image
        elif on_disk(walk, process):
            wanted[process] = {}  # this journal does not say where: the process may hold it
    return _without_the_dead(walk, _calls(walk, Call.LOAD, wanted)[1]) if wanted else []


def tidy(walk: Walk) -> None:
    """Remove the files of those that are suspended no longer. One that its process held is gone by itself."""
    assert walk.record is not None
    for m in walk.record.members:
        if m.image is not None and walk.now.get(m.id) not in (State.CHECKPOINTED, State.BLOCKED):
            _forget_file(m)
            walk.record = walk.record.with_member(m.id, image=None)


def sweep(records: Iterable[Record], void: Iterable[Record] = ()) -> list[str]:
    """Remove files that no process needs: those of the dead beside any file that *records* name, all that the *void* ones name, what was
    half-written when its gpuckpt was killed, and what a process holds though its memory never went; and give back what a resume that was
    killed had read. Words for each.
    """
    records, void = list(records), list(void)
    if not any(m.image for r in (*records, *void) for m in r.members):
        return []
    from gpuckpt.image import file, keeper

    words, places = [], set()
    for record in records:
        for m in record.members:
            if m.image is None:
                continue
            with contextlib.suppress(BlockingIOError), _claimed(m.id):  # or who moves its image just now would lose the file
                if keeper.dropped(m.id):
                    words += _given_back_again(m)
                    continue
                let_go = keeper.let_go(m.id)
                if "inode" not in m.image and _forget_file(m):
                    words.append(f"removed {m.image['path']}: half-written; the image of pid {m.id} is in its memory")
                elif "inode" in m.image and let_go:
                    words.append(f"gave up the file of pid {m.id} in {Path(m.image['path']).parent}: its image is in its memory")
    for record in void:
        for m in record.members:
            if m.image is not None and _forget_file(m):
                words.append(f"removed {m.image['path']}: its process ended with the machine")
    for record in (*records, *void):
        places |= {Path(m.image["path"]).parent for m in record.members if m.image is not None}
    for place in sorted(places):
        words += [f"removed {path}: its process is gone" for path in file.sweep(place)]
    return words


def _given_back_again(member: Member) -> list[str]:
    """Give back what a load that was killed had got of the memory of *member*, whose image is on disk. Words for it, if it was much."""
    from gpuckpt.image import memory, store
    from gpuckpt.inspect import host

    assert member.image is not None
    before = host.rss_bytes(member.id.pid)
    with contextlib.suppress(memory.Unavailable, GpuckptError, KeyError), memory.of(member.id) as image:
        store.drop(image, member.id, member.image)
    back = before - host.rss_bytes(member.id.pid)
    return [f"gave back {size(back)} of pid {member.id}, whose image is on disk: a resume was killed"] if back >= GIVEN_BACK_LEAST else []


@contextlib.contextmanager
def _claimed(process: ProcessId) -> Iterator[None]:
    """Raises ``BlockingIOError`` where another command has *process*."""

    def taken(_fd: int, name: str) -> None:
        raise BlockingIOError(name)

    claim = claims.take({f"/proc/{process.pid}": str(process)}, taken)
    try:
        yield
    finally:
        claim.release()


def _without_the_dead(walk: Walk, failures: list[Failure]) -> list[Failure]:
    """*failures*, as they are now that some of those that failed may have ended: of these nothing is suspended any more."""
    gone = []
    for n, f in enumerate(failures):
        if not walk.world.alive(f.process):
            walk.now[f.process] = State.GONE
            words = f"pid {f.process} ended while its image was being moved"
            failures[n] = Failure(f.process, errors.Aborted(words, pid=f.process.pid, step=f.error.step))
            gone.append(failures[n])
    if all(state is State.GONE for state in walk.now.values()):
        return failures
    walk.warnings += [f.error.message for f in gone]
    return [f for f in failures if f not in gone]


def _unsaid(walk: Walk, processes: Iterable[ProcessId]) -> None:
    assert walk.record is not None
    for process in processes:
        walk.record = walk.record.with_member(process, image=None)


def _forget_file(member: Member) -> bool:
    """Remove the file of *member*, if it has a name still, and one that we gave it."""
    if member.image is None:
        return False
    from gpuckpt.image import file

    path = Path(member.image["path"])
    if not file.is_named(path, member.id, member.image["operation"]):
        return False
    with contextlib.suppress(OSError):
        path.unlink()
        return True
    return False


def _calls(walk: Walk, call: Call, specs: Mapping[ProcessId, Mapping[str, Any]]) -> tuple[dict[ProcessId, dict[str, Any]], list[Failure]]:
    """Make *call* for several processes at once; a load for one after the other, as each looks what memory there is, until one fails. One
    that has not ended by its deadline, or at Ctrl-C, is let go, and gives up by itself.

    Returns what each gave, and failures; a call whose end is not known counts as failed.
    """
    done: dict[ProcessId, dict[str, Any]] = {}
    failures: list[Failure] = []
    with walk.step(call):
        limit = max(walk.deadline.at, walk.world.now()) + plan.image_call_s(walk.nbytes)
        for part in [{p: spec} for p, spec in specs.items()] if call is Call.LOAD else [specs]:
            if any(walk.world.alive(f.process) for f in failures):
                break
            given, failed = _at_once(walk, call, part, limit)
            done |= given
            failures += failed
    return done, failures


def _at_once(
    walk: Walk, call: Call, specs: Mapping[ProcessId, Mapping[str, Any]], limit: float
) -> tuple[dict[ProcessId, dict[str, Any]], list[Failure]]:
    world = walk.world
    before = len(world.interruptions)
    pending, done, failures = {}, {}, []
    for p, spec in specs.items():
        try:
            pending[p] = world.start(call, p, image=spec, claims=walk.claims)
        except CallError as e:
            failures.append(Failure(p, _error(call, p, Outcome(e.result))))
    while waiting := [c for c in pending.values() if c.outcome is None]:
        if world.now() >= limit or len(world.interruptions) > before:
            break
        world.wait(waiting, min(limit, world.now() + 0.25))
    for process, c in pending.items():
        outcome = c.outcome or Outcome("interrupted" if len(world.interruptions) > before else "deadline")
        if c.outcome is None:
            c.release()
        if outcome.ok:
            done[process] = outcome.image or {}
        else:
            failures.append(Failure(process, _error(call, process, outcome)))
        if call is Call.STORE and outcome.result == "VANISHED":
            from gpuckpt.image import keeper

            keeper.let_go(process)  # of a file half-written that has no name any more: nobody else would, until the resume
    return done, failures


def _error(call: Call, process: ProcessId, outcome: Outcome) -> GpuckptError:
    where: dict[str, Any] = {"pid": process.pid, "step": str(call)}
    if outcome.result.startswith("gpuckpt:"):
        cls = errors.by_code().get(outcome.result[8:], GpuckptError)
        return cls(outcome.message, hint=outcome.hint or "gpuckpt doctor", **where)
    why = {
        "VANISHED": "the process of ours that did it was killed",
        "NO_CALLER": "no process of ours could be started",
        "STALE": "it has ended",
        "interrupted": "interrupted",
        "deadline": "the deadline passed",
    }
    said = why.get(outcome.result, f"{outcome.result} {outcome.message}".strip())
    if call is Call.LOAD:
        return errors.ImageUnreadable(
            f"the image of pid {process} was not brought back: {said}. Nothing was restored; it stays suspended",
            hint=f"gpuckpt resume {process}",
            **where,
        )
    return errors.ImageNotStored(
        f"pid {process} is suspended, but its image was not moved to disk: {said}", hint=f"gpuckpt resume {process} as ever", **where
    )
