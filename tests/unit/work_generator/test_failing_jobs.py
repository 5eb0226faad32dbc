"""A job most of whose tasks fail stops before it has cost all volunteers their quota; one bad host stops nothing, nor
does one bad slot."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from boinc_project import database, store
from boinc_project.cli.main import main
from boinc_project.gt_tables import JobState, gt_microtask, gt_trust
from boinc_project.job_config import SupplySection
from boinc_project.states import (
    EXIT_ABORTED_BY_PROJECT,
    EXIT_ABORTED_VIA_GUI,
    ErrorMask,
    Outcome,
    ServerState,
    ValidateState,
)
from boinc_project.store import Ended
from tests.tiny_project import TinyProject, tiny_project
from tests.trusting import kind_of, trusted
from validator.__main__ import Rules
from validator.books import Policy
from work_generator.supply import Failure, failing

SECTION = SupplySection()
CPU, CARD, OWN = 1, 2, -1
both_databases = pytest.mark.usefixtures("each_database")


def hosts(*tallies: tuple[int, int], app_version: int = CPU, first: int = 1) -> list[Ended]:
    """What hosts returned, each half of two slots, or one task of either: (successes, errors) of each host."""
    halves = []
    for number, (successes, errors) in enumerate(tallies):
        for slot in (0, 1):
            part = ((successes + (number + slot) % 2) // 2, (errors + (number + slot) % 2) // 2)
            if any(part):
                halves.append(Ended(first + number, app_version, slot, *part))
    return halves


def slots(*tallies: tuple[int, int]) -> list[Ended]:
    """What became of the tasks of slots, each on a host of its own: (successes, errors) of each slot."""
    number, made = itertools.count(1), []
    for slot, (successes, errors) in enumerate(tallies):
        made += [Ended(next(number), CPU, slot, 1, 0) for _ in range(successes)]
        made += [Ended(next(number), CPU, slot, 0, 1) for _ in range(errors)]
    return made


@pytest.mark.parametrize(
    ("ended", "expected"),
    [
        (hosts(*[(0, 1)] * 10), Failure(10, 10, 10, CPU)),
        (hosts(*[(0, 1)] * 5, *[(1, 0)] * 5), Failure(5, 10, 5, CPU)),
        (hosts((0, 5), (0, 5)), Failure(10, 10, 2, CPU)),
        (hosts((0, 9), (0, 9), (0, 9), (1, 0)), Failure(27, 28, 3, CPU)),
        (hosts((2, 0), (3, 1), app_version=CPU) + hosts((0, 5), (0, 5), (0, 5), app_version=CARD, first=9),
         Failure(16, 21, 4, None)),
        (hosts((2, 0), (3, 0), app_version=CPU) + hosts((0, 5), (0, 5), (0, 5), app_version=CARD, first=9),
         Failure(15, 20, 3, CARD)),
        (hosts(*[(0, 1)] * 10, app_version=OWN), Failure(10, 10, 10, OWN)),
    ],
)  # fmt: skip
def test_a_job_fails_when_half_of_ten_tasks_did_on_several_hosts(ended: list[Ended], expected: Failure) -> None:
    for order in itertools.islice(itertools.permutations(ended), 100):
        assert failing(order, SECTION) == expected


@pytest.mark.parametrize(
    "ended",
    [
        [],
        hosts(*[(0, 1)] * 9),
        hosts(*[(0, 1)] * 4, *[(1, 0)] * 5),
        hosts(*[(0, 1)] * 9, *[(1, 0)] * 11),
        hosts((0, 1000)),
        hosts((0, 50), *[(1, 0)] * 20),
        hosts((0, 50), (1, 0)),
        hosts((0, 50), (1, 0), (1, 0)),
        hosts((0, 50), (0, 1), (1, 0)),
        hosts((0, 50), (9, 1), (10, 0)),
    ],
)
def test_a_job_goes_on_after_few_errors_or_those_of_one_bad_host(ended: list[Ended]) -> None:
    assert failing(ended, SECTION) is None


@pytest.mark.parametrize(
    "ended",
    [
        slots((0, 21), (2, 0)),
        slots((0, 1000), (2, 0)),
        slots((0, 1000)),
        slots((0, 21), (2, 1)),
        slots((0, 21), *[(2, 0)] * 7),
        slots((0, 21), (2, 1), *[(2, 0)] * 14),
        slots((0, 21), (0, 2), *[(2, 0)] * 6),
    ],
)
def test_a_job_goes_on_while_one_slot_fails_on_all_hosts(ended: list[Ended]) -> None:
    assert failing(ended, SECTION) is None


@pytest.mark.parametrize(
    ("ended", "errors"),
    [
        (slots((0, 5), (0, 5)), 10),
        (slots((0, 21), (2, 3), (0, 3)), 27),
        (slots(*[(0, 1)] * 10), 10),
        (slots(*[(0, 2)] * 4, *[(2, 0)] * 4), 8),
    ],
)
def test_a_job_fails_when_half_of_the_tasks_did_in_several_slots(ended: list[Ended], errors: int) -> None:
    found = failing(ended, SECTION)
    assert found is not None and (found.errors, found.tasks) == (errors, len(ended))


def test_number_and_share_are_the_admin_s() -> None:
    ended = hosts(*[(0, 1)] * 4, *[(1, 0)] * 6)
    assert failing(ended, SECTION) is None
    assert failing(ended, dataclasses.replace(SECTION, failing_share=0.4)) == Failure(4, 10, 4, CPU)
    assert failing(ended[:4], dataclasses.replace(SECTION, failing_after=4)) == Failure(4, 4, 4, CPU)
    assert failing(hosts(*[(0, 1)] * 1000), dataclasses.replace(SECTION, failing_after=0)) is None


@pytest.fixture
def project() -> Iterator[TinyProject]:
    with tiny_project() as made:
        yield made


CLIENT_ERROR: dict[str, Any] = {
    "outcome": int(Outcome.CLIENT_ERROR), "validate_state": int(ValidateState.INVALID), "exit_status": 12,
    "stderr_out": "cannot read shard",
}  # fmt: skip
UNREADABLE: dict[str, Any] = {"outcome": int(Outcome.VALIDATE_ERROR), "validate_state": int(ValidateState.INVALID)}
NO_REPLY: dict[str, Any] = {"outcome": int(Outcome.NO_REPLY)}


def issue(project: TinyProject) -> list[dict[str, Any]]:
    """Let generator and transitioner work; returns the results that BOINC's feeder would offer (DB_WORK_ITEM)."""
    found = project.issue()
    offered = {unit["id"] for unit in project.rows(database.workunit, error_mask=0, transitioner_flags=0)}
    return [result for result in found if result["workunitid"] in offered]


