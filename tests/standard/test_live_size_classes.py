"""BOINC's size classes, as jobs with speed_classes use them: its transitioner, size_regulator, census and scheduler."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from boinc_project import size_classes
from boinc_project.gt_tables import gt_microtask
from boinc_project.standard.size_steps import CENSUS
from boinc_project.states import ServerState, ValidateState
from tests.live_project import APP, LiveProject, Trained, trained_job, wait_for
from tests.private_job import PrivateJob, private_job

pytestmark = pytest.mark.timeout(1500)
SPEEDS, STEPS = (1.0, 0.5, 0.25), {2: 4, 1: 2, 0: 1}  # by class; the fastest hosts are those of the highest
SLOTS, COPIES = 6, 2
LOW, HIGH = 1, 3
CENSUS_CREDIT = 10  # size_census.php counts hosts with more recent average credit


@pytest.fixture(scope="module")
def sized(project: LiveProject, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateJob]:
    """A job for three classes, of which no volunteer is sent anything, with the results of its first round."""
    with private_job(project, tmp_path_factory.mktemp("sized"), slots=SLOTS, speeds=SPEEDS) as job:
        job.generator().one_pass()
        job.wait_for_transitioner()
        yield job


@contextmanager
def regulator(job: PrivateJob) -> Iterator[None]:
    """BOINC's size_regulator for the job's app."""
    words = ("--app_name", job.made.mark, "--lo", str(LOW), "--hi", str(HIGH), "--sleep_time", "1")
    process = subprocess.Popen(
        ["size_regulator", *words, "--priority_order_create_time"],
        cwd=job.live.temporary_folder,
        env=job.live.daemon_environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
        assert process.poll() is None, "size_regulator ended"
    finally:
        process.kill()
        process.wait()


def by_class(results: list[dict[str, Any]], state: ServerState) -> Counter[int]:
    return Counter(int(each["size_class"]) for each in results if each["server_state"] == state)


def test_workunits_of_each_class_have_its_steps_and_their_results_are_inactive(sized: PrivateJob) -> None:
    tasks = {row["workunit_name"]: row for row in sized.rows(gt_microtask, job_id=sized.job_id)}
    units, results = sized.made.workunits(), sized.made.results()
    assert Counter(unit["size_class"] for unit in units) == dict.fromkeys(STEPS, SLOTS // len(STEPS))
    for unit in units:
        assert unit["size_class"] == tasks[unit["name"]]["size_class"]
        assert tasks[unit["name"]]["steps"] == STEPS[int(unit["size_class"])]
        copies = [each for each in results if each["workunitid"] == unit["id"]]
        assert [each["size_class"] for each in copies] == [unit["size_class"]] * COPIES
    assert by_class(results, ServerState.INACTIVE) == dict.fromkeys(STEPS, SLOTS // len(STEPS) * COPIES)


def test_size_regulator_makes_some_of_each_class_unsent_both_copies_of_the_oldest_workunit_first(
    sized: PrivateJob,
) -> None:
    released = dict.fromkeys(STEPS, HIGH)
    with regulator(sized):
        wait_for(lambda: by_class(sized.made.results(), ServerState.UNSENT) == released, "size_regulator")
    for number in STEPS:
        units = sorted(int(unit["id"]) for unit in sized.made.workunits() if unit["size_class"] == number)
        unsent = [each for each in sized.made.results() if each["server_state"] == ServerState.UNSENT]
        counts = Counter(int(each["workunitid"]) for each in unsent if each["size_class"] == number)
        assert [counts[unit] for unit in units] == [COPIES, HIGH - COPIES]


@pytest.fixture(scope="module")
def classes(project: LiveProject) -> int:
    """How many size classes our app has; skipped where it has none."""
    found = project.size_classes
    if found < 2:
        pytest.skip(f"the app {APP} has no size classes: boinc-train install {project.folder} --size-classes 3")
    return found


def test_boinc_s_census_is_the_one_that_we_understand(project: LiveProject, classes: int) -> None:
    """Its quantiles are those of the speeds that we take hosts to have."""
    program, script = CENSUS.split()
    done = subprocess.run(
        [program, script], cwd=project.temporary_folder, env=project.daemon_environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with project.db.read() as connection:
        measured = size_classes.measured_speeds(connection, project.appid)
    speeds = [each.speed for each in measured if each.expavg_credit > CENSUS_CREDIT]
    found = size_classes.read_census(size_classes.census_path(project.folder, APP), classes)
    assert found == pytest.approx(size_classes.quantiles(speeds, classes), rel=1e-5)


@pytest.fixture(scope="module")
def trained_in_classes(
    project: LiveProject, classes: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Trained]:
    """The tiny job trained to its end with as many speed_classes as the app has size classes."""
    speeds = [1 / 2**number for number in range(classes)]
    changes = (
        ("batches_per_microtask = 3", f"batches_per_microtask = {2**classes}\nspeed_classes = {speeds}"),
        ("max_versions = 4", "max_versions = 2"),
        ("microtasks_per_version = 2", f"microtasks_per_version = {classes}"),
    )
    with trained_job(project, tmp_path_factory.mktemp("classes"), changes) as done:
        yield done


def test_a_job_with_speed_classes_reaches_its_last_version(trained_in_classes: Trained) -> None:
    """Its results were sent, so size_regulator has released them; the scheduler has sent those of every class."""
    assert trained_in_classes.job.current_version == 2
    steps = trained_in_classes.job.config.class_steps
    tasks = {row["workunit_name"]: row for row in trained_in_classes.project.rows(gt_microtask)}
    results = trained_in_classes.results()
    for unit in trained_in_classes.workunits():
        number = int(unit["size_class"])
        assert tasks[unit["name"]]["steps"] == steps[number]
        mine = [each for each in results if each["workunitid"] == unit["id"]]
        assert all(each["size_class"] == number for each in mine)
        assert sum(each["validate_state"] == ValidateState.VALID for each in mine) >= COPIES
