"""GPUs that may not answer: NVML hangs where the driver does, and what asks it must end all the same."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

from gpuckpt import errors
from gpuckpt.driver.api import Devices, DriverVersion

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gpuckpt.model import Gpu, ProcessId

T = TypeVar("T")

#: How long an answer may take, in seconds. The first one may load NVML, and wake every GPU where persistence mode is off.
ANSWER_S = 30.0
#: How long it is waited for in any case: who asks for a short timeout does not mean the milliseconds that an answer takes.
LEAST_S = 0.5
_LOOK_S = 1.0


class Patient(Devices):
    """As *devices*, but that each question is given up after ``within_s`` seconds, with a :class:`gpuckpt.errors.Deadline`.

    While one that was given up still hangs, no other is asked. A signal that is added to ``signals`` meanwhile ends the waiting too
    (:class:`gpuckpt.errors.Interrupted`), after a second: an answer takes a few milliseconds.
    """

    def __init__(self, devices: Devices, within_s: float = ANSWER_S) -> None:
        self._devices = devices
        self._asked: threading.Thread | None = None
        self.simulated = devices.simulated
        self.within_s = within_s
        self.signals: Sequence[int] = ()

    def version(self) -> DriverVersion:
        return self._ask(self._devices.version)

    def gpus(self) -> tuple[Gpu, ...]:
        return self._ask(self._devices.gpus)

    def processes(self) -> dict[int, dict[str, int | None]]:
        return self._ask(self._devices.processes)

    def loaded(self, pids: list[int]) -> set[int]:
        return self._ask(self._devices.loaded, pids)

    def contexts(self, pids: list[int]) -> set[int]:
        return self._ask(self._devices.contexts, pids)

    def image_bytes(self, pid: int) -> int:
        return self._ask(self._devices.image_bytes, pid)

    def image(self, process: ProcessId) -> Mapping[str, Any]:
        return self._devices.image(process)

    def gpu_lock_path(self, gpu: Gpu) -> str:
        return self._devices.gpu_lock_path(gpu)

    def helper(self) -> int:
        return self._devices.helper()

    def close(self) -> None:
        self._devices.close()

    def _ask(self, question: Callable[..., T], *about: object) -> T:
        answers: list[T] = []
        failed: list[BaseException] = []

        def ask() -> None:
            try:
                answers.append(question(*about))
            except BaseException as e:  # noqa: BLE001 - whoever asked hears of it
                failed.append(e)

        if self._asked is not None and self._asked.is_alive():
            raise _unanswered("still does not answer")
        self._asked = threading.Thread(target=ask, name="gpuckpt-question", daemon=True)
        until, signals = time.monotonic() + self.within_s, len(self.signals)
        self._asked.start()
        while self._asked.is_alive() and (left_s := until - time.monotonic()) > 0:
            self._asked.join(min(_LOOK_S, left_s))
            if self._asked.is_alive() and len(self.signals) > signals:
                raise errors.Interrupted("interrupted while the NVIDIA driver (NVML) did not answer", signum=self.signals[-1])
        if failed:
            raise failed[0]
        if not answers:
            raise _unanswered(f"has not answered within {self.within_s:g} s")
        return answers[0]


def _unanswered(words: str) -> errors.Deadline:
    return errors.Deadline(
        f"the NVIDIA driver (NVML) {words}", hint="see what nvidia-smi and dmesg say; if it is only slow: a longer --timeout"
    )
