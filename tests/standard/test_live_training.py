"""A tiny job goes from job.toml to its last version in the live project, and every book agrees afterwards."""

from __future__ import annotations

from collections import defaultdict

import pytest

from boinc_project import database
from boinc_project.gt_tables import FileState, gt_ledger
from boinc_project.states import AssimilateState, FileDeleteState, Outcome, ServerState, ValidateState
from tests.live_project import Trained, command

pytestmark = pytest.mark.timeout(1500)
VERSIONS, SLOTS = 4, 2


def valid(trained: Trained) -> list[dict[str, object]]:
    """Valid results of our two users: other volunteers may have taken tasks of this job, and ours those of others."""
    ours = database.result.c.userid.in_(trained.users)
    return trained.project.rows(database.result, ours, database.result.c.validate_state == int(ValidateState.VALID))


def test_the_job_reaches_its_last_version(trained: Trained) -> None:
    assert trained.job.current_version == VERSIONS


def test_every_contribution_is_applied_once(trained: Trained) -> None:
    entries = trained.project.rows(gt_ledger, gt_ledger.c.job_id == trained.job.id)
    assert {entry["disposition"] for entry in entries} == {"applied"}
    places = sorted((entry["applied_version"], entry["slot"]) for entry in entries)
    assert places == [(version, slot) for version in range(1, VERSIONS + 1) for slot in range(SLOTS)]


def test_the_ledger_replays_to_the_published_bytes(trained: Trained) -> None:
    assert "exactly" in command("job", "replay", trained.mark, "--project", str(trained.project.folder))


def test_boinc_s_rows_end_as_its_own_daemons_leave_them(trained: Trained) -> None:
    units, results = trained.workunits(), trained.results()
    assert len(units) == VERSIONS * SLOTS
    by_id = {result["id"]: result for result in results}
    for unit in units:
        assert unit["assimilate_state"] == AssimilateState.DONE
        assert unit["need_validate"] == 0 and unit["error_mask"] == 0
        canonical = by_id[unit["canonical_resultid"]]
        assert canonical["validate_state"] == ValidateState.VALID
        assert canonical["granted_credit"] == unit["canonical_credit"] > 0
    for result in results:
        assert result["server_state"] == ServerState.OVER
        assert result["outcome"] in (Outcome.SUCCESS, Outcome.DIDNT_NEED)


def test_each_result_s_credit_is_in_its_user_host_and_team_once(trained: Trained) -> None:
    users: dict[object, float] = defaultdict(float)
    hosts: dict[object, float] = defaultdict(float)
    teams: dict[object, float] = defaultdict(float)
    for result in valid(trained):
        credit = result["granted_credit"]
        assert isinstance(credit, float)
        users[result["userid"]] += credit
        hosts[result["hostid"]] += credit
        teams[result["teamid"]] += credit
    project = trained.project
    user_rows = project.rows(database.user, database.user.c.id.in_(trained.users))
    team_rows = project.rows(database.team, database.team.c.id == trained.team)
    assert set(users) == set(trained.users) and set(teams) == {trained.team}
    for sums, rows in ((users, user_rows), (hosts, trained.hosts()), (teams, team_rows)):
        assert sums == pytest.approx({row["id"]: row["total_credit"] for row in rows})
        assert all(row["expavg_credit"] > 0 and row["expavg_time"] > 0 for row in rows)


def test_statistics_of_hosts_count_each_valid_result_once(trained: Trained) -> None:
    counts: dict[object, int] = defaultdict(int)
    for result in valid(trained):
        counts[result["hostid"]] += 1
    table = database.host_app_version
    rows = trained.project.rows(table, table.c.host_id.in_(list(counts)))
    assert {row["host_id"]: row["consecutive_valid"] for row in rows} == counts
    assert {row["host_id"]: row["et_n"] for row in rows} == pytest.approx(counts)
    assert {row["host_id"]: row["turnaround_n"] for row in rows} == pytest.approx(counts)
    assert all(row["et_avg"] > 0 and row["turnaround_avg"] > 0 for row in rows)
    assert all(host["avg_turnaround"] > 0 for host in trained.hosts())


def test_boinc_s_file_deleter_has_removed_every_uploaded_file(trained: Trained) -> None:
    for result in trained.results():
        assert result["file_delete_state"] in (FileDeleteState.DONE, FileDeleteState.INIT), result["name"]
    leftovers = list(trained.project.tree.config.upload_dir.glob(f"*/gt_{trained.mark}_*"))
    assert leftovers == []


def test_boinc_s_file_deleter_has_left_the_inputs_that_we_share_between_workunits(trained: Trained) -> None:
    """They carry no_delete; the work generator removes them when nothing needs them."""
    for file in trained.files():
        path = trained.project.tree.download_path(str(file["name"]))
        assert path.exists() == (file["state"] != FileState.DELETED), path


def test_boinc_s_tables_are_defined_as_before(trained: Trained) -> None:
    assert trained.project.boinc_table_definitions() == trained.definitions_before
