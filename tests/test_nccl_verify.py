"""A communicator that does not work after its resume is found, within the deadline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., Any]

BEGIN = """
from gpuckpt.errors import GpuckptError
from gpuckpt.nccl.verify import TorchDevice, torch_device, verify
new = opened("new/libnccl.so.2")
comms = [communicator(new, name, rank=i, size=4, device=i) for i, name in enumerate("abc")]
def tried(device=HostDevice, deadline_s=20.0, counts=(8, 64)):
    try:
        verify(comms, deadline_s, device, counts)
        return "works"
    except GpuckptError as error:
        return [error.code, error.message]
"""


@pytest.fixture
def run(nccl_run: Run) -> Run:
    return lambda code, **environ: nccl_run(BEGIN + code, **environ)


def test_all_work(run: Run) -> None:
    out = run("""
devices = []
def device(index):
    devices.append(index)
    return HostDevice(index, slow_s=0.01)
out = [tried(device), devices, calls()]
""")
    assert out == ["works", [0, 1, 2], [f"libnccl.so.2 ncclAllReduce {n}" for n in "aabbcc"]]


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"FAKE_NCCL_WRONG": "b"}, "1 of 8 sums"),
        ({"FAKE_NCCL_ncclAllReduce_b": "6"}, "ncclRemoteError"),
        ({"FAKE_NCCL_ASYNC_b": "6"}, "ncclRemoteError"),
    ],
)
def test_one_that_does_not(run: Run, environ: dict[str, str], words: str) -> None:
    out = run("""out = tried(lambda index: HostDevice(index, slow_s=0.01))""", **environ)
    assert out[0] == "communicator-broken"
    assert "registered:b (rank 1 of 4)" in out[1]
    assert words in out[1]


def test_still_suspended_is_found(run: Run) -> None:
    out = run("""
comms[0].library.suspend(comms[0].pointer)
out = tried()
""")
    assert out[0] == "communicator-broken"
    assert "registered:a" in out[1]


@pytest.mark.parametrize("environ", [{}, {"FAKE_NCCL_HANG": "a"}])
def test_the_deadline_holds_whether_the_gpu_or_the_call_hangs(run: Run, environ: dict[str, str]) -> None:
    out = run(
        """
begun = time.monotonic()
out = [tried(lambda index: HostDevice(index, slow_s=60), deadline_s=0.2), time.monotonic() - begun < 15]
""",
        **environ,
    )
    (code, message), in_time = out
    assert code == "communicator-broken"
    assert "within 0.2 s" in message
    assert in_time


def test_what_cuda_reports_is_passed_on(run: Run) -> None:
    out = run("""out = tried(lambda index: HostDevice(index, fault="an illegal memory access was encountered"))""")
    assert out[0] == "communicator-broken"
    assert "illegal memory access" in out[1]


def test_none_to_verify(run: Run) -> None:
    assert run("""comms = []; out = tried()""") == "works"


def test_without_torch_it_says_so(run: Run) -> None:
    out = run("""out = tried(device=None)""")
    assert out[0] == "communicator-broken"
    assert "torch is not imported" in out[1]


def test_torch_s_calls(run: Run) -> None:
    """The device of torch, on a fake of it: which calls it makes, with the stream's device current before it is entered."""
    out = run("""
said = []
class Tensor:
    def __init__(self, n, values): self.shape, self.values = (n,), values
    def __mul__(self, factor): return Tensor(*self.shape, [v * factor for v in self.values])
    def __ne__(self, other): return Tensor(*self.shape, [x != y for x, y in zip(self.values, other.values)])
    def sum(self): return Tensor(1, [sum(self.values)])
    def item(self): return self.values[0]
    def data_ptr(self): return 4096
class Stream:
    cuda_stream = 77
    def __init__(self, device): said.append(["stream", device])
    def query(self): return True
class Current:
    def __init__(self, what): self.what = what if isinstance(what, str) else "its stream"
    def __enter__(self): said.append(f"enter {self.what}")
    def __exit__(self, *_): said.append(f"leave {self.what}")
def arange(first, end, dtype, device):
    said.append(["arange", first, end, dtype, device])
    return Tensor(end - first, list(range(first, end)))
cuda = SimpleNamespace(Stream=Stream, stream=Current, device=Current)
torch = sys.modules["torch"] = SimpleNamespace(
    device=lambda kind, index: f"{kind}:{index}", int64="int64", arange=arange, cuda=cuda
)
device = torch_device(3)
with device:
    buffer = device.ramp(4, 2)
    out["values"] = [device.stream, buffer.values, device.address(buffer), device.ready(), device.wrong(buffer, 2), device.wrong(buffer, 3)]
out["said"] = [s for s in said if s[0] != "arange"]
torch_device(3)  # the allocator keeps what was on a stream for that stream: a new one each time is a leak
torch_device(4)
out["streams"] = [what[1] for what in said if what[0] == "stream"]
""")
    assert out["streams"] == ["cuda:3", "cuda:4"]
    assert out["values"] == [77, [2, 4, 6, 8], 4096, True, 0, 4]
    # to leave a stream of another device than the thread's would make a context on that one
    assert out["said"] == [["stream", "cuda:3"], "enter cuda:3", "enter its stream", "leave its stream", "leave cuda:3"]
