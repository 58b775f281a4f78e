"""Calls into the copy of libnccl that made a communicator.

Several copies may be loaded, and a communicator is a pointer into the heap of the one that made it: another copy would read it as
something else. So a copy is never guessed. It is the one that the maker's own calls reach, and it is never loaded by us.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpuckpt.errors import NcclCallFailed, NcclCommunicator

SUSPENDS = (2, 29, 7)
ADVISED = (2, 30, 7)  # 2.29.7 deadlocks where one thread holds several ranks
SUSPEND_MEM = 0x01
IN_PROGRESS = 7
#: ncclResult_t values with which NCCL refuses a call before it has done anything
REFUSALS = (4, 5)

_INT64, _SUM = 4, 0
_NAMES = ("ncclSuccess ncclUnhandledCudaError ncclSystemError ncclInternalError ncclInvalidArgument ncclInvalidUsage ncclRemoteError "
          "ncclInProgress ncclTimeout").split()  # fmt: skip
_STATS = ("suspendable_bytes", "suspended", "persistent_bytes", "total_bytes")  # in the order of ncclCommMemStat_t
#: the library itself (libnccl.so.2, libnccl-2.30.so), not its plugins (libnccl-net.so)
_FILE = re.compile(r"libnccl(-?[\d.]+)?\.so")


class _DlInfo(ctypes.Structure):
    _fields_ = (("path", ctypes.c_char_p), ("base", ctypes.c_void_p), ("symbol", ctypes.c_char_p), ("address", ctypes.c_void_p))


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """What ``ncclCommMemStats`` counts of one communicator on this rank. ``suspendable_bytes`` stays the same while suspended."""

    suspendable_bytes: int
    suspended: bool
    persistent_bytes: int
    total_bytes: int


class Library:
    """One loaded copy of libnccl; two of the same path are equal. Its calls release the GIL.

    Each call raises :class:`gpuckpt.errors.NcclCallFailed`, with NCCL's own words, where NCCL does not answer ``ncclSuccess``.
    """

    def __init__(self, dll: ctypes.CDLL, path: str) -> None:
        self._dll = dll
        self.path = path
        self.number = self._out(ctypes.c_int, "ncclGetVersion")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Library) and other.path == self.path

    def __hash__(self) -> int:
        return hash(self.path)

    def __repr__(self) -> str:
        return f"Library({self.path!r}, {self.version})"

    @property
    def release(self) -> tuple[int, int, int]:
        """The version as numbers, from 22907 or, before 2.9, from 2804."""
        n = self.number
        return (n // 10000, n // 100 % 100, n % 100) if n >= 10000 else (n // 1000, n // 100 % 10, n % 100)

    @property
    def version(self) -> str:
        return ".".join(map(str, self.release))

    @property
    def can_suspend(self) -> bool:
        symbols = ("ncclCommSuspend", "ncclCommResume", "ncclCommMemStats")
        return self.release >= SUSPENDS and all(hasattr(self._dll, s) for s in symbols)

    @property
    def advised(self) -> bool:
        return self.can_suspend and self.release >= ADVISED

    def count(self, communicator: int) -> int:
        """The ranks of *communicator*."""
        return self._out(ctypes.c_int, "ncclCommCount", ctypes.c_void_p(communicator))

    def rank(self, communicator: int) -> int:
        return self._out(ctypes.c_int, "ncclCommUserRank", ctypes.c_void_p(communicator))

    def device(self, communicator: int) -> int:
        """The CUDA device of *communicator*, as this process counts them."""
        return self._out(ctypes.c_int, "ncclCommCuDevice", ctypes.c_void_p(communicator))

    def async_error(self, communicator: int) -> int:
        """0 for a healthy communicator, :data:`IN_PROGRESS` for one at work on a call, else what broke it."""
        return self._out(ctypes.c_int, "ncclCommGetAsyncError", ctypes.c_void_p(communicator))

    def stats(self, communicator: int) -> MemoryStats:
        values = [
            self._out(ctypes.c_uint64, "ncclCommMemStats", ctypes.c_void_p(communicator), ctypes.c_int(i)) for i in range(len(_STATS))
        ]
        return MemoryStats(values[0], bool(values[1]), values[2], values[3])

    def suspend(self, communicator: int) -> None:
        """Collective: returns when every rank has called it.

        Nothing may be in flight, and until it resumes nothing may use *communicator*: NCCL does not guard it, the GPU faults.
        """
        result = self._call("ncclCommSuspend", ctypes.c_void_p(communicator), ctypes.c_int(SUSPEND_MEM))
        self._settle(result, "ncclCommSuspend", communicator)

    def resume(self, communicator: int) -> None:
        """Collective. NCCL answers success also where it could not map a peer's memory again: :mod:`gpuckpt.nccl.verify` tells."""
        self._settle(self._call("ncclCommResume", ctypes.c_void_p(communicator)), "ncclCommResume", communicator)

    def all_reduce(self, communicator: int, send: int, receive: int, count: int, stream: int) -> None:
        """Queue a sum of *count* 64-bit integers on *stream*; addresses are of device memory."""
        args = (ctypes.c_void_p(send), ctypes.c_void_p(receive), ctypes.c_size_t(count), ctypes.c_int(_INT64), ctypes.c_int(_SUM))
        result = self._call("ncclAllReduce", *args, ctypes.c_void_p(communicator), ctypes.c_void_p(stream))
        self._settle(result, "ncclAllReduce", communicator)

    def describe(self, result: int) -> str:
        """A result in NCCL's name and words."""
        name = _NAMES[result] if 0 <= result < len(_NAMES) else f"result {result}"
        return f"{name}: {self._text('ncclGetErrorString', ctypes.c_int(result))}"

    def _settle(self, result: int, function: str, communicator: int) -> None:
        """A non-blocking communicator answers at once and works on: wait for it. Its end is the agent's deadline, or the job's."""
        pause = threading.Event()
        while result == IN_PROGRESS:
            pause.wait(0.001)
            result = self.async_error(communicator)
        self._check(result, function)

    def _out(self, kind: type[ctypes.c_int] | type[ctypes.c_uint64], function: str, *args: object) -> int:
        value = kind()
        self._check(self._call(function, *args, ctypes.byref(value)), function)
        return value.value

    def _call(self, function: str, *args: object) -> int:
        try:
            called = getattr(self._dll, function)
        except AttributeError:
            raise NcclCommunicator(
                f"NCCL {getattr(self, 'version', '')} ({self.path}) has no {function}",
                hint="NCCL 2.30.7 or newer: pip install 'nvidia-nccl-cu13>=2.30.7' into the program's environment, and start it again",
            ) from None
        result: int = called(*args)
        return result

    def _check(self, result: int, function: str) -> None:
        if result:
            last = self._text("ncclGetLastError", ctypes.c_void_p(None))
            raise NcclCallFailed(
                f"{function} failed with {self.describe(result)}{f' ({last})' if last else ''}, in {self.path}",
                hint="NCCL_DEBUG=WARN in the program's environment makes NCCL say more",
                function=function,
                result=result,
            )

    def _text(self, function: str, *args: object) -> str:
        called = getattr(self._dll, function, None)
        if called is None:
            return ""
        called.restype = ctypes.c_char_p
        text: bytes | None = called(*args)
        return (text or b"").decode(errors="replace").strip()


