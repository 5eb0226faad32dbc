"""Nearest-neighbour mixing (NNM), a pre-step: each row is replaced by the mean of the n - f rows nearest to it.

Allouah et al. 2023, https://arxiv.org/abs/2302.01772, algorithm 2; a row is one of its own nearest. The mean is
by weights (paper: all alike), and the mixed row keeps the weight of the one that it replaces.
Of equal distances the lower slot's comes first. Withstands f bad rows if n >= 2f + 1.
Fewer rows: f is lowered to (n - 1) // 2. One contributor: that one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from assimilator.rules.checks import check_bad_rows
from assimilator.rules.gram import squared_distances
from assimilator.rules.rows import Array


@dataclass(frozen=True)
class NearestNeighbourMixing:
    """Rows averaged with those nearest to them, all but `f`."""

    f: int

    def __post_init__(self) -> None:
        check_bad_rows(self.f)

    def matrix(self, gram: Array, weights: Array) -> Array:
        n = weights.size
        distances = squared_distances(gram)
        np.fill_diagonal(distances, -1.0)  # itself first, even if others are equal to it
        count = n - min(self.f, (n - 1) // 2)
        nearest = np.argsort(distances, axis=1, kind="stable")[:, :count]
        mixed = np.zeros((n, n))
        np.put_along_axis(mixed, nearest, weights[nearest], axis=1)
        mixed /= mixed.sum(axis=1, keepdims=True)
        return mixed
