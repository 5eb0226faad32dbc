"""Norm bound: rows longer than the median row are scaled down to its length, then averaged by weights.

As Templar's aggregator does (Gauntlet, 2025, https://arxiv.org/abs/2505.21684); the bound by a given norm is from
Sun et al. 2019, https://arxiv.org/abs/1911.07963:
    sum_i w_i x_i min(1, M / |x_i|) / sum_i w_i,    M = the median of all |x_i|, the lower one if n is even
Bounds what a bad row can do by its length, not what many can do by their direction. Every row counts once in M.
One contributor: that one. If half of the rows or more are zeros, M = 0 and so is the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from assimilator.rules.rows import Array


@dataclass(frozen=True)
class NormBound:
    """The mean by weights of rows no longer than the median row."""

    needs_gram: ClassVar[bool] = True

    def coefficients(self, gram: Array, weights: Array) -> Array:
        n = weights.size
        norms = np.sqrt(np.diagonal(gram)[:n])
        bound = np.sort(norms)[(n - 1) // 2]
        scales = np.divide(bound, norms, out=np.ones(n), where=norms > bound)
        return np.append(weights * scales / weights.sum(), 0.0)
