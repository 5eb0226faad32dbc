"""The contributions of one round as the rows of a matrix that is never whole in memory for a large model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

#: Columns of a block. Sums run block by block, so that this number is part of what the bits depend on.
BLOCK = 32768


class Rows(Protocol):
    """x_i, i = 0..n-1, in slot order; each is the flat concatenation of d finite numbers in float32."""

    @property
    def weights(self) -> Array:
        """w_i >= 0 as float64 [n]: samples x age x reliability, by the server's own record."""

    @property
    def size(self) -> int:
        """d"""

    def blocks(self) -> Iterator[tuple[slice, Array]]:
        """(columns, float32 [n, width]) from the first column to the last; BLOCK wide, the last one maybe less.

        Can be called again, with the same outcome. The arrays are only read, and only until the next one is taken.
        """


@dataclass(frozen=True)
class MemoryRows:
    """Rows that are in memory: `matrix` float32 [n, d] in slot order, `weights` float64 [n]."""

    matrix: Array
    weights: Array

    @staticmethod
    def of(contributions: Mapping[int, tuple[Array, float]]) -> MemoryRows:
        """From slot -> (vector [d], weight), in whatever order they arrived."""
        ordered = [contributions[slot] for slot in sorted(contributions)]
        matrix = np.stack([np.asarray(vector, np.float32) for vector, _ in ordered])
        return MemoryRows(matrix, np.array([weight for _, weight in ordered], np.float64))

    @property
    def size(self) -> int:
        return int(self.matrix.shape[1])

    def blocks(self) -> Iterator[tuple[slice, Array]]:
        for start in range(0, self.size, BLOCK):
            columns = slice(start, min(start + BLOCK, self.size))
            yield columns, self.matrix[:, columns]
