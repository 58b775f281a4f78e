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

    def stuck(self) -> bool:
        """A kernel without end, for as long as the test wants."""
        gate = self.world.path / "stuck"
        return gate.exists() and gate.read_text() == str(os.getpid()) and os.getppid() == self.engine

    def execute_model(self, scheduler_output: dict[str, int]) -> dict[str, int]:
        with self.world.cuda_call(os.getpid()) as contents:
            seen = b"".join(path.read_bytes() for path in contents)
        time.sleep(self.step_s)
        while self.stuck():
            time.sleep(0.01)
        if self.barrier is not None:
            self.barrier.wait(30)  # the all-reduce: a rank that does not come leaves the others waiting
        return {request: int.from_bytes(hashlib.sha256(seen + b"%d" % n).digest()[:4]) for request, n in scheduler_output.items()}
