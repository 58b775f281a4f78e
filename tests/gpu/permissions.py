"""Who may suspend whom on the real driver: uids and capabilities. Needs root, to become others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from lab import Results, Target

CALL = "import sys; from cuda.bindings import driver as cu; r = cu.cuCheckpointProcessGetState(int(sys.argv[1])); print(r[0].name)"
r = Results("permissions")
yama = Path("/proc/sys/kernel/yama/ptrace_scope")
r.note("yama", yama.read_text().strip() if yama.exists() else None)
callers = {
    "root": [],
    "root without any capability": ["setpriv", "--bounding-set=-all", "--inh-caps=-all"],
    "root without CAP_SYS_PTRACE": ["setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace"],
    "uid 1000": ["setpriv", "--reuid=1000", "--regid=1000", "--clear-groups"],
    "uid 1001": ["setpriv", "--reuid=1001", "--regid=1001", "--clear-groups"],
    "uid 1001 with CAP_SYS_PTRACE": ["setpriv", "--reuid=1001", "--regid=1001", "--clear-groups", "--inh-caps=+sys_ptrace", "--ambient-caps=+sys_ptrace"],
}
table = {}
for owner, uid in (("root", None), ("uid 1000", 1000)):
    target = Target(0.1, user=uid, env={"HOME": "/tmp"})
    for name, prefix in callers.items():
        p = subprocess.run([*prefix, sys.executable, "-c", CALL, str(target.pid)], capture_output=True, text=True, timeout=30, env={**os.environ, "HOME": "/tmp"})
        table[f"{name} on a target of {owner}"] = p.stdout.strip() or p.stderr.strip()[-200:]
    target.end()
r.note("get_state", table)
print(json.dumps(table, indent=1))
r.check("root may", table["root on a target of root"] == "CUDA_SUCCESS")
r.finish()
