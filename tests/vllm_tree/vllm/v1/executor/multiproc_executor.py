"""Several GPUs: a process for each, which takes its work from the engine in one order."""

from __future__ import annotations

import multiprocessing.connection
import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import vllm.plugins
from vllm.v1.worker import Worker

EXECUTE_MODEL_TIMEOUT_S = 300.0


class FutureWrapper(Future[Any]):
    def __init__(self, futures_queue: deque[FutureWrapper], get_response: Callable[[], Any]) -> None:
        self.futures_queue, self.get_response = futures_queue, get_response
        super().__init__()
        self.futures_queue.appendleft(self)

    def result(self, timeout: float | None = None) -> Any:
        if timeout is not None:
            raise RuntimeError("timeout not implemented")
        while not self.done():
            future = self.futures_queue.pop()
            future._wait_for_response()
        return super().result()

    def _wait_for_response(self) -> None:
        try:
            self.set_result(self.get_response())
        except Exception as e:
            self.set_exception(e)


@dataclass
class WorkerProcHandle:
    proc: Any
    rank: int
    rpc: Any
    response: Any
    death_writer: Any


class MultiprocExecutor:
    def __init__(self, vllm_config: dict[str, Any]) -> None:
        context = multiprocessing.get_context(os.environ["VLLM_WORKER_MULTIPROC_METHOD"])
        self.is_failed = False
        self.workers: list[WorkerProcHandle] = []
        barrier = vllm_config["barrier"] or context.Barrier(vllm_config["tp"])
        for rank in range(vllm_config["tp"]):
            rpc, rpc_end = context.Pipe()
            response, response_end = context.Pipe()
            death_reader, death_writer = context.Pipe(duplex=False)
            inherited = [*(w.death_writer for w in self.workers), death_writer] if context.get_start_method() == "fork" else []
            proc = context.Process(
                target=WorkerProc.worker_main,
                args=(vllm_config, rank, barrier, rpc_end, response_end, death_reader),
                kwargs={"inherited": inherited},
                name=f"VllmWorker-{rank}",
                daemon=True,
            )
            proc.start()
            self.workers.append(WorkerProcHandle(proc, rank, rpc, response, death_writer))
        for w in self.workers:
            assert w.response.recv() == "READY"
        self.futures_queue: deque[FutureWrapper] = deque()

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        return self.collective_rpc(
            "execute_model", args=(scheduler_output,), unique_reply_rank=0, non_block=non_block, timeout=EXECUTE_MODEL_TIMEOUT_S
        )

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        unique_reply_rank: int | None = None,
        kv_output_aggregator: Any = None,
    ) -> Any:
        if self.is_failed:
            raise RuntimeError("Executor failed.")
        if getattr(method, "__name__", "") == "stand":
            assert not [f for f in self.futures_queue if not f.done()], "an answer with a deadline would come hours late"
        deadline = None if timeout is None else time.monotonic() + timeout
        send_method = method if isinstance(method, str) else pickle.dumps(method)
        for w in self.workers:
            w.rpc.send((send_method, args, kwargs or {}, unique_reply_rank))
        handles = self.workers if unique_reply_rank is None else [self.workers[unique_reply_rank]]

        def get_response() -> Any:
            responses = []
            for w in handles:
                if not w.response.poll(None if deadline is None else deadline - time.monotonic()):
                    raise TimeoutError(f"RPC call to {method} timed out.")
                ok, result = w.response.recv()
                if not ok:
                    raise RuntimeError(f"Worker failed with error '{result}'")
                responses.append(result)
            return responses[0] if unique_reply_rank is not None else responses

        future = FutureWrapper(self.futures_queue, get_response)
        return future if non_block else future.result()


class MessageQueue:
    """Of one worker. It ends with a ``RuntimeError`` when the engine has ended."""

    def __init__(self, rpc: Any) -> None:
        self.rpc, self.shutting_down = rpc, False

    def dequeue(self, timeout: float | None = None, indefinite: bool = False) -> Any:
        assert indefinite
        assert timeout is None
        while not self.shutting_down:
            if self.rpc.poll(0.05):
                return self.rpc.recv()
        raise RuntimeError("cancelled")


class WorkerProc:
    def __init__(self, vllm_config: dict[str, Any], rank: int, barrier: Any, rpc: Any, response: Any) -> None:
        self.rank, self.response = rank, response
        self.rpc_broadcast_mq = MessageQueue(rpc)
        self.worker = Worker(vllm_config, rank, barrier)

    @staticmethod
    def worker_main(
        vllm_config: dict[str, Any], rank: int, barrier: Any, rpc: Any, response: Any, death_reader: Any, inherited: list[Any]
    ) -> None:
        for end in inherited:
            end.close()
        if f"worker{rank}" in os.environ.get("FAKE_NO_PLUGIN", ""):
            vllm.plugins.plugins_loaded = True
        process = WorkerProc(vllm_config, rank, barrier, rpc, response)
        threading.Thread(target=process.monitor_death_pipe, args=(death_reader,), daemon=True).start()
        response.send("READY")
        process.worker_busy_loop()

    def monitor_death_pipe(self, death_reader: Any) -> None:
        """The engine ended: no more work will come."""
        try:
            death_reader.recv()
        except EOFError:
            self.rpc_broadcast_mq.shutting_down = True

    def worker_busy_loop(self) -> None:
        while True:
            try:
                method, args, kwargs, output_rank = self.rpc_broadcast_mq.dequeue(indefinite=True)
            except (EOFError, RuntimeError):
                return
            try:
                func = getattr(self.worker, method) if isinstance(method, str) else partial(pickle.loads(method), self.worker)
                output = (True, func(*args, **kwargs))
            except Exception as e:
                output = (False, f"{type(e).__name__}: {e}")
            if output_rank is None or self.rank == output_rank:
                self.response.send(output)
