"""Philox4x32-10: counter-based random numbers that are the same bits in every backend.

Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Nothing is carried from one
number to the next, so any device can compute any element. A random tensor of a graph is fixed by

    key      (seed bits 0-31, seed bits 32-63)
    counter  (block bits 0-31, block bits 32-63, step bits 0-31, stream)

where `stream` tells the random nodes of one graph apart. Element i is word i % 4 of block i // 4.
A uniform number is the word's upper 24 bits times 2**-24: every value is exact in float32 and below 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)  # golden ratio and sqrt(3) - 1, as 32-bit fractions
ROUNDS = 10
MASK = 0xFFFFFFFF
_BLOCKS_AT_ONCE = 1 << 14  # the six 64-bit work arrays then stay within a CPU's second cache

UIntArray = np.ndarray[Any, np.dtype[np.uint64]]


def philox4x32_10(counter: tuple[UIntArray, ...], key: tuple[int, int]) -> tuple[UIntArray, ...]:
    """Ten rounds over four equally shaped uint64 arrays that hold 32-bit words; returns the same form."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    m0, m1 = (np.uint64(m) for m in MULTIPLIERS)
    mask, half = np.uint64(MASK), np.uint64(32)
    for _ in range(ROUNDS):
        product0, product1 = x0 * m0, x2 * m1
        x0 = (product1 >> half) ^ x1 ^ np.uint64(k0)
        x2 = (product0 >> half) ^ x3 ^ np.uint64(k1)
        x1, x3 = product1 & mask, product0 & mask
        k0, k1 = (k0 + KEY_INCREMENTS[0]) & MASK, (k1 + KEY_INCREMENTS[1]) & MASK
    return x0, x1, x2, x3


def words(seed: int, step: int, stream: int, count: int, first: int = 0) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """`count` 32-bit words from the `first` one on; seed and step are signed 64-bit, stream is unsigned 32-bit."""
    begin, end = first // 4, -(-(first + count) // 4)
    out = np.zeros((end - begin, 4), np.uint32)
    _fill(out, seed, step, stream, begin, 0)
    return out.reshape(-1)[first - 4 * begin :][:count]


def uniform(seed: int, step: int, stream: int, count: int, first: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    """`count` float32 numbers in [0, 1) from the `first` one on; the arguments are those of `words`."""
    begin, end = first // 4, -(-(first + count) // 4)
    out = np.zeros((end - begin, 4), np.float32)
    _fill(out, seed, step, stream, begin, 8)
    out *= np.float32(2.0**-24)
    return out.reshape(-1)[first - 4 * begin :][:count]


def bernoulli(seed: int, step: int, stream: int, count: int, p: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    """`count` float32 numbers, 1 with probability p rounded to float32 and otherwise 0."""
    return (uniform(seed, step, stream, count) < np.float32(p)).astype(np.float32)


def _fill(out: np.ndarray[Any, Any], seed: int, step: int, stream: int, begin: int, shift: int) -> None:
    """The words of out.shape[0] blocks of four from block `begin` on, shifted right by so many bits."""
    key = (seed & MASK, (seed >> 32) & MASK)
    for first in range(0, len(out), _BLOCKS_AT_ONCE):
        block = np.arange(begin + first, begin + min(first + _BLOCKS_AT_ONCE, len(out)), dtype=np.uint64)
        low, high = block & np.uint64(MASK), block >> np.uint64(32)
        same = np.zeros_like(block)
        counter = (low, high, same + np.uint64(step & MASK), same + np.uint64(stream))
        for word, values in enumerate(philox4x32_10(counter, key)):
            out[first : first + block.size, word] = values >> np.uint64(shift) if shift else values
