"""The rules of supply as tables: what to issue, whom to help, when a job is finished."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from boinc_project.gt_tables import MicrotaskState
from boinc_project.job_config import JobConfig, load_config
from boinc_project.states import NEVER
from boinc_project.supply_limits import MAX_ATTEMPTS, download_advice, least_seconds_per_task
from tests.tiny_project import TINY_JOB
from work_generator.supply import Issue, overlooked, skipped_slots, slots_to_issue, stop_reason, straggling

ISSUED, FOLDED, FAILED, CANCELLED = (
    MicrotaskState.ISSUED,
    MicrotaskState.FOLDED,
    MicrotaskState.FAILED,
    MicrotaskState.CANCELLED,
)


def slot(number: int, *states: MicrotaskState) -> list[dict[str, Any]]:
    return [{"slot": number, "attempt": attempt, "state": str(state)} for attempt, state in enumerate(states)]


@pytest.mark.parametrize(
    ("microtasks", "issues", "skipped"),
    [
        ([], [Issue(0, 0), Issue(1, 0)], []),
        (slot(0, ISSUED), [Issue(1, 0)], []),
        (slot(0, ISSUED) + slot(1, FOLDED), [], []),
        (slot(0, FAILED) + slot(1, FOLDED), [Issue(0, 1)], []),
        (slot(0, FAILED, ISSUED) + slot(1, FOLDED), [], []),
        (slot(0, FAILED, FAILED) + slot(1, ISSUED), [Issue(0, 2)], []),
        (slot(0, *[FAILED] * MAX_ATTEMPTS) + slot(1, ISSUED), [], [0]),
        (slot(0, CANCELLED, CANCELLED, CANCELLED, CANCELLED) + slot(1, ISSUED), [Issue(0, 4)], []),
        (slot(0, FAILED, CANCELLED, FAILED) + slot(1, ISSUED), [Issue(0, 3)], []),
        (slot(0, FAILED, FAILED, CANCELLED) + slot(1, ISSUED), [Issue(0, 3)], []),
        (slot(0, *[FAILED] * MAX_ATTEMPTS) + slot(1, *[FAILED] * MAX_ATTEMPTS), [], [0, 1]),
    ],
)
def test_each_slot_of_the_open_round_has_one_live_workunit_until_it_failed_too_often(
    microtasks: list[Any], issues: list[Issue], skipped: list[int]
) -> None:
    assert slots_to_issue(microtasks, 2) == issues
    assert slots_to_issue(list(reversed(microtasks)), 2) == issues
    assert skipped_slots(microtasks) == skipped


CONFIG = load_config(TINY_JOB / "job.toml")
UNIT = {
    "canonical_resultid": 0,
    "error_mask": 0,
    "transition_time": 1000,
    "target_nresults": 2,
    "max_success_results": 6,
    "max_total_results": 12,
}
COUNTS = {"unsent": 0, "in_progress": 1, "over": 1, "last_sent": 0}
LATE = CONFIG.supply.straggler_after_s


def test_a_slow_copy_gets_one_helper() -> None:
    assert straggling(CONFIG, UNIT, COUNTS, LATE)


@pytest.mark.parametrize(
    ("unit", "counts", "now"),
    [
        ({}, {}, LATE - 1),
        ({"canonical_resultid": 5}, {}, LATE),
        ({"error_mask": 1}, {}, LATE),
        ({"transition_time": NEVER}, {}, LATE),
        ({}, {"unsent": 1}, LATE),
        ({}, {"in_progress": 0}, LATE),
        ({"target_nresults": 3}, {}, LATE),
        ({"max_success_results": 2}, {}, LATE),
        ({"max_total_results": 2}, {}, LATE),
        ({}, {"last_sent": 10}, LATE),
    ],
)
def test_no_copy_is_asked_for_that_is_not_needed_or_that_the_transitioner_would_make_an_error_of(
    unit: dict[str, int], counts: dict[str, int], now: int
) -> None:
    assert not straggling(CONFIG, {**UNIT, **unit}, {**COUNTS, **counts}, now)


OVER = {"unsent": 0, "in_progress": 0, "over": 2, "last_sent": 100}
UNJUDGED = {"canonical_resultid": 0, "error_mask": 0, "need_validate": 0, "transition_time": LATE + 864_000}


def test_a_workunit_whose_copies_are_over_without_verdict_or_successor_was_overlooked() -> None:
    assert overlooked(UNJUDGED, OVER, LATE)


@pytest.mark.parametrize(
    ("unit", "counts"),
    [
        ({"canonical_resultid": 5}, {}),
        ({"error_mask": 1}, {}),
        ({"need_validate": 1}, {}),
        ({"transition_time": LATE}, {}),
        ({}, {"unsent": 1}),
        ({}, {"in_progress": 1}),
    ],
)
def test_a_workunit_that_somebody_will_look_at_was_not_overlooked(unit: dict[str, int], counts: dict[str, int]) -> None:
    assert not overlooked({**UNJUDGED, **unit}, {**OVER, **counts}, LATE)


def config(**train: Any) -> JobConfig:
    return dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, **train))


def versions(*evaluations: dict[str, float] | None) -> list[dict[str, Any]]:
    return [
        {"version": number, "evaluation": "" if found is None else json.dumps(found)}
        for number, found in enumerate(evaluations)
    ]


@pytest.mark.parametrize(
    ("train", "rows", "now", "reason"),
    [
        ({"max_versions": 3}, versions(*[None] * 3), 0, ""),
        ({"max_versions": 3}, versions(*[None] * 4), 0, "version 3 is the last one asked for (max_versions)"),
        ({"max_hours": 1.0}, versions(None), 3600, ""),
        ({"max_hours": 1.0}, versions(None), 3601, "1 hours have passed (max_hours)"),
        ({"target_metric": "accuracy", "target_value": 0.9}, versions(None, {"accuracy": 0.89}), 0, ""),
        (
            {"target_metric": "accuracy", "target_value": 0.9},
            versions({"accuracy": 0.9}, None),
            0,
            "accuracy 0.9 of version 0 reaches 0.9 (target_value)",
        ),
        ({"target_metric": "loss", "target_value": 0.5}, versions({"loss": 0.6}), 0, ""),
        (
            {"target_metric": "loss", "target_value": 0.5},
            versions({"loss": 0.4}),
            0,
            "loss 0.4 of version 0 reaches 0.5 (target_value)",
        ),
        ({"target_metric": "other", "target_value": 0.5}, versions({"loss": 0.4}), 0, ""),
        ({}, [], 0, ""),
    ],
)
def test_a_job_is_finished_for_one_of_three_reasons(
    train: dict[str, Any], rows: list[Any], now: float, reason: str
) -> None:
    assert stop_reason(config(**train), rows, 0, now) == reason


def test_the_shortest_task_is_set_by_the_slower_of_the_two_lines() -> None:
    assert least_seconds_per_task(1e6, 1e6, 10, 1e9) == 20
    assert least_seconds_per_task(1e6, 1e9, 1000, 1e6) == 1000


def test_the_advice_names_size_time_and_both_lines() -> None:
    assert download_advice(CONFIG, 2e6) == (
        "Each version is 2 MB to download: a task should last at least 40 s on a host with 1 MB/s, with 4 hosts and"
        " 10 MB/s from the server."
    )
