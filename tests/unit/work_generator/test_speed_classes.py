"""Microtasks of unlike steps: the classes of new ones follow the demand, and every batch is dealt out exactly once."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from boinc_project import store
from boinc_project.cli.jobs import roll_back
from boinc_project.gt_tables import JobState, MicrotaskState, gt_microtask
from boinc_project.job_config import JobConfig, load_config
from boinc_project.plan import DataPlan, batches_from
from boinc_project.size_classes import Measured
from tests.tiny_project import TINY_JOB, TinyProject, tiny_project
from work_generator.speed_classes import Place, classes_of_new, demand_of, placed, uniform
from work_generator.supply import waits_for_its_class

CLASSES = ("local_steps = 5", "local_steps = 8\nspeed_classes = [1.0, 0.5, 0.25]")


def config(speeds: tuple[float, ...], steps: int, policy: str = "diloco") -> JobConfig:
    made = load_config(TINY_JOB / "diloco.toml")
    train = dataclasses.replace(made.train, local_steps=steps, speed_classes=speeds, policy=policy)
    return dataclasses.replace(made, train=train)


@pytest.mark.parametrize(
    ("speeds", "steps", "expected"),
    [
        ((), 50, ()),
        ((1.0, 0.5, 0.25), 8, (2, 4, 8)),
        ((1.0, 0.3), 10, (3, 10)),
        ((1.0, 0.29), 100, (29, 100)),
        ((1.0, 0.99), 2, (1, 2)),
    ],
)
def test_the_steps_of_a_class_are_those_of_dylu_the_slowest_first(
    speeds: tuple[float, ...], steps: int, expected: tuple[int, ...]
) -> None:
    assert config(speeds, steps).class_steps == expected


@pytest.mark.parametrize(
    ("there", "demand", "count", "flow", "expected"),
    [
        ([0, 0, 0], [0, 0, 0], 6, True, {0: 2, 1: 2, 2: 2}),  # nobody is known yet
        ([0, 0, 0], [0, 0, 10], 6, True, {0: 1, 1: 1, 2: 4}),  # whoever comes finds something
        ([0, 0, 0], [0, 0, 10], 6, False, {2: 6}),  # a round waits for all, and of those classes there is nobody
        ([0, 0, 0], [10, 20, 30], 12, False, {0: 2, 1: 4, 2: 6}),
        ([1, 2, 8], [1, 1, 1], 4, True, {0: 2, 1: 2}),  # what is too many now is not made
        ([3, 3, 3], [5, 5, 5], 0, True, {}),
    ],
)
def test_new_microtasks_are_for_the_classes_that_lack_them(
    there: list[int], demand: list[int], count: int, flow: bool, expected: dict[int, int]
) -> None:
    assert Counter(classes_of_new(there, demand, count, flow)) == expected


def test_a_host_that_was_sent_another_s_task_counts_for_its_own_class() -> None:
    tasks: list[dict[str, Any]] = [
        {"hostid": 1, "app_version_id": 1, "size_class": 0},  # a fast one, whose own class had nothing
        {"hostid": 2, "app_version_id": 1, "size_class": 1},
        {"hostid": 9, "app_version_id": 1, "size_class": 0},  # not measured
        {"hostid": 9, "app_version_id": 1, "size_class": -1},
    ]
    measured = [Measured(1, 1, 4e9, 0, 0.0), Measured(2, 1, 1e9, 0, 0.0)]
    assert demand_of(3, (2e9, 3e9), tasks, measured) == [2, 0, 1]
    assert demand_of(3, None, tasks, measured) == [2, 1, 0]


@given(st.lists(st.integers(0, 9), min_size=3, max_size=3), st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_slots_take_consecutive_batches_and_keep_them_when_they_are_issued_again(
    demand: list[int], counts: list[int]
) -> None:
    made = config((1.0, 0.5, 0.25), 8, "buffered")
    rows: list[dict[str, Any]] = []
    first = 0
    for count in counts:
        fresh = list(range(len(rows), len(rows) + count))
        again = [int(row["slot"]) for row in rows[:1]]
        found = placed(made, [*again, *fresh], rows, demand, first)
        for place in found[: len(again)]:
            assert dataclasses.asdict(place) == {key: rows[0][key] for key in dataclasses.asdict(place)}
        for slot, place in zip(fresh, found[len(again) :], strict=True):
            assert place.first_batch == first
            assert place.steps == made.class_steps[place.size_class]
            first += place.steps
            rows.append({"slot": slot, "state": "issued", **dataclasses.asdict(place)})


@settings(max_examples=50)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=3).map(tuple),
    st.integers(1, 16),
    st.lists(st.sampled_from([2, 4, 8]), min_size=1, max_size=40),
)
def test_microtasks_of_unlike_steps_cover_each_sample_of_an_epoch_exactly_once(
    rows: tuple[int, ...], size: int, steps: Sequence[int]
) -> None:
    plan = DataPlan(3, rows, size, False)
    drawn: list[Any] = []
    first = 0
    for count in steps:
        made, used = batches_from(plan, first, count)
        drawn += [[(used[s], r) for s, r in zip(b.shards, b.rows, strict=True)] for b in made]
        first += count
    everything = Counter((shard, row) for shard, count in enumerate(rows) for row in range(count))
    for start in range(0, len(drawn) - plan.batches_per_epoch + 1, plan.batches_per_epoch):
        epoch = drawn[start : start + plan.batches_per_epoch]
        assert Counter(sample for batch in epoch for sample in batch) == everything


def test_without_classes_a_place_is_what_it_always_was() -> None:
    rounds, flow = config((), 5), config((), 5, "buffered")
    assert uniform(rounds, 3, 1) == Place((3 * 2 + 1) * 5, 5, -1)
    assert uniform(flow, 3, 7) == Place(35, 5, -1)


def test_a_copy_that_nobody_of_its_class_takes_is_offered_to_all_after_a_while() -> None:
    made = config((1.0, 0.5), 8)
    counts = {"unsent": 1, "in_progress": 0, "over": 1, "last_sent": 1000}
    late = 1000 + made.supply.straggler_after_s
    assert waits_for_its_class(made, counts, late)
    assert not waits_for_its_class(made, counts, late - 1)
    assert not waits_for_its_class(made, {**counts, "over": 0}, late), "nobody has begun it"
    assert not waits_for_its_class(config((), 8), counts, late)


# With the daemons.


def make_version(project: TinyProject) -> None:
    """Whatever is out comes back, and becomes a version or several."""
    before = project.job.current_version
    project.validate_round()
    project.assimilator().one_pass()
    project.transitioner.run_once()
    assert project.job.current_version > before


def spans(project: TinyProject) -> list[tuple[int, int]]:
    """(first batch, steps) of the attempts that count: those that were not withdrawn."""
    rows = [row for row in project.rows(gt_microtask) if row["state"] != MicrotaskState.CANCELLED]
    return sorted((int(row["first_batch"]), int(row["steps"])) for row in rows)


def assert_no_gap(found: Sequence[tuple[int, int]]) -> None:
    end = 0
    for first, steps in found:
        assert first == end, found
        end += steps


@pytest.mark.parametrize("policy", ["diloco", "buffered"])
def test_batches_are_dealt_out_without_gap_also_after_a_rollback_and_a_kill(policy: str) -> None:
    with tiny_project("diloco.toml", changes=(('policy = "diloco"', f'policy = "{policy}"'), CLASSES)) as project:
        for _ in range(2):
            make_version(project)
        before = {int(r["slot"]) if policy == "buffered" else (r["version"], r["slot"]): (r["first_batch"], r["steps"])
                  for r in project.rows(gt_microtask)}  # fmt: skip
        roll_back(project.tree, project.db, project.job.name, 1)
        with project.db.transaction() as connection:
            store.set_job_state(connection, project.job_id, JobState.RUNNING)
        project.issue()
        project.generator().one_pass()  # one that was killed and started again finds everything done
        for _ in range(2):
            make_version(project)
        found = spans(project)
        assert_no_gap(found)
        for row in project.rows(gt_microtask):
            key = int(row["slot"]) if policy == "buffered" else (row["version"], row["slot"])
            if key in before:
                assert (row["first_batch"], row["steps"]) == before[key]
            task = project.microtask_of(str(row["workunit_name"]))
            assert (task.first_step, task.steps) == (row["first_batch"], row["steps"])
