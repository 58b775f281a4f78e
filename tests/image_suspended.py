"""A program whose image is full of something, for tests of images in files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpuckpt.image import file, memory, store
from gpuckpt.model import Call
from tests.image_machine import MIB, Program

NBYTES = 32 * MIB + 4096  # two whole pieces and a rest
OPERATION = "0123456789ab"


class Suspended:
    """A program whose image is full of something, and what the caller of a checkpoint would do with it."""

    def __init__(self, program: Program, directory: Path) -> None:
        self.program, self.directory = program, directory
        program.announce()
        self.address = program.map("image", NBYTES).address
        program.ask(f"zero {self.address:x} {NBYTES}")
        self.spec: dict[str, Any] = {}
        self.path = directory / file.name(program.id, OPERATION)

    def call(self, call: Call, check: Callable[[], None] = lambda: None) -> dict[str, Any]:
        with memory.of(self.program.id) as image:
            wanted = {"directory": str(self.directory), "operation": OPERATION}
            return store.serve(call, image, self.program.id, wanted if call is Call.STORE else self.spec, check)

    def keep(self) -> None:
        self.spec = self.call(Call.STORE)
        self.call(Call.DROP)

    def whole(self) -> bool:
        """Whether its memory has what was there; asked of the memory, not of the program."""
        with open(f"/proc/{self.program.pid}/mem", "rb", buffering=0) as file:
            file.seek(self.address)
            return file.read(NBYTES) == b"\x5a" * NBYTES

    def in_memory(self) -> int:
        return self.program.look(self.address, 0, NBYTES).rss

    def opened(self) -> Path:
        with memory.of(self.program.id) as image:
            return image.holds or self.path
