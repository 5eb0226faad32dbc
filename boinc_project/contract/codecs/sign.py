"""sign: one bit a value, and the mean magnitude of the tensor.

The compressor of 1-bit Adam (Tang et al. 2021, https://arxiv.org/abs/2102.02888) and of scaled signSGD (Karimireddy et
al. 2019, https://arxiv.org/abs/1901.09847): C(x) = ||x||_1 / d * sign(x). Adapted: both keep x - C(x) for the next
round (error feedback), which a volunteer who keeps nothing cannot do, and C is biased without it. sign(0) is +1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from boinc_project.contract.codecs import method
from boinc_project.contract.codecs.method import (
    SCALES_SUFFIX,
    Array,
    CodecSeed,
    Method,
    Parts,
    Shape,
    elements,
    flat_float32,
    rounded_apart,
    unusable,
)
from boinc_project.contract.tensorfile import FileTensor

BITS_SUFFIX = "#bits"  # a set bit is +1; the first value is in the lowest bit


@dataclass(frozen=True)
class Sign(Method):
    """1 / 8 byte a value."""

    kind: ClassVar[str] = "sign"

    def parts(self, shape: Shape) -> dict[str, FileTensor]:
        return {
            BITS_SUFFIX: FileTensor("uint8", (-(-elements(shape) // 8),)),
            SCALES_SUFFIX: FileTensor("float32", (1,)),
        }

    def encode(self, array: Array, name: str, seed: CodecSeed) -> dict[str, Array]:
        flat = flat_float32(array)
        mean = np.abs(flat).sum(dtype=np.float64) / max(flat.size, 1)
        return {
            BITS_SUFFIX: np.packbits(flat >= 0, bitorder="little"),
            SCALES_SUFFIX: np.array([mean], np.float32),
        }

    def pieces(self, parts: Parts, shape: Shape, name: str, seed: CodecSeed) -> Iterator[tuple[slice, Array]]:
        count, size = elements(shape), -(-method.PIECE_ELEMENTS // 8) * 8
        scale = parts[SCALES_SUFFIX][0]
        either = np.array([-scale, scale], np.float32)
        for start in range(0, count, size):
            where = slice(start, min(start + size, count))
            bits = np.unpackbits(
                parts[BITS_SUFFIX][start // 8 : -(-where.stop // 8)], count=where.stop - start, bitorder="little"
            )
            yield where, either[bits]

    def check(self, parts: Parts, shape: Shape, place: str) -> None:
        left = elements(shape) % 8
        if left and int(parts[BITS_SUFFIX][-1]) >> left:
            raise unusable(place, "a bit follows the last one")

    def spread(self, distance: float) -> float:
        return rounded_apart(
            distance, 1.6
        )  # a share 0.32 d of the signs differs, each by 2, of a root mean square of 1
