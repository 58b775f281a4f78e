"""What stays on the GPU, by class: a torch process is built up step by step (context, modules, pool, cuBLAS, local memory, graphs, NCCL), and
after each step it is read what it holds: as it runs, after torch.cuda.empty_cache(), after pool.sleep(), while it is suspended by the pool
alone, and by the driver; and beside that what the report of the pool alone says by class. usage: what_stays.py [GRAPHS]

GRAPHS executables of 100 nodes (64). Ends after LIMIT_S (120) seconds in any case: a way that would not fit any more is left out. With
GPUCKPT_SIMULATE on a simulated GPU, where a step takes what it is made to take.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

#: A class of the report that grows with one step -> that step.
TOLD = {"local-memory": "local memory", "nccl": "nccl"}
STEPS = ("context", "modules", "pool", "cublas", "local memory", "graphs", "graphs in the pool", "nccl")
MIB = 1 << 20
NODES = 100

#: A kernel with 4 KiB of local memory a thread, indexed by what only a run knows, so that no compiler keeps it in registers.
DEEP = b"""
.version 7.0
.target sm_75
.address_size 64
.visible .entry deep(.param .u64 out, .param .u32 n)
{
    .local .align 4 .b8 depot[4096];
    .reg .pred %p<3>;
    .reg .b32 %r<8>;
    .reg .b64 %rd<8>;
    ld.param.u64 %rd1, [out];
    ld.param.u32 %r1, [n];
    cvta.to.global.u64 %rd1, %rd1;
    mov.u32 %r2, %tid.x;
    mov.u64 %rd2, depot;
    mov.u32 %r3, 0;
fill:
    mad.lo.s32 %r4, %r3, 7, %r2;
    and.b32 %r4, %r4, 1023;
    mul.wide.u32 %rd3, %r4, 4;
    add.s64 %rd4, %rd2, %rd3;
    st.local.u32 [%rd4], %r3;
    add.u32 %r3, %r3, 1;
    setp.lt.u32 %p1, %r3, %r1;
    @%p1 bra fill;
    mul.wide.u32 %rd3, %r2, 4;
    add.s64 %rd4, %rd2, %rd3;
    ld.local.u32 %r5, [%rd4];
    add.s64 %rd5, %rd1, %rd3;
    st.global.u32 [%rd5], %r5;
    ret;
}
"""


class Real:
    """The process, with torch. What a step makes lasts, and has a part in the answer to "check"."""

    def __init__(self, graphs: int) -> None:
        self.n = graphs
        self.keep: list[Any] = []
        self.sums: list[Callable[[], int]] = []

    def context(self) -> None:
        from cuda.bindings import driver as cu

        self.call(cu.cuInit(0))
        self.context_ = self.call(cu.cuDevicePrimaryCtxRetain(0))  # torch's, too
        self.call(cu.cuCtxSetCurrent(self.context_))
        self.call(cu.cuCtxSynchronize())

    def modules(self) -> None:
        import torch  # not before: it is to find the context

        self.torch = torch
        x = torch.randn(1 << 16, device="cuda")
        for y in (x + 1, x.sin(), x.sort()[0], x.cumsum(0), torch.cat([x, x]), x.view(256, 256).sum(1), x.relu().to(torch.int32)):
            del y
        self.small = torch.arange(1 << 16, device="cuda")
        self.sums.append(lambda: int(self.small.sum()))

    def pool(self) -> None:
        import gpuckpt.agent
        import gpuckpt.pool

        self.tags = gpuckpt.pool
        self.torch.manual_seed(7)
        for tag, mib in (("weights", 512), ("kv_cache", 256)):
            with self.tags.tag(tag):
                made = self.torch.randint(0, 1 << 30, (mib * MIB // 4,), device="cuda", dtype=self.torch.int32)
            self.sums.append(lambda made=made: int(made.sum()))  # type: ignore[misc]
        gpuckpt.agent.install()

    def cublas(self) -> None:
        torch = self.torch
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            a = torch.ones(2048, 2048, device="cuda", dtype=dtype)
            (a @ a).add_(torch.addmm(a[0], a, a))
        self.sums.append(lambda: int((torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")).sum()))

    def local_memory(self) -> None:
        from cuda.bindings import driver as cu

        self.keep.append(self.call(cu.cuModuleLoadData(DEEP + b"\0")))
        kernel = self.call(cu.cuModuleGetFunction(self.keep[-1], b"deep"))
        out = self.torch.zeros(256, device="cuda", dtype=self.torch.int32)

        def run() -> int:
            import ctypes

            arguments = (out.data_ptr(), 2048), (ctypes.c_uint64, ctypes.c_uint32)
            self.call(cu.cuLaunchKernel(kernel, 1, 1, 1, 256, 1, 1, 0, self.torch.cuda.current_stream().cuda_stream, arguments, 0))
            return int(out.sum())

        self.sums.append(run)
        run()

    def graphs(self) -> None:
        handle = self.torch.cuda.graph_pool_handle()
        self.capture(lambda graph: self.torch.cuda.graph(graph, pool=handle))

    def graphs_in_the_pool(self) -> None:
        self.capture(self.tags.cuda_graph)

    def capture(self, within: Callable[[Any], Any]) -> None:
        torch, made = self.torch, []
        x = torch.ones(1 << 18, device="cuda")
        for _ in range(self.n):
            graph = torch.cuda.CUDAGraph()
            with within(graph):
                y = x
                for _ in range(NODES):
                    y = torch.sin(y)
            made.append((graph, y))
        self.keep.append(x)  # what the graphs read must outlast them

        def replay() -> int:
            total = 0
            for graph, y in made:
                graph.replay()
                torch.cuda.synchronize()
                total += int(y.view(torch.int32).sum(dtype=torch.int64))
            return total

        self.sums.append(replay)

    def nccl(self) -> None:
        import torch.distributed as dist

        from gpuckpt.nccl import library

        dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29511", rank=0, world_size=1, device_id=self.torch.device("cuda:0"))

        self.versions = [copy.version for copy in library.loaded()]

        def reduce() -> int:
            x = self.torch.ones(1 << 20, device="cuda")
            dist.all_reduce(x)
            return int(x.sum())

        self.sums.append(reduce)

    def empty_cache(self) -> None:
        self.torch.cuda.empty_cache()

    def sleep(self) -> None:
        self.tags.sleep(discard=())

    def wake(self) -> None:
        self.tags.wake()

    def answer(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "sums": [s() for s in self.sums], "nccl": getattr(self, "versions", None), **self.books()}

    def books(self) -> dict[str, int]:
        """torch's, awake or asleep; nothing is touched."""
        if not hasattr(self, "torch"):
            return {}
        self.torch.cuda.synchronize()
        reserved, tags = self.torch.cuda.memory_reserved(), sum(s.bytes for s in self.tags.stats()) if hasattr(self, "tags") else 0
        return {"torch_mib": reserved >> 20, "outside_mib": (reserved - tags) >> 20, "torch_used_mib": self.torch.cuda.memory_allocated() >> 20}

    @staticmethod
    def call(result: Any) -> Any:
        error, *values = result
        if int(error):
            raise RuntimeError(error.name)
        return values[0] if values else None


