"""Fake copies of libnccl, compiled once a session, and programs run with them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
#: file -> how it is compiled
COPIES = {
    "new/libnccl.so.2": ["-DVERSION=23007"],
    "plain/libnccl.so.2": ["-DVERSION=22907"],
    "old/libnccl.so.2": ["-DVERSION=22809", "-DOLD"],
    "backport/libnccl.so.2": ["-DVERSION=22907", "-DOLD"],
}


def compile_fakes(folder: Path) -> Path:
    """*folder*, with the copies, a ``libtorch_cuda.so`` that links to ``plain`` by its RPATH, and a plugin that only has the name."""
    if shutil.which("gcc") is None:
        pytest.fail("the tests of NCCL compile a fake libnccl: install gcc")
    gcc = ["gcc", "-Wall", "-Werror", "-shared", "-fPIC", "-std=gnu17"]
    for name, flags in COPIES.items():
        out = folder / name
        out.parent.mkdir(parents=True)
        subprocess.run([*gcc, *flags, "-Wl,-soname,libnccl.so.2", "-o", out, HERE / "fake_libnccl.c", "-ldl"], check=True)
    torch = "int ncclGetVersion(int *); int torch_version(void) { int v; ncclGetVersion(&v); return v; }"
    link = [f"-Wl,-rpath,{folder}/plain", f"-L{folder}/plain", "-l:libnccl.so.2"]
    subprocess.run([*gcc, "-x", "c", "-", "-o", folder / "libtorch_cuda.so", *link], input=torch, text=True, check=True)
    subprocess.run([*gcc, "-x", "c", "-", "-o", folder / "libnccl-net.so"], input="int plugin;", text=True, check=True)
    return folder


def program(folder: Path, log: Path, code: str, environ: dict[str, str] | None = None) -> Any:
    """Run *code*, after the prelude, and return what it put into ``out``."""
    log.write_text("")
    text = "from nccl_prelude import *\nimport json, os, sys\nout = {}\n" + textwrap.dedent(code) + "\nprint(json.dumps(out))\n"
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("NCCL_", "TORCH_", "VLLM_", "FAKE_"))}
    environ = {
        **clean,
        "PYTHONPATH": str(HERE),
        "FAKES": str(folder),
        "FAKE_NCCL_LOG": str(log),
        "NCCL_CONF_FILE": "/dev/null",
        **(environ or {}),
    }
    done = subprocess.run([sys.executable, "-c", text], env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
