"""Partition, adapted from SPARTA and Agora: each contribution is about a rotating R-th of the values.

SPARTA (2025) exchanges a small random share of the values between workers that go on training all of them; Agora
(https://arxiv.org/abs/2607.13332) averages a twentieth at a time in a fixed cycle. A stateless volunteer cannot go on
with what it has not sent, so that it must not be lost: the R parts are shared out among the slots of a round (slot +
version mod R), and every value moves by

    g = sum of n_i x_i over the contributions of its part / sum of their n_i

So each value moves in every version, and only its mean is over fewer: K / R contributions in place of K, at 1/R of the
bytes. Which values go together changes with version and tensor. A value about which nobody sent anything gets a
gradient of zero.
"""

from __future__ import annotations

from assimilator.policies.policy import Policy, outer_step
from boinc_project.job_config import JobConfig


def partition(config: JobConfig) -> Policy:
    """The policy for a job; the parts are cut by boinc_project/contract/codecs/part.py."""
    return outer_step(config)
