"""Looks at a running thread from outside: where in code it is, with its registers, a thousand times a second of its CPU time.

By the kernel's CPU clock (``perf_event_open``; it takes root, or perf_event_paranoid of at most 1); where that is refused, as in many containers, by
``ptrace``, which stops the thread for a moment two hundred times a second. x86-64 alone.
"""

from __future__ import annotations

import bisect
import collections
import ctypes
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

REGISTERS = ("ax", "bx", "cx", "dx", "si", "di", "bp", "sp", "ip", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15")
_RING_PAGES = 64
_STACK_BYTES = 256
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


@dataclass(frozen=True, slots=True)
class Sample:
    """``registers`` are those of user mode, also while the thread is in the kernel, where ``kernel`` then is the address; ``stack``: words from
    its top."""

    time_ns: int
    kernel: int
    registers: tuple[int, ...]
    stack: tuple[int, ...]

    @property
    def ip(self) -> int:
        return self.registers[8]


class Clocked:
    """Samples of the thread *tid*. Raises ``OSError`` where it may not be."""

    def __init__(self, tid: int) -> None:
        attr = bytearray(112)
        # software, size, CPU clock, frequency, IP TID TIME REGS_USER STACK_USER; disabled, by frequency, clock given
        struct.pack_into("=IIQQQQQ", attr, 0, 1, 112, 0, 1000, 1 | 2 | 4 | 1 << 12 | 1 << 13, 0, 1 | 1 << 10 | 1 << 25)
        struct.pack_into("=QIi", attr, 80, 0xFF01FF, _STACK_BYTES, 1)  # the registers above; CLOCK_MONOTONIC
        buffer = (ctypes.c_char * len(attr)).from_buffer(attr)
        self.fd = _libc.syscall(298, ctypes.byref(buffer), tid, -1, -1, 8)  # perf_event_open, close-on-exec
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        try:
            self.ring = mmap.mmap(self.fd, (1 + _RING_PAGES) * mmap.PAGESIZE, mmap.MAP_SHARED)
        except OSError:
            os.close(self.fd)
            raise
        self.found: list[Sample] = []
        self._at = 0
        _libc.ioctl(self.fd, 0x2400, 0)  # enable

    def drain(self) -> None:
        (head,) = struct.unpack_from("=Q", self.ring, 1024)
        size = _RING_PAGES * mmap.PAGESIZE
        while self._at < head:
            kind, misc, length = struct.unpack("=IHH", self._bytes(self._at, 8, size))
            if kind == 9:
                self._sample(self._bytes(self._at + 8, length - 8, size), kernel=misc & 7 == 1)
            self._at += max(8, length)
        struct.pack_into("=Q", self.ring, 1032, self._at)

    def _bytes(self, at: int, nbytes: int, size: int) -> bytes:
        at %= size
        begin = mmap.PAGESIZE + at
        first = self.ring[begin : begin + min(nbytes, size - at)]
        return first + self.ring[mmap.PAGESIZE : mmap.PAGESIZE + nbytes - len(first)]

    def _sample(self, data: bytes, *, kernel: bool) -> None:
        ip, _, _, time_ns, abi = struct.unpack_from("=QIIQQ", data)
        at = 32
        registers: tuple[int, ...] = (0,) * len(REGISTERS)
        if abi:
            registers = struct.unpack_from(f"={len(REGISTERS)}Q", data, at)
            at += 8 * len(REGISTERS)
        (size,) = struct.unpack_from("=Q", data, at)
        stack: tuple[int, ...] = ()
        if size:
            (used,) = struct.unpack_from("=Q", data, at + 8 + size)
            stack = struct.unpack_from(f"={min(size, used) // 8}Q", data, at + 8)
        self.found.append(Sample(time_ns, ip if kernel else 0, registers, stack))

    def close(self) -> None:
        _libc.ioctl(self.fd, 0x2401, 0)
        self.drain()
        self.ring.close()
        os.close(self.fd)


class Stopped:
    """The same by ptrace: ``drain`` takes one sample. All calls from one thread."""

    _ORDER = (10, 5, 11, 12, 13, 14, 4, 19, 16, 9, 8, 7, 6, 3, 2, 1, 0)  # of user_regs_struct, as in REGISTERS

    def __init__(self, tid: int) -> None:
        self.tid = tid
        self.found: list[Sample] = []
        self._ptrace(0x4206)  # seize
        self._memory = os.open(f"/proc/{tid}/mem", os.O_RDONLY | os.O_CLOEXEC)

    def drain(self) -> None:
        import time

        if not self._stop():
            return
        values = (ctypes.c_ulonglong * 27)()
        if _libc.ptrace(12, self.tid, None, ctypes.addressof(values)) == 0:  # registers
            registers = tuple(int(values[i]) for i in self._ORDER)
            try:
                stack = struct.unpack(f"={_STACK_BYTES // 8}Q", os.pread(self._memory, _STACK_BYTES, registers[7]))
            except (OSError, struct.error):
                stack = ()
            inside = ctypes.c_longlong(values[15]).value >= 0  # the number of the system call that it is in
            self.found.append(Sample(time.monotonic_ns(), (1 << 64) - 1 if inside else 0, registers, stack))
        _libc.ptrace(7, self.tid, None, None)  # go on

    def close(self) -> None:
        if self._stop():
            _libc.ptrace(17, self.tid, None, None)  # detach
        os.close(self._memory)

    def _stop(self) -> bool:
        import time

        if _libc.ptrace(0x4207, self.tid, None, None) != 0:  # interrupt
            return False
        until = time.monotonic() + 1
        while time.monotonic() < until:  # in an uninterruptible wait it does not stop
            if os.waitpid(self.tid, os.WNOHANG | 0x40000000)[0]:
                return True
        return False

    def _ptrace(self, request: int) -> None:
        if _libc.ptrace(request, self.tid, None, None) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


# Words for addresses.

Mapping = tuple[int, int, int, str, str]  # begin, end, offset, permissions, name


def mappings(pid: int) -> list[Mapping]:
    found = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        words = line.split(maxsplit=5)
        begin, end = (int(x, 16) for x in words[0].split("-"))
        found.append((begin, end, int(words[2], 16), words[1], words[5] if len(words) > 5 else ""))
    return found


class Places:
    """Addresses of a process, by its *maps*, and of the kernel, in words."""

    def __init__(self, maps: list[Mapping]) -> None:
        self._maps = sorted(set(maps))
        self._begins = [m[0] for m in self._maps]
        symbols = []
        for line in Path("/proc/kallsyms").read_text().splitlines():
            address, kind, name = line.split()[:3]
            if kind in "tT" and int(address, 16):
                symbols.append((int(address, 16), name))
        self._symbols = sorted(symbols)

    def mapping(self, address: int) -> Mapping | None:
        at = bisect.bisect_right(self._begins, address) - 1
        return next((m for m in reversed(self._maps[max(0, at - 3) : at + 1]) if m[0] <= address < m[1]), None)

    def code(self, address: int) -> str:
        """Library and 256 bytes of its code."""
        m = self.mapping(address)
        return "?" if m is None or "x" not in m[3] else f"{Path(m[4]).name or 'no file'}+{(address - m[0] + m[2]) & ~255:#x}"

    def data(self, address: int) -> str | None:
        """What mapping *address* lies in, where it is no code and no stack."""
        m = self.mapping(address)
        if m is None or "x" in m[3] or "stack" in m[4] or "w" not in m[3]:
            return None
        return f"{m[4] or 'anonymous'} {m[3]}, {(m[1] - m[0]) / (1 << 20):.1f} MiB"

    def kernel(self, address: int) -> str:
        at = bisect.bisect_right(self._symbols, (address, "\xff")) - 1
        return self._symbols[at][1] if at >= 0 and address != (1 << 64) - 1 else "kernel"


def tell(samples: list[Sample], places: Places, image: tuple[int, int] | None) -> dict[str, object]:
    """Where a thread was, and what of the *image* (from, to) it had its hands on: which register moves through it, how fast, and what else it
    had in its registers then."""
    code: collections.Counter[str] = collections.Counter()
    kernel: collections.Counter[str] = collections.Counter()
    callers: collections.Counter[str] = collections.Counter()
    beside: collections.Counter[str] = collections.Counter()
    which: collections.Counter[str] = collections.Counter()
    copying_in: collections.Counter[str] = collections.Counter()
    lengths: collections.Counter[str] = collections.Counter()
    copying: list[Sample] = []
    for s in samples:
        code[places.code(s.ip) + (" (kernel)" if s.kernel else "")] += 1
        if s.kernel:
            kernel[places.kernel(s.kernel)] += 1
        library = places.code(s.ip).partition("+")[0]
        back = [places.code(w) for w in s.stack]
        callers[next((c for c in back if c != "?" and c.partition("+")[0] != library), "?")] += 1
        inside = [n for n, v in zip(REGISTERS, s.registers, strict=True) if image and image[0] <= v <= image[1]]
        if not inside or s.kernel:
            continue
        copying.append(s)
        which.update(inside)
        copying_in[library] += 1
        lengths[f"2^{(s.registers[3] or 1).bit_length()}"] += 1
        others = {places.data(v) for n, v in zip(REGISTERS, s.registers, strict=True) if n not in inside and n not in ("sp", "ip")}
        beside.update(x for x in others if x)
    told: dict[str, object] = {
        "samples": len(samples),
        "in_kernel": sum(1 for s in samples if s.kernel),
        "with_the_image_in_a_register": len(copying),
        "code": dict(code.most_common(12)),
        "kernel": dict(kernel.most_common(8)),
        "called_from": dict(callers.most_common(6)),
        "copying_in": dict(copying_in),
        "which_register": dict(which.most_common(6)),
        "size_of_dx": dict(lengths.most_common(6)),
        "other_registers_point_into": dict(beside.most_common(6)),
        "raw": [{n: hex(v) for n, v in zip(REGISTERS, s.registers, strict=True)} for s in copying[:: max(1, len(copying) // 5)][:5]],
    }
    if image and copying:
        at = max(range(len(REGISTERS)), key=lambda i: len({s.registers[i] for s in copying if image[0] <= s.registers[i] <= image[1]}))
        told["moves"] = REGISTERS[at]
        way = [(s.time_ns, s.registers[at] - image[0]) for s in copying if image[0] <= s.registers[at] <= image[1]]
        told["progress"] = progress(way)
    return told


def progress(way: list[tuple[int, int]]) -> dict[str, object]:
    """Of (time, offset) pairs: the rate as a whole and by tenths, and how often it went back or paused."""
    seconds, gib = (way[-1][0] - way[0][0]) / 1e9, (max(o for _, o in way) - min(o for _, o in way)) / (1 << 30)
    steps = [(b[1] - a[1], (b[0] - a[0]) / 1e9) for a, b in zip(way, way[1:], strict=False)]
    tenths = [way[round(i * (len(way) - 1) / 10)] for i in range(11)]
    return {
        "seconds": round(seconds, 3),
        "gib": round(gib, 3),
        "gib_s": round(gib / seconds, 2) if seconds else None,
        "gib_s_by_tenths": [round((b[1] - a[1]) / (1 << 30) / max(1e-9, (b[0] - a[0]) / 1e9), 2) for a, b in zip(tenths, tenths[1:], strict=False)],
        "went_back": sum(1 for nbytes, _ in steps if nbytes < 0),
        "pauses_over_5_ms": sum(1 for _, s in steps if s > 0.005),
        "paused_s": round(sum(s for _, s in steps if s > 0.005), 3),
    }


def imports(path: str, names: tuple[str, ...]) -> dict[str, bool] | None:
    """Which of *names* a library takes from others (its undefined dynamic symbols)."""
    try:
        data = Path(path).read_bytes()
        (sections_at,) = struct.unpack_from("=Q", data, 40)
        size, count = struct.unpack_from("=HH", data, 58)
        found = set()
        for i in range(count):
            _, kind, _, _, offset, nbytes, link = struct.unpack_from("=IIQQQQI", data, sections_at + i * size)
            if kind != 11:
                continue
            (strings,) = struct.unpack_from("=Q", data, sections_at + link * size + 24)
            for at in range(offset, offset + nbytes, 24):
                name, _, _, section = struct.unpack_from("=IBBH", data, at)
                if section == 0:
                    found.add(data[strings + name : data.index(b"\0", strings + name)].decode())
        return {n: n in found for n in names}
    except (OSError, ValueError, struct.error):
        return None
