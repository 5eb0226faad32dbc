"""Matrix products with the same bits on every processor, whatever the library sums in which order.

The way of assimilator/rules/gram.py: in every PART of the inner dimension each row of the left factor and each column
of the right one is rounded to whole multiples of 2^-BITS of the power of two above its largest value, so that products
and their sums are exact in float64; the parts are added first to last. A value is off by at most 2^-(BITS + 1) of that
power of two.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from assimilator.rules.gram import BITS, PART

Array = npt.NDArray[Any]


def product(a: Array, b: Array) -> Array:
    """a @ b in float64 for finite a [m, k] and b [k, n]."""
    total = np.zeros((a.shape[0], b.shape[1]))
    for start in range(0, a.shape[1], PART):
        left, left_unit = _rounded(a[:, start : start + PART])
        right, right_unit = _rounded(b[start : start + PART].T)
        total += (left @ right.T) * np.outer(left_unit, right_unit)
    return total


def _rounded(rows: Array) -> tuple[Array, Array]:
    """Whole numbers below 2^BITS in float64, and the unit of each row."""
    values = np.ascontiguousarray(rows, np.float64)
    _, exponents = np.frexp(np.abs(values).max(axis=1, initial=0.0))
    whole = np.rint(values * np.ldexp(1.0, BITS - exponents)[:, None])
    return whole, np.ldexp(1.0, exponents - BITS)
