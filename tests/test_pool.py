"""Blocks of the pool: bytes leave and come back at the same addresses, and each block is always awake or asleep."""

from __future__ import annotations

import ctypes
import os
import threading
from functools import partial
from pathlib import Path

import pytest

from gpuckpt.inspect import host
from gpuckpt.model import HostRoom
from gpuckpt.pool.allocator import TAGS, NoGpuMemory, NoHostMemory, PoolError
from tests.pool_machine import GARBAGE, GRANULARITY, NOT_PERMITTED, OUT_OF_MEMORY, Gpu

MIB = 1 << 20
OFFLOAD = {"weights": "offload"}


@pytest.fixture
def gpu(tmp_path: Path) -> Gpu:
    return Gpu(tmp_path)


def filled(gpu: Gpu, tag: str, nbytes: int = GRANULARITY, device: int = 0) -> tuple[int, bytes]:
    address, content = gpu.malloc(tag, nbytes, device), os.urandom(nbytes)
    gpu.write(address, content)
    return address, content


# Sleep and wake.


def test_bytes_leave_and_come_back_at_the_same_address(gpu: Gpu) -> None:
    address, content = filled(gpu, "weights", 3 * GRANULARITY - 5)
    moved = gpu.pool.sleep(OFFLOAD)
    assert (moved.bytes_copied, moved.tags) == (3 * GRANULARITY, {"weights": 3 * GRANULARITY})
    assert gpu.held.used == (0, 0)
    assert [(s.tag, s.device, s.bytes, s.where) for s in gpu.pool.stats()] == [("weights", 0, 3 * GRANULARITY, "host")]
    gpu.pool.wake({"weights"})
    assert gpu.read(address, len(content)) == content
    assert gpu.held.used == (3 * GRANULARITY, 0)
    assert gpu.idle, "nothing stays registered, no stream, no handle"


def test_what_is_discarded_is_not_copied_and_comes_back_undefined(gpu: Gpu) -> None:
    address, _ = filled(gpu, "kv_cache")
    moved = gpu.pool.sleep({"kv_cache": "discard"})
    assert (moved.bytes_copied, moved.bytes_discarded) == (0, GRANULARITY)
    assert [(s.where, s.host_bytes) for s in gpu.pool.stats()] == [("discarded", 0)]
    gpu.pool.wake({"kv_cache"})
    assert gpu.read(address) == bytes([GARBAGE]) * GRANULARITY


@pytest.mark.parametrize("part", [0, 64 << 10, 96 << 10, 256 << 10, 768 << 10, 4 * MIB])
def test_several_threads_copy_pieces_of_blocks_of_all_sizes(gpu: Gpu, part: int) -> None:
    gpu.pool.tune(4, 2 * MIB, part)
    blocks = [filled(gpu, "weights", n * GRANULARITY) for n in (1, 7, 8, 9, 16, 35)]
    for _ in range(2):
        gpu.pool.sleep(OFFLOAD)
        gpu.pool.wake({"weights"})
        assert all(gpu.read(a, len(c)) == c for a, c in blocks)
    assert gpu.idle


def test_two_devices(gpu: Gpu) -> None:
    """Each block comes back on its own."""
    blocks = [filled(gpu, tag, GRANULARITY, device) for tag in ("weights", "runtime") for device in (0, 1, 1)]
    gpu.pool.sleep({"weights": "offload", "runtime": "offload"})
    assert gpu.held.used == (0, 0)
    gpu.pool.wake({"runtime"})
    assert gpu.held.used == (GRANULARITY, 2 * GRANULARITY)
    gpu.pool.wake({"weights", "runtime"})
    assert all(gpu.read(a) == c for a, c in blocks)
    assert [(s.tag, s.device, s.bytes) for s in gpu.pool.stats()] == [
        (tag, device, n * GRANULARITY) for tag in ("runtime", "weights") for device, n in ((0, 1), (1, 2))
    ]


def test_sleep_twice_and_wake_twice(gpu: Gpu) -> None:
    address, content = filled(gpu, "weights")
    gpu.pool.sleep(OFFLOAD)
    calls = gpu.fake.fake_calls()
    assert gpu.pool.sleep(OFFLOAD).tags == gpu.pool.sleep({"weights": "discard"}).tags == {}
    assert gpu.fake.fake_calls() == calls
    gpu.pool.wake({"weights"})
    assert gpu.pool.wake({"weights"}).tags == {}
    assert gpu.read(address) == content


