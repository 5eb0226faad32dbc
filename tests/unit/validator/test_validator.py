"""The validator daemon on a real database: verdicts, grants, late results, storage faults, repetition."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from boinc_project import credit, daemon_start, database
from boinc_project.contract.update import read_update, update_types
from boinc_project.daemon import Options
from boinc_project.gt_tables import gt_fingerprint, gt_microtask
from boinc_project.states import AssimilateState, FileDeleteState, Outcome, ServerState, ValidateState
from tests.databases import REPEATED
from tests.tiny_project import TinyProject, tiny_project
from validator import books, evidence
from validator.__main__ import Rules, Validator, main
from validator.agreement import distance

pytestmark = pytest.mark.usefixtures("each_database")

VALID, INVALID, INCONCLUSIVE = ValidateState.VALID, ValidateState.INVALID, ValidateState.INCONCLUSIVE


@pytest.fixture
def project() -> Iterator[TinyProject]:
    with tiny_project() as made:
        yield made


@pytest.fixture
def pair(project: TinyProject) -> list[dict[str, Any]]:
    """The two unsent results of one workunit; the job's other workunit is left unsent."""
    results = project.issue()
    return [result for result in results if result["workunitid"] == results[0]["workunitid"]]


def judge(project: TinyProject, **fields: Any) -> Validator:
    project.transitioner.run_once()
    validator = project.validator(**fields)
    validator.one_pass()
    return validator


def states(project: TinyProject, unit: int) -> list[tuple[int, int]]:
    """(outcome, validate_state) of the workunit's results that are over."""
    rows = project.rows(database.result, workunitid=unit, server_state=int(ServerState.OVER))
    return [(row["outcome"], row["validate_state"]) for row in rows]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("gone", [False, True])
def test_a_chain_of_copies_that_come_one_by_one_has_one_verdict_in_all_orders(
    project: TinyProject, order: tuple[int, ...], gone: bool
) -> None:
    """O27: A~B~C, and A is farther than the tolerance from C. `gone`: the files of what was judged are deleted."""
    unit = project.issue()[0]["workunitid"]
    project.change(database.workunit, unit, target_nresults=3, transition_time=0)
    project.transitioner.run_once()
    copies, row = project.rows(database.result, workunitid=unit), unit_row(project, unit)
    tolerance = project.job.config.workunit.tolerance
    step = 0.9 * tolerance * 1e-3 / apart(project, row, 1e-3)
    for number in order:
        project.answer(copies[number], project.changed_update(row, lambda a, n=number: a * (1 + n * step)))
        judge(project)
        if gone and unit_row(project, unit)["canonical_resultid"]:
            for copy in project.rows(database.result, workunitid=unit, validate_state=int(VALID)):
                project.upload_path(copy).unlink(missing_ok=True)
    assert unit_row(project, unit)["canonical_resultid"]
    assert states(project, unit) == [(Outcome.SUCCESS, VALID)] * 3


def apart(project: TinyProject, unit: dict[str, Any], change: float) -> float:
    """How far the honest update is from itself times 1 + change."""
    microtask = project.microtask_of(unit["name"])
    types = update_types(project.job.folder.gradient_graph, microtask.mode, microtask.steps)
    honest, changed = (
        read_update(data, types, microtask.codec, microtask.digest()).tensors
        for data in (project.honest_update(unit), project.changed_update(unit, lambda a: a * (1 + change)))
    )
    return distance(honest, changed)


def unit_row(project: TinyProject, unit: int) -> dict[str, Any]:
    return project.rows(database.workunit, id=unit)[0]


def totals(project: TinyProject) -> dict[str, float]:
    found = {f"user {row['id']}": row["total_credit"] for row in project.rows(database.user)}
    return {**found, **{f"host {row['id']}": row["total_credit"] for row in project.rows(database.host)}}


