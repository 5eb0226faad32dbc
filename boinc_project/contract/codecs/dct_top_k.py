"""dct-top-k: DeMo's compressor (Peng et al. 2024, https://arxiv.org/abs/2411.19870), adapted.

A tensor is cut into tiles of up to 64 x 64; of each tile's orthonormal DCT-II the coefficients of largest magnitude
travel, with 12-bit indices. Adapted: DeMo transforms a momentum that each worker keeps, subtracts from it what is sent,
and takes the sign of the decoded mean. A volunteer keeps nothing, so here the update itself is transformed, the rest of
it is lost, and the server's optimizer is given the decoded numbers. DeMo keeps 32 of 4,096 (share = 0.0078125).

Tensors are matrices of their first dimension by all others; one of a single dimension is folded into rows of 64. Tiles
at the lower and right edges are padded with zeros (DeMo chooses tile sizes that divide the tensor's).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np

from boinc_project.contract.codecs.bits import pack_indices, unpack_indices
from boinc_project.contract.codecs.method import (
    Array,
    CodecSeed,
    Parts,
    Shape,
    elements,
    flat_float32,
    matrix_shape,
    share_of,
)
from boinc_project.contract.codecs.sparse import Sparse
from boinc_project.contract.codecs.top_k import (
    INDICES_SUFFIX,
    check_rows,
    checked_indices,
    chosen_apart,
    largest,
    sparse_parts,
)
from boinc_project.contract.tensorfile import FileTensor

EDGE = 64
_COEFFICIENT_BITS = 23
_DCT_ONE = float(1 << 20)


@dataclass(frozen=True)
class Tiling:
    """How a tensor is cut: a matrix [rows, columns] into `down` x `across` tiles of [height, width]."""

    rows: int
    columns: int
    height: int
    width: int

    @property
    def down(self) -> int:
        return -(-self.rows // self.height)

    @property
    def across(self) -> int:
        return -(-self.columns // self.width)

    @staticmethod
    def of(shape: Shape) -> Tiling:
        count = elements(shape)
        rows, columns = matrix_shape(shape) if len(shape) > 1 and count else (-(-count // EDGE), min(count, EDGE))
        return Tiling(rows, columns, max(1, min(rows, EDGE)), max(1, min(columns, EDGE)))


@dataclass(frozen=True)
class DctTopK(Sparse):
    """share x (1.5 bytes + 4, or what `values` takes) a value."""

    kind: ClassVar[str] = "dct-top-k"

    def kept(self, tiling: Tiling) -> int:
        """Coefficients of each tile."""
        return share_of(tiling.height * tiling.width, self.share)

    def total(self, tiling: Tiling) -> int:
        return tiling.down * tiling.across * self.kept(tiling)

    def parts(self, shape: Shape) -> dict[str, FileTensor]:
        return sparse_parts(self.values, self.total(Tiling.of(shape)))

    def encode(self, array: Array, name: str, seed: CodecSeed) -> dict[str, Array]:
        tiling = Tiling.of(array.shape)
        h, w, down, across = tiling.height, tiling.width, tiling.down, tiling.across
        flat = flat_float32(array)
        indices = np.zeros((down, across, self.kept(tiling)), np.int16)
        values = np.zeros(indices.shape, np.float32)
        left, right = dct(h).astype(np.float32), dct(w).T.astype(np.float32)
        for strip in range(down):
            part = flat[strip * h * tiling.columns : (strip + 1) * h * tiling.columns]
            rows = np.zeros((h, tiling.columns), np.float32)
            rows.reshape(-1)[: part.size] = part
            tiles = np.zeros((h, across * w), np.float32)
            tiles[:, : tiling.columns] = rows
            spectrum = (left @ tiles.reshape(h, across, w).transpose(1, 0, 2) @ right).reshape(across, h * w)
            indices[strip] = largest(spectrum, self.kept(tiling))
            values[strip] = np.take_along_axis(spectrum, indices[strip], 1)
        packed = pack_indices(indices.reshape(-1))
        return {INDICES_SUFFIX: packed, **self.values.encode(values.reshape(-1), name, seed)}

    def pieces(self, parts: Parts, shape: Shape, name: str, seed: CodecSeed) -> Iterator[tuple[slice, Array]]:
        tiling, count = Tiling.of(shape), elements(shape)
        h, w, across, kept = tiling.height, tiling.width, tiling.across, self.kept(tiling)
        indices = unpack_indices(parts[INDICES_SUFFIX], self.total(tiling)).reshape(-1, kept)
        values = self.values.decode(parts, (self.total(tiling),), name, seed).reshape(-1, kept)
        for strip in range(tiling.down):
            mine = slice(strip * across, (strip + 1) * across)
            spectrum = np.zeros((across, h * w), np.float32)
            np.put_along_axis(spectrum, indices[mine], values[mine], 1)
            rows = inverse_dct(spectrum.reshape(across, h, w)).transpose(1, 0, 2).reshape(h, across * w)
            where = slice(strip * h * tiling.columns, min((strip + 1) * h * tiling.columns, count))
            yield where, rows[:, : tiling.columns].reshape(-1)[: where.stop - where.start]

    def check(self, parts: Parts, shape: Shape, place: str) -> None:
        tiling = Tiling.of(shape)
        indices = checked_indices(parts, self.total(tiling), place)
        check_rows(indices.reshape(-1, self.kept(tiling)), tiling.height * tiling.width, place)
        self.values.check(parts, (self.total(tiling),), place)

    def spread(self, distance: float) -> float:
        return chosen_apart(distance, self.values)


@lru_cache(maxsize=130)
def dct(size: int) -> Array:
    """The orthonormal DCT-II: row k, column i is sqrt(2 / n) cos(pi (i + 1/2) k / n); row 0 that times sqrt(1/2)."""
    k, i = np.arange(size)[:, None], np.arange(size)[None, :]
    matrix = np.sqrt(2 / size) * np.cos(np.pi * (i + 0.5) * k / size)
    matrix[0] *= np.sqrt(0.5)
    return _constant(matrix)


@lru_cache(maxsize=130)
def fixed_dct(size: int) -> Array:
    """The same times 2^20, rounded to whole numbers."""
    return _constant(np.rint(dct(size) * _DCT_ONE))


def inverse_dct(spectrum: Array) -> Array:
    """The tiles [tiles, height, width] of these coefficients, float32, the same bits in whatever order they are summed.

    In whole numbers: coefficients below 2^23 (in units of their tile), the matrix up to 2^20, and sums of 64 products
    stay below 2^53, so that float64 holds every one of them exactly.
    """
    unit = np.ldexp(1.0, np.frexp(np.abs(spectrum).max(axis=(1, 2)))[1] - _COEFFICIENT_BITS)[:, None, None]
    fixed = np.rint(spectrum / unit)  # a power of two: nothing but rint rounds
    columns = np.rint(fixed_dct(spectrum.shape[1]).T @ fixed * (1 / _DCT_ONE))
    found: Array = (columns @ fixed_dct(spectrum.shape[2]) * (unit / _DCT_ONE)).astype(np.float32)
    return found


def _constant(matrix: Array) -> Array:
    matrix.setflags(write=False)
    return matrix
