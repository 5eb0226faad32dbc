"""Centered clipping, adapted: the paper's workers send their momentum, kept from step to step, which a stateless
volunteer does not have; here the rows are the contributions as they come, gradients or the sum of many local steps.

Karimireddy et al. 2021, https://arxiv.org/abs/2012.10333, algorithm 2; v_0 is the previous aggregate:
    v <- v + sum_i w_i (x_i - v) min(1, tau / |x_i - v|) / sum_i w_i        L times    (paper: all w_i alike)
The published radius is tau = 10 / (1 - beta) for momentum beta, 10 without, and L = 1.

No round moves the aggregate by more than L tau, so one contributor is clipped like any other. Without a
previous aggregate v_0 = 0. Rows that are all clipped leave v within L tau of v_0: nothing is ever left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from assimilator.rules.checks import check_count, check_positive
from assimilator.rules.gram import squared_distances_to
from assimilator.rules.rows import Array


@dataclass(frozen=True)
class CenteredClipping:
    """The previous aggregate moved by differences clipped to `tau`, `iterations` times (L)."""

    needs_gram: ClassVar[bool] = True
    tau: float = 10.0
    iterations: int = 1

    def __post_init__(self) -> None:
        check_positive("tau", self.tau)
        check_count("iterations", self.iterations)

    def coefficients(self, gram: Array, weights: Array) -> Array:
        n = weights.size
        v = np.zeros(n + 1)
        v[n] = 1.0
        for _ in range(self.iterations):
            distances = np.sqrt(squared_distances_to(gram, v)[:n])
            steps = weights / weights.sum() * self.tau / np.maximum(distances, self.tau)
            v *= 1.0 - steps.sum()
            v[:n] += steps
        return v
