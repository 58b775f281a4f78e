"""What the driver and the kernel really show of CUDA processes: written to $OUT/driver-facts.json.

Every driver call runs in a process of its own, so that a hang costs a timeout and nothing else.
"""
from __future__ import annotations

import fcntl
import glob
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

OUT = Path(os.environ.get("OUT", "."))
FACTS: dict[str, object] = {}
CALL = r"""
import sys, time, json, os
uid = int(sys.argv[4]) if len(sys.argv) > 4 else 0
if len(sys.argv) > 5 and sys.argv[5] == "nocaps":
    pass
if uid: os.setgroups([]); os.setgid(uid); os.setuid(uid)
from cuda.bindings import driver as cu
op, pid, arg = sys.argv[1], int(sys.argv[2]), sys.argv[3]
t = time.perf_counter()
print("begin", flush=True)
if op == "Lock":
    a = cu.CUcheckpointLockArgs(); a.timeoutMs = int(arg); r = cu.cuCheckpointProcessLock(pid, a)
elif op in ("GetState", "GetRestoreThreadId"): r = getattr(cu, "cuCheckpointProcess" + op)(pid)
else: r = getattr(cu, "cuCheckpointProcess" + op)(pid, None)
print(json.dumps([r[0].name, *[getattr(x, "name", x) for x in r[1:]], round(time.perf_counter() - t, 4)]), flush=True)
"""
KINDS = {
    "nvml": "import pynvml; pynvml.nvmlInit(); pynvml.nvmlDeviceGetHandleByIndex(0)",
    "libcuda": "import ctypes; ctypes.CDLL('libcuda.so.1')",
    "cuinit": "import ctypes; l = ctypes.CDLL('libcuda.so.1'); assert l.cuInit(0) == 0",
    "context": "import ctypes; l = ctypes.CDLL('libcuda.so.1'); l.cuInit(0); c = ctypes.c_void_p(); assert l.cuDevicePrimaryCtxRetain(ctypes.byref(c), 0) == 0",
    "torch": "import torch; x = torch.ones(1 << 28, device='cuda'); torch.cuda.synchronize()",
    "torch8": "import torch; x = torch.ones(2 << 30, device='cuda'); torch.cuda.synchronize()",
    "plain": "pass",
}


def start(kind: str, uid: int = 0, extra: str = "") -> subprocess.Popen[str]:
    pre = f"import os; os.setgroups([]); os.setgid({uid}); os.setuid({uid})\n" if uid else ""
    code = pre + KINDS[kind] + "\n" + extra + "\nimport sys\nprint('ready', flush=True)\nfor line in sys.stdin: exec(line); print('did', flush=True)\n"
    p = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    line = p.stdout.readline()
    while line and "ready" not in line:
        line = p.stdout.readline()
    return p


