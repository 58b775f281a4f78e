"""What takes longest at the start of a command, begun before the rest of it is imported: the callers' helper, and NVML beside it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuckpt.driver.caller import Callers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpuckpt.driver.api import Devices


@dataclass(frozen=True, slots=True)
class Start:
    """A helper that loads the driver's bindings, and GPUs that are being looked for."""

    callers: Callers
    devices: Devices


def devices(environ: Mapping[str, str] = os.environ, *, warm: bool = False) -> Devices:
    """The GPUs: simulated ones in the directory that ``GPUCKPT_SIMULATE`` names, else NVML's, which is loaded at the first question,
    or from now on (*warm*)."""
    if directory := environ.get("GPUCKPT_SIMULATE"):
        from gpuckpt.driver.simulated import SimulatedDevices

        return SimulatedDevices(directory)
    from gpuckpt.driver.nvml import NvmlDevices

    return NvmlDevices(warm=warm)


def callers(environ: Mapping[str, str] = os.environ) -> Callers:
    """A helper that loads the driver's bindings. It touches no GPU until it is asked to."""
    directory = environ.get("GPUCKPT_SIMULATE", "")
    made = Callers(f"simulated:{directory}" if directory else "cuda")
    made.warm()
    return made


def begin(environ: Mapping[str, str] = os.environ) -> Start:
    """Returns at once. What fails does so again, in words, when it is asked for."""
    made = callers(environ)  # first of all: it can be forked only while there is one thread and no NVML
    return Start(made, devices(environ, warm=True))
