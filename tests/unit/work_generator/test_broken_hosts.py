"""A host that fails everything gets one task a day until one succeeds; nobody else does, and nobody twice."""

from __future__ import annotations

import dataclasses
import io
import itertools
import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from rich.console import Console

from boinc_project import database
from boinc_project.cli.status import render
from boinc_project.gt_tables import JobState, MicrotaskState, gt_job, gt_microtask
from boinc_project.server.messages import HostInfo, ReportedResult, SchedulerRequest
from boinc_project.server.scheduler_service import INDEXES, SchedulerService
from boinc_project.states import EXIT_ABORTED_BY_PROJECT, EXIT_ABORTED_VIA_GUI, Outcome, ServerState
from boinc_project.supply_limits import BROKEN_AFTER
from tests.tiny_project import TinyProject, tiny_project
from work_generator.broken_hosts import is_broken

BAD, PROGRAM, OTHER_PROGRAM = 1, 1, 7
GOOD, ERROR, UNREADABLE = int(Outcome.SUCCESS), int(Outcome.CLIENT_ERROR), int(Outcome.VALIDATE_ERROR)
LINUX = "x86_64-pc-linux-gnu"
TRIES = 50
NUMBERS = itertools.count()
both_databases = pytest.mark.usefixtures("each_database")


@pytest.mark.parametrize(
    ("newest_first", "expected"),
    [
        ([ERROR] * 10, True),
        ([UNREADABLE] * 10, True),
        ([ERROR, UNREADABLE] * 5 + [GOOD], True),
        ([ERROR] * 9, False),
        ([ERROR] * 9 + [GOOD], False),
        ([GOOD] + [ERROR] * 50, False),
        ([], False),
    ],
)
def test_ten_errors_in_a_row_make_a_host_a_broken_one(newest_first: list[int], expected: bool) -> None:
    assert is_broken(newest_first) == expected


def with_quota(project: TinyProject, quota: int) -> TinyProject:
    """The project with this daily_result_quota."""
    project.tree.config = dataclasses.replace(project.tree.config, daily_result_quota=quota)
    return project


def set_quota(project: TinyProject, host: int, quota: int) -> None:
    kept = database.host_app_version
    with project.db.transaction() as connection:
        connection.execute(kept.update().where(kept.c.host_id == host).values(max_jobs_per_day=quota))


def quotas(project: TinyProject) -> dict[int, int]:
    return {row["host_id"]: row["max_jobs_per_day"] for row in project.rows(database.host_app_version)}


class Reporting:
    """Hosts that report to the embedded scheduler what they were sent."""

    def __init__(self, project: TinyProject) -> None:
        self.project = project
        self.service = SchedulerService(project.tree, project.db, project.transitioner)
        if project.db.is_sqlite:
            with project.db.transaction() as connection:
                for index in INDEXES:
                    connection.exec_driver_sql(index)

    def report(self, task: dict[str, Any], host: int, exit_status: int = 0) -> None:
        """The host was sent the task and reports it."""
        project, now = self.project, int(time.time())
        if not project.rows(database.host, id=host):
            project.add_host(host, host)
            set_quota(project, host, project.tree.config.daily_result_quota)
        if not exit_status:
            path = project.upload_path(task)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(project.honest_update(project.unit_of(task)))
        project.change(
            database.result, task["id"], server_state=int(ServerState.IN_PROGRESS), hostid=host, userid=host,
            sent_time=now - 60, report_deadline=now + 3600, app_version_id=PROGRAM, flops_estimate=2e9,
        )  # fmt: skip
        (row,) = project.rows(database.host, id=host)
        state = 3 if exit_status else 5
        result = ReportedResult(name=task["name"], client_state=state, exit_status=exit_status, elapsed_time=30.0)
        request = SchedulerRequest(
            authenticator=f"{host:032x}", hostid=host, rpc_seqno=row["rpc_seqno"] + 1, core_client_version=72005,
            platforms=(LINUX,), host=HostInfo(domain_name=f"h{host}", p_ncpus=4, p_fpops=2e9), results=(result,),
        )  # fmt: skip
        assert self.service.reply_to(request).acks == (task["name"],)


def unsent(project: TinyProject) -> Iterator[dict[str, Any]]:
    """What may be sent now, one task of each workunit."""
    seen = set()
    for task in project.rows(database.result, server_state=int(ServerState.UNSENT)):
        if task["workunitid"] not in seen:
            seen.add(task["workunitid"])
            yield task


def passes(project: TinyProject) -> None:
    """Generator and validator, started afresh."""
    project.generator().one_pass()
    project.transitioner.run_once()
    project.validator().one_pass()
    project.transitioner.run_once()


