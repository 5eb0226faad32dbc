"""Runs beside a daemon's own work: how many at once, what is told of those that end, and that no folder stays."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from boinc_project.background_runs import BackgroundRuns
from boinc_project.contract.microtask import MICROTASK_FILE, Microtask
from boinc_project.contract.opset import TensorType
from boinc_project.contract.update import Update
from boinc_project.local_run import LocalRunFailed
from tests.tiny_microtask import microtask_files

MICROTASK = Microtask.from_json(microtask_files(1)[MICROTASK_FILE])


class Pretended:
    """A run that ends when it is told to."""

    made: ClassVar[list[Pretended]] = []

    def __init__(self, folder: Path, microtask: Microtask, files: Mapping[str, Path], arguments: Sequence[str]) -> None:
        self.folder, self.arguments, self.done, self.stopped = folder, arguments, False, False
        self.fails: Exception | None = None
        (folder / "stderr.txt").write_text("...")
        self.made.append(self)

    def finished(self) -> bool:
        return self.done

    def update(self, types: Mapping[str, TensorType]) -> Update:
        if self.fails is not None:
            raise self.fails
        return Update({"x": np.zeros(1)}, {})

    def stop(self) -> None:
        self.stopped = True


@pytest.fixture
def made() -> list[Pretended]:
    Pretended.made = []
    return Pretended.made


def begun(runs: BackgroundRuns[str], parent: Path, key: str) -> None:
    runs.begin(key, runs.folder(parent, key), MICROTASK, {}, {})


def test_there_is_room_for_as_many_as_were_allowed_and_for_another_when_one_has_ended(
    tmp_path: Path, made: list[Pretended]
) -> None:
    runs: BackgroundRuns[str] = BackgroundRuns("try", at_once=2, start=Pretended)
    begun(runs, tmp_path, "a")
    assert runs.room and runs.busy and "a" in runs and "b" not in runs
    begun(runs, tmp_path, "b")
    assert not runs.room and runs.ended() == []
    made[1].done = True
    (one,) = runs.ended()
    assert one.key == "b" and one.update is not None and one.why == "" and one.microtask is MICROTASK
    assert runs.room and [path.name.split("_")[1] for path in tmp_path.iterdir()] == ["a"]
    assert runs.ended() == []


@pytest.mark.parametrize("fault", [LocalRunFailed("no memory"), OSError(5, "disk"), MemoryError()])
def test_one_that_fails_is_told_with_its_reason_and_leaves_no_folder(
    tmp_path: Path, made: list[Pretended], fault: Exception
) -> None:
    runs: BackgroundRuns[str] = BackgroundRuns("try", start=Pretended)
    begun(runs, tmp_path, "a")
    made[0].done, made[0].fails = True, fault
    if isinstance(fault, MemoryError):  # nothing that one can expect: it is not hidden
        with pytest.raises(MemoryError):
            runs.ended()
    else:
        (one,) = runs.ended()
        assert one.update is None and one.why == str(fault)
    assert not runs.busy and not list(tmp_path.iterdir())


def test_one_that_takes_too_long_is_ended_and_has_failed(tmp_path: Path, made: list[Pretended]) -> None:
    runs: BackgroundRuns[str] = BackgroundRuns("try", longest_s=0.0, start=Pretended)
    begun(runs, tmp_path, "a")
    made[0].fails = LocalRunFailed("ended with status -15")
    (one,) = runs.ended()
    assert made[0].stopped and one.update is None and "-15" in one.why


def test_stopping_ends_all_and_leaves_no_folder(tmp_path: Path, made: list[Pretended]) -> None:
    runs: BackgroundRuns[str] = BackgroundRuns("try", at_once=2, start=Pretended)
    begun(runs, tmp_path, "a")
    begun(runs, tmp_path, "b")
    runs.stop()
    assert all(each.stopped for each in made) and not runs.busy and not list(tmp_path.iterdir())


def test_one_that_cannot_be_started_leaves_no_folder(tmp_path: Path) -> None:
    def broken(*_: object) -> Pretended:
        raise OSError(12, "no memory")

    runs: BackgroundRuns[str] = BackgroundRuns("try", start=broken)
    with pytest.raises(OSError, match="no memory"):
        begun(runs, tmp_path, "a")
    assert not runs.busy and not list(tmp_path.iterdir())


def test_the_folder_of_a_killed_daemon_is_removed_and_those_of_living_ones_and_of_other_kinds_stay(
    tmp_path: Path, made: list[Pretended]
) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    for name in (f"try_x_{ended.pid}", f"try_y_1_{ended.pid}", f"other_x_{ended.pid}", "try_z_1"):
        (tmp_path / name).mkdir()
    runs: BackgroundRuns[str] = BackgroundRuns("try", start=Pretended)
    begun(runs, tmp_path, "a")
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith("try_a_")) == [
        f"other_x_{ended.pid}",
        "try_z_1",
    ]
