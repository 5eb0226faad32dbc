"""Our daemons keep BOINC's conventions in the live project, started as its bin/start starts them.

They run beside the project's own ones: `--mod` leaves them nothing to do, and the file stop_daemons is tried in a
folder that only looks like the project, so that nothing else stops.
"""

from __future__ import annotations

import contextlib
import fcntl
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from boinc_project.gt_tables import gt_heartbeat
from boinc_project.standard.steps import DAEMONS
from tests.live_project import APP, LiveProject

EVERY_DAEMON = pytest.mark.parametrize("name", DAEMONS)
NOTHING_TO_DO = ("--mod", "2000000011", "2000000010")
PATIENCE_S = 60.0
LOG_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{4} UTC \[PID=\d+ *\] ")


@pytest.fixture(scope="module", autouse=True)
def no_heartbeats_left(project: LiveProject) -> Iterator[None]:
    """Ours would look to doctor like daemons that ended."""
    yield
    with project.db.transaction() as connection:
        ours = gt_heartbeat.c.daemon.contains("/".join(reversed(NOTHING_TO_DO[1:])))
        connection.execute(sa.delete(gt_heartbeat).where(ours))


@EVERY_DAEMON
@pytest.mark.parametrize("dashes", ["-", "--"])
def test_one_pass_with_one_or_two_dashes_ends_with_0(project: LiveProject, name: str, dashes: str) -> None:
    words = ("one_pass", "d", "app", "sleep_interval", "mod")
    given = dict(zip(words, ([], ["4"], [APP], ["1"], list(NOTHING_TO_DO[1:])), strict=True))
    done = project.run_program(name, *(text for word in words for text in (dashes + word, *given[word])))
    assert done.returncode == 0, done.stderr
    assert LOG_LINE.match(done.stderr), done.stderr


@EVERY_DAEMON
@pytest.mark.parametrize("option", ["-h", "--help", "-v", "--version"])
def test_help_and_version_are_printed_and_end_with_0(project: LiveProject, name: str, option: str) -> None:
    done = project.run_program(name, option)
    assert done.returncode == 0 and name in done.stdout, done.stderr


@EVERY_DAEMON
@pytest.mark.parametrize("arguments", [("--no_such_option",), ("--app", "no_such_app", "--one_pass"), ("--mod", "2")])
def test_a_wrong_command_line_is_one_sentence_and_ends_with_1(
    project: LiveProject, name: str, arguments: tuple[str, ...]
) -> None:
    done = project.run_program(name, *arguments)
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


@contextlib.contextmanager
def started(project: LiveProject, name: str, folder: Path, cwd: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """The daemon with an inherited lock on a file in `folder`, as bin/start gives it one; ended afterwards."""
    lock = folder / "daemon.lock"
    with lock.open("w") as stream, (folder / "daemon.log").open("wb") as log:

        def take_lock() -> None:  # in the child, as sched/start does it: an fcntl lock belongs to the process
            fcntl.lockf(stream.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)

        process = subprocess.Popen(
            [name, "-d", "3", "--app", APP, *NOTHING_TO_DO],
            cwd=cwd,
            env=project.daemon_environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(stream.fileno(),),
            preexec_fn=take_lock,
            start_new_session=True,
        )
        try:
            _wait_for_log(process, folder / "daemon.log")
            yield process, lock
        finally:
            process.kill()
            process.wait()


def _wait_for_log(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while "Starting" not in log.read_text():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


def locked(path: Path) -> bool:
    """Whether another process holds the lock."""
    with path.open("r+") as stream:
        try:
            fcntl.lockf(stream.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


@EVERY_DAEMON
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_daemon_keeps_the_inherited_lock_until_a_signal_ends_it_with_0(
    project: LiveProject, name: str, number: signal.Signals, tmp_path: Path
) -> None:
    with started(project, name, tmp_path, project.temporary_folder) as (process, lock):
        assert locked(lock)
        time.sleep(2.0)  # at least one pass
        assert process.poll() is None and locked(lock)
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == 0
        assert not locked(lock)


@EVERY_DAEMON
def test_the_file_stop_daemons_ends_a_daemon_with_0(project: LiveProject, name: str, tmp_path: Path) -> None:
    likeness = tmp_path / "project"
    (likeness / "cgi-bin").mkdir(parents=True)
    (likeness / "tmp").mkdir()
    shutil.copy(project.folder / "config.xml", likeness)
    with started(project, name, tmp_path, likeness / "tmp") as (process, _):
        (likeness / "stop_daemons").touch()
        assert process.wait(PATIENCE_S) == 0


def test_a_daemon_of_ours_that_runs_already_is_not_started_twice(project: LiveProject) -> None:
    """The locks of the project's own daemons are held, if it runs."""
    host = project.temporary_folder.name.removeprefix("tmp_")
    for entry in project.entries():
        if entry.program in DAEMONS and entry.app == APP and not entry.disabled:
            assert locked(project.folder / f"pid_{host}" / entry.lock_file), f"{entry.cmd} does not run: bin/start"