def call(op: str, pid: int, arg: object = 10000, uid: int = 0, timeout: float = 30) -> list[object]:
    p = subprocess.Popen([sys.executable, "-c", CALL, op, str(pid), str(arg), str(uid)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        o, e = p.communicate(timeout=timeout)
        last = o.strip().splitlines()[-1] if o.strip() else ""
        return json.loads(last) if last.startswith("[") else ["rc", p.returncode, e[-200:]]
    except subprocess.TimeoutExpired:
        p.kill()
        return ["HUNG", timeout]


def look(pid: int) -> dict[str, object]:
    fds: Counter[str] = Counter()
    for f in glob.glob(f"/proc/{pid}/fd/*"):
        try:
            t = os.readlink(f)
        except OSError:
            continue
        if "nvidia" in t:
            fds[t] += 1
    maps: Counter[str] = Counter()
    for line in open(f"/proc/{pid}/maps"):
        if "nvidia" in line or "libcuda.so" in line:
            maps[line.split()[-1]] += 1
    comms = Counter(open(p).read().strip() for p in glob.glob(f"/proc/{pid}/task/*/comm"))
    return {"fds": dict(fds), "maps": {k: v for k, v in maps.items() if "site-packages" not in k}, "threads": dict(comms), "wchan_state": open(f"/proc/{pid}/stat").read().rsplit(")")[1].split()[0]}


def big(pid: int, least: int = 200 << 20) -> list[str]:
    out, head = [], ""
    for line in open(f"/proc/{pid}/smaps"):
        if "-" in line.split()[0] and ":" not in line.split()[0]:
            head = line.strip()
        elif line.startswith("VmFlags"):
            a, b = (int(x, 16) for x in head.split()[0].split("-"))
            if b - a >= least and "rw" in head:
                out.append(f"{(b - a) / 2**20:.1f} MiB {head.split(maxsplit=1)[1]} rss={rss} {line.strip()}")
        elif line.startswith("Rss:"):
            rss = line.split()[1]
    return out


def note(name: str, value: object) -> None:
    FACTS[name] = value
    print(name, json.dumps(value)[:900], flush=True)
    (OUT / "driver-facts.json").write_text(json.dumps(FACTS, indent=1))


def main() -> None:
    import pynvml

    t = time.perf_counter()
    pynvml.nvmlInit()
    note("nvml_init_s", round(time.perf_counter() - t, 4))
    h = pynvml.nvmlDeviceGetHandleByIndex(0)
    listed = lambda: [(p.pid, p.usedGpuMemory) for p in pynvml.nvmlDeviceGetComputeRunningProcesses(h)]  # noqa: E731
    used = lambda: pynvml.nvmlDeviceGetMemoryInfo(h, version=pynvml.nvmlMemory_v2).used >> 20  # noqa: E731
    note("machine", {"driver": pynvml.nvmlSystemGetDriverVersion(), "gpu": pynvml.nvmlDeviceGetName(h), "uuid": pynvml.nvmlDeviceGetUUID(h), "persistence": pynvml.nvmlDeviceGetPersistenceMode(h), "compute_mode": pynvml.nvmlDeviceGetComputeMode(h), "minor": pynvml.nvmlDeviceGetMinorNumber(h), "thp": open("/sys/kernel/mm/transparent_hugepage/enabled").read().strip(), "yama": Path("/proc/sys/kernel/yama/ptrace_scope").read_text().strip() if Path("/proc/sys/kernel/yama/ptrace_scope").exists() else None, "caps": [line.strip() for line in open("/proc/self/status") if line.startswith("Cap")], "python": sys.version, "dev": sorted(glob.glob("/dev/nvidia*")), "uname": os.uname().release})
    note("import_s", {m: subprocess.run([sys.executable, "-c", f"import time; t=time.perf_counter(); {m}; print(round(time.perf_counter()-t,3))"], capture_output=True, text=True).stdout.strip() for m in ("from cuda.bindings import driver", "import pynvml", "import psutil", "import click", "import rich.table", "import filelock", "import platformdirs", "import hypothesis, pytest")})
    for kind in ("plain", "nvml", "libcuda", "cuinit", "context", "torch"):
        p = start(kind)
        note("kind_" + kind, {"state": call("GetState", p.pid), "restore_tid": call("GetRestoreThreadId", p.pid), "nvml": [b for q, b in listed() if q == p.pid], **look(p.pid)})
        if kind in ("nvml", "libcuda", "cuinit", "context"):
            note("cycle_" + kind, [call(c, p.pid) for c in ("Lock", "Checkpoint", "GetState", "Restore", "Unlock")])
        p.kill()
        p.wait()
    p = start("torch", extra="import os\nif os.fork() == 0:\n    import time\n    open('/tmp/child', 'w').write(str(os.getpid())); time.sleep(600)\nimport time; time.sleep(0.5)")
    child = int(open("/tmp/child").read())
    tid = max(int(x) for x in os.listdir(f"/proc/{p.pid}/task"))
    note("forked_child", {"state": call("GetState", child), "nvml": [b for q, b in listed() if q == child], **look(child)})
    note("odd_pids", {"tid": call("GetState", tid), "pid1": call("GetState", 1), "kthread": call("GetState", 2), "dead": call("GetState", 4194000)})
    before = set(big(p.pid))
    r = {"lock": call("Lock", p.pid), "locked": look(p.pid), "checkpoint": call("Checkpoint", p.pid), "checkpointed": look(p.pid), "restore_tid": call("GetRestoreThreadId", p.pid), "new_maps": sorted(set(big(p.pid)) - before), "used_mib": used(), "nvml": listed()}
    note("checkpointed", r)
    os.kill(child, signal.SIGKILL)
    note("stopped_checkpointed", [os.kill(p.pid, signal.SIGSTOP), call("GetState", p.pid, timeout=4), os.kill(p.pid, signal.SIGCONT)])
    note("back", [call("Restore", p.pid), call("Unlock", p.pid)])
    os.kill(p.pid, signal.SIGSTOP)
    note("stopped_running", [call("GetState", p.pid, timeout=4), call("Lock", p.pid, 500, timeout=6)])
    os.kill(p.pid, signal.SIGCONT)
    time.sleep(1)
    note("stopped_lock_caller_killed_then_continued", call("GetState", p.pid, timeout=5))
    note("usable_after", [call("Lock", p.pid, timeout=8), call("Unlock", p.pid, timeout=8)])
    p.kill(), p.wait()

    for op, delay in (("Lock", 0.5), ("Checkpoint", 0.3), ("Checkpoint", 1.5), ("Restore", 0.2), ("Restore", 0.6), ("Restore", 1.2)):
        p = start("torch8", extra="g = torch.cuda.CUDAGraph()\na = torch.randn(8192, 8192, device='cuda')\nb = a @ a\ntorch.cuda.synchronize()")
        if op == "Lock":
            p.stdin.write("for _ in range(400): b = a @ a\n"), p.stdin.flush(), p.stdout.readline()
        chain = {"Lock": [], "Checkpoint": ["Lock"], "Restore": ["Lock", "Checkpoint"]}[op]
        done = [call(c, p.pid) for c in chain]
        q = subprocess.Popen([sys.executable, "-c", CALL, op, str(p.pid), "20000"], stdout=subprocess.PIPE, text=True)
        q.stdout.readline()
        time.sleep(delay)
        ended = q.poll()
        q.kill(), q.wait()
        t = time.perf_counter()
        states = [call("GetState", p.pid, timeout=20)]
        time.sleep(6)
        states.append(call("GetState", p.pid, timeout=20))
        then = {"CU_PROCESS_STATE_CHECKPOINTED": ["Restore", "Unlock"], "CU_PROCESS_STATE_LOCKED": ["Unlock"]}.get(str(states[-1][1]), [])
        tail = [call(c, p.pid) for c in then]
        p.stdin.write("print(float(x.double().sum().item()) == float(2 << 30))\n"), p.stdin.flush()
        os.set_blocking(p.stdout.fileno(), True)
        import select
        answer = p.stdout.readline().strip() if select.select([p.stdout], [], [], 10)[0] else "no answer"
        note(f"caller_killed_in_{op}_after_{delay}", {"already_over": ended, "before": done, "states": states, "then": tail, "answer": answer, "mib": used()})
        p.kill(), p.wait()

    for own, other in ((1000, 1000), (1000, 1001), (0, 1001)):
        p = start("context", uid=own)
        note(f"target_uid_{own}_caller_uid_{other}", [call("GetState", p.pid, uid=other), call("Lock", p.pid, uid=other), call("Checkpoint", p.pid, uid=other), call("Restore", p.pid, uid=other), call("Unlock", p.pid, uid=other)])
        p.kill(), p.wait()

    p = start("context")
    try:
        f = os.open(f"/proc/{p.pid}", os.O_RDONLY)
        g = os.open(f"/proc/{p.pid}", os.O_RDONLY)
        fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(g, fcntl.LOCK_EX | fcntl.LOCK_NB)
            note("flock_proc_dir", "not exclusive")
        except BlockingIOError:
            note("flock_proc_dir", "exclusive")
    except OSError as e:
        note("flock_proc_dir", repr(e))
    t = time.perf_counter()
    f = os.open("/dev/nvidia0", os.O_RDONLY | os.O_CLOEXEC)
    note("open_dev_s", round(time.perf_counter() - t, 4))
    try:
        fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        g = os.open("/dev/nvidia0", os.O_RDONLY)
        try:
            fcntl.flock(g, fcntl.LOCK_EX | fcntl.LOCK_NB)
            note("flock_dev", "not exclusive")
        except BlockingIOError:
            note("flock_dev", "exclusive")
    except OSError as e:
        note("flock_dev", repr(e))
    p.kill()


main()
