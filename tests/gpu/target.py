"""A torch process with known content: answers lines on stdin. usage: target.py GIB [MODE] [GPU]"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

gib, mode = float(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "plain"
torch.cuda.set_device(int(sys.argv[3]) if len(sys.argv) > 3 else 0)
generator = torch.Generator(device="cuda")
generator.manual_seed(7)
left = int(gib * (1 << 30)) // 4
chunks = []
saver, region = None, contextlib.nullcontext()
capture: Any = torch.cuda.graph
if mode.startswith("saver"):  # what torch_memory_saver can move: what is allocated in its region
    from torch_memory_saver import torch_memory_saver as saver

    saver.hook_mode = "torch"
    region = saver.region(enable_cpu_backup=True)
if mode == "pool":  # all of it in gpuckpt's pool, and an agent that lets it go
    import gpuckpt.agent
    import gpuckpt.pool

    region = gpuckpt.pool.tag("weights")

    def capture(graph: torch.cuda.CUDAGraph, **_: object) -> Any:
        return gpuckpt.pool.cuda_graph(graph)


with region:
    while left > 0:
        n = min(left, 1 << 28)
        chunks.append(torch.randint(0, 2**31 - 1, (n,), device="cuda", dtype=torch.int32, generator=generator))
        left -= n
if mode == "both":  # as much on the second GPU
    chunks += [t.to("cuda:1") for t in chunks]
graphs, outputs, streams, keep = [], [], [torch.cuda.Stream() for _ in range(4)], []
if mode.startswith("graphs="):  # so many, of ten nodes each
    y = torch.randn(1024, device="cuda", generator=generator)
    for _ in range(int(mode.partition("=")[2])):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=graphs[0].pool() if graphs else None):
            z = y
            for _ in range(10):
                z = torch.sin(z)
        graphs.append(graph)
        outputs.append(z)
if mode in ("full", "graphs", "saver", "pool"):
    x = torch.randn(64, 1024, device="cuda", generator=generator)
    ws = [torch.randn(1024, 1024, device="cuda", generator=generator) / 32 for _ in range(32)]
    with torch.cuda.stream(streams[0]):
        y = torch.relu(x @ ws[0])
    torch.cuda.synchronize()
    pool = torch.cuda.graph_pool_handle()  # one for all: with a pool of its own each graph takes 160 MiB
    for i in range(64):
        graph = torch.cuda.CUDAGraph()
        with capture(graph, pool=pool):
            y = x
            for k in range(100):  # 200 nodes; the driver takes about 0.4 MiB for each
                y = torch.relu(y @ ws[(i + k) % 32])
        graphs.append(graph)
        outputs.append(y)
    keep.append(torch.randint(0, 1000, (1 << 26,), dtype=torch.int32).pin_memory())
rt = ctypes.CDLL("libcudart.so.13")
if mode == "managed":
    p = ctypes.c_void_p()
    assert rt.cudaMallocManaged(ctypes.byref(p), ctypes.c_size_t(1 << 24), 1) == 0
if mode == "exported":
    from cuda.bindings import driver as cu

    prop = cu.CUmemAllocationProp()
    prop.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    prop.requestedHandleTypes = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    error, handle = cu.cuMemCreate(1 << 30, prop, 0)
    assert int(error) == 0, error
    keep.append(cu.cuMemExportToShareableHandle(handle, cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0))
if mode == "work":
    a = torch.randn(8192, 8192, device="cuda")


def check() -> dict[str, object]:
    total = 0
    for i, t in enumerate(chunks):
        with torch.cuda.stream(streams[i % 4]):
            total = (total * 1000003 + int(t.sum(dtype=torch.int64).item())) % (1 << 61)
    replay = 0
    for graph, y in zip(graphs, outputs, strict=True):
        graph.replay()
        torch.cuda.synchronize()
        replay = (replay * 31 + int(y.view(torch.int32).to(torch.int64).sum().item())) % (1 << 61)
    if graphs and keep:
        replay = (replay + int(keep[0].sum().item()) + int(keep[0].cuda().sum().item())) % (1 << 61)
    return {"pid": os.getpid(), "sum": total, "replay": replay}


def lines() -> Iterator[str]:
    """What it is asked; while it waits it is at its safe point, where it has an agent."""
    if mode == "pool":
        gpuckpt.agent.install()
    while True:
        while mode == "pool" and not select.select([sys.stdin], [], [], 0.005)[0]:
            gpuckpt.agent.checkpoint_here()
        line = sys.stdin.readline()
        if not line:
            return
        yield line


print(json.dumps(check()), flush=True)
for line in lines():
    match line.split():
        case ["check"]:
            print(json.dumps(check()), flush=True)
        case ["step"]:
            for t in chunks:
                t.add_(1)
            print(json.dumps(check()), flush=True)
        case ["busy", n]:
            for _ in range(int(n)):
                b = a @ a
            print(json.dumps({"busy": n}), flush=True)
        case ["pause" | "resume" as what]:
            begun = time.perf_counter()
            getattr(saver, what)()
            torch.cuda.synchronize()
            print(json.dumps({"seconds": time.perf_counter() - begun}), flush=True)
        case ["free_all"]:
            chunks.clear()
            torch.cuda.empty_cache()
            print(json.dumps({"free": True}), flush=True)
