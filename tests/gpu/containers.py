"""Suspend and resume through the layouts that containers have: namespaces and the capabilities that Docker leaves. Needs root and util-linux.

What a container runtime adds besides (seccomp, AppArmor, a cgroup of its own) is not part of it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
from lab import HERE, Results, Target, used_mib

DOCKER = "chown,dac_override,fowner,fsetid,kill,setgid,setuid,setpcap,net_bind_service,net_raw,sys_chroot,mknod,audit_write,setfcap"
LEFT = ["setpriv", "--bounding-set=-all," + ",".join(f"+{c}" for c in DOCKER.split(",")), "--inh-caps=-all"]
WITH_PTRACE = [LEFT[0], LEFT[1] + ",+sys_ptrace", LEFT[2]]
USER = ["setpriv", "--reuid=1000", "--regid=1000", "--clear-groups"]
ROOM = ["unshare", "--pid", "--mount", "--ipc", "--uts", "--fork", "--mount-proc"]

r = Results("containers")
yama = Path("/proc/sys/kernel/yama/ptrace_scope")
r.note("yama", yama.read_text().strip() if yama.exists() else None)
table: dict[str, str] = {}
seen: dict[str, list[int | None]] = {}  # by layout: bytes of the target, as NVML tells them there


def inside(pid: int) -> int:
    """The pid that the process has in its own namespace."""
    line = next(x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("NSpid:"))
    return int(line.split()[-1])


def command(prefix: list[str], state: Path, *words: object) -> dict[str, Any]:
    env = {**os.environ, "HOME": "/tmp", "GPUCKPT_STATE_DIR": str(state), "XDG_RUNTIME_DIR": str(state)}
    gpuckpt = shutil.which("gpuckpt") or "gpuckpt"
    p = subprocess.run([*prefix, gpuckpt, *map(str, words), "--json"], capture_output=True, text=True, timeout=60, env=env, stdin=subprocess.DEVNULL)
    try:
        return dict(json.loads(p.stdout))
    except ValueError:
        return {"ok": False, "error": {"code": f"exit {p.returncode}", "message": (p.stdout + p.stderr)[-300:]}}


def layout(name: str, prefix: list[str], pid: int, owner: int | None = None) -> None:
    state = Path(f"/tmp/containers.{len(table)}")
    shutil.rmtree(state, ignore_errors=True)
    state.mkdir(mode=0o700)
    if owner:
        os.chown(state, owner, owner)
    down = command(prefix, state, "suspend", pid)
    left = used_mib()
    seen[name] = [g["bytes_before"] for p in down.get("processes", []) for g in p["gpus"]]  # none: NVML lists it not, or by another number
    r.note("gpu_bytes_seen", seen)
    error = down.get("error")
    if down["ok"]:
        up = command(prefix, state, "resume", pid)
        same = target.same() if up["ok"] else False
        table[name] = "may" if up["ok"] and same and left < 10 else f"suspended, {left} MiB left, resume: {up.get('error')}, same: {same}"
    else:
        table[name] = f"may not: {error['code']}: {error['message'][:200]}" if error else "?"
    print(f"{name}: {table[name]}", flush=True)
    r.note("layouts", table)


def start(words: list[str]) -> tuple[Target, int]:
    """A target as a child of the container's first process; its pid on the host."""
    found = Target(0.1, program=[*words, "sh", "-c", f"{sys.executable} {HERE / 'target.py'} 0.1; true"], env={"HOME": "/tmp"})
    for p in psutil.process_iter(["cmdline"]):
        line = p.info["cmdline"] or []
        if line[:1] == [sys.executable] and str(HERE / "target.py") in line:
            found.pid = p.pid
    return found, found.pid


target, host = start([*ROOM, *LEFT])
try:
    r.check("the target has a pid of its own inside", inside(host) != host, [host, inside(host)])
    enter = ["nsenter", "-t", str(host), "--pid", "--mount", "--ipc", "--uts"]
    side = ["nsenter", "-t", str(host), "--pid", "unshare", "--mount", "--fork", "--mount-proc"]
    layout("one container, Docker's capabilities", [*enter, *LEFT], inside(host))
    layout("on the host, root; target in a container", [], host)
    layout("side container in the target's pid namespace, Docker's capabilities", [*side, *LEFT], inside(host))
    layout("side container in the target's pid namespace, and SYS_PTRACE", [*side, *WITH_PTRACE], inside(host))
finally:
    target.end()
rootless = [*USER, "unshare", "--user", "--map-root-user", *ROOM[1:]]
try:
    target, host = start(rootless)
except Exception as e:
    r.note("rootless", f"the target did not start: {e}")
else:
    try:
        enter = ["nsenter", "-t", str(host), "--user", "--preserve-credentials", "--pid", "--mount", "--ipc", "--uts"]
        layout("rootless container, in it", [*USER, *enter], inside(host), 1000)
        layout("on the host, root; target in a rootless container", [], host)
        layout("on the host, the container's user; target in a rootless container", USER, host, 1000)
    finally:
        target.end()
r.check("the layouts were tried", len(table) >= 4, table)
r.finish()
