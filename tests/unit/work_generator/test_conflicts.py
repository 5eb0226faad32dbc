"""The generator's transactions that give way to others are done again by themselves; the pass goes on.

Each commit fails once, as a deadlock's victim; so does whatever the pass would do a second time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pymysql
import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError

from boinc_project import database, store
from boinc_project.cli.jobs import roll_back
from boinc_project.gt_tables import FileState, JobState, gt_file, gt_microtask
from boinc_project.project_tree import ProjectTree
from boinc_project.states import ErrorMask, ServerState
from tests.tiny_project import TinyProject, tiny_project

pytestmark = pytest.mark.usefixtures("each_database")


@pytest.fixture
def project() -> Iterator[TinyProject]:
    with tiny_project() as made:
        yield made


@contextlib.contextmanager
def each_transaction_gives_way_once(project: TinyProject) -> Iterator[list[str]]:
    """Every other commit of a writing transaction fails with a deadlock; yields what happened to each."""
    happened: list[str] = []

    def on_commit(connection: Connection) -> None:
        if connection.get_execution_options().get("read_only", False):
            return
        happened.append("committed" if happened[-1:] == ["gave way"] else "gave way")
        if happened[-1] == "gave way":
            raise DBAPIError("COMMIT", {}, pymysql.err.OperationalError(1213, "Deadlock found"))

    sa.event.listen(project.db.engine, "commit", on_commit)
    try:
        yield happened
    finally:
        sa.event.remove(project.db.engine, "commit", on_commit)
    assert happened and happened.count("gave way") == happened.count("committed")


def test_workunits_are_issued_once_and_their_files_are_staged_once(
    project: TinyProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged: list[int] = []
    real = ProjectTree.stage_files

    def stage_files(tree: ProjectTree, contents: Any) -> Any:
        staged.append(len(contents))
        return real(tree, contents)

    monkeypatch.setattr(ProjectTree, "stage_files", stage_files)
    with each_transaction_gives_way_once(project):
        assert project.generator().one_pass()
    assert staged == [2]
    assert len(project.rows(database.workunit)) == len(project.rows(gt_microtask)) == 2
    assert len(project.rows(gt_file, kind="microtask")) == 2


def test_files_of_older_versions_are_retired_in_the_same_pass(project: TinyProject) -> None:
    project.make_version()
    generator = project.generator()
    with each_transaction_gives_way_once(project):
        generator.one_pass()
    old = [row for row in project.rows(gt_file) if row["version"] == 0 and row["kind"] in ("state", "microtask")]
    assert len(old) == 3 and {row["state"] for row in old} == {str(FileState.DELETED)}
    assert not any(project.tree.download_path(row["name"]).exists() for row in old)
    assert generator.retired == {project.job_id: 1}


def test_a_version_that_is_taken_back_between_two_tries_keeps_its_files(
    project: TinyProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.make_version()
    real = ProjectTree.delete_published
    taken_back: list[str] = []

    def delete_published(tree: ProjectTree, name: str) -> bool:
        assert not taken_back, "the job has gone back: nothing of version 0 may go"
        deleted = real(tree, name)
        if len(project.rows(gt_file, name=name, kind="state")) == 1:
            taken_back.append(name)
            raise DBAPIError("UPDATE", {}, pymysql.err.OperationalError(1213, "Deadlock found"))
        return deleted

    def sleep(seconds: float) -> None:
        if taken_back and project.job.current_version == 1:
            monkeypatch.setattr(time, "sleep", lambda seconds: None)
            roll_back(project.tree, project.db, "tiny", 0)

    monkeypatch.setattr(ProjectTree, "delete_published", delete_published)
    monkeypatch.setattr(time, "sleep", sleep)
    project.generator().one_pass()
    (state,) = project.rows(gt_file, kind="state", version=0)
    assert taken_back == [state["name"]] and state["state"] == FileState.PUBLISHED
    assert project.tree.download_path(state["name"]).exists()


def test_workunits_that_nobody_was_sent_are_cancelled_in_the_same_pass(project: TinyProject) -> None:
    project.issue()
    with project.db.transaction() as connection:
        store.set_job_state(connection, project.job_id, JobState.FINISHED)
    with each_transaction_gives_way_once(project):
        project.generator().one_pass()
    assert [row["error_mask"] for row in project.rows(database.workunit)] == [int(ErrorMask.CANCELLED)] * 2
    assert [row["state"] for row in project.rows(gt_microtask)] == ["cancelled"] * 2


def test_a_straggler_gets_one_further_copy(project: TinyProject) -> None:
    long_ago = int(time.time()) - 10_000
    for number, result in enumerate(project.issue()):
        project.change(
            database.result, result["id"], server_state=int(ServerState.IN_PROGRESS), sent_time=long_ago,
            hostid=number, userid=number, report_deadline=long_ago + 10**6,
        )  # fmt: skip
    for unit in project.rows(database.workunit):
        project.change(database.workunit, unit["id"], transition_time=long_ago + 10**6)
    with each_transaction_gives_way_once(project):
        assert project.generator().one_pass()
    assert [unit["target_nresults"] for unit in project.rows(database.workunit)] == [3, 3]


def test_a_job_that_ends_or_stops_says_so(project: TinyProject) -> None:
    for shard in project.job.facts.train:
        project.tree.download_path(shard.file.name).unlink()
    with each_transaction_gives_way_once(project):
        project.generator().one_pass()
    assert project.job.state == JobState.FAILED and "restore it" in project.job.note
