"""What has been done to whom, on disk before it is done: recovery reads it, and so does every other command.

One file a group of processes, ``groups/ID.json`` in the state directory, replaced whole (write, fsync, rename, fsync of the
directory), so that kill -9 at any instruction leaves the old record or the new one. The state directory is durable; nothing
here lives in a runtime directory. Each record carries the boot id: a reboot ends every process, so it voids the record.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpuckpt.errors import JournalError, Usage
from gpuckpt.model import Gpu, GpuBytes, Membership, ProcessId, State, Status

#: Records of a group on several hosts are of schema 2; of one whose agents offload, or with a process that was taken along, of schema 3: a
#: gpuckpt that does not know of such must leave them alone.
SCHEMA = 3
AUDIT_MAX_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Member:
    """One process of a group: as it was found, and what became of it."""

    id: ProcessId
    name: str
    uid: int
    found: State
    gpus: tuple[GpuBytes, ...]
    lost: str = ""  # why its GPU state is gone for good
    agent: bool = False  # it has one, which holds it at its safe point
    waiting: str = ""  # "lock by caller 4242": a call that had not returned when its controller left
    image: Mapping[str, Any] | None = None  # where it is kept on disk: written down before the file is made
    oom_score_adj: int | None = None  # what it had before it was changed for the time of its suspension
    along: bool = False  # it was taken along: while the group is suspended it is disarmed
    movable: bool = False  # its own allocator takes memory off the GPU first, and brings it back last
    moved: Mapping[str, int] | None = None  # what left that way: "kept_bytes", "dropped_bytes"
    stays: tuple[Mapping[str, Any], ...] = ()  # by class: what its agent knew of that did not


@dataclass(frozen=True, slots=True)
class Record:
    """A group that is suspended, or on its way."""

    status: Status
    members: tuple[Member, ...]
    gpus: tuple[Gpu, ...]  # those that the members were on, as they were at suspend
    retained: Mapping[str, int] = field(default_factory=dict)  # bytes that stayed on a GPU although suspended
    id: str = field(default_factory=lambda: os.urandom(6).hex())
    boot_id: str = ""
    by: str = ""  # "alice (uid 1000)"
    controller: ProcessId | None = None
    replaces: tuple[str, ...] = ()  # ids of records that count no more, whether or not their files are still there
    membership: Membership | None = None  # of a group that other hosts have a part in
    onto: tuple[str, ...] = ()  # GPUs that a resume under way restores onto, where they are others
    locking: tuple[float, float] | None = None  # when its members were being locked, at most: from and until, in seconds since boot
    down: State = State.CHECKPOINTED  # what its members are when it is suspended; disarmed where the driver has no part in it
    since: float = field(default_factory=time.time)  # seconds since the epoch: for people only, never compared

    def member(self, process: ProcessId) -> Member | None:
        return next((m for m in self.members if m.id == process), None)

    @property
    def found(self) -> dict[ProcessId, State]:
        return {m.id: m.found for m in self.members if not m.lost}

    def with_member(self, process: ProcessId, **changes: Any) -> Record:
        return dataclasses.replace(self, members=tuple(dataclasses.replace(m, **changes) if m.id == process else m for m in self.members))


def counting(records: Iterable[Record]) -> list[Record]:
    """Those of *records* that no other one replaces. One save thus takes a process from an old record into a new one."""
    records = list(records)
    replaced = {record_id for r in records for record_id in r.replaces}
    return [r for r in records if r.id not in replaced]


def void_words(record: Record) -> str:
    """What to say of a record of an earlier boot."""
    names = ", ".join(f"pid {m.id} ({m.name})" for m in record.members)
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.since))
    return f"the machine was started anew: the group suspended {when} is gone with its processes: {names}"


def no_process(pid: int, void: Iterable[Record]) -> str:
    """Words for a pid that is none, or is none any more: *void* has the records of earlier boots."""
    ended = next((r for r in void if any(m.id.pid == pid for m in r.members)), None)
    return f"there is no process {pid}" + (f"; {void_words(ended)}" if ended else "")


def left_key(process: ProcessId) -> str:
    """*process* in a line of the audit log: by its number alone it could be its successor."""
    return f"{process.pid}@{process.start_ticks}"


class Journal:
    """The records of one user on one machine.

    ``save`` returns only when the record is on disk. Raises :class:`JournalError` where it cannot be.
    """

    def __init__(self, directory: Path, boot_id: str) -> None:
        self.directory = directory
        self.boot_id = boot_id
        self._groups = directory / "groups"

    def prepare(self) -> None:
        """Make the directory (mode 0700) and try a write, so that an operation fails before it acts and not after."""
        try:
            self.directory.parent.mkdir(parents=True, exist_ok=True)
            for place in (self.directory, self._groups):
                place.mkdir(mode=0o700, exist_ok=True)
            probe = self._groups / f".probe-{os.getpid()}"
            probe.write_bytes(b"x")
            probe.unlink()
        except OSError as e:
            raise JournalError(
                f"the journal in {self.directory} cannot be written ({e.strerror}); nothing was touched",
                hint="free space there, or set GPUCKPT_STATE_DIR to a directory that you can write",
            ) from e

    def save(self, record: Record) -> None:
        record = dataclasses.replace(record, boot_id=self.boot_id)
        path = self._groups / f"{record.id}.json"
        temporary = self._groups / f".{record.id}.{os.getpid()}"
        try:
            with open(temporary, "w", encoding="utf-8") as f:
                json.dump({"schema": _schema(record), **dataclasses.asdict(record)}, f)
                f.flush()
                os.fsync(f.fileno())
            temporary.rename(path)
            self._sync_directory()
        except OSError as e:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise JournalError(f"the journal in {self.directory} cannot be written ({e.strerror})", hint="free space there") from e

    def remove(self, *record_ids: str) -> None:
        """Forget them, in this order: what a record replaces would count again without it, so it goes first."""
        for record_id in record_ids:
            with contextlib.suppress(OSError):  # what stays says too much, and recovery asks the driver
                (self._groups / f"{record_id}.json").unlink()
                self._sync_directory()

    def records(self) -> list[Record]:
        """Records of this boot that count. A file that is not ours or not whole is skipped; :meth:`unreadable` names it."""
        return counting(r for r in self._read()[0] if r.boot_id == self.boot_id)

    def unreadable(self) -> list[str]:
        """Files in the journal that this version cannot read, each with why."""
        return self._read()[1]

    def void(self) -> list[Record]:
        """Take out the records of earlier boots, whose processes ended with them. Each is returned once, by one caller."""
        taken = []
        for record in self._read()[0]:
            if record.boot_id != self.boot_id:
                try:
                    (self._groups / f"{record.id}.json").unlink()
                except FileNotFoundError:
                    continue  # another command said it
                except OSError:
                    pass  # not ours to remove: say it again next time
                taken.append(record)
        return taken

    def audit(self, **line: Any) -> None:
        """Append one line to ``audit.log``. Never fails an operation: what has been done has been done."""
        path = self.directory / "audit.log"
        text = json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **line}) + "\n"
        with contextlib.suppress(OSError):
            if path.exists() and path.stat().st_size > AUDIT_MAX_BYTES:
                path.rename(path.with_suffix(".log.1"))
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.write(fd, text.encode())
            finally:
                os.close(fd)

    def left_bytes(self, process: ProcessId) -> list[int]:
        """How much each earlier suspend left of *process* on its GPUs, where it did; oldest first, as far as ``audit.log`` goes back."""
        found = []
        with contextlib.suppress(OSError):
            for line in (self.directory / "audit.log").read_text().splitlines():
                if left_key(process) in line:
                    with contextlib.suppress(ValueError, LookupError, TypeError):  # a full disk can have cut it
                        found.append(int(json.loads(line)["left_bytes"][left_key(process)]))
        return found

    def _read(self) -> tuple[list[Record], list[str]]:
        records, unreadable = [], []
        try:
            paths = sorted(p for p in self._groups.iterdir() if p.suffix == ".json" and not p.name.startswith("."))
        except OSError:
            return [], []
        for path in paths:
            try:
                document = json.loads(path.read_bytes())
                if document["schema"] > SCHEMA:
                    unreadable.append(f"{path}: written by a newer gpuckpt (schema {document['schema']})")
                    continue
                records.append(_record(document))
            except FileNotFoundError:
                continue
            except (OSError, ValueError, KeyError, TypeError) as e:
                words = f"{path} of the journal cannot be read ({type(e).__name__}: {e}); what it told of is shown as the driver has it"
                unreadable.append(f"{words}. Once that is resumed: rm {shlex.quote(str(path))}")
        return records, unreadable

    def _sync_directory(self) -> None:
        fd = os.open(self._groups, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _schema(record: Record) -> int:
    if any(m.along or m.movable for m in record.members) or record.down is not State.CHECKPOINTED:
        return 3
    return 2 if record.membership else 1


def _record(document: dict[str, Any]) -> Record:
    members = tuple(
        Member(
            ProcessId(**m["id"]),
            m["name"],
            m["uid"],
            State(m["found"]),
            tuple(GpuBytes(**g) for g in m["gpus"]),
            m["lost"],
            m.get("agent", False),
            m["waiting"],
            m.get("image"),
            m.get("oom_score_adj"),
            m.get("along", False),
            m.get("movable", False),
            m.get("moved"),
            tuple(m.get("stays", ())),
        )
        for m in document["members"]
    )
    controller, membership = document["controller"], document.get("membership")
    return Record(
        status=Status(document["status"]),
        members=members,
        gpus=tuple(Gpu(**g) for g in document["gpus"]),
        retained=document["retained"],
        id=document["id"],
        boot_id=document["boot_id"],
        by=document["by"],
        controller=ProcessId(**controller) if controller else None,
        replaces=tuple(document.get("replaces", ())),
        membership=Membership(**{**membership, "hosts": tuple(membership["hosts"])}) if membership else None,
        onto=tuple(document.get("onto", ())),
        locking=tuple(document["locking"]) if document.get("locking") else None,
        down=State(document.get("down", State.CHECKPOINTED)),
        since=document["since"],
    )


def boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def state_directory(environ: Mapping[str, str], uid: int) -> Path:
    """Where the journal lies: ``GPUCKPT_STATE_DIR``, else ``/var/lib/gpuckpt`` for root, else under ``XDG_STATE_HOME``.

    Raises ``Usage`` where that is no absolute path: a resume from elsewhere would not find it.
    """
    if chosen := environ.get("GPUCKPT_STATE_DIR"):
        if not Path(chosen).is_absolute():
            raise Usage(
                f"GPUCKPT_STATE_DIR={chosen} would be another directory from elsewhere", hint=f"GPUCKPT_STATE_DIR={Path(chosen).absolute()}"
            )
        return Path(chosen)
    if simulated := environ.get("GPUCKPT_SIMULATE"):  # a record of simulated processes means nothing to a driver, or to another directory's
        return Path(simulated) / "state"
    if uid == 0:
        return Path("/var/lib/gpuckpt")
    return Path(environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "gpuckpt"
