"""What gpuckpt relies on in vLLM, read from its sources without importing it (torch alone takes seconds).

usage: vllm_contract.py [ROOT]    say what of it the vLLM in ROOT (its package's folder) keeps; the installed one by default
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

from vllm_sources import Source, has, in_order

from gpuckpt.agent import vllm_pool, vllm_together
from gpuckpt.nccl import environment, hazards
from gpuckpt.supervisor import vllm


#: The custom all-reduce and what it calls, a test of peer access, and what of gpuckpt.nccl.hazards.BUFFERS is vLLM's.
IPC = {
    "_custom_ops.py",
    *(f"distributed/device_communicators/{name}.py" for name in ("all_reduce_utils", "cuda_wrapper", "custom_all_reduce", "quick_all_reduce")),
    *(f"{module.removeprefix('vllm.').replace('.', '/')}.py" for module, _ in hazards.BUFFERS if module.startswith("vllm.")),
}


def checks(root: Path) -> dict[str, bool]:
    """Each assumption in words -> whether the vLLM in *root* (the folder of the package) keeps it."""
    core = Source(root / "v1/engine/core.py")
    executor = Source(root / "v1/executor/multiproc_executor.py")
    uniproc = Source(root / "v1/executor/uniproc_executor.py")
    plugins = Source(root / "plugins/__init__.py")
    rpc = {"self", "method", "timeout", "args", "kwargs", "non_block"}
    return {
        "vLLM loads the group vllm.general_plugins": '"vllm.general_plugins"' in plugins.text,
        "an engine loads the plugins before its loop": "load_general_plugins()" in core.body("EngineCore", "__init__"),
        "EngineCoreProc.run_busy_loop(self)": core.parameters("EngineCoreProc", "run_busy_loop") == ["self"],
        "EngineCoreProc._handle_client_request(self, request_type, request)": core.parameters("EngineCoreProc", "_handle_client_request")
        == ["self", "request_type", "request"],
        "a blocked engine wakes for its input_queue and handles what comes": has(
            core.body("EngineCoreProc", "_process_input_queue"), "self.input_queue.get(", "self._handle_client_request(*req)"
        ),
        "data-parallel engines are a subclass with a loop of its own": core.parameters("DPEngineCoreProc", "run_busy_loop") == ["self"],
        "every turn of the loop looks into the queue": "self._process_input_queue()" in core.body("EngineCoreProc", "run_busy_loop"),
        "EngineCoreRequestType.WAKEUP is known to the engine and does nothing": "EngineCoreRequestType.WAKEUP" in core.body("EngineCoreProc", "_handle_client_request"),
        "an engine runs in a process of its own, from run_engine_core": "engine_core.run_busy_loop()" in core.body("EngineCoreProc", "run_engine_core"),
        "engine.model_executor": "self.model_executor = " in core.body("EngineCore", "__init__"),
        "MultiprocExecutor.collective_rpc(method, timeout, args, kwargs, non_block)": rpc <= set(executor.parameters("MultiprocExecutor", "collective_rpc")),
        "UniProcExecutor.collective_rpc(method, timeout, args, kwargs, non_block)": rpc <= set(uniproc.parameters("UniProcExecutor", "collective_rpc")),
        "a callable is sent pickled, and called with the worker": re.search(r"partial\(\w*\.?loads\(method\), self\.worker\)", executor.text) is not None,
        "an answer waits for all earlier ones": "self.futures_queue.pop()" in executor.body("FutureWrapper", "result"),
        "MultiprocExecutor.workers, and none in UniProcExecutor": "self.workers" in executor.text and "self.workers" not in uniproc.text,
        "WorkerProc.worker_busy_loop(self), entered when the worker is ready": executor.parameters("WorkerProc", "worker_busy_loop") == ["self"]
        and ".worker_busy_loop()" in executor.body("WorkerProc", "worker_main"),
        "a worker waits for its work in rpc_broadcast_mq.dequeue": "self.rpc_broadcast_mq.dequeue(" in executor.body("WorkerProc", "worker_busy_loop"),
        "workers are direct children of the engine": "context.Process(" in executor.text and '"forkserver"' not in executor.text,
    }


def checks_of_together(root: Path) -> dict[str, bool]:
    """What gpuckpt.agent.vllm_together relies on, where data-parallel engines step together."""
    core = Source(root / "v1/engine/core.py")
    coordinator = Source(root / "v1/engine/coordinator.py")
    parallel = Source(root / "config/parallel.py")
    adds = "|".join(re.escape(words) for words in vllm_together.SUMS)
    summed, loop = parallel.body("ParallelConfig", "sync_dp_state"), core.body("DPEngineCoreProc", "run_busy_loop")
    once = core.body("DPEngineCoreProc", "_has_global_unfinished_reqs")
    request = core.body("DPEngineCoreProc", "_handle_client_request")
    return {
        "ParallelConfig.sync_dp_state(dp_group, has_unfinished, pending_pause), of the class or of an object": parallel.parameters(
            "ParallelConfig", "sync_dp_state"
        )[-3:]
        == ["dp_group", "has_unfinished", "pending_pause"],
        "it is one sum of two numbers, in a way that is known": "[int(has_unfinished), int(pending_pause)], dtype=torch.int32" in summed
        and len(re.findall(adds, summed)) == len(re.findall(r"all_reduce_?\(", summed)) == 1,
        "any number above zero means work": "tensor[0].item() > 0 or pause_count % dp_size != 0" in summed and "pause_count == dp_size" in summed,
        "its module has torch and ReduceOp": "import torch\n" in parallel.text and "ReduceOp" in parallel.text,
        "an engine asks for it in one place, after steps that all engines count alike": core.text.count("sync_dp_state(") == 1
        and re.search("(ParallelConfig|parallel_config).sync_dp_state\\(", once) is not None
        and re.search("self.step_counter % (32|self.dp_sync_interval) != 0", once) is not None,
        "each turn of the loop is one step, of a batch or of an empty one, and then the sum": in_order(
            loop, "self._process_engine_step()", "self.execute_dummy_batch()", "self._has_global_unfinished_reqs("
        ),
        "only these engines have dp_group": core.text.count("self.dp_group, ") >= 1 and "dp_group" not in core.body("EngineCoreProc", "__init__"),
        "an engine with engines_running has work": "self.engines_running" in core.body("EngineCoreProc", "has_work"),
        "has_coordinator": "self.has_coordinator = " in core.body("EngineCoreProc", "__init__"),
        "other requests than START_DP_WAVE go to EngineCoreProc": "super()._handle_client_request(request_type, request)" in request,
        "START_DP_WAVE wakes an engine, unless it is paused": "self.engines_running = True" in request and "if self.ignore_start_dp_wave:" in request,
        "an engine tells the coordinator that a wave starts": "(-1, EngineCoreOutputs(start_wave=self.current_wave))" in core.body("DPEngineCoreProc", "add_request"),
        "the coordinator tells the other engines": "outputs.start_wave" in coordinator.text
        and "self._send_start_wave(publish_back, wave, eng_index)" in coordinator.text,
        "all engines are paused at one sum, or by elastic EP, which is refused": "self.ignore_start_dp_wave = True" in once
        and core.text.count("self.ignore_start_dp_wave = True")
        == sum("self.ignore_start_dp_wave = True" in body for body in (once, core.body("DPEngineCoreProc", "_eep_scale_up_before_kv_init"))),
        "and resume together": "ParallelConfig.has_unfinished_dp(" in core.body("DPEngineCoreProc", "resume_scheduler"),
        "enable_elastic_ep, enable_eplb, eplb_config.use_async": has(
            parallel.text, "enable_elastic_ep: bool", "enable_eplb: bool", "eplb_config: EPLBConfig", "use_async: bool"
        ),
    }


def checks_of_experts(root: Path) -> dict[str, bool]:
    """What gpuckpt.nccl relies on, where experts are spread over GPUs."""
    cuda = Source(root / "distributed/device_communicators/cuda_communicator.py")
    all2all = Source(root / "distributed/device_communicators/all2all.py")
    state = Source(root / "distributed/parallel_state.py")
    return {
        "the groups of data and expert parallelism are groups as any other": all(f"{name} = init_model_parallel_group(" in state.text for name in ("_DP", "_EP")),
        "each of more than one rank has a PyNccl": "if self.world_size > 1:\n            self.pynccl_comm = PyNcclCommunicator(" in cuda.text,
        "allgather_reducescatter goes through NCCL alone": '("naive", "allgather_reducescatter"):\n                from .all2all import AgRsAll2AllManager' in cuda.text
        and "class AgRsAll2AllManager(" in all2all.text,
        "device_communicator.all2all_manager": "self.all2all_manager = " in cuda.text,
    }


def checks_of_nccl(root: Path) -> dict[str, bool]:
    """What gpuckpt.nccl relies on."""
    pynccl = Source(root / "distributed/device_communicators/pynccl.py")
    wrapper = Source(root / "distributed/device_communicators/pynccl_wrapper.py")
    cuda = Source(root / "distributed/device_communicators/cuda_communicator.py")
    weights = Source(root / "distributed/weight_transfer/nccl_common.py")
    base = Source(root / "v1/worker/worker_base.py")
    state = Source(root / "distributed/parallel_state.py")
    return {
        "parallel_state._groups holds weak references by name": "_groups[group.unique_name] = weakref.ref(group)" in state.text,
        "group.device_communicator": "self.device_communicator" in state.text,
        "device_communicator.pynccl_comm": "self.pynccl_comm" in cuda.text,
        "pynccl_comm.comm and .nccl": "self.comm:" in pynccl.text and "self.nccl = " in pynccl.text,
        "pynccl_comm.available, and .unique_id that rank 0 passes on": "self.available = " in pynccl.text
        and "self.unique_id = group.broadcast_obj(self.unique_id" in pynccl.text,
        "weights of a trainer come through a PyNcclCommunicator": "return PyNcclCommunicator(" in weights.text,
        "nccl.lib is the ctypes library": "self.lib = " in wrapper.text,
        "custom all-reduce, symmetric memory, FlashInfer: ca_comm, symm_mem_comm, fi_ar_comm": has(
            cuda.text, "self.ca_comm:", "self.symm_mem_comm:", "self.fi_ar_comm:"
        ),
        "what else a group has beside NCCL is known, or AMD's": set(re.findall(r"self\.(\w+_comm): ", cuda.text))
        <= {*hazards.HARMLESS, *hazards.BESIDE_NCCL},
        "who opens the memory of peers by CUDA IPC is known, or AMD's": {
            str(path.relative_to(root))
            for path in root.rglob("*.py")
            if re.search(r"cudaIpcOpenMemHandle\(|\bopen_mem_handle\(", path.read_text()) and "amd" not in path.parts
        }
        <= IPC,
        "a communicator that its own suspend took down is told by NCCL": "def suspend(" not in pynccl.text
        or has(wrapper.text + pynccl.text, '"ncclCommSuspend"](comm, flags)', "nccl.ncclCommSuspend(self.comm, ", "nccl.ncclCommResume(self.comm)"),
        "a worker loads the plugins": "load_general_plugins()" in base.body("WorkerWrapperBase", "init_worker"),
        "a worker tells its vllm_config": "self.vllm_config = " in base.text,
    }


def checks_of_sleep(root: Path) -> dict[str, bool]:
    """What gpuckpt.agent.vllm_memory relies on, where a server has sleep mode."""
    cumem = Source(root / "device_allocator/cumem.py")
    data = Source(root / "device_allocator/__init__.py")
    core = Source(root / "v1/engine/core.py")
    scheduler = Source(root / "v1/core/sched/scheduler.py")
    interface = Source(root / "v1/core/sched/interface.py")
    worker = Source(root / "v1/worker/gpu_worker.py")
    base = Source(root / "v1/worker/worker_base.py")
    uniproc = Source(root / "v1/executor/uniproc_executor.py")
    runners = [Source(root / f"v1/worker/{name}") for name in ("gpu_model_runner.py", "gpu/model_runner.py")]
    return {
        "CuMemAllocator.instance and pointer_to_data": 'instance: "CuMemAllocator | None" = None' in cumem.text and "self.pointer_to_data" in cumem.text,
        "a block has handle, tag, cpu_backup_tensor and is_asleep": has(data.text, "    handle:", "    tag:", "    cpu_backup_tensor:", "    is_asleep:"),
        "a handle is device, size, address, handle": "HandleType: TypeAlias = tuple[int, int, int," in data.text,
        "CuMemAllocator.sleep(self, offload_tags)": cumem.parameters("CuMemAllocator", "sleep") == ["self", "offload_tags"],
        "create_and_map, unmap_and_release, libcudart": has(cumem.text, "def create_and_map(", "def unmap_and_release(", "libcudart = CudaRTLibrary()"),
        "the memory of the cache alone is its own, or the model runner is told when it is back": "self.model_runner.post_kv_cache_wake_up()"
        in worker.body("Worker", "wake_up")
        or all("kv_cache_allocation_context" in r.parameters("GPUModelRunner", "initialize_kv_cache") for r in runners),
        "a worker in its wrapper: its attributes are the wrapper's": "getattr(self.worker, attr)" in base.body("WorkerWrapperBase", "__getattr__"),
        "a server of which something sleeps schedules nothing": any(
            f"{words}:\n            self.resume_scheduler()" in core.body("EngineCore", "wake_up")
            for words in ("if not self.model_executor.is_sleeping", "fully_awake = not self.model_executor.is_sleeping\n        if fully_awake")
        )
        and "self.pause_scheduler(" in core.body("EngineCore", "sleep"),
        "UniProcExecutor.driver_worker": "self.driver_worker = " in uniproc.text,
        "EngineCore.reset_prefix_cache(reset_running_requests)": "reset_running_requests" in core.parameters("EngineCore", "reset_prefix_cache"),
        "it preempts what runs, and raises where blocks stay held": "self._preempt_request(" in scheduler.body("Scheduler", "reset_prefix_cache")
        and "raise RuntimeError(" in scheduler.body("Scheduler", "reset_prefix_cache"),
        "scheduler.connector, pause_state and set_pause_state; PAUSED_ALL": "self.connector = None" in scheduler.text
        and bool(scheduler.parameters("Scheduler", "set_pause_state"))
        and bool(scheduler.parameters("Scheduler", "pause_state"))
        and "PAUSED_ALL = " in interface.text,
        "a paused scheduler schedules nothing": "PAUSED_ALL" in scheduler.body("Scheduler", "get_num_unfinished_requests"),
        "engine.batch_queue and _process_engine_step(self)": "self.batch_queue" in core.body("EngineCore", "__init__")
        and core.parameters("EngineCoreProc", "_process_engine_step") == ["self"],
    }


def checks_of_pool(root: Path) -> dict[str, bool]:
    """What gpuckpt.agent.vllm_pool relies on, where gpuckpt's pool is vLLM's allocator."""
    data, worker = Source(root / "device_allocator/__init__.py"), Source(root / "v1/worker/gpu_worker.py")
    backend, executor = Source(root / "device_allocator/sleep_mode_backend.py"), Source(root / "v1/executor/abstract.py")
    users = [text for path in root.rglob("*.py") if "get_mem_allocator_instance" in (text := path.read_text(errors="replace"))]
    load, suspends = worker.body("Worker", "load_model"), backend.body("CuMemBackend", "suspend")
    return {
        "allocators come from get_mem_allocator_instance, which is imported by name": "def get_mem_allocator_instance()" in data.text
        and "allocator = get_mem_allocator_instance()" in worker.text
        and not any("device_allocator.get_mem_allocator_instance" in text for text in users),
        "an allocator is asked for nothing else than ours has": set(data.functions("MemAllocator"))
        == {n for n in data.functions("MemAllocator") if hasattr(vllm_pool.PoolAllocator, n)}
        != set(),
        "a sleep names what is kept: the weights at level 1, never the cache": "allocator.sleep(offload_tags=" in suspends
        and '("weights",' in suspends
        and "level == 1" in suspends
        and "kv_cache" not in suspends,
        "tags are weights and kv_cache": 'tag="weights"' in worker.text and 'tag="kv_cache"' in worker.text,
        "/wake_up knows two tags, and no others": any(
            words in executor.text for words in ('self.sleeping_tags = {"weights", "kv_cache"}', 'SLEEP_TAGS = frozenset(("weights", "kv_cache"))')
        ),
        "the allocator is asked for before the model is loaded, on its device, with its groups": in_order(load, 'tag="weights"', ".load_model(")
        and "set_device_index(self.device)" in worker.body("Worker", "init_device")
        and "init_worker_distributed_environment(" in worker.body("Worker", "init_device"),
    }


#: Who captures graphs in vLLM, and in whose pool: the platform's one ("global"), or one of its own.
_CAPTURES = {
    "compilation/cuda_graph.py": "global",
    "compilation/breakable_cudagraph.py": "global",
    "v1/worker/gpu/cudagraph_utils.py": "global",
    "v1/worker/gpu_ubatch_wrapper.py": "global",
    "v1/worker/encoder_cudagraph.py": "own",
    "v1/spec_decode/gemma4.py": "own",
    "models/deepseek_v41/nvidia/specialized_decode/runtime/metadata_graphs.py": "global",
}
#: Not of a server on NVIDIA's GPUs.
_ELSEWHERE = ("benchmarks/", "third_party/", "model_executor/warmup/rocm_")


def checks_of_graphs(root: Path) -> dict[str, bool]:
    """What gpuckpt.agent.vllm_pool relies on, where graphs and workspaces are in gpuckpt's pool."""
    platform = Source(root / "platforms/interface.py")
    wrapper, breakable = Source(root / "compilation/cuda_graph.py"), Source(root / "compilation/breakable_cudagraph.py")
    manager, ubatch = Source(root / "v1/worker/gpu/cudagraph_utils.py"), Source(root / "v1/worker/gpu_ubatch_wrapper.py")
    runner, runner2 = Source(root / "v1/worker/gpu_model_runner.py"), Source(root / "v1/worker/gpu/model_runner.py")
    pynccl = Source(root / "distributed/device_communicators/pynccl_allocator.py")
    reduce = Source(root / "distributed/device_communicators/custom_all_reduce.py")
    workspace, switch = Source(root / "v1/worker/workspace.py"), Source(root / "compilation/cudagraph_pool.py")
    asks, own = "current_platform.get_global_graph_pool()", "current_platform.graph_pool_handle()"
    measured = runner.body("GPUModelRunner", "profile_cudagraph_memory")
    grows = workspace.body("WorkspaceManager", "_ensure_workspace_size")
    switches = "set_graph_pool_id(pool or " in switch.text and "yield pool\n" in switch.text  # who captures has its pool from there (0.32)
    made = [r.body("GPUModelRunner", "__init__") for r in (runner, runner2)]
    full, micro = wrapper.body("CUDAGraphWrapper", "__call__"), ubatch.body("UBatchWrapper", "_capture_ubatches")
    broken = breakable.body("BreakableCUDAGraphWrapper", "_capture")
    switched = [switches and "capture_pool(self.graph_pool," in body for body in (full, broken, micro)]
    captures = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if any(words in path.read_text(errors="replace") for words in (" torch.cuda.graph(", "with torch.cuda.graph(", ".capture_begin("))
    }
    speculators = "\n".join(path.read_text() for path in sorted((root / "v1/worker/gpu/spec_decode").rglob("*.py")))
    return {
        "Platform.get_global_graph_pool(self), by cls._global_graph_pool, and no platform has its own": platform.parameters("Platform", "get_global_graph_pool")
        == ["self"]
        and "if cls._global_graph_pool is None:" in platform.body("Platform", "get_global_graph_pool")
        and sum("def get_global_graph_pool(" in path.read_text() for path in (root / "platforms").rglob("*.py")) == 1,
        "only these files capture graphs": {c for c in captures if not c.startswith(_ELSEWHERE)} <= set(_CAPTURES),
        "FULL and PIECEWISE: CUDAGraphWrapper asks the platform": f"self.graph_pool = {asks}" in wrapper.body("CUDAGraphWrapper", "__init__")
        and ("pool=self.graph_pool," in full or switched[0]),
        "breakable: BreakableCUDAGraphWrapper asks the platform": f"self.graph_pool = {asks}" in breakable.body("BreakableCUDAGraphWrapper", "__init__")
        and ("BreakableCUDAGraphCapture(pool=self.graph_pool)" in broken or (switched[1] and "BreakableCUDAGraphCapture(pool=pool" in broken)),
        "its segments begin and end by torch.cuda.CUDAGraph's methods": has(
            breakable.body("BreakableCUDAGraphCapture", "_begin_segment"), "torch.cuda.CUDAGraph()", ".capture_begin(pool=self.pool)"
        )
        and ".capture_end()" in breakable.body("BreakableCUDAGraphCapture", "_end_segment"),
        "the second model runner: CudaGraphManager asks the platform": f"self.pool = {asks}" in manager.body("CudaGraphManager", "__init__")
        and ("graph, self.pool" in (call := " ".join(manager.body("CudaGraphManager", "capture").split())) or (switches and "capture_pool(self.pool," in call)),
        "speculators: their managers are CudaGraphManagers": "(CudaGraphManager)" in speculators
        and not any(words in speculators for words in ("torch.cuda.graph(", "graph_pool_handle(")),
        "micro-batches: UBatchWrapper has its wrapper's": "return self.cudagraph_wrapper.graph_pool" in ubatch.text
        and "pool=self.graph_pool," in micro,
        "NCCL's graph pool id follows: each of them tells it before it captures": all(
            "set_graph_pool_id(self.graph_pool)" in body or by_switch for body, by_switch in zip((full, broken, micro), switched, strict=True)
        )
        and "def set_graph_pool_id(graph_pool_id" in pynccl.text,
        "graphs that are only measured have a pool of their own, and the wrappers get theirs back": has(
            measured, f"profiling_pool = {own}", "instance.graph_pool = profiling_pool", "instance.graph_pool = original_pools[id(instance)]"
        )
        and manager.text.count("_global_graph_pool = throwaway_pool") == manager.text.count("_global_graph_pool = saved_global_pool") <= 1,
        "an encoder's graphs have a pool of their own": f"encoder_graph_pool = {own}" in runner.body("GPUModelRunner", "capture_model"),
        "no graph pool is asked for before": all(made) and not any(words in body for body in made for words in ("CudaGraphManager(", "CUDAGraphWrapper(", "graph_pool")),
        "custom all-reduce registers what graphs use, unless it is disabled, or says in _capture_registered": any(
            f"registered={words})" in reduce.body("CustomAllreduce", "custom_all_reduce") for words in ("True", "self._capture_registered")
        )
        and "self.disabled = " in reduce.text
        and "get_graph_buffer_ipc_meta" in reduce.text,
        "WorkspaceManager._ensure_workspace_size(self, required_bytes), its one allocation": workspace.parameters("WorkspaceManager", "_ensure_workspace_size")
        == ["self", "required_bytes"]
        and "torch.empty(" in grows
        and workspace.text.count("torch.empty(") == 1,
        "_current_workspaces: tensors or None, let go before they grow": "self._current_workspaces: list[torch.Tensor | None]" in workspace.text
        and in_order(grows, "_id] = None", "torch.empty("),
        "or under the tag of an alloc_context, from vLLM's allocator": "alloc_context" not in workspace.text
        or "with self._alloc_context():" in grows[: grows.find("torch.empty(")],
    }


