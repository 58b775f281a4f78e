"""Machines laid out in a directory, with GPUs made up beside them: what the doctor examines in its tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpuckpt import doctor
from gpuckpt.doctor import Check, FaultRates, UserMode
from gpuckpt.driver.api import DriverVersion
from gpuckpt.model import GIB, Gpu

if TYPE_CHECKING:
    from pathlib import Path

KB_A_GIB = GIB // 1024
ROOT_CAPS = "000001ffffffffff"
DOCKER_CAPS = "00000000a80425fb"
OPEN_MODULE = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder@U22)\nGCC version: 12.3.0\n"
CLOSED_MODULE = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Sat Aug 19 01:15:15 UTC 2026\n"
GPU0 = Gpu("GPU-aaaa", 0, "NVIDIA H200", 140 * GIB, 100 * GIB, minor=0, pci="0000:17:00.0")
GPU1 = Gpu("GPU-bbbb", 1, "NVIDIA H200", 140 * GIB, 140 * GIB, minor=1, pci="0000:18:00.0")
GOOD = UserMode(bindings="13.4.4", libcuda="580.159.04", cuda=(13, 0))


class FakeDevices:
    """What NVML would say. An exception in place of an answer is raised."""

    def __init__(self, *gpus: Gpu, package: str = "580.159.04", cuda: tuple[int, int] = (13, 0), simulated: bool = False) -> None:
        self.simulated = simulated
        self.answers: dict[str, Any] = {"version": DriverVersion(cuda, package), "gpus": gpus or (GPU0,), "processes": {}}
        self.foreign: set[int] = set()

    def _answer(self, name: str) -> Any:
        answer = self.answers[name]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def version(self) -> Any:
        return self._answer("version")

    def gpus(self) -> Any:
        return self._answer("gpus")

    def processes(self) -> Any:
        return self._answer("processes")

    def loaded(self, pids: list[int]) -> set[int]:
        return set(pids) - self.foreign

    def contexts(self, pids: list[int]) -> set[int]:
        return set(pids) - self.foreign

    def image_bytes(self, pid: int) -> int:
        return 0

    def gpu_lock_path(self, gpu: Gpu) -> str:
        return f"/dev/nvidia{gpu.minor}"


class Machine:
    """A machine on which everything is well, until a test changes a file."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.devices = FakeDevices()
        self.user_mode: UserMode | Exception = GOOD
        self.lay(
            {
                "proc/meminfo": meminfo(500, 400),
                "proc/self/status": f"Name:\tpython\nUid:\t0\t0\t0\t0\nCapEff:\t{ROOT_CAPS}\n",
                "proc/driver/nvidia/version": OPEN_MODULE.format("580.159.04"),
                "proc/mounts": "proc /proc proc rw 0 0\n",
                "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
                **{f"dev/{node}": "" for node in ("nvidiactl", "nvidia-uvm", "nvidia0", "nvidia1")},
            }
        )

    def lay(self, files: dict[str, object]) -> None:
        for name, text in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(str(text))

    def process(self, pid: int, gib: float | None, comm: str = "python3", rss_gib: float = 2, ppid: int = 1, **files: object) -> None:
        """A process that holds *gib* on GPU 0."""
        self.devices.answers["processes"][pid] = {GPU0.uuid: None if gib is None else int(gib * GIB)}
        named = {"comm": comm, "stat": f"{pid} ({comm}) S {ppid} 1", "status": f"VmRSS:\t{int(rss_gib * KB_A_GIB)} kB\n", **files}
        self.lay({f"proc/{pid}/{name}": text for name, text in named.items()})

    def container(self) -> None:
        self.lay({".dockerenv": ""})

    def pid_namespace(self) -> None:
        (self.root / "proc/self/ns").mkdir(parents=True)
        (self.root / "proc/self/ns/pid").symlink_to("pid:[4026532210]")

    def probe(self) -> UserMode:
        if isinstance(self.user_mode, Exception):
            raise self.user_mode
        return self.user_mode

    def examine(self, devices: Any = None) -> list[Check]:
        return doctor.checks(devices or self.devices, self.probe, self.root, lambda: FaultRates(2 * GIB, 7 * GIB))

    def lines(self, name: str) -> list[Check]:
        return [c for c in self.examine() if c.name == name]

    def line(self, name: str) -> Check:
        (found,) = self.lines(name)
        return found


def meminfo(total_gib: float, available_gib: float) -> str:
    return f"MemTotal: {int(total_gib * KB_A_GIB)} kB\nMemAvailable: {int(available_gib * KB_A_GIB)} kB\n"