def test_an_address_never_changes_and_is_nobody_elses_meanwhile(gpu: Gpu) -> None:
    first, content = filled(gpu, "weights")
    gpu.pool.sleep(OFFLOAD)
    second, other = filled(gpu, "weights")
    assert second != first
    gpu.pool.wake({"weights"})
    assert (gpu.read(first), gpu.read(second)) == (content, other)


def test_the_gpudirect_flag_is_set_where_the_card_can_and_left_out_where_the_machine_forbids_it(gpu: Gpu) -> None:
    """Case 52, as far as it goes without a card: the fake driver refuses memory without the flag."""
    gpu.fail_in("cuMemCreate", 1, NOT_PERMITTED)
    address, content = filled(gpu, "weights")
    assert gpu.failed == "cuMemCreate"
    gpu.pool.sleep(OFFLOAD)
    gpu.pool.wake({"weights"})
    assert gpu.read(address) == content


# Unchanged memory.


def test_unchanged_memory_is_not_copied_again(gpu: Gpu) -> None:
    gpu.pool.tune(2, 2 * MIB)
    address, content = filled(gpu, "weights", 6 * MIB)
    assert gpu.pool.sleep(OFFLOAD).bytes_copied == 6 * MIB
    gpu.pool.wake({"weights"})
    moved = gpu.pool.sleep(OFFLOAD)
    assert (moved.bytes_copied, moved.bytes_unchanged, moved.tags) == (0, 6 * MIB, {"weights": 6 * MIB})
    gpu.pool.wake({"weights"})
    content = content[: 3 * MIB] + b"another" + content[3 * MIB + 7 :]
    gpu.write(address, content)
    moved = gpu.pool.sleep(OFFLOAD)
    assert (moved.bytes_copied, moved.bytes_unchanged) == (2 * MIB, 4 * MIB), "the piece that changed"
    gpu.pool.wake({"weights"})
    assert gpu.read(address, 6 * MIB) == content


def test_swapped_blocks_are_seen(gpu: Gpu) -> None:
    blocks = [filled(gpu, "weights") for _ in range(3)]
    gpu.pool.sleep(OFFLOAD)
    gpu.pool.wake({"weights"})
    for n, (address, _) in enumerate(blocks):
        gpu.write(address, blocks[(n + 1) % 3][1])
    assert gpu.pool.sleep(OFFLOAD).bytes_copied == 3 * GRANULARITY
    gpu.pool.wake({"weights"})
    assert [gpu.read(a) for a, _ in blocks] == [blocks[(n + 1) % 3][1] for n in range(3)]


def test_what_was_discarded_or_trimmed_is_copied_anew(gpu: Gpu) -> None:
    address, content = filled(gpu, "weights")
    gpu.pool.sleep(OFFLOAD)
    gpu.pool.wake({"weights"})
    assert gpu.pool.trim() == GRANULARITY
    assert [s.host_bytes for s in gpu.pool.stats()] == [0]
    assert gpu.pool.sleep(OFFLOAD).bytes_copied == GRANULARITY
    gpu.pool.wake({"weights"})
    gpu.pool.sleep({"weights": "discard"})
    gpu.pool.wake({"weights"})
    gpu.write(address, content)
    assert gpu.pool.sleep(OFFLOAD).bytes_copied == GRANULARITY
    assert gpu.pool.trim() == 0, "the only copy is not given back"
    gpu.pool.wake({"weights"})
    assert gpu.read(address) == content


def test_a_copy_that_failed_is_not_taken_for_one(gpu: Gpu) -> None:
    """The old fingerprint must not vouch for what was overwritten in part."""
    gpu.pool.tune(1, 2 * MIB)
    address, content = filled(gpu, "weights", 6 * MIB)
    gpu.pool.sleep(OFFLOAD)
    gpu.pool.wake({"weights"})
    gpu.write(address, os.urandom(6 * MIB))
    gpu.fail_in("cuMemcpyDtoHAsync_v2", 2)
    with pytest.raises(PoolError):
        gpu.pool.sleep(OFFLOAD)
    gpu.write(address, content)  # as it was when the last whole copy was made
    assert gpu.pool.sleep(OFFLOAD).bytes_copied == 6 * MIB
    gpu.pool.wake({"weights"})
    assert gpu.read(address, 6 * MIB) == content


