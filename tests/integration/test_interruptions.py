"""Trainings in which every process is killed again and again end with the weights of an undisturbed one."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from assimilator.replay import replay
from boinc_project import database
from boinc_project.gt_tables import gt_ledger, gt_round
from boinc_project.processes import Processes
from tests.databases import REPEATED
from tests.tiny_project import TinyProject, tiny_project
from tests.training import train

pytestmark = pytest.mark.usefixtures("each_database")

NAMES = ("server", "work_generator", "validator", "assimilator")


def undisturbed() -> list[str]:
    """Digests of the versions when nothing goes wrong."""
    with tiny_project() as project:
        for _ in range(project.job.config.train.max_versions):
            project.make_version()
        return project.version_digests()


def killer(seed: int, kills: int, seconds: float) -> tuple[Callable[[Processes], None], list[str]]:
    """Kills one process after another with SIGKILL, at random moments `seconds` apart on average."""
    chance = random.Random(seed)
    victims: list[str] = []
    due = [time.monotonic() + chance.uniform(0.5, 3)]

    def disturb(processes: Processes) -> None:
        if len(victims) >= kills or time.monotonic() < due[0]:
            return
        name = NAMES[len(victims) % len(NAMES)] if len(victims) < len(NAMES) else chance.choice(NAMES)
        pid = processes.pid(name)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            victims.append(name)
            for child in processes.children:
                child.restarts = 0  # what is tested is not the pause between restarts
        due[0] = time.monotonic() + chance.uniform(0, 2 * seconds)

    return disturb, victims


def disturbed(folder: Path, seed: int, kills: int, seconds: float) -> None:
    """Train with kills; every version, credit and ledger row must be as if nothing had happened."""
    disturb, victims = killer(seed, kills, seconds)
    with TinyProject(folder / "project") as project:
        digests = train(project, folder, disturb)
        assert victims, "the training ended before anything was killed"
        assert digests == undisturbed()
        assert list(replay(project.db, project.job).values()) == digests
        entries = project.rows(gt_ledger)
        assert sorted((e["base_version"], e["slot"]) for e in entries if e["disposition"] == "applied") == [
            (version, slot) for version in range(len(digests) - 1) for slot in (0, 1)
        ]
        assert {e["disposition"] for e in entries} <= {"applied", "duplicate", "too_old"}
        assert len(project.rows(gt_round)) == len(digests) - 1
        granted = sum(result["granted_credit"] for result in project.rows(database.result))
        assert sum(user["total_credit"] for user in project.rows(database.user)) == pytest.approx(granted)


@pytest.mark.parametrize("each_database", REPEATED, indirect=True)
def test_each_process_killed_at_random_moments_leaves_the_weights_of_an_undisturbed_training(tmp_path: Path) -> None:
    disturbed(tmp_path, seed=1, kills=6, seconds=2.0)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(100, 108))
def test_many_kills_leave_the_weights_of_an_undisturbed_training(tmp_path: Path, seed: int) -> None:
    disturbed(tmp_path, seed=seed, kills=40, seconds=0.8)
