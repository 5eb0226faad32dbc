"""Coordinate median: of each coordinate the middle one of the n values, the mean of both middle ones if n is even.

Yin et al. 2018, https://arxiv.org/abs/1803.01498, definition 1. Withstands fewer than n/2 bad rows.
Weights decide only who takes part: every row of weight above 0 counts once.
One contributor: that one. Two: their mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from assimilator.rules.network import values_of_ranks
from assimilator.rules.rows import Array


@dataclass(frozen=True)
class Median:
    """The median of each coordinate."""

    def reduce(self, block: Array) -> Array:
        n = block.shape[0]
        first, *second = values_of_ranks(block, range((n - 1) // 2, n // 2 + 1))
        middle = np.add(first, second[0], dtype=np.float64) * 0.5 if second else first
        # -0.0 becomes 0.0: which of the two a minimum returns depends on their order.
        result: Array = middle.astype(np.float32) + np.float32(0.0)
        return result
