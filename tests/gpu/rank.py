"""One rank of a torch.distributed job with an agent: eager and graph-captured sums on three groups. Answers lines on stdin."""

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
bound = {} if os.environ.get("RANK_UNBOUND") else {"device_id": torch.device("cuda", rank)}  # bound: new groups are split from the default one
dist.init_process_group("cpu:gloo,cuda:nccl", **bound)
kinds = os.environ.get("RANK_GROUPS", "world").split(",")
made = {
    "world": lambda: dist.group.WORLD,
    "new": lambda: dist.new_group(list(range(size)), backend="nccl"),
    "split": lambda: dist.split_group(dist.group.WORLD, [list(range(size))]),
}
groups = [made[kind]() for kind in kinds]
x = torch.arange(1 << 22, device="cuda", dtype=torch.float32) % 1000 * (rank + 1)
weights = torch.randint(0, 2**31 - 1, (1 << 26,), device="cuda", dtype=torch.int32)  # 256 MiB: each GiB costs a cycle a second
buffers = [torch.zeros_like(x) for _ in groups]
for g, y in zip(groups, buffers, strict=True):
    for _ in range(3):
        y.copy_(x)
        dist.all_reduce(y, group=g)
    for count in (1 << 10, 1 << 20) if os.environ.get("RANK_WARM") else ():  # the shapes of the proof after a resume
        dist.all_reduce(torch.ones(count, device="cuda", dtype=torch.int64), group=g)
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


if os.environ.get("RANK_SEVERAL"):  # what several communicators do is refused: to find out why they break
    import gpuckpt.nccl.hazards

    gpuckpt.nccl.hazards.several = lambda _: []
gpuckpt.agent.install()
print(json.dumps(check()), flush=True)
while True:
    while not select.select([sys.stdin], [], [], 0.02)[0]:
        gpuckpt.agent.checkpoint_here()
    line = sys.stdin.readline()
    if not line:
        os._exit(0)
    if line.strip() == "comms":  # down and up again without the driver
        from gpuckpt.nccl import suspend
        from gpuckpt.nccl.communicators import listing

        torch.cuda.synchronize()
        down = listing().communicators[:: -1 if os.environ.get("RANK_LIFO") else 1]
        suspend.suspend(down).raise_for_error()
        if os.environ.get("RANK_SCRIBBLE"):  # what NCCL gets back was somebody's in between
            torch.full((20 << 28,), -1, device="cuda", dtype=torch.int32)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        suspend.resume(down[::-1] if os.environ.get("RANK_LIFO") else down).raise_for_error()
    print(json.dumps(check()), flush=True)
