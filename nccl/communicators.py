"""Lists every communicator of this process, in an order that all ranks agree on, and names those that it cannot reach.

It only looks into modules that the program itself has imported: torch's process groups, vLLM's PyNccl communicators, and what the
program registered. Call it where the program runs its own work, on the thread whose CUDA device is the program's.

torch 2.12 and newer can suspend a backend itself (``backend.suspend()``). That is not used: the same call on the communicator's pointer
works from torch 2.9 on, lets the GIL go while ranks wait for one another, and is proven on the very communicator that was suspended.
"""

from __future__ import annotations

import gc
import hashlib
import os
import re
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from gpuckpt.errors import GpuckptError, Usage
from gpuckpt.model import Hazard
from gpuckpt.nccl import library as nccl
from gpuckpt.nccl.library import Library

_SOCKET = re.compile(r"@tmp/nccl-socket-\d+-\w+")
PYNCCL = "vllm.distributed.device_communicators.pynccl"
WEIGHTS = "vllm.distributed.weight_transfer.nccl_common"  # imported where weights come from a trainer
REGISTER = "gpuckpt.nccl.communicators.register(POINTER, LIBRARY_PATH, name=NAME) in every rank"


@dataclass(frozen=True, slots=True)
class Communicator:
    """One communicator.

    ``name`` is that of its group, the same on all its ranks. ``pointer`` is its ``ncclComm_t``, which belongs to ``library``.
    ``carried`` is whether it has carried traffic, ``None`` where that is not known. ``owner`` keeps what destroys it alive.
    """

    name: str
    source: str  # "registered", "torch" or "vllm"
    pointer: int
    library: Library
    rank: int
    size: int
    device: int
    carried: bool | None = None
    owner: object = field(default=None, repr=False, compare=False)

    @property
    def label(self) -> str:
        return f"{self.source}:{self.name}"

    def as_dict(self) -> dict[str, Any]:
        """What the ranks compare: of one communicator, all but ``rank`` and ``device`` agree."""
        return {
            "name": self.label,
            "size": self.size,
            "rank": self.rank,
            "device": self.device,
            "nccl": self.library.version,
        }


@dataclass(frozen=True, slots=True)
class Listing:
    """``communicators`` of more than one rank, in the order to take them in; ``hazards`` name what cannot be reached.

    ``alone`` are those of one rank: they share nothing with anybody, and are left as they are.
    """

    communicators: tuple[Communicator, ...]
    alone: tuple[Communicator, ...] = ()
    hazards: tuple[Hazard, ...] = ()


@dataclass(frozen=True, slots=True)
class _Candidate:
    source: str
    name: str
    pointer: int
    library: Callable[[], Library]
    carried: bool | None = None
    owner: object = None


_registered: dict[tuple[str, int], _Candidate] = {}
_lock = threading.Lock()


def register(pointer: int, library_path: str | None = None, *, name: str, carried: bool | None = None) -> None:
    """Make a communicator known that neither torch nor vLLM knows: made through cupy, nccl4py or C.

    *pointer* is its ``ncclComm_t``, *library_path* the libnccl that made it (needed where several are loaded), *name* the same on all
    ranks. Call :func:`unregister` before it is destroyed. Raises :class:`gpuckpt.errors.Usage` for a copy that cannot be told, or for
    a name that another communicator has.
    """
    if not pointer:
        raise Usage("a communicator to register is not NULL", hint=REGISTER)
    library = nccl.at(library_path) if library_path else _only_one()
    with _lock:
        if any(c.name == name and key != (library.path, pointer) for key, c in _registered.items()):
            raise Usage(f"another communicator is registered as {name!r}", hint="give each a name of its own, the same on all ranks")
        _registered[library.path, pointer] = _Candidate("registered", name, pointer, lambda: library, carried)


def unregister(pointer: int) -> None:
    """Forget a registered communicator; it is no error if it is not there."""
    with _lock:
        for key in [k for k in _registered if k[1] == pointer]:
            del _registered[key]


