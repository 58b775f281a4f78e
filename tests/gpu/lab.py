"""What the scripts here share: a torch target that answers, our command line, NVML readings, and the result file."""

from __future__ import annotations

import json
import os
import platform
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from gpuckpt.agent.client import Agents
from gpuckpt.inspect import processes

SIMULATED = bool(os.environ.get("GPUCKPT_SIMULATE"))
if SIMULATED:
    import lab_simulated
else:
    import pynvml

    pynvml.nvmlInit()

signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended, too
HERE = Path(__file__).parent
SHARED = bool(os.environ.get("LAB_SHARED"))
MARK = os.environ.setdefault("GPUCKPT_LAB", str(os.getpid()))  # what this script starts has it in its environment
RESULTS = HERE.parent.parent / "benchmarks" / "results"
OUT = Path(os.environ.get("OUT", tempfile.mkdtemp(prefix="gpuckpt-simulated-") if SIMULATED else RESULTS))
if SIMULATED and OUT.resolve() == RESULTS:
    sys.exit(f"{RESULTS} is for what ran on GPUs: set OUT to another directory")


#: How long a program may take to come to its safe point, where its NCCL is asked for, in seconds.
NCCL_LOOK_S = 10.0
_begun = time.monotonic()
_limit_s = float("inf")
_started: list[subprocess.Popen[str] | Target] = []


def left_s() -> float:
    """Seconds until the script's own limit; for ever where it has none."""
    return _limit_s - (time.monotonic() - _begun)


def limit(results: Results, seconds: float) -> None:
    """The script ends *seconds* after its start, or ``$LIMIT_S``, whatever hangs, and what it started with it. What it saw is in its file."""
    global _limit_s  # noqa: PLW0603
    _limit_s = float(os.environ.get("LIMIT_S", seconds))

    def end() -> None:
        for started in reversed(_started):
            try:
                os.kill(started.pid, signal.SIGKILL)
            except (OSError, AttributeError):  # it ended, or has not said who it is
                continue
        results.check("within its time", False, f"{_limit_s:g} s")
        os._exit(3)

    watchdog = threading.Timer(left_s(), end)
    watchdog.daemon = True
    watchdog.start()


def used_mib(index: int = 0) -> int:
    """Of the whole GPU; with ``LAB_SHARED`` of the processes in this script's lane (lane.sh), where others use the GPU as well."""
    if SIMULATED:
        return lab_simulated.used_mib(index)
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    if SHARED:
        return sum(p.usedGpuMemory or 0 for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle) if _lane(p.pid) == _lane(os.getpid())) >> 20
    return pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used >> 20


def _lane(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/mnt")
    except OSError:
        return None


def all_used_mib() -> int:
    """On all GPUs together."""
    count = len(lab_simulated.world.gpus()) if SIMULATED else pynvml.nvmlDeviceGetCount()
    return sum(used_mib(index) for index in range(count))


def free_mib(index: int = 0) -> int:
    if SIMULATED:
        return lab_simulated.free_mib(index)
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    return pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).free >> 20


def machine() -> dict[str, Any]:
    found = {}
    for name in ("gpuckpt", "torch", "vllm", "cuda-bindings", "nvidia-ml-py"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if SIMULATED:
        return {"simulated": True}
    return {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0)),
        "gpus": pynvml.nvmlDeviceGetCount(),
        **({"gpu_shared_with_other_scripts": True} if SHARED else {}),
        "driver": pynvml.nvmlSystemGetDriverVersion(),
        "persistence_mode": bool(pynvml.nvmlDeviceGetPersistenceMode(pynvml.nvmlDeviceGetHandleByIndex(0))),
        "thp": Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().strip(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": found,
    }


