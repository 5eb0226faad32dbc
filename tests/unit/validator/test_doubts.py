"""Evidence beside agreement: the norm bound, the loss probe, and what the validator makes of an objection."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from boinc_project import database, local_run
from boinc_project.background_runs import Start
from boinc_project.database import result, workunit
from boinc_project.gt_tables import gt_accepted
from boinc_project.simulator.computing import Evaluation
from boinc_project.states import ErrorMask, Outcome, ServerState, ValidateState
from tests.tiny_project import TinyProject, tiny_project
from validator import loss_probe, norm_bound
from validator.__main__ import Validator
from validator.decision import Decision, Evidence, doubted

# --- the norm bound ---------------------------------------------------------------------------------------------------


def test_the_norm_is_of_gradients_and_deltas_alone() -> None:
    update = {"delta/a": np.float32([3, 0]), "delta/b": np.float32([[4]]), "metric/loss": np.float32([100])}
    assert norm_bound.norm(update) == pytest.approx(5.0)


def test_a_norm_is_compared_with_the_median_of_the_last_ones() -> None:
    usual = [1.0, 1.1, 0.9, 1.0, 50.0]
    assert norm_bound.objection(3.0, usual, 3.0) == ""
    assert "over 3 times the usual 1" in norm_bound.objection(3.01, usual, 3.0)


def test_a_few_updates_give_no_bound() -> None:
    assert norm_bound.objection(1e9, [1.0] * (norm_bound.LEAST - 1), 3.0) == ""


# --- the loss probe ---------------------------------------------------------------------------------------------------


def test_an_update_must_bring_the_share_of_what_others_from_its_version_bring() -> None:
    gains = [(7, 0.36), (7, 0.36), (7, 0.36), (6, 9.0)]
    assert loss_probe.least_gain(7, gains, 0.9) == pytest.approx(0.9 * 0.36)
    assert loss_probe.objection(0.33, 7, gains, 0.9) == ""
    assert loss_probe.objection(0.32, 7, gains, 0.9)


def test_where_honest_gains_scatter_the_least_one_is_lower() -> None:
    gains = [(7, 0.30), (7, 0.36), (7, 0.42)]
    assert loss_probe.least_gain(7, gains, 0.9) == pytest.approx(0.9 * 0.36 - 2 * 1.4826 * 0.06)


def test_the_first_update_of_a_version_is_compared_with_the_newest_earlier_version() -> None:
    assert loss_probe.least_gain(7, [(7, 0.9), (6, 0.4), (6, 0.4), (2, 8.0)], 0.9) == pytest.approx(0.1)


@pytest.mark.parametrize("gain", [-0.01, float("-inf"), float("nan")])
def test_the_first_updates_of_a_job_must_gain_something(gain: float) -> None:
    assert loss_probe.objection(gain, 0, [], 0.9)
    assert loss_probe.objection(0.01, 0, [], 0.9) == ""


def test_where_nobody_gains_any_more_the_usual_loss_is_no_objection() -> None:
    assert loss_probe.objection(-0.01, 9, [(8, -0.01)], 0.9) == ""
    assert loss_probe.objection(-0.01, 9, [(9, -0.01), (9, -0.01), (9, -0.01)], 0.9) == ""
    assert loss_probe.objection(-1.0, 9, [(9, -0.01), (9, -0.01), (9, -0.01)], 0.9)


def test_trying_an_update_is_about_three_percent_of_the_work() -> None:
    steps = 500
    forward_of_two_states = 2 * loss_probe.batches(steps) / 3
    assert forward_of_two_states / steps == pytest.approx(0.033, abs=0.005)


# --- the validator ----------------------------------------------------------------------------------------------------


@pytest.fixture
def project() -> Iterator[TinyProject]:
    with tiny_project("guarded.toml") as made:
        yield made


def judged(project: TinyProject, start: Start = Evaluation) -> Validator:
    """Passes until nothing is being tried any more; by default it is tried in this process."""
    project.transitioner.run_once()
    validator = project.validator(start=start)
    for _ in range(600):
        validator.one_pass()
        if not project.rows(workunit, need_validate=1):
            return validator
        time.sleep(0.05 if start is local_run.start else 0)
    raise AssertionError("the updates were not judged within a minute")


def answer_all(project: TinyProject, change: Any = None) -> None:
    for row in project.rows(result, server_state=int(ServerState.UNSENT)):
        unit = project.unit_of(row)
        project.answer(row, project.honest_update(unit) if change is None else project.changed_update(unit, change))


def test_honest_updates_are_tried_and_accepted(project: TinyProject) -> None:
    project.issue()
    answer_all(project)
    judged(project, local_run.start)
    assert all(unit["canonical_resultid"] for unit in project.rows(workunit))
    rows = project.rows(gt_accepted)
    assert len(rows) == 2 and all(row["gain"] > 0 and row["norm"] > 0 and row["version"] == 0 for row in rows)
    assert not list(project.job.folder.path.glob("probe_*"))


@pytest.mark.parametrize(
    "codec", ['kind = "random-k"\nshare = 0.1', 'kind = "qsgd"\nlevels = 1\nblock = 256'], ids=["random-k", "qsgd"]
)
def test_an_update_of_a_noisy_unbiased_codec_is_tried_as_a_step_that_is_good_by_itself(codec: str) -> None:
    changes = (("[workunit]", f"[codec]\n{codec}\n\n[workunit]"), ("lr = 0.02", "lr = 0.3"))
    with tiny_project("guarded.toml", changes=changes) as project:
        project.issue()
        answer_all(project)
        judged(project)
        assert all(unit["canonical_resultid"] for unit in project.rows(workunit))
        assert all(row["gain"] > 0 for row in project.rows(gt_accepted))


def test_an_update_on_which_colluding_hosts_agree_and_that_raises_the_loss_is_not_accepted(
    project: TinyProject,
) -> None:
    project.issue()
    answer_all(project, lambda array: -array)
    judged(project)
    for unit in project.rows(workunit):
        assert (unit["canonical_resultid"], unit["target_nresults"], unit["error_mask"]) == (0, 3, 0)
    over = project.rows(result, server_state=int(ServerState.OVER))
    assert {row["validate_state"] for row in over} == {int(ValidateState.INCONCLUSIVE)}
    project.transitioner.run_once()
    answer_all(project, lambda array: -array)
    judged(project)
    for unit in project.rows(workunit):
        assert unit["canonical_resultid"] == 0 and unit["error_mask"] & ErrorMask.TOO_MANY_SUCCESS_RESULTS
    assert project.rows(gt_accepted) == []


def test_an_update_that_is_too_long_is_not_accepted_until_another_copy_tells(project: TinyProject) -> None:
    project.issue()
    with project.db.transaction() as connection:
        usual = {"job_id": project.job_id, "version": 0, "norm": 1e-3, "gain": None, "judge_time": 1.0}
        names = [{"workunit_name": f"gt_earlier_{number}", **usual} for number in range(norm_bound.LEAST)]
        connection.execute(gt_accepted.insert(), names)
    answer_all(project)
    judged(project)
    assert {unit["canonical_resultid"] for unit in project.rows(workunit)} == {0}
    assert len(project.rows(gt_accepted)) == norm_bound.LEAST


def test_copies_that_agreement_would_refuse_are_not_judged_by_a_doubtful_update(project: TinyProject) -> None:
    """Two liars against an honest third: the honest one is not invalid because the liars agree."""
    project.issue()
    for unit in project.rows(workunit):
        project.change(workunit, unit["id"], target_nresults=3, transition_time=1)
    project.transitioner.run_once()
    for row in project.rows(result, server_state=int(ServerState.UNSENT)):
        unit = project.unit_of(row)
        liar = not str(row["name"]).endswith("_2")
        project.answer(row, project.changed_update(unit, lambda a: -a) if liar else project.honest_update(unit))
    judged(project)
    over = project.rows(database.result, server_state=int(ServerState.OVER), outcome=int(Outcome.SUCCESS))
    assert len(over) == 6 and {row["validate_state"] for row in over} == {int(ValidateState.INCONCLUSIVE)}


def test_a_doubtful_update_is_computed_by_the_server_where_the_job_has_it_settle_disputes() -> None:
    evidence = Evidence({"min_quorum": 2}, [], {}, {}, 1e-3, {}, disputes=True)
    assert doubted(evidence, Decision(canonical=7), "it is too long") == Decision(replay="it is too long")