def checks_of_run(root: Path) -> dict[str, bool]:
    """What gpuckpt run relies on, which gives a server options and calls its endpoints."""
    arguments = "\n".join(path.read_text() for path in (root / "engine/arg_utils.py", *(root / "entrypoints").rglob("cli_args.py")))
    router, envs = Source(root / "entrypoints/serve/dev/sleep/api_router.py"), Source(root / "envs.py")
    sleeps, compilation = Source(root / "v1/engine/core.py"), Source(root / "config/compilation.py")
    executor, worker = Source(root / "v1/executor/abstract.py"), Source(root / "v1/worker/gpu_worker.py")
    rpc = Source(root / "entrypoints/serve/dev/rpc/api_router.py")
    variables = (vllm.DEV_MODE, vllm.API_KEY, *(s.name for s in environment.SETTINGS if s.name.startswith("VLLM_")))
    return {
        "options: --enable-sleep-mode, --disable-custom-all-reduce, --compilation-config, --uds, -tp, -pp, -dp": has(
            arguments, '"--enable-sleep-mode"', '"--disable-custom-all-reduce"', '"--compilation-config"', "uds: str", '"-tp"', '"-pp"', '"-dp"'
        ),
        "pass_config.fuse_allreduce_rms": "fuse_allreduce_rms: " in compilation.text,
        "its variables of gpuckpt env --vllm, for the dev endpoints and for the API key": has(envs.text, *(f'"{name}"' for name in variables)),
        "POST /sleep?level=&mode=, POST /wake_up?tags=, GET /is_sleeping": has(
            router.text, 'post("/sleep")', 'post("/wake_up")', 'get("/is_sleeping")', "level", "mode", "tags"
        ),
        "a sleep that its workers deny: none for the executor, which then wakes nobody; the workers can be told by POST /collective_rpc": (
            any(
                word in executor.body("Executor", "sleep").partition('self.collective_rpc("sleep"')[2]
                for word in ("self.is_sleeping = True", "self.sleeping_tags |= SLEEP_TAGS")
            )
            and "if not self.is_sleeping:" in executor.body("Executor", "wake_up").partition('self.collective_rpc("wake_up"')[0]
            and worker.parameters("Worker", "wake_up")[:2] == ["self", "tags"]
            and has(rpc.text, 'post("/collective_rpc")', '"method"', "collective_rpc(")
        ),
        "level 0 and the tag scheduling: a pause": "level < 1" in sleeps.body("EngineCore", "sleep")
        and '"scheduling" in tags' in sleeps.body("EngineCore", "wake_up"),
        "engines and workers call themselves VLLM::": 'os.getenv("VLLM_PROCESS_NAME_PREFIX", "VLLM")' in envs.text
        and "{prefix}::" in Source(root / "utils/system_utils.py").text,
    }