def listing(modules: Mapping[str, Any] | None = None, sockets: int | None = None) -> Listing:
    """Every communicator of this process.

    *modules* stands for ``sys.modules``, *sockets* for the number of NCCL sockets that this process holds (counted if ``None``).
    The order is by source and group name. Ranks that share a communicator give it the same name, and groups of one name have no rank
    in common, so ranks that take them in this order never wait for one another in a circle.
    """
    modules = dict(sys.modules) if modules is None else modules
    hazards: list[Hazard] = []
    with _lock:
        candidates = list(_registered.values())
    candidates += [*_torch(modules, hazards), *_vllm(modules, hazards)]
    held = own_sockets() if sockets is None else sockets
    if WEIGHTS in modules or held > len({c.pointer for c in candidates}):
        candidates += _vllm_without_a_group(modules, {c.pointer for c in candidates}, hazards)
    found: dict[tuple[str, int], Communicator] = {}
    for c in sorted(candidates, key=lambda c: (c.source, c.name)):
        try:
            library = c.library()
            key = (library.path, c.pointer)
            if key in found:
                continue
            size, rank, device = library.count(c.pointer), library.rank(c.pointer), library.device(c.pointer)
        except GpuckptError as error:
            hazards.append(_hazard(f"communicator {c.source}:{c.name} cannot be reached: {error.message}", error.hint))
            continue
        found[key] = Communicator(c.name, c.source, c.pointer, library, rank, size, device, c.carried, c.owner)
    known = len(found)
    if held > known:
        message = (
            f"this process holds {held} sockets of NCCL communicators, and gpuckpt reaches {known}: perhaps torch made some for a pair "
            "of ranks (send and recv on a group that had no communicator yet), or another library has its own"
        )
        cure = f"pass device_id= to init_process_group, use batch_isend_irecv; for another library: {REGISTER}"
        hazards.append(_hazard(message, cure))
    together = tuple(c for c in found.values() if c.size > 1)
    return Listing(together, tuple(c for c in found.values() if c.size == 1), tuple(hazards))


def own_sockets(proc: Path = Path("/proc/self"), table: Path = Path("/proc/net/unix")) -> int:
    """How many NCCL sockets this process holds: each live communicator that spans processes of one host has one."""
    try:
        lines = table.read_text(errors="replace").splitlines()
    except OSError:
        return 0
    inodes = {f"socket:[{fields[6]}]" for line in lines if _SOCKET.search(line) and len(fields := line.split()) > 6}
    if not inodes:
        return 0
    held = set()
    for fd in (proc / "fd").iterdir():
        try:
            held.add(os.readlink(fd))
        except OSError:
            continue  # closed meanwhile
    return len(inodes & held)


def _only_one() -> Library:
    copies = nccl.loaded()
    if len(copies) != 1:
        names = ", ".join(c.path for c in copies) or "none"
        raise Usage(
            f"which NCCL made this communicator cannot be told; loaded: {names}", hint="pass library_path=, the path of its libnccl.so.2"
        )
    return copies[0]


def _torch(modules: Mapping[str, Any], hazards: list[Hazard]) -> Iterator[_Candidate]:
    """The communicators of torch's process groups: of each, that of every device on which this process has a context.

    A group has its communicator from its first collective on: those that have none yet are passed over.
    """
    torch, c10d = modules.get("torch"), modules.get("torch.distributed.distributed_c10d")
    world = getattr(c10d, "_world", None)
    cuda = getattr(torch, "cuda", None)
    if world is None or cuda is None or not cuda.is_initialized():
        return
    for group, name in list(world.pg_names.items()):
        for backend in _backends(group):
            get = getattr(backend, "_comm_ptr", None)
            if get is None:
                if "nccl" in f"{type(backend).__name__} {_name(backend)}".lower():
                    cure = f"torch 2.9 or newer has _comm_ptr; for another backend: {REGISTER}"
                    hazards.append(_hazard(f"torch's process group {name} has an NCCL backend that does not tell its communicator", cure))
                continue
            for index, here in _devices(torch):
                try:
                    with here:  # the lookup goes by the current device
                        pointer = int(get() or 0)
                except Exception as error:  # noqa: BLE001  # whatever torch raises, the group is named
                    if "not initialized" not in str(error):
                        said = f"torch's process group {name} does not tell its communicator on cuda:{index}: {error}"
                        hazards.append(_hazard(said, "end the job if the group was aborted"))
                    continue
                if pointer:
                    yield _Candidate("torch", str(name), pointer, _torch_library, _carried(backend), backend)


