"""Every communicator of a process is found, once, in an order that all ranks share, and what cannot be reached is named."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., Any]

BEGIN = """
from gpuckpt.errors import GpuckptError
from gpuckpt.nccl import communicators
from gpuckpt.nccl.communicators import listing, register, unregister
plain, new = opened("plain/libnccl.so.2"), opened("new/libnccl.so.2")
def told(found):
    return {"all": [[c.label, c.rank, c.size, c.device, c.library.version, c.carried] for c in found.communicators],
            "alone": [c.label for c in found.alone], "hazards": [[h.kind, h.message, h.hint] for h in found.hazards]}
"""


@pytest.fixture
def run(nccl_run: Run) -> Run:
    return lambda code, **environ: nccl_run(BEGIN + code, **environ)


def test_a_process_with_none(run: Run) -> None:
    out = run("""out = [told(listing({}, 0)), told(listing({"torch": Torch()}, 0))]""")
    assert out == [{"all": [], "alone": [], "hazards": []}] * 2


def test_torch_s_groups(run: Run) -> None:
    """The default group, split and sub-groups, each with its own; lazily uninitialised ones and those of gloo are passed over."""
    out = run("""
torch = Torch()
ctypes.CDLL(FOLDER + "/libtorch_cuda.so")
groups = {
    "0": Group(Backend(torch, {0: create(plain, "default", rank=1, size=4)}, collectives=3)),
    "2": Group(Backend(torch, {0: create(plain, "new", rank=0, size=2)}, collectives=0)),
    "10:split": Group(Backend(torch, {0: create(plain, "split", rank=1, size=2)})),
    "3": Group(Backend(torch, {0: 0})),
    "4": Group(Backend(torch, {0: RuntimeError("NCCL communicator not initialized")})),
    "5": Group(None, cuda=False),
    "6": Group(ctypes),
}
out = told(listing(torch_modules(torch, groups), 3))
out["entered"] = torch.cuda.entered
""")
    assert out["all"] == [
        ["torch:0", 1, 4, 0, "2.29.7", True],
        ["torch:10:split", 1, 2, 0, "2.29.7", None],
        ["torch:2", 0, 2, 0, "2.29.7", None],
    ]
    assert (out["hazards"], out["entered"]) == ([], [])


def test_torch_before_its_first_use_of_cuda_is_left_alone(run: Run) -> None:
    out = run("""
torch = Torch(initialised=False)
out = told(listing(torch_modules(torch, {"0": Group(Backend(torch, {0: 1}))}), 0))
""")
    assert out == {"all": [], "alone": [], "hazards": []}


def test_only_devices_with_a_context_are_entered(run: Run) -> None:
    """The lookup goes by the current device; entering one of the others would make a context there."""
    out = run("""
torch = Torch(contexts=(5, 2))
ctypes.CDLL(FOLDER + "/libtorch_cuda.so")
pointers = {2: create(plain, "two", rank=0, device=2), 5: create(plain, "five", rank=1, device=5)}
out = told(listing(torch_modules(torch, {"0": Group(Backend(torch, pointers))}), 2))
out["entered"] = torch.cuda.entered
""")
    assert sorted(row[3] for row in out["all"]) == [2, 5]
    assert out["entered"] == [2]


def test_a_debug_wrapper_is_seen_through(run: Run) -> None:
    out = run("""
torch = Torch()
ctypes.CDLL(FOLDER + "/libtorch_cuda.so")
inner = Backend(torch, {0: create(plain, "default")})
out = told(listing(torch_modules(torch, {"0": Group(SimpleNamespace(wrapped_pg=inner))}), 1))
""")
    assert [row[0] for row in out["all"]] == ["torch:0"]


def test_what_torch_does_not_tell_is_named(run: Run) -> None:
    out = run("""
torch = Torch()
class ProcessGroupNCCL: pass
groups = {"0": Group(ProcessGroupNCCL()), "1": Group(Backend(torch, {0: RuntimeError("NCCL communicator was aborted on rank 0")}))}
out = told(listing(torch_modules(torch, groups), 0))
""")
    assert out["all"] == []
    assert [h[0] for h in out["hazards"]] == ["nccl-communicator"] * 2
    assert "group 0" in out["hazards"][0][1]
    assert "aborted on rank 0" in out["hazards"][1][1]


def test_vllm_s_groups(run: Run) -> None:
    """Each with the copy that it calls; one shared by two groups is listed once; a group of one rank has none, a dead one is gone."""
    out = run("""
tp = create(new, "tp", rank=1, size=2, device=1)
groups = {"world:0": pynccl(new, tp), "tp:0": pynccl(new, tp), "pp:0": SimpleNamespace(pynccl_comm=None), "gone:0": None,
          "ep:0": pynccl(plain, create(plain, "ep", rank=0, size=8)), "dp:0": pynccl(new, 0),
          "one:0": pynccl(new, create(new, "one", size=1))}
