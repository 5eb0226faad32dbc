"""The assimilator daemon on a real database: intake, apply, holds, crashes at every step, two at once."""

from __future__ import annotations

import dataclasses
import functools
import json
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

from assimilator import __main__ as assimilator_module
from assimilator import apply, intake
from assimilator.policies import policy
from assimilator.replay import replay
from boinc_project import database, durable, job_folder, store
from boinc_project.cli.errors import Mistake
from boinc_project.cli.jobs import roll_back
from boinc_project.contract.errors import ContractError
from boinc_project.contract.microtask import FileRef
from boinc_project.daemon import Options, RetryLater
from boinc_project.gt_tables import Disposition, JobState, gt_job, gt_ledger, gt_microtask, gt_round, gt_version
from boinc_project.held_out import evaluation_microtask
from boinc_project.job_config import JobConfig
from boinc_project.states import AssimilateState, ErrorMask
from tests.databases import REPEATED
from tests.tiny_project import TinyProject, tiny_project

pytestmark = pytest.mark.usefixtures("each_database")


@pytest.fixture
def project() -> Iterator[TinyProject]:
    with tiny_project() as made:
        yield made


@pytest.fixture
def validated() -> Iterator[TinyProject]:
    with tiny_project(validated=True) as made:
        yield made


@functools.cache
def undisturbed(versions: int) -> list[str]:
    """Digests of the versions of an undisturbed training."""
    with tempfile.TemporaryDirectory() as folder, TinyProject(Path(folder) / "project") as project:
        for _ in range(versions):
            project.make_version()
        return project.version_digests()


class Crash(BaseException):
    """The process dies here."""


def crash(*arguments: Any, **named: Any) -> Any:
    raise Crash


# Where the process may die: before and after each step of intake and apply.
PLACES = [
    (intake, "look_up"),
    (durable.FileBatch, "add"),
    (durable.FileBatch, "commit"),
    (intake, "judged_metrics"),
    (intake.store, "lock_job"),
    (intake.store, "filled_slots"),
    (intake, "record"),
    (apply.store, "commit_round"),
    (apply, "read_round"),
    (policy, "fold"),
    (apply, "compute"),
    (job_folder, "_write_once"),
    (job_folder.JobFolder, "write_version"),
    (apply.store, "record_file"),
    (apply, "round_loss"),
]


