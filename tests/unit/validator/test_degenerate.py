"""O27: updates that hardly depend on the data never become canonical by agreement alone, however many hosts agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from boinc_project.database import result as project_result
from boinc_project.states import Outcome, ServerState, ValidateState
from tests.tiny_project import TinyProject, tiny_project
from tests.trusting import judged, unsent
from validator import degenerate
from validator.degenerate import objection

Array = np.ndarray[Any, Any]
VALID, INVALID = ValidateState.VALID, ValidateState.INVALID


@pytest.fixture
def project() -> Iterator[TinyProject]:
    with tiny_project() as made:
        yield made


def noise(size: int, scale: float = 1.0, seed: int = 0) -> Array:
    return (scale * np.random.default_rng(seed).standard_normal(size)).astype(np.float32)


def with_one(a: Array, value: float) -> Array:
    changed = a.copy()
    changed.reshape(-1)[a.size // 2] = value
    return changed


DEGENERATE: dict[str, Callable[[Array], Array]] = {
    "zeros": lambda a: 0 * a,
    "one number": lambda a: 0 * a + 0.5,
    "a number for each tensor": lambda a: 0 * a + a.size,
    "hardly anything": lambda a: noise(a.size, 1e-20).reshape(a.shape),
    "zeros but for one element": lambda a: with_one(0 * a, 1.0),
    "a number but for one element": lambda a: with_one(0 * a + 0.5, 3.0),
    "a number and rounding": lambda a: (0.5 + noise(a.size, 1e-8)).reshape(a.shape),
}


@pytest.mark.parametrize("size", [20, 10_000, 300_000])
@pytest.mark.parametrize("name", DEGENERATE)
def test_whatever_lies_near_a_constant_is_found(name: str, size: int) -> None:
    change = DEGENERATE[name]
    update = {"gradient/a": change(noise(size)), "gradient/b": change(noise(7)), "metric/loss": np.float32([1.5])}
    assert objection(update)


@pytest.mark.parametrize("scale", [1.0, 1e-8, 1e-17, 1e17])
@pytest.mark.parametrize("size", [20, 10_000, 300_000])
def test_what_was_computed_is_not(size: int, scale: float) -> None:
    flat = noise(size, scale)
    assert not objection({"delta/a": flat, "delta/b": np.zeros(5, np.float32)})
    sparse = with_one(with_one(np.zeros(size, np.float32), scale)[::-1], scale)  # of an embedding's rows few are used
    sparse[0] = -scale
    assert not objection({"gradient/a": np.ones(5, np.float32) * scale, "gradient/b": sparse})
    assert not objection({"gradient/a": np.sign(flat) * np.float32(scale)})


def test_a_part_of_a_model_may_stand_still_and_moves_by_no_constant() -> None:
    still = {"delta/a": np.zeros(100, np.float32)}
    assert objection(still) and not objection(still, is_part=True)
    assert objection({"delta/a": np.ones(100, np.float32)}, is_part=True)


def test_a_few_numbers_say_nothing_and_metrics_and_buffers_are_no_work() -> None:
    assert not objection({"gradient/a": np.ones(15, np.float32), "metric/loss": np.zeros(100, np.float32)})
    assert objection({"gradient/a": np.ones(16, np.float32), "buffer/mean": noise(100)})


@pytest.mark.usefixtures("each_database")
@pytest.mark.parametrize("name", DEGENERATE)
def test_a_pair_that_agrees_on_one_is_refuted_and_honest_copies_win(project: TinyProject, name: str) -> None:
    pair = [r for r in project.issue() if r["workunitid"] == 1]
    wrong = project.changed_update(project.unit_of(pair[0]), DEGENERATE[name])
    for result in pair:
        project.answer(result, wrong)
    judged(project)
    assert not project.unit_of(pair[0])["canonical_resultid"]
    for result, user in zip(unsent(project, 1), (3, 4), strict=True):
        project.answer(result, user=user)
    judged(project)
    rows = project.rows(project_result, workunitid=1, server_state=int(ServerState.OVER))
    assert [int(row["validate_state"]) for row in rows] == [INVALID] * 2 + [VALID] * 2
    assert int(project.unit_of(pair[0])["canonical_resultid"]) in {row["id"] for row in rows[2:]}


def test_what_the_data_say_is_accepted_however_it_looks(project: TinyProject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(degenerate, "objection", lambda update, is_part: "it looks odd")
    pair = [r for r in project.issue() if r["workunitid"] == 1]
    for result in pair:
        project.answer(result)
    judged(project)
    assert [int(row["validate_state"]) for row in project.rows(project_result, workunitid=1)] == [VALID] * 2


def test_if_the_server_cannot_compute_it_more_copies_are_made_and_then_the_workunit_fails(project: TinyProject) -> None:
    pair = [r for r in project.issue() if r["workunitid"] == 1]
    wrong = project.changed_update(project.unit_of(pair[0]), DEGENERATE["a number for each tensor"])
    for result in pair:
        project.answer(result, wrong)
    project.job.folder.shard_path("train", 0).unlink()
    judged(project)
    (more,) = unsent(project, 1)
    project.answer(more, wrong, user=3)
    judged(project)
    unit = project.unit_of(pair[0])
    assert unit["error_mask"] and not unit["canonical_resultid"]
    assert {int(row["outcome"]) for row in project.rows(project_result, workunitid=1)} == {Outcome.SUCCESS}
