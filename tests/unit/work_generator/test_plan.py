"""Which samples a microtask gets: every sample once an epoch, no batch twice, the same for ever."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from boinc_project.plan import DataPlan, batches_of_microtask

ROWS = st.lists(st.integers(1, 30), min_size=1, max_size=4).map(tuple)


def samples(plan: DataPlan, number: int) -> list[tuple[int, int]]:
    shards, rows = plan.samples_of(number)
    return [(int(s), int(r)) for s, r in zip(shards, rows, strict=True)]


@given(ROWS, st.integers(1, 16), st.integers(0, 2**63 - 1))
def test_an_epoch_visits_every_sample_exactly_once(rows: tuple[int, ...], size: int, seed: int) -> None:
    plan = DataPlan(seed, rows, size, False)
    for epoch in (0, 1):
        first = epoch * plan.batches_per_epoch
        seen = Counter(s for n in range(plan.batches_per_epoch) for s in samples(plan, first + n))
        assert seen == Counter((shard, row) for shard, count in enumerate(rows) for row in range(count))


@given(ROWS, st.integers(1, 16), st.integers(0, 99))
def test_full_batches_leave_out_less_than_a_batch_and_repeat_nothing(
    rows: tuple[int, ...], size: int, seed: int
) -> None:
    plan = DataPlan(seed, rows, size, True)
    drawn = [samples(plan, number) for number in range(plan.batches_per_epoch)]
    assert all(len(batch) == size for batch in drawn)
    flat = [sample for batch in drawn for sample in batch]
    assert len(set(flat)) == len(flat) > sum(rows) - size


@settings(max_examples=50)
@given(ROWS, st.integers(1, 8), st.integers(1, 4), st.integers(1, 3))
def test_slots_and_versions_never_share_a_batch(rows: tuple[int, ...], size: int, slots: int, batches: int) -> None:
    plan = DataPlan(1, rows, size, False)
    drawn: list[Any] = []
    for version in range(3):
        for slot in range(slots):
            made, used = batches_of_microtask(plan, version * slots + slot, batches)
            drawn += [[(used[s], r) for s, r in zip(b.shards, b.rows, strict=True)] for b in made]
    assert drawn == [samples(plan, number) for number in range(3 * slots * batches)]


def test_a_slot_issued_again_gets_the_same_batches_and_another_seed_gets_others() -> None:
    plan = DataPlan(7, (100, 100), 10, False)
    assert batches_of_microtask(plan, 21, 3) == batches_of_microtask(plan, 21, 3)
    assert batches_of_microtask(plan, 21, 3) != batches_of_microtask(DataPlan(8, (100, 100), 10, False), 21, 3)


def test_epochs_are_shuffled_differently() -> None:
    plan = DataPlan(7, (50,), 50, False)
    assert samples(plan, 0) != samples(plan, 1)


def test_the_order_is_that_of_earlier_releases() -> None:
    # A job goes on after an upgrade of the project's software: the plan of its seed must not change.
    assert samples(DataPlan(3, (4, 3), 3, False), 0) == [(0, 3), (0, 0), (0, 1)]


def test_a_microtask_touches_few_shards_and_numbers_only_those() -> None:
    plan = DataPlan(1, (1000,) * 50, 10, False)
    made, used = batches_of_microtask(plan, 0, 20)
    assert len(used) <= 2 and list(used) == sorted(used)
    assert {s for batch in made for s in batch.shards} == set(range(len(used)))


@pytest.mark.parametrize(("full", "batches"), [(False, 4), (True, 3)])
def test_batches_per_epoch_count_the_short_one_only_if_it_is_used(full: bool, batches: int) -> None:
    assert DataPlan(1, (5, 5), 3, full).batches_per_epoch == batches
