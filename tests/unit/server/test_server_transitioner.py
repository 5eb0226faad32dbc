"""The transitioner's decision, one row a situation, and its effects on a database."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from boinc_project import database
from boinc_project.config import ProjectConfig
from boinc_project.database import new_row
from boinc_project.server.transitioner import Transitioner, transition
from boinc_project.states import (
    NEVER,
    AssimilateState,
    ErrorMask,
    FileDeleteState,
    Outcome,
    ServerState,
    TransitionerFlags,
    ValidateState,
)
from tests.server_project import add_workunits, make_project, publish_app, rows

NOW = 1_000_000
CONFIG = ProjectConfig.parse(b"<boinc><config></config></boinc>", Path("/nowhere"))


def workunit(**columns: Any) -> dict[str, Any]:
    """`WU(q=2,t=2)` of the field cases: quorum 2, at most 3 errors, 4 successes, 6 results."""
    defaults = {
        "id": 1,
        "name": "wu",
        "min_quorum": 2,
        "target_nresults": 2,
        "max_error_results": 3,
        "max_success_results": 4,
        "max_total_results": 6,
        "delay_bound": 3600,
        "transition_time": NOW,
    }
    return {**new_row(database.workunit, **{**defaults, **columns})}


def result(number: int, state: str, **columns: Any) -> dict[str, Any]:
    """A result in one of the situations named below."""
    row = new_row(
        database.result,
        name=f"wu_{number}",
        workunitid=1,
        hostid=number + 10,
        app_version_id=5,
        **{**SITUATIONS[state], **columns},
    )
    return {"id": number + 100, **row}


OVER = {"server_state": ServerState.OVER, "received_time": NOW - 50}
SITUATIONS: Mapping[str, Mapping[str, Any]] = {
    "unsent": {"server_state": ServerState.UNSENT},
    "inactive": {"server_state": ServerState.INACTIVE},
    "running": {"server_state": ServerState.IN_PROGRESS, "report_deadline": NOW + 500},
    "overdue": {"server_state": ServerState.IN_PROGRESS, "report_deadline": NOW - 1},
    "success": {**OVER, "outcome": Outcome.SUCCESS},
    "inconclusive": {
        **OVER,
        "outcome": Outcome.SUCCESS,
        "validate_state": ValidateState.INCONCLUSIVE,
    },
    "valid": {**OVER, "outcome": Outcome.SUCCESS, "validate_state": ValidateState.VALID},
    "invalid": {**OVER, "outcome": Outcome.SUCCESS, "validate_state": ValidateState.INVALID},
    "error": {**OVER, "outcome": Outcome.CLIENT_ERROR, "validate_state": ValidateState.INVALID},
    "user abort": {**OVER, "outcome": Outcome.CLIENT_ERROR, "exit_status": 203},
    "validate error": {
        **OVER,
        "outcome": Outcome.VALIDATE_ERROR,
        "validate_state": ValidateState.INVALID,
    },
    "no reply": {
        "server_state": ServerState.OVER,
        "outcome": Outcome.NO_REPLY,
        "report_deadline": NOW - 1,
    },
    "detached": {**OVER, "outcome": Outcome.CLIENT_DETACHED},
    "not needed": {"server_state": ServerState.OVER, "outcome": Outcome.DIDNT_NEED},
    "not sendable": {"server_state": ServerState.OVER, "outcome": Outcome.COULDNT_SEND},
}

#: (results, what the workunit gets, number of new results); quorum 2 of the workunit above.
NO_CANONICAL = [
    ([], {}, 2),
    (["unsent", "unsent"], {}, 0),
    (["unsent"], {}, 1),
    (["running", "unsent"], {}, 0),
    (["success", "running"], {}, 0),
    (["success", "success"], {"need_validate": 1}, 0),
    (["success", "inconclusive"], {"need_validate": 1}, 0),
    (["inconclusive", "inconclusive"], {}, 0),
    (["success", "invalid"], {}, 1),
    (["error", "running"], {}, 1),
    (["error", "error", "error", "running"], {}, 1),
    (["error"] * 4, {"error_mask": ErrorMask.TOO_MANY_ERROR_RESULTS, "assimilate_state": 1}, 0),
    (["user abort"] * 4, {}, 2),
    (["validate error"], {}, 2),
    (["no reply", "running"], {}, 1),
    (["overdue", "running"], {}, 1),
    (["detached"], {}, 2),
    (["not needed"], {}, 2),
    (["not sendable"], {"error_mask": ErrorMask.COULDNT_SEND_RESULT, "assimilate_state": 1}, 0),
    (["no reply"] * 5, {}, 1),
    (["no reply"] * 6, {"error_mask": ErrorMask.TOO_MANY_TOTAL_RESULTS, "assimilate_state": 1}, 0),
    (["success"] + ["no reply"] * 4, {}, 1),
    (["success", "success"] + ["no reply"] * 5, {"error_mask": 8, "assimilate_state": 1}, 0),
]


@pytest.mark.parametrize(("states", "expected", "new"), NO_CANONICAL)
def test_workunit_without_canonical_result(states: list[str], expected: dict[str, Any], new: int) -> None:
    found = [result(number, state) for number, state in enumerate(states)]
    change = transition(workunit(), found, NOW, CONFIG)
    changes = {key: value for key, value in change.workunit.items() if key != "transition_time"}
    if "need_validate" not in expected:
        changes.pop("need_validate", None)
    assert changes == expected
    assert change.new_results == new
    assert change.first_suffix == len(states)


def test_need_validate_waits_for_the_quorum() -> None:
    assert "need_validate" not in transition(workunit(), [result(0, "success")], NOW, CONFIG).workunit


def test_overdue_result_is_no_reply_and_costs_the_host() -> None:
    change = transition(workunit(), [result(0, "overdue"), result(1, "running")], NOW, CONFIG)
    assert change.results == {100: {"server_state": ServerState.OVER, "outcome": Outcome.NO_REPLY}}
    assert [(late.hostid, late.app_version_id) for late in change.timed_out] == [(10, 5)]


def test_result_at_its_deadline_is_not_late_yet() -> None:
    change = transition(workunit(), [result(0, "running", report_deadline=NOW)], NOW, CONFIG)
    assert not change.results
    assert change.workunit["transition_time"] == NOW + 1


def test_failed_workunit_gives_up_what_is_left() -> None:
    found = [result(0, "unsent"), result(1, "success"), result(2, "inconclusive"), result(3, "running")]
    change = transition(workunit(error_mask=ErrorMask.CANCELLED), found, NOW, CONFIG)
    assert change.results == {
        100: {"server_state": ServerState.OVER, "outcome": Outcome.DIDNT_NEED},
        101: {"validate_state": ValidateState.NO_CHECK},
        102: {"validate_state": ValidateState.NO_CHECK},
    }
    assert change.workunit["assimilate_state"] == AssimilateState.READY
    assert change.workunit["transition_time"] == NOW + 501  # the deadline of the one that still runs


def test_suffix_continues_after_the_largest_number() -> None:
    found = [result(7, "error"), result(2, "running")]
    assert transition(workunit(), found, NOW, CONFIG).first_suffix == 8


def test_no_new_results_where_the_flags_forbid_them() -> None:
    flags = TransitionerFlags.NO_NEW_RESULTS
    assert transition(workunit(transitioner_flags=flags), [], NOW, CONFIG).new_results == 0


def test_canonical_result_ends_the_need_for_more() -> None:
    wu = workunit(canonical_resultid=100, assimilate_state=AssimilateState.READY)
    change = transition(wu, [result(0, "valid"), result(1, "error")], NOW, CONFIG)
    assert change.new_results == 0
    assert change.workunit == {"transition_time": NEVER}


def test_late_success_is_judged_against_the_canonical_result() -> None:
    wu = workunit(canonical_resultid=100, assimilate_state=AssimilateState.DONE)
    found = [result(0, "valid"), result(1, "valid"), result(2, "success")]
    change = transition(wu, found, NOW, CONFIG)
    assert change.workunit["need_validate"] == 1
    assert 100 not in change.results, "the canonical file is still needed for the comparison"
    assert change.results[101] == {"file_delete_state": FileDeleteState.READY}


def test_success_after_the_canonical_files_are_gone_is_too_late() -> None:
    wu = workunit(
        canonical_resultid=100,
        assimilate_state=AssimilateState.DONE,
        file_delete_state=FileDeleteState.DONE,
    )
    found = [result(0, "valid", file_delete_state=FileDeleteState.DONE), result(1, "success")]
    change = transition(wu, found, NOW, CONFIG)
    assert change.results[101]["validate_state"] == ValidateState.TOO_LATE
    assert "need_validate" not in change.workunit


def test_deferred_assimilation_is_armed_when_everything_is_over() -> None:
    wu = workunit(canonical_resultid=100)
    ready = {"assimilate_state": AssimilateState.READY, "transition_time": NEVER}
    assert transition(wu, [result(0, "valid"), result(1, "error")], NOW, CONFIG).workunit == ready
    still = transition(wu, [result(0, "valid"), result(1, "running")], NOW, CONFIG).workunit
    assert "assimilate_state" not in still


def test_files_go_when_assimilated_and_all_over() -> None:
    wu = workunit(canonical_resultid=100, assimilate_state=AssimilateState.DONE)
    found = [result(0, "valid"), result(1, "invalid"), result(2, "error"), result(3, "not needed")]
    change = transition(wu, found, NOW, CONFIG)
    assert change.workunit["file_delete_state"] == FileDeleteState.READY
    assert {key: row["file_delete_state"] for key, row in change.results.items()} == {100: 1, 101: 1, 102: 1}


def test_files_wait_for_a_running_result_and_for_the_delay() -> None:
    wu = workunit(canonical_resultid=100, assimilate_state=AssimilateState.DONE)
    running = transition(wu, [result(0, "valid"), result(1, "running")], NOW, CONFIG)
    assert "file_delete_state" not in running.workunit and not running.results
    delayed = transition(wu, [result(0, "valid")], NOW, replace(CONFIG, delete_delay=3600))
    assert not delayed.results
    assert delayed.workunit["transition_time"] == NOW - 50 + 3600


def test_retries_get_the_configured_priority() -> None:
    config = replace(CONFIG, reliable_priority_on_over=10, reliable_priority_on_over_except_error=20)
    wu = workunit(priority=5)
    assert transition(wu, [], NOW, config).new_priority == 5
    assert transition(wu, [result(0, "error")], NOW, config).new_priority == 15
    assert transition(wu, [result(0, "no reply")], NOW, config).new_priority == 25


def test_transition_is_a_fixed_point() -> None:
    """Applied to its own outcome it changes nothing but the time.

    (Except at max_total_results: stock BOINC gives up a workunit that used them all and lacks successes.)
    """
    for states, _, new in NO_CANONICAL:
        if len(states) + new == 6:
            continue
        found = [result(number, state) for number, state in enumerate(states)]
        change = transition(workunit(), found, NOW, CONFIG)
        wu = {**workunit(), **change.workunit}
        again = [{**row, **change.results.get(row["id"], {})} for row in found]
        count = len(again)
        again += [result(count + extra, "unsent") for extra in range(change.new_results)]
        second = transition(wu, again, NOW, CONFIG)
        assert not second.results and not second.new_results
        assert set(second.workunit) <= {"transition_time"}


# Effects.


@pytest.mark.usefixtures("each_database")
def test_results_are_made_named_certified_and_only_once(tmp_path: Path) -> None:
    tree = make_project(tmp_path / "project")
    with tree.database() as db:
        appid = publish_app(tree, db)
        add_workunits(tree, db, appid, 3, target_nresults=2, priority=7)
        transitioner = Transitioner(db, tree.config, upload_key=tree.upload_private())
        assert transitioner.run_once() == 3
        assert transitioner.run_once() == 0
        made = rows(db, database.result)
        assert sorted(row["name"] for row in made) == [f"w_{wu}_{n}" for wu in range(3) for n in range(2)]
        assert all(row["server_state"] == ServerState.UNSENT and row["size_class"] == -1 for row in made)
        assert all("<xml_signature>" in row["xml_doc_in"] for row in made)
        assert len({row["random"] for row in made}) == len(made)


@pytest.mark.usefixtures("each_database")
def test_missing_output_template_stops_only_its_own_workunit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tree = make_project(tmp_path / "project")
    with tree.database() as db:
        appid = publish_app(tree, db)
        add_workunits(tree, db, appid, 2)
        with db.transaction() as connection:
            broken = database.workunit.c.name == "w_0"
            values = {"result_template_file": "templates/gone"}
            connection.execute(database.workunit.update().where(broken).values(**values))
        Transitioner(db, tree.config, upload_key=None).run_once()
        assert [row["name"] for row in rows(db, database.result)] == ["w_1_0"]
        assert "[WU#1 w_0]" in caplog.text
