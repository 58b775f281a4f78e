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
from gpuckpt.image import file, keeper, memory, preload, store
from gpuckpt.image.file import Region
from gpuckpt.image.memory import Preloaded
from gpuckpt.inspect import processes
from gpuckpt.model import Call, ProcessId
from tests.image_machine import MIB, Program, Start

NBYTES = 32 * MIB + 4096  # two whole pieces and a rest
OPERATION = "0123456789ab"


class Suspended:
    """A program whose image is full of something, and what the caller of a checkpoint would do with it."""

    def __init__(self, program: Program, directory: Path) -> None:
        self.program, self.directory = program, directory
        program.announce()
        self.address = program.map("image", NBYTES).address
        program.ask(f"zero {self.address:x} {NBYTES}")
        self.spec: dict[str, Any] = {}
        self.path = directory / file.name(program.id, OPERATION)

    def call(self, call: Call, check: Callable[[], None] = lambda: None) -> dict[str, Any]:
        with memory.of(self.program.id) as image:
            wanted = {"directory": str(self.directory), "operation": OPERATION}
            return store.serve(call, image, self.program.id, wanted if call is Call.STORE else self.spec, check)

    def keep(self) -> None:
        self.spec = self.call(Call.STORE)
        self.call(Call.DROP)

    def whole(self) -> bool:
        """Whether its memory has what was there; asked of the memory, not of the program."""
        with open(f"/proc/{self.program.pid}/mem", "rb", buffering=0) as file:
            file.seek(self.address)
            return file.read(NBYTES) == b"\x5a" * NBYTES

    def in_memory(self) -> int:
        return self.program.look(self.address, 0, NBYTES).rss

    def opened(self) -> Path:
        with memory.of(self.program.id) as image:
            return image.holds or self.path


@pytest.fixture
def suspended(start_program: Start, tmp_path: Path) -> Suspended:
    return Suspended(start_program(), tmp_path)


@pytest.fixture
def named(suspended: Suspended, monkeypatch: pytest.MonkeyPatch) -> Suspended:
    """Its process cannot hold the file."""
    monkeypatch.setattr(keeper.Keeper, "hold", lambda *_: False)
    return suspended


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


def test_a_file_that_is_held_ends_with_the_process(suspended: Suspended) -> None:
    suspended.keep()
    path = suspended.opened()
    assert path.stat().st_nlink == 0, "nobody has to clean up"
    suspended.program.process.kill()
    suspended.program.process.wait()
    assert not path.exists()


def test_named_files_of_the_dead_are_swept_and_no_others(named: Suspended, tmp_path: Path) -> None:
    named.keep()
    stranger = tmp_path / named.path.name.replace(file._here(), "00000000")
    stranger.touch(), (tmp_path / "else").touch()
    assert file.sweep(tmp_path) == []
    named.program.process.kill()
    named.program.process.wait()
    assert file.sweep(tmp_path) == [named.path]
    assert {p.name for p in tmp_path.iterdir()} == {stranger.name, "else"}


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


def test_a_controller_that_is_gone_ends_it(suspended: Suspended) -> None:
    class Gone(Exception):
        pass

    def check() -> None:
        raise Gone

    with pytest.raises(Gone):
        suspended.call(Call.STORE, check)
    assert suspended.whole()
    assert list(suspended.directory.iterdir()) == []


def test_a_stopped_process(suspended: Suspended, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "ANSWER_S", 0.05)
    monkeypatch.setattr(keeper, "RANGE_S", 0.05)
    suspended.program.stop()
    with pytest.raises(errors.ImageNotStored, match="stopped"):
        suspended.call(Call.STORE)
    os.kill(suspended.program.pid, signal.SIGCONT)
    suspended.spec = suspended.call(Call.STORE)
    suspended.program.stop()
    with pytest.raises(errors.ImageNotStored, match="not given back"):
        suspended.call(Call.DROP)
    with pytest.raises(errors.ImageUnreadable, match="stopped"):
        suspended.call(Call.LOAD)
    os.kill(suspended.program.pid, signal.SIGCONT)
    suspended.call(Call.LOAD)
    assert suspended.whole(), "whether or not the pages went when it went on"


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


def test_an_image_that_the_library_did_not_see(start_program: Start, tmp_path: Path) -> None:
    program = start_program()
    with pytest.raises(memory.Unavailable, match="no keeper"), memory.of(program.id):
        pass


# What cannot be read.


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b") as f:
        f.seek(offset)
        f.write(data)


