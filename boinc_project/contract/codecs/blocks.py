"""Blocks of values that share one float32 scale: what int8, fp4 and QSGD have in common."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Callable

import numpy as np

from boinc_project.contract.codecs import method
from boinc_project.contract.codecs.method import Array, flat_float32

ENCODED_AT_ONCE = 1 << 18


def blocks_of(count: int, block: int) -> int:
    return -(-count // block)


def coded(array: Array, block: int, code: Callable[[Array, int], tuple[Array, Array]]) -> tuple[Array, Array]:
    """Codes [n] of a byte each, and scales [blocks], some blocks at a time.

    `code` makes both of values [some blocks, block] (the last block padded with zeros), given the place of the first.
    """
    flat = flat_float32(array)
    codes, scales = np.zeros(flat.size, np.int8), np.zeros(blocks_of(flat.size, block), np.float32)
    some = max(1, ENCODED_AT_ONCE // block)
    for first in range(0, scales.size, some):
        start = first * block
        part = flat[start : start + some * block]
        grid = np.zeros((blocks_of(part.size, block), block), np.float32)
        grid.reshape(-1)[: part.size] = part
        made, scales[first : first + some] = code(grid, start)
        codes[start : start + part.size] = made.reshape(-1)[: part.size]
    return codes, scales


def safe(scales: Array) -> Array:
    """Scales to divide by, [blocks, 1]: a block of zeros (or so small that its scale underflows) has scale 0."""
    return np.where(scales > 0, scales, np.float32(1))[:, None]


def multiply(codes: Array, scales: Array, block: int, out: Array) -> None:
    """Write code times its block's scale: codes [n] of any number type, scales [blocks], out [n] of float32."""
    whole = codes.size - codes.size % block
    grid = out[:whole].reshape(-1, block)
    np.multiply(codes[:whole].reshape(grid.shape), scales[: grid.shape[0], None], out=grid, dtype=np.float32)
    if whole < codes.size:
        np.multiply(codes[whole:], scales[whole // block], out=out[whole:], dtype=np.float32)


def scaled(codes: Array, scales: Array, block: int) -> Iterator[tuple[slice, Array]]:
    """(place, code times its block's scale), some blocks at a time."""
    some = max(1, method.PIECE_ELEMENTS // block) * block
    room = np.empty(min(some, codes.size), np.float32)
    for start in range(0, codes.size, some):
        where = slice(start, min(start + some, codes.size))
        values = room[: where.stop - start]
        multiply(codes[where], scales[start // block :], block, values)
        yield where, values
