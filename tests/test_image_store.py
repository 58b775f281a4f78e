"""An image in a file: what was written comes back, what cannot be written or read changes nothing, and there is one whole copy always."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuckpt import errors, keeping
from gpuckpt.cli import run
from gpuckpt.image import file, keeper, memory, preload
from gpuckpt.image.file import Region
from gpuckpt.inspect import processes
from gpuckpt.model import Call, ProcessId
from gpuckpt.supervisor import vllm
from tests.image_machine import MIB, Program, Start
from tests.image_suspended import NBYTES, OPERATION, Suspended


def test_there_and_back(suspended: Suspended) -> None:
    suspended.spec = suspended.call(Call.STORE)
    assert suspended.whole(), "nothing has changed yet"
    assert (suspended.spec["held"], suspended.spec["nbytes"]) == (True, NBYTES)
    assert list(suspended.directory.iterdir()) == [], "a file that its process holds needs no name"
    assert suspended.opened().stat().st_mode & 0o777 == 0o600
    suspended.call(Call.DROP)
    assert suspended.in_memory() == 0
    assert keeper.dropped(suspended.program.id)
    suspended.call(Call.LOAD)
    assert suspended.whole()
    assert not keeper.dropped(suspended.program.id)
    keeper.end(suspended.program.id)


def test_whatever_the_library_is_told_meanwhile(suspended: Suspended) -> None:
    """A checkpoint that is called again and fails, another announcement: what is on disk comes back."""
    suspended.keep()
    preload.forget(suspended.program.id)
    with pytest.raises(memory.Unavailable, match="on disk"):
        suspended.program.announce()
    suspended.call(Call.LOAD)
    assert suspended.whole()


def test_again_and_again(suspended: Suspended) -> None:
    for _ in range(2):
        suspended.keep()
        assert suspended.call(Call.LOAD) == {"loaded_bytes": NBYTES}
        assert suspended.call(Call.LOAD) == {"loaded_bytes": 0}
        assert suspended.whole()


def test_by_name_where_the_process_cannot_hold_it(named: Suspended) -> None:
    """Another container's file system, a directory that is closed to its user."""
    named.keep()
    assert [p.name for p in named.directory.iterdir()] == [named.path.name]
    assert named.path.stat().st_mode & 0o777 == 0o600
    named.call(Call.LOAD)
    assert named.whole()


AS_USER = ("setpriv", "--reuid=1000", "--regid=1000", "--clear-groups")


@pytest.mark.parametrize(("where", "held"), [("open", True), ("closed", False), ("another", False)])
def test_root_keeps_the_image_of_a_user_or_container(image_folder: Path, where: str, held: bool) -> None:
    """The file is the user's; in a directory that is closed to them, or that a mount namespace does not show, it keeps its name."""
    if os.geteuid() != 0:
        pytest.skip("only root can be somebody else")
    top = Path(tempfile.mkdtemp(dir="/tmp"))
    top.chmod(0o755)
    place = top / "images"
    place.mkdir(mode=0o700 if where == "closed" else 0o755)
    hides = ("unshare", "-m", "sh", "-c", f'mount -t tmpfs none {place} && exec "$0"')
    folder = Path(shutil.copytree(image_folder, top / "built"))
    library = shutil.copy(preload.library() or "", folder)  # where gpuckpt is installed may be closed to the user
    program = Program(folder, {**os.environ, "LD_PRELOAD": str(library)}, hides if where == "another" else AS_USER)
    try:
        suspended = Suspended(program, place)
        suspended.keep()
        assert suspended.spec["held"] is held
        status = suspended.opened().stat()
        assert (status.st_uid, status.st_mode & 0o777) == (0 if where == "another" else 1000, 0o600)
        suspended.call(Call.LOAD)
        assert suspended.whole()
    finally:
        program.process.kill()
        program.process.communicate()
        shutil.rmtree(top)


def test_the_directory_is_removed_meanwhile(suspended: Suspended, tmp_path: Path) -> None:
    """Case 55"""
    suspended.directory = tmp_path / "gone"
    suspended.directory.mkdir()
    suspended.keep()
    suspended.directory.rmdir()
    suspended.call(Call.LOAD)
    assert suspended.whole()


# What cannot be written.


