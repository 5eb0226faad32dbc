"""The daemons as bin/start runs them after an installation: by a link in bin/, in tmp_HOST, with a lock held open."""

from __future__ import annotations

import fcntl
import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from boinc_project.cli.main import main
from boinc_project.database import Database
from boinc_project.standard import install, steps
from boinc_project.standard.record import InstallError
from boinc_project.standard.running import lock_holder
from tests import mariadb
from tests.standard_project import make_standard_project

HOST = os.uname().nodename.partition(".")[0]


def missing() -> str:
    try:
        install.find_programs()
    except InstallError:
        return "boinc-train is not installed with its programs in this environment (pip install --editable .)"
    return mariadb.MISSING


pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.fixture
def installed(tmp_path: Path) -> Iterator[Path]:
    db: Database
    with make_standard_project(tmp_path / "project", on="mariadb") as db:
        found = CliRunner().invoke(main, ["install", str(tmp_path / "project")])
        assert found.exit_code == 0, found.output
        assert db.url.get_backend_name() == "mysql"
        yield tmp_path / "project"


@pytest.mark.parametrize("program", steps.DAEMONS)
def test_a_daemon_finds_its_project_and_keeps_the_lock(installed: Path, program: str) -> None:
    (entry,) = [d for d in steps.daemons((installed / "config.xml").read_text()) if d.program == program]
    lock = installed / f"pid_{HOST}" / entry.lock_file
    environment = {name: value for name, value in os.environ.items() if name != "BOINC_PROJECT_DIR"}
    environment["PATH"] = f"{installed / 'bin'}:/usr/bin:/bin"

    def take_lock() -> None:
        # As bin/start: the lock is this process's own, and its descriptor stays open across exec.
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT)
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.set_inheritable(descriptor, True)

    log = installed / f"log_{HOST}" / entry.output
    with log.open("ab") as output:
        daemon = subprocess.Popen(
            shlex.split(entry.cmd), cwd=installed / f"tmp_{HOST}", env=environment, stdin=subprocess.DEVNULL,
            stdout=output, stderr=output, preexec_fn=take_lock, close_fds=False,
        )  # fmt: skip
    try:
        for _ in range(600):
            if f"project {installed}" in log.read_text() or daemon.poll() is not None:
                break
            try:
                daemon.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
        assert daemon.poll() is None, log.read_text()
        assert lock_holder(lock) == daemon.pid
        (installed / "stop_daemons").touch()
        assert daemon.wait(30) == 0, log.read_text()
        assert "Stopping as asked" in log.read_text() and lock_holder(lock) is None
    finally:
        daemon.kill()
        daemon.wait()
