"""What the work generator takes back: files of older versions by need and never by age, workunits never sent."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import sqlalchemy as sa

from boinc_project import database, store
from boinc_project.cli.jobs import roll_back
from boinc_project.gt_tables import JobState, gt_file, gt_microtask
from boinc_project.job_folder import Published
from boinc_project.states import AssimilateState, ErrorMask, Outcome, ServerState
from tests.tiny_project import TinyProject, tiny_project
from work_generator.__main__ import Generator

pytestmark = pytest.mark.usefixtures("each_database")


@pytest.fixture
def project() -> Iterator[TinyProject]:
    with tiny_project() as made:
        yield made


class Usage(NamedTuple):
    """A workunit of an older version."""

    version: int
    assimilated: bool
    error_mask: int
    results: tuple[ServerState, ...]


OVER, BUSY, UNSENT = ServerState.OVER, ServerState.IN_PROGRESS, ServerState.UNSENT

# Versions 1 and 3 are finished, 2 has a copy in progress and a workunit that is not sent, 4 has a workunit that failed
# and whose last copy is still out; 5 is the current one.
SITUATION = (
    Usage(1, True, 0, (OVER, OVER)),
    Usage(2, True, 0, (OVER, OVER, BUSY)),
    Usage(2, False, 0, (UNSENT, UNSENT)),
    Usage(3, True, 0, (OVER, OVER)),
    Usage(4, True, int(ErrorMask.TOO_MANY_ERROR_RESULTS), (OVER, BUSY)),
    Usage(5, False, 0, (BUSY, UNSENT)),
)


def publish_versions(project: TinyProject, usages: tuple[Usage, ...], current: int) -> None:
    """Published states and microtasks of versions 1 to `current`, and the workunits that use them."""
    versions = range(1, current + 1)
    now = int(time.time())
    for version in versions:
        for kind in ("state", "microtask"):
            staged = project.tree.stage_file(f"{kind} {version}".encode(), f"gt_tiny_{kind}_{version}")
            staged.path.with_name(f"{staged.name}.gz").write_bytes(b"compressed")
            published = Published(staged.name, "", staged.md5, staged.nbytes)
            with project.db.transaction() as connection:
                store.record_file(connection, project.job_id, kind, published, version=version)
    with project.db.transaction() as connection:
        connection.execute(sa.text(f"UPDATE gt_job SET current_version = {current}"))
        for number, usage in enumerate(usages):
            name = f"gt_tiny_v{usage.version}_s{number}_a0_{number:016x}"
            state = AssimilateState.DONE if usage.assimilated else AssimilateState.INIT
            unit = database.new_row(
                database.workunit, name=name, appid=project.appid, create_time=now, transition_time=2**31 - 1,
                assimilate_state=int(state), error_mask=usage.error_mask,
            )  # fmt: skip
            identifier = connection.execute(database.workunit.insert(), unit).inserted_primary_key[0]  # type: ignore[index]
            for copy, server_state in enumerate(usage.results):
                row = database.new_row(
                    database.result, name=f"{name}_{copy}", workunitid=identifier, appid=project.appid,
                    server_state=int(server_state), create_time=now, sent_time=0 if server_state == UNSENT else now,
                )  # fmt: skip
                connection.execute(database.result.insert(), row)
            connection.execute(
                gt_microtask.insert(),
                {
                    "job_id": project.job_id, "version": usage.version, "slot": number, "attempt": 0,
                    "workunit_name": name, "digest": "", "document": "{}", "samples": 1, "flops": 1.0,
                    "state": "folded" if usage.assimilated else "issued", "create_time": now,
                },
            )  # fmt: skip


def kept(project: TinyProject) -> list[int]:
    """Versions whose files are there; each with all of its companions, or with none."""
    found = []
    for version in range(1, 6):
        paths = [project.tree.download_path(f"gt_tiny_{kind}_{version}") for kind in ("state", "microtask")]
        all_files = [path.with_name(path.name + suffix) for path in paths for suffix in ("", ".md5", ".gz")]
        there = {path.exists() for path in all_files}
        assert len(there) == 1, [path.name for path in all_files if path.exists()]
        found += [version] if there == {True} else []
    rows = project.rows(gt_file, kind="state", state="published")
    assert [row["version"] for row in rows if row["version"] > 0] == found
    return found


def clean(project: TinyProject) -> None:
    generator = project.generator()
    generator._take_back(project.job)


def end_copies(project: TinyProject, version: int) -> None:
    """The last copies of a version's workunits time out, and the workunits are assimilated."""
    names = [row["workunit_name"] for row in project.rows(gt_microtask, version=version)]
    for unit in project.rows(database.workunit):
        if unit["name"] in names:
            project.change(database.workunit, unit["id"], assimilate_state=int(AssimilateState.DONE))
            for row in project.rows(database.result, workunitid=unit["id"]):
                if row["server_state"] != int(OVER):
                    project.change(
                        database.result, row["id"], server_state=int(OVER), outcome=int(Outcome.NO_REPLY)
                    )  # fmt: skip


def test_files_of_a_version_stay_while_a_workunit_or_a_copy_needs_them_and_go_with_the_last(
    project: TinyProject,
) -> None:
    publish_versions(project, SITUATION, 5)
    clean(project)
    assert kept(project) == [2, 4, 5]
    end_copies(project, 4)
    clean(project)
    assert kept(project) == [2, 5]
    end_copies(project, 2)
    clean(project)
    assert kept(project) == [5]


class Crash(BaseException):
    """The process dies here."""


