"""An image in a file: a header of 1 MiB that is written last, and after it the content, in pieces that have a checksum each.

Private (mode 0600), written and read past the page cache where the file system can (``O_DIRECT``). A file without a header that is whole is
half-written, whatever its name.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import json
import mmap
import os
import re
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuckpt.inspect import host, processes
from gpuckpt.model import ProcessId

PIECE_BYTES = 16 << 20
HEADER_BYTES = 1 << 20
MOST_THREADS = 8
_BLOCK = 4096
_MAGIC = b"gpuckpt-image\0\0\1"
_HEAD = struct.Struct("=16sIQ")  # checksum and length of what follows

_NAME = re.compile(r"gpuckpt-image-([0-9a-f]{8})-(\d+)-(\d+)-([0-9a-f]+)")

_AWAY = "is reached over a network or through another program: while that is away, no image there can be resumed"
_LAYER = "is a container's writable layer: it counts as the container's ephemeral storage, for which Kubernetes evicts a pod"
_NOT_A_DISK = {
    "tmpfs": "lies in memory: nothing is gained by keeping an image there",
    "ramfs": "lies in memory: nothing is gained by keeping an image there",
    "overlay": _LAYER,
    "fuse.fuse-overlayfs": _LAYER,
    **dict.fromkeys(
        ("nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "ceph", "lustre", "fuse", "gpfs", "beegfs", "beegfs_nodev", "wekafs", "afs"),
        _AWAY,
    ),
}


class Corrupted(Exception):
    """The content is not what was written."""


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a process's memory; page-aligned."""

    address: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.address + self.nbytes


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a region, and where it lies in the file."""

    address: int
    nbytes: int
    offset: int
    number: int


def pieces(regions: Sequence[Region]) -> list[Piece]:
    found: list[Piece] = []
    offset = HEADER_BYTES
    for region in regions:
        for address in range(region.address, region.end, PIECE_BYTES):
            nbytes = min(PIECE_BYTES, region.end - address)
            found.append(Piece(address, nbytes, offset, len(found)))
            offset += nbytes
    return found


def file_bytes(image_bytes: int) -> int:
    """Size of the file of an image."""
    return HEADER_BYTES + -(-image_bytes // _BLOCK) * _BLOCK


def name(process: ProcessId, operation: str) -> str:
    """What the file of *process* is called: it tells whose it is, so that it can be cleaned away when that is gone."""
    return f"gpuckpt-image-{_here()}-{process.pid}-{process.start_ticks}-{operation}"


def is_named(path: Path, process: ProcessId, operation: str) -> bool:
    """Whether *path* is called as the file of *process* is, on whatever boot."""
    match = _NAME.fullmatch(path.name)
    return match is not None and (match[2], match[3], match[4]) == (str(process.pid), str(process.start_ticks), operation)


def _here() -> str:
    """Where a pid means what it means to us: this boot of this machine, and this pid namespace."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{zlib.crc32((host.read(Path('/proc/sys/kernel/random/boot_id')) + namespace).encode()):08x}"


def sweep(directory: Path) -> list[Path]:
    """Remove the files in *directory* of processes that ended. Those of other machines, boots and containers stay: nobody here can tell.

    Returns those removed; never raises.
    """
    removed = []
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(directory)):
            match = _NAME.fullmatch(entry.name)
            if match is None or match[1] != _here() or not entry.is_file(follow_symlinks=False):
                continue
            if os.geteuid() not in (0, entry.stat(follow_symlinks=False).st_uid):
                continue
            if not processes.is_same(ProcessId(int(match[2]), int(match[3]))):
                with contextlib.suppress(OSError):
                    Path(entry.path).unlink()
                    removed.append(Path(entry.path))
    return removed


# Places.


def filesystem(directory: Path) -> str:
    """The type of the file system that *directory* lies on, "" where that cannot be told."""
    try:
        return _type(os.stat(directory).st_dev)
    except OSError:
        return ""


def not_a_disk(kind: str) -> str:
    """What an image on a file system of this *kind* is that a person does not expect of a disk, in words; "" of any other."""
    return _NOT_A_DISK.get(kind, _AWAY if kind.startswith("fuse.") else "")


def _type(device: int) -> str:
    found = ""
    for line in host.read(Path("/proc/self/mountinfo")).splitlines():
        fields, _, more = line.partition(" - ")
        words = fields.split()
        if len(words) > 4 and words[2] == f"{os.major(device)}:{os.minor(device)}" and more:
            found = more.split()[0]
    return found


def try_room(directory: Path, nbytes: int) -> None:
    """Raise ``OSError`` if *nbytes* cannot be had in *directory* now, by disk, quota, limit or permission. Leaves nothing behind."""
    fd = os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600) if _has_tmpfile(directory) else _unlinked(directory)
    try:
        reserve(fd, nbytes)
    finally:
        os.close(fd)


def _has_tmpfile(directory: Path) -> bool:
    try:
        os.close(os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600))
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            return False
        raise
    return True


def _unlinked(directory: Path) -> int:
    path = directory / f"gpuckpt-try-{os.urandom(8).hex()}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    path.unlink()
    return fd


