"""Every driver call of a sleep and of a wake fails once: each block is then wholly awake or wholly asleep, and the call can be made again.

And random schedules of all that can be done with a pool, against a model, with contents checked.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuckpt.pool.allocator import PoolError
from tests.pool_machine import GRANULARITY, OUT_OF_MEMORY, UNKNOWN, Gpu

SCHEDULES, PARTS = int(os.environ.get("GPUCKPT_POOL_SCHEDULES", "10000")), 4
ACTIONS = {"weights": "offload", "runtime": "offload", "kv_cache": "discard"}
LEAKS = {"cuStreamDestroy_v2": "streams", "cuMemFreeHost": "pinned"}  # calls that give something back, and say that they have not


@dataclass
class Block:
    tag: str
    device: int
    content: bytes | None = None  # None: undefined
    where: str = "gpu"


@dataclass
class Model:
    """What a pool has to be like."""

    gpu: Gpu
    blocks: dict[int, Block] = field(default_factory=dict)

    def allocate(self, tag: str, device: int, chunks: int = 1) -> int:
        address = self.gpu.malloc(tag, chunks * GRANULARITY, device)
        if address:
            self.blocks[address] = Block(tag, device)
            self.write(address, os.urandom(64), chunks)
        return address

    def write(self, address: int, seed: bytes, chunks: int) -> None:
        content = seed * (chunks * GRANULARITY // len(seed))
        self.gpu.write(address, content)
        self.blocks[address].content = content

    def free(self, address: int) -> None:
        self.gpu.free(address)
        del self.blocks[address]

    def learn(self) -> None:
        """Where everything is now, as the pool says; what cannot have become of a block fails."""
        seen = {r.address: ("gpu", "host", "discarded")[r.where] for r in self.gpu.pool.rows()}
        assert set(seen) == set(self.blocks)
        for address, block in self.blocks.items():
            before, block.where = block.where, seen[address]
            assert block.where in (before, "gpu") or before == "gpu"
            if block.where == "discarded":
                block.content = None
        self.check()

    def check(self) -> None:
        """All that is awake is mapped, with its content; what is asleep holds no memory of the GPU."""
        for address, block in self.blocks.items():
            if block.where == "gpu" and block.content is not None:
                assert self.gpu.read(address, len(block.content)) == block.content

    def slept(self, actions: dict[str, str]) -> None:
        for block in self.blocks.values():
            if block.where == "gpu" and block.tag in actions:
                block.where = "host" if actions[block.tag] == "offload" else "discarded"
                block.content = block.content if block.where == "host" else None

    def awake(self, tags: set[str]) -> None:
        for block in self.blocks.values():
            if block.tag in tags:
                block.where = "gpu"

    def agrees(self) -> None:
        seen = {r.address: ("gpu", "host", "discarded")[r.where] for r in self.gpu.pool.rows()}
        assert seen == {address: block.where for address, block in self.blocks.items()}
        self.check()

    def on_gpu(self) -> int:
        return sum(1 for b in self.blocks.values() if b.where == "gpu")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Gpu:
    return Gpu(tmp_path_factory.mktemp("gpu"))


def first_sleep(model: Model) -> Callable[[], object]:
    return lambda: model.gpu.pool.sleep(ACTIONS)


def later_sleep(model: Model) -> Callable[[], object]:
    model.gpu.pool.sleep(ACTIONS)
    model.gpu.pool.wake(set(ACTIONS))
    for n, (address, block) in enumerate(model.blocks.items()):
        block.where = "gpu"
        if n % 2 or block.tag == "kv_cache":
            model.write(address, os.urandom(64), len(model.gpu.read(address)) // GRANULARITY)
    return lambda: model.gpu.pool.sleep(ACTIONS)


def wake(model: Model) -> Callable[[], object]:
    model.gpu.pool.sleep(ACTIONS)
    model.slept(ACTIONS)
    return lambda: model.gpu.pool.wake(set(ACTIONS))


@pytest.mark.parametrize(("begin", "code"), [(first_sleep, UNKNOWN), (later_sleep, UNKNOWN), (wake, UNKNOWN), (wake, OUT_OF_MEMORY)])
def test_an_error_in_every_driver_call(tmp_path: Path, begin: Callable[[Model], Callable[[], object]], code: int) -> None:
    gpu = Gpu(tmp_path)
    gpu.pool.tune(1, 2 << 20)
    failed: list[str] = []
    refused = 0
    leaked = dict.fromkeys(LEAKS.values(), 0)
    for nth in range(1, 1000):
        model = Model(gpu)
        for tag, device, chunks in (("weights", 0, 9), ("runtime", 0, 1), ("weights", 1, 1), ("kv_cache", 1, 1)):
            model.allocate(tag, device, chunks)
        call = begin(model)
        gpu.fail(nth, code)
        try:
            call()
        except PoolError:
            refused += 1
        which = gpu.failed
        gpu.fail(0)
        if not which:
            break
        failed.append(which)
        if which in LEAKS:
            leaked[LEAKS[which]] += 1
        assert gpu.held.contexts == 0
        model.learn()
        call()  # once more, and it succeeds
        if begin is wake:
            model.awake(set(ACTIONS))
        else:
            model.slept(ACTIONS)
            model.agrees()
            assert gpu.held.used == (0, 0)
            gpu.pool.wake(set(ACTIONS))
            model.awake(set(ACTIONS))
        model.agrees()
        for address in list(model.blocks):
            model.free(address)
        held = gpu.held
        assert {"streams": held.streams, "pinned": held.pinned} == leaked
        assert (held.handles, held.reserved, held.mapped, held.registered, held.used) == (0, 0, 0, 0, (0, 0)), failed[-1]
    else:
        pytest.fail("it makes calls without end")
    assert refused > 10
    wanted = (
        {"cuMemSetAccess", "cuMemCreate", "cuMemMap", "cuMemRelease"}
        if begin is wake
        else {"cuMemUnmap", "cuCtxSynchronize", "cuLaunchKernel"}
    )
    assert wanted | {"cuMemHostRegister_v2", "cuMemHostUnregister", "cuStreamSynchronize", "cuStreamCreate"} <= set(failed)


KINDS: list[list[tuple[str, object, object]]] = [
    [("allocate", tag, device) for tag in sorted(ACTIONS) for device in (0, 1)],
    [("free", n, None) for n in range(8)],
    [("write", n, bytes([seed, 7 * seed])) for n in range(8) for seed in range(30)],
    [
        ("sleep", {tag: action for tag, action in zip(sorted(ACTIONS), actions, strict=True) if action}, None)
        for actions in itertools.product(["", "offload", "discard"], repeat=len(ACTIONS))
    ],
    [("wake", set(tags), None) for n in range(len(ACTIONS) + 1) for tags in itertools.combinations(sorted(ACTIONS), n)],
    [("trim", None, None)],
    [("fail", nth, code) for nth in range(1, 61) for code in (OUT_OF_MEMORY, UNKNOWN)],
    [("room", blocks, None) for blocks in range(5)],
]
MOST = max(map(len, KINDS))
#: Each kind is as likely as any other. One number a step: to draw several takes longer than to play it.
step = st.integers(0, len(KINDS) * MOST - 1).map(lambda n: (kind := KINDS[n // MOST])[n % MOST % len(kind)])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(PARTS))  # side by side
@settings(max_examples=SCHEDULES // PARTS, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(step, min_size=4, max_size=30))
def test_random_schedules(shared: Gpu, part: int, steps: list[tuple[str, object, object]]) -> None:
    """No schedule ends the process, loses a byte, or leaves a block between awake and asleep."""
    del part
    gpu, model = shared, Model(shared)
    gpu.capacity(1 << 40)
    for row in gpu.pool.rows():  # of a schedule that failed
        gpu.free(row.address)
    for what, a, b in steps:
        try:
            play(model, what, a, b)
        except PoolError:
            model.learn()
        model.agrees()
    gpu.fail(0)
    gpu.capacity(1 << 40)
    gpu.pool.wake(set(ACTIONS))
    model.awake(set(ACTIONS))
    model.agrees()
    for address in list(model.blocks):
        model.free(address)
    gpu.pool.trim()
    assert gpu.held.contexts == gpu.held.registered == gpu.held.handles == 0
    assert (gpu.held.reserved, gpu.held.mapped, gpu.held.used) == (0, 0, (0, 0))


def play(model: Model, what: str, a: object, b: object) -> None:
    gpu, addresses = model.gpu, list(model.blocks)
    match what, a, b:
        case "allocate", str(tag), int(device):
            model.allocate(tag, device)
        case "free", int(n), _ if addresses:
            model.free(addresses[n % len(addresses)])
        case "write", int(n), bytes(seed) if addresses and model.blocks[addresses[n % len(addresses)]].where == "gpu":
            model.write(addresses[n % len(addresses)], seed, 1)
        case "sleep", dict(actions), _:
            gpu.pool.sleep(actions)
            model.slept(actions)
        case "wake", set(tags), _:
            gpu.pool.wake(tags)
            model.awake(tags)
        case "trim", _, _:
            gpu.pool.trim()
        case "fail", int(nth), int(code):
            gpu.fail(nth, code)
        case "room", int(blocks), _:
            gpu.capacity(blocks * GRANULARITY)
