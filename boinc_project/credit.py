"""Credit: cobblestones, and the recent averages that BOINC decays.

Sources: BOINC sched/credit.cpp, lib/util.cpp (update_average), lib/average.h; facts about fixed credit:
sched/validator.cpp (--credit_from_wu).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SECONDS_PER_DAY = 86400.0
COBBLESTONE_SCALE = 200.0 / (SECONDS_PER_DAY * 1e9)  # credits per floating-point operation
CREDIT_HALF_LIFE_S = 7 * SECONDS_PER_DAY
MAX_GRANTED_CREDIT = 200.0 * 1000 * 365  # what a computer of 1 TFLOPS earns in a year; BOINC's default limit

#: What BOINC assumes of a processor whose benchmark failed: the client then claims exactly 1e9 FLOP/s.
UNKNOWN_FLOPS = 1e9
ASSUMED_FLOPS = 4.3e9

#: A ratio of claimed to estimated operations outside of these is somebody's error and enters no statistics.
SANE_RATIO = (1e-4, 1e4)


@dataclass(frozen=True)
class Smoothing:
    """How a running mean forgets: plain until `threshold` samples, then each new one has `weight`; one sample
    counts as `limit` times the mean at most (lib/average.h; the numbers are in sched/credit.h)."""

    threshold: float
    weight: float
    limit: float


HOST_VERSION_SMOOTHING = Smoothing(threshold=20, weight=0.01, limit=10)
APP_VERSION_SMOOTHING = Smoothing(threshold=100, weight=0.001, limit=10)


def credit_of_flops(flops: float, most: float = MAX_GRANTED_CREDIT) -> float:
    """Fixed credit for work of so many operations: finite, not negative, `most` credits at most."""
    if not math.isfinite(flops) or flops <= 0:
        return 0.0
    return min(flops * COBBLESTONE_SCALE, most)


@dataclass(frozen=True)
class RecentAverage:
    """expavg_credit (credits per day) and expavg_time (Unix seconds) of a host, user or team."""

    average: float
    time: float


def update_average(now: float, work_start: float, work: float, recent: RecentAverage) -> RecentAverage:
    """Decay a recent average to `now` and add `work` credits done since `work_start` (BOINC update_average)."""
    average = recent.average if math.isfinite(recent.average) else 0.0
    if recent.time:
        elapsed = max(0.0, now - recent.time)
        days = elapsed / SECONDS_PER_DAY
        weight = math.exp(-elapsed * math.log(2) / CREDIT_HALF_LIFE_S)
        average *= weight
        if 1.0 - weight > 1e-6:
            average += (1 - weight) * work / days
        else:
            average += math.log(2) * work * SECONDS_PER_DAY / CREDIT_HALF_LIFE_S
    elif work:
        average = work / max((now - work_start) / SECONDS_PER_DAY, 1 / SECONDS_PER_DAY)
    return RecentAverage(average, now)


@dataclass(frozen=True)
class RunningMean:
    """A count and a mean as BOINC keeps them (lib/average.h, AVERAGE)."""

    n: float
    average: float

    def updated(self, value: float, smoothing: Smoothing) -> RunningMean:
        """Take in one sample; a negative or not finite one changes nothing."""
        if not math.isfinite(value) or value < 0:
            return self
        value = _limited(value, self.n, self.average, smoothing)
        n, delta = self.n + 1, value - self.average
        return RunningMean(n, self.average + delta * (1 / n if n < smoothing.threshold else smoothing.weight))


@dataclass(frozen=True)
class RunningVariance:
    """A running mean with its variance; `q` is the sum of squared deviations (lib/average.h, AVERAGE_VAR)."""

    n: float
    average: float
    variance: float
    q: float

    def updated(self, value: float, smoothing: Smoothing) -> RunningVariance:
        """Take in one sample; a negative or not finite one changes nothing."""
        if not math.isfinite(value) or value < 0:
            return self
        value = _limited(value, self.n, self.average, smoothing)
        n, delta = self.n + 1, value - self.average
        if n < smoothing.threshold:
            average = self.average + delta / n
            q = self.q + delta * (value - average)
            return RunningVariance(n, average, q / n, q)
        average = self.average + smoothing.weight * delta
        return RunningVariance(n, average, self.variance + smoothing.weight * (delta * delta - self.variance), self.q)


def _limited(value: float, n: float, average: float, smoothing: Smoothing) -> float:
    return min(value, average * smoothing.limit) if n and average > 0 else value


def low_average(values: Sequence[float]) -> float:
    """The mean of positive numbers, each weighted by the sum of the others, so that a large outlier counts little
    (sched/credit.cpp)."""
    if len(values) == 1:
        return values[0]
    total = math.fsum(values)
    return math.fsum(value * (total - value) for value in values) / ((len(values) - 1) * total)


def claimed_flops(flops_estimate: float, elapsed_s: float) -> float:
    """Peak floating-point operations that a result claims: finite and not negative, whatever the host says."""
    speed = ASSUMED_FLOPS if flops_estimate == UNKNOWN_FLOPS else flops_estimate
    claim = speed * elapsed_s
    return claim if math.isfinite(claim) and speed > 0 and elapsed_s > 0 else 0.0


def credit_of_runtimes(claims: Sequence[float], fpops_bound: float, most: float) -> float:
    """Credit of a workunit from its valid results' claimed operations (BOINC's --credit_from_runtime).

    A claim above twice the workunit's bound counts as the bound; claims worth nothing, or more than `most`
    credits, do not count. 0 if none is left.
    """
    bounded = (fpops_bound if claim > 2 * fpops_bound else claim for claim in claims)
    credits = [claim * COBBLESTONE_SCALE for claim in bounded]
    usable = [credit for credit in credits if 0 < credit <= most]
    return min(low_average(usable), most) if usable else 0.0
