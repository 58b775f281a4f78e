"""Checks of the driver, its user-mode libraries and the GPUs."""

from __future__ import annotations

import importlib.metadata
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from gpuckpt.doctor.check import Check, Subject, UserMode, at_least, gib, numbers
from gpuckpt.driver.cuda import NEEDED
from gpuckpt.errors import NoDriver
from gpuckpt.inspect import host

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuckpt.model import Gpu

GOOD_BINDINGS = "'cuda-python>=12.9,!=13.0.0,!=13.0.1,!=13.3.0'"
BAD_BINDINGS = ("13.0.0", "13.0.1", "13.3.0")  # lack CUcheckpoint… types
MOVING_BINDINGS = (13, 0, 2)  # CUcheckpointGpuPair came with 13.0; it is needed only to restore onto other GPUs
NCCL_SUSPENDS = (2, 29, 7)
NCCL_ADVISED = (2, 30, 7)
INSTALL_DRIVER = "install driver 580 or newer from your distribution or https://www.nvidia.com/drivers, then reboot"


def probe() -> UserMode:
    """What this Python's cuda-bindings, libcuda and NCCL are. Loads libcuda, but does not initialise CUDA."""
    nccl = tuple((name, version) for name in ("nvidia-nccl-cu12", "nvidia-nccl-cu13") if (version := _installed(name)))
    bindings = _installed("cuda-bindings")
    try:
        from cuda.bindings import driver as cuda
    except ImportError as error:
        return UserMode(bindings, nccl=nccl, error=str(error))
    missing = tuple(name for name in NEEDED if not hasattr(cuda, name))
    try:
        result, number = cuda.cuDriverGetVersion()
    except RuntimeError as error:  # cuda.pathfinder found no libcuda
        return UserMode(bindings, missing, nccl=nccl, error=str(error))
    if int(result) != 0:
        return UserMode(bindings, missing, nccl=nccl, error=f"cuDriverGetVersion: {result.name}")
    found = re.search(r"/libcuda\.so\.(\d+(?:\.\d+)+)", host.read(Path("/proc/self/maps")))
    return UserMode(bindings, missing, found.group(1) if found else "", (number // 1000, number % 1000 // 10), nccl)


def version(subject: Subject) -> Iterator[Check]:
    """The driver is there, and has the checkpoint calls."""
    name = "NVIDIA driver"
    try:
        driver = subject.version
    except NoDriver as error:
        yield absent(name, subject, error)
        return
    cuda = f"CUDA {driver.cuda[0]}.{driver.cuda[1]}"
    said = f"{driver.package} ({cuda})" if driver.package else cuda
    major = numbers(driver.package)[0] if numbers(driver.package) else None
    if major is not None and major < 550:
        yield Check(name, "problem", f"{said} cannot checkpoint processes: that came with 550", INSTALL_DRIVER)
    elif (major is not None and major < 570) or driver.cuda < (12, 8):
        yield Check(
            name,
            "problem",
            f"{said} has no checkpoint calls: they came with 570 (CUDA 12.8). NVIDIA's cuda-checkpoint program works from 550 on",
            INSTALL_DRIVER,
        )
    elif major == 595 and "Open" in subject.kernel_module:
        yield Check(
            name,
            "warning",
            f"{said} with open kernel modules: killing a process that has been restored can hang the machine (NVIDIA/cuda-checkpoint#53)",
            "use another driver branch (580 is the one gpuckpt was measured on), and let restored processes exit by themselves",
        )
    else:
        gains = []
        if (major is not None and major >= 580) or driver.cuda >= (13, 0):
            gains.append("resume on other GPUs")
        if (major is not None and major >= 615) or driver.cuda >= (13, 4):
            gains.append("custom storage")
        more = " and ".join(gains)
        yield Check(name, "ok", f"{said}: checkpoint calls" + (f", {more}" if more else "; resume on other GPUs needs 580"))


def absent(name: str, subject: Subject, error: NoDriver) -> Check:
    """The line for a driver that does not answer, and why it may be so."""
    if subject.kernel_version:
        return Check(
            name,
            "problem",
            f"the kernel module {subject.kernel_version} is loaded, but the driver does not answer: {error.message}",
            "after an upgrade of the driver: reboot, or `sudo rmmod nvidia_uvm nvidia && sudo modprobe nvidia`",
        )
    if host.in_container(subject.root):
        return Check(
            name,
            "problem",
            f"none in this container: {error.message}",
            "start the container with the GPUs: `docker run --gpus all …`, in Kubernetes `resources.limits: {nvidia.com/gpu: 1}`",
        )
    return Check(name, "problem", f"none: {error.message}", INSTALL_DRIVER)


def gpus(subject: Subject) -> Iterator[Check]:
    """A line a GPU; a lost one is a line too."""
    if subject.simulated:
        yield Check("GPUs", "ok", f"{len(subject.gpus)} simulated GPUs: what follows holds for this machine, not for a real driver")
        return
    if not subject.gpus:
        yield Check("GPUs", "problem", "the driver knows no GPU", "start the container with GPUs, or look at `sudo dmesg | grep -i nvrm`")
    for gpu in subject.gpus:
        yield _gpu(gpu)


def _gpu(gpu: Gpu) -> Check:
    name = f"GPU {gpu.index}"
    if gpu.lost:
        return Check(
            name,
            "problem",
            f"{gpu.uuid} {gpu.pci} is lost: it fell off the bus. What is suspended on it cannot come back; other GPUs work",
            "look at `sudo dmesg | grep -i xid`, then reboot; if it comes again, have the card looked at",
        )
    if gpu.total_bytes is None or gpu.free_bytes is None:
        return Check(
            name,
            "warning",
            f"{gpu.uuid} {gpu.name}: its memory cannot be read, and unknown is not free: a resume on it would wait, then be refused",
            f"`nvidia-smi -i {gpu.index} -q -d MEMORY`",
        )
    return Check(name, "ok", f"{gpu.uuid} {gpu.name}, {gib(gpu.total_bytes)}, {gib(gpu.total_bytes - gpu.free_bytes)} in use")


def versions_agree(subject: Subject) -> Iterator[Check]:
    """NVML, libcuda and the kernel module are of one version."""
    if subject.simulated:
        return
    name, package, kernel, libcuda = "driver versions", subject.version.package, subject.kernel_version, subject.user_mode.libcuda
    if kernel and package and kernel != package:
        yield Check(
            name,
            "problem",
            f"kernel module {kernel}, but NVML {package}: the driver was upgraded and not reloaded",
            "reboot, or `sudo rmmod nvidia_uvm nvidia && sudo modprobe nvidia`",
        )
    elif libcuda and (kernel or package) and libcuda != (kernel or package):
        yield Check(
            name,
            "warning",
            f"libcuda {libcuda} over kernel module {kernel or package} (a cuda-compat package?): "
            "a call on a process with a newer libcuda than gpuckpt's hangs",
            "run gpuckpt and the processes with the same libcuda: `echo $LD_LIBRARY_PATH`, and `ldconfig -p | grep libcuda.so`",
        )
    else:
        known = ", ".join(f"{what} {v}" for what, v in (("kernel module", kernel), ("NVML", package), ("libcuda", libcuda)) if v)
        yield Check(name, "ok", known or "nothing tells its version")


def bindings(subject: Subject) -> Iterator[Check]:
    """cuda-bindings can be imported, is of a version with all checkpoint types, and finds libcuda."""
    name, user_mode = "cuda-bindings", subject.user_mode
    fix = f"pip install -U {GOOD_BINDINGS}"
    if not user_mode.bindings:
        yield Check(name, "problem", f"not installed{f': {user_mode.error}' if user_mode.error else ''}", fix)
    elif user_mode.bindings in BAD_BINDINGS or user_mode.missing:
        lacks = f" ({', '.join(user_mode.missing)})" if user_mode.missing else ""
        yield Check(name, "problem", f"{user_mode.bindings} lacks types of the checkpoint calls{lacks}", fix)
    elif not at_least(user_mode.bindings, (12, 8)):
        yield Check(name, "problem", f"{user_mode.bindings} is older than the checkpoint calls (12.8)", fix)
    elif user_mode.error and not subject.simulated:
        yield Check(
            name,
            "problem",
            f"{user_mode.bindings} does not find libcuda: {user_mode.error}",
            "in a container set NVIDIA_DRIVER_CAPABILITIES=compute,utility; else `ldconfig -p | grep libcuda.so.1` must name it",
        )
    elif user_mode.cuda is not None and user_mode.cuda < (12, 8):
        yield Check(
            name,
            "problem",
            f"{user_mode.bindings} loads a libcuda for CUDA {user_mode.cuda[0]}.{user_mode.cuda[1]}; the calls came with 12.8",
            INSTALL_DRIVER,
        )
    else:
        moves = "" if at_least(user_mode.bindings, MOVING_BINDINGS) else "; resume on other GPUs needs 13.0.2"
        yield Check(name, "ok", user_mode.bindings + moves)


def targets_libcuda(subject: Subject) -> Iterator[Check]:
    """No process on the GPUs has a newer libcuda than we have: calls on it would hang."""
    ours = subject.user_mode.libcuda
    if subject.simulated or not ours:
        return
    for pid in subject.processes:
        for path in sorted(subject.mapped(pid, "libcuda.so.")):
            theirs = path.name.removeprefix("libcuda.so.")
            if numbers(theirs) > numbers(ours):
                yield Check(
                    "libcuda of processes",
                    "problem",
                    f"{subject.name(pid)} runs libcuda {theirs}, gpuckpt {ours}: a call from an older one hangs",
                    f"run gpuckpt with LD_LIBRARY_PATH={path.parent}",
                )


def device_nodes(subject: Subject) -> Iterator[Check]:
    """The device files of every GPU are there and may be opened; and each process on one sees those that it needs for its way back."""
    if subject.simulated:
        return
    wanted = ["nvidiactl", "nvidia-uvm", *(f"nvidia{g.minor}" for g in subject.present if g.minor is not None)]
    paths = {f"/dev/{node}": subject.root / "dev" / node for node in wanted}
    gone = [shown for shown, path in paths.items() if not path.exists()]
    closed = [shown for shown, path in paths.items() if path.exists() and not os.access(path, os.R_OK | os.W_OK)]
    if gone:
        fix = "`--gpus all` (or a device plug-in)" if host.in_container(subject.root) else "`sudo nvidia-modprobe -u -c 0`"
        yield Check("device nodes", "problem", f"missing: {', '.join(gone)}", fix)
    if closed:
        yield Check(
            "device nodes", "problem", f"not yours to open: {', '.join(closed)}", f"`ls -l {closed[0]}`; join its group, or run as root"
        )
    unseen = list(_unseen_nodes(subject))
    yield from unseen
    if not gone and not closed and not unseen:
        yield Check("device nodes", "ok", f"{len(paths)} there: {', '.join(paths)}")


def _unseen_nodes(subject: Subject) -> Iterator[Check]:
    """The driver restores a process from within: by the files that the process sees."""
    minors = {g.uuid: g.minor for g in subject.present if g.minor is not None}
    for pid in subject.processes:
        dev = subject.root / f"proc/{pid}/root/dev"
        if not os.path.isdir(dev):  # noqa: PTH112 - a root that may not be looked at is no error
            continue
        nodes = ["nvidiactl", "nvidia-uvm", *(f"nvidia{minors[uuid]}" for uuid in subject.listed[pid] if uuid in minors)]
        if missing := [f"/dev/{node}" for node in nodes if not (dev / node).exists()]:
            yield Check(
                "device nodes",
                "warning",
                f"{subject.name(pid)} is on a GPU and does not see {', '.join(missing)}: a resume of it may fail, and would lose it",
                "do not suspend it; start its container anew with its devices (`--gpus all`, or a device plug-in)",
            )


def persistence(subject: Subject) -> Iterator[Check]:
    """Persistence mode is on."""
    off = [g for g in subject.present if not g.persistence]
    if off:
        yield Check(
            "persistence mode",
            "warning",
            f"off on {_labels(off)}: each resume initialises CUDA first, 0.2 s with one GPU and seconds with eight",
            "sudo nvidia-smi -pm 1 (until the next boot), or for good: sudo systemctl enable --now nvidia-persistenced",
        )
    elif subject.present:
        yield Check("persistence mode", "ok", "on")


def compute_mode(subject: Subject) -> Iterator[Check]:
    """Other processes may use the GPUs while one is suspended, and it may come back."""
    odd = [g for g in subject.present if g.compute_mode != "default"]
    for gpu in odd:
        cure = f"sudo nvidia-smi -i {gpu.index} -c DEFAULT"
        if gpu.compute_mode == "prohibited":
            yield Check("compute mode", "problem", f"prohibited on {gpu.label}: nothing can be resumed there", cure)
        else:
            yield Check(
                "compute mode",
                "warning",
                f"{gpu.compute_mode} on {gpu.label}: a resume is refused while another process has a context there",
                cure,
            )
    if subject.present and not odd:
        yield Check("compute mode", "ok", "default")


def mig(subject: Subject) -> Iterator[Check]:
    """No GPU is cut into MIG instances."""
    cut = [g for g in subject.present if g.mig]
    for gpu in cut:
        yield Check(
            "MIG",
            "problem",
            f"on for {gpu.label}: the driver cannot checkpoint processes on MIG instances",
            f"sudo nvidia-smi -i {gpu.index} -mig 0 (ends all work on it), or use another GPU",
        )
    if subject.present and not cut:
        yield Check("MIG", "ok", "off")


def nccl(subject: Subject) -> Iterator[Check]:
    """Communicators can be suspended: the versions of NCCL here, and in the processes on the GPUs."""
    found = {(package, v, "") for package, v in subject.user_mode.nccl}
    for pid in subject.processes:
        found |= {(package, v, f" in {subject.name(pid)}") for package, v in _process_nccl(subject, pid)}
    several = len(subject.present) != 1
    if not found:
        yield Check("NCCL", "ok", "no NCCL found here (only needed for several GPUs)")
    for package, v, where in sorted(found):
        said = f"{package} {v}{where}"
        cure = f"pip install '{package}>=2.30.7' where that program runs"
        if not several or at_least(v, NCCL_ADVISED):
            yield Check("NCCL", "ok", said if several else f"{said} (only needed for several GPUs)")
        elif at_least(v, NCCL_SUSPENDS):
            yield Check("NCCL", "warning", f"{said} can suspend communicators, but deadlocks where one thread holds several ranks", cure)
        else:
            yield Check("NCCL", "warning", f"{said} cannot suspend communicators (2.29.7 can): processes that share one are refused", cure)


def _process_nccl(subject: Subject, pid: int) -> set[tuple[str, str]]:
    found = set()
    for path in subject.mapped(pid, "libnccl.so"):
        # …/site-packages/nvidia/nccl/lib/libnccl.so.2, whose version stands beside "nvidia"
        if path.parts[-4:-1] != ("nvidia", "nccl", "lib"):
            continue
        packages = subject.root / f"proc/{pid}/root" / path.parents[3].relative_to("/")
        for info in packages.glob("nvidia_nccl_cu*.dist-info"):
            package, _, v = info.name.removesuffix(".dist-info").partition("-")
            found.add((package.replace("_", "-"), v))
    return found


def _labels(gpus: list[Gpu]) -> str:
    return "GPU " + ", ".join(str(g.index) for g in gpus)


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
