"""One GPU: the worker is the engine's own process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from vllm.v1.worker import Worker


class UniProcExecutor:
    def __init__(self, vllm_config: dict[str, Any]) -> None:
        self.driver_worker = Worker(vllm_config, 0, vllm_config["barrier"])

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        single_value: bool = False,
    ) -> Any:
        func = getattr(self.driver_worker, method) if isinstance(method, str) else partial(method, self.driver_worker)
        result = func(*args, **(kwargs or {}))
        result = result if single_value else [result]
        if not non_block:
            return result
        future: Future[Any] = Future()
        future.set_result(result)
        return future

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        return self.collective_rpc("execute_model", args=(scheduler_output,), non_block=non_block, single_value=True)