# On MariaDB tests/integration/test_crash_points.py kills the daemons themselves.
@pytest.mark.parametrize("each_database", REPEATED, indirect=True)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("owner", "name"), PLACES, ids=[f"{getattr(o, '__name__', o)}.{n}" for o, n in PLACES])
def test_a_crash_at_any_step_loses_nothing_and_applies_nothing_twice(
    validated: TinyProject, owner: Any, name: str, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = validated
    real = getattr(owner, name)

    def dies(*arguments: Any, **named: Any) -> Any:
        if after:
            real(*arguments, **named)
        raise Crash

    for _ in range(2):  # the second process dies at the same place
        with monkeypatch.context() as patched, pytest.raises(Crash):
            patched.setattr(owner, name, dies)
            project.assimilator().one_pass()
    project.assimilator().one_pass()
    assert project.version_digests() == undisturbed(1)
    assert [row["disposition"] for row in project.rows(gt_ledger)] == ["applied"] * 2
    assert len(project.rows(gt_round)) == 1


def test_the_gradients_are_folded_in_slot_order_whatever_the_order_of_intake(project: TinyProject) -> None:
    units = project.validate_round()
    for unit in reversed(units):
        project.assimilator(Options(one_pass=True, wu_id=unit["id"]))._intake()
    project.assimilator().one_pass()
    assert project.version_digests() == undisturbed(1)


def test_taking_a_workunit_in_again_changes_nothing(project: TinyProject, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    units = project.validate_round()
    project.assimilator().one_pass()
    before = (project.rows(gt_ledger), project.rows(gt_version), project.rows(gt_microtask))
    for unit in units:
        project.change(database.workunit, unit["id"], assimilate_state=int(AssimilateState.READY))
    project.assimilator().one_pass()
    assert before == (project.rows(gt_ledger), project.rows(gt_version), project.rows(gt_microtask))
    assert {u["assimilate_state"] for u in project.rows(database.workunit)} == {AssimilateState.DONE}
    assert sum("taken in already" in record.message for record in caplog.records) == 2


def test_two_assimilators_at_once_by_mistake_apply_each_gradient_once(project: TinyProject) -> None:
    for _ in range(2):
        project.validate_round()
        version = project.job.current_version
        barrier = threading.Barrier(2)
        failures: list[BaseException] = []

        def work(barrier: threading.Barrier = barrier, failures: list[BaseException] = failures) -> None:
            with project.tree.database() as own:
                assimilator = project.assimilator(db=own)
                barrier.wait()
                try:
                    assimilator.one_pass()
                except BaseException as error:
                    failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        project.assimilator().one_pass()
        assert project.job.current_version == version + 1
        project.transitioner.run_once()
    assert project.version_digests() == undisturbed(2)
    assert {row["disposition"] for row in project.rows(gt_ledger)} == {"applied"}


def test_a_payload_overwritten_after_validation_is_not_folded_and_its_slot_is_issued_again(
    project: TinyProject,
) -> None:
    units = project.validate_round()
    (result,) = project.rows(database.result, id=units[0]["canonical_resultid"])
    path = project.upload_path(result)
    path.write_bytes(project.changed_update(units[0], np.negative))
    project.assimilator().one_pass()
    (task,) = project.rows(gt_microtask, workunit_name=units[0]["name"])
    assert task["state"] == "failed" and "overwritten after validation" in task["note"]
    assert project.job.current_version == 0
    project.transitioner.run_once()
    project.make_version()
    assert project.version_digests() == undisturbed(1)


def test_a_failed_workunit_releases_its_slot(project: TinyProject) -> None:
    project.issue()
    unit = project.rows(database.workunit)[0]
    project.change(database.workunit, unit["id"], error_mask=int(ErrorMask.TOO_MANY_ERROR_RESULTS), assimilate_state=1)
    project.assimilator().one_pass()
    (task,) = project.rows(gt_microtask, workunit_name=unit["name"])
    assert (task["state"], task["note"]) == ("failed", "workunit failed: too many error results")
    assert {r["workunitid"] for r in project.issue()} == {2, 3}
    assert [t["attempt"] for t in project.rows(gt_microtask)] == [0, 0, 1]


def test_a_slot_that_failed_three_times_is_left_out_and_training_goes_on(project: TinyProject) -> None:
    for _ in range(3):
        project.issue()
        (task,) = [t for t in project.rows(gt_microtask, slot=1) if t["state"] == "issued"]
        (unit,) = project.rows(database.workunit, name=task["workunit_name"])
        project.change(database.workunit, unit["id"], error_mask=1, assimilate_state=1)
        project.assimilator().one_pass()
    project.make_version()
    (version,) = project.rows(gt_version, version=1)
    assert (version["contributions"], version["samples"]) == (1, 48)
    assert list(replay(project.db, project.job).values()) == project.version_digests()


def test_weights_that_would_not_be_finite_hold_the_job_at_the_last_good_version(
    project: TinyProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.make_version()
    project.validate_round()
    real = policy.fold

    def poisoned(*arguments: Any) -> Any:
        folded = real(*arguments)
        folded.gradient["0.weight"][0, 0] = np.nan
        return folded

    monkeypatch.setattr(policy, "fold", poisoned)
    project.assimilator().one_pass()
    assert (project.job.state, project.job.current_version) == (JobState.FAILED, 1)
    assert "would not be finite" in project.job.note
    monkeypatch.undo()
    project.assimilator().one_pass()
    assert project.job.current_version == 1, "an admin must look at it first"
    with project.db.transaction() as connection:
        store.set_job_state(connection, project.job_id, JobState.RUNNING)
    project.assimilator().one_pass()
    assert project.version_digests() == undisturbed(2)


def test_an_optimizer_that_would_not_be_finite_holds_the_job_too(
    project: TinyProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.validate_round()
    real = apply.policy_of

    class Poisoned:
        def __init__(self, config: JobConfig) -> None:
            self.real = real(config)

        def advance(self, round: Any) -> Any:
            made = self.real.advance(round)
            name, array = next(iter(made.optimizer.items()), ("exp_avg/0.weight", np.zeros(3, np.float32)))
            return dataclasses.replace(made, optimizer={**made.optimizer, name: np.full_like(array, np.inf)})

    monkeypatch.setattr(apply, "policy_of", Poisoned)
    project.assimilator().one_pass()
    assert (project.job.state, project.job.current_version) == (JobState.FAILED, 0)
    assert "would not be finite" in project.job.note


def test_a_round_without_weight_makes_a_version_without_a_step(
    project: TinyProject, caplog: pytest.LogCaptureFixture
) -> None:
    project.make_version()
    project.validate_round()
    project.assimilator()._intake()
    with project.db.transaction() as connection:
        connection.execute(gt_ledger.update().where(gt_ledger.c.disposition == "pending").values(samples=0))
    project.assimilator().one_pass()
    assert (project.job.state, project.job.current_version) == (JobState.RUNNING, 2)
    assert "makes no step" in caplog.text
    first, second = (project.rows(gt_version, version=version)[0] for version in (1, 2))
    assert first["state_sha256"] == second["state_sha256"]
    assert first["optimizer_sha256"] == second["optimizer_sha256"] and second["samples"] == 0
    assert replay(project.db, project.job)[2] == second["state_sha256"]


@pytest.mark.parametrize("damage", [lambda p: p.write_bytes(p.read_bytes()[:-1] + b"x"), lambda p: p.unlink()])
def test_a_kept_payload_that_was_damaged_or_removed_holds_the_job(project: TinyProject, damage: Any) -> None:
    project.validate_round()
    project.assimilator()._intake()
    damage(next((project.job.folder.path / "payloads").iterdir()))
    project.assimilator().one_pass()
    assert (project.job.state, project.job.current_version) == (JobState.FAILED, 0)
    with pytest.raises((ContractError, FileNotFoundError)):
        with project.db.transaction() as connection:
            connection.execute(gt_job.update().values(current_version=1))
        replay(project.db, project.job)


def test_storage_that_is_away_while_a_version_is_written_is_tried_again(
    project: TinyProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.validate_round()

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(RetryLater, match="No space left"):
        patched.setattr(job_folder, "_write_once", full)
        project.assimilator().one_pass()
    assert project.job.state == JobState.RUNNING
    project.assimilator().one_pass()
    assert project.version_digests() == undisturbed(1)


def test_a_second_gradient_of_one_slot_is_a_duplicate_and_not_applied(project: TinyProject) -> None:
    units = project.validate_round()
    (task,) = project.rows(gt_microtask, workunit_name=units[0]["name"])
    project.assimilator(Options(one_pass=True, wu_id=units[0]["id"])).one_pass()
    with project.db.transaction() as connection:
        connection.execute(gt_ledger.update().values(workunit_name="another workunit of the slot"))
    project.change(database.workunit, units[0]["id"], assimilate_state=int(AssimilateState.READY))
    project.assimilator(Options(one_pass=True, wu_id=units[0]["id"])).one_pass()
    (entry,) = project.rows(gt_ledger, workunit_name=task["workunit_name"])
    assert entry["disposition"] == Disposition.DUPLICATE


def test_a_gradient_of_a_round_that_was_closed_without_it_is_too_old(project: TinyProject) -> None:
    units = project.validate_round()
    with project.db.transaction() as connection:
        store.commit_round(connection, project.job_id, 1, [], 0.0)
    project.assimilator(Options(one_pass=True, wu_id=units[0]["id"]))._intake()
    (entry,) = project.rows(gt_ledger)
    assert entry["disposition"] == Disposition.TOO_OLD


def test_gradients_of_a_version_that_was_rolled_back_are_dropped_and_training_repeats_itself(
    project: TinyProject,
) -> None:
    for _ in range(2):
        project.make_version()
    late = project.validate_round()
    roll_back(project.tree, project.db, "tiny", 1)
    project.assimilator().one_pass()
    assert project.job.current_version == 1
    entries = [project.rows(gt_ledger, workunit_name=unit["name"])[0] for unit in late]
    assert {entry["disposition"] for entry in entries} == {"dropped"}
    with project.db.transaction() as connection:
        store.set_job_state(connection, project.job_id, JobState.RUNNING)
    project.transitioner.run_once()
    project.make_version()
    assert project.version_digests() == undisturbed(2)
    assert list(replay(project.db, project.job).values()) == project.version_digests()


def test_a_paused_job_takes_in_and_applies_what_comes_back(project: TinyProject) -> None:
    project.validate_round()
    with project.db.transaction() as connection:
        store.set_job_state(connection, project.job_id, JobState.PAUSED)
    project.assimilator().one_pass()
    assert project.job.current_version == 1
    assert project.issue() == []


def test_jobs_of_another_app_are_left_to_that_app_s_daemons(project: TinyProject) -> None:
    project.validate_round()
    ours, other = project.assimilator(), project.assimilator()
    other.appid = project.appid + 1
    assert not other.one_pass()
    ours._intake()
    assert not other.one_pass()
    assert project.job.current_version == 0
    ours.one_pass()
    assert project.job.current_version == 1


def test_a_fault_of_ours_parks_one_workunit_and_leaves_the_others_alone(
    project: TinyProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    units = project.validate_round()
    real = intake.prepare

    def buggy(tree: Any, case: Any, files: Any) -> Any:
        if case.name == units[0]["name"]:
            raise ZeroDivisionError("a bug")
        return real(tree, case, files)

    monkeypatch.setattr(intake, "prepare", buggy)
    assimilator = project.assimilator()
    for _ in range(5):
        patience = assimilator.patience
        patience.not_before = {k: v for k, v in patience.not_before.items() if v == float("inf")}
        assimilator.one_pass()
    assert assimilator.patience.failures == {units[0]["id"]: 3}
    assert [entry["workunit_name"] for entry in project.rows(gt_ledger)] == [units[1]["name"]]


def test_a_dry_run_changes_nothing(project: TinyProject) -> None:
    project.validate_round()
    before = [project.rows(t) for t in (database.workunit, gt_ledger, gt_version, gt_microtask)]
    project.assimilator(Options(one_pass=True, dry_run=True)).one_pass()
    assert before == [project.rows(t) for t in (database.workunit, gt_ledger, gt_version, gt_microtask)]


def test_replaying_the_ledger_gives_the_bytes_of_every_version(project: TinyProject) -> None:
    for _ in range(3):
        project.make_version()
    assert list(replay(project.db, project.job).values()) == project.version_digests() == undisturbed(3)


def test_held_out_evaluation_covers_every_sample_once_and_names_all_its_files(project: TinyProject) -> None:
    project.make_version()
    with project.db.read() as connection:
        row = store.version_row(connection, project.job_id, 1)
    assert row is not None
    digest = str(row["state_sha256"])
    path = project.job.folder.state_path(1, digest)
    microtask, files = evaluation_microtask(project.job, 1, FileRef(digest, path.stat().st_size), path)
    assert microtask.samples == 50
    assert set(files) == set(microtask.files)


def many_failed_workunits(project: TinyProject, count: int) -> list[int]:
    """So many workunits of the job that failed and wait for the assimilator; their ids."""
    units = [
        database.new_row(
            database.workunit, name=f"gt_tiny_{n}", appid=project.appid, create_time=1, error_mask=2,
            assimilate_state=int(AssimilateState.READY),
        )
        for n in range(count)
    ]  # fmt: skip
    tasks = [
        {
            "job_id": project.job_id, "version": 99, "slot": n, "attempt": 0, "workunit_name": f"gt_tiny_{n}",
            "digest": "", "document": "{}", "samples": 1, "flops": 1.0, "state": "issued", "create_time": 1,
        }
        for n in range(count)
    ]  # fmt: skip
    with project.db.transaction() as connection:
        connection.execute(database.workunit.insert(), units)
        connection.execute(gt_microtask.insert(), tasks)
    return [row["id"] for row in project.rows(database.workunit)]


def at_once(project: TinyProject, options: list[Options]) -> list[list[int]]:
    """Assimilators with these options work at the same time; the workunits that each of them found to do."""
    barrier = threading.Barrier(len(options))
    found: list[list[int]] = [[] for _ in options]
    failures: list[BaseException] = []

    def work(chosen: Options, seen: list[int]) -> None:
        with project.tree.database() as own:
            assimilator = project.assimilator(chosen, own)
            real = assimilator._take_in

            def take_in(cases: Any) -> bool:
                seen.extend(case.id for case in cases)
                return bool(real(cases))

            assimilator._take_in = take_in  # type: ignore[method-assign]
            barrier.wait()
            try:
                assimilator.one_pass()
            except BaseException as error:
                failures.append(error)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(options, found, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    return found


def test_two_instances_with_mod_2_0_and_2_1_handle_a_hundred_workunits_half_each(project: TinyProject) -> None:
    ids = many_failed_workunits(project, 100)
    even, odd = at_once(project, [Options(one_pass=True, mod=(2, 0)), Options(one_pass=True, mod=(2, 1))])
    assert (even, odd) == ([i for i in ids if i % 2 == 0], [i for i in ids if i % 2 == 1])
    assert len(even) == len(odd) == 50
    assert {row["assimilate_state"] for row in project.rows(database.workunit)} == {AssimilateState.DONE}


def test_two_instances_without_mod_by_mistake_take_a_hundred_gradients_in_once_each(
    project: TinyProject, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with project.db.transaction() as connection:
        settings = json.loads(connection.execute(sa.select(gt_job.c.config)).scalar_one())
        settings["train"]["microtasks_per_version"] = 100
        connection.execute(sa.update(gt_job).values(config=json.dumps(settings)))
    assert len(project.validate_round()) == 100
    at_once(project, [Options(one_pass=True), Options(one_pass=True)])
    project.assimilator().one_pass()
    assert sorted(row["slot"] for row in project.rows(gt_ledger)) == list(range(100))
    assert {row["disposition"] for row in project.rows(gt_ledger)} == {"applied"}
    assert project.rows(gt_version)[-1]["contributions"] == 100
    assert sum(": 100 contributions" in record.message for record in caplog.records) == 1
    assert {row["assimilate_state"] for row in project.rows(database.workunit)} == {AssimilateState.DONE}


def test_one_pass_n_wu_takes_so_many_workunits_and_leaves_the_others(project: TinyProject) -> None:
    many_failed_workunits(project, 30)
    project.assimilator(Options(one_pass=True, limit=7)).one_pass()
    done = [row for row in project.rows(database.workunit) if row["assimilate_state"] == AssimilateState.DONE]
    assert [row["id"] for row in done] == list(range(1, 8))


def test_workunits_that_are_left_alone_do_not_keep_others_waiting(
    project: TinyProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assimilator_module, "WORKUNITS_PER_BATCH", 5)
    foreign = [
        database.new_row(
            database.workunit, name=f"foreign_{n}", appid=project.appid, create_time=1, assimilate_state=1, error_mask=2
        )
        for n in range(20)
    ]
    with project.db.transaction() as connection:
        connection.execute(database.workunit.insert(), foreign)
    ours = many_failed_workunits(project, 12)[20:]
    project.assimilator().one_pass()
    done = [row["id"] for row in project.rows(database.workunit) if row["assimilate_state"] == AssimilateState.DONE]
    assert done == ours and len(ours) == 12


def test_a_batch_that_cannot_be_written_as_a_whole_is_written_one_by_one(
    project: TinyProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = many_failed_workunits(project, 10)
    real = intake.record

    def record(connection: Any, job: Any, outcomes: Any, now: float) -> Any:
        if any(outcome.case.id == ids[3] for outcome in outcomes):
            raise ZeroDivisionError("a bug")
        return real(connection, job, outcomes, now)

    monkeypatch.setattr(intake, "record", record)
    assimilator = project.assimilator()
    assimilator.one_pass()
    left = [row["id"] for row in project.rows(database.workunit) if row["assimilate_state"] == AssimilateState.READY]
    assert left == [ids[3]] and assimilator.patience.failures == {ids[3]: 1}


@pytest.mark.parametrize("away", ["missing", "empty"])
def test_an_upload_directory_that_is_away_releases_no_slot(project: TinyProject, away: str) -> None:
    project.validate_round()
    uploads = project.tree.config.upload_dir
    hidden = uploads.with_name("hidden")
    uploads.rename(hidden)
    if away == "empty":
        uploads.mkdir()
    project.assimilator().one_pass()
    assert {row["state"] for row in project.rows(gt_microtask)} == {"issued"}
    if away == "empty":
        uploads.rmdir()
    hidden.rename(uploads)
    project.assimilator().one_pass()
    assert project.version_digests() == undisturbed(1)


def test_only_the_newest_versions_asked_for_stay_on_disk_and_can_be_replayed(project: TinyProject) -> None:
    with project.db.transaction() as connection:
        text = connection.execute(sa.select(gt_job.c.config)).scalar_one()
        settings = json.loads(text)
        settings["supply"]["keep_versions"] = 2
        connection.execute(sa.update(gt_job).values(config=json.dumps(settings)))
    # What a crash between publishing and deleting left behind goes with the next version.
    stray = project.job.folder.path / "versions" / f"state_000000_{'0' * 16}.safetensors"
    stray.write_bytes(b"left behind")
    for _ in range(3):
        project.make_version()
    job = project.job
    assert sorted({version for version, _ in job.folder.version_files()}) == [2, 3]
    assert sorted({base for base, _ in job.folder.payload_files()}) == [2]
    assert replay(project.db, job) == dict(zip([2, 3], project.version_digests()[2:], strict=True))
    with pytest.raises(Mistake, match="keep_versions"):
        roll_back(project.tree, project.db, job.name, 1)
