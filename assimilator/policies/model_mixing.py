"""FedAsync and VC-ASGD: each contribution's own model is mixed into the current one, one after the other.

With x_i = x_base - delta_i the model that volunteer i ended with:
    x <- (1 - alpha_i) x + alpha_i x_i
FedAsync   alpha_i = alpha s(age), s of age.py. Xie et al. 2019, https://arxiv.org/abs/1903.03934, algorithm 1
VC-ASGD    alpha_i constant; the paper writes W <- alpha W + (1 - alpha) W_i. Atre et al. 2021,
           https://arxiv.org/abs/2103.08894, section III

In the papers every contribution makes a version; with microtasks_per_version = K a version is published after every
K-th, and age is counted in these. Contributions are mixed in the order of their base versions and slots.
Buffers are mixed like parameters; of integer ones the largest value is kept. Adapted: FedAsync's volunteers add a
term that holds them near x_base to their loss; here the inner optimizer is the job's own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from assimilator.aggregation import keep_largest
from assimilator.contributions import NothingToFold, averaged_in, in_order, loaded, parameters_in
from assimilator.optimizers import writable
from assimilator.policies.policy import Array, NewVersion, Policy, Round, carried_of, parameters_of, state_of
from boinc_project.contract.update import OpenUpdate
from boinc_project.job_config import JobConfig


@dataclass(frozen=True)
class ModelMixing:
    """alpha: share of a contribution of age 0 from a trusted host."""

    alpha: float

    def advance(self, round: Round) -> NewVersion:
        used = [each for each in in_order(round.contributions) if each.share * each.age_weight > 0]
        if not used:
            raise NothingToFold(f"{len(round.contributions)} contributions without weight")
        state, optimizer = round.load()
        model = {name: writable(array) for name, array in parameters_of(state).items()}
        buffers = carried_of(state)
        base, base_version = dict[str, Array](), -1
        for contribution, update in loaded(used):
            if contribution.base_version != base_version:
                base_version = contribution.base_version
                base = parameters_of(round.load_state(base_version))
            alpha = self.alpha * contribution.weight * contribution.age_weight
            for parameter, name in parameters_in(update).items():
                _mix(model[parameter], base[parameter], update, name, alpha)
            for name in averaged_in(update):
                buffers[name] = ((1.0 - alpha) * buffers[name] + alpha * update.plain(name)).astype(np.float32)
            keep_largest(buffers, update)
        return NewVersion(state_of(model, buffers), optimizer, sum(each.samples for each in used))


def _mix(x: Array, base: Array, update: OpenUpdate, name: str, alpha: float) -> None:
    """x <- (1 - alpha) x + alpha (base - delta), in float64, rounded to float32 once."""
    flat, start = x.reshape(-1), base.reshape(-1)
    for where, delta in update.pieces(name):
        ended = np.subtract(start[where], delta, dtype=np.float64)
        flat[where] = (1.0 - alpha) * flat[where].astype(np.float64) + alpha * ended


def fed_async(config: JobConfig) -> Policy:
    """FedAsync for a job; the weights by age are in the contributions."""
    return ModelMixing(config.aggregation.mixing_rate)


def vc_asgd(config: JobConfig) -> Policy:
    """VC-ASGD for a job: the same with constant weights."""
    return ModelMixing(config.aggregation.mixing_rate)