def test_an_agreeing_pair_is_valid_credited_alike_and_handed_to_the_assimilator(
    project: TinyProject, pair: list[dict[str, Any]]
) -> None:
    for result in pair:
        project.answer(result)
    judge(project)
    unit = unit_row(project, pair[0]["workunitid"])
    (task,) = project.rows(gt_microtask, workunit_name=unit["name"])
    expected = credit.credit_of_flops(task["flops"])
    results = project.rows(database.result, workunitid=unit["id"])
    assert [(r["validate_state"], r["granted_credit"]) for r in results] == [(VALID, expected)] * 2
    assert (unit["need_validate"], unit["assimilate_state"]) == (0, AssimilateState.READY)
    assert unit["canonical_resultid"] in {r["id"] for r in pair} and unit["canonical_credit"] == expected
    assert len(task["canonical_sha256"]) == 64
    assert totals(project) == {f"{kind} {n}": pytest.approx(expected) for kind in ("user", "host") for n in (1, 2)}
    for version in project.rows(database.host_app_version):
        assert (version["consecutive_valid"], version["max_jobs_per_day"]) == (4, 51)
        assert (version["et_n"], version["turnaround_n"]) == (1, 1)
        assert version["et_avg"] == pytest.approx(30.0 / unit["rsc_fpops_est"])
        assert version["turnaround_avg"] == pytest.approx(60.0, abs=2)
    for host in project.rows(database.host):
        assert host["avg_turnaround"] == pytest.approx(60.0, abs=2)
        assert host["expavg_credit"] > 0


def test_a_second_pass_and_a_second_validator_grant_nothing_more(
    project: TinyProject, pair: list[dict[str, Any]]
) -> None:
    for result in pair:
        project.answer(result)
    judge(project)
    before = totals(project)
    project.change(database.workunit, pair[0]["workunitid"], need_validate=1)
    judge(project)
    assert totals(project) == before
    assert unit_row(project, pair[0]["workunitid"])["need_validate"] == 0


