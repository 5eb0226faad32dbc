"""Rules of supply that more than one folder must read alike."""

from __future__ import annotations

MAX_ATTEMPTS = 3
"""Workunits for one slot of a round; when so many have failed, its samples are skipped and reported."""


def least_seconds_per_task(
    download_bytes: float, host_bytes_per_s: float, hosts: int, egress_bytes_per_s: float
) -> float:
    """The shortest task that the downlink can feed: max(20 x bytes / host bandwidth, hosts x bytes / egress)."""
    return max(20 * download_bytes / host_bytes_per_s, hosts * download_bytes / egress_bytes_per_s)
