"""fp4: four-bit numbers E3M0 (a sign, three bits of exponent), as Streaming DiLoCo sends outer gradients.

Douillard et al. 2025, https://arxiv.org/abs/2501.18512, section 2.3. A magnitude is 0 or one of 2^-6 ... 2^0 times the
largest of its block, whichever is nearest (of two equally near ones the larger). The paper does not name its scale;
here blocks of B values share one float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from boinc_project.contract.codecs import method
from boinc_project.contract.codecs.bits import last_nibble_is_free, nibble_bytes, nibble_table, pack_nibbles
from boinc_project.contract.codecs.blocks import blocks_of, coded, safe
from boinc_project.contract.codecs.method import (
    CODES_SUFFIX,
    SCALES_SUFFIX,
    Array,
    CodecSeed,
    Method,
    Parts,
    Shape,
    elements,
    even_block,
    rounded_apart,
    unusable,
)
from boinc_project.contract.tensorfile import FileTensor

_MAGNITUDES = np.array([0.0, *(2.0**exponent for exponent in range(-6, 1))], np.float32)
_VALUES = nibble_table(np.concatenate([_MAGNITUDES, np.float32(0) - _MAGNITUDES]))


@dataclass(frozen=True)
class Fp4(Method):
    """0.5 + 4 / block bytes a value."""

    kind: ClassVar[str] = "fp4"
    block: int = 256

    def __post_init__(self) -> None:
        even_block(self.kind, self.block)

    def parts(self, shape: Shape) -> dict[str, FileTensor]:
        count = elements(shape)
        return {
            CODES_SUFFIX: FileTensor("uint8", (nibble_bytes(count),)),
            SCALES_SUFFIX: FileTensor("float32", (blocks_of(count, self.block),)),
        }

    def encode(self, array: Array, name: str, seed: CodecSeed) -> dict[str, Array]:
        codes, scales = coded(array, self.block, _rounded)
        return {CODES_SUFFIX: pack_nibbles(codes), SCALES_SUFFIX: scales}

    def pieces(self, parts: Parts, shape: Shape, name: str, seed: CodecSeed) -> Iterator[tuple[slice, Array]]:
        return halves(parts[CODES_SUFFIX], parts[SCALES_SUFFIX], elements(shape), self.block, _VALUES)

    def check(self, parts: Parts, shape: Shape, place: str) -> None:
        if not last_nibble_is_free(parts[CODES_SUFFIX], elements(shape)):
            raise unusable(place, "a code follows the last one")

    def spread(self, distance: float) -> float:
        return rounded_apart(distance, 0.7)  # codes near the root mean square are half of it to all of it apart


def _rounded(grid: Array, start: int) -> tuple[Array, Array]:
    scales = np.abs(grid).max(axis=1, initial=0.0).astype(np.float32)
    codes = nearest(np.abs(grid) / safe(scales))
    return codes | (((grid < 0) & (codes > 0)).astype(np.uint8) << np.uint8(3)), scales


def nearest(ratios: Array) -> Array:
    """Codes 0 to 7 of magnitudes from 0 to 1: adding half a unit to the mantissa rounds to a power of two."""
    exponents = (ratios.astype(np.float32).view(np.int32) + (1 << 22)) >> 23
    codes = np.clip(exponents - (127 - 7), 0, 7)
    # Between 0 and the smallest magnitude the middle is 2^-7, not three quarters of a power of two.
    return np.maximum(codes, ratios >= np.float32(2.0**-7)).astype(np.uint8)


def halves(packed: Array, scales: Array, count: int, block: int, table: Array) -> Iterator[tuple[slice, Array]]:
    """(place, values) of packed codes in blocks: what the table of bytes says times the block's scale."""
    blocks = max(1, method.PIECE_ELEMENTS // block)
    for first in range(0, scales.size, blocks):
        where = slice(first * block, min((first + blocks) * block, count))
        pairs = table.take(packed[where.start // 2 : -(-where.stop // 2)])
        values = pairs.view(np.float32)[: where.stop - where.start]
        whole = values.size // block
        values[: whole * block].reshape(whole, block)[:] *= scales[first : first + whole, None]
        values[whole * block :] *= scales[min(first + whole, scales.size - 1)]
        yield where, values
