"""Mean: sum_i w_i x_i / sum_i w_i (FedAvg, McMahan et al. 2017, https://arxiv.org/abs/1602.05629).

Not robust: a single row can move it anywhere. One contributor: that one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from assimilator.rules.rows import Array


@dataclass(frozen=True)
class Mean:
    """The mean by weights."""

    needs_gram: ClassVar[bool] = False

    def coefficients(self, gram: Array, weights: Array) -> Array:
        return np.append(weights / weights.sum(), 0.0)
