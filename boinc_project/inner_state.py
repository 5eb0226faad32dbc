"""The inner optimizer's state where it travels with the version ([inner_optimizer] state = "shipped"): what it obeys.

Of AdamW, with g the gradients so far, newest first:

    m = (1 - b1) sum b1^k g_k,    v = (1 - b2) sum b2^k g_k^2
    |m| <= c sqrt(v),    c = (1 - b1) / sqrt((1 - b2) (1 - b1^2 / b2))        Cauchy and Schwarz; b1^2 < b2
    v <= max_norm^2                                                          where gradients are clipped

for every element, after any number of steps from zero, and so do weighted means of such states (Jensen). A state that
does not would move the weights of whoever goes on from it by more than any gradients could: an update with one is
refused, and what a rule that is no mean makes of honest ones is brought back within the bounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from boinc_project.contract.graph import Graph
from boinc_project.job_config import InnerOptimizerSection

Array = npt.NDArray[Any]
Tensors = Mapping[str, Array]

FIRST, SECOND = ".exp_avg", ".exp_avg_sq"
ROUNDING = 1.01  # float32, over many steps
LARGEST = 3e38
TINY = 1e-18  # below it squares vanish


def at_first(optimizer: Graph) -> dict[str, Array]:
    """The state before the first step, by the names of the graph's inputs."""
    return {each.name: np.zeros(each.shape, each.dtype) for each in optimizer.inputs_of_kind("optimizer")}


def largest_ratio(betas: tuple[float, float]) -> float:
    """c; infinite where the decays allow no bound."""
    one, two = betas
    if one * one >= two:
        return math.inf
    return (1 - one) / math.sqrt((1 - two) * (1 - one * one / two))


def objection(tensors: Tensors, section: InnerOptimizerSection) -> str:
    """Why the state in an update (optimizer/*) cannot be what gradients made of a state; '' if it can."""
    ratio, most = largest_ratio(section.betas), section.max_norm**2 or math.inf
    for name, mean, square in _pairs(tensors):
        if square.min(initial=0.0) < 0:
            return f"{name}{SECOND} has negative values"
        if square.max(initial=0.0) > ROUNDING * most:
            return f"{name}{SECOND} is over max_norm squared"
        if ratio < math.inf and (np.abs(mean) > ROUNDING * ratio * np.sqrt(square) + TINY).any():
            return f"{name}{FIRST} is over {ratio:.3g} times the root of {name}{SECOND}"
    return ""


def bounded(state: Tensors, section: InnerOptimizerSection) -> dict[str, Array]:
    """The state of a version with its optimizer/* within the bounds; what is within them stays bit for bit."""
    ratio, most = largest_ratio(section.betas), section.max_norm**2 or math.inf
    found = dict(state)
    for name, mean, square in _pairs(state):
        kept = np.clip(square, np.float32(0), np.float32(min(most, LARGEST)))
        found[name + SECOND] = kept
        if ratio < math.inf:
            room = np.float32(ratio) * np.sqrt(kept) + np.float32(TINY)
            found[name + FIRST] = np.clip(mean, -room, room)
    return found


def _pairs(tensors: Tensors) -> list[tuple[str, Array, Array]]:
    """(name, first moment, second moment) of each parameter; none for an optimizer that has no such."""
    names = [n[: -len(SECOND)] for n in tensors if n.startswith("optimizer/") and n.endswith(SECOND)]
    return [(name, tensors[name + FIRST], tensors[name + SECOND]) for name in names if name + FIRST in tensors]