@pytest.mark.parametrize("deaths", [1, 2, 3, 4])
def test_a_cleaner_killed_midway_and_run_again_ends_in_the_same_state(
    project: TinyProject, deaths: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_versions(project, SITUATION, 5)
    unlink = Path.unlink
    calls = [0]

    def dies(path: Path, missing_ok: bool = False) -> None:
        calls[0] += 1
        if calls[0] % 3 == deaths % 3:
            raise Crash
        unlink(path, missing_ok)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", dies)
        for _ in range(deaths):
            with pytest.raises(Crash):
                clean(project)
    clean(project)
    assert kept(project) == [2, 4, 5]
    assert {row["state"] for row in project.rows(gt_file)} == {"published", "deleted"}


def test_files_of_a_version_that_was_made_long_ago_stay_while_a_copy_is_out(project: TinyProject) -> None:
    old = Usage(1, True, 0, (OVER, BUSY))
    recent = tuple(Usage(2 + number % 3, True, 0, (OVER,)) for number in range(60))
    publish_versions(project, (old, *recent), 5)
    clean(project)
    assert kept(project) == [1, 5]


def test_on_a_full_disk_nothing_in_use_is_deleted_and_nothing_is_issued_until_there_is_room(
    project: TinyProject, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = {path for path in project.tree.config.download_dir.rglob("*") if path.is_file()}
    usage = shutil.disk_usage(project.tree.project_dir)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
        generator = project.generator()
        generator.one_pass()
        generator.one_pass()
    assert project.rows(database.workunit) == []
    assert sum("the disk is almost full" in record.message for record in caplog.records) == 1
    assert {path for path in project.tree.config.download_dir.rglob("*") if path.is_file()} == files
    assert len(project.issue()) == 4


def open_workunits(project: TinyProject) -> list[dict[str, Any]]:
    return [unit for unit in project.rows(database.workunit) if not unit["error_mask"]]


def roll_back_to_zero(project: TinyProject) -> Generator:
    """An open round over version 1, rolled back; returns a generator that has looked at it."""
    project.make_version()
    project.issue()
    roll_back(project.tree, project.db, project.job.name, 0)
    generator = project.generator()
    generator.one_pass()
    return generator


def test_workunits_of_a_version_that_was_rolled_back_are_cancelled_if_nobody_was_sent_them(
    project: TinyProject,
) -> None:
    generator = roll_back_to_zero(project)
    cancelled = [unit for unit in project.rows(database.workunit) if unit["error_mask"]]
    assert len(cancelled) == 2
    assert {unit["error_mask"] for unit in cancelled} == {int(ErrorMask.CANCELLED)}
    for unit in cancelled:
        copies = project.rows(database.result, workunitid=unit["id"])
        assert {(row["server_state"], row["outcome"]) for row in copies} == {(int(OVER), int(Outcome.DIDNT_NEED))}
    project.transitioner.run_once()
    project.assimilator().one_pass()
    generator.one_pass()
    assert {unit["assimilate_state"] for unit in project.rows(database.workunit)} == {int(AssimilateState.DONE)}


def test_a_workunit_of_which_a_copy_was_sent_is_not_cancelled(project: TinyProject) -> None:
    project.make_version()
    sent = project.issue()[0]
    project.change(database.result, sent["id"], server_state=int(BUSY), hostid=7, sent_time=1)
    roll_back(project.tree, project.db, project.job.name, 0)
    project.generator().one_pass()
    (unit,) = project.rows(database.workunit, id=sent["workunitid"])
    assert unit["error_mask"] == 0
    states = [row["server_state"] for row in project.rows(database.result, workunitid=unit["id"])]
    assert sorted(states) == [int(UNSENT), int(BUSY)], "the other copy is needed for the quorum and its credit"


def test_a_copy_that_is_sent_while_the_generator_looks_keeps_its_workunit(
    project: TinyProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.make_version()
    (result, *_) = project.issue()
    roll_back(project.tree, project.db, project.job.name, 0)
    real = store.results_of

    def results_of(connection: Any, identifier: int, lock: bool = False) -> Any:
        if lock and identifier == result["workunitid"]:  # the scheduler was faster by a moment
            connection.execute(
                sa.update(database.result).where(database.result.c.id == result["id"]).values(server_state=int(BUSY))
            )
        return real(connection, identifier, lock)

    with monkeypatch.context() as patched:
        patched.setattr(store, "results_of", results_of)
        project.generator().one_pass()
    assert [unit["error_mask"] for unit in project.rows(database.workunit, id=result["workunitid"])] == [0]


def test_the_open_round_of_a_finished_job_is_cancelled_where_nobody_was_sent_it(project: TinyProject) -> None:
    results = project.issue()
    project.change(database.result, results[0]["id"], server_state=int(BUSY), hostid=7, sent_time=1)
    with project.db.transaction() as connection:
        store.set_job_state(connection, project.job_id, JobState.FINISHED)
    project.generator().one_pass()
    assert [unit["id"] for unit in open_workunits(project)] == [results[0]["workunitid"]]
    states = {row["workunit_name"]: row["state"] for row in project.rows(gt_microtask)}
    assert sorted(states.values()) == ["cancelled", "issued"]


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.PAUSED])
def test_the_open_round_of_a_job_that_goes_on_is_not_cancelled(project: TinyProject, state: JobState) -> None:
    project.issue()
    with project.db.transaction() as connection:
        store.set_job_state(connection, project.job_id, state)
    project.generator().one_pass()
    assert len(open_workunits(project)) == 2