class Results:
    """Collects figures and checks; ``finish`` writes them and exits with 1 if a check failed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.document: dict[str, Any] = {"name": name, "machine": machine(), "checks": {}}

    def earlier(self, key: str) -> list[dict[str, Any]]:
        """The rows that an earlier run on a machine of this kind left in the result file, which this one has from now on: a short loan goes on where
        the last one ended."""
        before = self._before()
        same = all(before.get("machine", {}).get(k) == self.document["machine"].get(k) for k in ("gpu", "driver", "thp", "simulated"))
        self.document[key] = list(before.get(key, [])) if same else []
        return list(self.document[key])

    def appended(self, key: str) -> list[dict[str, Any]]:
        """The same of whatever machine: each row says which."""
        self.document[key] = self._before().get(key, [])
        return list(self.document[key])

    def _before(self) -> dict[str, Any]:
        path = OUT / f"{self.name}.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def check(self, what: str, ok: bool, seen: object = None) -> bool:
        """Whether *ok*. What failed once stays failed; what is asked again and holds is not said again."""
        checks = self.document["checks"]
        if not ok or what not in checks:
            print(f"{'ok  ' if ok else 'FAIL'} {what}" + ("" if ok and seen is None else f": {json.dumps(seen, default=str)[:400]}"), flush=True)
        if what not in checks or checks[what]["ok"]:
            checks[what] = {"ok": bool(ok), "seen": seen}
        self.write()
        return bool(ok)

    def note(self, key: str, value: object) -> None:
        self.document[key] = value
        self.write()

    def note_nccl(self, pids: Iterable[int]) -> None:
        """The versions of NCCL in *pids*, each of which has an agent: those that their loaded libraries tell."""
        agents = Agents()
        try:
            asked = agents.hellos(p.id for pid in pids if (p := processes.read(pid)))
            seen = agents.looks(asked, NCCL_LOOK_S).values()
        finally:
            agents.close()
        self.document["machine"]["nccl"] = sorted({c["nccl"] for hello in seen if hello for c in hello.communicators})
        self.check("NCCL is known", bool(self.document["machine"]["nccl"]), [hello and hello.unseen for hello in seen])

    def write(self) -> None:
        (OUT / f"{self.name}.json").write_text(json.dumps(self.document, indent=1, default=str))

    def finish(self) -> None:
        failed = [k for k, v in self.document["checks"].items() if not v["ok"]]
        print(f"== {self.name}: {len(self.document['checks']) - len(failed)} ok, {len(failed)} failed {failed}", flush=True)
        sys.exit(1 if failed or not self.document["checks"] else 0)


class Rounds:
    """Whether there is time for another round: one as long as the longest so far, and *rest_s* for the end of the script."""

    def __init__(self, rest_s: float = 15.0) -> None:
        self._rest_s, self._longest_s = rest_s, 0.0

    def took(self, seconds: float) -> None:
        self._longest_s = max(self._longest_s, seconds)

    def another(self, at_least_s: float = 0.0) -> bool:
        return left_s() - self._rest_s > max(at_least_s, self._longest_s)


DRIVER_CALLS = """
import json, sys, time
from cuda.bindings import driver as cu
pid, found = int(sys.argv[1]), []
for name in sys.argv[2:]:
    arguments = {"Lock": [cu.CUcheckpointLockArgs()], "Checkpoint": [None], "Restore": [None], "Unlock": [None]}.get(name, [])
    if name == "Lock":
        arguments[0].timeoutMs = 10000
    begun = time.perf_counter()
    r = getattr(cu, "cuCheckpointProcess" + name)(pid, *arguments)
    found.append([name, r[0].name, str(r[1]) if len(r) > 1 else None, time.perf_counter() - begun])
print(json.dumps(found))
"""


def calls(pid: int, names: tuple[str, ...]) -> list[list[Any]]:
    """The driver's own calls, in one process, as NVIDIA's cuda-checkpoint makes them: [call, result, value, seconds] each."""
    if SIMULATED:
        return lab_simulated.calls(pid, names)
    p = subprocess.run([sys.executable, "-c", DRIVER_CALLS, str(pid), *names], capture_output=True, text=True, timeout=300, check=True)
    return json.loads(p.stdout)


def wall_s(command: list[Any], **options: Any) -> float:
    """Seconds that a command takes that must end well. Not with a timeout of subprocess: that looks every 50 ms whether it has ended."""
    begun = time.perf_counter()
    with subprocess.Popen(command, **options) as p:
        _started.append(p)
        try:
            code = p.wait()
        finally:
            _started.remove(p)
    seconds = time.perf_counter() - begun
    if code:
        raise subprocess.CalledProcessError(code, command)
    return seconds


def gpuckpt(*args: object, timeout: float = 300) -> tuple[int, dict[str, Any], float]:
    """Exit code, JSON document and wall seconds of one command."""
    begun = time.perf_counter()
    p = subprocess.Popen(["gpuckpt", *map(str, args), "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    _started.append(p)
    try:
        out, err = p.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        p.kill()
        raise
    finally:
        _started.remove(p)
    seconds = time.perf_counter() - begun
    try:
        document = json.loads(out)
    except ValueError:
        document = {"error": {"code": "no-json", "message": out + err}}
    return p.returncode, document, round(seconds, 3)


class Target:
    """``target.py``, or *program*, in a session of its own, without a common ancestor: the process alone."""

    def __init__(self, *args: object, env: dict[str, str] | None = None, user: int | None = None, program: list[str] | None = None) -> None:
        words = [sys.executable, *(lab_simulated.command(args) if SIMULATED else [str(HERE / "target.py"), *map(str, args)])]
        words = program or words
        as_user = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"] if user else []
        self.p = subprocess.Popen(
            ["setsid", "--fork", *as_user, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )
        _started.append(self)
        self.first = self.read()
        self.pid: int = self.first["pid"]

    def read(self, seconds: float = 180) -> dict[str, Any]:
        """The next answer; ``{"late": true}`` if there is none in time, ``{"eof": true}`` if the target ended."""
        assert self.p.stdout is not None
        if not select.select([self.p.stdout], [], [], seconds)[0]:
            return {"late": True}
        return json.loads(self.p.stdout.readline() or '{"eof": true}')

    def send(self, command: str) -> None:
        assert self.p.stdin is not None
        self.p.stdin.write((lab_simulated.translate(command) if SIMULATED else command) + "\n")
        self.p.stdin.flush()

    def ask(self, command: str = "check") -> dict[str, Any]:
        self.send(command)
        return self.read()

    def same(self) -> bool:
        answer = self.ask()
        return answer.get("sum") == self.first["sum"] and answer.get("replay") == self.first.get("replay")

    def rss_mib(self) -> int:
        return psutil.Process(self.pid).memory_info().rss >> 20

    def end(self) -> None:
        try:
            process = psutil.Process(self.pid)
            process.kill()
        except psutil.NoSuchProcess:
            pass
        wait_for(lambda: not alive(self.pid), 20)
        self.p.stdin.close()  # type: ignore[union-attr]
        self.p.wait(20)


def alive(pid: int) -> bool:
    """Whether it has not ended; one that nobody has waited for yet has."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def callers(call: str = "") -> list[psutil.Process]:
    """The processes in which commands of this script make driver calls: all, or those of one *call*. Nobody else's: they may be killed."""
    names = {f"gpuckpt-{c}"[:15] for c in ([call] if call else ("lock", "checkpoint", "restore", "unlock", "store", "drop", "load"))}
    return [p for p in psutil.process_iter(["name"]) if p.info["name"] in names and _ours(p)]


