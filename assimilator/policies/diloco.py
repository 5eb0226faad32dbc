"""DiLoCo: H local steps of an inner optimizer, then one outer step over the mean of what they changed.

Douillard et al. 2023, https://arxiv.org/abs/2311.08105, algorithm 1, with delta_i = theta - theta_i:
    delta = sum n_i delta_i / sum n_i
    m <- mu m + delta,    theta <- theta - eta (delta + mu m)        Nesterov, eta = 0.7, mu = 0.9
Adapted: the paper's workers keep the state of the inner optimizer from round to round; a stateless volunteer begins
with zeros each time.
"""

from __future__ import annotations

from assimilator.policies.policy import Policy, outer_step
from boinc_project.job_config import JobConfig


def diloco(config: JobConfig) -> Policy:
    """The policy for a job."""
    return outer_step(config)
