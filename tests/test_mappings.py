"""What is read from the mappings of real processes."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from gpuckpt import errors
from gpuckpt.driver import mappings
from gpuckpt.driver.nvml import NvmlDevices
from gpuckpt.model import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

IMAGE = 48 * MIB

# The room around the image is reserved and never touched; being of the same kind, the kernel makes one mapping of the three.
PROGRAM = """
import mmap, sys
private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
file = open(sys.argv[1], "rb") if sys.argv[1] else None
library = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ) if file else None
kept = [mmap.mmap(-1, 256 << 20, private)]
if int(sys.argv[2]):
    kept.append(mmap.mmap(-1, int(sys.argv[2]), private | mmap.MAP_POPULATE))
kept.append(mmap.mmap(-1, 256 << 20, private))
shared = mmap.mmap(-1, 96 << 20, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
print("ready", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def process(library: Path | None, image: int) -> Iterator[int]:
    """The pid of a process with *library* mapped (None: none) and an image of so many bytes."""
    command = [sys.executable, "-c", PROGRAM, str(library or ""), str(image)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        assert child.stdout.readline() == "ready\n"
        yield child.pid
        child.stdin.close()


@pytest.fixture
def libcuda(tmp_path: Path) -> Path:
    path = tmp_path / "libcuda.so.580.159.04"
    path.write_bytes(b"\0" * 4096)
    return path


def test_the_image_is_found_merged_with_its_neighbours_or_not(libcuda: Path) -> None:
    with process(libcuda, IMAGE) as pid:
        assert NvmlDevices().loaded([pid]) == {pid}
        assert IMAGE <= NvmlDevices().image_bytes(pid) < IMAGE + 16 * MIB


def test_no_image_without_the_driver(tmp_path: Path) -> None:
    cudart = tmp_path / "libcudart.so.13"
    cudart.write_bytes(b"\0" * 4096)
    with process(cudart, IMAGE) as pid:
        assert NvmlDevices().loaded([pid]) == set()
        assert mappings.image_bytes(pid) == 0


def test_memory_that_is_reserved_or_shared_is_no_image(libcuda: Path) -> None:
    with process(libcuda, 0) as pid:
        assert mappings.image_bytes(pid) < 16 * MIB


def test_a_dead_process_has_nothing() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    assert NvmlDevices().loaded([child.pid]) == set()
    assert mappings.image_bytes(child.pid) == 0


def test_mappings_that_we_may_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*args: object, **kwargs: object) -> None:
        raise PermissionError

    monkeypatch.setattr(mappings, "open", denied, raising=False)
    assert not mappings.has_libcuda(1)
    with pytest.raises(errors.PermissionDenied):
        mappings.image_bytes(1)


def test_names_swap_and_permissions() -> None:
    def mapping(head: str, rss: int, swap: int = 0) -> str:
        return f"7f00-7f01 {head}\nSize: 999999 kB\nRss: {rss} kB\nPss: 5 kB\nSwap: {swap} kB\nSwapPss: 9 kB\nVmFlags: rd wr mr mw me ac\n"

    smaps = "".join(
        [
            mapping("rw-p 00000000 00:00 0", 10, 20),
            mapping("rw-p 00000000 00:00 0                          [heap]", 1000),
            mapping("rw-p 00000000 00:00 0                          [anon:glibc: mmap]", 7),
            mapping("rw-s 00000000 00:01 55                         /dev/zero (deleted)", 1000),
            mapping("r--p 00000000 00:00 0", 1000),
            mapping("---p 00000000 00:00 0", 1000),
            mapping("rwxp 00000000 00:00 0", 3),
            mapping("rw-p 00001000 fd:00 1234                       /usr/lib/libcuda.so.1", 1000),
        ]
    )
    assert mappings._populated(smaps.encode()) == [30 << 10, 7 << 10, 3 << 10]
