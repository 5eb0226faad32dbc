"""Workunits created per second by the work generator daemon, one process, on MariaDB with a durable commit.

The workunits of a job share graph, state and data; each has a microtask file of its own, which is published
durably with its `.md5` before the workunit's row. Measured from the moment the job runs until all its workunits
are in the database. The transitioner's part (making results) is not in the figure.
"""

from __future__ import annotations

import argparse
import statistics
import time

import sqlalchemy as sa

from boinc_project import database, templates
from boinc_project.gt_tables import JobState
from boinc_project.states import NEVER
from scripts.benchmarks.common import BenchmarkFailed, commit_latency, scratch, shown
from scripts.benchmarks.jobs import BenchProject, daemon, project_on_mariadb, wait_until


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workunits", type=int, default=2000, help="workunits of one repeat (default 2000)")
    parser.add_argument("--repeats", type=int, default=3, help="jobs, one after the other (default 3)")


def measure(options: argparse.Namespace) -> dict[str, float]:
    """wu_per_s, the median over the jobs."""
    rates = []
    with scratch("generator") as folder, project_on_mariadb(folder) as project:
        print(f"one durable 4 KB write takes {1000 * commit_latency(folder):.2f} ms here (median)")
        jobs = [
            project.add_job(folder / f"job{n}", f"job{n}", width=16, layers=2, slots=options.workunits, running=False)
            for n in range(options.repeats)
        ]
        with daemon(project, "work_generator"):
            for number, job_id in enumerate(jobs):
                project.set_state(job_id, JobState.RUNNING)
                start = time.perf_counter()
                wanted = (number + 1) * options.workunits
                wait_until(lambda: project.highest_workunit() >= wanted, "the generator does not make the workunits")  # noqa: B023
                rates.append(options.workunits / (time.perf_counter() - start))
                _check(project)
                with project.db.transaction() as connection:  # as if the transitioner had handled them
                    connection.execute(sa.update(database.workunit).values(transition_time=NEVER))
                project.set_state(job_id, JobState.PAUSED)
    print(f"{options.workunits} workunits of one round: {shown(rates, 'workunits/s')}")
    return {"wu_per_s": statistics.median(rates)}


def _check(project: BenchProject) -> None:
    """Every file that the workunits name must be there."""
    with project.db.read() as connection:
        documents = list(connection.scalars(sa.select(database.workunit.c.xml_doc)))
    names = {file.name for document in documents for file in templates.listed_files(str(document))}
    missing = [name for name in names if not project.tree.download_path(name).exists()]
    if missing:
        raise BenchmarkFailed(f"{len(missing)} input files are missing, the first is {missing[0]}")
