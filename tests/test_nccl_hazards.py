"""What keeps a mapping of a peer alive is named with its cure, and what does not is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., Any]

BEGIN = """
from gpuckpt.nccl.environment import settings
from gpuckpt.nccl.hazards import hazards, parsed_environment
new = opened("new/libnccl.so.2")
good = settings()
def told(communicators=(), modules=None, environ=good):
    return [[h.kind, h.message, h.hint, h.acceptable] for h in hazards(communicators, modules or {}, environ)]
def vllm(**used):
    return vllm_modules({"tp:0": pynccl(new, 1, **used)})
"""


@pytest.fixture
def run(nccl_run: Run) -> Run:
    return lambda code, **environ: nccl_run(BEGIN + code, **environ)


def test_a_clean_job_has_none(run: Run) -> None:
    out = run("""
out["two ranks"] = told([communicator(new, "tp", carried=True)])
out["several"] = told([communicator(new, "tp"), communicator(new, "pp"), communicator(new, "dp")])
out["not used yet"] = told([communicator(new, "pp", suspendable=0)])
out["one GPU"] = told([], {"torch": Torch()}, {})
out["vllm"] = told([], vllm(ca_comm=SimpleNamespace(disabled=True), symm_mem_comm=None, new_comm=None, all2all_manager=None))
""")
    assert out == {"two ranks": [], "several": [], "not used yet": [], "one GPU": [], "vllm": []}


def test_one_process_alone_gets_no_complaint_about_its_environment(run: Run) -> None:
    assert run("""out = told([], {}, {"NCCL_NVLS_ENABLE": "1"})""") == []


def test_the_environment_as_nccl_parsed_it(run: Run, tmp_path: Any) -> None:
    """NCCL puts its configuration file into the C library's environment, where ``os.environ`` does not see it."""
    out = run(
        """
libc = ctypes.CDLL(None)
libc.setenv(b"NCCL_NVLS_ENABLE", b"2", 1)
out["python"] = os.environ.get("NCCL_NVLS_ENABLE")
out["nccl"] = parsed_environment()["NCCL_NVLS_ENABLE"]
out["told"] = told([communicator(new, "tp")], {}, None)
""",
        NCCL_CUMEM_ENABLE="0",
    )
    assert (out["python"], out["nccl"]) == (None, "2")
    messages = [h[1] for h in out["told"]]
    assert any("NCCL_NVLS_ENABLE=2" in m and "multicast" in m for m in messages)
    assert any("NCCL_CUMEM_ENABLE=0" in m for m in messages)
    assert any("NCCL_WIN_ENABLE is not set" in m for m in messages)
    assert not any("TORCH_" in m or "VLLM_" in m for m in messages), "no torch and no vLLM here"
    assert all("gpuckpt env" in h[2] for h in out["told"])


def test_torch_s_settings_count_where_it_has_communicators(run: Run) -> None:
    out = run("""
import dataclasses
c = dataclasses.replace(communicator(new, "0"), source="torch")
out = told([c], {}, {k: v for k, v in good.items() if not k.startswith("TORCH")})
""")
    assert [("TORCH_NCCL_ENABLE_MONITORING is not set" in h[1]) for h in out] == [True]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ('communicator(opened("old/libnccl.so.2"), "tp")', ["2.28.9", "cannot suspend", "nvidia-nccl"]),
        ('communicator(new, "tp", suspendable=0, total=0)', ["registered:tp", "legacy CUDA IPC", "gpuckpt env"]),
        ('communicator(new, "tp", carried=True, suspendable=0, total=5)', ["registered:tp", "carried traffic", "gpuckpt env"]),
        ('communicator(new, "busy")', ["registered:busy", "in progress", "idle"]),
        ('communicator(new, "dead")', ["registered:dead", "ncclRemoteError", "end the job"]),
        ('communicator(new, "mute")', ["registered:mute", "ncclInternalError", "NCCL_DEBUG"]),
    ],
)
def test_a_communicator_that_cannot_be_suspended(run: Run, code: str, words: list[str]) -> None:
    environ = {"FAKE_NCCL_ASYNC_busy": "7", "FAKE_NCCL_ASYNC_dead": "6", "FAKE_NCCL_ncclCommMemStats_mute": "3"}
    ((kind, message, hint, acceptable),) = run(f"out = told([{code}])", **environ)
    assert (kind, acceptable) == ("nccl-communicator", True)
    assert all(w in message + hint for w in words), (message, hint)


def test_two_ranks_of_one_communicator_in_one_process(run: Run) -> None:
    ((_, message, hint, _),) = run("""out = told([communicator(new, "0", rank=0), communicator(new, "0", rank=1)])""")
    assert "2 ranks in this process" in message
    assert "one process for each GPU" in hint


@pytest.mark.parametrize(
    ("used", "words"),
    [
        ("ca_comm=SimpleNamespace(disabled=False)", ["custom all-reduce", "--disable-custom-all-reduce"]),
        ("symm_mem_comm=SimpleNamespace(disabled=False)", ["symmetric memory", "gpuckpt env --vllm"]),
        ("fi_ar_comm=SimpleNamespace(disabled=False)", ["FlashInfer", "gpuckpt env --vllm"]),
        ("fi_pcie_ipc_ar_comm=SimpleNamespace(disabled=False)", ["over PCIe", "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC"]),
        ("new_comm=SimpleNamespace(disabled=False)", ["SimpleNamespace (new_comm", "does not know"]),
        ("all2all_manager=type('DeepEPHTAll2AllManager', (), {})()", ["DeepEPHTAll2AllManager", "allgather_reducescatter"]),
    ],
)
def test_what_vllm_shares_outside_nccl(run: Run, used: str, words: list[str]) -> None:
    ((kind, message, hint, _),) = run(f"out = told([], vllm({used}))")
    assert kind == "possible-import"
    assert "tp:0" in message
    assert all(w in message + hint for w in words), (message, hint)


