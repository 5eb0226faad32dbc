"""What a host had accepted alone is computed again once it is caught, and the admin is told what became of it."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from boinc_project import database
from boinc_project.cli import status
from boinc_project.cli import trust as commands
from boinc_project.gt_tables import (
    MicrotaskState,
    RecheckState,
    gt_fingerprint,
    gt_ledger,
    gt_microtask,
    gt_recheck,
    gt_trust,
)
from boinc_project.reliability import is_trusted
from boinc_project.simulator.computing import Evaluation
from tests.tiny_project import TinyProject, tiny_project
from tests.trusting import judged, kind_of, trusted, unsent, with_trust
from validator import rechecks
from validator.decision import HONEST_DISTANCE
from validator.rechecks import judgement


@pytest.fixture
def project() -> Iterator[TinyProject]:
    with tiny_project() as made:
        yield made


def believed(project: TinyProject) -> None:
    """Nobody looks from now on, and host 1 is trusted."""
    with_trust(project, adaptive_replication=True, audit_floor=1e-6, spot_check_share=0.0)
    if not project.rows(gt_trust):
        trusted(project, 1, kind_of(project))


def accepted(project: TinyProject, result: dict[str, Any], change: Any = None) -> str:
    """An answer of host 1 that stands alone; returns the workunit's name."""
    unit = project.unit_of(result)
    project.answer(result, "honest" if change is None else project.changed_update(unit, change), user=1)
    judged(project)
    assert project.unit_of(result)["canonical_resultid"] == result["id"]
    return str(unit["name"])


def caught(project: TinyProject, result: dict[str, Any], **fields: Any) -> None:
    """A lie of host 1 that a spot check meets."""
    with_trust(project, spot_check_share=1.0)
    project.answer(result, project.changed_update(project.unit_of(result), np.negative), user=1)
    judged(project, **fields)


def states(project: TinyProject) -> dict[str, str]:
    return {str(row["workunit_name"]): str(row["state"]) for row in project.rows(gt_recheck)}


def shown(project: TinyProject) -> list[str]:
    """What `status` and `trust show` print, as one line each."""
    texts = []
    for picture in (status.render(project.db), commands.render(project.db, time.time())):
        console = Console(width=1000, record=True, file=io.StringIO())
        console.print(picture)
        texts.append(console.export_text())
    return texts


@pytest.mark.usefixtures("each_database")
def test_a_wrong_result_that_was_not_taken_in_yet_is_left_out_and_its_slot_issued_again(project: TinyProject) -> None:
    believed(project)
    first, second = project.issue()
    name = accepted(project, first, lambda a: 3 * a)
    caught(project, second)
    assert states(project) == {name: "wrong"}
    project.assimilator().one_pass()
    (entry,) = project.rows(gt_ledger)
    assert (entry["workunit_name"], entry["disposition"]) == (name, "dropped")
    project.generator().one_pass()
    slots = [(r["attempt"], r["state"]) for r in project.rows(gt_microtask, slot=0)]
    assert slots == [(0, MicrotaskState.CANCELLED), (1, MicrotaskState.ISSUED)]


def test_a_wrong_result_that_waits_for_its_round_is_left_out_and_the_version_is_made_without_it(
    project: TinyProject,
) -> None:
    believed(project)
    first, second = project.issue()
    name = accepted(project, first, lambda a: 3 * a)
    project.assimilator().one_pass()
    assert [row["disposition"] for row in project.rows(gt_ledger)] == ["pending"]
    caught(project, second)
    assert [row["disposition"] for row in project.rows(gt_ledger)] == ["dropped"]
    with_trust(project, spot_check_share=0.0, adaptive_replication=False)
    for _ in range(4):
        for number, result in enumerate(project.issue()):
            project.answer(result, user=10 * int(result["id"]) + number)
        judged(project)
        project.assimilator().one_pass()
    assert project.job.current_version >= 1
    applied = {row["workunit_name"] for row in project.rows(gt_ledger, disposition="applied")}
    assert applied and name not in applied


@pytest.mark.usefixtures("each_database")
def test_a_wrong_result_in_a_version_is_named_with_the_version_to_go_back_to(
    project: TinyProject, caplog: pytest.LogCaptureFixture
) -> None:
    believed(project)
    wrong = [accepted(project, result, lambda a: 3 * a) for result in project.issue()]
    project.assimilator().one_pass()
    believed(project)
    right = [accepted(project, result) for result in project.issue()]
    project.assimilator().one_pass()
    assert project.job.current_version == 2
    caught(project, project.issue()[0])
    assert states(project) == {**dict.fromkeys(wrong, "wrong"), **dict.fromkeys(right, "right")}
    lines = [r.message for r in caplog.records if r.levelname == "CRITICAL" and "is wrong" in r.message]
    assert len(lines) == 2
    assert all("is part of version 1 of job tiny; boinc-train job rollback tiny 0 takes that back" in s for s in lines)
    for text in shown(project):
        assert "computed again: 2 right, 2 wrong; boinc-train job rollback tiny 0" in text
    (row,) = project.rows(gt_trust, host_id=1)
    assert row["good"] == 0 and row["failed_check"] > 0
    verdicts = {r["workunit_name"]: r["verdict"] for r in project.rows(gt_fingerprint)}
    assert {verdicts[n] for n in right} == {"canonical"}, "confirmed by the server"
    assert project.job.current_version == 2, "nothing is taken back by itself"


