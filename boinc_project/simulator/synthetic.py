"""Hosts drawn from stated distributions, for whoever has no trace.

    speed         log-normal, median 4 GFLOPS, sigma 0.5 (one half lies between 2.9 and 5.6 GFLOPS)
    line          log-normal, median 2.5 MB/s down and a quarter of it up, sigma 0.8
    latency       log-normal, median 0.05 s, sigma 0.5
    availability  always on, or sessions: on for Weibull(shape 0.6) and off for log-normal(sigma 1.5) times, as
                  Javadi et al. 2011 (https://doi.org/10.1109/TPDS.2011.50) found for SETI@home's hosts: decreasing
                  hazard, so that a host that has been on for long stays on; the scales are set by mean and share
The same seed gives the same hosts; the first n of many are the hosts of a call for n.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from boinc_project.simulator.hosts import Host, Interval

WEIBULL_SHAPE, OFF_SIGMA = 0.6, 1.5


def synthetic_hosts(
    count: int, seed: int, *, on_share: float = 1.0, mean_session_s: float = 4 * 3600.0, horizon: float = 30 * 86400.0,
    flops: float = 4e9, flops_sigma: float = 0.5, jitter: float = 0.0, processors: int = 1,
) -> list[Host]:  # fmt: skip
    """`count` hosts. `on_share`: the share of time for which they are on, in sessions of this mean length; 1: always.

    Sessions are drawn up to `horizon` seconds; after it a host is gone. `jitter` is that of every host's tasks.
    """
    if not 0 < on_share <= 1:
        raise ValueError(f"on_share must be above 0 and at most 1, not {on_share}")
    made = []
    for number in range(count):
        draws = np.random.default_rng([seed, number])
        host = _host(number, draws, on_share, mean_session_s, horizon, flops, flops_sigma)
        made.append(dataclasses.replace(host, processors=processors, jitter=jitter))
    return made


def _host(
    number: int, draws: np.random.Generator, on_share: float, mean_session: float, horizon: float, flops: float,
    flops_sigma: float,
) -> Host:  # fmt: skip
    speed = flops * math.exp(flops_sigma * draws.standard_normal())
    down = 2.5e6 * math.exp(0.8 * draws.standard_normal())
    latency = 0.05 * math.exp(0.5 * draws.standard_normal())
    active: tuple[Interval, ...] = ((0.0, math.inf),)
    if on_share < 1:
        active = _sessions(draws, on_share, mean_session, horizon)
    return Host(name=f"host{number}", flops=speed, down=down, up=down / 4, latency=latency, active=active)


def _sessions(draws: np.random.Generator, on_share: float, mean_session: float, horizon: float) -> tuple[Interval, ...]:
    scale = mean_session / math.gamma(1 + 1 / WEIBULL_SHAPE)
    mean_off = mean_session * (1 - on_share) / on_share
    off_median = mean_off / math.exp(OFF_SIGMA**2 / 2)
    found: list[Interval] = []
    # It is met in the middle of a session with the probability of being on.
    moment = 0.0 if draws.uniform() < on_share else off_median * math.exp(OFF_SIGMA * draws.standard_normal())
    while moment < horizon:
        end = moment + max(60.0, scale * float(draws.weibull(WEIBULL_SHAPE)))
        found.append((moment, min(end, horizon)))
        moment = end + max(60.0, off_median * math.exp(OFF_SIGMA * draws.standard_normal()))
    return tuple(found)
