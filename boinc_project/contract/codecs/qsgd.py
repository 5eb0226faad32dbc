"""qsgd: Q(v)_i = ||v||_2 * sign(v_i) * xi_i, where xi_i is |v_i| / ||v||_2 rounded at random to a multiple of 1/s.

Alistarh et al. 2017, https://arxiv.org/abs/1610.02132, section 3.1, in buckets of B values (section 4). Between l/s and
(l+1)/s the upper one is taken with the probability that makes E[Q(v)] = v; E||Q(v) - v||^2 is at most
min(B/s^2, sqrt(B)/s) ||v||^2. The random numbers come from the microtask's seed, so that replicas round alike. Instead
of Elias codes, signed levels of 4 bits (s up to 7) or 8, which the file's compression shortens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from boinc_project.contract import philox
from boinc_project.contract.codecs.bits import last_nibble_is_free, nibble_bytes, nibble_table, pack_nibbles
from boinc_project.contract.codecs.blocks import blocks_of, coded, safe, scaled
from boinc_project.contract.codecs.fp4 import halves
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
    in_range,
    rounded_apart,
    unusable,
)
from boinc_project.contract.tensorfile import FileTensor

_LEVELS = nibble_table(np.array([*range(8), *range(-8, 0)], np.float32))  # four bits, two's complement


@dataclass(frozen=True)
class Qsgd(Method):
    """0.5 (levels up to 7) or 1 (up to 127), + 4 / block bytes a value. A scale is ||v||_2 / s."""

    kind: ClassVar[str] = "qsgd"
    levels: int = 7
    block: int = 256

    def __post_init__(self) -> None:
        in_range(self.kind, "levels", self.levels, 1, 127)
        even_block(self.kind, self.block)

    def parts(self, shape: Shape) -> dict[str, FileTensor]:
        count = elements(shape)
        codes = FileTensor("uint8", (nibble_bytes(count),)) if self.levels <= 7 else FileTensor("int8", (count,))
        return {CODES_SUFFIX: codes, SCALES_SUFFIX: FileTensor("float32", (blocks_of(count, self.block),))}

    def encode(self, array: Array, name: str, seed: CodecSeed) -> dict[str, Array]:
        key = seed.key(self.kind, name)

        def rounded(grid: Array, start: int) -> tuple[Array, Array]:
            norms = np.sqrt((grid.astype(np.float64) ** 2).sum(axis=1))
            scales = (norms / self.levels).astype(np.float32)
            drawn = philox.uniform(key, 0, 0, grid.size, start).reshape(grid.shape)
            codes = np.floor(np.abs(grid) / safe(scales) + drawn)
            codes = np.copysign(np.minimum(codes, self.levels), grid).astype(np.int8)
            codes[scales == 0] = 0
            return codes, scales

        codes, scales = coded(array, self.block, rounded)
        packed = pack_nibbles(codes.view(np.uint8) & np.uint8(15)) if self.levels <= 7 else codes
        return {CODES_SUFFIX: packed, SCALES_SUFFIX: scales}

    def pieces(self, parts: Parts, shape: Shape, name: str, seed: CodecSeed) -> Iterator[tuple[slice, Array]]:
        if self.levels <= 7:
            return halves(parts[CODES_SUFFIX], parts[SCALES_SUFFIX], elements(shape), self.block, _LEVELS)
        return scaled(parts[CODES_SUFFIX], parts[SCALES_SUFFIX], self.block)

    def check(self, parts: Parts, shape: Shape, place: str) -> None:
        codes = parts[CODES_SUFFIX]
        if self.levels <= 7:
            if not last_nibble_is_free(codes, elements(shape)):
                raise unusable(place, "a code follows the last one")
            top = int(np.abs(_LEVELS[codes].view(np.float32)).max()) if codes.size else 0
        else:
            top = int(np.abs(codes.astype(np.int16)).max()) if codes.size else 0
        if top > self.levels:
            raise unusable(place, f"a code is {top}, beyond {self.levels} levels")

    @property
    def variance(self) -> float:
        return min(self.block / self.levels**2, math.sqrt(self.block) / self.levels)

    def spread(self, distance: float) -> float:
        return rounded_apart(distance, self.block**0.5 / self.levels)
