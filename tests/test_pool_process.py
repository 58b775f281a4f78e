"""The pool in processes that fork, end, are ended, or run out of address space while it sleeps."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests import pool_machine

ROOT = Path(__file__).parent.parent
BEGIN = """
import os, resource, signal, sys, threading, time
from pathlib import Path
sys.path.insert(0, {root!r})
from gpuckpt.pool.allocator import NoHostMemory, PoolError
from tests.pool_machine import GRANULARITY, Gpu
gpu = Gpu(Path({directory!r}), Path({fake!r}))
address, content = gpu.malloc("weights", 4 * GRANULARITY), os.urandom(4 * GRANULARITY)
gpu.write(address, content)
"""


def run(tmp_path: Path, code: str) -> subprocess.CompletedProcess[str]:
    begin = BEGIN.format(root=str(ROOT), directory=str(tmp_path), fake=str(pool_machine.fake()))
    return subprocess.run([sys.executable, "-c", begin + textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("sys.exit(7)", 7),
        ("os._exit(3)", 3),
        ("raise ValueError", 1),
        ("os.kill(os.getpid(), signal.SIGTERM); signal.pause()", -signal.SIGTERM),
        ("", 0),
    ],
)
def test_a_process_that_ends_while_it_sleeps_ends_as_it_would_have(tmp_path: Path, code: str, status: int) -> None:
    """Case 51, as far as it goes without a card: no fault on the way out."""
    done = run(tmp_path, f"gpu.pool.sleep({{'weights': 'offload'}})\n{code}")
    assert done.returncode == status
    assert done.stderr.strip().splitlines()[-1:] == (["ValueError"] if "ValueError" in code else [])


def test_a_process_that_ends_in_the_middle_of_a_sleep(tmp_path: Path) -> None:
    """The copy of another thread is over before the driver goes."""
    done = run(
        tmp_path,
        """
        gpu.pool.tune(1, 2 << 20)
        big = gpu.malloc("weights", 32 << 20)
        before = gpu.fake.fake_calls()
        threading.Thread(target=gpu.pool.sleep, args=({"weights": "offload"},), daemon=True).start()
        while gpu.fake.fake_calls() < before + 12:
            pass
        sys.exit(5)
        """,
    )
    assert done.returncode == 5, done.stderr


def test_a_forked_child_leaves_its_parents_memory_alone(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        gpu.pool.sleep({"weights": "offload"})
        gpu.pool.wake({"weights"})
        gpu.pool.sleep({"weights": "offload"})
        child = os.fork()
        if not child:
            calls = gpu.fake.fake_calls()
            ok = gpu.malloc("weights") == 0 and gpu.pool.stats() == () and gpu.pool.trim() == 0
            gpu.free(address)
            for call in (lambda: gpu.pool.sleep({"weights": "offload"}), lambda: gpu.pool.wake({"weights"})):
                try:
                    call()
                    ok = False
                except PoolError as error:
                    ok = ok and "forked child" in str(error)
            os._exit(0 if ok and gpu.fake.fake_calls() == calls else 1)
        assert os.waitpid(child, 0)[1] == 0
        gpu.pool.wake({"weights"})
        assert gpu.read(address, len(content)) == content
        """,
    )
    assert done.returncode == 0, done.stderr


def test_no_address_space_for_the_copy(tmp_path: Path) -> None:
    """All that was awake is awake, and the call can be made again."""
    done = run(
        tmp_path,
        """
        pages = int(open("/proc/self/statm").read().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (3 << 19), resource.RLIM_INFINITY))
        try:
            gpu.pool.sleep({"weights": "offload"})
            sys.exit(9)
        except NoHostMemory as error:
            assert "no host memory for 0.00 GiB" in str(error), error
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert gpu.read(address, len(content)) == content
        assert {s.where for s in gpu.pool.stats()} == {"gpu"}
        gpu.pool.sleep({"weights": "offload"})
        gpu.pool.wake({"weights"})
        assert gpu.read(address, len(content)) == content
        """,
    )
    assert done.returncode == 0, done.stderr


def test_host_copies_have_huge_pages_and_stay_out_of_children_and_core_dumps(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        big = gpu.malloc("weights", 16 << 20)
        gpu.pool.sleep({"weights": "offload"})
        flags = [line.split()[1:] for line in open("/proc/self/smaps") if line.startswith("VmFlags:")]
        ours = [f for f in flags if "dc" in f and "dd" in f]
        assert ours, flags
        assert all("hg" in f for f in ours) or not os.path.exists("/sys/kernel/mm/transparent_hugepage"), ours
        """,
    )
    assert done.returncode == 0, done.stderr


def test_what_the_driver_lacks_is_named(tmp_path: Path) -> None:
    for code, words in (("", "libcuda"), ("int cuDeviceGet(void) { return 0; }", "cuDeviceGetAttribute")):
        (tmp_path / "old.c").write_text(code)
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", tmp_path / "old.so", tmp_path / "old.c"], check=True)
        libcuda = str(tmp_path / "old.so") if code else str(tmp_path / "none.so")
        done = run(
            tmp_path,
            f"""
            import shutil
            from gpuckpt.pool.allocator import Allocator, library
            try:
                Allocator(Path(shutil.copy(library(), {str(tmp_path / "again.so")!r})), {libcuda!r})
            except PoolError as error:
                print(error)
            """,
        )
        assert f"the pool needs {words}, which is not there" in done.stdout, done.stderr
