"""Fingerprints of memory: as defined, and whatever changes is seen."""

from __future__ import annotations

import ctypes
import os
import random
import re
import struct
from fractions import Fraction
from pathlib import Path

import pytest

from gpuckpt.pool.fingerprint import CHUNK_BYTES, PRIME, THREADS, Keys, fingerprints, missed
from tests import pool_ptx, ptx_machine
from tests.pool_machine import Gpu


class Printer:
    def __init__(self, gpu: Gpu, chunks: int) -> None:
        self.gpu, self.nbytes = gpu, chunks * CHUNK_BYTES
        self.address = gpu.malloc("weights", self.nbytes)
        self.keys = Keys(os.urandom(Keys.SIZE))

    def __call__(self, data: bytes) -> list[tuple[int, int]]:
        self.gpu.write(self.address, data)
        out = (ctypes.c_uint64 * (self.nbytes // CHUNK_BYTES * 2))()
        done = self.gpu.c.gpuckpt_pool_fingerprint(ctypes.c_uint64(self.address), ctypes.c_size_t(self.nbytes), 0, self.keys.random, out)
        assert done
        return list(zip(out[::2], out[1::2], strict=True))


@pytest.fixture
def printer(tmp_path: Path) -> Printer:
    return Printer(Gpu(tmp_path), 2)


def test_the_kernel_computes_what_is_defined(printer: Printer) -> None:
    for data in (os.urandom(printer.nbytes), bytes(printer.nbytes), b"\xff" * printer.nbytes):
        found = printer(data)
        assert found == fingerprints(data, printer.keys)
        assert found[0] != found[1], "the same content at another place is another"
    other = Printer(printer.gpu, 2)
    assert other(data) != found, "another process has other keys"


def test_sums_at_the_edges_of_a_word(printer: Printer) -> None:
    """Random data does not come there: two sums below the prime, or one of 64 bits and the 41 that a thread folds into it."""
    add = printer.gpu.fake.fake_add
    add.restype, add.argtypes = ctypes.c_uint64, (ctypes.c_uint64, ctypes.c_uint64)
    below, folded = (0, 1, 58, 59, PRIME // 2, PRIME - 60, PRIME - 1), (0, 1, 58, 59, 60, 2**41 - 1)
    pairs = [(a, b) for a in below for b in below] + [(2**64 - n, b) for n in (1, 2, 59, 60, 2**41) for b in folded]
    assert [add(a, b) for a, b in pairs] == [(a + b) % PRIME for a, b in pairs]
    assert pow(3, PRIME - 1, PRIME) == pow(5, PRIME - 1, PRIME) == 1, "a prime, as far as Fermat can tell"


def test_the_bound_that_the_documents_state() -> None:
    assert missed(1) == Fraction(1, 2**126) + Fraction(1, 2**128)
    assert Fraction(1, 2**108) < missed(64 << 30) < Fraction(1, 2**107)


def test_single_bits(printer: Printer) -> None:
    data = bytearray(os.urandom(printer.nbytes))
    seen = {tuple(printer(bytes(data)))}
    places = {
        0,
        31,
        32,
        CHUNK_BYTES * 8 - 1,
        CHUNK_BYTES * 8,
        printer.nbytes * 8 - 1,
        *random.Random(1).sample(range(printer.nbytes * 8), 300),
    }
    for bit in places:
        data[bit // 8] ^= 1 << bit % 8
        seen.add(tuple(printer(bytes(data))))
        data[bit // 8] ^= 1 << bit % 8
    assert len(seen) == len(places) + 1


@pytest.mark.parametrize("size", [4, 8, 16, 4096, 65536, CHUNK_BYTES])
def test_swapped_tiles(printer: Printer, size: int) -> None:
    data = os.urandom(printer.nbytes)
    before, rng = printer(data), random.Random(size)
    for _ in range(20):
        a, b = (n * size for n in rng.sample(range(printer.nbytes // size), 2))
        changed = bytearray(data)
        changed[a : a + size], changed[b : b + size] = data[b : b + size], data[a : a + size]
        assert printer(bytes(changed)) != before


def test_permuted_rows_streams_and_rotations(printer: Printer) -> None:
    data = os.urandom(printer.nbytes)
    seen = [printer(data)]
    for step in (4, 8, 16, 4096, 4112, CHUNK_BYTES):
        seen.append(printer(data[step:] + data[:step]))
        pieces = [data[i : i + step] for i in range(0, len(data), step)]
        seen.append(printer(b"".join(reversed(pieces))))
    assert len({tuple(s) for s in seen}) == len(seen) - 1, "but for the last two, which are the same of two chunks"


def test_changes_that_would_cancel_out_in_a_sum(printer: Printer) -> None:
    words = list(struct.unpack(f"<{printer.nbytes // 8}Q", os.urandom(printer.nbytes)))
    before, rng = printer(struct.pack(f"<{len(words)}Q", *words)), random.Random(2)
    for _ in range(60):
        changed = list(words)
        places = rng.sample(range(len(words)), rng.choice([2, 3, 4, 8]))
        if rng.random() < 0.3:  # in one stream
            places = [(places[0] % 512) + 512 * n for n in range(len(places))]
        how = rng.choice(["sum", "xor"])
        delta = rng.getrandbits(rng.choice([1, 16, 63])) | 1
        for n, place in enumerate(places):
            if how == "xor":
                changed[place] ^= delta
            else:
                last = n == len(places) - 1
                changed[place] = (changed[place] + (delta if not last else -delta * (len(places) - 1))) % 2**64
        assert printer(struct.pack(f"<{len(changed)}Q", *changed)) != before


def test_sparse_and_regular_content(printer: Printer) -> None:
    seen = set()
    for n in range(64):
        data = bytearray(printer.nbytes)
        data[n * 4096] = 1
        seen.add(tuple(printer(bytes(data))))
    for value in range(16):
        seen.add(tuple(printer(struct.pack("<I", value + 1) * (printer.nbytes // 4))))
    assert len(seen) == 80


def test_the_kernel_that_is_shipped_is_of_this_source_and_computes_what_is_defined() -> None:
    """Its PTX, run here instruction by instruction: the second block of threads, of the second chunk."""
    header = pool_ptx.HEADER.read_text()
    assert re.search(r"SHA-256 is (\w+)", header)[1] == pool_ptx.digest()  # type: ignore[index]
    text = "".join(line.encode().decode("unicode_escape") for line in re.findall(r'^ +"(.*)";?$', header, re.MULTILINE))
    assert text.startswith(".version 7.0\n")
    data, keys = os.urandom(2 * CHUNK_BYTES), Keys(os.urandom(Keys.SIZE))
    stored = ptx_machine.Kernel(text).run(data, keys.random, 1, THREADS)
    assert stored == dict(zip((16, 24), fingerprints(data, keys)[1], strict=True))
