"""Trimmed mean: of each coordinate the f smallest and the f largest values are left out, the others averaged.

Yin et al. 2018, https://arxiv.org/abs/1803.01498, definition 2, with f = beta n. Withstands f bad rows if n >= 2f + 1.
Weights decide only who takes part: every row of weight above 0 counts once.
Fewer than 2f + 1 rows: f is lowered to what is left of one half, (n - 1) // 2, which is the median.
One contributor: that one. f = 0: the mean in which all rows count alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from assimilator.rules.checks import check_bad_rows
from assimilator.rules.network import values_of_ranks
from assimilator.rules.rows import Array


@dataclass(frozen=True)
class TrimmedMean:
    """The mean of each coordinate without its `f` smallest and `f` largest values."""

    f: int

    def __post_init__(self) -> None:
        check_bad_rows(self.f)

    def reduce(self, block: Array) -> Array:
        n = block.shape[0]
        f = min(self.f, (n - 1) // 2)
        kept = values_of_ranks(block, range(f, n - f))
        total = kept[0].astype(np.float64)
        for values in kept[1:]:
            total += values
        mean: Array = (total / (n - 2 * f)).astype(np.float32)
        return mean
