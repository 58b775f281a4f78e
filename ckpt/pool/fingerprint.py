"""What a fingerprint of the pool is: the definition of what ``_fingerprint.cu`` computes on the GPU, and what it promises.

Memory is taken in chunks of 256 KiB, and each has a fingerprint of 128 bits, in two words. A chunk is of 16384 places of 16 bytes; the
places t, t + 256, t + 512, … are stream t, 64 places long.

1. Each stream is hashed by NH (Black, Halevi, Krawczyk, Krovetz, Rogaway: "UMAC", 1999) on words of 32 bits, four times, with keys shifted
   by two words each time. Two different streams agree in all four with a probability of at most 2^-128.
2. The eight words of 32 bits of each stream are multiplied by numbers of 64 bits that depend on the key and on the stream's place in its
   block of memory, and all products are summed modulo 2^64 - 59, a prime; that twice, with keys of its own. The sums of different words
   agree with a probability of at most 2^-63 each: of the numbers of 64 bits, 59 residues have two.

So a chunk that has changed, by whatever amount and pattern, is taken for unchanged with a probability of at most 2^-126 + 2^-128; any one
of the 2^18 chunks of 64 GiB is, in one sleep, with less than 2^-107 (:func:`missed`). This holds for data made without knowledge of the
keys, as far as SplitMix64 under a random key, from which the numbers of step 2 come, cannot be told from random. The keys are from
getrandom(2), once a process, and leave it in no other way than as arguments of the kernel.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from fractions import Fraction

THREADS, ROWS = 256, 64
CHUNK_BYTES = THREADS * ROWS * 16
PRIME = (1 << 64) - 59
_32, _64 = (1 << 32) - 1, (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Keys:
    """Those of one process, from bytes as random as ``os.urandom``'s."""

    SIZE = 16 + 4 * (4 * ROWS + 6)
    random: bytes

    @property
    def place(self) -> tuple[int, ...]:
        return struct.unpack_from("<2Q", self.random)

    @property
    def nh(self) -> tuple[int, ...]:
        return struct.unpack_from(f"<{4 * ROWS + 6}I", self.random, 16)


def fingerprints(data: bytes, keys: Keys) -> list[tuple[int, int]]:
    """Of each chunk of *data*, the content of a block from its beginning. Slow: the definition, to compare with."""
    assert len(data) % CHUNK_BYTES == 0
    place, nh = keys.place, keys.nh
    found = []
    for chunk in range(len(data) // CHUNK_BYTES):
        words = struct.unpack_from(f"<{CHUNK_BYTES // 4}I", data, chunk * CHUNK_BYTES)
        sums = [0, 0]
        for stream in range(THREADS):
            hashes = [_nh(words, stream, nh, 2 * shift) for shift in range(4)]
            parts = [half for h in hashes for half in (h & _32, h >> 32)]
            for i in (0, 1):
                for n, part in enumerate(parts):
                    number = ((chunk * THREADS + stream) * 8 + n) & _64
                    sums[i] += _splitmix64(place[i], number) * part
        found.append((sums[0] % PRIME, sums[1] % PRIME))
    return found


def missed(nbytes: int) -> Fraction:
    """At most this is the probability that one sleep takes any chunk for unchanged of *nbytes* that have all changed."""
    return -(-nbytes // CHUNK_BYTES) * (Fraction(2, 1 << 64) ** 2 + Fraction(1, 1 << 32) ** 4)


def _nh(words: tuple[int, ...], stream: int, keys: tuple[int, ...], shift: int) -> int:
    total = 0
    for row in range(ROWS):
        at, k = 4 * (row * THREADS + stream), 4 * row + shift
        total += ((words[at] + keys[k]) & _32) * ((words[at + 1] + keys[k + 1]) & _32)
        total += ((words[at + 2] + keys[k + 2]) & _32) * ((words[at + 3] + keys[k + 3]) & _32)
    return total & _64


def _splitmix64(key: int, number: int) -> int:
    z = (key + (number + 1) * 0x9E3779B97F4A7C15) & _64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _64
    return z ^ (z >> 31)
