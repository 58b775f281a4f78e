"""Blocks of the pool: bytes leave and come back at the same addresses, and whatever fails leaves each block awake or asleep."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pool_machine import GARBAGE, GRANULARITY, Gpu


@pytest.fixture
def gpu(tmp_path: Path) -> Iterator[Gpu]:
    yield Gpu(tmp_path)


def test_bytes_leave_and_come_back_at_the_same_address(gpu: Gpu) -> None:
    content = os.urandom(3 * GRANULARITY)
    address = gpu.malloc("weights", len(content) - 5)
    gpu.write(address, content)
    moved = gpu.pool.sleep({"weights": "offload"})
    assert (moved.bytes_copied, moved.tags) == (len(content), {"weights": len(content)})
    assert gpu.held.used == (0, 0)
    assert [(s.tag, s.device, s.bytes, s.where) for s in gpu.pool.stats()] == [("weights", 0, len(content), "host")]
    gpu.pool.wake({"weights"})
    assert gpu.read(address, len(content)) == content
    assert gpu.held.used == (len(content), 0)
    assert (gpu.held.registered, gpu.held.streams, gpu.held.handles, gpu.held.contexts) == (0, 0, 0, 0)


def test_what_is_discarded_is_not_copied_and_comes_back_undefined(gpu: Gpu) -> None:
    address = gpu.malloc("kv_cache")
    gpu.write(address, bytes(GRANULARITY))
    moved = gpu.pool.sleep({"kv_cache": "discard"})
    assert (moved.bytes_copied, moved.bytes_discarded) == (0, GRANULARITY)
    assert [(s.where, s.host_bytes) for s in gpu.pool.stats()] == [("discarded", 0)]
    gpu.pool.wake({"kv_cache"})
    assert gpu.read(address) == bytes([GARBAGE]) * GRANULARITY
