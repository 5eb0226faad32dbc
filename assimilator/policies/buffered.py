"""FedBuff: a version is made of the first K contributions to come back, whatever version they were computed from.

Nguyen et al. 2022, https://arxiv.org/abs/2106.06639, algorithm 1, with s_i the age of contribution i in versions:
    delta = (1 / K) sum_i delta_i / sqrt(1 + s_i),    one server step over delta
Not divided by the sum of the weights (some implementations do): late contributions make the step smaller. With
contributions of unequal size, or of hosts that are trusted less, 1 / K is n_i / sum n_i.
"""

from __future__ import annotations

from assimilator.policies.policy import Policy, outer_step
from boinc_project.job_config import JobConfig


def buffered(config: JobConfig) -> Policy:
    """The policy for a job; the weights by age are in the contributions (age.py)."""
    return outer_step(config)