def checks_of_torch(root: Path) -> dict[str, bool]:
    """What gpuckpt.pool relies on in torch, to know of captures that others make."""
    graphs, memory = Source(root / "cuda/graphs.py"), Source(root / "cuda/memory.py")
    return {
        "torch.cuda.CUDAGraph.capture_begin(self, pool, capture_error_mode, …)": graphs.parameters("CUDAGraph", "capture_begin")[:3]
        == ["self", "pool", "capture_error_mode"],
        "torch.cuda.CUDAGraph.capture_end(self)": graphs.parameters("CUDAGraph", "capture_end") == ["self"],
        "torch.cuda.graph begins and ends by them": "self.cuda_graph.capture_begin(" in graphs.body("graph", "__enter__")
        and "self.cuda_graph.capture_end()" in graphs.body("graph", "__exit__"),
        "and takes the id of a pool": "pool" in graphs.parameters("graph", "__init__"),
        "MemPool.id and use_count()": bool(memory.parameters("MemPool", "id")) and bool(memory.parameters("MemPool", "use_count")),
    }


def installed() -> dict[str, bool]:
    """What of gpuckpt this Python has."""
    found = [e for e in entry_points(group="vllm.general_plugins") if e.name == "gpuckpt"]
    return {"gpuckpt's plugin is an entry point here, once": len(found) == 1, "it can be loaded": bool(found) and callable(found[0].load())}


def root_of(package: str) -> Path | None:
    """The folder of a package that is installed."""
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).parent if spec and spec.origin else None


#: What is relied upon for each thing that gpuckpt does with vLLM.
FEATURES: dict[str, Callable[[Path], dict[str, bool]]] = {
    "hold": checks,
    "comms": checks_of_nccl,
    "offload": checks_of_sleep,
    "pool": checks_of_pool,
    "graphs": checks_of_graphs,
    "together": checks_of_together,
    "experts": checks_of_experts,
    "run": checks_of_run,
}


def main(arguments: list[str]) -> int:
    where = Path(arguments[0]) if arguments else root_of("vllm")
    if where is None:
        raise SystemExit("vLLM is not installed")
    seen = {what: ok for part in FEATURES.values() for what, ok in part(where).items()} | installed()
    if torch := root_of("torch"):
        seen |= checks_of_torch(torch)
    for what, ok in seen.items():
        print("ok  " if ok else "FAIL", what)
    return int(not all(seen.values()))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
