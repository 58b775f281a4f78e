"""The TCPStore of tests: torch's where there is torch, and a fake of it (``fake_c10d``) everywhere."""

from __future__ import annotations

import importlib.util
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from gpuckpt.inspect import processes
from tests.simulated_machine import eventually

FAKE = Path(__file__).parent / "fake_c10d"
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
#: torch's TCPStore where there is torch, and a fake of it everywhere.
TCP_STORES = ("fake", pytest.param("torch", marks=needs_torch))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


#: Serves a store until it is ended: a host of it that has no other part.
SERVES = """
import sys
from gpuckpt.rendezvous.c10d import C10dStore
store = C10dStore("127.0.0.1", int(sys.argv[1]), "job", lambda: None)
assert store.serving
print("ready", flush=True)
sys.stdin.read()
"""


def use_tcp_store(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process and in those that it starts."""
    if kind == "fake":
        monkeypatch.setenv("PYTHONPATH", str(FAKE))
        spec = importlib.util.spec_from_file_location("torch.distributed", FAKE / "torch/distributed.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
        monkeypatch.setitem(sys.modules, "torch.distributed", module)


@contextmanager
def serving(port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process that serves the store on *port*."""
    with subprocess.Popen([sys.executable, "-c", SERVES, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as host:
        try:
            assert host.stdout is not None
            assert host.stdout.readline()
            yield host
        finally:
            host.kill()


def answers(address: str) -> bool:
    """Whether somebody listens there."""
    host, _, port = address.partition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def silence(host: subprocess.Popen[bytes]) -> None:
    """From now on it says nothing."""
    host.send_signal(signal.SIGSTOP)
    eventually(lambda: (p := processes.read(host.pid)) is not None and p.stopped, "it stands still")