def _backends(group: Any) -> Iterator[Any]:
    """What serves *group* on CUDA, out of the wrappers that debugging puts around it."""
    for device in group._device_types:
        if device.type != "cuda":
            continue
        backend = group._get_backend(device)
        while (inner := getattr(backend, "wrapped_pg", None)) is not None:
            backend = inner
        yield backend


def _devices(torch: Any) -> Iterator[tuple[int, AbstractContextManager[Any]]]:
    """Each device that has a context here, with what makes it current. To enter another would make a context, and hold memory."""
    current = torch.cuda.current_device()
    has_context = getattr(getattr(torch, "_C", None), "_cuda_hasPrimaryContext", lambda index: index == current)
    for index in range(torch.cuda.device_count()):
        if has_context(index):
            yield index, nullcontext() if index == current else torch.cuda.device(index)


def _torch_library() -> Library:
    """The copy that torch calls: its own by RPATH, or what stands before it."""
    found = nccl.reached_by("libtorch_cuda.so") or nccl.reached_by("libtorch_python.so")
    return found or _only_one()


def _carried(backend: Any) -> bool | None:
    """Whether torch counts a collective on *backend*; without a count it is unknown, for point-to-point traffic is not counted."""
    count = getattr(backend, "_get_sequence_number_for_group", None)
    if count is None:
        return None
    try:
        return True if int(count()) > 0 else None
    except Exception:  # noqa: BLE001  # not every backend counts
        return None


def _name(backend: Any) -> str:
    name = getattr(backend, "name", "")
    return str(name() if callable(name) else name)


def _vllm(modules: Mapping[str, Any], hazards: list[Hazard]) -> Iterator[_Candidate]:
    """PyNccl of each of vLLM's groups, also where it is switched off for the moment: it is alive all the same."""
    for name, group in vllm_groups(modules):
        pynccl = getattr(getattr(group, "device_communicator", None), "pynccl_comm", None)
        if pynccl is not None and _pointer(pynccl):
            yield from _pynccl(name, pynccl, hazards)


def _vllm_without_a_group(modules: Mapping[str, Any], known: Collection[int], hazards: list[Hazard]) -> Iterator[_Candidate]:
    """PyNccl communicators beside the *known* ones: those by which a trainer sends weights. All objects of the process are walked for them.

    Their name is made of the unique id that NCCL gave rank 0, which vLLM passes on to all.
    """
    cls = getattr(modules.get(PYNCCL), "PyNcclCommunicator", None)
    if not isinstance(cls, type):
        return
    for o in gc.get_objects():
        if issubclass(type(o), cls) and (pointer := _pointer(o)) and pointer not in known:
            unique = getattr(o, "unique_id", None)
            if unique is None:
                hazards.append(_hazard("a communicator of vLLM's does not tell its unique id", REGISTER))
                continue
            yield from _pynccl(f"pynccl-{hashlib.sha256(bytes(unique)).hexdigest()[:12]}", o, hazards)


def _pointer(pynccl: Any) -> int:
    """Its ``ncclComm_t``; 0 if it has none, or none any more."""
    comm = getattr(pynccl, "comm", None)
    return int(getattr(comm, "value", comm) or 0) if getattr(pynccl, "available", True) else 0


def _pynccl(name: str, pynccl: Any, hazards: list[Hazard]) -> Iterator[_Candidate]:
    dll = getattr(getattr(pynccl, "nccl", None), "lib", None)
    if dll is None:
        hazards.append(_hazard(f"vLLM's group {name} does not tell which NCCL it calls", REGISTER))
    else:  # vLLM sends a small all-reduce through each when it makes it
        yield _Candidate("vllm", name, _pointer(pynccl), partial(nccl.of, dll), True, pynccl)


def vllm_groups(modules: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """vLLM's live groups by name."""
    state = modules.get("vllm.distributed.parallel_state")
    for name, reference in sorted(getattr(state, "_groups", {}).items()):
        group = reference()
        if group is not None:
            yield str(name), group


def _hazard(message: str, hint: str) -> Hazard:
    return Hazard("nccl-communicator", message, hint, os.getpid())
