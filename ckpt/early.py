"""What takes longest at the start of a command, begun before the rest of it is imported: the callers' helper, and NVML beside it."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, NamedTuple

from gpuckpt.driver.caller import Callers
from gpuckpt.driver.patient import ANSWER_S, LEAST_S, Patient

if TYPE_CHECKING:
    from collections.abc import Mapping


class Start(NamedTuple):
    """A helper that loads the driver's bindings, and GPUs that are being looked for."""

    callers: Callers
    devices: Patient


def devices(environ: Mapping[str, str] = os.environ, *, warm: bool = False, looks: bool = True, timeout_s: float | None = None) -> Patient:
    """The GPUs: simulated ones in the directory that ``GPUCKPT_SIMULATE`` names, else NVML's, which is loaded at the first question,
    or from now on (*warm*), in a process of its own where that can be. Then it *looks* at the GPUs at once, or touches none until it is
    asked. An answer may take *timeout_s*, ``LEAST_S`` to ``ANSWER_S``."""
    within_s = _within_s(timeout_s)
    if directory := environ.get("GPUCKPT_SIMULATE"):
        from gpuckpt.driver.simulated import SimulatedDevices

        return Patient(SimulatedDevices(directory), within_s)
    from gpuckpt.driver.nvml import NvmlDevices
    from gpuckpt.driver.nvml_apart import NvmlApart

    with contextlib.suppress(OSError):
        if warm and NvmlApart.possible():
            return Patient(NvmlApart(looks=looks), within_s)
    return Patient(NvmlDevices(warm=warm and looks), within_s)


def _within_s(timeout_s: float | None) -> float:
    return min(ANSWER_S, max(LEAST_S, timeout_s or ANSWER_S))


def callers(environ: Mapping[str, str] = os.environ) -> Callers:
    """A helper that loads the driver's bindings. It touches no GPU until it is asked to."""
    directory = environ.get("GPUCKPT_SIMULATE", "")
    made = Callers(f"simulated:{directory}" if directory else "cuda")
    made.warm()
    return made


#: What was begun before its command was known to need it.
_ahead: list[Start] = []


def ahead() -> None:
    """Begin now, for the first one who will ask to begin."""
    _ahead.append(begin())


def begin(environ: Mapping[str, str] = os.environ, *, timeout_s: float | None = None) -> Start:
    """Returns at once. What fails does so again, in words, when it is asked for. *timeout_s*: of the command."""
    if _ahead:
        start = _ahead.pop()
        start.devices.within_s = _within_s(timeout_s)
        return start
    made = callers(environ)  # first of all: it can be forked only while there is one thread and no NVML
    return Start(made, devices(environ, warm=True, timeout_s=timeout_s))
