"""Delayed Nesterov: every contribution moves the model at once, the momentum only after every N-th.

Liu et al. 2024, https://arxiv.org/abs/2401.09135, algorithm 3 (with c = 0), g_t the t-th pseudo-gradient:
    theta <- theta - eps g_t / N                                     each time
    m <- beta m + (sum of the last N g) / N,  theta <- theta - eps beta m     after every N-th

A version is made of K contributions, K dividing N = momentum_every: their N-ths are applied together, and the momentum
in every (N / K)-th version. With K = N this is DiLoCo's outer step. The published form has K = 1. Every contribution
counts the same, however many steps it has taken: with DyLU (`speed_classes`) H_w = floor(v_w / v_max H).
Adapted: the paper's workers keep the state of their inner optimizer; a volunteer begins with zeros each time. Its speed
is that of its class of hosts (work_generator/speed_classes.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from assimilator.policies.policy import Array, NewVersion, OuterStep, Policy, Round, Tensors, outer_step
from boinc_project.job_config import JobConfig


@dataclass(frozen=True)
class DelayedNesterov:
    """An optimizer (assimilator/optimizers.py) whose gradient is the mean of K contributions.

    momentum   beta
    turns      N / K: versions between two updates of the momentum
    """

    momentum: float
    turns: int

    def step(
        self, parameters: Tensors, gradient: Tensors, state: Tensors, number: int, lr: float
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        rate, beta, part = np.float32(lr), np.float32(self.momentum), np.float32(1.0 / self.turns)
        moved: dict[str, Array] = {}
        kept: dict[str, Array] = {}
        for name, p in parameters.items():
            g = part * gradient[name]  # sum of g_t / N over the version's contributions
            m = state.get(f"momentum/{name}", np.zeros_like(g))
            gathered = g + state.get(f"gathered/{name}", np.float32(0))
            if number % self.turns:
                moved[name] = p - rate * g
            else:
                m = beta * m + gathered
                moved[name] = p - rate * (g + beta * m)
                gathered = np.zeros_like(g)
            kept[f"momentum/{name}"], kept[f"gathered/{name}"] = m, gathered
        return moved, kept


@dataclass(frozen=True)
class Equally:
    """An outer step over contributions that count by the reliability of their hosts alone."""

    outer: OuterStep

    def advance(self, round: Round) -> NewVersion:
        return self.outer.advance(replace(round, contributions=[replace(c, equal=True) for c in round.contributions]))


def delayed_nesterov(config: JobConfig) -> Policy:
    """The policy for a job."""
    turns = config.aggregation.momentum_every // config.train.microtasks_per_version
    return Equally(outer_step(config, DelayedNesterov(config.optimizer.momentum, turns)))
