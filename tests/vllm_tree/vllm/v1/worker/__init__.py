"""The worker: holds simulated GPU memory and one communicator, and computes tokens out of what lies there."""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import nullcontext
from typing import Any

import gpuckpt.agent.vllm
from gpuckpt.driver.simtarget import _nccl_socket
from gpuckpt.driver.simulated_comms import SimulatedCommunicator, SimulatedCommunicators
from gpuckpt.driver.simulated_store import SimulatedWorldDir
from vllm import device_allocator
from vllm.device_allocator import cumem
from vllm.platforms.interface import current_platform
from vllm.plugins import load_general_plugins
from vllm.v1.worker.workspace import WorkspaceManager

GIB = 1 << 30


class Alone:
    """No communicator: as ``NcclCommunicators`` in a process of one GPU."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def sockets(self) -> int:
        return 0

    def obstacles(self) -> list[str]:
        return []

    def describe(self) -> list[dict[str, Any]]:
        return []

    def hazards(self) -> list[str]:
        return []

    def synchronise(self) -> None:
        with self.worker.world.cuda_call(os.getpid()):
            pass

    def suspend(self) -> None: ...
    def held_bytes(self) -> int:
        return 0

    def resume(self) -> None: ...


class Runner:
    """As of 0.29: what else it makes with the cache is not in the memory of the cache."""

    def initialize_kv_cache(self, kv_cache_config: Any, is_profiling: bool = False, kv_cache_allocation_context: Any = None) -> None: ...


class Worker:
    def __init__(self, vllm_config: dict[str, Any], rank: int, barrier: Any) -> None:
        load_general_plugins()
        self.vllm_config, self.barrier = vllm_config["object"], barrier
        self.step_s = float(os.environ.get("FAKE_STEP_S", "0.002"))
        self.world = SimulatedWorldDir(os.environ["GPUCKPT_SIMULATE"])
        uuids = {g.index: uuid for uuid, g in self.world.peek().rules.gpus.items()}
        self.world.register(os.getpid(), {uuids[vllm_config["first_gpu"] + rank]: 2 * GIB})
        tp, dp, dp_rank = vllm_config["tp"], vllm_config["dp"], vllm_config["dp_rank"]
        groups = [
            (f"vllm:tp:{vllm_config['first_gpu']}", rank, tp),
            (f"vllm:dp:{rank}", dp_rank, dp),
            ("vllm:ep", dp_rank * tp + rank, dp * tp),
        ]
        several = [SimulatedCommunicator(self.world, os.getpid(), *g) for g in (groups if dp > 1 else groups[:1]) if g[2] > 1]
        self.sockets = [_nccl_socket(c.rank) for c in several]
        made = SimulatedCommunicators(several) if several else Alone(self)
        gpuckpt.agent.vllm.communicators = lambda: made
        self.engine = os.getppid()
        newer = os.environ.get("FAKE_VLLM") == "newer"
        self.model_runner: Any = Runner() if newer else self
        self.blocks: list[int] = []  # addresses of weights and KV cache, with sleep mode
        if self.vllm_config.model_config.enable_sleep_mode:
            for tag, size in (("weights", 4 * GIB), ("kv_cache", 8 * GIB)):
                with self.pool("runtime") if newer and tag == "kv_cache" else nullcontext(), self.pool(tag):
                    self.blocks.append(cumem.allocate(size))
        self.constants: list[int] = []  # addresses of what captured graphs read, where that is not torch's own memory
        if hasattr(graphs := current_platform.get_global_graph_pool(), "allocate"):
            self.constants.append(graphs.allocate(GIB))
        if newer and self.blocks:
            with self.pool("runtime"):
                self.constants.append(cumem.allocate(GIB))
        workspaces = WorkspaceManager(*([lambda: self.pool("workspace") if self.blocks else nullcontext()] if newer else []))
        for _ in range(2):
            workspace = workspaces._ensure_workspace_size(GIB)
        if workspace.address:
            self.constants.append(workspace.address)

    @staticmethod
    def pool(tag: str) -> Any:
        return device_allocator.get_mem_allocator_instance().use_memory_pool(tag=tag)

    def post_kv_cache_wake_up(self) -> None:
        (self.world.path / "woken").touch()

    def sleep(self, level: int) -> None:
        device_allocator.get_mem_allocator_instance().sleep(offload_tags=("weights",) if level == 1 else ())

    def wake_up(self, tags: list[str] | None) -> None:
        device_allocator.get_mem_allocator_instance().wake_up(tags)
        if tags is None or "kv_cache" in tags:
            self.post_kv_cache_wake_up()

    def attend(self, prefills: bool) -> bytes:
        """What lies in the KV cache, which a prefill writes out of the weights."""
        if not self.blocks:
            return b""
        weights, cache = self.blocks
        if prefills:
            cumem.DEVICE[cache] = hashlib.sha256(cumem.DEVICE[weights]).digest()
        return b"".join(cumem.DEVICE[at] for at in (weights, cache, *self.constants))

    def stuck(self) -> bool:
        """A kernel without end, for as long as the test wants."""
        try:
            who = (self.world.path / "stuck").read_text()
        except FileNotFoundError:
            return False
        return who == str(os.getpid()) and os.getppid() == self.engine

    def forward(self) -> bytes:
        """Every rank's pass through the model: a rank that does not come leaves the others waiting."""
        with self.world.cuda_call(os.getpid()) as contents:
            seen = b"".join(path.read_bytes() for path in contents)
        time.sleep(self.step_s)
        while self.stuck():
            time.sleep(0.01)
        if self.barrier is not None:
            self.barrier.wait(30)
        return seen

    def execute_dummy_batch(self) -> None:
        self.forward()

    def execute_model(self, scheduler_output: dict[str, tuple[int, bool]]) -> dict[str, int]:
        seen = self.forward()
        tokens = {}
        for request, (n, prefills) in scheduler_output.items():
            tokens[request] = int.from_bytes(hashlib.sha256(seen + self.attend(prefills) + b"%d" % n).digest()[:4])
        return tokens
