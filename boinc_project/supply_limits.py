"""Rules of supply that more than one folder must read alike."""

from __future__ import annotations

from boinc_project.contract.downlink import DELTA_CODEC
from boinc_project.job_config import JobConfig

DELTA_SHARE = (1 + 4 / DELTA_CODEC.block) / 4
MAX_ATTEMPTS = 3
"""Workunits for one slot of a round; when so many have failed, its samples are skipped and reported."""

BROKEN_AFTER = 10
"""Errors in a row with one app version after which a host gets one task a day (work_generator/broken_hosts.py)."""


def least_seconds_per_task(
    download_bytes: float, host_bytes_per_s: float, hosts: int, egress_bytes_per_s: float
) -> float:
    """The shortest task that the downlink can feed: max(20 x bytes / host bandwidth, hosts x bytes / egress)."""
    return max(20 * download_bytes / host_bytes_per_s, hosts * download_bytes / egress_bytes_per_s)


def download_advice(config: JobConfig, version_bytes: float) -> str:
    """What a version costs to download, and how long a task should be so that the job's lines can feed it.

    `version_bytes` are those of a whole one; between keyframes a host gets a byte for every four, and the scales.
    """
    every = config.supply.keyframe_every
    version_bytes *= (1 + (every - 1) * DELTA_SHARE) / every
    hosts = (config.aggregation.in_flight or config.train.microtasks_per_version) * config.workunit.min_quorum
    line, egress = config.supply.host_bandwidth, config.supply.server_bandwidth
    seconds = least_seconds_per_task(version_bytes, line, hosts, egress)
    average = " on average" if every > 1 else ""
    return (
        f"Each version is {version_bytes / 1e6:.3g} MB to download{average}: a task should last at least"
        f" {seconds:.2g} s on a host with {line / 1e6:.3g} MB/s, with {hosts} hosts and {egress / 1e6:.3g} MB/s from"
        " the server."
    )
