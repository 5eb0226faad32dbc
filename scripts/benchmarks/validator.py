"""Workunits judged per second by the validator daemon on MariaDB with a durable commit: by one process, and by two.

small     5,000 workunits with two results of about 1 KiB each, full bookkeeping: results, workunits, hosts, users,
          teams, host versions, app version, trust.
          Then as many again by two daemons that share them (`--mod 2 0` and `--mod 2 1`).
grad300k  workunits with two int8 gradients of 300,000 parameters, read, checked, decoded and compared.

The two copies of a workunit come from different rounding, so their files differ and their distance is computed.
Time runs from the moment when all of them need validation until none does. Statements are those that the
server counted meanwhile, BEGIN and COMMIT included.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
import pymysql
import sqlalchemy as sa

from boinc_project import database, store
from boinc_project.contract.microtask import essentials
from boinc_project.contract.update import read_update, write_update
from boinc_project.gt_tables import JobState
from boinc_project.rows import Key, update_rows
from boinc_project.states import NEVER, ValidateState
from boinc_project.store import JobRow
from scripts.benchmarks.common import BenchmarkFailed, commit_latency, scratch, shown
from scripts.benchmarks.jobs import (
    HOSTS,
    BenchProject,
    daemon,
    project_on_mariadb,
    reported,
    synthetic_update,
    wait_until,
)

SMALL_WIDTH, SMALL_LAYERS = 16, 2  # 544 parameters
LARGE_WIDTH, LARGE_LAYERS = 387, 2  # 300,312 parameters
TEAMS = 5
MAX_SLOTS = 2500  # of one job


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--small", type=int, default=5000, help="small workunits of one repeat (default 5000)")
    parser.add_argument("--large", type=int, default=200, help="large workunits of one repeat (default 200)")
    parser.add_argument("--repeats", type=int, default=3, help="repeats of each (default 3)")


def measure(options: argparse.Namespace) -> dict[str, float]:
    """small_wu_per_s (one daemon, and two), grad300k_wu_per_s (medians), statements_per_wu (small, one daemon)."""
    with scratch("validator") as folder, project_on_mariadb(folder) as project:
        print(f"one durable 4 KB write takes {1000 * commit_latency(folder):.2f} ms here (median)")
        _add_volunteers(project)
        small = _reported(project, folder, "small", SMALL_WIDTH, SMALL_LAYERS, 2 * options.small * options.repeats + 1)
        large = _reported(project, folder, "large", LARGE_WIDTH, LARGE_LAYERS, options.large * options.repeats + 1)
        print(f"{len(small)} small and {len(large)} large workunits with two results each are there", flush=True)
        with daemon(project, "validator"), _administrator(project) as administrator:
            _judge(project, administrator, [small.pop(), large.pop()])  # what only the first ones need
            counts, statements = zip(*(
                _judge(project, administrator, small[n * options.small : (n + 1) * options.small])
                for n in range(options.repeats)
            ), strict=True)  # fmt: skip
            print(f"small: {shown(list(counts), 'workunits/s')}", flush=True)
            rates = [
                _judge(project, administrator, large[n * options.large : (n + 1) * options.large])[0]
                for n in range(options.repeats)
            ]
            print(f"300,000 parameters: {shown(rates, 'workunits/s')}", flush=True)
        rest = small[options.repeats * options.small :]
        with daemon(project, "validator", instances=2), _administrator(project) as administrator:
            shared = [
                _judge(project, administrator, rest[n * options.small : (n + 1) * options.small])[0]
                for n in range(options.repeats)
            ]
            print(f"small, two validators by --mod: {shown(shared, 'workunits/s')}", flush=True)
        _check(project, options)
    return {
        "small_wu_per_s": statistics.median(counts),
        "small_wu_per_s_of_two": statistics.median(shared),
        "statements_per_wu": statistics.median(statements),
        "grad300k_wu_per_s": statistics.median(rates),
    }


def _add_volunteers(project: BenchProject) -> None:
    now = int(time.time())
    ids = range(1, HOSTS + 1)
    with project.db.transaction() as connection:
        teams = [
            database.new_row(database.team, id=n, create_time=now, name=f"team {n}", userid=n)
            for n in range(1, TEAMS + 1)
        ]
        connection.execute(database.team.insert(), teams)
        users = [
            database.new_row(
                database.user, id=n, create_time=now, email_addr=f"u{n}@example.org", name=f"u{n}",
                authenticator=f"{n:032x}", teamid=n % TEAMS + 1,
            )
            for n in ids
        ]  # fmt: skip
        connection.execute(database.user.insert(), users)
        hosts = [database.new_row(database.host, id=n, create_time=now, userid=n, domain_name=f"h{n}") for n in ids]
        connection.execute(database.host.insert(), hosts)
        versions = [
            database.new_row(database.host_app_version, host_id=n, app_version_id=1, max_jobs_per_day=100) for n in ids
        ]
        connection.execute(database.host_app_version.insert(), versions)


def _reported(project: BenchProject, folder: Path, name: str, width: int, layers: int, count: int) -> list[int]:
    """Ids of workunits whose two results are over and not judged yet, of as many jobs as it takes."""
    ids: list[int] = []
    while len(ids) < count:
        slots = min(MAX_SLOTS, count - len(ids))
        label = f"{name}{len(ids)}"
        job_id = project.add_job(folder / label, label, width=width, layers=layers, slots=slots)
        project.issue()
        ids += _reported_of(project, job_id)
        project.set_state(job_id, JobState.PAUSED)
    return ids


def _reported_of(project: BenchProject, job_id: int) -> list[int]:
    job, now, draws = project.job(job_id), int(time.time()), np.random.default_rng(3)
    opened = project.open_workunits(job_id)
    result_rows: dict[Key, store.Row] = {}
    for unit in opened:
        first = synthetic_update(job, unit.task, draws)
        for number, row in enumerate(unit.results):
            project.upload(row, _rounded_otherwise(job, unit.task, first) if number else first)
            claims = {"elapsed_time": 30.0, "flops_estimate": 2e9}
            result_rows[(int(row["id"]),)] = {**reported(unit.id, number, now), **claims}
    with project.db.transaction() as connection:
        update_rows(connection, database.result, ("id",), result_rows)
        never = {"transition_time": NEVER}
        update_rows(connection, database.workunit, ("id",), {(unit.id,): never for unit in opened})
    return [unit.id for unit in opened]


def _rounded_otherwise(job: JobRow, task: store.Row, data: bytes) -> bytes:
    """The same update as another machine would have it: every number off by some units of the last place."""
    microtask = essentials(str(task["document"]))
    types = job.folder.update_types(microtask.mode, microtask.steps, microtask.ships_state)
    found = read_update(data, types, microtask.codec, str(task["digest"]))
    tensors = {
        name: array if name.startswith("metric/") else (array * np.float32(1 + 3e-7)).astype(np.float32)
        for name, array in found.tensors.items()
    }
    return write_update(tensors, types, found.metadata, microtask.codec)


def _administrator(project: BenchProject) -> pymysql.Connection[pymysql.cursors.Cursor]:
    """A connection whose statements can be told from the daemon's: each is one."""
    url = project.db.url
    return pymysql.connect(host=url.host, port=url.port or 0, user="root", database=url.database, autocommit=True)


