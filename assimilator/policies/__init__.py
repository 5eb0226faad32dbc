"""Aggregation policies: how contributions of a version, young and old, become the next one.

One file each; what generator and job.toml have to know of them is in boinc_project/policies.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from assimilator.policies.age import age_weight
from assimilator.policies.anchored import anchored
from assimilator.policies.buffered import buffered
from assimilator.policies.decoupled_diloco import decoupled_diloco
from assimilator.policies.delay_compensated import delay_compensated
from assimilator.policies.delayed_nesterov import delayed_nesterov
from assimilator.policies.diloco import diloco
from assimilator.policies.model_mixing import fed_async, vc_asgd
from assimilator.policies.partition import partition
from assimilator.policies.policy import Anchor, NewVersion, Policy, Round
from assimilator.policies.streaming_diloco import streaming_diloco
from assimilator.policies.sync import sync
from boinc_project.job_config import JobConfig

#: Name in job.toml -> what makes the policy.
MAKERS: Mapping[str, Callable[[JobConfig], Policy]] = {
    "sync": sync,
    "diloco": diloco,
    "streaming-diloco": streaming_diloco,
    "partition": partition,
    "buffered": buffered,
    "anchored": anchored,
    "delay-compensated": delay_compensated,
    "async": fed_async,
    "vc-asgd": vc_asgd,
    "delayed-nesterov": delayed_nesterov,
    "decoupled-diloco": decoupled_diloco,
}


def policy_of(config: JobConfig) -> Policy:
    """The policy of a job."""
    return MAKERS[config.train.policy](config)


__all__ = ["MAKERS", "Anchor", "NewVersion", "Policy", "Round", "age_weight", "policy_of"]
