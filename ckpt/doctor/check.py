"""What a check says, and the machine that it is asked about."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn

from gpuckpt.errors import NoDriver
from gpuckpt.inspect import host
from gpuckpt.model import GIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuckpt.driver.api import Devices, DriverVersion
    from gpuckpt.model import Gpu

Status = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the doctor. ``fix`` is what to type or to change, "" where nothing is to be done."""

    name: str
    status: Status
    message: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class UserMode:
    """The user-mode side as this Python finds it.

    ``bindings``: version of cuda-bindings, "" if it is not installed. ``missing``: checkpoint names that it lacks.
    ``libcuda``: version in the file name of the loaded libcuda, "" if unknown; ``cuda``: what it supports, None if it did not load.
    ``nccl``: installed NCCL packages, as ("nvidia-nccl-cu13", "2.30.7"). ``error``: why the bindings or libcuda did not load.
    """

    bindings: str = ""
    missing: tuple[str, ...] = ()
    libcuda: str = ""
    cuda: tuple[int, int] | None = None
    nccl: tuple[tuple[str, str], ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class FaultRates:
    """Bytes of anonymous host memory that one thread faults in per second."""

    small_pages: float
    huge_pages: float


class Subject:
    """The machine under examination. Each question is put once; where it fails, every check that needs it says so."""

    def __init__(self, devices: Devices, driver_probe: Callable[[], UserMode], root: Path, fault_rates: Callable[[], FaultRates]) -> None:
        self.devices = devices
        self.root = root
        self.fault_rates = fault_rates
        self._driver_probe = driver_probe

    @property
    def simulated(self) -> bool:
        return self.devices.simulated

    @cached_property
    def version(self) -> DriverVersion:
        return self.devices.version()

    @cached_property
    def gpus(self) -> tuple[Gpu, ...]:
        """All GPUs, lost ones too."""
        return self.devices.gpus()

    @property
    def present(self) -> tuple[Gpu, ...]:
        """The GPUs that answer; none where there is no driver."""
        try:
            return tuple(g for g in self.gpus if not g.lost)
        except NoDriver:
            return ()

    @cached_property
    def listed(self) -> dict[int, dict[str, int | None]]:
        """pid -> {GPU UUID: bytes}, as the driver lists them; none where there is no driver."""
        try:
            return self.devices.processes()
        except NoDriver:
            return {}

    @cached_property
    def processes(self) -> dict[int, int]:
        """pid -> bytes on all GPUs, for those that can be seen from here under the number that the driver gives."""
        here = [pid for pid in self.listed if (self.root / f"proc/{pid}").exists()]
        if not host.pid_namespace_is_host(self.root):
            # a foreign pid may be the number of some other process here
            here = sorted(self.devices.loaded(here))
        return {pid: sum(nbytes or 0 for nbytes in self.listed[pid].values()) for pid in here}

    @cached_property
    def user_mode(self) -> UserMode:
        return self._driver_probe()

    @cached_property
    def kernel_module(self) -> str:
        """The line in which the NVIDIA kernel module names itself, "" where it is not loaded or /proc does not show it."""
        return next((line for line in host.read(self.root / "proc/driver/nvidia/version").splitlines() if "Kernel Module" in line), "")

    @property
    def kernel_version(self) -> str:
        found = re.search(r"Kernel Module(?: +for +\S+)? +(\d+(?:\.\d+)+)", self.kernel_module)
        return found.group(1) if found else ""

    def name(self, pid: int) -> str:
        """ "PID (command)"."""
        return f"{pid} ({host.comm(pid, self.root) or '?'})"

    def mapped(self, pid: int, library: str) -> set[Path]:
        """Paths of the files named *library*… that *pid* has mapped."""
        lines = host.read(self.root / f"proc/{pid}/maps").splitlines()
        paths = (Path(fields[5]) for line in lines if len(fields := line.split(maxsplit=5)) == 6)
        return {path for path in paths if path.name.startswith(library)}


class Absent:
    """The devices of a machine without a driver: every question raises *error*."""

    simulated = False

    def __init__(self, error: NoDriver) -> None:
        self._error = error

    def _fail(self, *_: object) -> NoReturn:
        raise self._error

    version = gpus = processes = loaded = contexts = image_bytes = image = gpu_lock_path = _fail

    def helper(self) -> int:
        return 0

    def close(self) -> None:
        """Nothing of it is open."""


def gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.1f} GiB"


def numbers(version: str) -> tuple[int, ...]:
    """ "580.159.04" as (580, 159, 4); stops at the first part that is not a number."""
    found = []
    for part in version.split("."):
        digits = re.match(r"\d+", part)
        if not digits:
            break
        found.append(int(digits.group()))
        if digits.group() != part:
            break
    return tuple(found)


def at_least(version: str, least: tuple[int, ...]) -> bool:
    return numbers(version) >= least