out = told(listing(vllm_modules(groups), 3))
""")
    assert out["all"] == [["vllm:ep:0", 0, 8, 0, "2.29.7", True], ["vllm:tp:0", 1, 2, 1, "2.30.7", True]]
    assert out["alone"] == ["vllm:one:0"]
    assert out["hazards"] == []


def test_vllm_s_communicators_of_no_group(run: Run) -> None:
    """Case 42: a trainer sends weights to vLLM's workers through a communicator of no group. It has the same name on all its ranks."""
    out = run("""
class PyNcclCommunicator:
    def __init__(self, pointer, unique, available=True):
        self.comm, self.nccl, self.available, self.unique_id = ctypes.c_void_p(pointer), SimpleNamespace(lib=new), available, unique
class Unique(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]
def unique(n):
    return Unique((ctypes.c_byte * 128)(*[n] * 128))
pynccl_module = ModuleType("pynccl")
pynccl_module.PyNcclCommunicator = PyNcclCommunicator
tp = create(new, "tp", rank=1, size=2)
group = PyNcclCommunicator(tp, unique(1))
weights = PyNcclCommunicator(create(new, "weights", rank=2, size=3), unique(2))
ended = PyNcclCommunicator(4096, unique(3), available=False)
modules = vllm_modules({"tp:0": SimpleNamespace(pynccl_comm=group), "old:0": SimpleNamespace(pynccl_comm=ended)})
modules["vllm.distributed.device_communicators.pynccl"] = pynccl_module
out = [told(listing(modules, 1)), told(listing(modules, 2))]
modules["vllm.distributed.weight_transfer.nccl_common"] = ModuleType("nccl_common")
out.append(told(listing(modules, 0)))
""")
    name = f"vllm:pynccl-{hashlib.sha256(bytes([2] * 128)).hexdigest()[:12]}"
    tp = ["vllm:tp:0", 1, 2, 0, "2.30.7", True]
    assert out[0]["all"] == [tp], "nobody looks where every socket is explained"
    assert out[1]["all"] == out[2]["all"] == [[name, 2, 3, 0, "2.30.7", True], tp]
    assert [o["hazards"] for o in out] == [[], [], []]


def test_vllm_that_does_not_tell_its_library(run: Run) -> None:
    out = run("""out = told(listing(vllm_modules({"tp:0": pynccl(None, create(new, "tp"))}), 0))""")
    assert out["all"] == []
    assert "tp:0" in out["hazards"][0][1]


def test_registered_ones(run: Run, nccl_fakes: Any) -> None:
    out = run("""
pointer = create(new, "mine", size=3)
def refused(*args, **kwargs):
    try:
        return register(*args, **kwargs)
    except GpuckptError as error:
        return [error.code, error.message]
path = FOLDER + "/new/libnccl.so.2"
out["no path"] = refused(pointer, name="mine")
register(pointer, path, name="mine")
register(pointer, path, name="mine")
out["same name"] = refused(create(new, "b"), path, name="mine")
out["null"] = refused(0, path, name="x")
out["listed"] = told(listing({}, 1))["all"]
unregister(pointer)
unregister(pointer)
out["gone"] = told(listing({}, 0))["all"]
""")
    assert out["no path"][0] == "usage"
    assert f"{nccl_fakes}/plain" in out["no path"][1]
    assert (out["same name"][0], out["null"][0]) == ("usage", "usage")
    assert out["listed"] == [["registered:mine", 0, 3, 0, "2.30.7", None]]
    assert out["gone"] == []


def test_the_same_order_on_every_rank(run: Run) -> None:
    """Whatever the order in which a rank made them, and whatever else it is in."""
    out = run("""
import random
orders = []
for seed in range(20):
    names = ["0", "1", "2", "10", "cfa1"]
    random.Random(seed).shuffle(names)
    torch = Torch()
    groups = {n: Group(Backend(torch, {0: create(plain, n)})) for n in names if n == "0" or seed % 3 or n != "2"}
    ctypes.CDLL(FOLDER + "/libtorch_cuda.so")
    vllm = {n: pynccl(new, create(new, n)) for n in random.Random(seed).sample(["tp", "pp"], 2)}
    modules = torch_modules(torch, groups) | vllm_modules(vllm)
    orders.append([c.label for c in listing(modules, 0).communicators])
out = orders
""")
    full = max(out, key=len)
    assert all(order == [label for label in full if label in order] for order in out)
    assert {len(order) for order in out} == {6, 7}


def test_sockets_that_belong_to_none_are_a_hazard(run: Run) -> None:
    out = run("""
register(create(new, "mine"), FOLDER + "/new/libnccl.so.2", name="mine")
out = [told(listing({}, n))["hazards"] for n in (0, 1, 2)]
""")
    assert out[:2] == [[], []]
    ((kind, message, hint),) = out[2]
    assert kind == "nccl-communicator"
    assert "2 sockets" in message
    assert "reaches 1" in message
    assert "batch_isend_irecv" in hint
    assert "register" in hint


def test_sockets_are_counted(run: Run) -> None:
    with socket.socket(socket.AF_UNIX) as others:
        others.bind(f"\0tmp/nccl-socket-0-{os.urandom(8).hex()}")
        out = run("""
import socket
before = communicators.own_sockets()
held = socket.socket(socket.AF_UNIX)
held.bind(f"\\0tmp/nccl-socket-1-{os.urandom(8).hex()}")
out = [before, communicators.own_sockets(), len(listing({}).hazards)]
""")
    assert out == [0, 1, 1]


def test_a_communicator_that_does_not_answer_is_named(run: Run) -> None:
    out = run("""out = told(listing(vllm_modules({"tp:0": pynccl(new, create(new, "tp"))}), 0))""", FAKE_NCCL_ncclCommCount="3")
    assert out["all"] == []
    assert "vllm:tp:0" in out["hazards"][0][1]
    assert "ncclInternalError" in out["hazards"][0][1]


def test_what_ranks_compare(run: Run) -> None:
    out = run("""out = communicator(new, "tp", rank=1, size=4, device=3).as_dict()""")
    assert out == {"name": "registered:tp", "size": 4, "rank": 1, "device": 3, "nccl": "2.30.7"}