@pytest.fixture
def pwrite(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, int], None]]:
    """The disk fails at the nth write from here on, with an errno."""
    real = os.pwrite

    def arm(nth: int, error: int) -> None:
        left = [nth]

        def write(fd: int, data: Any, offset: int) -> int:
            if os.readlink(f"/proc/self/fd/{fd}").startswith("/proc/"):
                return real(fd, data, offset)  # memory
            left[0] -= 1
            if left[0] < 0:
                raise OSError(error, os.strerror(error))
            return real(fd, data, offset)

        monkeypatch.setattr(os, "pwrite", write)

    return arm


@pytest.mark.parametrize(("nth", "error"), [(0, errno.ENOSPC), (1, errno.EIO), (3, errno.EDQUOT)], ids=["content", "more", "header"])
def test_a_disk_that_fails(suspended: Suspended, pwrite: Callable[[int, int], None], nth: int, error: int) -> None:
    pwrite(nth, error)
    with pytest.raises(errors.ImageNotStored, match=os.strerror(error)) as caught:
        suspended.call(Call.STORE)
    assert "stays in host memory" in caught.value.message
    assert suspended.whole()
    assert list(suspended.directory.iterdir()) == []
    with memory.of(suspended.program.id) as image:
        assert image.holds is None, "no half-written file is held"


def test_a_disk_that_fails_where_the_file_has_a_name(named: Suspended, pwrite: Callable[[int, int], None]) -> None:
    pwrite(2, errno.EIO)
    with pytest.raises(errors.ImageNotStored):
        named.call(Call.STORE)
    assert list(named.directory.iterdir()) == []