def test_an_audit_that_others_copies_fail_has_them_looked_at_too(project: TinyProject) -> None:
    believed(project)
    first, second = project.issue()
    name = accepted(project, first)
    with_trust(project, audit_floor=1.0)
    project.answer(second, project.changed_update(project.unit_of(second), np.negative), user=1)
    judged(project)
    for user in (2, 3):
        assert not states(project)
        (more,) = unsent(project, second["workunitid"])
        project.answer(more, user=user)
        judged(project)
    assert states(project) == {name: "right"}
    for text in shown(project):
        assert "failed an audit; computed again: 1 right" in text


def test_the_queue_is_bounded_and_begins_with_the_newest(project: TinyProject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rechecks, "MOST", 1)
    believed(project)
    names = [accepted(project, result) for result in project.issue()]
    project.assimilator().one_pass()
    believed(project)
    caught(project, project.issue()[0])
    assert states(project) == {names[-1]: "right"}


def test_looking_goes_on_while_results_turn_out_wrong(project: TinyProject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rechecks, "MOST", 1)
    names = []
    for change in (None, lambda a: 3 * a):
        believed(project)
        names += [accepted(project, result, change) for result in project.issue()]
        project.assimilator().one_pass()
    believed(project)
    caught(project, project.issue()[0])
    assert states(project) == {names[3]: "wrong", names[2]: "wrong", names[1]: "right"}, "and then no further"


def test_what_waits_when_the_daemon_ends_is_computed_by_the_next_one(project: TinyProject) -> None:
    believed(project)
    names = [accepted(project, result) for result in project.issue()]
    kind = kind_of(project)
    with project.db.transaction() as connection:
        assert set(rechecks.queue(connection, 1, kind, 1.0)) == set(names)
        assert rechecks.queue(connection, 1, kind, 1.0) == [], "once"
    for text in shown(project):
        assert "computed again: 2 waiting" in text
    project.validator(start=Evaluation).one_pass()
    assert states(project) == dict.fromkeys(names, "right")


def test_what_cannot_be_computed_any_more_is_told_and_holds_nothing_up(project: TinyProject) -> None:
    believed(project)
    first, second = project.issue()
    accepted(project, first)
    project.job.folder.shard_path("train", 0).unlink()
    with project.db.transaction() as connection:
        rechecks.queue(connection, 1, kind_of(project), 1.0)
    with_trust(project, adaptive_replication=False)
    project.answer(second, user=2)
    judged(project)
    assert list(states(project).values()) == ["lost"]
    for text in shown(project):
        assert "computed again: 1 impossible" in text


def test_a_purged_workunit_is_looked_at_all_the_same(project: TinyProject) -> None:
    believed(project)
    first, second = project.issue()
    name = accepted(project, first, lambda a: 3 * a)
    with project.db.transaction() as connection:
        connection.execute(database.result.delete().where(database.result.c.id == first["id"]))
        connection.execute(database.workunit.delete().where(database.workunit.c.id == first["workunitid"]))
    caught(project, second)
    assert states(project) == {name: "wrong"}


@pytest.mark.parametrize(
    ("distance", "state"),
    [
        (None, RecheckState.LOST),
        (0.0, RecheckState.RIGHT),
        (1e-4, RecheckState.RIGHT),
        (2e-4, RecheckState.NEAR),
        (HONEST_DISTANCE, RecheckState.NEAR),
        (0.06, RecheckState.WRONG),
        (float("inf"), RecheckState.WRONG),
        (float("nan"), RecheckState.WRONG),
    ],
)
def test_what_a_distance_says(distance: float | None, state: RecheckState) -> None:
    assert judgement(distance, 1e-4) == state


@pytest.mark.parametrize("factor", [-1.0, 0.9, 0.97, 1.02])
@pytest.mark.usefixtures("each_database")
def test_a_failed_audit_has_what_was_accepted_before_looked_at_however_small_the_lie(
    project: TinyProject, factor: float
) -> None:
    believed(project)
    first, second = project.issue()
    name = accepted(project, first, lambda a: factor * a)
    with_trust(project, audit_floor=1.0)
    project.answer(second, project.changed_update(project.unit_of(second), lambda a: factor * a), user=1)
    judged(project)
    for user in (2, 3):
        (more,) = unsent(project, second["workunitid"])
        project.answer(more, user=user)
        judged(project)
    assert states(project) == {name: "wrong" if abs(factor - 1) > HONEST_DISTANCE else "near"}
    (record,) = project.rows(gt_trust, host_id=1)
    assert not is_trusted(record, time.time()), "the first failed audit ends it"
    project.assimilator().one_pass()
    (entry,) = project.rows(gt_ledger, workunit_name=name)
    assert entry["disposition"] == "dropped"
    project.generator().one_pass()
    assert [r["state"] for r in project.rows(gt_microtask, slot=0)] == [MicrotaskState.CANCELLED, MicrotaskState.ISSUED]


def test_what_differs_a_little_and_is_part_of_a_version_is_told_and_nothing_is_advised(
    project: TinyProject, caplog: pytest.LogCaptureFixture
) -> None:
    believed(project)
    for result in project.issue():
        accepted(project, result, lambda a: 1.02 * a)
    project.assimilator().one_pass()
    believed(project)
    caught(project, project.issue()[0])
    lines = [record.message for record in caplog.records if "differs: it is" in record.message]
    assert len(lines) == 2 and all("and is part of version 1 of job tiny" in line for line in lines)
    assert "rollback" not in "".join(shown(project))
