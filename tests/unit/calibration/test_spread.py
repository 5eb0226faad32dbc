"""From distances to a tolerance, noise tensors and the largest number of local steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from boinc_project.calibration.spread import LIMIT, NoiseMeter, band, largest_steps


def gradients(seed: int, noise: float = 3e-7) -> dict[str, Any]:
    """A layer with a true gradient, a bias whose middle third is noise, a bias that is nothing else, a dead one."""
    true, other = np.random.default_rng(1), np.random.default_rng(seed)

    def of(*shape: int) -> Any:
        a = true.standard_normal(shape)
        return (a + noise * other.standard_normal(shape)).astype(np.float32)

    qkv = of(9)
    qkv[3:6] = 1e-9 * other.standard_normal(3)
    key = (1e-9 * other.standard_normal(4)).astype(np.float32)
    return {
        "gradient/w": of(4, 5), "gradient/qkv": qkv, "gradient/key": key, "gradient/dead": np.zeros(3, np.float32),
        "metric/loss": np.float32([2.0]),
    }  # fmt: skip


def test_noise_is_named_by_tensor_and_rows_and_nothing_else_is() -> None:
    meter = NoiseMeter()
    for slot in range(3):
        meter.add([gradients(10 * slot + copy) for copy in range(3)])
    found = {str(each): each for each in meter.found()}
    assert set(found) == {"key", "qkv[3:6]"}
    assert found["key"].whole and not found["qkv[3:6]"].whole
    assert found["key"].ratio > 0.5


def test_equal_copies_have_no_noise() -> None:
    meter = NoiseMeter()
    meter.add([gradients(1), gradients(1)])
    assert meter.found() == []


def test_the_tolerance_lies_as_far_above_honest_copies_as_below_the_nearest_lie() -> None:
    made = band(1, [{"gradient/w": 1e-6}, {"gradient/w": 4e-7}], {"tf32": [9e-4, 4e-4], "half": [0.6]})
    assert (made.nearest, made.apart["tf32"]) == ("tf32", 4e-4)
    assert made.tolerance == pytest.approx(2e-5)
    assert made.tolerance / made.largest == pytest.approx(made.apart["tf32"] / made.tolerance)
    assert made.separable and made.pairs == 2 and made.worst == "gradient/w"


def test_no_tolerance_is_looser_than_the_limit() -> None:
    made = band(100, [{"delta/w": 6e-4}], {"half": [0.75]})
    assert made.tolerance == LIMIT and made.separable


@pytest.mark.parametrize(("honest", "lie"), [(5e-3, 0.7), (2e-4, 6e-4)], ids=["too far apart", "too near to a lie"])
def test_copies_that_cannot_be_told_from_lies_are_not_separable(honest: float, lie: float) -> None:
    assert not band(300, [{"delta/w": honest}], {"tf32": [lie]}).separable


def test_bit_equal_copies_get_a_tolerance_above_zero() -> None:
    made = band(1, [{"gradient/w": 0.0}], {"tf32": [4e-4]})
    assert 1e-6 < made.tolerance < 1e-4 and made.separable


def test_infinite_distances_stay_numbers_that_json_has() -> None:
    made = band(1, [{"buffer/count": float("inf")}], {"tf32": [float("inf")]})
    assert made.largest == made.families["buffer"] == made.apart["tf32"] == 1e6
    assert not made.separable


@given(st.integers(0, 600), st.integers(1, 500))
def test_the_search_finds_the_largest_number_within_the_limit_going_back_only_to_what_held(
    true: int, bound: int
) -> None:
    asked: list[int] = []

    def within(steps: int, last: int) -> bool:
        assert 1 <= steps <= bound and last < steps and (last == 0 or last in asked)
        asked.append(steps)
        return steps <= true

    assert largest_steps(within, bound) == min(true, bound)
    assert len(asked) <= 2 * 9 + 2 and len(set(asked)) == len(asked)
