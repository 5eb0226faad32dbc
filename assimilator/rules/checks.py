"""Checks of parameters that several rules share; each raises ValueError with one sentence."""

from __future__ import annotations

import math


def check_bad_rows(f: int) -> None:
    """f: the number of bad rows that a rule is to withstand."""
    if isinstance(f, bool) or not isinstance(f, int) or f < 0:
        raise ValueError(f"f, the number of bad contributions to withstand, must be 0 or more, not {f!r}")


def check_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of 1 or more, not {value!r}")


def check_positive(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a finite number above 0, not {value!r}")