def test_a_flush_that_fails(suspended: Suspended, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "I/O error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(errors.ImageNotStored):
        suspended.call(Call.STORE)
    assert suspended.whole()


def test_a_full_disk_is_found_before_anything_is_written(suspended: Suspended) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 * MIB, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            file.try_room(suspended.directory, NBYTES)
        with pytest.raises(errors.ImageNotStored, match="too large"):
            suspended.call(Call.STORE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert suspended.whole()
    assert list(suspended.directory.iterdir()) == []
    file.try_room(suspended.directory, NBYTES)


def test_a_file_of_other_memory_gives_none_back(suspended: Suspended, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process was checkpointed anew meanwhile, and its image lies elsewhere."""
    suspended.spec = suspended.call(Call.STORE)
    elsewhere = [Region(suspended.address, NBYTES - 4096)]
    with monkeypatch.context() as m:
        m.setattr(memory.Preloaded, "regions", lambda _: elsewhere)
        with pytest.raises(errors.ImageNotStored, match="other memory"):
            suspended.call(Call.DROP)
    assert not keeper.dropped(suspended.program.id)
    assert suspended.whole()


@pytest.mark.parametrize("there", ["a file", "a link"])
def test_what_has_the_name_of_the_file_already_is_left_alone(suspended: Suspended, tmp_path: Path, there: str) -> None:
    """In a directory that others may write to, it could be a link to something that is dear to us."""
    dear = tmp_path / "dear"
    dear.write_text("to us")
    if there == "a link":
        suspended.path.symlink_to(dear)
    else:
        suspended.path.write_text("theirs")
    with pytest.raises(errors.ImageNotStored, match="exists"):
        suspended.call(Call.STORE)
    assert dear.read_text() == "to us"
    assert suspended.path.read_text() == ("to us" if there == "a link" else "theirs")
    assert suspended.whole()


def test_what_is_on_disk_is_not_stored_again(suspended: Suspended) -> None:
    suspended.keep()
    with pytest.raises(errors.ImageNotStored, match="on disk already"):
        suspended.call(Call.STORE)
    suspended.call(Call.LOAD)
    assert suspended.whole()


@pytest.mark.parametrize("what", ["unmapped", "mapped by the program", "partly"])
def test_what_is_not_for_certain_the_image_is_not_touched(suspended: Suspended, what: str) -> None:
    """Another tool restored it, and the program has memory of its own there now."""
    program = suspended.program
    gone = 4096 if what == "partly" else NBYTES
    program.ask(f"unmap {suspended.address:x} {gone}")
    if what != "unmapped":
        program.map("both", gone, 0x32, 3, hex(suspended.address))  # fixed
    with pytest.raises(errors.ImageNotStored, match="not for certain"):
        suspended.call(Call.STORE)


def test_what_is_not_for_certain_the_image_is_not_written_to(suspended: Suspended) -> None:
    """The same while the image is on disk."""
    suspended.keep()
    suspended.program.ask(f"unmap {suspended.address:x} {NBYTES}")
    suspended.program.map("both", NBYTES, 0x32, 3, hex(suspended.address))  # fixed
    with pytest.raises(errors.ImageUnreadable, match="not for certain"):
        suspended.call(Call.LOAD)
    assert suspended.program.ask(f"zero {suspended.address:x} {NBYTES}") == ["0"], "its bytes are the program's"


def test_the_header_comes_when_the_content_is_on_disk(suspended: Suspended, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[bool] = []

    def flush(fd: int) -> None:
        try:
            flushed.append(bool(file.header(fd)))
        except file.Corrupted:
            flushed.append(False)

    monkeypatch.setattr(os, "fsync", flush)
    suspended.call(Call.STORE)
    assert flushed == [False, True]


@pytest.mark.parametrize("error", [errno.EINVAL, errno.EPERM])
def test_pages_that_could_not_be_got_again_are_not_given_back(suspended: Suspended, error: int) -> None:
    """Linux before 5.14, or a filter, forbids the one advice by which they come: on disk the image would stay for ever."""
    suspended.program.ask(f"deny madvise {error} {preload.MADV_POPULATE_WRITE}")
    with pytest.raises(errors.ImageNotStored, match="could not be got again"):
        suspended.keep()
    assert not keeper.dropped(suspended.program.id)
    assert suspended.whole()
    assert list(suspended.directory.iterdir()) == []


def test_a_kernel_that_is_too_old_is_refused_before_anything_is_locked(start_program: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    program = start_program()
    preload.refuse_missing(program.id)
    monkeypatch.setattr(preload, "populates", lambda: False)
    with pytest.raises(memory.Unavailable, match=r"5\.14"):
        preload.refuse_missing(program.id)
    with pytest.raises(errors.Usage, match=r"5\.14.*nothing was started"):
        run._check_place("/tmp", vllm.Prepared((), {}, changes={"preload": ""}))


def test_an_image_that_the_library_did_not_see(start_program: Start, tmp_path: Path) -> None:
    program = start_program()
    with pytest.raises(memory.Unavailable, match="no keeper"), memory.of(program.id):
        pass


# Places.


def test_file_systems_by_name() -> None:
    assert file.filesystem(Path("/proc")) == "proc"
    assert file.filesystem(Path("/dev/shm")) in ("tmpfs", "")
    assert file.filesystem(Path("/no/such/place")) == ""


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("overlay", "ephemeral storage"),
        ("fuse.fuse-overlayfs", "ephemeral storage"),
        ("nfs4", "over a network"),
        ("fuse.gcsfuse", "over a network"),
        ("tmpfs", "in memory"),
        ("ext4", ""),
        ("fuseblk", ""),
    ],
)
def test_what_is_not_a_disk_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, said: str) -> None:
    """Case 55: overlay and tmpfs are warned of, with what they cost."""
    monkeypatch.setattr(file, "filesystem", lambda _: kind)
    walk = types.SimpleNamespace(warnings=[])
    keeping.refuse(walk, str(tmp_path), [])  # type: ignore[arg-type]
    assert (said in " ".join(walk.warnings), bool(walk.warnings)) == (True, bool(said))


def test_without_direct_io(suspended: Suspended, monkeypatch: pytest.MonkeyPatch) -> None:
    """tmpfs and others refuse it."""
    real, refused = os.open, []

    def refuse(path: Any, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            refused.append(path)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", refuse)
    suspended.keep()
    suspended.call(Call.LOAD)
    assert suspended.whole()
    assert refused


def test_sizes() -> None:
    parts = file.pieces([Region(0x10000, file.PIECE_BYTES + 4096), Region(0x7000000000, 4096)])
    assert [(p.address, p.nbytes, p.offset - file.HEADER_BYTES) for p in parts] == [
        (0x10000, file.PIECE_BYTES, 0),
        (0x10000 + file.PIECE_BYTES, 4096, file.PIECE_BYTES),
        (0x7000000000, 4096, file.PIECE_BYTES + 4096),
    ]
    assert file.file_bytes(1) == file.HEADER_BYTES + 4096


def test_the_name_tells_whose_it_is() -> None:
    ours = processes.read(os.getpid())
    assert ours is not None
    assert file._NAME.fullmatch(file.name(ours.id, OPERATION))
    assert file.name(ours.id, OPERATION) != file.name(ProcessId(ours.pid, 1), OPERATION)