def test_without_a_kernel_everything_is_copied(gpu: Gpu) -> None:
    address, content = filled(gpu, "weights")
    for call in ("cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel"):
        gpu.fail_in(call)
        assert gpu.pool.sleep(OFFLOAD).bytes_copied == GRANULARITY
        assert gpu.failed == call
        gpu.pool.wake({"weights"})
        assert gpu.read(address) == content
    gpu.pool.sleep(OFFLOAD)
    gpu.pool.wake({"weights"})
    assert gpu.pool.sleep(OFFLOAD).bytes_copied == 0


# Short of memory.


def test_out_of_gpu_memory_in_mid_wake_and_again(gpu: Gpu) -> None:
    """Not a byte is lost: all sleeps that slept, and a retry succeeds."""
    blocks = [filled(gpu, "weights", n * GRANULARITY) for n in (1, 2, 3, 4)]
    gpu.pool.sleep(OFFLOAD)
    for room in range(10):
        gpu.capacity(room * GRANULARITY)
        with pytest.raises(NoGpuMemory, match=r"GPU 0 has no room for a block of .* All that slept sleeps"):
            gpu.pool.wake({"weights"})
        assert gpu.held.used == (0, 0)
        assert {s.where for s in gpu.pool.stats()} == {"host"}
    gpu.capacity(10 * GRANULARITY)
    gpu.pool.wake({"weights"})
    assert all(gpu.read(a, len(c)) == c for a, c in blocks)


def test_no_gpu_memory_for_what_a_sleep_copies_with(gpu: Gpu) -> None:
    address, content = filled(gpu, "weights")
    gpu.fail_in("cuStreamCreate", 2, OUT_OF_MEMORY)  # the first is for the fingerprints, which it can do without
    with pytest.raises(NoGpuMemory, match=r"no room for what copying takes \(cuStreamCreate\)\. What was awake is awake\..* sleep again"):
        gpu.pool.sleep(OFFLOAD)
    assert {s.where for s in gpu.pool.stats()} == {"gpu"}
    gpu.pool.sleep(OFFLOAD)
    gpu.pool.wake({"weights"})
    assert gpu.read(address) == content


def test_out_of_gpu_memory_in_an_allocation(gpu: Gpu) -> None:
    gpu.capacity(GRANULARITY)
    assert gpu.malloc("weights")
    assert gpu.malloc("weights") == 0, "torch frees its cache, and says that memory is out"
    assert gpu.held.reserved == 1


