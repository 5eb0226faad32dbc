"""The books of credit and trust: the arithmetic of verdicts, and what of it reaches the database."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from boinc_project import database
from boinc_project.credit import MAX_GRANTED_CREDIT, claimed_flops, credit_of_flops, credit_of_runtimes
from boinc_project.gt_tables import gt_microtask, gt_trust
from boinc_project.rows import read_rows, update_rows
from boinc_project.states import Outcome, ValidateState
from tests.tiny_project import TinyProject, tiny_project
from validator.__main__ import Rules
from validator.books import Books, Judged, Policy, Table, generalized_version_id
from validator.decision import ResultChange

NOW = 1_800_000_000.0
VALID = ResultChange(ValidateState.VALID)
FAULTY = ResultChange(ValidateState.INVALID, Outcome.VALIDATE_ERROR)
DIFFERING = ResultChange(ValidateState.INVALID, differs=True)
UNIT = {"id": 1, "target_nresults": 2, "rsc_fpops_est": 1e10}


def table(source: sa.Table, *key: str, **rows: dict[str, Any]) -> Table:
    made = {tuple(row[name] for name in key): row for row in rows.values()}
    return Table(source, key, made)


def books(**policy: Any) -> Books:
    """One host of one user in one team, with app version 7."""
    credit = {"total_credit": 100.0, "expavg_credit": 10.0, "expavg_time": NOW - 3600}
    version = database.new_row(
        database.host_app_version, host_id=3, app_version_id=7, max_jobs_per_day=20, consecutive_valid=5
    )
    return Books(
        policy=Policy(**policy),
        now=NOW,
        hosts=table(database.host, "id", a={"id": 3, "userid": 2, "avg_turnaround": 100.0, **credit}),
        host_versions=table(database.host_app_version, "host_id", "app_version_id", a=version),
        users=table(database.user, "id", a={"id": 2, "teamid": 9, **credit}),
        teams=table(database.team, "id", a={"id": 9, **credit}),
        by_user=table(database.credit_user, "userid", "appid", "credit_type"),
        by_team=table(database.credit_team, "teamid", "appid", "credit_type"),
        app_versions=table(
            database.app_version,
            "id",
            a={"id": 7, "pfc_n": 0.0, "pfc_avg": 0.0, "expavg_credit": 0.0, "expavg_time": 0.0},
        ),
        trust=table(gt_trust, "host_id", "kind"),
    )


def judged(change: ResultChange = VALID, unit: dict[str, Any] | None = None, **columns: Any) -> Judged:
    row = {
        "id": 11, "appid": 1, "hostid": 3, "userid": 2, "teamid": 9, "app_version_id": 7, "sent_time": NOW - 600,
        "received_time": NOW - 10, "elapsed_time": 5.0, "cpu_time": 4.0, "flops_estimate": 4e9, **columns,
    }  # fmt: skip
    return Judged({**UNIT, **(unit or {})}, row, change, 2.5, "gradient:abc")


def kept(made: Books, name: str = "host_versions") -> dict[str, Any]:
    (row,) = getattr(made, name).rows.values()
    return dict(row)


def test_a_valid_result_is_counted_in_all_the_books_that_boinc_keeps() -> None:
    made = books()
    made.enter(judged())
    assert [kept(made, name)["total_credit"] for name in ("hosts", "users", "teams")] == [102.5] * 3
    assert all(kept(made, name)["expavg_time"] == NOW for name in ("hosts", "users", "teams", "app_versions"))
    assert kept(made, "hosts")["avg_turnaround"] == pytest.approx(0.7 * 100 + 0.3 * 590)
    version = kept(made)
    assert (version["max_jobs_per_day"], version["consecutive_valid"]) == (21, 6)
    assert (version["pfc_n"], version["pfc_avg"]) == (1, pytest.approx(4e9 * 5 / 1e10))
    assert (version["et_n"], version["et_avg"]) == (1, pytest.approx(5 / 1e10))
    assert (version["turnaround_n"], version["turnaround_avg"]) == (1, pytest.approx(590))
    assert (kept(made, "app_versions")["pfc_n"], kept(made, "app_versions")["pfc_avg"]) == (1, pytest.approx(2.0))
    assert kept(made, "app_versions")["expavg_credit"] > 0
    trust = kept(made, "trust")
    assert (trust["valid"], trust["consecutive_valid"], trust["judge_time"]) == (1, 1, NOW)
    assert not made.by_user.rows and not made.by_team.rows


def test_several_results_of_a_host_in_one_batch_are_as_good_as_one_after_the_other() -> None:
    together, apart = books(), books()
    for number in range(5):
        together.enter(judged(id=number, elapsed_time=2.0 + number))
        apart.enter(judged(id=number, elapsed_time=2.0 + number))
        for name in ("hosts", "host_versions", "users", "teams", "app_versions", "trust"):
            old = getattr(apart, name)
            setattr(apart, name, Table(old.table, old.key, {key: dict(row) for key, row in old.rows.items()}))
    for name in ("hosts", "host_versions", "users", "teams", "app_versions", "trust"):
        assert getattr(together, name).rows == getattr(apart, name).rows
    assert kept(together, "users")["total_credit"] == pytest.approx(112.5)


def test_a_lone_unreplicated_result_earns_no_streak() -> None:
    made = books(replicated_app=True)
    made.enter(judged(unit={"target_nresults": 1}))
    assert (kept(made)["consecutive_valid"], kept(made)["max_jobs_per_day"]) == (5, 21)
    made.enter(judged(unit={"target_nresults": 2}))
    assert kept(made)["consecutive_valid"] == 6


@pytest.mark.parametrize("quota, before, after", [(0, 20, 19), (20, 20, 20), (500, 20, 20), (10, 20, 19), (0, 0, 0)])
def test_a_faulty_result_ends_the_streak_and_lowers_the_quota_to_the_projects_at_most(
    quota: int, before: int, after: int
) -> None:
    made = books(daily_result_quota=quota)
    made.host_versions.rows[3, 7]["max_jobs_per_day"] = before
    made.enter(judged(FAULTY))
    assert (kept(made)["consecutive_valid"], kept(made)["max_jobs_per_day"]) == (0, after)
    assert kept(made, "users")["total_credit"] == 100.0
    assert (kept(made, "trust")["faulty"], kept(made, "trust")["consecutive_valid"]) == (1, 0)


def test_an_honest_disagreement_earns_nothing_and_ruins_nobody() -> None:
    made = books()
    made.enter(judged())
    before = kept(made)
    made.enter(judged(DIFFERING, id=12))
    assert kept(made) == before
    assert kept(made, "users")["total_credit"] == 102.5
    trust = kept(made, "trust")
    assert (trust["valid"], trust["differing"], trust["faulty"], trust["bad"]) == (1, 1, 0, 0)
    assert (trust["good"], trust["unlike"]) == (1.0, 1.0)
    assert trust["consecutive_valid"] == 0, "it is not believed alone until others have agreed with it again"


@pytest.mark.parametrize("state", [ValidateState.INCONCLUSIVE, ValidateState.TOO_LATE])
def test_an_undecided_or_late_result_is_counted_nowhere(state: ValidateState) -> None:
    made = books()
    made.enter(judged(ResultChange(state)))
    assert not made.trust.rows and kept(made)["consecutive_valid"] == 5


NONSENSE = [(-1e12, 100), (1e9, -5), (4.3e19, 60), (math.nan, 60), (1e12, 0), (1e12, 1e12), (1e9, 60), (math.inf, 3)]


@pytest.mark.parametrize("flops, elapsed", NONSENSE)
def test_nonsense_claims_leave_every_number_finite_and_not_negative(flops: float, elapsed: float) -> None:
    made = books(credit_by_app=True)
    made.enter(judged(flops_estimate=flops, elapsed_time=elapsed, cpu_time=-1.0))
    for name in ("hosts", "host_versions", "users", "teams", "by_user", "by_team", "app_versions", "trust"):
        for value in kept(made, name).values():
            assert isinstance(value, str) or (math.isfinite(value) and value >= 0)
    assert kept(made, "users")["total_credit"] == 102.5


@pytest.mark.parametrize("flops", [1e9, 0.0, -1.0])
def test_an_unknown_speed_makes_an_outlier_that_enters_no_statistics(flops: float) -> None:
    made = books()
    made.enter(judged(flops_estimate=flops))
    assert made.outliers == {11}
    assert (kept(made)["pfc_n"], kept(made)["et_n"], kept(made, "app_versions")["pfc_n"]) == (0, 0, 0)
    assert kept(made)["consecutive_valid"] == 6


def test_an_absurd_ratio_is_not_averaged_but_the_runtime_is() -> None:
    made = books()
    made.enter(judged(flops_estimate=4e15))
    assert (kept(made)["pfc_n"], kept(made)["et_n"], kept(made, "app_versions")["pfc_n"]) == (0, 1, 0)


def test_a_missing_host_is_no_obstacle_and_the_results_user_is_credited() -> None:
    made = books()
    made.hosts.rows.clear()
    made.host_versions.rows.clear()
    made.enter(judged())
    assert kept(made, "users")["total_credit"] == 102.5 and not made.host_versions.rows


def test_a_merged_hosts_results_are_credited_to_their_own_user() -> None:
    made = books()
    made.hosts.rows[(3,)]["userid"] = 0  # BOINC's mark of a host that another has replaced
    made.enter(judged())
    assert kept(made, "users")["total_credit"] == 102.5


def test_a_missing_user_or_team_leaves_the_others_credited() -> None:
    made = books()
    made.teams.rows.clear()
    made.enter(judged())
    assert kept(made, "users")["total_credit"] == 102.5
    made.users.rows.clear()
    made.enter(judged(id=12))
    assert kept(made, "hosts")["total_credit"] == 105.0


def test_a_missing_host_version_is_made_like_boincs_own_daemons_do() -> None:
    made = books()
    made.host_versions = Table(database.host_app_version, ("host_id", "app_version_id"), {})
    made.enter(judged(app_version_id=-3))
    version = kept(made)
    assert version["app_version_id"] == generalized_version_id({"appid": 1, "app_version_id": -3}) == 1_000_003
    assert (version["consecutive_valid"], version["max_jobs_per_day"], version["et_n"]) == (1, 1, 1)


def test_credit_by_app_is_kept_for_user_and_team_even_without_team() -> None:
    made = books(credit_by_app=True)
    for number, team in enumerate((0, 0, 9)):
        made.enter(judged(id=number, teamid=team))
    assert kept(made, "by_user")["njobs"] == 3 and kept(made, "by_user")["total"] == 7.5
    assert {key[0]: row["total"] for key, row in made.by_team.rows.items()} == {0: 5.0, 9: 2.5}


# On databases.


@pytest.fixture
def project(each_database: str) -> Iterator[TinyProject]:
    with tiny_project() as made:
        yield made


def finished_pair(project: TinyProject, **columns: Any) -> list[dict[str, Any]]:
    results = project.issue()
    pair = [result for result in results if result["workunitid"] == results[0]["workunitid"]]
    for result in pair:
        project.answer(result, **columns)
    project.transitioner.run_once()
    return pair


def add_team(project: TinyProject) -> None:
    row = database.new_row(database.team, id=4, create_time=1, userid=1, name="A & B", type=0)
    with project.db.transaction() as connection:
        connection.execute(database.team.insert(), row)
        connection.execute(sa.update(database.user).values(teamid=4))


def test_credit_reaches_host_user_team_and_the_tables_by_app(project: TinyProject) -> None:
    pair = finished_pair(project, teamid=4)
    add_team(project)
    project.validator(rules=Rules(books=Policy(credit_by_app=True))).one_pass()
    (task,) = project.rows(gt_microtask, workunit_name=project.unit_of(pair[0])["name"])
    credit = credit_of_flops(task["flops"])
    assert [row["total_credit"] for row in project.rows(database.user)] == pytest.approx([credit] * 2)
    assert [row["total_credit"] for row in project.rows(database.team)] == pytest.approx([2 * credit])
    assert [(row["njobs"], row["total"]) for row in project.rows(database.credit_user)] == [
        (1, pytest.approx(credit))
    ] * 2
    assert [(r["teamid"], r["njobs"]) for r in project.rows(database.credit_team)] == [(4, 2)]
    assert [(row["valid"], row["faulty"]) for row in project.rows(gt_trust)] == [(1, 0)] * 2
    (version,) = project.rows(database.app_version)
    assert version["expavg_credit"] > 0


def test_credit_from_runtime_follows_the_claims_and_is_capped(project: TinyProject) -> None:
    pair = finished_pair(project)
    bound = project.unit_of(pair[0])["rsc_fpops_bound"]
    rules = Rules(credit_from_runtime=True, max_granted_credit=MAX_GRANTED_CREDIT)
    project.validator(rules=rules).one_pass()
    expected = credit_of_runtimes([claimed_flops(2e9, 30.0)] * 2, bound, MAX_GRANTED_CREDIT)
    granted = [row["granted_credit"] for row in project.rows(database.result, workunitid=pair[0]["workunitid"])]
    assert granted == pytest.approx([expected] * 2) and expected > 0


def test_rows_of_the_books_that_are_missing_hinder_no_verdict(project: TinyProject) -> None:
    pair = finished_pair(project)
    with project.db.transaction() as connection:
        connection.execute(sa.delete(database.host).where(database.host.c.id == 1))
        connection.execute(sa.delete(database.user).where(database.user.c.id == 2))
        connection.execute(sa.delete(database.host_app_version))
    project.validator().one_pass()
    rows = project.rows(database.result, workunitid=pair[0]["workunitid"])
    assert {row["validate_state"] for row in rows} == {ValidateState.VALID}
    assert [row["host_id"] for row in project.rows(database.host_app_version)] == [2]


def test_many_rows_are_updated_each_with_values_of_its_own(project: TinyProject) -> None:
    now = int(time.time())
    rows = [database.new_row(database.host, id=n, create_time=now, userid=n) for n in range(1, 451)]
    with project.db.transaction() as connection:
        connection.execute(database.host.insert(), rows)
        changes: dict[Any, Any] = {
            (n,): {"total_credit": n / 7} if n % 3 else {"domain_name": f"h'{n}\\é", "userid": 1} for n in range(1, 451)
        }
        assert update_rows(connection, database.host, ("id",), changes) == 450
        assert update_rows(connection, database.host, ("id",), {(451,): {"userid": 1}, (1,): {}}) == 0
        found = read_rows(connection, database.host, ("id",), changes, ["id", "total_credit", "domain_name"], lock=True)
    assert list(found) == sorted(changes)
    assert all(row["total_credit"] == (int(key[0]) / 7 if int(key[0]) % 3 else 0) for key, row in found.items())
    assert found[(3,)]["domain_name"] == "h'3\\é" and not found[(4,)]["domain_name"]
