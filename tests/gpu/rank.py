"""One rank of a torch.distributed job with an agent: eager and graph-captured sums on its groups. Answers lines on stdin.

``RANK_GROUPS`` names them: world, new, split (of all ranks each), and from four ranks on rows and columns.
"""

from __future__ import annotations

import json
import os
import select
import sys

import torch
import torch.distributed as dist

import gpuckpt.agent

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(rank)
if os.environ.get("RANK_STRAY"):  # a context on a GPU that is another rank's, as programs have by mistake
    torch.zeros(1, device=f"cuda:{(rank + 1) % size}")
dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", rank))  # so new groups are split from the default one
kinds = os.environ.get("RANK_GROUPS", "world,new,split").split(",")
made = {
    "world": lambda: dist.group.WORLD,
    "new": lambda: dist.new_group(list(range(size)), backend="nccl"),
    "split": lambda: dist.split_group(dist.group.WORLD, [list(range(size))]),
    # of a square of ranks, two to a row
    "rows": lambda: dist.new_subgroups_by_enumeration([[i, i + 1] for i in range(0, size, 2)], backend="nccl")[0],
    "columns": lambda: dist.new_subgroups_by_enumeration([list(range(c, size, 2)) for c in (0, 1)], backend="nccl")[0],
}
groups = [made[kind]() for kind in kinds]
x = torch.arange(1 << 22, device="cuda", dtype=torch.float32) % 1000 * (rank + 1)
weights = torch.randint(0, 2**31 - 1, (1 << 26,), device="cuda", dtype=torch.int32)  # 256 MiB: each GiB costs a cycle a second
buffers = [torch.zeros_like(x) for _ in groups]
for g, y in zip(groups, buffers, strict=True):
    for _ in range(3):
        y.copy_(x)
        dist.all_reduce(y, group=g)
torch.cuda.synchronize()
small, out = torch.ones(1024, device="cuda") * (rank + 1), torch.zeros(1024, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out.copy_(small)
    dist.all_reduce(out)
    out.mul_(2)


def check() -> dict[str, object]:
    sums = []
    for g, y in zip(groups, buffers, strict=True):
        y.copy_(x)
        dist.all_reduce(y, group=g)
        torch.cuda.synchronize()
        sums.append(float(y.double().sum().item()))
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    return {"pid": os.getpid(), "groups": kinds, "sums": sums, "graph": float(out.sum().item()), "weights": int(weights.sum(dtype=torch.int64).item())}


gpuckpt.agent.install()
print(json.dumps(check()), flush=True)
while True:
    while not select.select([sys.stdin], [], [], 0.02)[0]:
        gpuckpt.agent.checkpoint_here()
    line = sys.stdin.readline()
    if not line:
        os._exit(0)
    print(json.dumps(check()), flush=True)
