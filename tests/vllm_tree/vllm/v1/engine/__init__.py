from __future__ import annotations

import enum
from dataclasses import dataclass


class EngineCoreRequestType(enum.Enum):
    ADD = b"\x00"
    ABORT = b"\x01"
    START_DP_WAVE = b"\x02"
    UTILITY = b"\x03"
    EXECUTOR_FAILED = b"\x04"
    WAKEUP = b"\x05"


@dataclass
class EngineCoreOutputs:
    wave_complete: int | None = None
    start_wave: int | None = None
