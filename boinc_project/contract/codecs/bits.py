"""Codes of fewer than eight bits, packed into bytes; the first of them in the lowest bits."""

from __future__ import annotations

import numpy as np

from boinc_project.contract.codecs.method import Array

_LOW, _HIGH = np.arange(256, dtype=np.uint8) & 15, np.arange(256, dtype=np.uint8) >> 4


def nibble_bytes(count: int) -> int:
    return -(-count // 2)


def pack_nibbles(codes: Array) -> Array:
    """Codes below 16 (of any type of one byte), two a byte; an odd last one has zeros beside it."""
    padded = np.zeros(2 * nibble_bytes(codes.size), np.uint8)
    padded[: codes.size] = codes
    return padded[0::2] | (padded[1::2] << np.uint8(4))


def nibble_table(values: Array) -> Array:
    """From 16 values a table [256]: what the two codes of a byte stand for, as a pair (numpy's complex64)."""
    return np.ascontiguousarray(np.stack([values[_LOW], values[_HIGH]], axis=1)).view(np.complex64).reshape(256)


def last_nibble_is_free(packed: Array, count: int) -> bool:
    """Whether zeros are beside an odd last code."""
    return not (count % 2 and int(packed[-1]) >> 4)


def index_bytes(count: int) -> int:
    """Bytes of `count` 12-bit indices."""
    return -(-count * 3 // 2)


def pack_indices(indices: Array) -> Array:
    """Indices below 4096, two in three bytes."""
    padded = np.zeros(2 * nibble_bytes(indices.size), np.uint16)
    padded[: indices.size] = indices
    one, two = padded[0::2], padded[1::2]
    packed = np.stack([one & 255, (one >> 8) | ((two & 15) << 4), two >> 4], axis=1).astype(np.uint8)
    return packed.reshape(-1)[: index_bytes(indices.size)].copy()


def unpack_indices(packed: Array, count: int) -> Array:
    """`count` indices (int64) from their bytes."""
    padded = np.zeros(3 * nibble_bytes(count), np.int64)
    padded[: packed.size] = packed
    first, middle, last = padded.reshape(-1, 3).T
    return np.stack([first | ((middle & 15) << 8), (middle >> 4) | (last << 4)], axis=1).reshape(-1)[:count]
