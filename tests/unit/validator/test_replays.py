"""Spot checks and disputes: what the server computes itself decides over everybody's copies."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from boinc_project import database
from boinc_project.contract.microtask import delta_file
from boinc_project.daemon import Options
from boinc_project.gt_tables import gt_trust
from boinc_project.states import ErrorMask, Outcome, ValidateState
from tests.tiny_project import TinyProject, tiny_project
from tests.trusting import judged, kind_of, trusted, unsent, with_trust

VALID, INVALID, INCONCLUSIVE = ValidateState.VALID, ValidateState.INVALID, ValidateState.INCONCLUSIVE


@pytest.fixture
def project() -> Iterator[TinyProject]:
    with tiny_project() as made:
        yield made


def pair_of(project: TinyProject, unit: int = 1) -> list[dict[str, Any]]:
    return [r for r in project.issue() if r["workunitid"] == unit]


def states(project: TinyProject, unit: int = 1) -> list[int]:
    rows = project.rows(database.result, workunitid=unit, outcome=int(Outcome.SUCCESS))
    return [int(row["validate_state"]) for row in rows]


def test_a_drawn_workunit_waits_until_the_server_has_computed_it_and_is_then_accepted(project: TinyProject) -> None:
    with_trust(project, spot_check_share=1.0)
    pair = pair_of(project)
    for result in pair:
        project.answer(result)
    project.transitioner.run_once()
    validator = project.validator(options=Options())
    assert not validator.one_pass() and validator.replays.waits(1)
    assert states(project) == [ValidateState.INIT] * 2
    deadline = time.monotonic() + 60
    while not project.unit_of(pair[0])["canonical_resultid"]:
        assert time.monotonic() < deadline
        validator.one_pass()
        time.sleep(0.05)
    assert states(project) == [VALID] * 2
    assert not list(project.job.folder.path.glob("replay_*"))
    assert {row["good"] for row in project.rows(gt_trust)} == {1.0}


@pytest.mark.usefixtures("each_database")
def test_accomplices_who_form_the_quorum_are_refuted_and_lose_all_trust(
    project: TinyProject, caplog: pytest.LogCaptureFixture
) -> None:
    with_trust(project, adaptive_replication=True, audit_floor=1e-6, spot_check_share=0.0)
    first, second = project.issue()
    for host in (1, 2):
        trusted(project, host, kind_of(project))
    project.answer(first, project.changed_update(project.unit_of(first), lambda a: 3 * a), user=1)
    judged(project)
    assert project.unit_of(first)["canonical_resultid"], "nobody looked"
    with_trust(project, adaptive_replication=True, audit_floor=1e-6, spot_check_share=1.0)
    project.answer(second, project.changed_update(project.unit_of(second), np.negative), user=1)
    judged(project)
    assert states(project, second["workunitid"]) == [INVALID]
    (row,) = project.rows(gt_trust, host_id=1)
    assert row["good"] == 0 and row["failed_check"] > 0 and row["consecutive_valid"] == 0
    (line,) = [r.message for r in caplog.records if "accepted from it without a second copy" in r.message]
    assert line.startswith("[HOST#1]") and project.unit_of(first)["name"] in line
    (again,) = unsent(project, second["workunitid"])
    project.answer(again, user=3)
    judged(project)
    assert project.unit_of(second)["canonical_resultid"] == 0 or states(project, second["workunitid"])[1] == VALID


def test_a_colluding_pair_is_refuted_by_a_spot_check_and_the_honest_copy_wins(project: TinyProject) -> None:
    with_trust(project, spot_check_share=1.0)
    pair = pair_of(project)
    wrong = project.changed_update(project.unit_of(pair[0]), np.negative)
    for result in pair:
        project.answer(result, wrong)
    judged(project)
    assert states(project) == [INVALID] * 2 and project.unit_of(pair[0])["canonical_resultid"] == 0
    for result, user in zip(unsent(project, 1), (3, 4), strict=True):
        project.answer(result, user=user)
    judged(project)
    assert states(project) == [INVALID] * 2 + [VALID] * 2
    assert project.unit_of(pair[0])["canonical_resultid"]


def test_a_dispute_that_more_copies_cannot_settle_goes_to_the_server_and_honest_hosts_are_not_ruined(
    project: TinyProject,
) -> None:
    with_trust(project, replay_disputes=True)
    pair = pair_of(project)
    project.change(database.workunit, 1, max_success_results=2)
    drifted = project.changed_update(project.unit_of(pair[0]), lambda a: a * 1.01)
    project.answer(pair[0], drifted, user=1)
    project.answer(pair[1], user=2)
    judged(project)
    assert states(project) == [INVALID, VALID]
    assert project.unit_of(pair[0])["canonical_resultid"] == pair[1]["id"]
    (row,) = project.rows(gt_trust, host_id=1)
    assert (row["differing"], row["faulty"], row["failed_check"]) == (1, 0, 0)
    (version,) = project.rows(database.host_app_version, host_id=1)
    assert version["max_jobs_per_day"] == 50


def test_without_replay_of_disputes_the_same_workunit_asks_for_more_copies_as_ever(project: TinyProject) -> None:
    pair = pair_of(project)
    project.change(database.workunit, 1, max_success_results=2)
    project.answer(pair[0], project.changed_update(project.unit_of(pair[0]), lambda a: a * 1.01), user=1)
    project.answer(pair[1], user=2)
    judged(project)
    assert states(project) == [INCONCLUSIVE] * 2 and len(unsent(project, 1)) == 1


def test_gpus_of_one_family_that_only_confirm_one_another_end_with_the_server_and_not_as_an_error(
    project: TinyProject,
) -> None:
    """O26: two identically broken cards agree; no card of another kind is there."""
    with_trust(project, independent_devices=True, replay_disputes=True)
    project.change(database.app_version, 1, plan_class="cuda_gt")
    pair = pair_of(project)
    project.change(database.workunit, 1, max_success_results=2)
    for user in (1, 2):
        project.add_host(user, user)
        project.change(database.host, user, serialnum="[CUDA|Broken 5700|1|8192MB|20101|200]")
    wrong = project.changed_update(
        project.unit_of(pair[0]), lambda a: np.where(np.arange(a.size) % 33, a.flat, 0).reshape(a.shape)
    )
    for result, user in zip(pair, (1, 2), strict=True):
        project.answer(result, wrong, user=user)
    judged(project)
    assert states(project) == [INVALID] * 2
    assert project.unit_of(pair[0])["error_mask"] == ErrorMask.NONE
    assert len(unsent(project, 1)) == 2


def test_honest_gpus_of_one_family_alone_end_as_an_error_after_so_many_copies_and_other_slots_go_on(
    project: TinyProject,
) -> None:
    """O26: the only family that there is, and a server that computes nothing itself."""
    with_trust(project, independent_devices=True)
    project.change(database.app_version, 1, plan_class="cuda_gt")
    for host in range(1, 30):
        project.add_host(host, host)
        project.change(database.host, host, serialnum="[CUDA|Only 5700|1|8192MB|20101|200]")
    tried, hosts = 0, iter(range(1, 30))
    while copies := unsent(project, 1) or (pair_of(project) if not tried else []):
        for copy in copies:
            project.answer(copy, user=next(hosts))
            tried += 1
        judged(project)
    unit = project.rows(database.workunit, id=1)[0]
    assert unit["error_mask"] & ErrorMask.TOO_MANY_SUCCESS_RESULTS and not unit["canonical_resultid"]
    assert tried <= unit["max_total_results"]
    project.assimilator().one_pass()
    project.transitioner.run_once()
    again = [row for row in project.issue() if row["workunitid"] > 2]
    assert again, "its samples are issued afresh"


def test_what_the_server_cannot_compute_is_decided_without_it(
    project: TinyProject, caplog: pytest.LogCaptureFixture
) -> None:
    with_trust(project, spot_check_share=1.0)
    pair = pair_of(project)
    project.job.folder.shard_path("train", 0).unlink()
    for result in pair:
        project.answer(result)
    judged(project)
    assert states(project) == [VALID] * 2
    assert any("cannot be computed by the server" in r.message for r in caplog.records)


def test_a_validator_that_ends_in_the_middle_leaves_nothing_and_the_next_one_computes_again(
    project: TinyProject,
) -> None:
    with_trust(project, spot_check_share=1.0)
    pair = pair_of(project)
    for result in pair:
        project.answer(result)
    project.transitioner.run_once()
    first = project.validator(options=Options())
    first.one_pass()
    first.one_pass()
    assert first.replays.running is not None
    first.replays.stop()
    assert states(project) == [ValidateState.INIT] * 2 and not list(project.job.folder.path.glob("replay_*"))
    judged(project)
    assert states(project) == [VALID] * 2


def test_a_spot_check_of_work_that_begins_with_deltas_begins_with_the_version_itself() -> None:
    changes = (("[workunit]", "[supply]\nkeyframe_every = 4\n\n[workunit]"),)
    with tiny_project("job.toml", changes=changes) as project:
        project.make_version()
        with_trust(project, spot_check_share=1.0)
        (unit, *_) = project.validate_round()
        assert delta_file(0) in project.microtask_of(str(unit["name"])).files
        assert unit["canonical_resultid"], "the server's own copy agrees"
        records = project.rows(gt_trust)
        assert records and not any(row["failed_check"] for row in records)
