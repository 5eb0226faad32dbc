"""Geometric median: the point of the smallest sum of distances to the rows, by the smoothed Weiszfeld algorithm.

Pillutla et al. 2019 (RFA), https://arxiv.org/abs/1912.13445, algorithm 2, from z = 0:
    b_i = a_i / max(nu, |z - x_i|),    z <- sum_i b_i x_i / sum_i b_i        T times
T = 3 and nu = 0.1 as byzfl has them. Withstands bad rows of less than half of the weight.
The paper's weights a_i are w_i / sum_i w_i. One contributor: that one. Equal rows: that row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from assimilator.rules.checks import check_count, check_positive
from assimilator.rules.gram import squared_distances_to
from assimilator.rules.rows import Array


@dataclass(frozen=True)
class GeometricMedian:
    """The geometric median smoothed by `nu` after `iterations` steps (T)."""

    needs_gram: ClassVar[bool] = True
    nu: float = 0.1
    iterations: int = 3

    def __post_init__(self) -> None:
        check_positive("nu", self.nu)
        check_count("iterations", self.iterations)

    def coefficients(self, gram: Array, weights: Array) -> Array:
        n = weights.size
        z = np.zeros(n + 1)
        for _ in range(self.iterations):
            distances = np.sqrt(squared_distances_to(gram, z)[:n])
            inverse = weights / weights.sum() / np.maximum(self.nu, distances)
            z[:n] = inverse / inverse.sum()
        return z
