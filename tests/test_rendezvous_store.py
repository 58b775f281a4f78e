"""The stores of a rendezvous: one contract for all, and what is special to each. c10d is tested where torch is installed."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpuckpt import errors
from gpuckpt.rendezvous.file import FileStore
from gpuckpt.rendezvous.prompt import Prompt
from gpuckpt.rendezvous.seal import Seal, read_key
from tests.hosts import Cluster
from tests.memory_hosts import MemoryStore
from tests.tcp_store import TCP_STORES, free_port, needs_torch, serving, silence, use_tcp_store

if TYPE_CHECKING:
    from gpuckpt.rendezvous.store import Store

Connect = Callable[[], "Store"]


def no_wait() -> None:
    raise errors.RendezvousLost("nobody serves")


@pytest.fixture(params=["memory", "file", *TCP_STORES])
def connect(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Connect]:
    """Gives each caller a store of its own on the same registers."""
    if request.param == "memory":
        one = MemoryStore()
        yield lambda: one
    elif request.param == "file":
        yield lambda: FileStore(tmp_path / "job")
    else:
        use_tcp_store(request.param, monkeypatch)
        from gpuckpt.rendezvous.c10d import C10dStore

        port = free_port()
        made: list[C10dStore] = []

        def new() -> C10dStore:
            made.append(C10dStore("127.0.0.1", port, "job", no_wait))
            return made[-1]

        yield new
        for store in reversed(made):
            store.close()


def test_what_was_written_first_stays(connect: Connect) -> None:
    a, b = connect(), connect()
    assert b.get("op.lock.0") is None
    assert a.compare_set("op.lock.0", b"first") == b"first"
    assert b.compare_set("op.lock.0", b"second") == b"first"
    assert a.compare_set("op.lock.0", b"first") == b"first"
    assert b.get("op.lock.0") == b"first"
    assert b.get("op.lock") is None


def test_of_many_writers_one_decides_for_all(connect: Connect) -> None:
    stores = [connect() for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for turn in range(20):
            answers = list(pool.map(lambda i, turn=turn: stores[i].compare_set(f"k{turn}", b"%d" % i), range(8)))
            assert len(set(answers)) == 1
            assert stores[0].get(f"k{turn}") == answers[0]


def test_a_large_value(connect: Connect) -> None:
    value = b"x" * 200_000
    assert connect().compare_set("k", value) == value
    assert connect().get("k") == value


def test_a_directory_that_vanishes_or_is_replaced_is_lost(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "job")
    store.compare_set("k", b"v")
    (tmp_path / "job").rename(tmp_path / "elsewhere")
    for again in (False, True):
        if again:
            (tmp_path / "job").mkdir()
        for call in (lambda: store.get("k"), lambda: store.compare_set("other", b"v")):
            with pytest.raises(errors.RendezvousLost, match="job"):
                call()


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(errors.RendezvousLost) as e:
        FileStore(tmp_path / "not mounted" / "job")
    assert str(tmp_path / "not mounted") in e.value.hint


def test_a_full_disk_decides_nothing(tmp_path: Path) -> None:
    """A write that comes only half way says so with its next byte."""
    store, before = FileStore(tmp_path / "job"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, before[1]))
    try:
        with pytest.raises(errors.RendezvousLost, match="File too large"):
            store.compare_set("k", b"v" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list((tmp_path / "job").iterdir())
    assert store.compare_set("k", b"w") == b"w"


def test_no_draft_is_left(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "job")
    store.compare_set("k", b"v")
    store.compare_set("k", b"w")
    assert [p.name for p in (tmp_path / "job").iterdir()] == ["k"]


def test_seals() -> None:
    ours = Seal("job", b"k" * 32)
    data = ours.close("op.lock.0", {"node": 0})
    assert ours.open("op.lock.0", data) == {"node": 0}
    forged = data.replace(b'"node": 0', b'"node": 1')
    for seal, key, value in (
        (Seal("job", b"other" * 8), "op.lock.0", data),
        (Seal("job"), "op.lock.0", data),
        (Seal("other", b"k" * 32), "op.lock.0", data),
        (ours, "op.lock.1", data),  # a vote, moved
        (ours, "op.lock.0", forged),
        (ours, "op.lock.0", b"\x80"),
        (ours, "op.lock.0", b"[]"),
        (ours, "op.lock.0", Seal("job").close("op.lock.0", {"node": 0})),
    ):
        with pytest.raises(errors.RendezvousKey):
            seal.open(key, value)
    with pytest.raises(errors.SeveralHosts, match="version 2"):
        ours.open("op.lock.0", data.replace(b'"version": 1', b'"version": 2'))


@pytest.mark.parametrize(
    ("content", "mode", "said"), [(b"k" * 32, 0o640, "others"), (b"short\n", 0o600, "5 bytes"), (None, 0, "No such file")]
)
def test_key_files(tmp_path: Path, content: bytes | None, mode: int, said: str) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
        path.chmod(mode)
    with pytest.raises(errors.Usage, match=said):
        read_key(str(path))


def test_without_torch_c10d_says_so() -> None:
    code = """
