"""Updates that hardly depend on the data: what a broken driver or a wrong build returns, on all of its hosts alike.

An update that is zero or one number everywhere is refused when it is read (validator/sanity.py). This finds what lies
near that, once copies agree on it: each tensor is one number of its own but for at most one element, or nothing is
large enough to be squared in float32. A dead network gives the same in all honesty, so it is no verdict: the server
computes the microtask itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

LEAST_ELEMENTS = 16  # of an update; fewer say nothing
LEAST_MAGNITUDE = 1e-19  # its square is no normal number of float32
SHARE = 1e-6  # of the update's largest magnitude: what is within it is the same number
_TOGETHER, _CHUNK = 8192, 4096


def objection(update: Mapping[str, Array], is_part: bool = False) -> str:
    """Why an update looks as if nothing had been computed, or ''. Only its gradients or deltas are looked at.

    `is_part`: only a part of the model travels. That it does not move at all is honest often (the bias before a batch
    norm, the factor of an adapter beside one of zeros), and to compute it each time is not the server's to do.
    """
    moving = [a.reshape(-1) for name, a in update.items() if name.startswith(("gradient/", "delta/")) and a.size]
    elements = sum(a.size for a in moving)
    if elements < LEAST_ELEMENTS:
        return ""
    joined = [np.concatenate(moving)] if elements <= _TOGETHER else moving
    top = max(max(float(a.max()), -float(a.min())) for a in joined)
    if top < LEAST_MAGNITUDE:
        return "" if is_part else f"no element of the update is larger than {top:.2g}"
    if _varies(max(moving, key=len), SHARE * top) or any(_varies(a, SHARE * top) for a in moving):
        return ""
    return "every tensor of the update is one number, but for one element at most"


def _varies(flat: Array, limit: float) -> bool:
    """Whether more than one element is farther than the limit from the number that the others are."""
    usual = sorted((float(flat[0]), float(flat[flat.size // 2]), float(flat[-1])))[1]
    others = 0
    for start in range(0, flat.size, _CHUNK):
        others += int(np.count_nonzero(np.abs(flat[start : start + _CHUNK] - usual) > limit))
        if others > 1:
            return True
    return False