def fail_on(
    project: TinyProject, numbers: Iterator[int], columns: dict[str, Any] = CLIENT_ERROR, upload: bytes | None = None,
    after: Callable[[TinyProject], None] = lambda project: None,
) -> int:  # fmt: skip
    """Each task goes to the host of the next number, which ends it like this, until nothing is issued any more."""
    ended = 0
    while tasks := issue(project):
        for task in tasks:
            host = next(numbers)
            project.answer(task, upload, user=host, host=host, **columns)
            ended += 1
        after(project)
    return ended


def work(project: TinyProject) -> None:
    """What transitioner, validator and assimilator do with what came back."""
    project.transitioner.run_once()
    project.validator(rules=Rules(books=Policy(project.tree.config.daily_result_quota))).one_pass()
    project.transitioner.run_once()
    project.assimilator().one_pass()


def resume(project: TinyProject) -> None:
    done = CliRunner().invoke(main, ["job", "resume", "tiny", "--project", str(project.tree.project_dir)])
    assert done.exit_code == 0, done.output


def one_microtask_a_version() -> TinyProject:
    """Its only slot is no evidence by itself: it is hopeless after its last try."""
    return tiny_project(changes=(("microtasks_per_version = 2", "microtasks_per_version = 1"),))


MAKERS = pytest.mark.parametrize("make", [tiny_project, one_microtask_a_version])


