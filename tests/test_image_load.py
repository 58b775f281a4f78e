"""An image that cannot be brought back from its file, or not yet: nothing is changed, and it can be tried again."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from gpuckpt import errors
from gpuckpt.image import file, keeper, store
from gpuckpt.image.memory import Preloaded
from gpuckpt.model import Call, HostRoom
from tests.image_machine import MIB, Start, memory_cgroup
from tests.image_suspended import NBYTES, Suspended
from tests.simulated_machine import eventually


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
    with pytest.raises(errors.ImageUnreadable, match="stays suspended") as caught:
        suspended.call(Call.LOAD)
    assert caught.value.hint.endswith(f"if it is truly damaged: kill {suspended.program.id}")
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
            m.setattr(Preloaded, "room", lambda _, rooms=rooms: HostRoom(rooms.pop(0), "MemAvailable"))
            with pytest.raises(errors.HostMemory, match="stays suspended"):
                suspended.call(Call.LOAD)
        assert suspended.in_memory() == 0
        assert keeper.dropped(suspended.program.id)
    suspended.call(Call.LOAD)
    assert suspended.whole()


def test_a_cgroup_that_has_room_for_the_image_and_for_nothing_else(suspended: Suspended) -> None:
    """Page tables are charged to it too: the kernel would end the process, and with it the only copy."""
    with memory_cgroup() as (group, limit, used):
        try:
            suspended.keep()
            (group / "cgroup.procs").write_text(str(suspended.program.pid))
            taken = int((group / used).read_text())
            (group / limit).write_text(str(taken + NBYTES + MIB))
            with pytest.raises(errors.HostMemory, match=limit):
                suspended.call(Call.LOAD)
            (group / limit).write_text(str(taken + NBYTES + 256 * MIB))
            suspended.call(Call.LOAD)
            assert suspended.whole()
        finally:
            suspended.program.process.kill()
            suspended.program.process.wait()
            eventually(lambda: not (group / "cgroup.procs").read_text(), "it is empty")


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