def at(path: str) -> Library:
    """The loaded copy at *path*. Raises :class:`gpuckpt.errors.NcclCommunicator` if it is not loaded: it is not loaded now either."""
    try:
        dll = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        loaded_ones = ", ".join(library.path for library in loaded()) or "none"
        raise NcclCommunicator(
            f"{path} is not loaded in this process (loaded copies of NCCL: {loaded_ones})",
            hint="name the copy that made the communicator, by its path",
        ) from None
    return of(dll)


def of(dll: ctypes.CDLL) -> Library:
    """The copy whose functions *dll* reaches (vLLM's own handle, say). Raises :class:`gpuckpt.errors.NcclCommunicator` if none."""
    home = _home(dll)
    if home is None:
        raise NcclCommunicator(
            f"{dll._name or 'the program'} reaches no NCCL", hint="register the communicator with the path of its libnccl"
        )
    with contextlib.suppress(OSError):  # linked into the program itself, which cannot be opened by its path
        dll = ctypes.CDLL(home, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    return Library(dll, home)


def reached_by(name: str, maps: Path = Path("/proc/self/maps")) -> Library | None:
    """The copy that the calls of the loaded object *name* ("libtorch_cuda.so") reach, ``None`` if it is not loaded or reaches none.

    As the dynamic linker binds them: what stands in the global scope (LD_PRELOAD, or opened with RTLD_GLOBAL) goes before what the
    object itself links to by its RPATH.
    """
    paths = [p for p in _mapped(maps) if Path(p).name == name or Path(p).name.startswith(f"{name}.")]
    if not paths:
        return None
    for dll in (ctypes.CDLL(None), ctypes.CDLL(paths[0], mode=os.RTLD_NOLOAD | os.RTLD_NOW)):
        if _home(dll) is not None:
            return of(dll)
    return None


def loaded(maps: Path = Path("/proc/self/maps")) -> list[Library]:
    """Every copy that is loaded in this process, by path."""
    found = {}
    for path in _mapped(maps):
        if not _FILE.search(Path(path).name):
            continue
        try:
            library = of(ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW))
        except (OSError, NcclCommunicator):
            continue  # unloaded meanwhile, or a file that only has the name
        found[library.path] = library
    return [found[path] for path in sorted(found)]


def _mapped(maps: Path) -> Iterator[str]:
    """The files mapped in this process, each once."""
    seen = set()
    with maps.open(errors="replace") as lines:
        for line in lines:
            path = line.rstrip("\n").split(maxsplit=5)[5:]
            if path and path[0].startswith("/") and path[0] not in seen:
                seen.add(path[0])
                yield path[0]


def _home(dll: ctypes.CDLL) -> str | None:
    """The file that has the ``ncclGetVersion`` which *dll* reaches."""
    function = getattr(dll, "ncclGetVersion", None)
    if function is None:
        return None
    info = _DlInfo()
    dladdr = ctypes.CDLL(None).dladdr
    dladdr.argtypes = (ctypes.c_void_p, ctypes.POINTER(_DlInfo))
    if not dladdr(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(info)) or not info.path:
        return None
    return os.path.realpath(os.fsdecode(info.path))