@both_databases
@MAKERS
@pytest.mark.parametrize("columns", [CLIENT_ERROR, UNREADABLE])
def test_hosts_get_back_what_a_bad_batch_has_cost_them_of_their_quota(
    make: Callable[[], TinyProject], columns: dict[str, Any]
) -> None:
    with make() as project:
        quota = project.tree.config.daily_result_quota
        for host, left in ((1, quota), (2, quota - 1), (3, 1), (4, 0)):
            project.add_host(host, host)
            set_quota(project, host, left)
        fail_on(project, itertools.chain((2, 3, 2, 3, 4), itertools.count(1)), columns, after=work)
        assert project.job.state == JobState.FAILED
        kept = {row["host_id"]: row["max_jobs_per_day"] for row in project.rows(database.host_app_version)}
        assert (kept[1], kept[2], kept[3], kept[4]) == (quota, quota, 4, 0), "0 is the whole quota, to BOINC too"
        assert set(kept.values()) - {quota, 4, 0} == {51}


@both_databases
@MAKERS
def test_unreadable_uploads_of_a_bad_batch_do_not_stay_on_their_hosts_record(make: Callable[[], TinyProject]) -> None:
    with make() as project:
        kind, quota = kind_of(project), project.tree.config.daily_result_quota
        for host in (1, 2, 3):
            trusted(project, host, kind, good=5.0)
            set_quota(project, host, quota)
        with project.db.transaction() as connection:
            connection.execute(gt_trust.update().where(gt_trust.c.host_id == 1).values(bad=2.0, faulty=7))
            other = {"host_id": 2, "kind": "gradient:another", "bad": 1.0, "faulty": 1}
            connection.execute(gt_trust.insert(), other)
        # Host 4, which nobody knows, loses its quota with trust.
        fail_on(project, itertools.chain((1, 2, 3, 4, 3, 4, 3, 4, 3, 4), itertools.count(5)), {}, b"no update", work)
        assert project.job.state == JobState.FAILED
        rows = {row["host_id"]: row for row in project.rows(gt_trust, kind=kind)}
        assert len(rows) >= 6
        assert rows[1]["bad"] == pytest.approx(2, abs=1e-4) and rows[1]["faulty"] == 7
        assert {(row["bad"], row["faulty"]) for host, row in rows.items() if host > 1} == {(0, 0)}
        (untouched,) = project.rows(gt_trust, kind="gradient:another")
        assert (untouched["bad"], untouched["faulty"]) == (1, 1)
        kept = {row["host_id"]: row["max_jobs_per_day"] for row in project.rows(database.host_app_version)}
        assert (kept[1], kept[2], kept[3], kept[4]) == (quota,) * 4


def test_a_host_whose_quota_a_bad_batch_took_whole_gets_it_back_whole(project: TinyProject) -> None:
    quota = project.tree.config.daily_result_quota
    for host in (1, 2):
        project.add_host(host, host)
        set_quota(project, host, 1)
    _ten_errors(project, project.issue(), hosts=[1] * 10 + [2] * 9)
    project.generator().one_pass()
    assert project.job.state == JobState.FAILED
    kept = {row["host_id"]: row["max_jobs_per_day"] for row in project.rows(database.host_app_version)}
    assert kept == {1: quota, 2: 10}
    for _ in range(2):
        project.generator().one_pass()
    assert kept == {row["host_id"]: row["max_jobs_per_day"] for row in project.rows(database.host_app_version)}


@both_databases
@MAKERS
def test_a_crash_neither_loses_nor_doubles_what_hosts_get_back(
    make: Callable[[], TinyProject], monkeypatch: pytest.MonkeyPatch
) -> None:
    with make() as project:
        forgive, broken = store.forgive, [True]

        def crashing(*given: Any) -> None:
            forgive(*given)
            if broken:
                raise RuntimeError("the power went")

        monkeypatch.setattr(store, "forgive", crashing)
        with pytest.raises(RuntimeError, match="the power went"):
            fail_on(project, itertools.count(1), after=work)
        assert project.job.state == JobState.RUNNING
        assert {row["max_jobs_per_day"] for row in project.rows(database.host_app_version)} == {50}
        broken.clear()
        for _ in range(3):
            project.generator().one_pass()
        assert project.job.state == JobState.FAILED
        assert {row["max_jobs_per_day"] for row in project.rows(database.host_app_version)} == {51}