class Simulated:
    """In its place on a simulated GPU."""

    TAKES = {"context": 500, "modules": 60, "pool": 768, "cublas": 90, "local memory": 1056, "graphs": 70, "graphs in the pool": 60, "nccl": 200}
    CACHED = 30

    def __init__(self, _: int) -> None:
        from gpuckpt.driver.simulated_store import SimulatedWorldDir

        self.world = SimulatedWorldDir(os.environ["GPUCKPT_SIMULATE"])
        self.moved: Any = None
        self.cached = 0
        self.told: dict[str, int] = {}

    def take(self, mib: int) -> None:
        with self.world.cuda_call(os.getpid()), self.world.transaction() as world:
            if mib > 0:
                world.rules.alloc(os.getpid(), mib * MIB)
            else:
                world.rules.release(os.getpid(), -mib * MIB)

    def __getattr__(self, name: str) -> Callable[[], None]:
        step = name.replace("_", " ")
        if step not in self.TAKES:
            raise AttributeError(name)
        return lambda: self.step(step)

    def step(self, step: str) -> None:
        from gpuckpt.driver import simtarget

        if step == "context":
            uuids = {gpu.index: uuid for uuid, gpu in self.world.peek().rules.gpus.items()}
            self.world.register(os.getpid(), {uuids[0]: self.TAKES[step] * MIB})
            return
        self.take(self.TAKES[step])
        self.told |= {name: self.TAKES[of] * MIB for name, of in TOLD.items() if of == step}
        if step == "pool":
            self.moved = simtarget._install_pool(self.world, {"weights": 512 * MIB, "kv_cache": 256 * MIB})
            simtarget._install_agent(self.world, simtarget._parse([]))
            simtarget._tell(self.told)
        if step == "cublas":
            self.take(self.CACHED)
            self.cached = self.CACHED

    def empty_cache(self) -> None:
        if self.cached:
            self.take(-self.cached)
            self.cached = 0

    def sleep(self) -> None:
        self.empty_cache()
        self.moved.sleep(offload=[s.tag for s in self.moved.stats()])

    def wake(self) -> None:
        self.moved.wake()

    def answer(self) -> dict[str, Any]:
        with self.world.cuda_call(os.getpid()) as contents:
            return {"pid": os.getpid(), "sums": [len(path.read_bytes()) for path in contents], **self.books()}

    def books(self) -> dict[str, int]:
        return {"torch_mib": self.cached, "outside_mib": self.cached}


