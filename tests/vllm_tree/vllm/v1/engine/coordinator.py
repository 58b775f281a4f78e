"""Between the fronts and the data-parallel engines: knows the wave, and wakes all engines when one has a request."""

from __future__ import annotations

from typing import Any

from vllm.v1.engine import EngineCoreRequestType


class DPCoordinator:
    """A thread of the front here, a process there. Each engine has a queue *publish_back*; fronts and engines write to *inbox*."""

    def __init__(self, inbox: Any, publish_back: list[Any]) -> None:
        self.inbox, self.publish_back = inbox, publish_back
        self.current_wave, self.engines_running = 0, False

    def process_input_socket(self) -> None:
        publish_back = self.publish_back
        while True:
            eng_index, outputs = self.inbox.get()
            if isinstance(outputs, tuple):  # a front sends a request while the engines stand
                engine_to_exclude, wave = outputs
                if not self.engines_running:
                    self.engines_running = True
                    self._send_start_wave(publish_back, self.current_wave, None if wave < self.current_wave else engine_to_exclude)
            elif (wave := outputs.wave_complete) is not None:
                if self.current_wave <= wave:
                    self.current_wave, self.engines_running = wave + 1, False
            elif (wave := outputs.start_wave) is not None and (
                wave > self.current_wave or (wave == self.current_wave and not self.engines_running)
            ):
                self.current_wave, self.engines_running = wave, True
                self._send_start_wave(publish_back, wave, eng_index)

    @staticmethod
    def _send_start_wave(engines: list[Any], wave: int, exclude_engine_index: int | None) -> None:
        for engine in engines:
            engine.put((EngineCoreRequestType.START_DP_WAVE, (wave, exclude_engine_index)))
