"""A bound on the norm of an update by the median norm of the job's last ones.

An update within a tolerance of a huge lie is a huge lie: two colluding hosts that agree are as near to one another as
honest ones. Their update can do the more harm the longer it is, and honest updates of one job are about equally long
(the norm bound of Sun et al. 2019, https://arxiv.org/abs/1911.07963, with the median of what was accepted in place of
a constant).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from boinc_project.contract.codecs import Array
from boinc_project.contract.update import ENCODED_PREFIXES, squared_norm

KEPT = 20  # last updates that the median is taken of
LEAST = 5  # with fewer there is no bound: a few updates say little of what is usual


def norm(tensors: Mapping[str, Array]) -> float:
    """L2 norm of an update's gradients or deltas."""
    return math.sqrt(sum(squared_norm(array) for name, array in tensors.items() if name.startswith(ENCODED_PREFIXES)))


def objection(norm: float, accepted: Sequence[float], factor: float) -> str:
    """Why an update of that norm is not accepted; '' if it may be. `accepted`: norms of the last ones."""
    if len(accepted) < LEAST:
        return ""
    usual = statistics.median(accepted)
    if norm <= factor * usual:
        return ""
    return f"its norm is {norm:.3g}, over {factor:g} times the usual {usual:.3g}"
