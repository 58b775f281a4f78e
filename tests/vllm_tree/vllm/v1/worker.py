"""The worker: holds simulated GPU memory and one communicator, and computes tokens out of what lies there."""

from __future__ import annotations

import hashlib
import os
import time
from typing import Any

import gpuckpt.agent.vllm
from gpuckpt.driver.simtarget import _nccl_socket
from gpuckpt.driver.simulated_comms import SimulatedCommunicator
from gpuckpt.driver.simulated_store import SimulatedWorldDir
from vllm import device_allocator
from vllm.device_allocator import cumem
from vllm.plugins import load_general_plugins

GIB = 1 << 30


class Alone:
    """No communicator: as ``NcclCommunicators`` in a process of one GPU."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def describe(self) -> list[dict[str, Any]]:
        return []

    def hazards(self) -> list[str]:
        return []

    def synchronise(self) -> None:
        with self.worker.world.cuda_call(os.getpid()):
            pass

    def suspend(self) -> None: ...
    def resume(self) -> None: ...


class Worker:
    def __init__(self, vllm_config: dict[str, Any], rank: int, barrier: Any) -> None:
        load_general_plugins()
        self.vllm_config, self.barrier = vllm_config["object"], barrier
        self.step_s = float(os.environ.get("FAKE_STEP_S", "0.002"))
        self.world = SimulatedWorldDir(os.environ["GPUCKPT_SIMULATE"])
        uuids = {g.index: uuid for uuid, g in self.world.peek().rules.gpus.items()}
        self.world.register(os.getpid(), {uuids[vllm_config["first_gpu"] + rank]: 2 * GIB})
        if barrier is None:
            made: Any = Alone(self)
        else:
            self.socket = _nccl_socket(rank)
            made = SimulatedCommunicator(self.world, os.getpid(), f"vllm:tp:{vllm_config['first_gpu']}", rank, vllm_config["tp"])
        gpuckpt.agent.vllm.communicators = lambda: made
        self.engine = os.getppid()
        self.model_runner = self
        self.blocks: list[int] = []  # addresses of weights and KV cache, with sleep mode
        if self.vllm_config.model_config.enable_sleep_mode:
            for tag, size in (("weights", 4 * GIB), ("kv_cache", 8 * GIB)):
                with device_allocator.get_mem_allocator_instance().use_memory_pool(tag=tag):
                    self.blocks.append(cumem.allocate(size))

    def post_kv_cache_wake_up(self) -> None:
        (self.world.path / "woken").touch()

    def sleep(self, level: int) -> None:
        device_allocator.get_mem_allocator_instance().sleep(offload_tags=("weights",) if level == 1 else ())

    def wake_up(self, tags: list[str] | None) -> None:
        device_allocator.get_mem_allocator_instance().wake_up(tags)
        self.post_kv_cache_wake_up()

    def attend(self, prefills: bool) -> bytes:
        """What lies in the KV cache, which a prefill writes out of the weights."""
        if not self.blocks:
            return b""
        weights, cache = self.blocks
        if prefills:
            cumem.DEVICE[cache] = hashlib.sha256(cumem.DEVICE[weights]).digest()
        return cumem.DEVICE[weights] + cumem.DEVICE[cache]

    def stuck(self) -> bool:
        """A kernel without end, for as long as the test wants."""
        gate = self.world.path / "stuck"
        return gate.exists() and gate.read_text() == str(os.getpid()) and os.getppid() == self.engine

    def execute_model(self, scheduler_output: dict[str, tuple[int, bool]]) -> dict[str, int]:
        with self.world.cuda_call(os.getpid()) as contents:
            seen = b"".join(path.read_bytes() for path in contents)
        time.sleep(self.step_s)
        while self.stuck():
            time.sleep(0.01)
        if self.barrier is not None:
            self.barrier.wait(30)  # the all-reduce: a rank that does not come leaves the others waiting
        tokens = {}
        for request, (n, prefills) in scheduler_output.items():
            tokens[request] = int.from_bytes(hashlib.sha256(seen + self.attend(prefills) + b"%d" % n).digest()[:4])
        return tokens
