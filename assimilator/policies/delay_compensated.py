"""Delay compensation: what a late contribution would have said of the current version, to first order.

Zheng et al. 2017, DC-ASGD, https://arxiv.org/abs/1609.08326: g(x) is nearly g(x_base) + H (x - x_base), and for the
diagonal of H stands lambda g^2 (equation 10); they take g^2 of the late gradient itself.
Adapted to local steps, whose deltas are distances of weights: after a move of x - x_base they would be shorter by
between nothing (H = 0, which is FedBuff) and all of it (H = 1: the point where they ended stays, which is FedAsync). So
    delta = sum n_i w_i delta_i / sum n_i,    v <- 0.97 v + 0.03 delta^2
    h = min(1, lambda v / mean(v))            the mean over all values of the model, so that no scale is left to be set
    g = delta + h sum n_i w_i (x - x_base,i) / sum n_i,    one server step over g
The running mean v takes the place of g^2, so that one contribution's noise does not become its curvature. Values that
move much are steep: late contributions overshoot there, and training swings unless a part of what has been moved
since is taken off. lambda is `compensation`; with 0, or when nothing is late, this is FedBuff.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from assimilator.aggregation import fold
from assimilator.contributions import Contribution, in_order
from assimilator.policies.policy import Array, NewVersion, OuterStep, Policy, Round, Tensors, outer_step, parameters_of
from boinc_project.job_config import JobConfig

DECAY = 0.97
SQUARE = "square/"  # v of each parameter, in the optimizer's state


@dataclass(frozen=True)
class DelayCompensated:
    """strength: lambda."""

    outer: OuterStep
    strength: float

    def advance(self, round: Round) -> NewVersion:
        """Fold, compensate, take the step."""
        folded = fold(round.contributions)
        state, kept = round.load()
        squares = {name: running_square(kept.get(f"{SQUARE}{name}"), delta) for name, delta in folded.gradient.items()}
        moved = movement(round, parameters_of(state))
        curvature = self.curvature(squares)
        del state, kept
        gradient = {
            name: delta + curvature[name] * moved[name] if name in moved else delta
            for name, delta in folded.gradient.items()
        }
        made = self.outer.take(round, replace(folded, gradient=gradient))
        return NewVersion(
            made.state, {**made.optimizer, **{f"{SQUARE}{n}": v for n, v in squares.items()}}, made.samples
        )

    def curvature(self, squares: Tensors) -> dict[str, Array]:
        """h by parameter, float32; zero where nothing has ever moved."""
        mean = sum(float(v.sum(dtype=np.float64)) for v in squares.values()) / sum(v.size for v in squares.values())
        factor = self.strength / mean if mean > 0 else 0.0
        return {name: np.minimum(1.0, v * np.float64(factor)).astype(np.float32) for name, v in squares.items()}


def running_square(square: Array | None, delta: Array) -> Array:
    """v after this version, float32; the first one is delta^2 itself, of which the scale is of no meaning."""
    new = np.square(delta)
    return new if square is None else (np.float32(DECAY) * square + np.float32(1 - DECAY) * new).astype(np.float32)


def movement(round: Round, current: Tensors) -> dict[str, Array]:
    """sum n_i w_i (x - x_base,i) / sum n_i, float32 by parameter; empty if no contribution is late."""
    used = [each for each in in_order(round.contributions) if each.share * each.age_weight > 0]
    total = sum(each.share for each in used)
    sums: dict[str, Array] = {}
    for base_version, weight in by_base(used).items():
        if base_version == round.version:
            continue
        for name, base in parameters_of(round.load_state(base_version)).items():
            term = np.subtract(current[name], base, dtype=np.float64) * (weight / total)
            sums[name] = sums[name] + term if name in sums else term
    return {name: array.astype(np.float32) for name, array in sums.items()}


def by_base(ordered: Sequence[Contribution]) -> Mapping[int, float]:
    """Base version -> sum of n_i w_i, oldest first."""
    found: dict[int, float] = {}
    for each in ordered:
        found[each.base_version] = found.get(each.base_version, 0.0) + each.share * each.age_weight
    return found


def delay_compensated(config: JobConfig) -> Policy:
    """The policy for a job."""
    return DelayCompensated(outer_step(config), config.aggregation.compensation)
