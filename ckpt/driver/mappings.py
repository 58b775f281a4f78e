"""What the memory mappings of a process say of CUDA: whether it loaded the driver, and how large its checkpoint image may be."""

from __future__ import annotations

import re

from gpuckpt import errors

_SMALLEST_IMAGE = 1 << 20  # bytes
_LIBCUDA = b"/libcuda.so"
_NVML = b"/libnvidia-ml.so"
_UVM = b"/dev/nvidia-uvm"

# A program that uses a GPU has thousands of mappings: all of them in one go takes a tenth of what line by line does.
# address range, permissions, offset, device, inode, name; then a line for each fact
_ANONYMOUS = re.compile(rb"^[0-9a-f]+-[0-9a-f]+ rw.p [0-9a-f]+ 00:00 0 *(?:\[anon:[^\n]*)?\n((?:[A-Z][^\n]*\n)*)", re.MULTILINE)
_TAKEN = re.compile(rb"^(?:Rss|Swap): +(\d+)", re.MULTILINE)
_FLAGS = re.compile(rb"^VmFlags:.*", re.MULTILINE)


def has_libcuda(pid: int) -> bool:
    """Whether the CUDA driver library is mapped in *pid*; False where we may not look or *pid* is gone."""
    return _maps_contain(pid, _LIBCUDA)


def has_nvml(pid: int) -> bool:
    """Whether NVML's library is mapped in *pid*."""
    return _maps_contain(pid, _NVML)


def has_context(pid: int) -> bool:
    """Whether *pid* has a CUDA context now: only then is ``/dev/nvidia-uvm`` mapped. Not so after ``cuInit`` alone, in a
    forked child, or while checkpointed (benchmarks/results/driver-facts.json)."""
    return _maps_contain(pid, _UVM)


def _maps_contain(pid: int, name: bytes) -> bool:
    try:
        # seq_file cuts its output between two mappings or within one: only the whole is safe to search.
        with open(f"/proc/{pid}/maps", "rb", buffering=0) as file:
            return name in file.read()
    except OSError:
        return False


def image_bytes(pid: int) -> int:
    """Bytes of the checkpoint image in the host memory of *pid*, estimated from above; 0 if it has none or is gone.

    It means something only while *pid* is checkpointed: the image is then one private anonymous mapping, as large as its GPU memory and
    about 10 MiB more, populated in full. Nothing marks it, so this is the largest populated part of any such mapping. Thus

    - it is too large where the program holds an array of its own in host memory larger than the image, and where the kernel merged
      the image with a neighbour. That is the safe side for the question of how much room a restore takes;
    - memory that the preload library keeps ready for an image (``dc``: it is not for children) is none, and does not count;
    - pages in swap count, and a mapping need not be resident in full: a merged or swapped image must not be overlooked.

    Raises:
        errors.PermissionDenied: we may not see the mappings of *pid*: unknown is not 0.
    """
    try:
        with open(f"/proc/{pid}/smaps", "rb") as file:
            smaps = file.read()
    except PermissionError as error:
        raise errors.PermissionDenied(
            f"The mappings of process {pid} are not ours to see", hint="Run as its user or as root: sudo gpuckpt …", pid=pid
        ) from error
    except (FileNotFoundError, ProcessLookupError):
        return 0
    if _LIBCUDA not in smaps:
        return 0
    largest = max(_populated(smaps), default=0)
    return largest if largest >= _SMALLEST_IMAGE else 0


def _populated(smaps: bytes) -> list[int]:
    """For each private, anonymous, writable mapping but heap and stack: its bytes in memory or swap."""
    found = []
    for facts in _ANONYMOUS.findall(smaps):
        flags = _FLAGS.search(facts)
        if not (flags and b" dc" in flags[0] and b" dd" in flags[0]):
            found.append(sum(int(n) for n in _TAKEN.findall(facts)) << 10)
    return found
