"""The world of one operation on a run, whose server takes more of its GPUs when it wakes up than the driver puts back.

A restore that leaves no room for the wake would leave a server that can never wake: vLLM drops its copy of the weights as it goes.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence

from gpuckpt.claims import FileClaim
from gpuckpt.local import LocalWorld
from gpuckpt.model import Gpu


class ReservingWorld(LocalWorld):
    """Counts *reserved* bytes on each GPU as taken, and holds the GPUs of a restore for as long as this process lives."""

    def __init__(self, command: str, reserved: Mapping[str, int]) -> None:
        super().__init__(command=command)
        self._reserved = reserved
        self._kept: list[int] = []

    def gpus(self) -> tuple[Gpu, ...]:
        return tuple(
            g if g.free_bytes is None else dataclasses.replace(g, free_bytes=max(0, g.free_bytes - self._reserved.get(g.uuid, 0)))
            for g in super().gpus()
        )

    def claim_gpus(self, gpus: Sequence[Gpu], until: float) -> FileClaim:
        claim = super().claim_gpus(gpus, until)
        self._kept += [os.dup(fd) for fd in claim.fds]
        return claim
