"""BOINC's own transitioner, file deleter and purger beside our daemons, at moments that the test chooses."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from click.testing import CliRunner

from boinc_project import database
from boinc_project.cli.main import main
from boinc_project.gt_tables import FileState, MicrotaskState, gt_file, gt_fingerprint, gt_ledger, gt_microtask
from boinc_project.states import AssimilateState, ErrorMask, FileDeleteState, Outcome, ServerState, ValidateState
from tests.live_project import LiveProject, wait_for
from tests.private_job import PATIENCE_S, VERSION_NUMBERS, PrivateJob, private_job

pytestmark = pytest.mark.timeout(300)
AT_ONCE = 10  # workunits for two daemons

VALID = (ServerState.OVER, Outcome.SUCCESS, ValidateState.VALID)


@pytest.fixture(scope="module")
def job(project: LiveProject, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateJob]:
    """Workunits of one round, of which each test takes some."""
    with private_job(project, tmp_path_factory.mktemp("private"), slots=2 * AT_ONCE + 7) as made:
        yield made


def state_of(result: dict[str, Any]) -> tuple[int, int, int]:
    return result["server_state"], result["outcome"], result["validate_state"]


def credit_of(job: PrivateJob, table: sa.Table, identifier: int) -> float:
    (row,) = job.rows(table, id=identifier)
    return float(row["total_credit"])


# Two validators.


@pytest.mark.parametrize(
    "options",
    [(("--mod", "2", "0"), ("--mod", "2", "1")), ((), ())],
    ids=["share by mod", "without mod by mistake"],
)
def test_two_validators_at_once_judge_and_credit_each_workunit_once(
    job: PrivateJob, options: tuple[tuple[str, ...], ...]
) -> None:
    units = job.take(AT_ONCE)
    ids = [int(results[0]["workunitid"]) for results in units]
    before = {user: credit_of(job, database.user, user) for user in job.made.users}
    with job.daemons("gt_validator", *options) as logs:
        for results in units:
            for result in results:
                job.answer(result)
        job.wait_for_units(ids, assimilate_state=int(AssimilateState.READY))
        told = [re.findall(r"\[WU#(\d+) [^]]*\] canonical result", log.read_text()) for log in logs]
    assert sorted(int(each) for part in told for each in part) == sorted(ids)
    if options[0]:
        assert [{int(each) % 2 for each in part} for part in told] == [{n} for n in (0, 1) if told[n]]
    granted: Counter[int] = Counter()
    for unit in ids:
        for result in job.results_of(unit):
            assert state_of(result) == VALID
            granted[result["userid"]] += result["granted_credit"]
    for user, credit in granted.items():
        host = job.hosts[user]
        assert credit_of(job, database.user, user) - before[user] == pytest.approx(credit)
        assert credit_of(job, database.host, host) == pytest.approx(credit_of(job, database.user, user))


# A validator whose picture is older than what the assimilator and the file deleter have done since (O01).


def test_a_verdict_that_is_written_late_undoes_no_assimilation_and_nothing_is_applied_twice(
    job: PrivateJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    ((first, second),) = job.take(1)
    unit = int(first["workunitid"])
    third = job.one_more_copy(unit)
    for result in (first, second):
        job.answer(result)
    job.wait_for_units([unit], need_validate=1)
    job.validator().one_pass()
    job.answer(third)
    job.wait_for_units([unit], need_validate=1)
    late = job.validator()
    write = late._written
    done: list[bool] = []

    def paused(*arguments: Any) -> Any:
        if not done:
            done.append(job.assimilator().one_pass())
            job.wait_for_transitioner()
            assert job.unit(unit)["assimilate_state"] == AssimilateState.DONE
        return write(*arguments)

    monkeypatch.setattr(late, "_written", paused)
    late.one_pass()
    assert done == [True]
    assert job.unit(unit)["assimilate_state"] == AssimilateState.DONE
    assert [state_of(result) for result in job.results_of(unit)] == [VALID] * 3
    assert {result["granted_credit"] for result in job.results_of(unit)} == {job.unit(unit)["canonical_credit"]}
    ledger = job.rows(gt_ledger, workunit_name=job.unit(unit)["name"])
    job.change(database.workunit, unit, assimilate_state=int(AssimilateState.READY))
    done_again = job.live.run_program("gt_assimilator", "--app", job.made.mark, "--one_pass")
    assert done_again.returncode == 0 and "taken in already" in done_again.stderr, done_again.stderr
    assert job.rows(gt_ledger, workunit_name=job.unit(unit)["name"]) == ledger
    assert job.unit(unit)["assimilate_state"] == AssimilateState.DONE


@pytest.mark.parametrize(
    ("noticed_by", "fingerprint_kept"),
    [("the transitioner", True), ("the validator", True), ("the validator", False)],
    ids=["the transitioner", "the validator", "the validator without a fingerprint"],
)
def test_nobody_is_blamed_for_files_that_boinc_deleted_before_a_copy_came_that_was_over_its_deadline(
    job: PrivateJob, noticed_by: str, fingerprint_kept: bool
) -> None:
    """The transitioner marks it as too late; a validator that is faster compares it with the canonical fingerprint,
    without which it is too late as well."""
    ((first, second),) = job.take(1)
    unit = int(first["workunitid"])
    third = job.one_more_copy(unit)
    for result in (first, second):
        job.answer(result)
    job.wait_for_units([unit], need_validate=1)
    job.validator().one_pass()
    job.assimilator().one_pass()
    job.change(database.result, int(third["id"]), report_deadline=1)
    job.change(database.workunit, unit, transition_time=1)
    job.wait_for_units([unit], file_delete_state=int(FileDeleteState.DONE))
    wait_for(lambda: not job.upload_path(first).exists(), "BOINC's file deleter", patience_s=PATIENCE_S, pause_s=0.1)
    (timed_out,) = job.rows(database.result, id=third["id"])
    assert timed_out["outcome"] == Outcome.NO_REPLY
    (version,) = job.rows(database.host_app_version, host_id=third["hostid"], app_version_id=job.versions[0])
    if noticed_by == "the validator":  # it sees the copy before the transitioner can say that it came too late
        job.change(database.result, job.unit(unit)["canonical_resultid"], file_delete_state=int(FileDeleteState.INIT))
        job.change(database.workunit, unit, need_validate=1)
    if not fingerprint_kept:
        with job.db.transaction() as connection:
            kept = gt_fingerprint.c.workunit_name == job.unit(unit)["name"]
            assert connection.execute(sa.delete(gt_fingerprint).where(kept)).rowcount
    job.answer(third)
    job.wait_for_transitioner()
    job.validator().one_pass()
    (late,) = job.rows(database.result, id=third["id"])
    if noticed_by == "the validator" and fingerprint_kept:
        assert state_of(late) == VALID
        assert late["granted_credit"] == job.unit(unit)["canonical_credit"]
    else:
        assert state_of(late) == (ServerState.OVER, Outcome.SUCCESS, ValidateState.TOO_LATE)
        assert job.rows(database.host_app_version, host_id=third["hostid"], app_version_id=job.versions[0]) == [version]
    assert job.unit(unit)["need_validate"] == 0
    assert job.unit(unit)["assimilate_state"] == AssimilateState.DONE


# Results that are never good (O03).


def test_a_lone_empty_result_is_replaced_until_the_workunit_fails_and_training_goes_on(
    project: LiveProject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    limits = "min_quorum = 1\nmax_error_results = 1\nmax_success_results = 2\nmax_total_results = 3"
    with private_job(project, tmp_path_factory.mktemp("lone"), slots=1, workunit=limits) as job:
        (result,) = job.issue()
        unit = int(result["workunitid"])
        for copy in (0, 1):
            (result,) = [each for each in job.results_of(unit) if each["server_state"] == ServerState.UNSENT]
            assert result["name"].endswith(f"_{copy}")
            job.answer(result, b"")
            job.wait_for_units([unit], need_validate=1)
            job.validator().one_pass()
            (judged,) = job.rows(database.result, id=result["id"])
            assert state_of(judged) == (ServerState.OVER, Outcome.VALIDATE_ERROR, ValidateState.INVALID)
            assert job.unit(unit)["need_validate"] == 0
            job.wait_for_transitioner()
        failed = job.unit(unit)
        assert failed["error_mask"] == ErrorMask.TOO_MANY_ERROR_RESULTS
        assert failed["assimilate_state"] == AssimilateState.READY
        job.assimilator().one_pass()
        (task,) = job.rows(gt_microtask, job_id=job.job_id)
        assert (task["state"], task["attempt"]) == (MicrotaskState.FAILED, 0)
        assert "too many error results" in task["note"]
        (again,) = job.issue()
        job.answer(again)
        job.wait_for_units([int(again["workunitid"])], need_validate=1)
        job.validator().one_pass()
        job.assimilator().one_pass()
        assert job.job.current_version == 1


# Reports that the transitioner overlooks.


def test_a_workunit_that_boinc_s_transitioner_overlooked_is_brought_before_it_again(job: PrivateJob) -> None:
    """Two copies reported in one second, while it handles the first: it would look again in ten days."""
    ((first, second),) = job.take(1)
    unit = int(first["workunitid"])
    for result in (first, second):
        job.answer(result)
    job.wait_for_units([unit], need_validate=1)
    job.change(database.workunit, unit, need_validate=0, transition_time=int(time.time()) + 864_000)
    job.generator().one_pass()
    job.wait_for_units([unit], need_validate=1)
    job.validator().one_pass()
    assert [state_of(result) for result in job.results_of(unit)] == [VALID] * 2


# Who is credited.


def test_credit_goes_to_the_team_that_the_user_is_in_when_the_result_is_judged(job: PrivateJob) -> None:
    ((first, second),) = job.take(1)
    unit = int(first["workunitid"])
    team = job.made.team
    before = credit_of(job, database.team, team)
    stays, leaves = job.made.users[:2]
    for result in (first, second):
        job.answer(result)
    job.change(database.user, leaves, teamid=0)
    try:
        job.wait_for_units([unit], need_validate=1)
        job.validator().one_pass()
    finally:
        job.change(database.user, leaves, teamid=team)
    granted = {result["userid"]: result["granted_credit"] for result in job.results_of(unit)}
    assert set(granted) == {stays, leaves} and all(granted.values())
    assert {result["teamid"] for result in job.results_of(unit)} == {team}  # as it was when they were sent
    assert credit_of(job, database.team, team) - before == pytest.approx(granted[stays])


def test_copies_of_an_older_and_a_newer_app_version_check_each_other_and_each_version_keeps_its_statistics(
    job: PrivateJob,
) -> None:
    ((first, second),) = job.take(1)
    unit = int(first["workunitid"])

    def counted(result: int) -> tuple[float, float, float]:
        user, version = job.made.users[result], job.versions[result]
        table = database.host_app_version
        (row,) = job.rows(table, host_id=job.hosts[user], app_version_id=version)
        (whole,) = job.rows(database.app_version, id=version)
        return row["consecutive_valid"], row["et_n"], whole["pfc_n"]

    before = [counted(number) for number in (0, 1)]
    for number, result in enumerate((first, second)):
        job.answer(result, app_version_id=job.versions[number], app_version_num=VERSION_NUMBERS[number])
    job.wait_for_units([unit], need_validate=1)
    job.validator().one_pass()
    assert [state_of(result) for result in job.results_of(unit)] == [VALID] * 2
    for number in (0, 1):
        assert counted(number)[:2] == (before[number][0] + 1, before[number][1] + 1)
        assert counted(number)[2] > before[number][2]


# BOINC's purger.


def test_books_models_and_commands_need_no_workunit_that_boinc_has_purged(
    project: LiveProject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with private_job(project, tmp_path_factory.mktemp("purged")) as job:
        units = make_version(job)
        job.wait_for_units(units, file_delete_state=int(FileDeleteState.DONE))
        purged = project.run_program("db_purge", "--app", job.made.mark, "--one_pass", "--no_archive", "-d", "3")
        assert purged.returncode == 0, purged.stderr
        assert job.made.workunits() == [] and job.rows(database.result, workunitid=units[0]) == []
        assert "exactly" in boinc_train(job, "job", "replay", job.made.mark)
        for arguments in (["status"], ["job", "list"], ["job", "show", job.made.mark]):
            assert job.made.mark in boinc_train(job, *arguments)
        job.generator().one_pass()
        states = job.rows(gt_file, job_id=job.job_id, kind="state", version=0)
        assert {row["state"] for row in states} == {str(FileState.DELETED)}
        boinc_train(job, "job", "rollback", job.made.mark, "0")
        boinc_train(job, "job", "resume", job.made.mark)
        make_version(job)
        assert "exactly" in boinc_train(job, "job", "replay", job.made.mark)


def make_version(job: PrivateJob) -> list[int]:
    """An honest round; the ids of its workunits."""
    before = job.job.current_version
    results = job.issue()
    units = sorted({int(result["workunitid"]) for result in results})
    for result in results:
        job.answer(result)
    job.wait_for_units(units, need_validate=1)
    job.validator().one_pass()
    job.assimilator().one_pass()
    assert job.job.current_version == before + 1
    return units


def boinc_train(job: PrivateJob, *arguments: str) -> str:
    """What a command prints about the job's project, on one line."""
    done = CliRunner().invoke(main, [*arguments, "--project", str(job.live.folder)], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done.output.replace("\n", "")
