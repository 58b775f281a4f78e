"""What in this process would keep a mapping of a peer's memory alive through a suspend, as far as it shows from inside.

None of it can be undone in a running process: each hazard names what to start the program with.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from gpuckpt.errors import GpuckptError
from gpuckpt.model import Hazard
from gpuckpt.nccl import environment, library
from gpuckpt.nccl.communicators import Communicator, vllm_groups

NEWER = "pip install 'nvidia-nccl-cu13>=2.30.7' (or -cu12) into the program's environment, and start it again"

#: attribute of a vLLM group's device communicator -> (what it is, cure); those that are ``disabled`` map nothing
BESIDE_NCCL = {
    "ca_comm": ("vLLM's custom all-reduce maps the memory of its peers by CUDA IPC", f"start vLLM with {environment.VLLM_OPTION}"),
    "symm_mem_comm": ("vLLM uses torch's symmetric memory, which maps that of its peers", environment.VLLM_CURE),
    "fi_pcie_ipc_ar_comm": (  # 0.30 and newer
        "FlashInfer's all-reduce over PCIe maps the memory of the peers by CUDA IPC",
        "unset VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC and start vLLM again",
    ),
    "fi_ar_comm": ("FlashInfer's all-reduce workspace maps the memory of the peers", environment.VLLM_CURE),
}
HARMLESS = ("pynccl_comm", "qr_comm", "aiter_ar_comm")  # NCCL itself, and what there is for AMD's GPUs alone
#: module and class of buffers that are mapped in all peers -> (what it is, cure)
BUFFERS = {
    ("flashinfer.comm.mnnvl", "McastGPUBuffer"): (
        "a multicast buffer of FlashInfer's maps the memory of the peers",
        "start the program without it",
    ),
    ("vllm.model_executor.layers.minimax_rms_norm.lamport_workspace", "IpcBuffer"): (
        "vLLM's all-reduce of MiniMax models maps the memory of its peers by CUDA IPC",
        "no setting of vLLM's turns it off: this model can be suspended on one GPU alone",
    ),
}
#: what vLLM's all-to-all may be without memory of its own
_PLAIN_ALL2ALL = ("NaiveAll2AllManager", "AgRsAll2AllManager")

#: modules whose import means that memory is shared with peers outside NCCL
_MODULES = {
    "deep_ep": "DeepEP (NVSHMEM, or its own IPC buffers)",
    "nvshmem": "NVSHMEM",
    "pplx_kernels": "pplx-kernels (NVSHMEM)",
    "mscclpp": "MSCCL++",
    "nixl": "NIXL",
    "mooncake": "Mooncake",
    "ucp": "UCX",
    "ucxx": "UCX",
}


def parsed_environment() -> dict[str, str]:
    """The environment as NCCL reads it: the C library's, to which NCCL adds its configuration files. ``os.environ`` may lag behind."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    values = ((name, getenv(name.encode())) for name in environment.names())
    return {name: value.decode(errors="replace") for name, value in values if value is not None}


def hazards(
    communicators: Sequence[Communicator], modules: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
) -> list[Hazard]:
    """Everything found, none where there is no communicator and nothing else that shares memory.

    *modules* stands for ``sys.modules``, *environ* for :func:`parsed_environment`.
    """
    modules = dict(sys.modules) if modules is None else modules
    found = [*_of_vllm(modules), *_of_torch(modules), *_of_buffers(modules), *_of_modules(modules)]
    if communicators:
        environ = parsed_environment() if environ is None else environ
        for_torch = any(c.source == "torch" for c in communicators)
        # of vLLM the objects say more than the variables
        found += environment.problems(environ, {}, for_torch=for_torch, pid=os.getpid())
        found += _of_communicators(communicators)
    return found


def _of_communicators(communicators: Sequence[Communicator]) -> Iterator[Hazard]:
    for copy in {c.library.path: c.library for c in communicators}.values():
        if not copy.can_suspend:
            yield _nccl(f"NCCL {copy.version} ({copy.path}) cannot suspend communicators; 2.29.7 and newer can", NEWER)
    for label, n in Counter(c.label for c in communicators).items():
        if n > 1:
            message = f"{label} has {n} ranks in this process: its suspend would wait for itself"
            yield _nccl(message, "start one process for each GPU, as torchrun does")
    for c in communicators:
        try:
            state = c.library.async_error(c.pointer)
            if state == library.IN_PROGRESS:
                yield _nccl(f"{c.label} has a call in progress", "try again when the program is idle")
            elif state:
                yield _nccl(f"{c.label} is broken ({c.library.describe(state)})", "end the job, it cannot go on either")
            elif c.library.can_suspend:
                yield from _of_memory(c)
        except GpuckptError as error:
            yield _nccl(f"{c.label} does not answer: {error.message}", error.hint)


def _of_memory(c: Communicator) -> Iterator[Hazard]:
    """Legacy IPC shows in NCCL's own count: it counts what it allocated through cuMem, and nothing else."""
    stats = c.library.stats(c.pointer)
    if stats.total_bytes == 0:
        why = "NCCL counts no memory for it, so it does not use cuMem: its peers are mapped by legacy CUDA IPC, which a suspend leaves"
    elif c.carried and stats.suspendable_bytes == 0:
        why = "it has carried traffic and NCCL could release none of its memory, so its peers are mapped in a way that a suspend leaves"
    else:
        return
    yield _nccl(f"{c.label}: {why}", environment.CURE)


