"""low-rank: PowerSGD (Vogels et al. 2019, https://arxiv.org/abs/1905.13727, algorithm 1), adapted.

A matrix E [m, n] becomes two thin ones. With a start Q [n, r] that both sides draw from the job's seed, the version and
the tensor's name, the same for all slots:

    iterations = 1:  P = orthonormalise(E Q);  Q' = E^T P;  P and Q' travel, and are decoded as P Q'^T   (the paper's)
    iterations = 0:  P = E Q travels alone, and is decoded as P Q^T: linear in E, so the mean of several updates
                     is decoded from the mean of their P. It is E seen in r random directions: E[P Q^T] = r/n E

Adapted: Q is drawn anew for each version and not kept warm; factors are averaged once decoded, not before; and there is
no error feedback, so what the rank leaves out is lost. More iterations come closer to the best approximation of rank r.

Tensors are matrices of their first dimension by all others. Those of fewer than two dimensions, and those for which
two factors would not be smaller, go whole. Q is made by Gram-Schmidt in float64, without a library whose last bits
differ between computers; of a matrix whose rank is below r the surplus columns of P are zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from boinc_project.contract import philox
from boinc_project.contract.codecs import method
from boinc_project.contract.codecs.dense import Dense
from boinc_project.contract.codecs.method import (
    Array,
    CodecSeed,
    Method,
    Parts,
    Shape,
    elements,
    in_range,
    matrix_shape,
)
from boinc_project.contract.tensorfile import FileTensor

P_SUFFIX, Q_SUFFIX = "#p", "#q"
MAX_RANK = 256
_ROUNDING = 1e-6  # of a column: what is left of it below that is rounding of float32, not a direction


@dataclass(frozen=True)
class LowRank(Method):
    """4 r (m + n) bytes for an m x n matrix; 4 r m without iterations."""

    kind: ClassVar[str] = "low-rank"
    rank: int = 4
    iterations: int = 1

    def __post_init__(self) -> None:
        in_range(self.kind, "rank", self.rank, 1, MAX_RANK)
        in_range(self.kind, "iterations", self.iterations, 0, 8)

    def saves(self, shape: Shape) -> bool:
        """Whether the factors of a tensor of this shape are smaller than the tensor."""
        if len(shape) < 2 or not elements(shape):
            return False
        rows, columns = matrix_shape(shape)
        return self.rank * (rows + (columns if self.iterations else 0)) < rows * columns and self.rank <= columns

    def parts(self, shape: Shape) -> dict[str, FileTensor]:
        if not self.saves(shape):
            return Dense().parts(shape)
        rows, columns = matrix_shape(shape)
        found = {P_SUFFIX: FileTensor("float32", (rows, self.rank))}
        return {**found, Q_SUFFIX: FileTensor("float32", (columns, self.rank))} if self.iterations else found

    def encode(self, array: Array, name: str, seed: CodecSeed) -> dict[str, Array]:
        if not self.saves(array.shape):
            return Dense().encode(array, name, seed)
        matrix = np.ascontiguousarray(array).reshape(matrix_shape(array.shape))
        q = self.start(matrix.shape[1], name, seed)
        if not self.iterations:
            return {P_SUFFIX: matrix @ q}
        for _ in range(self.iterations):
            p = orthonormal(matrix @ q).astype(np.float32)
            q = matrix.T @ p
        return {P_SUFFIX: p, Q_SUFFIX: q}

    def start(self, columns: int, name: str, seed: CodecSeed) -> Array:
        """Q: orthonormal columns, float32 [columns, rank], the same bits on every computer."""
        key = seed.shared_key(self.kind, name)
        # The sum of four uniform numbers is near enough to a normal one, and exact: no logarithm whose bits vary.
        normal = np.full((columns, self.rank), -2.0)
        for stream in range(4):
            normal += philox.uniform(key, 0, stream, normal.size).reshape(normal.shape)
        return orthonormal(normal).astype(np.float32)

    def pieces(self, parts: Parts, shape: Shape, name: str, seed: CodecSeed) -> Iterator[tuple[slice, Array]]:
        if not self.saves(shape):
            yield from Dense().pieces(parts, shape, name, seed)
            return
        rows, columns = matrix_shape(shape)
        p = parts[P_SUFFIX]
        q = np.ascontiguousarray((parts[Q_SUFFIX] if self.iterations else self.start(columns, name, seed)).T)
        some = max(1, method.PIECE_ELEMENTS // columns)
        room, term = (np.zeros((min(some, rows), columns), np.float32) for _ in range(2))
        for first in range(0, rows, some):
            last = min(first + some, rows)
            sums, product = room[: last - first], term[: last - first]
            np.multiply(p[first:last, 0, None], q[0], out=sums)
            for column in range(1, self.rank):  # a matrix product in a fixed order
                np.multiply(p[first:last, column, None], q[column], out=product)
                sums += product
            yield slice(first * columns, last * columns), sums.reshape(-1)


def orthonormal(columns: Array) -> Array:
    """Gram-Schmidt on the columns [n, r], twice each, in float64; a column that depends on the others becomes 0."""
    found = np.array(columns.T, np.float64, order="C")
    for index, column in enumerate(found):
        size = _norm(column)
        for _ in range(2):
            for other in found[:index]:
                column -= (other * column).sum() * other
        left = _norm(column)
        column *= 1 / left if left > _ROUNDING * size and left > 0 else 0.0
    return found.T


def _norm(column: Array) -> float:
    return math.sqrt(float((column * column).sum()))