def test_host_memory_that_is_not_there_is_not_begun(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    address, content = filled(gpu, "weights", 4 * MIB)
    monkeypatch.setattr(host, "host_room", lambda _: HostRoom(2 * MIB, "memory.max of /pod"))
    calls = gpu.fake.fake_calls()
    with pytest.raises(NoHostMemory, match=r"0.00 GiB of host memory more.*memory.max of /pod"):
        gpu.pool.sleep(OFFLOAD)
    assert gpu.fake.fake_calls() == calls
    monkeypatch.undo()
    gpu.pool.sleep(OFFLOAD)
    gpu.pool.wake({"weights"})
    monkeypatch.setattr(host, "host_room", lambda _: HostRoom(0, "MemAvailable"))
    gpu.pool.sleep(OFFLOAD)  # its copy is there
    gpu.pool.wake({"weights"})
    assert gpu.read(address, len(content)) == content


def test_the_budget_of_its_run_bounds_what_a_process_holds(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that it has kept from an earlier sleep count; one more of these does not."""
    filled(gpu, "weights", MIB)
    gpu.pool.sleep(OFFLOAD)
    gpu.pool.wake({"weights"})
    other, content = filled(gpu, "weights", MIB)
    monkeypatch.setenv(host.BUDGET_VARIABLE, str(2 * MIB - 1))
    calls = gpu.fake.fake_calls()
    with pytest.raises(NoHostMemory, match=r"0\.00 GiB of host memory more, and beside the 0\.00 GiB that it holds .*GPUCKPT_HOST_BUDGET"):
        gpu.pool.sleep(OFFLOAD)
    assert {s.where for s in gpu.pool.stats()} == {"gpu"}
    assert (gpu.fake.fake_calls(), gpu.read(other, len(content))) == (calls, content)
    monkeypatch.setenv(host.BUDGET_VARIABLE, str(2 * MIB))
    gpu.pool.sleep(OFFLOAD)
    gpu.pool.wake({"weights"})
    monkeypatch.setenv(host.BUDGET_VARIABLE, "0")
    gpu.pool.sleep(OFFLOAD)


def test_memory_that_cannot_be_registered_is_copied_the_slow_way(gpu: Gpu) -> None:
    address, content = filled(gpu, "weights")
    gpu.fake.fake_register_limit(ctypes.c_size_t(0))
    assert gpu.pool.sleep(OFFLOAD).bytes_pageable == GRANULARITY
    assert gpu.pool.wake({"weights"}).bytes_pageable == GRANULARITY
    assert gpu.read(address) == content


# Freeing.


def test_free_while_asleep_frees_address_and_host_copy(gpu: Gpu) -> None:
    """And unmaps nothing a second time."""
    address, _ = filled(gpu, "weights")
    other, content = filled(gpu, "weights")
    gpu.pool.sleep(OFFLOAD)
    gpu.free(address)
    gpu.free(address)
    assert (gpu.held.reserved, gpu.held.mapped) == (1, 0)
    assert [(s.bytes, s.host_bytes) for s in gpu.pool.stats()] == [(GRANULARITY, GRANULARITY)]
    gpu.pool.wake({"weights"})
    assert gpu.read(other) == content
    gpu.free(other)
    assert gpu.nothing_held


def test_free_of_what_is_being_moved(gpu: Gpu) -> None:
    """At every driver call of a sleep and of a wake: the mover frees it when it is done."""
    for at in range(1, 60):
        blocks = [filled(gpu, "weights") for _ in range(3)]
        gpu.pool.sleep(OFFLOAD) if at % 2 else None
        called = gpu.hook_at(at // 2 + 1, partial(gpu.free, blocks[1][0]))
        gpu.pool.wake({"weights"}) if at % 2 else gpu.pool.sleep(OFFLOAD)
        gpu.unhook()
        gpu.pool.wake({"weights"})
        kept = [b for n, b in enumerate(blocks) if n != 1 or not called]
        assert all(gpu.read(a) == c for a, c in kept)
        for address, _ in kept:
            gpu.free(address)
        assert gpu.nothing_held


def test_allocations_during_a_sleep_stay_awake(gpu: Gpu) -> None:
    """At every driver call of it."""

    def allocate(into: list[tuple[int, bytes]]) -> None:
        into.append(filled(gpu, "weights"))

    for at in range(1, 30):
        first = filled(gpu, "weights")
        made: list[tuple[int, bytes]] = []
        gpu.hook_at(at, partial(allocate, made))
        gpu.pool.sleep(OFFLOAD)
        gpu.unhook()
        assert [gpu.read(a) == c for a, c in made] == [True] * len(made)
        gpu.pool.wake({"weights"})
        for address, content in (first, *made):
            assert gpu.read(address) == content
            gpu.free(address)
        assert gpu.nothing_held


def test_threads_that_allocate_and_free_while_another_moves(gpu: Gpu) -> None:
    stop, wrong = threading.Event(), []

    def churn(tag: str) -> None:
        while not stop.is_set():
            address, content = filled(gpu, tag)
            if gpu.read(address) != content:
                wrong.append(address)
            gpu.free(address)

    gpu.pool.slot("weights"), gpu.pool.slot("others")
    kept = [filled(gpu, "weights") for _ in range(4)]
    threads = [threading.Thread(target=churn, args=("others",)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(15):
        gpu.pool.sleep(OFFLOAD)
        gpu.pool.wake({"weights"})
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert all(gpu.read(a) == c for a, c in kept)
    for address, _ in kept:
        gpu.free(address)
    assert gpu.nothing_held


def test_frees_during_a_capture_wait_for_its_end(gpu: Gpu) -> None:
    """To wait for the GPU would break the capture."""
    address, _ = filled(gpu, "weights")
    gpu.pool.capturing(True)
    gpu.free(address)
    again = gpu.malloc("weights")
    assert gpu.held.mapped == 2
    assert gpu.pool.sleep({}).tags == {}, "what is freed does not sleep"
    gpu.pool.capturing(False)
    gpu.free(again)
    gpu.pool.sleep({})
    assert gpu.nothing_held
    assert gpu.pool.stats() == ()


def test_odd_calls(gpu: Gpu) -> None:
    assert gpu.malloc("weights", 0) == gpu.malloc("weights", GRANULARITY, 63) == gpu.malloc("weights", GRANULARITY, -1) == 0
    gpu.free(0)
    gpu.free(0xDEAD0000)
    many = [gpu.malloc("weights") for _ in range(200)]
    assert len(gpu.pool.rows()) == len(set(many)) == 200
    for n in range(TAGS - 1):
        gpu.pool.slot(f"tag_{'abcdefghijklmnop'[n]}")
    with pytest.raises(ValueError, match="has 16 at most"):
        gpu.pool.slot("one_more")