def _judge(project: BenchProject, administrator: pymysql.Connection, ids: list[int]) -> tuple[float, float]:
    """Workunits per second, and the server's statements per workunit."""
    asked = 0

    def number(query: str, column: int = 0) -> int:
        nonlocal asked
        asked += 1
        with administrator.cursor() as cursor:
            cursor.execute(query)
            row = cursor.fetchone()
        assert row is not None
        return int(row[column])

    questions = "SHOW GLOBAL STATUS LIKE 'Questions'"
    with project.db.transaction() as connection:
        update_rows(connection, database.workunit, ("id",), {(each,): {"need_validate": 1} for each in ids})
    before, start, asked = number(questions, 1), time.perf_counter(), 0
    wait_until(
        lambda: number("SELECT COUNT(*) FROM workunit WHERE need_validate > 0") == 0, "the validator does not finish"
    )
    seconds, after = time.perf_counter() - start, number(questions, 1)
    return len(ids) / seconds, (after - before - asked) / len(ids)


def _check(project: BenchProject, options: argparse.Namespace) -> None:
    """Every result was found valid, and every user has what the results were granted."""
    with project.db.read() as connection:
        table = database.result
        states = connection.execute(sa.select(table.c.validate_state, sa.func.count()).group_by(table.c.validate_state))
        found = {int(state): int(count) for state, count in states}
        granted = float(connection.scalar(sa.select(sa.func.sum(table.c.granted_credit))) or 0)
        owned = float(connection.scalar(sa.select(sa.func.sum(database.user.c.total_credit))) or 0)
    expected = 2 * ((2 * options.small + options.large) * options.repeats + 2)
    if found != {int(ValidateState.VALID): expected} or abs(granted - owned) > 1e-6 * granted:
        raise BenchmarkFailed(
            f"results by state {found} instead of {expected} valid ones; {granted} and {owned} credits"
        )
