"""The copy of libnccl that owns a communicator is found as the linker binds its maker, and its calls come through."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]


CODE = """
    from gpuckpt.errors import GpuckptError
    def tried(what):
        try:
            return repr(what())
        except GpuckptError as error:
            return [error.code, error.message, error.hint]
"""


def test_versions_and_what_they_can(nccl_run: Run) -> None:
    out = nccl_run("""
        for name in ("new", "plain", "old", "backport"):
            copy = library.of(opened(name + "/libnccl.so.2"))
            out[name] = [copy.version, copy.can_suspend, copy.advised]
    """)
    assert out == {
        "new": ["2.30.7", True, True],
        "plain": ["2.29.7", True, False],
        "old": ["2.28.9", False, False],
        "backport": ["2.29.7", False, False],
    }


def test_every_loaded_copy_is_listed_and_no_plugin(nccl_run: Run, nccl_fakes: Path) -> None:
    out = nccl_run("""
        out["none"] = [c.path for c in library.loaded()]
        ctypes.CDLL(FOLDER + "/libnccl-net.so")
        opened("plain/libnccl.so.2"), opened("new/libnccl.so.2")
        out["two"] = [c.path for c in library.loaded()]
    """)
    assert out == {"none": [], "two": [f"{nccl_fakes}/new/libnccl.so.2", f"{nccl_fakes}/plain/libnccl.so.2"]}


def test_a_copy_is_never_loaded_by_us(nccl_run: Run, nccl_fakes: Path) -> None:
    out = nccl_run(
        CODE
        + """
    opened("new/libnccl.so.2")
    out["error"] = tried(lambda: library.at(FOLDER + "/old/libnccl.so.2"))
    out["loaded"] = len(library.loaded())
    """
    )
    code, message, _ = out["error"]
    assert code == "nccl-communicator"
    assert "is not loaded" in message
    assert f"{nccl_fakes}/new/libnccl.so.2" in message
    assert out["loaded"] == 1


def test_torch_s_own_copy_by_its_rpath(nccl_run: Run, nccl_fakes: Path) -> None:
    """Another copy was loaded earlier, by its path: torch's calls do not go there."""
    out = nccl_run("""
        opened("old/libnccl.so.2")
        ctypes.CDLL(FOLDER + "/new/libnccl.so.2")
        out["torch"] = ctypes.CDLL(FOLDER + "/libtorch_cuda.so").torch_version()
        out["path"] = library.reached_by("libtorch_cuda.so").path
        out["absent"] = library.reached_by("libother.so")
    """)
    # the name libnccl.so.2 was taken by the time: the linker gives torch the first that has it
    assert out["torch"] in (22809, 22907)
    expected = {22809: "old", 22907: "plain"}[out["torch"]]
    assert out["path"] == f"{nccl_fakes}/{expected}/libnccl.so.2"
    assert out["absent"] is None


@pytest.mark.parametrize(("environ", "number", "copy"), [({}, 22907, "plain"), ({"LD_PRELOAD": "new"}, 23007, "new")])
def test_what_is_preloaded_goes_before_the_rpath(nccl_run: Run, nccl_fakes: Path, environ: dict[str, str], number: int, copy: str) -> None:
    paths = {k: f"{nccl_fakes}/{v}/libnccl.so.2" for k, v in environ.items()}
    out = nccl_run(
        """
        out["torch"] = ctypes.CDLL(FOLDER + "/libtorch_cuda.so").torch_version()
        out["path"] = library.reached_by("libtorch_cuda.so").path
    """,
        **paths,
    )
    assert out == {"torch": number, "path": f"{nccl_fakes}/{copy}/libnccl.so.2"}


def test_a_failure_says_what_nccl_says(nccl_run: Run, nccl_fakes: Path) -> None:
    out = nccl_run(
        CODE
        + """
    c = communicator(opened("new/libnccl.so.2"), "tp")
    out["error"] = tried(lambda: c.library.suspend(c.pointer))
    """,
        FAKE_NCCL_ncclCommSuspend="5",
    )
    code, message, hint = out["error"]
    assert code == "nccl-call-failed"
    for word in ("ncclCommSuspend", "ncclInvalidUsage", "invalid usage", "what NCCL said last", f"{nccl_fakes}/new/libnccl.so.2"):
        assert word in message
    assert "NCCL_DEBUG" in hint


def test_an_old_nccl_is_named_with_the_cure(nccl_run: Run) -> None:
    out = nccl_run(
        CODE
        + """
    c = communicator(opened("old/libnccl.so.2"), "tp")
    out["error"] = tried(lambda: c.library.stats(c.pointer))
    """
    )
    code, message, hint = out["error"]
    assert code == "nccl-communicator"
    assert "2.28.9" in message
    assert "nvidia-nccl" in hint


def test_a_non_blocking_communicator_is_waited_for(nccl_run: Run) -> None:
    out = nccl_run(
        """
        c = communicator(opened("new/libnccl.so.2"), "tp")
        c.library.suspend(c.pointer)
        out["suspended"] = c.library.stats(c.pointer).suspended
        out["async"] = c.library.async_error(c.pointer)
    """,
        FAKE_NCCL_ncclCommSuspend="7",
    )
    assert out == {"suspended": True, "async": 0}


IMPORTING = """
import json, os, sys, threading
os.environ["NCCL_NVLS_ENABLE"] = "1"
def seen():
    maps = sorted({line.split()[-1] for line in open("/proc/self/maps") if "nccl" in line or "cuda" in line})
    modules = sorted(m for m in sys.modules if m.split(".")[0] in ("torch", "vllm", "cuda"))
    return dict(os.environ), open("/proc/self/environ").read(), maps, threading.active_count(), modules
before = seen()
import gpuckpt, gpuckpt.nccl
from gpuckpt.nccl import communicators, environment, hazards, library, suspend, verify
environment.merged(os.environ, for_vllm=True)
print(json.dumps([before == seen(), communicators.listing().communicators, hazards.hazards([])]))
"""


def test_importing_changes_nothing() -> None:
    """Neither the environment, nor what is loaded, nor threads, nor torch."""
    done = subprocess.run([sys.executable, "-c", IMPORTING], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [True, [], []]


def test_a_program_that_does_not_ask_for_gpuckpt_does_not_get_it() -> None:
    """gpuckpt is installed here: nothing of it is imported at the start of Python, and nothing is set."""
    code = "import os, sys; print([m for m in sys.modules if m.startswith('gpuckpt')], [n for n in os.environ if n.startswith('NCCL_')])"
    clean = {k: v for k, v in os.environ.items() if not k.startswith("NCCL_")}
    done = subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == "[] []"