def reserve(fd: int, nbytes: int) -> None:
    """Have *nbytes* for the file *fd*, or raise ``OSError``. Where the file system cannot promise, what is free must suffice."""
    failed = errno.EOPNOTSUPP
    if _type(os.fstat(fd).st_dev) not in ("tmpfs", "ramfs"):  # there it would take the memory
        # not posix_fallocate: where the file system cannot, that writes to every block
        failed = 0 if _libc().fallocate(fd, 0, ctypes.c_longlong(0), ctypes.c_longlong(nbytes)) == 0 else ctypes.get_errno()
    if failed not in (0, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
        raise OSError(failed, os.strerror(failed))
    free = os.fstatvfs(fd)
    if failed and free.f_bavail * free.f_frsize < nbytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


# Writing and reading.


@contextlib.contextmanager
def directly(path: Path | str, flags: int, mode: int = 0o600) -> Iterator[int]:
    """*path*, opened past the page cache where that can be. Yields the descriptor."""
    try:
        fd = os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        if flags & os.O_EXCL:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # noqa: PTH108 - a path may be a word here; made, and then not opened
        fd = os.open(path, flags | os.O_CLOEXEC, mode)
    try:
        yield fd
    finally:
        os.close(fd)


def write(
    fd: int, regions: Sequence[Region], about: dict[str, object], read: Callable[[memoryview, int], None], check: Callable[[], None]
) -> None:
    """Write an image to *fd*: content, then header, each on disk when this returns. *read* fills a buffer from an address.

    *check* is called between pieces, and what it raises ends this. Raises ``OSError``; the file is not whole then.
    """
    parts = pieces(regions)
    sums = [0] * len(parts)
    reserve(fd, HEADER_BYTES + sum(p.nbytes for p in parts))

    def one(piece: Piece, buffer: memoryview) -> None:
        part = buffer[: piece.nbytes]
        read(part, piece.address)
        sums[piece.number] = zlib.crc32(part)
        _write_all(fd, part, piece.offset)

    _in_threads(parts, one, check)
    os.fsync(fd)
    body = json.dumps({**about, "regions": [[r.address, r.nbytes] for r in regions], "piece": PIECE_BYTES, "sums": sums}).encode()
    if _HEAD.size + len(body) > HEADER_BYTES:
        raise OSError(errno.EFBIG, "the image is too large for its header")
    header = _aligned(HEADER_BYTES)
    header[: _HEAD.size + len(body)] = _HEAD.pack(_MAGIC, zlib.crc32(body), len(body)) + body
    _write_all(fd, header, 0)
    os.fsync(fd)


def header(fd: int) -> dict[str, object]:
    """What the header of *fd* says. Raises :class:`Corrupted` if it is not whole."""
    space = _aligned(HEADER_BYTES)
    _read_all(fd, space, 0)
    magic, checksum, length = _HEAD.unpack_from(space)
    body = bytes(space[_HEAD.size : _HEAD.size + min(length, HEADER_BYTES)])
    if magic != _MAGIC or len(body) != length or zlib.crc32(body) != checksum:
        raise Corrupted("its header is not whole")
    found: dict[str, object] = json.loads(body)
    return found


def read(fd: int, parts: Sequence[Piece], sums: Sequence[int], write: Callable[[memoryview, int], None], check: Callable[[], None]) -> None:
    """Read *parts* from *fd* and hand each to *write*, with its address, once it was found to be what was written.

    Raises :class:`Corrupted`, or ``OSError``.
    """

    def one(piece: Piece, buffer: memoryview) -> None:
        part = buffer[: piece.nbytes]
        _read_all(fd, part, piece.offset)
        if zlib.crc32(part) != sums[piece.number]:
            raise Corrupted(f"its content at byte {piece.offset} is not what was written")
        write(part, piece.address)

    _in_threads(parts, one, check)


def _in_threads(parts: Sequence[Piece], one: Callable[[Piece, memoryview], None], check: Callable[[], None]) -> None:
    """Do *one* for each of *parts*, with a page-aligned buffer, in several threads. The first failure ends all, and is raised."""
    from concurrent.futures import ThreadPoolExecutor, wait

    queue, lock, over = iter(parts), threading.Lock(), threading.Event()

    def work() -> None:
        buffer = _aligned(PIECE_BYTES)
        while not over.is_set():
            with lock:
                piece = next(queue, None)
            if piece is None:
                return
            try:
                one(piece, buffer)
            except BaseException:
                over.set()
                raise

    count = max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) * 2, len(parts)))
    with ThreadPoolExecutor(count) as pool:
        running = {pool.submit(work) for _ in range(count)}
        try:
            while running:
                done, running = wait(running, timeout=0.1)
                for future in done:
                    future.result()
                check()
        finally:
            over.set()


def _aligned(nbytes: int) -> memoryview:
    """A buffer for direct reads and writes. It goes when nobody refers to it: a failure on its way does."""
    return memoryview(mmap.mmap(-1, nbytes))


def _write_all(fd: int, buffer: memoryview, offset: int) -> None:
    at = 0
    while at < len(buffer):
        written = os.pwrite(fd, buffer[at:], offset + at)
        if written == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        at += written


def _read_all(fd: int, buffer: memoryview, offset: int) -> None:
    at = 0
    while at < len(buffer):
        got = os.preadv(fd, [buffer[at:]], offset + at)
        if got == 0:
            raise Corrupted(f"it ends at byte {offset + at}")
        at += got
