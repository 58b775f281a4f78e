"""The world of one operation on a run, whose server takes more of its GPUs when it wakes up than the driver puts back.

A restore that leaves no room for the wake would leave a server that can never wake: vLLM drops its copy of the weights as it goes.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence

from gpuckpt import errors
from gpuckpt.claims import FileClaim
from gpuckpt.early import Start
from gpuckpt.local import LocalWorld
from gpuckpt.model import Gpu, GpuProcess, Hazard, HostRoom
from gpuckpt.supervisor.model import HOST_MEMORY_HINT
from gpuckpt.words import size

#: What must be free beyond what is reserved, and how long another's resume on the same GPU is waited for, in seconds.
MARGIN_BYTES = 256 << 20
CLAIM_S = 30.0


class ReservingWorld(LocalWorld):
    """Counts *reserved* bytes on each GPU as taken, and holds the GPUs of a restore for as long as this process lives.

    A suspend may take no more host memory than *host_left* says; *told* is called with what it is going to take.
    """

    def __init__(
        self, command: str, reserved: Mapping[str, int], host_left: tuple[int, str] | None, told: Callable[[int], None], start: Start
    ) -> None:
        super().__init__(command=command, start=start)
        self._reserved, self._host_left, self._told = reserved, host_left, told
        self._kept: list[int] = []

    def heeds(self, signum: int) -> bool:
        """The first of a kind. The death of a supervisor that has several threads is told once for each that its worker is handed to, and
        no call in hand is left for that: nobody is there to go on with it."""
        return signum not in self.interruptions

    def gpus(self) -> tuple[Gpu, ...]:
        return tuple(
            g if g.free_bytes is None else dataclasses.replace(g, free_bytes=max(0, g.free_bytes - self._reserved.get(g.uuid, 0)))
            for g in super().gpus()
        )

    def host_room(self, members: Sequence[GpuProcess], method: str) -> tuple[int, HostRoom | None, list[Hazard]]:
        needed, room, short = super().host_room(members, method)
        if self._host_left is not None and members:
            left, why = self._host_left
            if needed > left:
                said = Hazard("host-memory", f"the image needs {size(needed)}; {why}", HOST_MEMORY_HINT, acceptable=True)
                short = [said]  # it says what the other ones say, and more
            self._told(needed)
        return needed, room, short

    def claim_room(self, until: float, waits: Callable[[str], None]) -> None:
        """Hold the GPUs on which something is reserved, once each has room for that. Raises :class:`gpuckpt.errors.GpuMemory`."""
        gpus, latest = [g for g in self.gpus() if g.uuid in self._reserved], max(until, self.now() + CLAIM_S)
        claim = self.claim_gpus(gpus, latest)
        while short := next((g for g in self.gpus() if self._reserved.get(g.uuid) and (g.free_bytes or 0) < MARGIN_BYTES), None):
            words = f"{short.label} has no room for the {size(self._reserved[short.uuid])} that the server takes when it wakes up"
            if self.now() >= until or self.interruptions:
                cls = errors.Interrupted if self.interruptions else errors.GpuMemory
                raise cls(f"{words}; it sleeps on, intact", hint="free the GPU; the next request tries again", gpu=short.uuid)
            waits(f"waiting for room: {words}")
            self.let_go(claim)  # as any resume that waits for room
            self.wait((), min(until, self.now() + 0.2))
            claim = self.claim_gpus(gpus, latest)

    def claim_gpus(self, gpus: Sequence[Gpu], until: float) -> FileClaim:
        claim = super().claim_gpus(gpus, until)
        self._kept += [os.dup(fd) for fd in claim.fds]
        return claim

    def let_go(self, claim: FileClaim) -> None:
        super().let_go(claim)
        for fd in self._kept:
            os.close(fd)
        self._kept.clear()