def test_vllm_s_plain_all_to_all_shares_nothing(run: Run) -> None:
    assert run("""out = told([], vllm(all2all_manager=type("AgRsAll2AllManager", (), {})()))""") == []


def test_flashinfer_s_workspace(run: Run) -> None:
    out = run("""
module = ModuleType("f")
name = "vllm.distributed.device_communicators.flashinfer_all_reduce"
module._fi_ar_workspace = None
out["none"] = told([], {name: module})
module._fi_ar_workspace = object()
out["one"] = told([], {name: module})
""")
    assert out["none"] == []
    assert "FlashInfer" in out["one"][0][1]


def test_torch_s_symmetric_memory(run: Run) -> None:
    out = run("""
name = "torch.distributed._symmetric_memory"
out = [told([], {name: SimpleNamespace(_group_name_to_store=stores)}) for stores in ({}, {"0": 1})]
""")
    assert out[0] == []
    assert "symmetric memory" in out[1][0][1]


def test_symmetric_memory_of_which_torch_keeps_no_list(run: Run) -> None:
    """Those that vLLM 0.27 and newer come with, whose models and context parallelism allocate it. And a buffer of FlashInfer's."""
    out = run("""
class Tensor:
    def __init__(self, is_cuda=True, at=0):
        self.is_cuda, self.at = is_cuda, at
class Gone(Tensor):
    is_cuda = property(lambda self: 1 / 0, lambda self, value: None)
torch, symmetric = Torch(), ModuleType("torch.distributed._symmetric_memory")
torch.Tensor = Tensor
symmetric.is_symm_mem_tensor = lambda t: t.at == 7
modules = {"torch": torch, symmetric.__name__: symmetric}
held = [Tensor(), Tensor(is_cuda=False, at=7), Gone()]
out["none"] = told([], modules)
held.append(Tensor(at=7))
out["one"] = told([], modules)
ranks = {size: {**modules, **torch_modules(torch, {"0": Group(Backend(torch, {}), size=size)})} for size in (1, 2)}
out["alone"], out["two"] = told([], ranks[1]), told([], ranks[2])
mnnvl = ModuleType("flashinfer.comm.mnnvl")
mnnvl.McastGPUBuffer = type("McastGPUBuffer", (), {})
out["no buffer"] = told([], {mnnvl.__name__: mnnvl})
buffer = mnnvl.McastGPUBuffer()
buffer.world_size = 2
out["buffer"] = told([], {mnnvl.__name__: mnnvl})
""")
    assert (out["none"], out["no buffer"], out["alone"]) == ([], [], []), "who is alone is not searched"
    assert out["two"] == out["one"]
    ((kind, message, *_),) = out["one"]
    assert (kind, "symmetric memory" in message) == ("possible-import", True)
    ((kind, message, *_),) = out["buffer"]
    assert (kind, "McastGPUBuffer" in message) == ("possible-import", True)


def test_vllm_s_buffers_of_minimax_models(run: Run) -> None:
    """They import the memory of the peers by legacy IPC, which a suspend of NCCL leaves and no restore survives."""
    out = run("""
module = ModuleType("vllm.model_executor.layers.minimax_rms_norm.lamport_workspace")
class IpcBuffer:
    _alive = True
module.IpcBuffer = IpcBuffer
out["none"] = told([], {module.__name__: module})
buffer = IpcBuffer()
out["one"] = told([], {module.__name__: module})
buffer._alive = False
out["closed"] = told([], {module.__name__: module})
""")
    assert (out["none"], out["closed"]) == ([], [])
    ((kind, message, hint, _),) = out["one"]
    assert (kind, "IpcBuffer" in message) == ("possible-import", True)
    assert "one GPU" in hint


def test_tensors_of_another_process(run: Run) -> None:
    out = run("""
live, dead = SimpleNamespace(expired=lambda: False), SimpleNamespace(expired=lambda: True)
for name, cache in {"none": {}, "file": {(3, 4): live, b"x": live}, "gone": {(b"handle", 0): dead}, "live": {(b"handle", 0): live}}.items():
    out[name] = told([], {"torch.multiprocessing.reductions": SimpleNamespace(shared_cache=cache)})
""")
    assert (out["none"], out["file"], out["gone"]) == ([], [], [])
    ((kind, message, hint, _),) = out["live"]
    assert kind == "possible-import"
    assert "torch.multiprocessing" in message
    assert "cpu()" in hint


def test_split_share(run: Run) -> None:
    out = run("""
torch = Torch()
def options(share): return SimpleNamespace(config=SimpleNamespace(split_share=share))
out = [told([], torch_modules(torch, {"7": Group(Backend(torch, {}, options=options(share)))})) for share in (0, -2147483648, 1)]
""")
    assert out[:2] == [[], []]
    assert "group 7" in out[2][0][1]


@pytest.mark.parametrize(
    ("module", "word"), [("deep_ep", "DeepEP"), ("nvshmem", "NVSHMEM"), ("nixl", "NIXL"), ("mooncake", "Mooncake"), ("ucp", "UCX")]
)
def test_libraries_that_share_memory_on_their_own(run: Run, module: str, word: str) -> None:
    ((kind, message, hint, acceptable),) = run(f"""out = told([], {{"{module}": ModuleType("x")}})""")
    assert (kind, acceptable) == ("possible-import", True)
    assert word in message
    assert module in hint
