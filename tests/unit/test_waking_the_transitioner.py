"""Whenever we want BOINC's transitioner to look at a workunit, it notices, although it is looking at that moment.

Its last statement on a workunit is `transition_time = if(transition_time = READ, NEXT, now)`: a wish that writes the
very value it has read is lost. Here somebody has set the present second, it has read that, and our write comes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import sqlalchemy as sa
from click.testing import CliRunner

from boinc_project import database, store
from boinc_project.cli.main import main
from boinc_project.database import workunit
from boinc_project.gt_tables import JobState
from boinc_project.states import ServerState
from tests.tiny_project import TinyProject, tiny_project

pytestmark = pytest.mark.usefixtures("each_database")

Act = Callable[[], object]


@pytest.fixture
def project() -> Iterator[TinyProject]:
    with tiny_project() as made:
        yield made


def taken_in(project: TinyProject) -> Act:
    project.validate_round()
    return project.assimilator().one_pass


def without_agreement(project: TinyProject) -> Act:
    for number, result in enumerate(project.issue()):
        unit = project.unit_of(result)
        project.answer(result, project.changed_update(unit, lambda array, n=number: array + n))
    project.transitioner.run_once()
    return project.validator().one_pass


def late(project: TinyProject) -> Act:
    project.issue()
    for unit in project.rows(workunit):
        project.change(workunit, unit["id"], target_nresults=3, transition_time=0)
    project.transitioner.run_once()
    results = project.rows(database.result)
    for result in results[:4]:
        project.answer(result)
    for result in results[4:]:
        project.change(database.result, result["id"], server_state=int(ServerState.IN_PROGRESS), hostid=9, userid=9)
    project.transitioner.run_once()
    project.validator().one_pass()
    for result in results[4:]:
        project.answer(result)
    for unit in project.rows(workunit):
        project.change(workunit, unit["id"], need_validate=1)
    return project.validator().one_pass


def slow(project: TinyProject) -> Act:
    for number, result in enumerate(project.issue()):
        project.change(
            database.result, result["id"], server_state=int(ServerState.IN_PROGRESS), sent_time=1, hostid=number,
            userid=number, report_deadline=2**31 - 1,
        )  # fmt: skip
    return project.generator().one_pass


def cancelled(project: TinyProject) -> Act:
    project.issue()
    set_state(project, JobState.FINISHED)
    return project.generator().one_pass


def resumed(project: TinyProject) -> Act:
    for result in project.issue():
        project.change(database.result, result["id"], server_state=int(ServerState.IN_PROGRESS), hostid=9, userid=9)
    set_state(project, JobState.FAILED)
    project.generator().one_pass()
    assert {unit["transitioner_flags"] for unit in project.rows(workunit)} == {2}
    command = ["job", "resume", "tiny", "--project", str(project.tree.project_dir)]
    return lambda: CliRunner().invoke(main, command, catch_exceptions=False)


def set_state(project: TinyProject, state: JobState) -> None:
    with project.db.transaction() as connection:
        store.set_job_state(connection, project.job_id, state)


@pytest.mark.parametrize("scene", [taken_in, without_agreement, late, slow, cancelled, resumed])
@pytest.mark.parametrize("ahead", [0, 1, -1])
def test_the_transitioner_notices_a_wish_of_the_second_that_it_has_read(
    project: TinyProject, scene: Callable[[TinyProject], Act], ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    act = scene(project)
    now = int(time.time())
    read, following = now + ahead, now + 864_000
    with project.db.transaction() as connection:
        connection.execute(sa.update(workunit).values(transition_time=read))
    monkeypatch.setattr(time, "time", lambda: now + 0.5)
    act()
    written = sa.case((workunit.c.transition_time == read, following), else_=now)
    with project.db.transaction() as connection:
        connection.execute(sa.update(workunit).values(transition_time=written))
    assert [unit["transition_time"] for unit in project.rows(workunit)] == [now] * 2
