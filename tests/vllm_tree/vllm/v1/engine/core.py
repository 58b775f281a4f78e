"""The engine's process: a thread takes requests in, the main thread steps."""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import threading
from collections import deque
from concurrent.futures import Future
from typing import Any

import vllm.plugins
from vllm.plugins import load_general_plugins
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.executor import EXECUTORS


class Scheduler:
    """Each request gets one token a step; up to one step is scheduled ahead."""

    def __init__(self) -> None:
        self.running: dict[str, list[int]] = {}  # request -> [scheduled, wanted]

    def has_requests(self) -> bool:
        return any(scheduled < wanted for scheduled, wanted in self.running.values())

    def schedule(self) -> dict[str, int]:
        output = {}
        for request, counts in self.running.items():
            if counts[0] < counts[1]:
                output[request] = counts[0]
                counts[0] += 1
        return output


class EngineCore:
    def __init__(self, vllm_config: dict[str, Any], executor_class: Any) -> None:
        load_general_plugins()
        self.vllm_config = vllm_config["object"]
        self.model_executor = executor_class(vllm_config)
        self.scheduler = Scheduler()
        self.batch_queue: deque[tuple[Future[Any], dict[str, int]]] = deque(maxlen=2)

    def step_with_batch_queue(self) -> list[tuple[str, int]]:
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self.batch_queue.appendleft((self.model_executor.execute_model(output, non_block=True), output))
            if len(self.batch_queue) < 2 and self.scheduler.has_requests():
                return []
        elif not self.batch_queue:
            return []
        future, output = self.batch_queue.pop()
        tokens = future.result()
        return [(request, tokens[request]) for request in output]


class EngineCoreProc(EngineCore):
    def __init__(self, vllm_config: dict[str, Any], executor_class: Any, requests: Any, answers: Any) -> None:
        self.input_queue: queue.Queue[tuple[EngineCoreRequestType, Any]] = queue.Queue()
        self.requests, self.answers = requests, answers
        self.process_input_queue_block = True
        super().__init__(vllm_config, executor_class)
        threading.Thread(target=self.process_input_sockets, daemon=True).start()
        pids = [h.proc.pid for h in getattr(self.model_executor, "workers", [])]
        answers.put({"engine": os.getpid(), "workers": pids or [os.getpid()]})

    @staticmethod
    def run_engine_core(*args: Any, **kwargs: Any) -> None:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # ends with the front, as long as a test runs
        if "engine" in os.environ.get("FAKE_NO_PLUGIN", ""):
            vllm.plugins.plugins_loaded = True
        together = args[0]["object"].parallel_config.data_parallel_size > 1
        engine_core = (DPEngineCoreProc if together else EngineCoreProc)(*args, **kwargs)
        engine_core.run_busy_loop()

    def has_work(self) -> bool:
        return self.scheduler.has_requests() or bool(self.batch_queue)

    def run_busy_loop(self) -> None:
        while True:
            self._process_input_queue()
            self._process_engine_step()

    def _process_input_queue(self) -> None:
        while not self.has_work():
            req = self.input_queue.get(block=self.process_input_queue_block)
            self._handle_client_request(*req)
        while not self.input_queue.empty():
            req = self.input_queue.get_nowait()
            self._handle_client_request(*req)

    def _process_engine_step(self) -> None:
        for request, token in self.step_with_batch_queue():
            self.answers.put({"request": request, "token": token})

    def _handle_client_request(self, request_type: EngineCoreRequestType, request: Any) -> None:
        if request_type == EngineCoreRequestType.WAKEUP:
            return
        if request_type == EngineCoreRequestType.ADD:
            name, wanted = request
            self.scheduler.running[name] = [0, wanted]
        elif request_type == EngineCoreRequestType.EXECUTOR_FAILED:
            raise RuntimeError("Executor failed.")

    def process_input_sockets(self) -> None:
        while True:
            self.input_queue.put_nowait((EngineCoreRequestType.ADD, self.requests.get()))


class DPEngineCoreProc(EngineCoreProc):
    """One of several engines that step together: it has a loop of its own."""

    def run_busy_loop(self) -> None:
        while True:
            self._process_input_queue()
            self._process_engine_step()


def start(context: Any, vllm_config: dict[str, Any]) -> tuple[Any, Any, Any]:
    """An engine's process, and the queues to it and from it."""
    requests, answers = context.Queue(), context.Queue()
    executor = EXECUTORS["mp" if vllm_config["tp"] > 1 else "uni"]
    process = context.Process(target=EngineCoreProc.run_engine_core, args=(vllm_config, executor, requests, answers), name="EngineCore")
    process.start()
    return process, requests, answers
