"""Transactions that lose against others, at whichever statement, are done again: nothing is lost or done twice.

Each test goes through all statements of its writing transactions and fails one of them, once, in every run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pymysql
import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError

from boinc_project import database, store
from boinc_project.cli.jobs import roll_back
from boinc_project.daemon import RetryLater
from boinc_project.gt_tables import JobState, gt_file, gt_job, gt_ledger, gt_round, gt_version
from tests.tiny_project import APP, TinyProject, exported, tiny_project
from work_generator.job import Job, JobError
from work_generator.publish import publish_job

pytestmark = pytest.mark.usefixtures("each_database")

DEADLOCK, LOST = 1213, 2013


@contextlib.contextmanager
def one_statement_fails(project: TinyProject, place: int, number: int) -> Iterator[list[str]]:
    """The statement at this place (counted from 1) of writing transactions, COMMITs included, fails with this error.
    Yields the statements so far."""
    seen: list[str] = []

    def reached(connection: Connection, statement: str) -> None:
        if not connection.get_execution_options().get("read_only", False):
            seen.append(statement)
            if len(seen) == place:
                raise DBAPIError(statement, {}, pymysql.err.OperationalError(number, "fault of a test"))

    def on_statement(connection: Connection, cursor: Any, statement: str, *_: Any) -> None:
        reached(connection, statement)

    def on_commit(connection: Connection) -> None:
        reached(connection, "COMMIT")

    listeners = (("before_cursor_execute", on_statement), ("commit", on_commit))
    for name, listener in listeners:
        sa.event.listen(project.db.engine, name, listener)
    try:
        yield seen
    finally:
        for name, listener in listeners:
            sa.event.remove(project.db.engine, name, listener)


@pytest.mark.parametrize("number", [DEADLOCK, LOST])
def test_a_version_is_made_once_wherever_its_transactions_fail(number: int) -> None:
    digests = set()
    for place in itertools.count(1):
        with tiny_project(validated=True) as project:
            with one_statement_fails(project, place, number) as seen:
                if number == DEADLOCK:
                    project.assimilator().one_pass()
                else:
                    pass_until_it_works(project)
            assert project.job.current_version == 1
            assert len(project.rows(gt_version)) == 2 and len(project.rows(gt_round)) == 1
            assert [row["applied_version"] for row in project.rows(gt_ledger)] == [1, 1]
            assert {unit["assimilate_state"] for unit in project.rows(database.workunit)} == {2}
            digests.add(project.version_digests()[1])
            if len(seen) < place:
                break
    assert place > 20 and len(digests) == 1


def pass_until_it_works(project: TinyProject) -> None:
    """As the daemon's loop does, which waits in between."""
    with contextlib.suppress(RetryLater):
        project.assimilator().one_pass()
        return
    project.assimilator().one_pass()


@pytest.fixture
def project() -> Iterator[TinyProject]:
    with tiny_project() as made:
        yield made


def named(name: str) -> Job:
    job, _ = exported()
    section = dataclasses.replace(job.config.job, name=name)
    return dataclasses.replace(job, config=dataclasses.replace(job.config, job=section))


def publish(project: TinyProject, name: str) -> int:
    return publish_job(project.tree, project.db, named(name), exported()[1], APP, lambda text: None)


@pytest.mark.parametrize("number", [DEADLOCK, LOST])
def test_a_job_is_made_once_wherever_its_transaction_fails(project: TinyProject, number: int) -> None:
    for place in itertools.count(1):
        name = f"other{place}"
        with one_statement_fails(project, place, number) as seen:
            try:
                job_id = publish(project, name)
            except DBAPIError:
                assert number == LOST, "whether a COMMIT got through is not known: the admin decides"
                assert project.rows(gt_job, name=name) == []
                job_id = publish(project, name)
        assert [row["id"] for row in project.rows(gt_job, name=name)] == [job_id]
        assert len(project.rows(gt_version, job_id=job_id)) == 1
        assert len(project.rows(gt_file, job_id=job_id, kind="state")) == 1
        if len(seen) < place:
            break
    assert place > 5


def test_of_two_commands_that_make_a_job_of_one_name_the_slower_is_told(
    project: TinyProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = store.job_named
    looks: list[str] = []

    def job_named(connection: Connection, name: str) -> store.JobRow | None:
        looks.append(name)
        if len(looks) == 1:
            monkeypatch.setattr(store, "job_named", real)
            publish(project, name)
            monkeypatch.setattr(store, "job_named", job_named)
            return None
        return real(connection, name)

    monkeypatch.setattr(store, "job_named", job_named)
    with pytest.raises(JobError, match="already has a job 'twice'"):
        publish(project, "twice")
    assert len(project.rows(gt_job, name="twice")) == 1


def test_a_job_goes_back_once_wherever_its_transaction_fails(project: TinyProject) -> None:
    project.make_version()
    for place in itertools.count(1):
        with one_statement_fails(project, place, DEADLOCK) as seen:
            roll_back(project.tree, project.db, "tiny", 0)
        assert (project.job.state, project.job.current_version) == (JobState.PAUSED, 0)
        assert {row["disposition"] for row in project.rows(gt_ledger)} == {"dropped"}
        if len(seen) < place:
            break
    assert place > 5
