"""int8: a code is round-half-even(x / scale), blocks of B values share one float32 scale = max|x| / 127.

Block-wise absmax quantisation as in Dettmers et al. 2021 (https://arxiv.org/abs/2110.02861), with evenly spaced codes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from boinc_project.contract.codecs.blocks import blocks_of, coded, multiply, safe, scaled
from boinc_project.contract.codecs.method import (
    CODES_SUFFIX,
    MAX_BLOCK,
    SCALES_SUFFIX,
    Array,
    CodecSeed,
    Method,
    Parts,
    Shape,
    elements,
    in_range,
    rounded_apart,
)
from boinc_project.contract.tensorfile import FileTensor


@dataclass(frozen=True)
class Int8(Method):
    """1 + 4 / block bytes a value."""

    kind: ClassVar[str] = "int8"
    block: int = 256

    def __post_init__(self) -> None:
        in_range(self.kind, "block", self.block, 1, MAX_BLOCK)

    def parts(self, shape: Shape) -> dict[str, FileTensor]:
        count = elements(shape)
        return {
            CODES_SUFFIX: FileTensor("int8", (count,)),
            SCALES_SUFFIX: FileTensor("float32", (blocks_of(count, self.block),)),
        }

    def encode(self, array: Array, name: str, seed: CodecSeed) -> dict[str, Array]:
        codes, scales = coded(array, self.block, _quantised)
        return {CODES_SUFFIX: codes, SCALES_SUFFIX: scales}

    def pieces(self, parts: Parts, shape: Shape, name: str, seed: CodecSeed) -> Iterator[tuple[slice, Array]]:
        return scaled(parts[CODES_SUFFIX], parts[SCALES_SUFFIX], self.block)

    def decode(self, parts: Parts, shape: Shape, name: str, seed: CodecSeed) -> Array:
        found = np.empty(elements(shape), np.float32)
        multiply(parts[CODES_SUFFIX], parts[SCALES_SUFFIX], self.block, found)
        return found.reshape(shape)

    def spread(self, distance: float) -> float:
        return rounded_apart(distance, 4 / 127)  # the largest of a block is some four times the root mean square


def _quantised(grid: Array, start: int) -> tuple[Array, Array]:
    scales = (np.abs(grid).max(axis=1, initial=0.0) / np.float32(127)).astype(np.float32)
    codes = np.clip(np.rint(grid / safe(scales)), -127, 127).astype(np.int8)
    codes[scales == 0] = 0
    return codes, scales
