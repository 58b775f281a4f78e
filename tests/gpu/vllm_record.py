"""What several versions of vLLM keep of what gpuckpt relies on, and what of them the adapters look at: tests/vllm_versions.json.

usage: vllm_record.py FOLDER    write it anew, of the sources in each FOLDER/…VERSION/vllm
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import vllm_contract
from vllm_sources import Source

from gpuckpt.agent import vllm_together

RECORD = Path(__file__).parent.parent / "vllm_versions.json"
#: Functions whose parameters the adapters look at, by class ("" for those of the module; "*": all of the class).
_SIGNATURES = {
    "v1/engine/core.py": {"EngineCoreProc": ("run_busy_loop", "_handle_client_request"), "DPEngineCoreProc": ("run_busy_loop",)},
    "v1/executor/multiproc_executor.py": {"WorkerProc": ("worker_busy_loop",)},
    "config/parallel.py": {"ParallelConfig": ("sync_dp_state",)},
    "device_allocator/__init__.py": {"MemAllocator": ("*",), "": ("get_mem_allocator_instance",)},
    "device_allocator/cumem.py": {"CuMemAllocator": ("sleep",), "": ("create_and_map", "unmap_and_release")},
    "platforms/interface.py": {"Platform": ("get_global_graph_pool",)},
    "v1/worker/workspace.py": {"WorkspaceManager": ("__init__", "_ensure_workspace_size")},
    "v1/worker/gpu_model_runner.py": {"GPUModelRunner": ("initialize_kv_cache", "post_kv_cache_wake_up")},
    "v1/worker/gpu/model_runner.py": {"GPUModelRunner": ("initialize_kv_cache", "post_kv_cache_wake_up")},
    "distributed/device_communicators/all2all.py": {"AgRsAll2AllManager": ("__init__",)},
}
#: Attributes that the adapters look at, where they are set.
_ATTRIBUTES = {
    "v1/engine/core.py": r"self\.(has_coordinator|ignore_start_dp_wave|engines_running|current_wave|output_queue)\b[^=\n]* = ",
    "distributed/device_communicators/cuda_communicator.py": r"self\.(\w+_comm|all2all_manager)(?:: [^=\n]*)? = ",
    "distributed/device_communicators/base_device_communicator.py": r"self\.(all2all_manager)(?:: [^=\n]*)? = ",
    "distributed/device_communicators/pynccl.py": r"self\.(comm|nccl|available|unique_id)(?:: [^=\n]*)? = ",
    "distributed/device_communicators/pynccl_wrapper.py": r"self\.(lib) = ",
    "distributed/parallel_state.py": r"^(_groups)\b",
    "device_allocator/cumem.py": r"^(libcudart)\b| +(instance): ",
    "platforms/interface.py": r"    (_global_graph_pool): ",
}


def recorded(root: Path) -> dict[str, Any]:
    """What the vLLM in *root* keeps, and what was read of it: names, parameters, and which of the known sums it makes."""
    signatures: dict[str, dict[str, list[str]]] = {}
    for path, classes in _SIGNATURES.items():
        source = Source(root / path)
        for cls, names in classes.items():
            for name in source.functions(cls) if names == ("*",) else names:
                if name in source.functions(cls):
                    signatures.setdefault(path, {})[f"{cls}.{name}".lstrip(".")] = source.parameters(cls, name)
    attributes = {
        path: sorted({name for found in re.finditer(words, Source(root / path).text, re.MULTILINE) for name in found.groups() if name})
        for path, words in _ATTRIBUTES.items()
    }
    summed = Source(root / "config/parallel.py").body("ParallelConfig", "sync_dp_state")
    return {
        "kept": {feature: checks_of(root) for feature, checks_of in vllm_contract.FEATURES.items()},
        "signatures": signatures,
        "attributes": attributes,
        "sums": [words.partition("(")[0] for words in vllm_together.SUMS if words in summed],
    }


def record(folder: Path) -> dict[str, Any]:
    """By version, of each ``FOLDER/…VERSION/vllm``."""
    found = {m[0]: path for path in folder.glob("*/vllm") if (m := re.search(r"\d+(\.\d+)+", path.parent.name))}
    return {version: recorded(found[version]) for version in sorted(found, key=lambda v: [int(n) for n in v.split(".")])}


def write(versions: dict[str, Any]) -> None:
    """One line for each feature, module and list."""

    def lines(value: Any, depth: int) -> str:
        if depth == 0 or not isinstance(value, dict):
            return json.dumps(value)
        inside = ",\n".join(f"{' ' * (3 - depth)}{json.dumps(key)}: {lines(v, depth - 1)}" for key, v in value.items())
        return f"{{\n{inside}\n{' ' * (2 - depth)}}}"

    RECORD.write_text(lines(versions, 3) + "\n")


if __name__ == "__main__":
    write(record(Path(sys.argv[1])))
