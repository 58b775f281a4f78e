"""Runs the PTX text of the fingerprint kernel, one block of threads, instruction by instruction: as much of PTX as nvcc makes of it.

Threads take turns: each runs until it exchanges values with its warp or waits for its block.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

DATA, OUT, KEYS = 1 << 32, 2 << 32, 3 << 32  # where the arguments lie, as addresses
_COMPARE = {
    "gt": lambda a, b: a > b,
    "lt": lambda a, b: a < b,
    "ge": lambda a, b: a >= b,
    "le": lambda a, b: a <= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
}
_COMPUTE = {
    "add": lambda a, b: a + b,
    "xor": lambda a, b: a ^ b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "shr": lambda a, b: a >> b,
    "shl": lambda a, b: a << b,
    "mul.lo": lambda a, b: a * b,
}
Turn = Generator[tuple[int, int] | None, int | None, None]


@dataclass
class Kernel:
    """The one entry of *text*, which takes the addresses of data and of what it finds, and keys by value."""

    text: str
    code: list[tuple[str, str, list[str]]] = field(init=False)  # (predicate, operation, operands)
    labels: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.code, self.labels = [], {}
        for line in self.text.partition("\n{\n")[2].splitlines():
            if label := re.fullmatch(r"(\$\w+):", line):
                self.labels[label[1]] = len(self.code)
            elif (found := re.fullmatch(r"(?:@(\S+) )?([a-z][\w.]*)(?: (.*))?;", line)) is not None:
                self.code.append((found[1] or "", found[2], re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s|]+", found[3] or "")))

    def run(self, data: bytes, keys: bytes, block: int, threads: int) -> dict[int, int]:
        """Offset -> word that the block with this number stores."""
        stored: dict[int, int] = {}
        shared = bytearray(1024)
        turns = [self._thread(data, keys, block, t, shared, stored) for t in range(threads)]
        given: list[int | None] = [None] * threads
        while turns:
            said = []
            for turn, value in zip(turns, given, strict=True):
                try:
                    said.append(turn.send(value))
                except StopIteration:
                    said.append(None)
                    turn.close()
            if all(s is None for s in said) and all(t.gi_frame is None for t in turns):
                break
            given = [None if s is None else said[n ^ s[1]][0] for n, s in enumerate(said)]  # type: ignore[index]
        return stored

    def _thread(self, data: bytes, keys: bytes, block: int, thread: int, shared: bytearray, stored: dict[int, int]) -> Turn:
        registers: dict[str, Any] = {"%tid.x": thread, "%ctaid.x": block}
        arguments = {"0": DATA, "1": OUT, "2": KEYS}

        def value(word: str) -> Any:
            if word not in registers:
                if found := re.fullmatch(r"gpuckpt_fingerprint_param_(\d)", word):
                    registers[word] = arguments[found[1]]
                else:
                    registers[word] = 0 if word.startswith("_Z") else int(word, 0)  # the one variable in shared memory
            return registers[word]

        at = 0
        while at < len(self.code):
            predicate, operation, operands = self.code[at]
            at += 1
            if predicate and bool(registers[predicate.lstrip("!")]) == predicate.startswith("!"):
                continue
            name, *kinds = operation.split(".")
            bits = int(kinds[-1][1:]) if kinds and kinds[-1][1:].isdigit() else 64
            mask = (1 << bits) - 1
            if name == "ret":
                return
            if name == "bra":
                at = self.labels[operands[0]]
            elif name == "bar":
                yield None
            elif name == "shfl":
                registers[operands[0]] = yield value(operands[2]), value(operands[3])
            elif name in ("ld", "st"):
                inside = re.fullmatch(r"\[([%\w]+)(?:\+(-?\d+))?\]", operands[name == "ld"])
                assert inside is not None, operands
                address, size = value(inside[1]) + int(inside[2] or 0), bits // 8
                if name == "st" and kinds[0] == "global":
                    stored[address - OUT] = value(operands[1])
                elif name == "st":
                    shared[address : address + size] = value(operands[1]).to_bytes(size, "little")
                elif kinds[0] == "param" and address in (DATA, OUT):
                    registers[operands[0]] = address
                else:
                    source, base = {"param": (keys, KEYS), "global": (data, DATA), "shared": (shared, 0)}[kinds[0]]
                    for n, register in enumerate(re.findall(r"%\w+", operands[0])):
                        registers[register] = struct.unpack_from("<Q" if size == 8 else "<I", source, address - base + n * size)[0]
            elif name == "mov" and "{" in operands[0]:
                low, high = re.findall(r"%\w+", operands[0])
                registers[low], registers[high] = value(operands[1]) & 0xFFFFFFFF, value(operands[1]) >> 32
            elif name == "mov" and "{" in operands[1]:
                low, high = re.findall(r"%\w+", operands[1])
                registers[operands[0]] = value(low) | value(high) << 32
            elif name in ("mov", "cvta", "cvt"):
                registers[operands[0]] = value(operands[1]) & mask & (1 << int(kinds[0][1:]) if name == "cvt" else 1 << 64) - 1
            elif name == "selp":
                registers[operands[0]] = value(operands[1] if registers[operands[3]] else operands[2]) & mask
            else:
                a, b = (value(o) & mask for o in operands[1:3])
                if name == "setp":
                    if kinds[-1].startswith("s"):
                        a, b = (n - (n >> bits - 1 << bits) for n in (a, b))
                    registers[operands[0]] = _COMPARE[kinds[0]](a, b)
                elif name == "mul" and kinds[0] != "lo":
                    registers[operands[0]] = a * b if kinds[0] == "wide" else a * b >> bits
                else:
                    registers[operands[0]] = _COMPUTE[f"{name}.lo" if name == "mul" else name](a, b) & mask