@both_databases
@pytest.mark.parametrize("quota", [8, 100, 10000])
def test_a_host_that_fails_everything_gets_one_task_a_day_until_one_succeeds(
    quota: int, caplog: pytest.LogCaptureFixture
) -> None:
    many = (("microtasks_per_version = 2", f"microtasks_per_version = {TRIES + 4}"),)
    with tiny_project(changes=many) as made, caplog.at_level(logging.WARNING, "work_generator"):
        project = with_quota(made, quota)
        hosts = Reporting(project)
        project.issue()
        for task in itertools.islice(unsent(project), TRIES):
            hosts.report(task, BAD, exit_status=12)
        assert quotas(project) == {BAD: max(1, quota - TRIES)}
        others = range(BAD + 1, BAD + 21)
        for host in others:
            task = next(t for t in unsent(project) if host % 2 or t["workunitid"] > TRIES - 10)
            hosts.report(task, host)
        before = quotas(project)
        assert {before[host] for host in others} == {quota}
        project.generator().one_pass()
        after = quotas(project)
        assert after == {**before, BAD: 1}
        said = [record.getMessage() for record in caplog.records if f"[HOST#{BAD}]" in record.getMessage()]
        assert len(said) == (quota > TRIES) and len(caplog.records) == len(said)
        for text in said:
            assert "app version 1.00 for x86_64-pc-linux-gnu" in text and "one task a day until one succeeds" in text
        for _ in range(3):
            passes(project)
        assert quotas(project)[BAD] == 1 and min(quotas(project)[host] for host in others) >= quota
        out = io.StringIO()
        Console(file=out, width=250).print(render(project.db))
        assert f"1: #{BAD}" in out.getvalue()
        for grown in (2, 4):
            hosts.report(next(task for task in unsent(project) if task["workunitid"] > TRIES), BAD)
            passes(project)
            assert quotas(project)[BAD] == grown
        assert len(caplog.records) == len(said)


@pytest.fixture
def project() -> Iterator[TinyProject]:
    with tiny_project() as made:
        made.add_host(BAD, BAD)
        made.issue()
        set_quota(made, BAD, made.tree.config.daily_result_quota - BROKEN_AFTER)
        yield made


def ended(project: TinyProject, outcomes: Sequence[int], **columns: Any) -> None:
    """Further results, ended like this on the bad host, the newest last."""
    task = project.rows(database.result)[0]
    with project.db.transaction() as connection:
        for outcome in outcomes:
            row = {name: value for name, value in task.items() if name not in ("id", "mod_time")}
            row |= {"name": f"{task['name']}_{next(NUMBERS)}", "outcome": outcome, "hostid": BAD}
            row |= {"server_state": int(ServerState.OVER), "app_version_id": PROGRAM, "exit_status": 0, **columns}
            connection.execute(database.result.insert(), row)


def limited(project: TinyProject, **options: Any) -> bool:
    project.generator(**options)._limit_broken_hosts()
    return quotas(project)[BAD] == 1


@both_databases
def test_only_errors_of_its_own_since_its_last_success_count(project: TinyProject) -> None:
    ended(project, [ERROR] * 30 + [GOOD] + [ERROR, UNREADABLE] * 4 + [ERROR])
    assert not limited(project)
    ended(project, [ERROR], app_version_id=OTHER_PROGRAM)
    for status in (200, EXIT_ABORTED_BY_PROJECT, EXIT_ABORTED_VIA_GUI):
        ended(project, [ERROR], exit_status=status)
    ended(project, [ERROR], hostid=BAD + 1)
    ended(project, [int(Outcome.NO_REPLY), int(Outcome.CLIENT_DETACHED)])
    ended(project, [ERROR], server_state=int(ServerState.IN_PROGRESS))
    assert not limited(project)
    ended(project, [ERROR], exit_status=12)
    assert limited(project)


@both_databases
def test_errors_that_a_failed_job_or_withdrawn_tasks_have_brought_do_not_count(project: TinyProject) -> None:
    ended(project, [ERROR] * 10)
    with project.db.transaction() as connection:
        connection.execute(gt_job.update().values(state=str(JobState.FAILED)))
    assert not limited(project)
    with project.db.transaction() as connection:
        connection.execute(gt_job.update().values(state=str(JobState.RUNNING)))
        connection.execute(gt_microtask.update().values(state=str(MicrotaskState.CANCELLED)))
    assert not limited(project)
    with project.db.transaction() as connection:
        connection.execute(gt_microtask.update().values(state=str(MicrotaskState.FAILED)))
    assert limited(project)


@both_databases
def test_a_volunteers_own_program_is_counted_by_its_number(project: TinyProject) -> None:
    with project.db.transaction() as connection:
        own = project.appid * 1_000_000 + 2
        connection.execute(database.host_app_version.update().values(app_version_id=own))
    ended(project, [ERROR] * 10, app_version_id=-3)
    assert not limited(project)
    ended(project, [ERROR] * 10, app_version_id=-2)
    assert limited(project)


def test_the_full_quota_that_an_admin_has_given_stays(project: TinyProject) -> None:
    ended(project, [ERROR] * 10)
    assert limited(project)
    full = project.tree.config.daily_result_quota
    set_quota(project, BAD, full)
    assert not limited(project)
    set_quota(project, BAD, full - BROKEN_AFTER + 1)
    assert not limited(project)


@pytest.mark.parametrize("quota", [0, 1, 8, 10])
def test_small_quotas_and_none_are_left_to_the_scheduler(project: TinyProject, quota: int) -> None:
    ended(project, [ERROR] * 10)
    set_quota(project, BAD, 2)
    assert not limited(with_quota(project, quota))


def test_a_dry_run_only_says_whom_it_would_limit(project: TinyProject, caplog: pytest.LogCaptureFixture) -> None:
    ended(project, [ERROR] * 10)
    with caplog.at_level(logging.WARNING):
        assert not limited(project, dry_run=True)
    assert f"[HOST#{BAD}]" in caplog.text and "would get one task a day" in caplog.text
