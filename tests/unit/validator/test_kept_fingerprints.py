"""What stays of judged results: rows of gt_fingerprint, and the work that they show to be copied."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

from boinc_project import database, store
from boinc_project.gt_tables import gt_fingerprint, gt_trust
from boinc_project.states import ServerState
from tests.tiny_project import TinyProject, tiny_project
from tests.trusting import gradients_of, with_gradients, with_trust
from validator import traces
from validator.copies import same_file


@pytest.fixture
def project() -> Iterator[TinyProject]:
    with tiny_project() as made:
        yield made


def judged(project: TinyProject) -> None:
    project.transitioner.run_once()
    project.validator().one_pass()


def trails(project: TinyProject) -> list[tuple[int, str, float | None]]:
    return [(row["host_id"], row["verdict"], row["distance"]) for row in project.rows(gt_fingerprint)]


@pytest.mark.usefixtures("each_database")
def test_every_judged_copy_leaves_its_fingerprint_verdict_and_distance(project: TinyProject) -> None:
    results = project.issue()
    unit = results[0]["workunitid"]
    project.change(database.workunit, unit, target_nresults=4, transition_time=0)
    project.transitioner.run_once()
    first, second, drifted, wrong = project.rows(database.result, workunitid=unit)
    row = project.unit_of(first)
    project.answer(first)
    project.answer(second)
    project.answer(drifted, project.changed_update(row, lambda a: a * 1.01))
    project.answer(wrong, project.changed_update(row, np.negative))
    judged(project)
    found = {host: (verdict, distance) for host, verdict, distance in trails(project)}
    assert found[1] == ("canonical", None) and found[2] == ("valid", 0.0)
    assert found[3][0] == "differs" and found[3][1] == pytest.approx(0.006, rel=0.3)
    assert found[4][0] == "faulty" and float(found[4][1] or 0) >= 1
    assert {len(row["marks"]) for row in project.rows(gt_fingerprint)} <= set(range(100, 1025))


def test_copies_without_agreement_leave_nothing_yet_and_unreadable_ones_never_do(project: TinyProject) -> None:
    results = project.issue()
    pair = [r for r in results if r["workunitid"] == results[0]["workunitid"]]
    project.answer(pair[0])
    project.answer(pair[1], b"")
    judged(project)
    assert trails(project) == []


@pytest.mark.usefixtures("each_database")
def test_fingerprints_are_dropped_after_sixty_days_and_not_before(project: TinyProject) -> None:
    for result in project.issue():
        project.answer(result)
    judged(project)
    (moment,) = {row["judge_time"] for row in project.rows(gt_fingerprint)}
    for age, left in ((59 * 86400, 4), (61 * 86400, 0)):
        project.validator(clock=lambda age=age: moment + age).one_pass()
        assert len(project.rows(gt_fingerprint)) == left


@pytest.mark.usefixtures("each_database")
def test_a_result_that_was_set_back_by_hand_is_judged_again_and_keeps_its_first_fingerprint(
    project: TinyProject,
) -> None:
    results = [r for r in project.issue() if r["workunitid"] == 1]
    for result in results:
        project.answer(result)
    judged(project)
    before = project.rows(gt_fingerprint)
    for result in results:
        project.change(database.result, result["id"], validate_state=0)
    project.change(database.workunit, 1, canonical_resultid=0, need_validate=1)
    project.validator().one_pass()
    assert project.unit_of(results[0])["canonical_resultid"]
    assert project.rows(gt_fingerprint) == before


def test_the_same_gradient_sent_for_another_microtask_is_named_also_by_a_validator_that_starts_afresh(
    project: TinyProject, caplog: pytest.LogCaptureFixture
) -> None:
    with_trust(project, audit_floor=0.5)  # any key of [trust]: copied work is looked for
    results = project.issue()
    units = sorted({r["workunitid"] for r in results})
    of_unit = {unit: [r for r in results if r["workunitid"] == unit] for unit in units}
    for result in of_unit[units[0]]:
        project.answer(result)
    judged(project)
    old = gradients_of(project, project.unit_of(of_unit[units[0]][0]))
    stale = with_gradients(project, project.unit_of(of_unit[units[1]][0]), lambda n: -2.0 * old[n])
    project.answer(of_unit[units[1]][0], stale, user=1)
    project.answer(of_unit[units[1]][1], user=2)
    judged(project)
    (line,) = [r.message for r in caplog.records if "looks copied" in r.message]
    name = project.unit_of(of_unit[units[0]][0])["name"]
    assert line.endswith(f"it is a multiple of what this host returned for {name}")
    assert f"[RESULT#{of_unit[units[1]][0]['id']}]" in line


@pytest.mark.parametrize("codec", ["dense", "fp4", "qsgd", "low-rank"])
def test_the_server_s_own_step_sent_as_a_gradient_is_named(codec: str, caplog: pytest.LogCaptureFixture) -> None:
    changes = (("[workunit]", f'[codec]\nkind = "{codec}"\n\n[workunit]'),)
    with tiny_project(changes=changes) as project:
        with_trust(project, audit_floor=0.5)  # any key of [trust]: copied work is looked for
        project.make_version()
        results = project.issue()
        job = project.job
        with project.db.read() as connection:
            rows = store.versions(connection, job.id)
        before, after = (job.folder.read_state(int(r["version"]), str(r["state_sha256"])) for r in rows)
        step = with_gradients(project, project.unit_of(results[0]), lambda n: 7.0 * (after[n] - before[n]))
        project.answer(results[0], step)
        project.answer(results[1])
        judged(project)
        (line,) = [r.message for r in caplog.records if "looks copied" in r.message]
        assert line.endswith("it is a multiple of the public step from version 0 to 1")


def test_honest_rounds_look_copied_to_nobody(project: TinyProject, caplog: pytest.LogCaptureFixture) -> None:
    with_trust(project, audit_floor=0.5)  # any key of [trust]: copied work is looked for
    for _ in range(3):
        project.make_version()
    assert not [r for r in caplog.records if "looks copied" in r.message]
    assert not project.rows(database.result, server_state=int(ServerState.UNSENT))


TIMED = {"seconds": {"load": 0.2, "compute": 31.337, "encode": 0.011}, "peak_memory": 123456}


@pytest.mark.parametrize(
    ("digests", "metadata", "found"),
    [
        ({1: "a", 2: "a"}, TIMED, {1, 2}),
        ({1: "a", 2: "b"}, TIMED, set()),
        ({1: "a", 2: "a", 3: "b"}, TIMED, {1, 2}),
        ({1: "a", 2: "a"}, {}, set()),
        ({1: "a", 2: "a"}, {"seconds": {"compute": 0.01}, "peak_memory": 1}, set()),
        ({1: "a", 2: "a"}, {"seconds": {"compute": 10**400}, "peak_memory": 1}, set()),
        ({1: "a", 2: "a"}, {"seconds": [5.0], "peak_memory": 1}, set()),
    ],
)
def test_the_same_bytes_from_two_hosts_are_one_file_if_they_hold_times_of_their_own(
    digests: dict[int, str], metadata: dict[str, Any], found: set[int]
) -> None:
    assert set(same_file(digests, dict.fromkeys(digests, metadata))) == found


@pytest.mark.usefixtures("each_database")
def test_a_project_made_before_there_was_evidence_of_reliability_gets_the_new_columns(project: TinyProject) -> None:
    new = ("good", "bad", "unlike", "alone", "failed_check")
    with project.db.transaction() as connection:
        for name in new:
            connection.execute(sa.text(f"ALTER TABLE gt_trust DROP COLUMN {name}"))
        connection.execute(sa.text("INSERT INTO gt_trust VALUES (1, 'k', 3, 0, 0, 0, 0)"))
    store.create_own_tables(project.db)
    store.create_own_tables(project.db)
    (row,) = project.rows(gt_trust)
    assert (row["valid"], row["good"], row["alone"]) == (3, 0.0, 0)
    with project.db.read() as connection:
        assert traces.recent(connection, 1) == []
