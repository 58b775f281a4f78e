"""The engine's process: a thread takes requests in, the main thread steps."""

from __future__ import annotations

import ctypes
import enum
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


class PauseState(enum.IntEnum):
    UNPAUSED = 0
    PAUSED_NEW = 1
    PAUSED_ALL = 2


class Scheduler:
    """Each request gets one token a step; up to one step is scheduled ahead. All have the same prompt, so the first caches it for all."""

    connector: Any = None

    def __init__(self) -> None:
        self.running: dict[str, list[int]] = {}  # request -> [scheduled, wanted, whether the cache has it]
        self.cached = 0  # whether a prefix is in the cache
        self.pause_state = PauseState.UNPAUSED

    def set_pause_state(self, pause_state: PauseState) -> None:
        self.pause_state = pause_state

    def add(self, request: str, wanted: int) -> None:
        self.running[request] = [0, wanted, self.cached]

    def has_requests(self) -> bool:
        unfinished = any(scheduled < wanted for scheduled, wanted, _ in self.running.values())
        return unfinished and self.pause_state is not PauseState.PAUSED_ALL

    def schedule(self) -> dict[str, tuple[int, bool]]:
        output = {}
        for request, counts in self.running.items():
            if counts[0] < counts[1]:
                output[request] = counts[0], not counts[2]
                counts[0] += 1
                counts[2] = self.cached = 1
        return output

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        for counts in self.running.values():
            counts[2] = 0
        self.cached = 0
        if "stuck" in os.environ.get("FAKE_CACHE", ""):
            raise RuntimeError("Failed to reset KV cache even when all the running requests are preempted")
        return True


class EngineCore:
    def __init__(self, vllm_config: dict[str, Any], executor_class: Any) -> None:
        load_general_plugins()
        self.vllm_config = vllm_config["object"]
        self.model_executor = executor_class(vllm_config)
        self.scheduler = Scheduler()
        self.batch_queue: deque[tuple[Future[Any], dict[str, int]]] = deque(maxlen=2)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        return self.scheduler.reset_prefix_cache(reset_running_requests)

    def sleep(self, level: int = 1) -> None:
        """As the endpoint's, with nothing running."""
        self.reset_prefix_cache(reset_running_requests=True)
        self.model_executor.collective_rpc("sleep", kwargs={"level": level})

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.model_executor.collective_rpc("wake_up", kwargs={"tags": tags})

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
            self.scheduler.add(*request)
        elif request_type == EngineCoreRequestType.UTILITY:
            getattr(self, request)()
            self.answers.put({"request": request, "token": 0})
        elif request_type == EngineCoreRequestType.EXECUTOR_FAILED:
            raise RuntimeError("Executor failed.")

    def process_input_sockets(self) -> None:
        while True:
            request = self.requests.get()
            utility = isinstance(request, str)
            self.input_queue.put_nowait((EngineCoreRequestType.UTILITY if utility else EngineCoreRequestType.ADD, request))


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
