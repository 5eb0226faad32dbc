"""Streaming DiLoCo, adapted: in each round a fragment of the model is synchronised, its P fragments one after another.

Douillard et al. 2025, https://arxiv.org/abs/2501.18512. In the paper a worker goes on training all fragments between
two of their turns; a stateless volunteer cannot. Here its H local steps move the whole model, so that the fragment's
update fits its surroundings, and it sends delta of fragment (version mod P) alone: 1/P of the bytes at a time. What
the other fragments would have learnt in that round is lost. The outer step (DiLoCo's) takes the fragment's
parameters and momentum alone.
"""

from __future__ import annotations

from assimilator.policies.policy import Policy, outer_step
from boinc_project.job_config import JobConfig


def streaming_diloco(config: JobConfig) -> Policy:
    """The policy for a job; the fragments are cut by boinc_project/contract/codecs/part.py."""
    return outer_step(config)
