"""Simulated communicators: collective like the real ones, and while one is not suspended a restore of its process is lost."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from gpuckpt.driver.simulated_store import SimulatedWorldDir

#: How long a rank waits for the others before the simulated collective fails, in seconds.
COLLECTIVE_TIMEOUT_S = 20.0


class NoCommunicator:
    """Of a process that has none: an agent's :class:`~gpuckpt.agent.communicators.Communicators`."""

    def __init__(self, world: SimulatedWorldDir, pid: int) -> None:
        self.world, self.pid = world, pid

    def sockets(self) -> int:
        return 0

    def obstacles(self) -> list[str]:
        return []

    def describe(self) -> list[dict[str, Any]]:
        return []

    def hazards(self) -> list[str]:
        return []

    def synchronise(self) -> None:
        with self.world.cuda_call(self.pid):
            pass

    def suspend(self) -> None: ...

    def held_bytes(self) -> int:
        return 0

    def resume(self) -> None: ...


class SimulatedCommunicator:
    """Rank *rank* of *size* in communicator *name*: an agent's :class:`~gpuckpt.agent.communicators.Communicators`."""

    def __init__(
        self,
        world: SimulatedWorldDir,
        pid: int,
        name: str,
        rank: int,
        size: int,
        *,
        nccl: str = "2.30.7",
        backup_bytes: int = 0,
        meet_in: str | None = None,
    ) -> None:
        """*meet_in*: a directory in which ranks of several machines meet. *backup_bytes*: of host memory, while it is suspended."""
        self.world, self.pid, self.name, self.rank, self.size, self.nccl = world, pid, name, rank, size, nccl
        self._place = Path(meet_in or Path(world.path) / "comms")
        self._meetings, self._backup_bytes = 0, backup_bytes
        world.mark_communicator(pid, suspended=False)

    def sockets(self) -> int:
        return 1

    def obstacles(self) -> list[str]:
        return []

    def describe(self) -> list[dict[str, Any]]:
        assert threading.current_thread().name != "gpuckpt-agent", "a call of NCCL beside the program's own"
        return [{"name": self.name, "rank": self.rank, "size": self.size, "nccl": self.nccl, "host_bytes": self._backup_bytes}]

    def hazards(self) -> list[str]:
        return []

    def synchronise(self) -> None:
        with self.world.cuda_call(self.pid):
            pass

    def suspend(self) -> None:
        self._meet("suspend")
        self.world.mark_communicator(self.pid, suspended=True)

    def held_bytes(self) -> int:
        return 0

    def resume(self) -> None:
        with self.world.cuda_call(self.pid):  # touches the GPU: it needs a process that is restored and unlocked
            pass
        self._meet("resume")
        self.world.mark_communicator(self.pid, suspended=False)

    def _meet(self, what: str) -> None:
        """Return when every rank has come, in the same order of meetings. Faults of the calls "comms" and "comms-resume" act here."""
        fault = self.world.take_fault("comms" if what == "suspend" else "comms-resume", self.pid)
        if fault:
            time.sleep(fault.delay_s)
        if fault and fault.hang:
            threading.Event().wait()
        if fault and fault.result:
            raise RuntimeError(f"{what} of communicator {self.name}: {fault.result}")
        self._meetings += 1
        place = self._place / f"{self.name}-{self._meetings}-{what}"
        place.mkdir(parents=True, exist_ok=True)
        (place / str(self.rank)).touch()
        until = time.monotonic() + COLLECTIVE_TIMEOUT_S
        while len(list(place.iterdir())) < self.size:
            if time.monotonic() > until:
                raise TimeoutError(f"{what} of communicator {self.name}: only {len(list(place.iterdir()))} of {self.size} ranks came")
            time.sleep(0.005)


class SimulatedCommunicators:
    """Several of one process, in the order of their names, as every rank takes them."""

    def __init__(self, several: list[SimulatedCommunicator]) -> None:
        self.several = sorted(several, key=lambda c: c.name)
        self.synchronise, self.obstacles = self.several[0].synchronise, self.several[0].obstacles

    def sockets(self) -> int:
        return len(self.several)

    def describe(self) -> list[dict[str, Any]]:
        return [described for c in self.several for described in c.describe()]

    def hazards(self) -> list[str]:
        return []

    def suspend(self) -> None:
        for c in self.several:
            c.suspend()

    def held_bytes(self) -> int:
        return sum(c.held_bytes() for c in self.several)

    def resume(self) -> None:
        for c in self.several:
            c.resume()
