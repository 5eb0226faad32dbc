"""A validator or assimilator killed at any statement or file boundary loses nothing and does nothing twice.

Compared with an undisturbed run: credit of users, teams, hosts and results, every judgement, the ledger, the
weights of the version and all files, to the last byte. On SQLite and on MariaDB.
"""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa

from assimilator.__main__ import main as assimilator
from boinc_project import database
from boinc_project.gt_tables import gt_job, gt_microtask
from boinc_project.states import AssimilateState, ErrorMask
from tests import databases
from tests.crash_points import Scene
from tests.tiny_project import TinyProject
from validator.__main__ import main as validator

ARGUMENTS = ["--one_pass", "--app", "gradient"]
DAEMONS = ("validator", "assimilator")
KINDS = databases.parameters(databases.SQLITE, databases.MARIADB)
SAMPLE = 8  # crashes of each daemon on each database in the normal suite
LONG = 130  # in the long one, beyond every single boundary: over a thousand in all


def new_project(folder: Path, slots: int) -> TinyProject:
    """A project whose rounds have so many slots."""
    project = TinyProject(folder)
    settings = json.loads(project.job.config.canonical_json())
    settings["train"]["microtasks_per_version"] = slots
    with project.db.transaction() as connection:
        connection.execute(sa.update(gt_job).values(config=json.dumps(settings)))
        team = database.new_row(database.team, id=1, name="team", create_time=1, userid=1)
        connection.execute(database.team.insert(), team)
    project.add_host(1, 1)
    project.change(database.user, 1, teamid=1)
    return project


def to_validate(project: TinyProject) -> None:
    """Every kind of workunit that the validator meets: agreeing, differing, broken, late, with a copy unsent."""
    project.issue()
    units = [int(unit["id"]) for unit in project.rows(database.workunit)]
    late, spare = units[4], units[5]
    for unit in (late, spare):
        project.change(database.workunit, unit, target_nresults=3, transition_time=int(time.time()) - 1)
    project.transitioner.run_once()

    def copies(unit: int) -> list[dict[str, object]]:
        return project.rows(database.result, workunitid=unit)

    for result in copies(late)[:2]:
        project.answer(result)
    project.transitioner.run_once()
    project.validator().one_pass()
    project.answer(copies(late)[2])
    for unit in (units[0], units[1], spare):
        for result in copies(unit)[:2]:
            project.answer(result)
    project.answer(copies(units[2])[0])
    project.answer(copies(units[2])[1], b"")
    project.answer(copies(units[3])[0])
    different = project.changed_update(project.unit_of(copies(units[3])[1]), np.negative)
    project.answer(copies(units[3])[1], different)
    project.transitioner.run_once()
    assert sum(1 for unit in project.rows(database.workunit) if unit["need_validate"]) >= 5


def to_assimilate(project: TinyProject) -> None:
    """A complete round of validated gradients, and two workunits that failed."""
    for result in project.issue():
        project.answer(result)
    project.transitioner.run_once()
    project.validator().one_pass()
    ready = {"assimilate_state": int(AssimilateState.READY)}
    assert len(project.rows(database.workunit, **ready)) == 6
    names = ["gt_tiny_failed_1", "gt_tiny_failed_2"]
    mask = int(ErrorMask.TOO_MANY_ERROR_RESULTS)
    units = [
        database.new_row(database.workunit, name=name, appid=1, create_time=1, error_mask=mask, **ready)
        for name in names
    ]
    tasks = [
        {
            "job_id": project.job_id, "version": 99, "slot": slot, "attempt": 0, "workunit_name": name, "digest": "",
            "document": "{}", "samples": 1, "flops": 1.0, "state": "issued", "create_time": 1,
        }
        for slot, name in enumerate(names)
    ]  # fmt: skip
    with project.db.transaction() as connection:
        connection.execute(database.workunit.insert(), units)
        connection.execute(gt_microtask.insert(), tasks)


@contextlib.contextmanager
def scene(kind: str, daemon: str, folder: Path) -> Iterator[Scene]:
    """What the daemon has to do, on a database of this kind."""
    with databases.chosen(kind), new_project(folder / "project", 6) as project:
        (to_validate if daemon == "validator" else to_assimilate)(project)
        yield Scene(project, validator if daemon == "validator" else assimilator, ARGUMENTS, folder)


def places(made: Scene, count: int, seed: int) -> list[tuple[int, ...]]:
    """So many sequences of one to three crashes, spread over the run."""
    chance = random.Random(seed)
    return [
        (1 + (number * made.boundaries) // count, *(chance.randint(1, made.boundaries) for _ in range(number % 3)))
        for number in range(count)
    ]


@pytest.mark.parametrize("daemon", DAEMONS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_daemon_killed_here_and_there_leaves_what_an_undisturbed_one_leaves(
    kind: str, daemon: str, tmp_path: Path
) -> None:
    with scene(kind, daemon, tmp_path) as made:
        assert made.boundaries > 20
        for sequence in places(made, SAMPLE, seed=1):
            made.crash(*sequence)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("daemon", DAEMONS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_daemon_killed_at_every_boundary_leaves_what_an_undisturbed_one_leaves(
    kind: str, daemon: str, tmp_path: Path
) -> None:
    with scene(kind, daemon, tmp_path) as made:
        sequences = [(place,) for place in range(1, made.boundaries + 1)] + places(made, LONG, seed=2)
        for sequence in sequences:
            made.crash(*sequence)
        print(f"{daemon} on {kind}: {made.boundaries} boundaries, {len(sequences)} runs")


def test_the_expected_end_holds_credit_a_version_and_a_ledger(tmp_path: Path) -> None:
    """What is compared must be there: an empty picture would equal another one."""
    with scene(databases.SQLITE, "validator", tmp_path / "v") as made:
        rows = [dict(row) for row in made.expected["user"]]
        assert sum(row["total_credit"] for row in rows) > 0
        assert sum(dict(row)["total_credit"] for row in made.expected["team"]) > 0
        assert {dict(row)["need_validate"] for row in made.expected["workunit"]} == {0}
    with scene(databases.SQLITE, "assimilator", tmp_path / "a") as made:
        assert [dict(row)["version"] for row in made.expected["gt_version"]] == [0, 1]
        assert {dict(row)["disposition"] for row in made.expected["gt_ledger"]} == {"applied"}
        assert {dict(row)["assimilate_state"] for row in made.expected["workunit"]} == {int(AssimilateState.DONE)}
