"""What tests are given: simulated machines, fakes that were compiled once, programs with the preload library."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuckpt.image import keeper, preload
from tests import image_machine
from tests.hosts import Cluster
from tests.image_suspended import Suspended
from tests.nccl_programs import compile_fakes, program
from tests.simulated_bench import Bench
from tests.simulated_machine import Machine, make_machine

BuiltOnce = Callable[[str, Callable[[Path], object]], Path]


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """One GPU of 80 GiB, 64 GiB of host memory."""
    yield from make_machine(tmp_path)


@pytest.fixture
def machine2(tmp_path: Path) -> Iterator[Machine]:
    """Two such GPUs."""
    yield from make_machine(tmp_path, gpus=2)


@pytest.fixture
def machine4(tmp_path: Path) -> Iterator[Machine]:
    """Four."""
    yield from make_machine(tmp_path, gpus=4)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where images are kept on disk."""
    made = tmp_path / "images"
    made.mkdir()
    return made


@pytest.fixture(scope="session")
def built_once(tmp_path_factory: pytest.TempPathFactory) -> BuiltOnce:
    """A folder by its name, filled by whoever needs it first of all that test at the same time."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def build(name: str, fill: Callable[[Path], object]) -> Path:
        with open(base / f"{name}.lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not os.fstat(lock.fileno()).st_size:
                (base / name).mkdir()
                fill(base / name)
                lock.write("built")
        return base / name

    return build


@pytest.fixture(scope="session")
def nccl_fakes(built_once: BuiltOnce) -> Path:
    """The folder of the fake copies of libnccl."""
    return built_once("nccl", compile_fakes)


@pytest.fixture
def nccl_run(nccl_fakes: Path, tmp_path: Path) -> Callable[..., Any]:
    """Runs a program with the fake copies of libnccl; keywords are its environment."""
    return lambda code, **environ: program(nccl_fakes, tmp_path / "nccl.log", code, environ)


def pytest_configure() -> None:
    """Ctrl-C reaches the commands under test, also where a shell put the tests into its background and so ignores it. Hundreds of them are
    started: where the package is not compiled yet, the first one does it for all."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def signals_as_they_were() -> Iterator[None]:
    """A command leaves signals ignored when it is done; run inside a test it would leave them so for every test after it."""
    watched = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {s: signal.getsignal(s) for s in watched}
    yield
    assert {s: signal.getsignal(s) for s in watched} == before


@pytest.fixture(scope="session")
def image_folder(built_once: BuiltOnce) -> Path:
    """The program under test with the preload library, its libcuda, and other preload libraries."""
    return built_once("image", image_machine.build)


@pytest.fixture
def start_program(image_folder: Path) -> Iterator[image_machine.Start]:
    """Starts that program with the library; keywords are its environment."""
    started = []

    def begin(prefix: tuple[str, ...] = (), folder: Path = image_folder, name: str = "program", **environ: str) -> image_machine.Program:
        with_ours = preload.environment({**os.environ, **environ})
        started.append(image_machine.Program(folder, with_ours, prefix, name))
        return started[-1]

    yield begin
    for one in started:
        one.process.kill()
        one.process.communicate()


@pytest.fixture
def suspended(start_program: image_machine.Start, tmp_path: Path) -> Suspended:
    """That program with an image in its memory, as a checkpoint leaves it."""
    return Suspended(start_program(), tmp_path)


@pytest.fixture
def named(suspended: Suspended, monkeypatch: pytest.MonkeyPatch) -> Suspended:
    """The same, where its process cannot hold the file."""
    monkeypatch.setattr(keeper.Keeper, "hold", lambda *_: False)
    return suspended


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """Simulated GPUs and processes on them, without a command line."""
    made = Bench(tmp_path / "sim")
    yield made
    made.end()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """Makes clusters: ``cluster(hosts, puppets=0)``."""
    made: list[Cluster] = []

    def make(hosts: int, **options: int) -> Cluster:
        made.append(Cluster.make(tmp_path / str(len(made)), hosts, **options))
        return made[-1]

    try:
        yield make
    finally:
        for c in made:
            c.close()


@pytest.fixture
def uvm(tmp_path: Path) -> Path:
    """What stands for the device file of GPU memory."""
    path = tmp_path / "dev/nvidia-uvm"
    path.parent.mkdir()
    path.write_bytes(bytes(4096))
    return path
