"""A small real CUDA program for ``gpuckpt demo``: holds GPU memory with known content, through the driver API alone (no torch)."""

from __future__ import annotations

import argparse
import json
import os
import sys
import zlib
from typing import Any

from cuda.bindings import driver as cu


def must(result: tuple[Any, ...]) -> Any:
    """The value of a driver call, or an exit that names the error."""
    code, *values = result
    if int(code) != 0:
        raise SystemExit(f"CUDA: {code}")
    return values[0] if values else None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=4.0)
    nbytes = int(parser.parse_args().gib * (1 << 30)) // 4 * 4
    must(cu.cuInit(0))
    context = must(cu.cuDevicePrimaryCtxRetain(must(cu.cuDeviceGet(0))))
    must(cu.cuCtxSetCurrent(context))
    block = must(cu.cuMemAlloc(nbytes))
    must(cu.cuMemsetD32(block, 0x9E3779B9, nbytes // 4))
    chunk = os.urandom(1 << 20)
    for offset in range(0, nbytes - len(chunk), 64 << 20):  # something of its own in every 64 MiB
        must(cu.cuMemcpyHtoD(int(block) + offset, chunk, len(chunk)))
    must(cu.cuCtxSynchronize())

    def answer() -> dict[str, Any]:
        total, host = 0, bytearray(64 << 20)
        for offset in range(0, nbytes, len(host)):
            n = min(len(host), nbytes - offset)
            must(cu.cuMemcpyDtoH(host, int(block) + offset, n))
            total = zlib.crc32(memoryview(host)[:n], total)
        return {"pid": os.getpid(), "sum": f"{total:08x}"}

    print(json.dumps({"ready": True, **answer()}), flush=True)
    for _ in sys.stdin:
        print(json.dumps(answer()), flush=True)


if __name__ == "__main__":
    main()