def target(graphs: int) -> None:
    """The process: does what a line asks, and answers it; at its safe point while it waits, once it has an agent."""
    process: Any = Simulated(graphs) if os.environ.get("GPUCKPT_SIMULATE") else Real(graphs)
    print(json.dumps({"pid": os.getpid()}), flush=True)
    for line in lines():
        done: dict[str, Any] = {}
        if line != "check":
            try:
                getattr(process, line.replace(" ", "_"))()
            except Exception as e:  # noqa: BLE001 - it goes on with the next step
                done = {"error": f"{type(e).__name__}: {e}"[:500]}
        print(json.dumps({**(process.answer() if line not in ("sleep", "empty_cache") else process.books()), **done}), flush=True)


def lines() -> Iterator[str]:
    while True:
        agent = sys.modules.get("gpuckpt.agent")
        while agent and not select.select([sys.stdin], [], [], 0.005)[0]:
            agent.checkpoint_here()
        line = sys.stdin.readline()
        if not line:
            return
        yield line.strip()


def main() -> None:
    import lab
    from lab import SIMULATED, Results, Target, gpuckpt, left_s, limit, used_mib

    from gpuckpt.nccl.environment import SETTINGS

    graphs = int(sys.argv[1]) if len(sys.argv) > 1 else 64
    r = Results("what_stays")
    limit(r, 120)
    empty = used_mib()
    r.note("empty_mib", empty)
    r.note("graphs", [graphs, NODES])
    environ = {s.name: s.value for s in SETTINGS if s.value is not None}
    t = Target(0, program=[sys.executable, str(Path(__file__).resolve()), "--target", str(graphs)], env=environ)

    def ask(what: str) -> dict[str, Any]:
        t.send(what)
        return t.read(max(5.0, left_s() - 5))

    def listed() -> int | None:
        if SIMULATED:
            return None
        nvml = lab.pynvml
        running = nvml.nvmlDeviceGetComputeRunningProcesses(nvml.nvmlDeviceGetHandleByIndex(0))
        return next(((p.usedGpuMemory or 0) >> 20 for p in running if p.pid == t.pid), None)

    def read() -> dict[str, int | None]:
        """What NVML says of the process (None: it does not list it), and of the card beyond what it had before."""
        return {"process_mib": listed(), "card_mib": used_mib() - empty}

    def suspended(method: str) -> dict[str, Any]:
        code, down, _ = gpuckpt("suspend", t.pid, "--method", method, timeout=max(5.0, left_s()))
        if code:
            return {"exit": code, "error": down.get("error")}
        found: dict[str, Any] = {**read(), "suspend_s": down.get("seconds")}
        if method == "pool":
            found["told_mib"] = {s["class"]: s["bytes"] >> 20 for s in down["processes"][0]["stays"]}
        code, up, _ = gpuckpt("resume", t.pid, timeout=max(5.0, left_s()))
        return {**found, "exit": code, "resume_s": up.get("seconds"), "error": up.get("error")}

    rows: list[dict[str, Any]] = []
    takes, lost = 4.0, False  # seconds of a way: a guess until there is one
    for step in STEPS:
        if lost or left_s() < 10:
            r.note("left_out", [*r.document.get("left_out", []), step])
            continue
        answer = ask(step)
        if answer.get("nccl"):
            r.document["machine"]["nccl"] = answer["nccl"]
        row: dict[str, Any] = {"step": step, **{k: answer.get(k) for k in ("torch_mib", "torch_used_mib", "error")}, "running": read()}
        rows.append(row)
        same = True
        ways = ["driver"] if step == "context" else ["empty_cache", "driver"] if step == "modules" else ["empty_cache", "sleep", "pool", "driver"]
        for way in ways:
            if left_s() < 2 * takes + 5:
                r.note("left_out", [*r.document.get("left_out", []), f"{step}: {way}"])
                continue
            begun = time.monotonic()
            if way in ("empty_cache", "sleep"):
                books = ask(way)
                row[way] = {**read(), **{k: books[k] for k in ("error", "outside_mib") if books.get(k)}}
                if way == "sleep":
                    ask("wake")
            else:
                row[way] = suspended(way)
                takes = max(takes, time.monotonic() - begun)
                lost = lost or row[way]["exit"] == 3
            if not lost and step != "context":
                same = same and ask("check").get("sums") == answer.get("sums")
        row["same"] = same and not lost
        r.note("steps", rows)
        print("ok  " if row["same"] and not row["error"] else "FAIL", json.dumps(row, default=str)[:900], flush=True)
    r.check("every step was taken", [x["step"] for x in rows if not x["error"]] == list(STEPS), [[x["step"], x["error"]] for x in rows if x["error"]])
    r.check("same answers after every way", all(x["same"] for x in rows), [x["step"] for x in rows if not x["same"]])
    down = [[x["step"], way, x[way].get("error")] for x in rows for way in ("pool", "driver") if way in x and x[way].get("exit")]
    r.check("every suspend and resume did", not down, down)
    left = {x["step"]: x["driver"].get("card_mib") for x in rows if "driver" in x}
    r.check("0 MiB above the empty card after the driver's", bool(left) and all(v is not None and v <= 0 for v in left.values()), left)
    at = {x["step"]: x for x in rows}
    if "pool" in at and "sleep" in at["pool"]:
        gone = at["pool"]["running"]["card_mib"] - at["pool"]["sleep"]["card_mib"]
        r.check("what is under tags leaves with pool.sleep()", gone >= 768, gone)
    compare(r, rows)
    t.end()
    r.finish()