def _ours(process: psutil.Process) -> bool:
    try:
        return process.environ().get("GPUCKPT_LAB") == MARK
    except psutil.Error:
        return False


FILLER = """
import ctypes, sys
l = ctypes.CDLL("libcuda.so.1"); c = ctypes.c_void_p(); free = ctypes.c_size_t(); total = ctypes.c_size_t(); p = ctypes.c_void_p()
assert l.cuInit(0) == 0 and l.cuDevicePrimaryCtxRetain(ctypes.byref(c), int(sys.argv[1])) == 0 and l.cuCtxSetCurrent(c) == 0
assert l.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
n = free.value - (512 << 20)
assert l.cuMemAlloc_v2(ctypes.byref(p), ctypes.c_size_t(n)) == 0
assert l.cuMemsetD32_v2(p, 0xDEADBEEF, ctypes.c_size_t(n // 4)) == 0 and l.cuCtxSynchronize() == 0
print(n >> 20)
"""


def fill(index: int = 0) -> int:
    """Another process takes all but 512 MiB of a GPU, writes to all of it, and ends. Returns its MiB."""
    if SIMULATED:
        free = free_mib(index)
        other = Target((free - 700) / 1024, "plain", index)
        taken = free - free_mib(index)
        other.end()
        return taken
    done = subprocess.run([sys.executable, "-c", FILLER, str(index)], capture_output=True, text=True, timeout=60, check=True)
    return int(done.stdout)


TAKER = """
import ctypes, json, os, sys
index, mib = map(int, sys.argv[1:])
try:
    os.makedirs("/sys/fs/cgroup/gpuckpt-taker", exist_ok=True)
    open("/sys/fs/cgroup/gpuckpt-taker/cgroup.procs", "w").write("0")
except OSError:
    pass
l = ctypes.CDLL("libcuda.so.1"); c = ctypes.c_void_p(); p = ctypes.c_void_p()
assert l.cuInit(0) == 0 and l.cuDevicePrimaryCtxRetain(ctypes.byref(c), index) == 0 and l.cuCtxSetCurrent(c) == 0
print(json.dumps({"pid": os.getpid()}), flush=True)
for _ in sys.stdin:
    print(json.dumps({"taken": l.cuMemAlloc_v2(ctypes.byref(p), ctypes.c_size_t(mib << 20))}), flush=True)
"""


def taker(mib: int, index: int = 0) -> Target:
    """A process that takes *mib* of a GPU once it is sent a line. It has nothing in common with any other: not even, as root, a cgroup."""
    if SIMULATED:
        return Target(mib / 1024, "plain", index)  # at once
    return Target(program=[sys.executable, "-c", TAKER, str(index), str(mib)])


def wait_for(condition: Any, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.02)
    return False


def state(pid: int) -> str:
    """The driver's own word, asked by a process of its own."""
    if SIMULATED:
        return lab_simulated.state(pid)
    code = (
        "import sys; from cuda.bindings import driver as cu; r = cu.cuCheckpointProcessGetState(int(sys.argv[1])); "
        "print(r[0].name if int(r[0]) else r[1].name.rsplit('_', 1)[-1])"
    )
    try:
        return subprocess.run([sys.executable, "-c", code, str(pid)], capture_output=True, text=True, timeout=20).stdout.strip()
    except subprocess.TimeoutExpired:
        return "HUNG"
