from __future__ import annotations

from dataclasses import dataclass
from typing import Any

HandleType = tuple[int, int, int, int]


@dataclass
class AllocationData:
    handle: HandleType
    tag: str
    cpu_backup_tensor: Any = None
    is_asleep: bool = False


def get_mem_allocator_instance() -> Any:
    from vllm.device_allocator.cumem import CuMemAllocator

    return CuMemAllocator.get_instance()
