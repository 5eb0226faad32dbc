"""Credit: BOINC's arithmetic, against values computed by hand, and nonsense numbers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from boinc_project.credit import (
    MAX_GRANTED_CREDIT,
    SECONDS_PER_DAY,
    RecentAverage,
    RunningMean,
    credit_of_flops,
    update_average,
)

WEEK = 7 * SECONDS_PER_DAY


def test_a_day_of_one_gflops_is_200_credits() -> None:
    assert credit_of_flops(86400 * 1e9) == pytest.approx(200.0)


@pytest.mark.parametrize("flops", [float("nan"), float("inf"), -float("inf"), -1e12, 0.0])
def test_nonsense_operation_counts_earn_nothing(flops: float) -> None:
    assert credit_of_flops(flops) == 0.0


def test_credit_is_capped() -> None:
    assert credit_of_flops(1e300) == MAX_GRANTED_CREDIT


def test_the_first_grant_makes_the_average_work_per_day() -> None:
    found = update_average(1_000_000.0, 1_000_000.0 - 43200, 10.0, RecentAverage(0.0, 0.0))
    assert found == RecentAverage(20.0, 1_000_000.0)  # 10 credits in half a day


def test_the_average_halves_in_a_week_without_work() -> None:
    found = update_average(1e6 + WEEK, 1e6, 0.0, RecentAverage(80.0, 1e6))
    assert found.average == pytest.approx(40.0)
    assert found.time == 1e6 + WEEK


def test_a_week_of_steady_work_moves_the_average_half_way() -> None:
    # 70 credits in 7 days are 10 a day: half of 80 and half of 10.
    assert update_average(1e6 + WEEK, 1e6, 70.0, RecentAverage(80.0, 1e6)).average == pytest.approx(45.0)


def test_grants_in_the_same_second_add_ln2_of_a_weekly_share() -> None:
    found = update_average(1e6, 1e6 - 60, 7.0, RecentAverage(3.0, 1e6))
    assert found.average == pytest.approx(3.0 + math.log(2) * 7.0 / 7.0)


def test_the_two_formulas_meet_where_one_replaces_the_other() -> None:
    recent = RecentAverage(5.0, 1e6)
    assert update_average(1e6 + 0.85, 0.0, 10.0, recent).average == pytest.approx(
        update_average(1e6 + 0.9, 0.0, 10.0, recent).average, rel=1e-4
    )


def test_a_clock_that_went_back_neither_grows_the_average_nor_fails() -> None:
    assert update_average(1e6 - 500, 0.0, 0.0, RecentAverage(5.0, 1e6)).average == pytest.approx(5.0)
    assert math.isfinite(update_average(100.0, 500.0, 10.0, RecentAverage(0.0, 0.0)).average)


@pytest.mark.parametrize("average", [float("nan"), float("inf")])
def test_an_average_spoilt_before_is_mended(average: float) -> None:
    assert math.isfinite(update_average(1e6, 0.0, 1.0, RecentAverage(average, 1e5)).average)


@given(st.floats(0, 2e9), st.floats(0, 2e9), st.floats(0, MAX_GRANTED_CREDIT), st.floats(0, 1e12), st.floats(0, 2e9))
def test_the_average_is_always_finite_and_not_negative(
    now: float, start: float, work: float, average: float, time: float
) -> None:
    found = update_average(now, start, work, RecentAverage(average, time))
    assert math.isfinite(found.average) and found.average >= 0


def test_early_samples_weigh_alike_and_later_ones_a_hundredth() -> None:
    mean = RunningMean(0, 0.0)
    for value in (1.0, 2.0, 3.0):
        mean = mean.updated(value)
    assert mean == RunningMean(3, pytest.approx(2.0))
    assert RunningMean(20, 2.0).updated(3.0) == RunningMean(21, pytest.approx(2.01))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_nonsense_samples_leave_the_mean_alone(value: float) -> None:
    assert RunningMean(3, 2.0).updated(value) == RunningMean(3, 2.0)


def test_an_outlier_counts_as_ten_times_the_mean_at_most() -> None:
    assert RunningMean(1, 2.0).updated(1e9) == RunningMean(2, pytest.approx(11.0))
