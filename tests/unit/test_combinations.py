"""Every combination of settings that a job may have trains, through crashes, and its ledger replays to the same bytes;
every other one is refused in one sentence."""

from __future__ import annotations

import contextlib
import random
import re
import shutil
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import sqlalchemy as sa

from assimilator import apply
from assimilator.anchors import Anchors
from assimilator.evaluation import Evaluator
from assimilator.replay import replay
from boinc_project import database
from boinc_project.gt_tables import JobState, MicrotaskState, gt_microtask
from boinc_project.job_config import JobError, load_config
from boinc_project.policies import POLICIES
from boinc_project.simulator.computing import Evaluation
from boinc_project.states import ServerState
from tests.combinations import Combination, any_combination, covering, text_of
from tests.tiny_project import TINY_JOB, TinyProject, exported

QUICK, LONG = 11, 220
VERSIONS = 3


class Crash(BaseException):
    """The daemon dies here."""


def whole(combination: Combination) -> tuple[tuple[str, str], ...]:
    """Changes that make tests/data/tiny_job/job.toml the combination's."""
    return (((TINY_JOB / "job.toml").read_text(), text_of(combination)),)


def report(project: TinyProject, turn: int, backwards: bool) -> None:
    """Honest hosts with addresses of their own report what is out: all of it, or of one microtask."""
    waiting = [str(r["workunit_name"]) for r in project.rows(gt_microtask, state=str(MicrotaskState.ISSUED))]
    chosen = waiting[::-1] if backwards else waiting
    if project.job.config.policy.flow and not backwards:
        chosen = [waiting[-1 if turn % 3 else 0]] if waiting else []
    for name in chosen:
        for row in project.rows(database.result, server_state=int(ServerState.UNSENT)):
            if str(project.unit_of(row)["name"]) == name:
                number = int(re.search(r"_(\d+)$", str(row["name"]))[1]) + 1  # type: ignore[index]
                project.answer(row, user=number)
                project.change(database.host, number, external_ip_addr=f"10.{number}.1.1")
        settle(project)


def settle(project: TinyProject) -> None:
    """Validate and take in; whoever makes a version dies once before its files are there, and once after."""
    validator = project.validator(start=Evaluation)
    for _ in range(40):  # what is tried on held-out data, or computed by the server, is ready in a later pass
        project.transitioner.run_once()
        validator.one_pass()
        if not project.rows(database.workunit, need_validate=1):
            break
    made = project.assimilator()
    made.anchors, made.evaluator = Anchors(project.db, Evaluation), Evaluator(project.db, Evaluation)
    for place in ("compute", "_finish"):
        with contextlib.suppress(Crash), patch.object(apply, place, side_effect=Crash):
            made.one_pass()
    made.one_pass()
    made.one_pass()
    project.transitioner.run_once()


def trained(folder: Path, combination: Combination, backwards: bool = False) -> list[str]:
    """The digests of the versions that it makes; each of them is what the ledger makes."""
    with TinyProject(folder, changes=whole(combination)) as project:
        for turn in range(60):
            if project.job.current_version == VERSIONS:
                break
            assert project.job.state == JobState.RUNNING, project.job.note
            project.generator().one_pass()
            project.transitioner.run_once()
            with project.db.transaction() as connection:  # hosts of all classes are there
                inactive = database.result.c.server_state == int(ServerState.INACTIVE)
                connection.execute(
                    sa.update(database.result).where(inactive).values(server_state=int(ServerState.UNSENT))
                )
            report(project, turn, backwards)
        assert project.job.current_version == VERSIONS, stuck(project)
        found = project.version_digests()
        again = replay(project.db, project.job)
        assert list(again.values()) == found[min(again) :]
        newest = project.job.folder.read_state(VERSIONS, found[VERSIONS])
        assert all(np.isfinite(array).all() for array in newest.values())
        project.generator().one_pass()
        assert project.job.state == JobState.FINISHED
        return found


def stuck(project: TinyProject) -> str:
    """What became of the workunits, for a failed test."""
    said = [f"version {project.job.current_version}, {project.job.note}"]
    for unit in project.rows(database.workunit):
        results = project.rows(database.result, workunitid=unit["id"])
        states = [(r["server_state"], r["outcome"], r["validate_state"]) for r in results]
        said.append(f"{unit['name']}: quorum {unit['min_quorum']}, errors {unit['error_mask']}, {states}")
    return "\n".join(said)


def shown(combination: Combination) -> str:
    return ", ".join(f"{name} {choice}" for name, choice in combination.items() if choice != "none")


def check(combination: Combination, folder: Path) -> None:
    try:
        found = trained(folder / "one", combination)
        # What a flow takes in first, and of which speed class tasks are made, does depend on the hosts.
        if not POLICIES[combination["policy"]].flow and combination["classes"] == "none":
            assert trained(folder / "other", combination, backwards=True) == found, "the order of arrival shows"
    except AssertionError as error:
        raise AssertionError(f"{shown(combination)}\n{error}") from error
    finally:
        exported.cache_clear()
        shutil.rmtree(folder)


@pytest.mark.parametrize("number", range(QUICK))
def test_settings_go_together(number: int, tmp_path: Path) -> None:
    check(covering(1, QUICK)[number], tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("number", range(LONG))
def test_all_pairs_of_settings_go_together(number: int, tmp_path: Path) -> None:
    check(covering(2, LONG)[number], tmp_path)


def test_settings_that_do_not_go_together_are_refused_in_one_sentence(tmp_path: Path) -> None:
    for name in ("tiny.py", "counted.py"):
        (tmp_path / name).write_text("")
    for seed in range(300):
        (tmp_path / "job.toml").write_text(text_of(any_combination(random.Random(seed))))
        try:
            load_config(tmp_path)
        except JobError as error:
            said = str(error)
            assert "\n" not in said and len(said) < 600 and said.startswith(str(tmp_path / "job.toml")), said
