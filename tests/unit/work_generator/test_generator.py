"""The work generator daemon on a real database: workunits with generous bounds, supply, helpers, retiring."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from boinc_project import database, store
from boinc_project.contract.update import max_update_bytes, update_types
from boinc_project.daemon import Options
from boinc_project.gt_tables import JobState, gt_file, gt_job, gt_microtask
from boinc_project.states import AssimilateState, ServerState
from tests.tiny_project import PROGRAM_PEAK_BYTES, TinyProject, tiny_project
from work_generator.supply import Issue

pytestmark = pytest.mark.usefixtures("each_database")

HOST_SPEEDS = (1e9, 2.7e12, 1e14, 1e15)


@pytest.fixture
def project() -> Iterator[TinyProject]:
    with tiny_project() as made:
        yield made


@pytest.fixture
def diloco() -> Iterator[TinyProject]:
    with tiny_project("diloco.toml") as made:
        yield made


def job_state(project: TinyProject) -> tuple[str, str]:
    return str(project.job.state), project.job.note


def set_state(project: TinyProject, state: JobState) -> None:
    with project.db.transaction() as connection:
        store.set_job_state(connection, project.job_id, state)


@pytest.mark.parametrize("toml", ["job.toml", "diloco.toml"])
def test_bounds_leave_every_host_half_an_hour_and_ten_times_what_it_expects(toml: str) -> None:
    with tiny_project(toml) as project:
        project.issue()
        for unit in project.rows(database.workunit):
            for speed in HOST_SPEEDS:
                limit, expected = unit["rsc_fpops_bound"] / speed, unit["rsc_fpops_est"] / speed
                assert limit >= 1800 and limit >= 10 * expected
            facts = project.job.facts
            assert unit["rsc_memory_bound"] >= 1.5 * (facts.memory_bytes + PROGRAM_PEAK_BYTES)
            sizes = sum(row["bytes"] for row in project.rows(gt_file, kind="shard"))
            assert unit["rsc_disk_bound"] >= 500e6 + sizes + 3 * facts.memory_bytes + facts.max_update_bytes


def test_the_largest_honest_update_fits_the_output_file_of_the_result(project: TinyProject) -> None:
    (result, *_) = project.issue()
    (limit,) = re.findall(r"<max_nbytes>([0-9.e+]+)</max_nbytes>", str(result["xml_doc_in"]))
    microtask = project.microtask_of(project.unit_of(result)["name"])
    types = update_types(project.job.folder.gradient_graph, microtask.mode, microtask.steps)
    assert (
        float(limit) >= max_update_bytes(types, microtask.codec) > len(project.honest_update(project.unit_of(result)))
    )


def test_a_round_is_issued_once_and_the_next_pass_issues_nothing(project: TinyProject) -> None:
    assert len(project.issue()) == 4
    assert project.generator().one_pass() is False
    assert len(project.rows(database.workunit)) == len(project.rows(gt_microtask)) == 2


def test_workunits_take_their_fields_from_the_job_and_their_inputs_stay(project: TinyProject) -> None:
    project.issue()
    for unit in project.rows(database.workunit):
        assert (unit["min_quorum"], unit["target_nresults"], unit["delay_bound"]) == (2, 2, 3600)
        infos = str(unit["xml_doc"]).count("<file_info>")
        assert infos == str(unit["xml_doc"]).count("<no_delete/>") >= 4, "shared inputs outlive the workunit"


def test_two_generators_at_once_by_mistake_issue_each_slot_once(project: TinyProject) -> None:
    one, two = project.generator(), project.generator()
    job = project.job  # both read the job before either has issued anything
    one._supply(job)
    for slot in (0, 1):
        two._issue(job, [Issue(slot, 0)])
    assert len(project.rows(database.workunit)) == 2


def test_nothing_is_issued_for_a_version_that_is_no_longer_current(project: TinyProject) -> None:
    old = project.job
    project.make_version()
    before = len(project.rows(database.workunit))
    project.generator()._issue(old, [Issue(0, 1)])
    assert len(project.rows(database.workunit)) == before


@pytest.mark.parametrize("state", [JobState.PAUSED, JobState.FAILED, JobState.FINISHED])
def test_only_running_jobs_are_supplied(project: TinyProject, state: JobState) -> None:
    set_state(project, state)
    assert project.issue() == []


def test_a_missing_input_stops_the_job_before_any_workunit_exists_and_resuming_after_repair_works(
    project: TinyProject,
) -> None:
    path = project.tree.download_path(project.job.facts.train[0].file.name)
    for shard in project.job.facts.train:
        project.tree.download_path(shard.file.name).rename(path.with_name(f"away_{shard.file.name}"))
    assert project.issue() == []
    state, note = job_state(project)
    assert state == "failed" and "restore it, then resume" in note
    for shard in project.job.facts.train:
        path.with_name(f"away_{shard.file.name}").rename(project.tree.download_path(shard.file.name))
    set_state(project, JobState.RUNNING)
    assert len(project.issue()) == 4


def test_an_input_whose_bytes_changed_stops_the_job_before_any_workunit_exists(project: TinyProject) -> None:
    path = next(project.tree.config.download_dir.rglob("gt_tiny_train0_*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    project.generator().one_pass()
    assert project.job.state == JobState.FAILED and path.name in project.job.note
    assert project.rows(database.workunit) == []


def test_a_job_whose_every_slot_failed_three_times_stops_and_says_so(project: TinyProject) -> None:
    for _ in range(3):
        project.issue()
        for unit in project.rows(database.workunit, assimilate_state=int(AssimilateState.INIT)):
            project.change(database.workunit, unit["id"], error_mask=1, assimilate_state=1)
        project.assimilator().one_pass()
    project.generator().one_pass()
    state, note = job_state(project)
    assert state == "failed" and "failed 3 times" in note
    assert len(project.rows(database.workunit)) == 6


def test_a_finished_job_says_why(project: TinyProject) -> None:
    with project.db.transaction() as connection:
        connection.execute(gt_job.update().values(create_time=0, config=with_max_hours(project)))
    project.generator().one_pass()
    assert job_state(project) == ("finished", "1 hours have passed (max_hours)")


def with_max_hours(project: TinyProject) -> str:
    text: str = project.job.config.canonical_json()
    assert '"max_hours":null' in text
    return text.replace('"max_hours":null', '"max_hours":1.0')


def test_a_straggler_gets_one_further_copy_and_stays_in_progress(project: TinyProject) -> None:
    results = project.issue()
    long_ago = int(time.time()) - 10_000
    for number, result in enumerate(results):
        project.change(
            database.result, result["id"], server_state=int(ServerState.IN_PROGRESS), sent_time=long_ago,
            hostid=number, userid=number, report_deadline=long_ago + 10**6,
        )  # fmt: skip
    for unit in project.rows(database.workunit):
        project.change(database.workunit, unit["id"], transition_time=long_ago + 10**6)
    for _ in range(3):
        project.generator().one_pass()
        project.transitioner.run_once()
    assert {unit["target_nresults"] for unit in project.rows(database.workunit)} == {3}
    states = [r["server_state"] for r in project.rows(database.result)]
    assert sorted(states) == [int(ServerState.UNSENT)] * 2 + [int(ServerState.IN_PROGRESS)] * 4


def test_a_round_goes_on_although_the_transitioner_overlooked_a_report(project: TinyProject) -> None:
    results = project.issue()
    for result in results:
        project.answer(result)
    project.transitioner.run_once()
    for unit in project.rows(database.workunit):
        project.change(database.workunit, unit["id"], need_validate=0, transition_time=int(time.time()) + 864_000)
    project.generator(dry_run=True).one_pass()
    project.transitioner.run_once()
    assert {unit["need_validate"] for unit in project.rows(database.workunit)} == {0}
    project.generator().one_pass()
    project.transitioner.run_once()
    assert {unit["need_validate"] for unit in project.rows(database.workunit)} == {1}


def test_published_states_of_older_versions_are_retired_once_nobody_can_ask_for_them(project: TinyProject) -> None:
    def published() -> list[int]:
        return [row["version"] for row in project.rows(gt_file, kind="state", state="published")]

    results = project.issue()
    extra = results[0]["workunitid"]
    project.change(database.workunit, extra, target_nresults=3, transition_time=0)
    project.transitioner.run_once()
    straggler = project.rows(database.result, workunitid=extra)[-1]
    project.change(
        database.result, straggler["id"], server_state=int(ServerState.IN_PROGRESS), hostid=9, userid=9,
        sent_time=int(time.time()), report_deadline=int(time.time()) + 3600,
    )  # fmt: skip
    for result in results:
        project.answer(result)
    project.transitioner.run_once()
    project.validator().one_pass()
    project.assimilator().one_pass()
    generator = project.generator()
    generator.one_pass()
    assert published() == [0, 1], "a host still computes from version 0"
    project.answer(straggler)
    project.transitioner.run_once()
    generator.one_pass()
    assert published() == [1]
    (gone,) = project.rows(gt_file, kind="state", state="deleted")
    assert not project.tree.download_path(gone["name"]).exists()
    shards: list[dict[str, Any]] = project.rows(gt_file, kind="shard")
    assert all(project.tree.download_path(row["name"]).exists() for row in shards)


def test_a_dry_run_changes_nothing(project: TinyProject) -> None:
    project.generator(dry_run=True).one_pass()
    assert project.rows(database.workunit) == project.rows(gt_microtask) == []
    assert project.generator(dry_run=True).options == Options(one_pass=True, sleep_interval=0.01, dry_run=True)


def test_instances_with_mod_share_the_jobs(project: TinyProject) -> None:
    project.generator(mod=(2, 0)).one_pass()
    assert project.rows(database.workunit) == []
    project.generator(mod=(2, 1)).one_pass()
    assert len(project.rows(database.workunit)) == 2


def test_jobs_of_another_app_are_left_to_that_app_s_daemons(project: TinyProject) -> None:
    generator = project.generator()
    generator.appid = project.appid + 1
    assert not generator.one_pass()
    assert project.rows(database.workunit) == []


def test_local_steps_name_the_optimizer_graph_and_one_rate_per_step(diloco: TinyProject) -> None:
    (result, *_) = diloco.issue()
    microtask = diloco.microtask_of(diloco.unit_of(result)["name"])
    assert microtask.mode == "local-steps" and microtask.steps == 5
    assert "optimizer.json.zst" in microtask.files
    assert microtask.learning_rates == (pytest.approx(0.02),) * 5
    assert microtask.first_step == 5 * microtask.slot
