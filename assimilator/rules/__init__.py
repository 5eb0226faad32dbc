"""Robust rules: how the contributions of one round become one aggregate although some of them may be lies.

    rule                file                  kind             parameters
    mean                mean.py               linear
    median              median.py             coordinatewise
    trimmed_mean        trimmed_mean.py       coordinatewise   f
    krum, multi_krum    krum.py               linear           f, m (multi-Krum), nearest
    centered_clipping   centered_clipping.py  linear           tau, iterations
    geometric_median    geometric_median.py   linear           nu, iterations
    norm_bound          norm_bound.py         linear
    nearest_neighbour   mixing.py             pre-step         f

    rule.py      `aggregate(rule, rows, mixing, previous)`: the passes over the rows; who counts at all
    rows.py      the matrix of contributions, block by block
    gram.py      inner products, the same bits on every processor
    network.py   the sorting network of the coordinatewise rules
    checks.py    parameters

f is the number of bad contributions to withstand. Each file says what happens with fewer rows than its rule needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from assimilator.rules.centered_clipping import CenteredClipping
from assimilator.rules.geometric_median import GeometricMedian
from assimilator.rules.krum import Krum, MultiKrum
from assimilator.rules.mean import Mean
from assimilator.rules.median import Median
from assimilator.rules.mixing import NearestNeighbourMixing
from assimilator.rules.norm_bound import NormBound
from assimilator.rules.rows import BLOCK, MemoryRows, Rows
from assimilator.rules.rule import CoordinateRule, LinearRule, Mixing, Rule, aggregate
from assimilator.rules.trimmed_mean import TrimmedMean

#: Name of a rule -> what makes it from its parameters; raises ValueError or TypeError if they are wrong.
RULES: Mapping[str, Callable[..., Rule]] = {
    "mean": Mean,
    "median": Median,
    "trimmed_mean": TrimmedMean,
    "krum": Krum,
    "multi_krum": MultiKrum,
    "centered_clipping": CenteredClipping,
    "geometric_median": GeometricMedian,
    "norm_bound": NormBound,
}

#: The same for what may come before a rule.
MIXINGS: Mapping[str, Callable[..., Mixing]] = {"nearest_neighbour": NearestNeighbourMixing}

__all__ = [
    "BLOCK",
    "MIXINGS",
    "RULES",
    "CenteredClipping",
    "CoordinateRule",
    "GeometricMedian",
    "Krum",
    "LinearRule",
    "Mean",
    "Median",
    "MemoryRows",
    "Mixing",
    "MultiKrum",
    "NearestNeighbourMixing",
    "NormBound",
    "Rows",
    "Rule",
    "TrimmedMean",
    "aggregate",
]
