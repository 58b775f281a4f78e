"""A store in a directory that all hosts share: a file a key, made whole by ``link``, which exactly one writer can do, on NFS too."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from gpuckpt import errors
from gpuckpt.errors import GpuckptError


class FileStore:
    """*directory* is made if its parent is there: a parent that is missing is a file system that is not mounted."""

    ends = False
    serving = False

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            with contextlib.suppress(FileExistsError):
                directory.mkdir(mode=0o700)
            found = directory.stat()
        except OSError as e:
            raise errors.RendezvousLost(
                f"the rendezvous directory {directory} cannot be used ({e.strerror}); nothing was touched",
                hint=f"make {directory.parent} on a file system that all hosts share",
            ) from e
        self._identity = (found.st_dev, found.st_ino)
        self.open_to_others = bool(found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)) or found.st_uid not in (0, os.geteuid())

    def get(self, key: str) -> bytes | None:
        with self._place() as place:
            return self._read(key, place)

    def compare_set(self, key: str, value: bytes) -> bytes:
        draft = f".{key}.{os.urandom(8).hex()}"
        with self._place() as place:
            try:
                fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600, dir_fd=place)
                try:
                    with open(fd, "wb") as file:
                        file.write(value)
                        file.flush()
                        os.fsync(fd)
                    # Over NFS an answer can be lost and the call be repeated: then this is our own file, as what is read shows.
                    with contextlib.suppress(FileExistsError):
                        os.link(draft, key, src_dir_fd=place, dst_dir_fd=place)
                finally:
                    os.unlink(draft, dir_fd=place)
            except OSError as e:
                raise self._lost(e) from e
            held = self._read(key, place)
        if held is None:
            raise self._lost(OSError(0, f"{key} vanished"))
        return held

    def close(self) -> None: ...

    @contextlib.contextmanager
    def _place(self):  # type: ignore[no-untyped-def]
        """The directory, opened anew: an NFS client then asks the server what is in it, and one that was replaced is noticed."""
        try:
            fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as e:
            raise self._lost(e) from e
        try:
            found = os.fstat(fd)
            if (found.st_dev, found.st_ino) != self._identity:
                raise self._lost(OSError(0, "it is another directory now"))
            yield fd
        finally:
            os.close(fd)

    def _read(self, key: str, place: int) -> bytes | None:
        try:
            fd = os.open(key, os.O_RDONLY | os.O_CLOEXEC, dir_fd=place)
        except FileNotFoundError:
            return None
        except OSError as e:
            raise self._lost(e) from e
        try:
            with open(fd, "rb") as file:
                return file.read()
        except OSError as e:
            raise self._lost(e) from e

    def _lost(self, e: OSError) -> GpuckptError:
        return errors.RendezvousLost(f"the rendezvous directory {self.directory} cannot be reached ({e.strerror or e})")