def _of_vllm(modules: Mapping[str, Any]) -> Iterator[Hazard]:
    for name, group in vllm_groups(modules):
        device = getattr(group, "device_communicator", None)
        for attribute, (what, cure) in BESIDE_NCCL.items():
            used = getattr(device, attribute, None)
            if used is not None and not getattr(used, "disabled", False):
                yield _import(f"{what} (group {name})", cure)
        for attribute, used in sorted(getattr(device, "__dict__", {}).items()):
            if not attribute.endswith("_comm") or attribute in BESIDE_NCCL or attribute in HARMLESS or used is None:
                continue
            if not getattr(used, "disabled", False):
                what = f"vLLM has {type(used).__name__} ({attribute}, group {name}) beside NCCL, which gpuckpt does not know: "
                yield _import(what + "it may map the memory of its peers", "start vLLM without it, or take a newer gpuckpt")
        all2all = type(getattr(device, "all2all_manager", None)).__name__
        if all2all not in ("NoneType", *_PLAIN_ALL2ALL):
            message = f"vLLM's all-to-all ({all2all}, group {name}) shares GPU memory with its peers outside NCCL"
            yield _import(message, "start vLLM with --all2all-backend allgather_reducescatter")
    flashinfer = modules.get("vllm.distributed.device_communicators.flashinfer_all_reduce")
    if any(v is not None for k, v in vars(flashinfer or object).items() if k.startswith("_fi_ar") and k.endswith("workspace")):
        cure = f'start vLLM with {environment.VLLM_FUSION_OPTION}, and after: eval "$(gpuckpt env --vllm)"'
        yield _import("FlashInfer's all-reduce workspace maps the memory of the peers", cure)


def _of_torch(modules: Mapping[str, Any]) -> Iterator[Hazard]:
    symmetric = modules.get("torch.distributed._symmetric_memory")
    kept = getattr(symmetric, "_group_name_to_store", None) or getattr(symmetric, "_group_name_to_workspace_tensor", None)
    if kept or (not _alone(modules) and _symmetric_tensor(modules.get("torch"), symmetric)):
        yield _import(
            "torch's symmetric memory maps that of the peers", "start the program without symmetric memory (enable_symm_mem_for_group)"
        )
    reductions = modules.get("torch.multiprocessing.reductions")
    cache = getattr(reductions, "shared_cache", None)
    if cache and any(_is_cuda_import(key) and not _expired(reference) for key, reference in list(cache.items())):
        message = "a CUDA tensor of another process is in use here, sent by torch.multiprocessing"
        yield _import(message, "send a copy in host memory (tensor.cpu()), or let go of the tensor before the suspend")
    for group, name in _process_groups(modules):
        for device in group._device_types:
            options = getattr(group._get_backend(device), "options", None) if device.type == "cuda" else None
            if getattr(getattr(options, "config", None), "split_share", 0) == 1:
                yield _nccl(
                    f"torch's process group {name} shares the resources of the one that it was split from", "split with split_share = 0"
                )


def _symmetric_tensor(torch: Any, symmetric: Any) -> bool:
    """Whether a tensor lives in symmetric memory, of which newer versions of torch keep no list."""
    ask = getattr(symmetric, "is_symm_mem_tensor", None)
    if ask is None:
        return False
    for tensor in _living(getattr(torch, "Tensor", None)):
        with contextlib.suppress(Exception):  # of a tensor that is none, or whose memory is gone
            if tensor.is_cuda and ask(tensor):
                return True
    return False


def _living(cls: Any) -> list[Any]:
    """All objects of *cls*, found among all that there are: 40 ms a million. Each class is looked at once, and no object asked for it."""
    wanted: dict[type, bool] = {}
    found = []
    for o in gc.get_objects() if isinstance(cls, type) else ():
        kind = type(o)
        if (is_one := wanted.get(kind)) is None:
            is_one = wanted[kind] = issubclass(kind, cls)
        if is_one:
            found.append(o)
    return found


def _of_buffers(modules: Mapping[str, Any]) -> Iterator[Hazard]:
    """Those that models make by themselves."""
    for (module, name), (what, cure) in BUFFERS.items():
        if any(getattr(buffer, "_alive", True) for buffer in _living(getattr(modules.get(module), name, None))):
            yield _import(f"{what} ({name})", cure)


def _alone(modules: Mapping[str, Any]) -> bool:
    """Whether torch's process groups are there, and none has two ranks: a server on one GPU, which is greeted as often as anybody asks."""
    groups = _process_groups(modules)
    return bool(groups) and all(group.size() == 1 for group, _ in groups)


def _process_groups(modules: Mapping[str, Any]) -> Iterable[tuple[Any, str]]:
    world = getattr(modules.get("torch.distributed.distributed_c10d"), "_world", None)
    return list(world.pg_names.items()) if world is not None else []


def _is_cuda_import(key: object) -> bool:
    """torch keys an imported CUDA storage by its handle and offset; a shared file by two numbers or by one name."""
    return isinstance(key, tuple) and bool(key) and isinstance(key[0], bytes)


def _expired(reference: Any) -> bool:
    expired = getattr(reference, "expired", None)
    return bool(expired()) if callable(expired) else False


def _of_modules(modules: Mapping[str, Any]) -> Iterator[Hazard]:
    for module, what in _MODULES.items():
        if modules.get(module) is not None:
            yield _import(f"{what} is loaded, and may share GPU memory with other processes", f"start the program without {module}")


def _nccl(message: str, hint: str) -> Hazard:
    return Hazard("nccl-communicator", message, hint, os.getpid(), acceptable=True)


def _import(message: str, hint: str) -> Hazard:
    return Hazard("possible-import", message, hint, os.getpid(), acceptable=True)
