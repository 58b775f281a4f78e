"""The engine's process: a thread takes requests in, the main thread steps."""

from __future__ import annotations

import ctypes
import enum
import os
import queue
import signal
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import vllm.plugins
from vllm.config.parallel import ParallelConfig, ProcessGroup
from vllm.plugins import load_general_plugins
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequestType
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

    has_unfinished_requests = has_requests

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
        self.sleeping_tags: set[str] = set()  # the executor's, in vLLM

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        return self.scheduler.reset_prefix_cache(reset_running_requests)

    def sleep(self, level: int = 1) -> None:
        """As the endpoint's, with nothing running."""
        self.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        self.reset_prefix_cache(reset_running_requests=True)
        self.model_executor.collective_rpc("sleep", kwargs={"level": level})
        self.sleeping_tags = {"weights", "kv_cache"}

    def wake_up(self, tags: list[str] | None = None) -> None:
        if set(tags or ()) - self.sleeping_tags:
            return  # vLLM warns
        self.model_executor.collective_rpc("wake_up", kwargs={"tags": tags})
        self.sleeping_tags -= set(tags or self.sleeping_tags)
        if not self.sleeping_tags:
            self.scheduler.set_pause_state(PauseState.UNPAUSED)

    def execute_dummy_batch(self) -> None:
        self.model_executor.collective_rpc("execute_dummy_batch")

    def step_with_batch_queue(self) -> tuple[list[tuple[str, int]], bool]:
        """Tokens by request, and whether the model ran for any."""
        model_executed = False
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self.batch_queue.appendleft((self.model_executor.execute_model(output, non_block=True), output))
            model_executed = True
            if len(self.batch_queue) < 2 and self.scheduler.has_requests():
                return [], model_executed
        elif not self.batch_queue:
            return [], False
        future, output = self.batch_queue.pop()
        tokens = future.result()
        return [(request, tokens[request]) for request in output], model_executed


class EngineCoreProc(EngineCore):
    def __init__(self, vllm_config: dict[str, Any], executor_class: Any, requests: Any, answers: Any) -> None:
        self.input_queue: queue.Queue[tuple[EngineCoreRequestType, Any]] = queue.Queue()
        self.output_queue: queue.Queue[tuple[int, EngineCoreOutputs]] = queue.Queue()
        self.requests, self.answers = requests, answers
        self.process_input_queue_block = True
        self._idle_state_callbacks: list[Callable[[], None]] = []
        self.engines_running = False
        self.coordinator, self.engine_index = vllm_config["coordinator"], vllm_config["dp_rank"]
        self.has_coordinator = self.coordinator is not None
        self._init_data_parallel(vllm_config)
        super().__init__(vllm_config, executor_class)
        threading.Thread(target=self.process_input_sockets, daemon=True).start()
        threading.Thread(target=self.process_output_sockets, daemon=True).start()
        pids = [h.proc.pid for h in getattr(self.model_executor, "workers", [])]
        answers.put({"engine": os.getpid(), "workers": pids or [os.getpid()]})

    @staticmethod
    def run_engine_core(*args: Any, **kwargs: Any) -> None:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # ends with the front, as long as a test runs
        if {"engine", f"engine{args[0]['dp_rank']}"} & {os.environ.get("FAKE_NO_PLUGIN")}:
            vllm.plugins.plugins_loaded = True
        together = args[0]["dp"] > 1
        engine_core = (DPEngineCoreProc if together else EngineCoreProc)(*args, **kwargs)
        engine_core.run_busy_loop()

    def _init_data_parallel(self, vllm_config: dict[str, Any]) -> None: ...

    def has_work(self) -> bool:
        return self.engines_running or self.scheduler.has_requests() or bool(self.batch_queue)

    def run_busy_loop(self) -> None:
        while True:
            self._process_input_queue()
            self._process_engine_step()

    def _process_input_queue(self) -> None:
        while not self.has_work():
            while self._idle_state_callbacks:
                self._idle_state_callbacks.pop()()
            req = self.input_queue.get(block=self.process_input_queue_block)
            self._handle_client_request(*req)
        while not self.input_queue.empty():
            req = self.input_queue.get_nowait()
            self._handle_client_request(*req)

    def _process_engine_step(self) -> bool:
        outputs, model_executed = self.step_with_batch_queue()
        for request, token in outputs:
            self.answers.put({"request": request, "token": token})
        return model_executed

    def _handle_client_request(self, request_type: EngineCoreRequestType, request: Any) -> None:
        if request_type == EngineCoreRequestType.WAKEUP:
            return
        if request_type == EngineCoreRequestType.ADD:
            self.add_request(*request)
        elif request_type == EngineCoreRequestType.UTILITY:
            answer = partial(self.answers.put, {"request": request, "token": 0})
            utility, _, tag = request.partition("=")
            result = getattr(self, utility)(*([[tag]] if tag else []))
            if isinstance(result, Future):
                result.add_done_callback(lambda _: answer())
            else:
                answer()
        elif request_type == EngineCoreRequestType.EXECUTOR_FAILED:
            raise RuntimeError("Executor failed.")

    def add_request(self, request: tuple[str, int], request_wave: int = 0) -> None:
        self.scheduler.add(*request)

    def process_input_sockets(self) -> None:
        while True:
            self.input_queue.put_nowait(self.requests.get())

    def process_output_sockets(self) -> None:
        """What is for the coordinator."""
        while True:
            client_index, outputs = self.output_queue.get()
            assert client_index == -1
            self.coordinator.put((self.engine_index, outputs))