def compare(r: Any, rows: list[dict[str, Any]]) -> None:
    """What the report of the pool alone told by class, beside what NVML and torch say."""
    told = {x["step"]: x["pool"] for x in rows if "told_mib" in x.get("pool", {})}
    held = {step: p["process_mib"] if p["process_mib"] is not None else p["card_mib"] for step, p in told.items()}
    sums = {step: [sum(p["told_mib"].values()), held[step]] for step, p in told.items()}
    r.check("its classes come to what NVML counts", all(abs(a - b) <= 8 for a, b in sums.values()), sums)  # each is cut to whole MiB
    asleep = {x["step"]: x["sleep"].get("outside_mib", 0) for x in rows if "sleep" in x}
    torch = {step: [p["told_mib"].get("torch", 0), asleep[step]] for step, p in told.items() if step in asleep}
    r.check("its torch is what torch has outside of tags", all(abs(a - b) <= 2 for a, b in torch.values()), torch)
    steps = list(told)
    for name, step in TOLD.items():
        if step in steps[1:]:
            before = steps[steps.index(step) - 1]
            grown = [told[step]["told_mib"].get(name, 0) - told[before]["told_mib"].get(name, 0), held[step] - held[before]]
            r.note(f"{name}: told, by NVML", grown)  # NCCL's step brings its code as well, and an older NCCL tells nothing
            if name == "local-memory":
                r.check("its local memory is what the greedy kernel took", abs(grown[0] - grown[1]) <= 0.05 * grown[1], grown)
    context = next((x["running"]["process_mib"] or x["running"]["card_mib"] for x in rows if x["step"] == "context"), 0)
    least = {s: sum(p["told_mib"].get(n, 0) for n in ("context-and-modules", "local-memory", "printf-malloc")) for s, p in told.items()}
    r.check("what nobody tells is no less than a bare context", all(n >= context for n in least.values()), [context, least])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--target"]:
        target(int(sys.argv[2]))
    else:
        main()
