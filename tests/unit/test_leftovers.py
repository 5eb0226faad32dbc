"""What killed writers leave is removed by the daemon that owns the folder, and nothing else is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import assimilator.__main__
import work_generator.__main__
from boinc_project import store
from boinc_project.contract.whole_file import TEMPORARY, temporary_name, write_bytes
from boinc_project.gt_tables import JobState
from boinc_project.leftovers import AGE_S, Leftovers
from tests.crash_points import Main, run_daemon
from tests.tiny_project import TinyProject, tiny_project, volunteer_environment

# Each writer is killed by SIGKILL when it is about to rename its first file.
KILLED = """
import os, signal, sys
from pathlib import Path
from boinc_project.contract.whole_file import write_bytes
from boinc_project.durable import FileBatch
from boinc_project.job_folder import JobFolder
from boinc_project.project_tree import ProjectTree
os.replace = lambda *names: os.kill(os.getpid(), signal.SIGKILL)
project = Path(sys.argv[1])
tree, job = ProjectTree(project), JobFolder(project / "gt_jobs" / "tiny")
"""
PUBLISHED, TAKEN_IN, MANY, STATE, TEMPLATE = (
    "tree.stage_file(b'content', 'gt_tiny_new')",
    "with FileBatch(1) as batch: batch.add(job.payload_path('gt_tiny_v0', '0' * 64), b'content'); batch.commit()",
    "tree.stage_files({f'gt_tiny_{number}': b'content' for number in range(50)})",
    "write_bytes(job.state_path(1, '0' * 64), b'content')",
    "write_bytes(project / 'templates' / 'gt_new_out', b'content')",
)
GENERATOR, ASSIMILATOR = work_generator.__main__.main, assimilator.__main__.main


@pytest.fixture
def project() -> Iterator[TinyProject]:
    with tiny_project() as made:
        with made.db.transaction() as connection:  # nothing to do for the daemons but to tidy
            store.set_job_state(connection, made.job_id, JobState.PAUSED)
        yield made


def temporary_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if TEMPORARY.fullmatch(path.name)]


def others(folder: Path) -> set[Path]:
    found = (path for path in folder.rglob("*") if path.is_file() and not TEMPORARY.fullmatch(path.name))
    return {path for path in found if not path.name.startswith("project.sqlite")}


def age(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


@pytest.mark.parametrize(
    ("writer", "files", "owner"),
    [
        pytest.param(PUBLISHED, 1, GENERATOR, id="a published file"),
        pytest.param(MANY, 100, GENERATOR, id="many published files"),
        pytest.param(TEMPLATE, 1, GENERATOR, id="a template"),
        pytest.param(TAKEN_IN, 1, ASSIMILATOR, id="a payload"),
        pytest.param(STATE, 1, ASSIMILATOR, id="a version"),
    ],
)
def test_what_a_killed_writer_left_is_removed_by_the_daemon_that_owns_the_folder(
    project: TinyProject, writer: str, files: int, owner: Main, tmp_path: Path
) -> None:
    folder, log = project.tree.project_dir, tmp_path / "log"
    before = others(folder)
    done = subprocess.run([sys.executable, "-c", KILLED + writer, str(folder)], env=volunteer_environment())
    assert done.returncode == -signal.SIGKILL
    left = temporary_files(folder)
    assert len(left) == files and others(folder) == before, "nothing was renamed"
    project.db.close()

    def daemon(*options: str) -> list[Path]:
        ended = run_daemon(owner, ["--one_pass", *options], folder, None, log)
        assert (ended.killed, ended.status) == (False, 0), log.read_text()
        return temporary_files(folder)

    assert daemon() == left, "somebody may be about to rename what is young"
    for path in left[1:] or left:
        age(path, AGE_S + 10)
    assert daemon("--dry_run") == left
    assert daemon() == left[:1] * (files > 1)
    assert others(folder) == before


# The clockwork.


@pytest.fixture
def count_looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    looks: list[str] = []
    real: Callable[..., Any] = os.scandir

    def scandir(path: Any) -> Any:
        looks.append(str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    return looks


def test_a_folder_is_looked_at_once_and_what_was_too_young_goes_when_it_is_old(
    tmp_path: Path, count_looks: list[str]
) -> None:
    now = time.time()
    young, old, mine = (tmp_path / temporary_name(name) for name in ("young", "old", "mine"))
    for path, seconds in ((young, 1000.0), (old, AGE_S + 1)):
        path.touch()
        age(path, seconds)
    clock = [now]
    leftovers = Leftovers([tmp_path, tmp_path / "nowhere"], lambda: clock[0])
    assert leftovers.sweep() == 1 and young.exists() and not old.exists()
    mine.touch()  # this process's own, later
    clock[0] = now + AGE_S - 1001
    assert leftovers.sweep() == 0 and young.exists()
    clock[0] = now + AGE_S - 999
    assert leftovers.sweep() == 1 and not young.exists()
    clock[0] = now + 100 * AGE_S
    assert leftovers.sweep() == 0 and mine.exists()
    assert count_looks == [str(tmp_path), str(tmp_path / "nowhere")]


def test_a_file_that_is_renamed_or_written_to_meanwhile_is_left_alone(tmp_path: Path) -> None:
    now = time.time()
    renamed, busy = (tmp_path / temporary_name(name) for name in ("renamed", "busy"))
    for path in (renamed, busy):
        path.touch()
        age(path, 1000)
    clock = [now]
    leftovers = Leftovers([tmp_path], lambda: clock[0])
    leftovers.sweep()
    renamed.rename(tmp_path / "renamed")
    busy.write_bytes(b"more")
    clock[0] = now + AGE_S - 500
    assert leftovers.sweep() == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["renamed", busy.name])


def test_a_folder_or_file_that_cannot_be_tidied_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    for name in ("a", "b"):
        path = tmp_path / temporary_name(name)
        path.touch()
        age(path, 2 * AGE_S)
    real = Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path.name.startswith(".a."):
            raise PermissionError(13, "Permission denied", str(path))
        real(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    leftovers = Leftovers([tmp_path / "file", tmp_path])
    assert [leftovers.sweep(), leftovers.sweep()] == [1, 0]
    assert [record.message for record in caplog.records if "cannot be tidied" in record.message] == [
        f"{tmp_path / 'file'} cannot be tidied (Not a directory)",
        f"{next(iter(temporary_files(tmp_path)))} cannot be tidied (Permission denied)",
    ]


def test_a_writer_whose_file_was_taken_for_a_leftover_fails_and_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state"
    write_bytes(path, b"old")
    real = os.replace

    def slept(source: Any, target: Any) -> None:
        age(Path(source), 2 * AGE_S)
        assert Leftovers([tmp_path]).sweep() == 1
        real(source, target)

    monkeypatch.setattr(os, "replace", slept)
    with pytest.raises(FileNotFoundError):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
