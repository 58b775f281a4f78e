"""Programs without Python that have the preload library, and a libcuda of ours whose restore thread maps memory when told to."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpuckpt.image import preload
from gpuckpt.inspect import processes
from gpuckpt.model import ProcessId

HERE = Path(__file__).parent
MIB = 1 << 20
SIZE = 256 * MIB
COMPILE = ["gcc", "-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror"]
SHARED = [*COMPILE, "-shared", "-fPIC"]


@contextlib.contextmanager
def memory_cgroup() -> Iterator[tuple[Path, str, str]]:
    """A new cgroup, which must be empty in the end, and the names of its files: the limit of its memory, and what is used of it. Skips
    where none can be made."""
    fs = Path("/sys/fs/cgroup")
    parent, limit, used = fs, "memory.max", "memory.current"
    if (fs / "memory").is_dir():
        parent, limit, used = fs / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
    group = parent / f"gpuckpt-test-{os.getpid()}"
    if not os.access(parent, os.W_OK) or not (parent / "cgroup.procs").exists():
        pytest.skip("no cgroup can be made here")
    group.mkdir()
    try:
        if not (group / limit).exists():
            pytest.skip("no memory controller here")
        yield group, limit, used
    finally:
        group.rmdir()


@dataclass(frozen=True)
class Mapped:
    """A mapping that the program made, as the kernel describes it. ``flags`` are the VmFlags of smaps."""

    address: int
    error: int
    flags: frozenset[str] = frozenset()
    rss: int = 0
    huge: int = 0
    mallocs: int = 0  # while it was made, where the interposer counts them

    @property
    def altered(self) -> bool:
        return bool({"hg", "dd"} & self.flags)


def is_image(found: Mapped, nbytes: int = SIZE) -> bool:
    """Altered as meant, and populated as the program asked."""
    return {"hg", "dd"} <= found.flags and found.rss >= nbytes and found.error == 0


def is_plain(found: Mapped, nbytes: int = SIZE) -> bool:
    """As the kernel makes it of MAP_POPULATE by itself."""
    return not found.altered and found.rss >= nbytes and found.error == 0


class Program:
    """``image_program.c``, running, or another that speaks as it does."""

    def __init__(self, folder: Path, environ: dict[str, str], prefix: tuple[str, ...] = (), name: str = "program") -> None:
        self.process = subprocess.Popen(
            [*prefix, str(folder / name)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**environ, "LD_LIBRARY_PATH": str(folder)},
        )
        assert self.process.stdout is not None
        first = self.process.stdout.readline()
        if not first:
            pytest.fail(f"the program did not start: {self.process.communicate()}")
        self.pid, self.restore_tid = map(int, first.split())
        found = processes.read(self.process.pid)
        assert found is not None
        self.id: ProcessId = found.id

    def ask(self, words: str) -> list[str]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(words + "\n")
        answer = self.process.stdout.readline()
        if not answer:
            pytest.fail(f"the program died of {words!r}: {self.process.wait()}")
        return answer.split()

    def map(self, who: str = "image", nbytes: int = SIZE, *more: str | int) -> Mapped:
        address, error, mallocs = self.ask(" ".join(map(str, ("map", who, nbytes, *more))))
        return self.look(int(address, 16), int(error), nbytes, int(mallocs))

    def look(self, address: int, error: int, nbytes: int, mallocs: int = 0) -> Mapped:
        """The mapping at *address*; the kernel may show it as one with its neighbours."""
        if address == 0:
            return Mapped(0, error)
        found = None
        for block in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path(f"/proc/{self.process.pid}/smaps").read_text(), flags=re.MULTILINE):
            begin, _, rest = block.partition("-")
            if begin and int(begin, 16) <= address < int(rest.split()[0], 16):
                found = block
        assert found is not None, "what it mapped is not there"
        field = {m[1]: m[2] for m in re.finditer(r"^(\w+): +(.*)$", found, re.MULTILINE)}
        rss, huge = (int(field[name].split()[0]) * 1024 for name in ("Rss", "AnonHugePages"))
        return Mapped(address, error, frozenset(field["VmFlags"].split()), rss, huge, mallocs)

    def announce(self, tid: int | None = None, seconds: float = 60.0) -> int:
        return preload.announce(self.id, tid or self.restore_tid, seconds)

    @property
    def result(self) -> preload.Result:
        return preload.result(self.id)

    def rss(self) -> int:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", text)
        assert found is not None
        return int(found[1]) * 1024

    def threads(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/task"))

    def stop(self) -> None:
        """SIGSTOP; returns when every thread has stopped."""
        os.kill(self.process.pid, signal.SIGSTOP)
        stats = list(Path(f"/proc/{self.process.pid}/task").glob("*/stat"))
        until = time.monotonic() + 20
        while not all(s.read_text().rpartition(")")[2].split()[0] == "T" for s in stats):
            assert time.monotonic() < until, "it does not stop"
            time.sleep(0.001)

    def end(self) -> str:
        """What it wrote to stderr."""
        _, err = self.process.communicate(timeout=60)
        assert self.process.returncode == 0
        return err


def build(folder: Path, binding: str = "now") -> Path:
    """*folder*, with the program, its libcuda, and other preload libraries. That libcuda's imports are bound at once and then read-only, or
    (*binding* lazy) when used."""
    if shutil.which("gcc") is None:
        pytest.fail("the tests of the preload library compile C: install gcc")
    if preload.library() is None:
        pytest.fail("gpuckpt was installed without its preload library; install it again, now that there is a compiler")
    folder.mkdir(exist_ok=True)
    cuda = folder / "libcuda.so.1"
    commands = [
        [*SHARED, f"-Wl,-soname,libcuda.so.1,-z,{binding}", "-o", cuda, HERE / "image_libcuda.c", "-lpthread"],
        [*COMPILE, "-o", folder / "program", HERE / "image_program.c", cuda, "-lpthread"],
        [*COMPILE, "-o", folder / "closing", HERE / "image_closing.c", "-ldl"],
        [*SHARED, "-o", folder / "malloc.so", HERE / "image_interposer.c"],
        [*SHARED, "-DMAP", "-o", folder / "mmap.so", HERE / "image_interposer.c", "-ldl"],
    ]
    for command in commands:
        subprocess.run(command, check=True)
    return folder


Start = Callable[..., Program]
