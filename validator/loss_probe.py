"""Whether an update of local steps does what it is for: lower the loss on data that the volunteer does not know.

Adapted: the measured rule is that a lie inside a loose tolerance shows when an update brings less than 90 % of the
honest gain. The honest gain of this very microtask is not known, so it is taken from other ones of the job:

    from the same version   at least LEAST of them: share of their median, less two robust standard deviations
    from earlier versions   gains shrink as a model learns: EARLIER of the newest of these versions' median
    none                    above 0
Robust standard deviation = 1.4826 times the median absolute deviation.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

LEAST = 2
EARLIER = 0.25
DEVIATIONS = 2.0
KEPT = 50  # last gains that are looked at

#: Held-out batches that an update is tried on: forward only, this share of the local steps makes about 3 % of the work
#: (an update and the version it began from, each a third of a step's operations a batch).
SHARE_OF_STEPS, LEAST_BATCHES = 0.05, 4


def batches(local_steps: int) -> int:
    """How many held-out batches an update of so many steps is tried on."""
    return max(LEAST_BATCHES, round(SHARE_OF_STEPS * local_steps))


def least_gain(version: int, gains: Sequence[tuple[int, float]], share: float) -> float:
    """The least gain that an update from `version` must bring; gains: (version, gain) of the last accepted ones."""
    same = [gain for of, gain in gains if of == version]
    if len(same) >= LEAST:
        usual = statistics.median(same)
        deviation = 1.4826 * statistics.median(abs(gain - usual) for gain in same)
        return usual - (1.0 - share) * abs(usual) - DEVIATIONS * deviation
    earlier = max((of for of, _ in gains if of < version), default=None)
    if earlier is None:
        return 0.0
    usual = statistics.median(gain for of, gain in gains if of == earlier)
    # Where the usual gain is a loss, nobody gains any more: twice as great a one is still usual.
    return EARLIER * usual if usual > 0 else 2.0 * usual


def objection(gain: float, version: int, gains: Sequence[tuple[int, float]], share: float) -> str:
    """Why an update with this gain of held-out loss is not accepted; '' if it may be."""
    least = least_gain(version, gains, share)
    if gain >= least and gain == gain:
        return ""
    return f"it lowers the held-out loss by {gain:.3g}, and others by more ({least:.3g} is the least)"
