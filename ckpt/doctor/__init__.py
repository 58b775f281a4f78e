"""What ``gpuckpt doctor`` asks of a machine: can processes be suspended here, and what mends it where not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gpuckpt.doctor import driver, machine, memory
from gpuckpt.doctor.check import Absent, Check, FaultRates, Subject, UserMode
from gpuckpt.doctor.driver import probe
from gpuckpt.doctor.memory import measure_fault_rates
from gpuckpt.errors import NoDriver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from gpuckpt.driver.api import Devices

__all__ = ["Absent", "Check", "FaultRates", "UserMode", "checks", "measure_fault_rates", "probe"]

CHECKS: tuple[tuple[str, Callable[[Subject], Iterable[Check]]], ...] = (
    ("NVIDIA driver", driver.version),
    ("GPUs", driver.gpus),
    ("driver versions", driver.versions_agree),
    ("cuda-bindings", driver.bindings),
    ("libcuda of processes", driver.targets_libcuda),
    ("device nodes", driver.device_nodes),
    ("persistence mode", driver.persistence),
    ("compute mode", driver.compute_mode),
    ("MIG", driver.mig),
    ("MPS", machine.mps),
    ("NCCL", driver.nccl),
    ("permission", machine.permission),
    ("container", machine.container),
    ("host memory", memory.host_memory),
    ("pod memory", memory.pod_memory),
    ("memory killers", memory.killers),
    ("Ray", memory.ray),
    ("huge pages", memory.huge_pages),
    ("preload library", memory.preload_library),
    ("pool library", memory.pool_library),
)


def checks(
    devices: Devices,
    driver_probe: Callable[[], UserMode] = probe,
    root: Path = Path("/"),
    fault_rates: Callable[[], FaultRates] = measure_fault_rates,
) -> list[Check]:
    """Examine the machine below *root*; changes nothing.

    Without a driver the first line is a problem, what concerns GPUs is left out, and the machine is still examined.
    A check that fails itself becomes a warning: never raises.
    """
    subject = Subject(devices, driver_probe, root, fault_rates)
    found: list[Check] = []
    for name, check in CHECKS:
        try:
            found += list(check(subject))
        except NoDriver as error:
            if name == "GPUs" and not any(c.status == "problem" for c in found):
                found.append(driver.absent(name, subject, error))
        except Exception as error:  # noqa: BLE001 - one broken check must not hide the others
            found.append(Check(name, "warning", f"could not be checked: {type(error).__name__}: {error}"))
    return found