@pytest.mark.parametrize("offset", [100, file.HEADER_BYTES + NBYTES - 1])
def test_a_corrupted_file(suspended: Suspended, offset: int) -> None:
    suspended.keep()
    path = suspended.opened()
    before = path.read_bytes()[offset : offset + 1]
    overwrite(path, offset, bytes([before[0] ^ 1]))
    with pytest.raises(errors.ImageUnreadable, match="stays suspended"):
        suspended.call(Call.LOAD)
    assert keeper.dropped(suspended.program.id), "no restore is possible"
    assert suspended.in_memory() == 0, "what was read is given back"
    overwrite(path, offset, before)
    suspended.call(Call.LOAD)
    assert suspended.whole(), "mended, it can be tried again"


def test_a_file_cut_short_or_replaced(named: Suspended, tmp_path: Path) -> None:
    named.keep()
    content = named.path.read_bytes()
    os.truncate(named.path, len(content) - 4096)
    with pytest.raises(errors.ImageUnreadable, match="it ends"):
        named.call(Call.LOAD)
    overwrite(named.path, len(content) - 4096, content[-4096:])
    saved = tmp_path / "saved"
    named.path.rename(saved)
    with pytest.raises(errors.ImageUnreadable, match="No such file"):
        named.call(Call.LOAD)
    named.path.write_bytes(content)
    with pytest.raises(errors.ImageUnreadable, match="not the file"):
        named.call(Call.LOAD)
    saved.rename(named.path)
    named.call(Call.LOAD)
    assert named.whole()


def test_a_half_written_file_is_never_called_whole(named: Suspended, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gpuckpt is killed before the header: nothing is given back on its account."""
    monkeypatch.setattr(file, "_write_all", lambda fd, buffer, offset: None)  # all else of it happened
    named.spec = named.call(Call.STORE)
    with pytest.raises(errors.ImageNotStored, match="header is not whole"):
        named.call(Call.DROP)
    assert named.whole()
    named.call(Call.LOAD)
    assert named.whole()


def test_a_read_that_fails(suspended: Suspended, monkeypatch: pytest.MonkeyPatch) -> None:
    suspended.keep()
    real, calls = os.preadv, []

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        calls.append(offset)
        if len(calls) == 3:
            raise OSError(errno.EIO, "I/O error")
        return real(fd, buffers, offset)

    with monkeypatch.context() as m:
        m.setattr(os, "preadv", preadv)
        with pytest.raises(errors.ImageUnreadable, match="I/O error"):
            suspended.call(Call.LOAD)
    assert suspended.in_memory() == 0
    suspended.call(Call.LOAD)
    assert suspended.whole()


def test_memory_is_short_at_once_and_in_the_middle(suspended: Suspended, monkeypatch: pytest.MonkeyPatch) -> None:
    suspended.keep()
    monkeypatch.setattr(store, "RANGE_BYTES", 16 * MIB)
    for rooms in ([0], [1 << 40, 0]):
        with monkeypatch.context() as m:
            m.setattr(Preloaded, "room_bytes", lambda _, rooms=rooms: rooms.pop(0))
            with pytest.raises(errors.HostMemory, match="stays suspended"):
                suspended.call(Call.LOAD)
        assert suspended.in_memory() == 0
        assert keeper.dropped(suspended.program.id)
    suspended.call(Call.LOAD)
    assert suspended.whole()


def test_pages_cannot_be_had(suspended: Suspended) -> None:
    """A filter in place of a shortage that the kernel finds while it populates."""
    suspended.keep()
    suspended.program.ask(f"deny madvise {errno.ENOMEM} 23")
    with pytest.raises(errors.ImageUnreadable, match="Cannot allocate"):
        suspended.call(Call.LOAD)
    assert keeper.dropped(suspended.program.id)


def test_the_image_of_another_process_is_refused(named: Suspended, start_program: Start, tmp_path: Path) -> None:
    other = Suspended(start_program(), tmp_path)
    named.keep(), other.keep()
    mine = named.spec
    named.spec = {**mine, "path": other.spec["path"], "inode": other.spec["inode"]}
    with pytest.raises(errors.ImageUnreadable, match="another process"):
        named.call(Call.LOAD)
    named.spec = mine
    named.call(Call.LOAD)
    assert named.whole()


# Places.


def test_file_systems_by_name() -> None:
    assert file.filesystem(Path("/proc")) == "proc"
    assert file.filesystem(Path("/dev/shm")) in ("tmpfs", "")
    assert file.filesystem(Path("/no/such/place")) == ""


@pytest.mark.parametrize(
    ("kind", "said"), [("overlay", "ephemeral storage"), ("nfs4", "over a network"), ("tmpfs", "in memory"), ("ext4", "")]
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