def set_quota(project: TinyProject, host: int, left: int) -> None:
    with project.db.transaction() as connection:
        kept = database.host_app_version
        connection.execute(kept.update().where(kept.c.host_id == host).values(max_jobs_per_day=left))


@both_databases
@pytest.mark.parametrize("columns", [CLIENT_ERROR, UNREADABLE])
def test_a_bad_batch_stops_the_job_and_resuming_goes_on_with_fresh_workunits(
    project: TinyProject, columns: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.CRITICAL):
        ended = fail_on(project, itertools.count(1), columns)
    assert 10 <= ended < 10 + 4, "a round's copies at most beyond the ten"
    assert project.job.state == JobState.FAILED
    note = project.job.note
    assert f"{ended} of {ended} tasks of version 0 failed on {ended} hosts" in note
    assert "all of them with app version 1.00 for x86_64-pc-linux-gnu" in note
    assert ("exit status 12 (cannot read shard)" in note) == (columns is CLIENT_ERROR)
    assert note in caplog.text
    assert issue(project) == []
    for unit in project.rows(database.workunit):
        assert unit["error_mask"] & int(ErrorMask.CANCELLED)
    assert {row["state"] for row in project.rows(gt_microtask)} == {"cancelled"}
    project.assimilator().one_pass()
    resume(project)
    project.make_version()
    assert project.job.state == JobState.RUNNING
    assert {row["attempt"] for row in project.rows(gt_microtask, state="folded")} == {1}


@both_databases
def test_one_host_that_fails_everything_does_not_stop_the_job(project: TinyProject) -> None:
    # max_error_results ends each workunit; the same slot is issued three times.
    ended = fail_on(project, itertools.repeat(7))
    assert ended > 10
    assert project.job.state == JobState.RUNNING or "failed 3 times" in project.job.note


@both_databases
@pytest.mark.parametrize(
    "columns",
    [
        NO_REPLY,
        CLIENT_ERROR | {"exit_status": 200},
        CLIENT_ERROR | {"exit_status": EXIT_ABORTED_BY_PROJECT},
        CLIENT_ERROR | {"exit_status": EXIT_ABORTED_VIA_GUI},
        {"outcome": int(Outcome.CLIENT_DETACHED)},
    ],
)
def test_tasks_that_timed_out_or_were_aborted_do_not_stop_the_job(
    project: TinyProject, columns: dict[str, Any]
) -> None:
    numbers = itertools.count(1)
    for _ in range(3):
        for task in project.issue():
            host = next(numbers)
            project.answer(task, None, user=host, host=host, **columns)
    assert next(numbers) > 10
    project.generator().one_pass()
    assert project.job.state == JobState.RUNNING


@both_databases
def test_copies_that_may_earn_credit_go_on_and_their_errors_are_not_held_against_a_resumed_job(
    project: TinyProject,
) -> None:
    first, second = sorted({int(task["workunitid"]) for task in project.issue()})
    busy, good = (project.rows(database.result, workunitid=unit)[0] for unit in (first, second))
    project.change(
        database.result, busy["id"], server_state=int(ServerState.IN_PROGRESS), hostid=99, userid=99, sent_time=1,
        report_deadline=2**31 - 1,
    )  # fmt: skip
    project.answer(good, user=98, host=98)
    assert fail_on(project, itertools.count(1)) < 10 + 4
    assert project.job.state == JobState.FAILED
    open_units = [unit["id"] for unit in project.rows(database.workunit, error_mask=0)]
    assert open_units == [first, second], "one has a copy in progress, the other a success"
    assert issue(project) == []
    resume(project)
    project.generator().one_pass()
    assert project.job.state == JobState.RUNNING
    project.make_version()
    assert not project.rows(database.workunit, id=second)[0]["error_mask"]