class DPEngineCoreProc(EngineCoreProc):
    """One of several engines that step together."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.step_counter = 0
        self.current_wave = 0
        self.pending_pause = False
        self.ignore_start_dp_wave = False
        super().__init__(*args, **kwargs)

    def _init_data_parallel(self, vllm_config: dict[str, Any]) -> None:
        self.dp_rank = vllm_config["dp_rank"]
        self.dp_group = ProcessGroup(*vllm_config["dp_group"], self.dp_rank)

    def pause_scheduler(self) -> Future[None]:
        """As with mode "keep"."""
        self.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        self.pending_pause = True
        self.engines_running = True
        future: Future[None] = Future()
        self._idle_state_callbacks.append(lambda: future.set_result(None))
        return future

    def resume_scheduler(self) -> None:
        if self.pending_pause or (self.engines_running and self.ignore_start_dp_wave):
            raise RuntimeError("resume_scheduler called while pause is still in flight.")
        if self.engines_running:
            return
        self.scheduler.set_pause_state(PauseState.UNPAUSED)
        self.ignore_start_dp_wave = False
        if ParallelConfig.has_unfinished_dp(self.dp_group, self.scheduler.has_unfinished_requests()):
            self.engines_running = True

    def add_request(self, request: tuple[str, int], request_wave: int = 0) -> None:
        super().add_request(request, request_wave)
        if self.has_coordinator and request_wave != self.current_wave:
            if request_wave > self.current_wave:
                self.current_wave = request_wave
            elif not self.engines_running and self.scheduler.pause_state == PauseState.UNPAUSED:
                self.engines_running = True
                self.output_queue.put_nowait((-1, EngineCoreOutputs(start_wave=self.current_wave)))

    def _handle_client_request(self, request_type: EngineCoreRequestType, request: Any) -> None:
        if request_type == EngineCoreRequestType.START_DP_WAVE:
            if self.ignore_start_dp_wave:
                return
            new_wave, exclude_eng_index = request
            if exclude_eng_index != self.engine_index and new_wave >= self.current_wave:
                self.current_wave = new_wave
                if not self.engines_running:
                    self.engines_running = True
        else:
            super()._handle_client_request(request_type, request)

    def run_busy_loop(self) -> None:
        while True:
            self._process_input_queue()
            executed = self._process_engine_step()
            local_unfinished_reqs = self.scheduler.has_unfinished_requests()
            if not executed:
                if not local_unfinished_reqs and not self.engines_running:
                    continue
                self.execute_dummy_batch()
            self.engines_running = self._has_global_unfinished_reqs(local_unfinished_reqs)
            if not self.engines_running:
                if self.dp_rank == 0:
                    self.output_queue.put_nowait((-1, EngineCoreOutputs(wave_complete=self.current_wave)))
                self.current_wave += 1
                self.step_counter = 0

    def _has_global_unfinished_reqs(self, local_unfinished: bool) -> bool:
        self.step_counter += 1
        if self.step_counter % 32 != 0:
            return True
        parallel_config = ParallelConfig()  # older versions need none
        has_unfinished, pause_consensus = parallel_config.sync_dp_state(
            self.dp_group,
            has_unfinished=local_unfinished,
            pending_pause=self.pending_pause,
        )
        if pause_consensus:
            self.ignore_start_dp_wave = True
            self.pending_pause = False
        return has_unfinished


def start(context: Any, vllm_config: dict[str, Any], **together: Any) -> tuple[Any, Any, Any]:
    """An engine's process, and the queues to it and from it. *together*: what it shares with others that it steps with."""
    requests, answers = context.Queue(), context.Queue()
    vllm_config = {"dp": 1, "dp_rank": 0, "dp_group": None, "barrier": None, "coordinator": None, **vllm_config, **together}
    executor = EXECUTORS["mp" if vllm_config["tp"] > 1 else "uni"]
    process = context.Process(target=EngineCoreProc.run_engine_core, args=(vllm_config, executor, requests, answers), name="EngineCore")
    process.start()
    return process, requests, answers


def start_together(context: Any, dp: int, vllm_config: dict[str, Any]) -> tuple[list[tuple[Any, Any, Any]], Any]:
    """*dp* engines that step together, and what they share, to be kept; its "coordinator" is what that reads, None in offline inference."""
    tp, inbox = vllm_config["tp"], context.Queue() if vllm_config["coordinated"] else None
    group = context.Barrier(dp), context.Array("i", 2 * dp)
    shared = {"dp": dp, "dp_group": group, "barrier": context.Barrier(dp * tp), "coordinator": inbox}
    return [start(context, {**vllm_config, "first_gpu": i * tp}, dp_rank=i, **shared) for i in range(dp)], shared