def test_a_crash_before_the_commit_grants_nothing_and_the_next_pass_grants_once(
    project: TinyProject, pair: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for result in pair:
        project.answer(result)
    project.transitioner.run_once()
    real, calls = books.update_rows, itertools.count()

    def dies_at_the_second(*arguments: Any) -> int:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(books, "update_rows", dies_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        project.validator().one_pass()
    assert set(totals(project).values()) == {0}
    monkeypatch.setattr(books, "update_rows", real)
    judge(project)
    assert len({round(total, 9) for total in totals(project).values()}) == 1
    assert [v["consecutive_valid"] for v in project.rows(database.host_app_version)] == [4, 4]


def test_a_result_reported_while_the_files_were_read_is_judged_with_the_others(
    project: TinyProject, pair: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    unit = pair[0]["workunitid"]
    project.change(database.workunit, unit, target_nresults=3, transition_time=0)
    project.transitioner.run_once()
    third = project.rows(database.result, workunitid=unit)[2]
    for result in pair:
        project.answer(result)
    project.transitioner.run_once()
    real, loads = evidence.load, []

    def load(*arguments: Any) -> Any:
        if len(loads) == 1:  # the third copy comes in between the read and the write
            project.answer(third)
        loads.append(arguments[1]["id"])
        return real(*arguments)

    monkeypatch.setattr(evidence, "load", load)
    project.validator().one_pass()
    assert states(project, unit) == [(Outcome.SUCCESS, VALID)] * 3
    assert {row["total_credit"] for row in project.rows(database.user)} == {unit_row(project, unit)["canonical_credit"]}


def test_a_late_judgement_does_not_undo_the_assimilation_and_the_gradient_is_applied_once(
    project: TinyProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = project.issue()
    unit = results[0]["workunitid"]
    project.change(database.workunit, unit, target_nresults=3, transition_time=0)
    project.transitioner.run_once()
    third = project.rows(database.result, workunitid=unit)[2]
    project.change(database.result, third["id"], server_state=int(ServerState.IN_PROGRESS), hostid=3, userid=3)
    for result in results:
        project.answer(result)
    judge(project)
    project.answer(third)
    project.transitioner.run_once()
    real = Validator._judge

    def paused(self: Validator, *arguments: Any) -> Any:
        if unit_row(project, unit)["assimilate_state"] == AssimilateState.READY:
            project.assimilator().one_pass()  # runs to its end while the validator holds its older picture
        return real(self, *arguments)

    monkeypatch.setattr(Validator, "_judge", paused)
    project.validator().one_pass()
    assert unit_row(project, unit)["assimilate_state"] == AssimilateState.DONE
    (row,) = [r for r in project.rows(database.result, workunitid=unit) if r["id"] == third["id"]]
    assert (row["validate_state"], row["granted_credit"]) == (VALID, unit_row(project, unit)["canonical_credit"])
    assert project.job.current_version == 1
    digests = project.version_digests()
    project.change(database.workunit, unit, assimilate_state=int(AssimilateState.READY))
    project.upload_path(results[0]).unlink()
    project.upload_path(results[1]).unlink()
    project.assimilator().one_pass()
    assert project.version_digests() == digests
    assert {row["state"] for row in project.rows(gt_microtask)} == {"folded"}


@pytest.mark.parametrize("each_database", REPEATED, indirect=True)
@pytest.mark.parametrize(
    ("copy", "kept", "expected", "quota"),
    [
        ("honest", True, VALID, 51),
        ("honest", False, ValidateState.TOO_LATE, 50),  # no fingerprint either: nobody is to blame
        ("reversed", True, INVALID, 49),
        ("reversed", False, ValidateState.TOO_LATE, 50),
        ("drifted", True, ValidateState.TOO_LATE, 50),
    ],
)
def test_a_late_copy_whose_canonical_file_we_deleted_is_judged_by_the_fingerprint_where_it_is_clear(
    project: TinyProject, pair: list[dict[str, Any]], copy: str, kept: bool, expected: ValidateState, quota: int
) -> None:
    unit = pair[0]["workunitid"]
    project.change(database.workunit, unit, target_nresults=3, transition_time=0)
    project.transitioner.run_once()
    third = project.rows(database.result, workunitid=unit)[2]
    project.change(database.result, third["id"], server_state=int(ServerState.IN_PROGRESS), hostid=3, userid=3)
    for result in pair:
        project.answer(result)
    judge(project)
    canonical = unit_row(project, unit)["canonical_resultid"]
    project.change(database.result, canonical, file_delete_state=int(FileDeleteState.DONE))
    (row,) = [r for r in pair if r["id"] == canonical]
    project.upload_path(row).unlink()
    if not kept:
        with project.db.transaction() as connection:
            connection.execute(gt_fingerprint.delete())
    change = {"reversed": np.negative, "drifted": lambda a: a * 1.01}.get(copy)
    project.answer(third, project.changed_update(unit_row(project, unit), change) if change else "honest")
    project.change(database.workunit, unit, need_validate=1)
    project.validator().one_pass()
    (late,) = [r for r in project.rows(database.result, workunitid=unit) if r["id"] == third["id"]]
    assert (late["outcome"], late["validate_state"]) == (Outcome.SUCCESS, expected)
    assert late["granted_credit"] == (unit_row(project, unit)["canonical_credit"] if expected == VALID else 0)
    (version,) = project.rows(database.host_app_version, host_id=3)
    assert version["max_jobs_per_day"] == quota
    assert unit_row(project, unit)["need_validate"] == 0


def test_a_single_empty_result_is_replaced_until_the_workunit_fails_and_training_is_told(project: TinyProject) -> None:
    results = project.issue()
    unit = results[0]["workunitid"]
    project.change(database.workunit, unit, min_quorum=1, target_nresults=1, max_error_results=2, transition_time=0)
    project.change(database.result, results[1]["id"], server_state=int(ServerState.OVER),
                   outcome=int(Outcome.DIDNT_NEED))  # fmt: skip
    for _ in range(3):
        (fresh, *_) = [
            r for r in project.rows(database.result, workunitid=unit) if r["server_state"] == ServerState.UNSENT
        ] or [None]
        if fresh is None:
            break
        project.answer(fresh, b"")
        judge(project)
        project.transitioner.run_once()
    row = unit_row(project, unit)
    assert row["error_mask"] != 0 and row["assimilate_state"] == AssimilateState.READY
    assert set(states(project, unit)) == {(Outcome.VALIDATE_ERROR, INVALID), (Outcome.DIDNT_NEED, ValidateState.INIT)}
    project.assimilator().one_pass()
    (task,) = project.rows(gt_microtask, workunit_name=row["name"])
    assert task["state"] == "failed" and "too many error results" in task["note"]


def test_each_kind_of_broken_upload_is_an_error_with_its_own_reason(
    project: TinyProject, pair: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    unit = pair[0]["workunitid"]
    project.change(database.workunit, unit, target_nresults=6, max_success_results=9, transition_time=0)
    project.transitioner.run_once()
    missing, empty, half, flipped, folder, good = project.rows(database.result, workunitid=unit)
    honest = project.honest_update(unit_row(project, unit))
    project.answer(missing, None)
    project.answer(empty, b"")
    project.answer(half, honest[: len(honest) // 2])
    project.answer(flipped, honest[:-1] + bytes([honest[-1] ^ 1]))
    project.answer(folder, None)
    project.upload_path(folder).mkdir(parents=True)
    project.answer(good)
    judge(project)
    assert states(project, unit) == [(Outcome.VALIDATE_ERROR, INVALID)] * 5 + [(Outcome.SUCCESS, INCONCLUSIVE)]
    log = [line.message for line in caplog.records if "RESULT#" in line.message and "invalid" in line.message]
    reasons = ["missing_file", "empty", "truncated", "zstd", "not_a_file"]
    assert [reason for reason, line in zip(reasons, log, strict=True) if f"({reason})" in line] == reasons
    assert not any(record.exc_info for record in caplog.records)
    project.transitioner.run_once()
    unsent = project.rows(database.result, workunitid=unit, server_state=int(ServerState.UNSENT))
    assert unsent, "replacements are asked for"
    again = states(project, unit)
    judge(project)
    assert states(project, unit) == again, "one verdict only"
    quotas = [v["max_jobs_per_day"] for v in project.rows(database.host_app_version)]
    assert quotas == [49, 49, 49, 49, 49, 50]


@pytest.mark.parametrize("each_database", REPEATED, indirect=True)
@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38, 1e25])
def test_a_pair_of_identical_files_that_are_not_finite_is_invalid_twice(
    project: TinyProject, pair: list[dict[str, Any]], value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit = unit_row(project, pair[0]["workunitid"])
    monkeypatch.setattr("boinc_project.contract.update._check_finite", lambda *a: None)
    spoilt = project.changed_update(unit, lambda a: np.where(np.arange(a.size).reshape(a.shape) == 0, value, a))
    monkeypatch.undo()
    for result in pair:
        project.answer(result, spoilt)
    judge(project)
    assert states(project, unit["id"]) == [(Outcome.VALIDATE_ERROR, INVALID)] * 2
    project.transitioner.run_once()
    assert len(project.rows(database.result, workunitid=unit["id"], server_state=int(ServerState.UNSENT))) == 2
    project.assimilator().one_pass()
    assert project.job.current_version == 0 and len(project.version_digests()) == 1, "the model is as it was"


@pytest.mark.parametrize("value", [0.0, -0.5])
def test_an_update_of_one_number_is_refused_even_if_all_copies_agree(
    project: TinyProject, pair: list[dict[str, Any]], value: float
) -> None:
    unit = unit_row(project, pair[0]["workunitid"])
    zero = project.changed_update(unit, lambda array: np.full_like(array, value))
    for result in pair:
        project.answer(result, zero)
    judge(project)
    assert states(project, pair[0]["workunitid"]) == [(Outcome.VALIDATE_ERROR, INVALID)] * 2


@pytest.mark.parametrize(
    ("makers", "why"), [(((7, 70), (7, 71)), "one user"), (((7, 70), (7, 70)), "one host, one user")]
)
def test_one_user_with_two_copies_is_no_quorum_which_is_logged_and_the_honest_pair_wins(
    project: TinyProject,
    pair: list[dict[str, Any]],
    makers: tuple[tuple[int, int], ...],
    why: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    unit = pair[0]["workunitid"]
    wrong = project.changed_update(unit_row(project, unit), np.negative)
    for result, (user, host) in zip(pair, makers, strict=True):
        project.answer(result, wrong, user=user, host=host)
    with caplog.at_level("INFO", "validator"):
        judge(project)
    first, second = (f"[RESULT#{result['id']}]" for result in pair)
    assert f"no agreement among 2 copies; {second} is one vote with {first} ({why})" in caplog.text
    assert states(project, unit) == [(Outcome.SUCCESS, INCONCLUSIVE)] * 2
    for user, expected in ((8, None), (9, VALID)):
        project.transitioner.run_once()
        (fresh,) = project.rows(database.result, workunitid=unit, server_state=int(ServerState.UNSENT))
        project.answer(fresh, user=user)
        judge(project)
        assert bool(unit_row(project, unit)["canonical_resultid"]) == bool(expected)
    assert states(project, unit) == [(Outcome.SUCCESS, INVALID)] * 2 + [(Outcome.SUCCESS, VALID)] * 2


def test_a_lab_with_one_account_may_let_hosts_vote(project: TinyProject, pair: list[dict[str, Any]]) -> None:
    for result, host in zip(pair, (70, 71), strict=True):
        project.answer(result, user=7, host=host)
    judge(project, rules=Rules(one_vote_per_user=False))
    assert states(project, pair[0]["workunitid"]) == [(Outcome.SUCCESS, VALID)] * 2


@pytest.mark.parametrize(
    ("options", "said"),
    [((), "One vote per user"), (("--votes", "host"), "One vote per HOST: copies of one account check each other")],
)
def test_whose_copies_count_apart_is_said_at_the_start(
    project: TinyProject, options: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.chdir(project.tree.project_dir)
    monkeypatch.setattr(daemon_start, "set_up_log", lambda level: None)
    with caplog.at_level("INFO", "validator"):
        assert main(["--app", "gradient", "--one_pass", *options]) == 0
    assert [record.message for record in caplog.records if record.message.startswith("One vote")] == [said]


NONSENSE = [-5.0, 0.0, 1e12, 1e300]


@pytest.mark.parametrize("elapsed", NONSENSE)
def test_nonsense_times_change_neither_verdict_nor_credit_and_leave_finite_totals(
    project: TinyProject, pair: list[dict[str, Any]], elapsed: float
) -> None:
    now = 2_000_000_000
    project.answer(pair[0], elapsed_time=elapsed, received_time=10, sent_time=now)
    project.answer(pair[1])
    judge(project)
    unit = unit_row(project, pair[0]["workunitid"])
    assert states(project, unit["id"]) == [(Outcome.SUCCESS, VALID)] * 2
    assert {r["granted_credit"] for r in project.rows(database.result, workunitid=unit["id"])} == {
        unit["canonical_credit"]
    }
    for table in (database.user, database.host, database.host_app_version):
        for row in project.rows(table):
            assert all(math.isfinite(v) and v >= 0 for k, v in row.items() if isinstance(v, float) and k != "timezone")


def test_storage_that_is_away_judges_nobody_and_everything_is_judged_when_it_is_back(
    project: TinyProject, pair: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    for result in pair:
        project.answer(result)
    project.transitioner.run_once()
    upload = project.tree.config.upload_dir
    upload.rename(upload.with_name("away"))
    now = [1000.0]
    validator = project.validator(clock=lambda: now[0])
    validator.one_pass()
    validator.one_pass()
    unit = pair[0]["workunitid"]
    assert states(project, unit) == [(Outcome.SUCCESS, ValidateState.INIT)] * 2
    assert unit_row(project, unit)["need_validate"] == 1
    warnings = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == 1 and str(upload) in warnings[0]
    upload.with_name("away").rename(upload)
    now[0] += 100
    validator.one_pass()
    assert states(project, unit) == [(Outcome.SUCCESS, VALID)] * 2


@pytest.mark.parametrize("each_database", REPEATED, indirect=True)
@pytest.mark.parametrize("fault", [PermissionError(13, "Permission denied"), OSError(5, "Input/output error"),
                                   OSError(116, "Stale file handle")], ids=["EACCES", "EIO", "ESTALE"])  # fmt: skip
def test_a_file_that_storage_cannot_give_is_not_the_volunteer_s_fault(
    project: TinyProject, pair: list[dict[str, Any]], fault: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    for result in pair:
        project.answer(result)
    real = os.open

    def opened(path: Any, *arguments: Any, **options: Any) -> int:
        if path == project.upload_path(pair[1]):
            raise fault
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", opened)
    judge(project)
    assert states(project, pair[0]["workunitid"]) == [(Outcome.SUCCESS, ValidateState.INIT)] * 2


def test_a_fault_of_ours_parks_one_workunit_after_three_tries_and_leaves_the_others_alone(
    project: TinyProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = project.issue()
    bad = results[0]["workunitid"]
    for result in results:
        project.answer(result)
    project.transitioner.run_once()
    real, tries = evidence.pair_distances, []

    def distances(updates: dict[int, Any]) -> Any:
        if any(r["id"] in updates for r in results if r["workunitid"] == bad):
            tries.append(1)
            raise ZeroDivisionError("a bug")
        return real(updates)

    monkeypatch.setattr(evidence, "pair_distances", distances)
    now = [1000.0]
    validator = project.validator(clock=lambda: now[0])
    for _ in range(6):
        validator.one_pass()
        now[0] += 1000
    assert len(tries) == 3
    assert unit_row(project, bad)["need_validate"] == 1
    (other,) = {r["workunitid"] for r in results} - {bad}
    assert unit_row(project, other)["canonical_resultid"]


def test_a_dry_run_changes_nothing(project: TinyProject, pair: list[dict[str, Any]]) -> None:
    for result in pair:
        project.answer(result)
    project.transitioner.run_once()
    before = [project.rows(table) for table in (database.workunit, database.result, database.host, database.user)]
    project.validator(options=Options(one_pass=True, dry_run=True)).one_pass()
    assert before == [project.rows(t) for t in (database.workunit, database.result, database.host, database.user)]


def test_instances_with_mod_share_the_workunits(project: TinyProject) -> None:
    for result in project.issue():
        project.answer(result)
    project.transitioner.run_once()
    ids = [row["id"] for row in project.rows(database.workunit)]
    project.validator(options=Options(one_pass=True, mod=(2, 0))).one_pass()
    assert [bool(unit_row(project, i)["canonical_resultid"]) for i in ids] == [i % 2 == 0 for i in ids]
    project.validator(options=Options(one_pass=True, mod=(2, 1))).one_pass()
    assert all(unit_row(project, i)["canonical_resultid"] for i in ids)


def test_a_workunit_of_another_program_is_left_alone(
    project: TinyProject, pair: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    unit = pair[0]["workunitid"]
    project.change(database.workunit, unit, name="foreign", need_validate=1)
    validator = project.validator()
    validator.one_pass()
    validator.one_pass()
    assert sum("not one of our microtasks" in r.message for r in caplog.records) == 1
    assert unit_row(project, unit)["need_validate"] == 1


def test_the_validator_needs_no_more_rights_than_to_read_uploads(
    project: TinyProject, pair: list[dict[str, Any]]
) -> None:
    for result in pair:
        project.answer(result)
        os.chmod(project.upload_path(result), 0o444)
    judge(project)
    assert states(project, pair[0]["workunitid"]) == [(Outcome.SUCCESS, VALID)] * 2
