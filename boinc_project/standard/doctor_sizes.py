"""Doctor's check of what jobs with speed_classes need: size classes in the database, the files and <daemons>."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from boinc_project import size_classes, store
from boinc_project.database import app
from boinc_project.gt_tables import JobState
from boinc_project.standard import schema, size_steps
from boinc_project.standard.findings import Finding, Patient, error, warning
from boinc_project.store import JobRow

OLD_CENSUS_S = 2 * 86400.0
LEAST_HOSTS = 5  # of each class, before their speeds say anything
FAR_OFF = 1.5


def check_sizes(patient: Patient, connection: Connection) -> Iterator[Finding]:
    """For each of our apps: its size classes are those of its jobs, and somebody sees to them."""
    if schema.own_tables(connection)[1]:
        return
    for name in patient.apps:
        row = connection.execute(sa.select(app.c.id, app.c.n_size_classes).where(app.c.name == name)).first()
        if row is None:
            continue
        running = (JobState.RUNNING, JobState.PAUSED, JobState.FAILED)
        jobs = [job for job in store.jobs(connection, *running, appid=int(row.id)) if job.config.class_steps]
        classes = int(row.n_size_classes)
        if classes > 1 or jobs:
            yield from _app(patient, connection, name, classes, jobs)


def _app(patient: Patient, connection: Connection, name: str, classes: int, jobs: list[JobRow]) -> Iterator[Finding]:
    wanted = len(jobs[0].config.class_steps) if jobs else classes
    install = f"boinc-train install {patient.folder} --app {name} --size-classes {wanted}"
    for job in jobs:
        if len(job.config.class_steps) != classes:
            yield error(
                f"n_size_classes of {name} is {classes}, and speed_classes of {job.name} are"
                f" {len(job.config.class_steps)}: no task of it is made",
                install if patient.standard else f"set n_size_classes of {name} to {len(job.config.class_steps)}",
            )
    if not jobs and patient.standard:
        yield warning(
            f"n_size_classes of {name} is {classes}, but no job has speed_classes, so our workunits have no size",
            f"set n_size_classes to 0 in the row of app {name}: the scheduler ranks hosts by sizes that mean nothing",
        )
    path = size_classes.census_path(patient.folder, name)
    census = size_classes.read_census(path, max(classes, 2))
    if patient.standard and classes > 1:
        if census is None:
            yield error(f"{path} is missing or too short, so BOINC's feeder ends when it starts", install)
        elif patient.now - path.stat().st_mtime > OLD_CENSUS_S:
            yield warning(
                f"{path} is older than two days", "see log_HOST/size_census.out; run bin/start --cron by cron"
            )
        if jobs:
            yield from _standard(patient, name, install)
    for job in jobs if census is not None else ():
        yield from _speeds(connection, job, census)


def _standard(patient: Patient, name: str, install: str) -> Iterator[Finding]:
    if "size_classes" not in patient.config.elements:
        yield warning(
            "<size_classes> is not in config.xml, so the scheduler sends tasks of any size to any host", install
        )
    if patient.config.elements.get("batch_accel", "0") != "0":
        yield error("<batch_accel> and <size_classes> exclude each other in BOINC", "take <batch_accel> out")
    found = size_steps.regulator(patient.daemons, name)
    if found is None or found.disabled:
        yield error(f"no size_regulator for {name} is in <daemons>, so no task with a size class is ever sent", install)
    census = size_steps.census_task(patient.daemons)
    if census is None or census.disabled:
        yield warning("size_census.php is not in <tasks>, so the hosts' speeds are not counted", install)


def _speeds(connection: Connection, job: JobRow, census: tuple[float, ...] | None) -> Iterator[Finding]:
    """Whether the classes of the hosts are as fast, beside the fastest, as the job has it."""
    assert census is not None
    by_class: dict[int, list[float]] = {}
    for each in size_classes.measured_speeds(connection, job.appid):
        by_class.setdefault(size_classes.size_class(census, each.speed), []).append(each.speed)
    speeds = job.config.train.speed_classes
    if len(census) != len(speeds) - 1 or any(len(by_class.get(n, ())) < LEAST_HOSTS for n in range(len(speeds))):
        return
    medians = [statistics.median(by_class[number]) for number in reversed(range(len(speeds)))]
    found = [median / medians[0] for median in medians]
    if any(max(a / b, b / a) > FAR_OFF for a, b in zip(found, speeds, strict=True)):
        yield warning(
            f"speed_classes of {job.name} are {_listed(speeds)}, but the hosts of these classes have median speeds of"
            f" {_listed(found)}",
            "write those into the job.toml of the next job, or fewer classes",
        )


def _listed(numbers: tuple[float, ...] | list[float]) -> str:
    return f"[{', '.join(f'{each:.2g}' for each in numbers)}]"
