"""Credit: cobblestones, and the recent averages that BOINC decays.

Sources: BOINC sched/credit.cpp, lib/util.cpp (update_average), lib/average.h; facts about fixed credit:
sched/validator.cpp (--credit_from_wu).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

SECONDS_PER_DAY = 86400.0
COBBLESTONE_SCALE = 200.0 / (SECONDS_PER_DAY * 1e9)  # credits per floating-point operation
CREDIT_HALF_LIFE_S = 7 * SECONDS_PER_DAY
MAX_GRANTED_CREDIT = 200.0 * 1000 * 365  # what a computer of 1 TFLOPS earns in a year; BOINC's default limit

# Running means of runtime statistics: sched/credit.h gives these for host versions.
HAV_AVERAGE_THRESHOLD = 20
HAV_AVERAGE_WEIGHT = 0.01
HAV_AVERAGE_LIMIT = 10.0


def credit_of_flops(flops: float) -> float:
    """Fixed credit for work of so many operations: finite, not negative, capped."""
    if not math.isfinite(flops) or flops <= 0:
        return 0.0
    return min(flops * COBBLESTONE_SCALE, MAX_GRANTED_CREDIT)


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
    """A count and a mean as BOINC keeps them (lib/average.h, class AVERAGE)."""

    n: float
    average: float

    def updated(self, value: float) -> RunningMean:
        """Take in one sample; early samples have full weight, later ones a small fixed one; outliers are limited."""
        if not math.isfinite(value) or value < 0:
            return self
        n = self.n + 1
        if n > 1 and self.average > 0:
            value = min(value, self.average * HAV_AVERAGE_LIMIT)
        if n < HAV_AVERAGE_THRESHOLD:
            return RunningMean(n, self.average + (value - self.average) / n)
        return RunningMean(n, self.average + HAV_AVERAGE_WEIGHT * (value - self.average))
