from __future__ import annotations

from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

EXECUTORS = {"mp": MultiprocExecutor, "uni": UniProcExecutor}
