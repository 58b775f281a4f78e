"""What data-parallel engines add up among themselves, and as much of torch as it takes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

COLLECTIVE_TIMEOUT_S = 30.0


@dataclass
class ProcessGroup:
    """Processes that meet at *barrier* with numbers in *slots*, two each."""

    barrier: Any
    slots: Any
    rank: int

    def size(self) -> int:
        return int(self.barrier.parties)


class Tensor(list[int]):
    def __getitem__(self, index: Any) -> Any:
        return SimpleNamespace(item=lambda: list(self)[index])


def all_reduce(tensor: Tensor, op: Any, group: ProcessGroup) -> None:
    for i, value in enumerate(list(tensor)):
        group.slots[2 * group.rank + i] = value
    group.barrier.wait(COLLECTIVE_TIMEOUT_S)
    tensor[:] = [op(group.slots[i::2]) for i in range(len(tensor))]
    group.barrier.wait(COLLECTIVE_TIMEOUT_S)


ReduceOp = SimpleNamespace(SUM=sum, MAX=max)
torch = SimpleNamespace(tensor=lambda data, dtype, device: Tensor(data), int32=None, distributed=SimpleNamespace(all_reduce=all_reduce))


class ParallelConfig:
    @staticmethod
    def has_unfinished_dp(dp_group: ProcessGroup, has_unfinished: bool) -> bool:
        tensor = torch.tensor([int(has_unfinished)], dtype=torch.int32, device="cpu")
        torch.distributed.all_reduce(tensor, op=ReduceOp.MAX, group=dp_group)
        return bool(tensor[0].item())

    @staticmethod
    def sync_dp_state(dp_group: ProcessGroup, has_unfinished: bool, pending_pause: bool) -> tuple[bool, bool]:
        tensor = torch.tensor([int(has_unfinished), int(pending_pause)], dtype=torch.int32, device="cpu")
        torch.distributed.all_reduce(tensor, op=ReduceOp.SUM, group=dp_group)
        dp_size = dp_group.size()
        pause_count = tensor[1].item()
        has_unfinished_global = tensor[0].item() > 0 or pause_count % dp_size != 0
        return has_unfinished_global, pause_count == dp_size


def cpu_all_reduce_(tensor: Tensor, group: ProcessGroup, timeout: object = None) -> Tensor:
    all_reduce(tensor, sum, group)
    return tensor


class Newer(ParallelConfig):
    """As of 0.33."""

    cpu_distributed_timeout = None

    def sync_dp_state(self, dp_group: ProcessGroup, has_unfinished: bool, pending_pause: bool) -> tuple[bool, bool]:  # type: ignore[override]
        tensor = torch.tensor([int(has_unfinished), int(pending_pause)], dtype=torch.int32, device="cpu")
        cpu_all_reduce_(tensor, dp_group, timeout=self.cpu_distributed_timeout)
        dp_size = dp_group.size()
        pause_count = tensor[1].item()
        has_unfinished_global = tensor[0].item() > 0 or pause_count % dp_size != 0
        return has_unfinished_global, pause_count == dp_size


if os.environ.get("FAKE_VLLM") == "newer":
    ParallelConfig = Newer  # type: ignore[misc]
