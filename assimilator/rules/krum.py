"""Krum and multi-Krum: the row, or the m rows, with the smallest sum of squared distances to their nearest others.

Blanchard et al. 2017, https://arxiv.org/abs/1703.02757, section 4:
    s(i) = sum of |x_i - x_j|^2 over the n - f - 2 rows j that are nearest to x_i
    Krum: the x_i of the smallest s(i); multi-Krum: the mean of the m = n - f rows of the smallest s(i)
Of equal scores the lower slot's comes first. Every row counts once in the scores; multi-Krum's mean is by weights.
Some implementations (byzfl) sum over n - f - 1 nearest: `nearest` = n - f - 1 gives theirs.

Withstands f bad rows if n >= 2f + 3. Fewer rows: f is lowered to what n allows, (n - 3) // 2, and m to n.
Two contributors: their mean, since none is nearer to others. One: that one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from assimilator.rules.checks import check_bad_rows, check_count
from assimilator.rules.gram import squared_distances
from assimilator.rules.rows import Array


@dataclass(frozen=True)
class MultiKrum:
    """The mean of the `m` rows (None: n - f) of the lowest scores; `nearest` None: n - f - 2."""

    needs_gram: ClassVar[bool] = True
    f: int
    m: int | None = None
    nearest: int | None = None

    def __post_init__(self) -> None:
        check_bad_rows(self.f)
        for name, value in (("m", self.m), ("nearest", self.nearest)):
            if value is not None:
                check_count(name, value)

    def coefficients(self, gram: Array, weights: Array) -> Array:
        n = weights.size
        chosen = np.zeros(n + 1)
        kept: Array = np.arange(n)
        if n > 2:
            f = min(self.f, (n - 3) // 2)
            scores = krum_scores(squared_distances(gram[:n, :n]), self.nearest or n - f - 2)
            kept = np.argsort(scores, kind="stable")[: self.m or n - f]
        chosen[kept] = weights[kept] / weights[np.sort(kept)].sum()
        return chosen


@dataclass(frozen=True)
class Krum:
    """The one row of the lowest score: multi-Krum with m = 1."""

    needs_gram: ClassVar[bool] = True
    f: int
    nearest: int | None = None

    def __post_init__(self) -> None:
        MultiKrum(self.f, 1, self.nearest)

    def coefficients(self, gram: Array, weights: Array) -> Array:
        return MultiKrum(self.f, 1, self.nearest).coefficients(gram, weights)


def krum_scores(distances: Array, nearest: int) -> Array:
    """s float64 [n] from squared distances [n, n]: the sum over the `nearest` other rows."""
    n = distances.shape[0]
    others = distances[~np.eye(n, dtype=bool)].reshape(n, n - 1)
    scores: Array = np.sort(others, axis=1)[:, :nearest].sum(axis=1)
    return scores
