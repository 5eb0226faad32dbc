"""Credit: BOINC's arithmetic, against values computed by hand, and nonsense numbers."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from boinc_project.credit import (
    APP_VERSION_SMOOTHING,
    COBBLESTONE_SCALE,
    HOST_VERSION_SMOOTHING,
    MAX_GRANTED_CREDIT,
    SECONDS_PER_DAY,
    RecentAverage,
    RunningMean,
    RunningVariance,
    claimed_flops,
    credit_of_flops,
    credit_of_runtimes,
    low_average,
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


HAV = HOST_VERSION_SMOOTHING


def test_early_samples_weigh_alike_and_later_ones_a_hundredth() -> None:
    mean = RunningMean(0, 0.0)
    for value in (1.0, 2.0, 3.0):
        mean = mean.updated(value, HAV)
    assert mean == RunningMean(3, pytest.approx(2.0))
    assert RunningMean(20, 2.0).updated(3.0, HAV) == RunningMean(21, pytest.approx(2.01))
    assert RunningMean(20, 2.0).updated(3.0, APP_VERSION_SMOOTHING) == RunningMean(21, pytest.approx(2 + 1 / 21))
    assert RunningMean(100, 2.0).updated(3.0, APP_VERSION_SMOOTHING) == RunningMean(101, pytest.approx(2.001))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_nonsense_samples_leave_the_mean_alone(value: float) -> None:
    assert RunningMean(3, 2.0).updated(value, HAV) == RunningMean(3, 2.0)
    assert RunningVariance(3, 2.0, 1.0, 3.0).updated(value, HAV) == RunningVariance(3, 2.0, 1.0, 3.0)


def test_an_outlier_counts_as_ten_times_the_mean_at_most() -> None:
    assert RunningMean(1, 2.0).updated(1e9, HAV) == RunningMean(2, pytest.approx(11.0))


def test_the_variance_of_early_samples_is_that_of_statistics() -> None:
    values = [3.0, 1.0, 4.0, 1.5, 9.0, 2.0]
    kept = RunningVariance(0, 0.0, 0.0, 0.0)
    for value in values:
        kept = kept.updated(value, HAV)
    assert (kept.n, kept.average) == (6, pytest.approx(statistics.mean(values)))
    assert kept.variance == pytest.approx(statistics.pvariance(values))
    later = RunningVariance(20, 2.0, 4.0, 80.0).updated(5.0, HAV)
    assert later == RunningVariance(21, pytest.approx(2.03), pytest.approx(4 + 0.01 * (9 - 4)), 80.0)


def test_the_low_average_pays_little_to_a_large_outlier() -> None:
    assert low_average([5.0]) == 5.0
    assert low_average([4.0, 4.0, 4.0]) == pytest.approx(4.0)
    assert low_average([1.0, 9.0]) == pytest.approx(2 * 9 / 10)


NONSENSE = [(-1e12, 100), (1e9, -5), (4.3e19, 60), (float("nan"), 60), (1e12, 0), (1e12, 1e12), (float("inf"), 1)]


@pytest.mark.parametrize("flops, elapsed", NONSENSE)
def test_a_nonsense_claim_beside_a_sane_one_gives_finite_capped_credit(flops: float, elapsed: float) -> None:
    bound = 1e15
    claims = [claimed_flops(flops, elapsed), claimed_flops(1e11, 600)]
    granted = credit_of_runtimes(claims, bound, 1000.0)
    assert all(math.isfinite(claim) and claim >= 0 for claim in claims)
    assert 0 < granted <= 1000.0 and math.isfinite(granted)


def test_credit_of_runtimes_follows_boincs_bounds() -> None:
    scale = COBBLESTONE_SCALE
    assert claimed_flops(1e9, 10) == 4.3e10  # a failed benchmark claims exactly 1e9
    assert credit_of_runtimes([3e15, 1e15], 1e15, 1e9) == pytest.approx(
        1e15 * scale
    )  # above twice the bound: the bound
    assert credit_of_runtimes([1.5e15, 1.5e15], 1e15, 1e9) == pytest.approx(1.5e15 * scale)
    assert credit_of_runtimes([0.0, 0.0], 1e15, 1e9) == 0.0
    assert credit_of_runtimes([1e15], 1e15, 1.0) == 0.0  # more than the most: no claim is left