@both_databases
def test_the_app_version_that_alone_fails_is_named(project: TinyProject) -> None:
    with project.db.transaction() as connection:
        row = database.new_row(
            database.app_version, id=CARD, appid=project.appid, platformid=4, version_num=203, plan_class="opencl_x"
        )
        connection.execute(database.app_version.insert(), row)
    numbers = itertools.count(1)
    while tasks := issue(project):
        for task in tasks:
            host = next(numbers)
            card = host % 4 > 0
            columns = CLIENT_ERROR | {"app_version_id": CARD} if card else {"app_version_id": CPU}
            project.answer(task, None if card else "honest", user=host, host=host, **columns)
    assert project.job.state == JobState.FAILED
    name = next(row["name"] for row in project.rows(database.platform, id=4))
    assert f"all of them with app version 2.03 for {name} (opencl_x)" in project.job.note


@both_databases
@pytest.mark.parametrize("state", [JobState.PAUSED, JobState.FINISHED])
def test_a_job_that_stopped_otherwise_meanwhile_keeps_its_state(project: TinyProject, state: JobState) -> None:
    read = project.job
    with project.db.transaction() as connection:
        connection.exec_driver_sql(f"UPDATE gt_job SET state = '{state}', note = 'as it was'")
    project.generator()._fail(read, "too late")
    assert (project.job.state, project.job.note) == (state, "as it was")


def test_a_dry_run_only_says_that_the_job_would_stop(project: TinyProject, caplog: pytest.LogCaptureFixture) -> None:
    _ten_errors(project, project.issue())
    with caplog.at_level(logging.CRITICAL):
        project.generator(dry_run=True).one_pass()
    assert "10 of 10 tasks of version 0 failed" in caplog.text
    assert project.job.state == JobState.RUNNING


def _ten_errors(project: TinyProject, tasks: Sequence[dict[str, Any]], hosts: Sequence[int] = range(1, 11)) -> None:
    """Further results of the first and the last task's workunit, one error on each of ten or more hosts."""
    with project.db.transaction() as connection:
        for number, host in enumerate(hosts):
            task = tasks[-(number % 2)]
            row = {name: value for name, value in task.items() if name not in ("id", "mod_time")}
            row |= {"name": f"{task['name']}{number}", "server_state": int(ServerState.OVER), "hostid": host}
            row |= {"app_version_id": CPU} | CLIENT_ERROR
            connection.execute(database.result.insert(), row)


def not_numbers(project: TinyProject, task: dict[str, Any]) -> bytes:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("boinc_project.contract.update._check_finite", lambda *a: None)
        return project.changed_update(project.unit_of(task), lambda array: array * np.nan)


def cut_short(project: TinyProject, task: dict[str, Any]) -> bytes:
    return project.honest_update(project.unit_of(task))[:100]


@pytest.mark.parametrize("microtasks", [2, 4, 8, 16])
@pytest.mark.parametrize("upload", [None, not_numbers, cut_short])
def test_a_slot_that_always_fails_is_skipped_and_training_goes_on(
    microtasks: int, upload: Callable[[TinyProject, dict[str, Any]], bytes] | None, caplog: pytest.LogCaptureFixture
) -> None:
    key = "microtasks_per_version = "
    numbers = itertools.count(1)
    with (
        tiny_project(changes=((f"{key}2", f"{key}{microtasks}"),)) as project,
        caplog.at_level(logging.WARNING),
    ):
        while project.job.current_version == 0 and (tasks := issue(project)):
            slot_of = {row["workunit_name"]: row["slot"] for row in project.rows(gt_microtask)}
            for task in tasks:
                host = next(numbers)
                if slot_of[project.unit_of(task)["name"]] > 0:
                    project.answer(task, user=host, host=host)
                elif upload is None:
                    project.answer(task, None, user=host, host=host, **CLIENT_ERROR)
                else:
                    project.answer(task, upload(project, task), user=host, host=host)
            work(project)
        assert (project.job.state, project.job.current_version) == (JobState.RUNNING, 1)
        assert "version 1 lacks slot 0: every try has failed" in caplog.text
        assert not [record for record in caplog.records if record.levelno >= logging.CRITICAL]
        project.generator().one_pass()
        assert project.job.state == JobState.RUNNING
