"""The processes of pool.py: one with weights, kv_cache and runtime tags and CUDA graphs, which answers lines on stdin; and those that end asleep."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from typing import Any

MIB = 1 << 20


def target(gib: float) -> None:
    import torch

    import gpuckpt.pool as pool

    torch.cuda.set_device(0)
    generator = torch.Generator(device="cuda")

    def ints(nbytes: float, seed: int) -> list[Any]:
        generator.manual_seed(seed)
        left, made = int(nbytes) // 4, []
        while left > 0:
            n = min(left, 1 << 27)
            made.append(torch.randint(0, 2**31 - 1, (n,), device="cuda", dtype=torch.int32, generator=generator))
            left -= n
        return made

    total = gib * (1 << 30)
    with pool.tag("weights"):
        weights = ints(total * 0.65, 1)
        generator.manual_seed(2)
        layers = [torch.randn(1024, 1024, device="cuda", generator=generator) / 32 for _ in range(16)]
    with pool.tag("kv_cache"):
        cache = ints(total * 0.25, 3)
    with pool.tag("runtime"):
        runtime = ints(total * 0.1, 4)
        x = torch.randn(64, 1024, device="cuda", generator=generator)
    with pool.tag("cudagraph"):
        constant = torch.randn(64, 1024, device="cuda", generator=generator)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.relu(x @ layers[0])
    torch.cuda.synchronize()
    graphs, outputs = [], []
    for i in range(16):
        graph = torch.cuda.CUDAGraph()
        with pool.cuda_graph(graph):
            y = x
            for k in range(50):
                y = torch.relu(y @ layers[(i + k) % 16]) + constant
        graphs.append(graph)
        outputs.append(y)
    flipped = False
    many: list[Any] = []

    def weigh(tensors: list[Any]) -> int:
        """Depends on each word and its place."""
        found = 0
        for t in tensors:
            for at in range(0, t.numel(), 1 << 25):
                part = t[at : at + (1 << 25)].to(torch.int64)
                places = torch.arange(1, part.numel() + 1, device="cuda", dtype=torch.int64)
                found = (found * 1000003 + int((part * places).sum().item())) % (1 << 61)
        return found

    def check() -> dict[str, Any]:
        sums = {"weights": weigh(weights), "runtime": weigh(runtime)}
        replay = 0
        for graph, y in zip(graphs, outputs, strict=True):
            graph.replay()
            torch.cuda.synchronize()
            replay = (replay * 31 + int(y.view(torch.int32).to(torch.int64).sum().item())) % (1 << 61)
        return {"pid": os.getpid(), "sum": sums, "replay": replay, "flipped": flipped}

    def timed(call: Any) -> dict[str, Any]:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        moved = call()
        seconds = time.perf_counter() - begun
        words = {k: getattr(moved, k) for k in ("bytes_copied", "bytes_discarded", "bytes_unchanged", "bytes_pageable", "tags")}
        phases = {k: round(v, 5) for k, v in moved.phases.items()}
        return {"seconds": round(seconds, 5), **words, "phases": phases, "gib_s": round(moved.bytes_copied / (1 << 30) / seconds, 2)}

    def limit() -> dict[str, float]:
        """The pinned copy, each way, GiB/s."""
        host = torch.empty(2 << 30, dtype=torch.uint8, pin_memory=True)
        device = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
        found = {}
        for name, to, source in (("down", host, device), ("up", device, host)):
            to.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for _ in range(4):
                to.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            found[name] = round(8 / (time.perf_counter() - begun), 2)
        del host, device
        torch._C._host_emptyCache()
        torch.cuda.empty_cache()
        return found

    def fingerprint() -> dict[str, Any]:
        """Whether the kernel computes what is defined, and how fast it is."""
        import ctypes

        from gpuckpt.pool.fingerprint import CHUNK_BYTES, Keys, fingerprints

        assert pool._tags is not None
        c = ctypes.CDLL(str(pool._tags.allocator.path))
        keys = Keys(os.urandom(Keys.SIZE))

        def printed(address: int, nbytes: int) -> list[tuple[int, int]]:
            out = (ctypes.c_uint64 * (nbytes // CHUNK_BYTES * 2))()
            assert c.gpuckpt_pool_fingerprint(ctypes.c_uint64(address), ctypes.c_size_t(nbytes), 0, None, out), "no fingerprint"
            return list(zip(out[::2], out[1::2]))

        rows = sorted((r.nbytes, r.address) for r in pool._tags.allocator.rows() if r.where == 0)
        nbytes, address = rows[-1]
        begun = time.perf_counter()
        printed(address, nbytes)
        first_s = time.perf_counter() - begun
        begun = time.perf_counter()
        printed(address, nbytes)
        again_s = time.perf_counter() - begun
        out = (ctypes.c_uint64 * 8)()
        block = torch.randint(-(2**31), 2**31 - 1, (CHUNK_BYTES,), device="cuda", dtype=torch.int32, generator=generator)
        copy = block.cpu()
        torch.cuda.synchronize()
        assert c.gpuckpt_pool_fingerprint(ctypes.c_uint64(block.data_ptr()), ctypes.c_size_t(4 * CHUNK_BYTES), 0, keys.random, out), "no fingerprint"
        defined = fingerprints(ctypes.string_at(copy.data_ptr(), 4 * CHUNK_BYTES), keys)
        return {
            "as_defined": list(zip(out[::2], out[1::2])) == defined,
            "first_s": round(first_s, 4),
            "again_s": round(again_s, 5),
            "gib": round(nbytes / (1 << 30), 2),
            "gib_s": round(nbytes / (1 << 30) / again_s),
        }

    def act(words: list[str]) -> Any:
        nonlocal flipped
        match words:
            case ["check"]:
                return check()
            case ["limit"]:
                return limit()
            case ["sleep", level]:
                return timed(lambda: pool.sleep(int(level)))
            case ["wake", *tags]:
                return timed(lambda: pool.wake(tags or None))
            case ["flip"]:
                for t in weights + runtime:
                    t.bitwise_xor_(0x5A5A5A5A)
                torch.cuda.synchronize()
                flipped = not flipped
                return {"flipped": flipped}
            case ["flip_some"]:
                weights[0][12345] ^= 1
                torch.cuda.synchronize()
                return {}
            case ["reload"]:
                generator.manual_seed(1)
                for t in weights:
                    t.random_(0, 2**31 - 1, generator=generator)
                generator.manual_seed(2)
                for layer in layers:
                    layer.copy_(torch.randn(1024, 1024, device="cuda", generator=generator) / 32)
                torch.cuda.synchronize()
                return {}
            case ["addresses"]:
                return [t.data_ptr() for t in (*weights, *cache, *runtime, *layers, x, constant, *outputs)]
            case ["stats"]:
                return [[s.tag, s.bytes, s.where, s.host_bytes] for s in pool.stats()]
            case ["many", count]:
                with pool.tag("many"):
                    many.extend(torch.ones(20 << 18, device="cuda", dtype=torch.int32) for _ in range(int(count)))
                return {"blocks": len(many)}
            case ["few"]:
                same = all(int(t.sum().item()) == 20 << 18 for t in many)
                many.clear()
                torch.cuda.empty_cache()
                return {"same": same}
            case ["fingerprint"]:
                return fingerprint()
            case ["blocks"]:
                sizes = [r.nbytes for r in pool._tags.allocator.rows()]  # type: ignore[union-attr]
                return {"count": len(sizes), "smallest": min(sizes), "largest": max(sizes)}
            case ["trim"]:
                return pool.trim()
            case ["tune", *figures]:
                pool._tags.allocator.tune(*map(int, figures))  # type: ignore[union-attr]
                return {}
        return {"error": f"no command {words}"}

    print(json.dumps(check()), flush=True)
    for line in sys.stdin:
        try:
            answer = act(line.split())
        except Exception as error:  # reported, and the next command may still work
            answer = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-1500:]}
        print(json.dumps(answer), flush=True)


def ending(how: str) -> None:
    """A small process with a live graph that ends, or errs, while it sleeps."""
    import torch

    import gpuckpt.pool as pool

    with pool.tag("weights"):
        weights = torch.ones(1 << 24, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with pool.cuda_graph(graph):
        y = weights * 2
    graph.replay()
    torch.cuda.synchronize()
    found: dict[str, Any] = {"replay": float(y.sum().item())}
    if how == "flags":
        from cuda.bindings import driver as cu

        error, handle = cu.cuMemRetainAllocationHandle(weights.data_ptr())
        error2, properties = cu.cuMemGetAllocationPropertiesFromHandle(handle)
        found |= {"errors": [str(error), str(error2)], "gpudirect": int(properties.allocFlags.gpuDirectRDMACapable)}
        cu.cuMemRelease(handle)
        error, fd = cu.cuMemGetHandleForAddressRange(
            weights.data_ptr(), 2 << 20, cu.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0
        )
        found["dma_buf"] = str(error)
    pool.sleep()
    if how == "write":
        try:
            pool.copy_(weights, y)
        except pool.PoolError as error:
            found["ours"] = str(error)
        try:
            weights.copy_(torch.zeros(1 << 24, device="cuda"))
            torch.cuda.synchronize()
        except RuntimeError as error:
            found["plain_torch"] = str(error).splitlines()[0]
        try:
            weights.add_(1)
            torch.cuda.synchronize()
        except RuntimeError as error:
            found["kernel"] = str(error).splitlines()[0]
    print(json.dumps(found), flush=True)
    match how:
        case "exit":
            sys.exit(7)
        case "_exit":
            os._exit(3)
        case "exception":
            raise ValueError("on purpose")
        case "sigterm":
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()


if __name__ == "__main__":
    if sys.argv[1] == "--ending":
        ending(sys.argv[2])
    else:
        target(float(sys.argv[1]))
