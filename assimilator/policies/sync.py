"""Synchronous data-parallel training: one step of the optimizer over the mean gradient of a round.

    g = sum of the summed gradients / samples of all contributions,    one step of [optimizer] with g
Every contribution is computed from the current version, so that a round equals one step of plain PyTorch over the
round's samples. Each of the rules of assimilator/rules/ can take the place of the mean.
"""

from __future__ import annotations

from assimilator.policies.policy import Policy, outer_step
from boinc_project.job_config import JobConfig


def sync(config: JobConfig) -> Policy:
    """The policy for a job."""
    return outer_step(config)