import sys
sys.modules["torch.distributed"] = None
from gpuckpt import errors
from gpuckpt.rendezvous.c10d import C10dStore
try:
    C10dStore("127.0.0.1", 1, "job", lambda: None)
except errors.Usage as e:
    print(e.hint)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "gpuckpt[torch]" in out


@pytest.mark.parametrize("kind", TCP_STORES)
def test_a_c10d_store_ends_with_its_host(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_tcp_store(kind, monkeypatch)
    from gpuckpt.rendezvous.c10d import C10dStore

    port = free_port()
    serves = C10dStore("127.0.0.1", port, "job", no_wait)
    joins = C10dStore("127.0.0.1", port, "job", no_wait)
    assert (serves.serving, joins.serving) == (True, False)
    assert not serves.open_to_others
    joins.compare_set("k", b"v")
    listening = [
        line.split()[1] for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:] if " 0A " in line
    ]
    assert [a for a in listening if a.endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]  # on no other address
    serves.close()
    for call in (lambda: joins.get("k"), lambda: joins.compare_set("other", b"v"), lambda: joins.get("k")):
        with pytest.raises(errors.RendezvousLost, match=f"the store at 127.0.0.1:{port} cannot be reached"):
            call()


@pytest.mark.parametrize("kind", TCP_STORES)
def test_a_store_whose_host_says_nothing_is_lost(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lost its power, or stands still: the connection is there, and nobody answers. torch's own waits for ever then."""
    use_tcp_store(kind, monkeypatch)
    from gpuckpt.rendezvous.c10d import C10dStore

    port = free_port()
    with serving(port) as host:
        joins = Prompt(C10dStore("127.0.0.1", port, "job", no_wait), "c10d://there", 1.0)
        assert joins.compare_set("k", b"v") == b"v"
        silence(host)
        for call in (lambda: joins.get("k"), lambda: joins.compare_set("other", b"v")):
            with pytest.raises(errors.RendezvousLost, match="the rendezvous c10d://there does not answer"):
                call()
        host.send_signal(signal.SIGCONT)
        with pytest.raises(errors.RendezvousLost):  # what it says now would answer another question
            joins.get("other")


@needs_torch
def test_two_hosts_over_c10d(tmp_path: Path) -> None:
    """With a fake of torch's store see test_rendezvous_bad_days.py."""
    c = Cluster.make(tmp_path, 2)
    try:
        c.one_job(1)
        for command in ("suspend", "resume"):
            c.address = f"127.0.0.1:{free_port()}"
            results = c.all(command)
            assert [r.code for r in results] == [0, 0], results
        assert c.whole()
    finally:
        c.close()


@pytest.mark.parametrize("kind", TCP_STORES)
def test_nobody_serves_the_c10d_store(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_tcp_store(kind, monkeypatch)
    c = Cluster.make(tmp_path, 1)
    try:
        c.own_jobs()
        c.address = "192.0.2.1:9"  # no address of this machine, nor of any other
        lonely = c.begin(0, "suspend", timeout="500ms", nodes=2).end()
        assert (lonely.code, lonely.error["code"]) == (1, "rendezvous-lost"), lonely
    finally:
        c.close()
