"""A live project of a standard BOINC server, as tests/standard finds it, and a tiny job that they train in it.

The project is named by BOINC_PROJECT_DIR; it runs (bin/start), has our app installed and published, and its URLs
can be reached from here. The tests make users, a team, hosts and a job of their own and remove them afterwards.
What stays is what BOINC keeps of any work done: its logs, its next ids, statistics of the app version, and the
credit of other volunteers who took some of the job's tasks.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
import sqlalchemy as sa

from boinc_project import database, store
from boinc_project.config import ProjectConfig
from boinc_project.database import Database
from boinc_project.gt_tables import JobState, gt_file, gt_job, gt_metadata
from boinc_project.project_tree import ProjectTree
from boinc_project.scripted_volunteer import ProtocolError, ScriptedVolunteer
from boinc_project.standard.steps import Daemon, daemons
from boinc_project.states import FileDeleteState, Outcome
from boinc_project.store import JobRow

VARIABLE = "BOINC_PROJECT_DIR"
APP = os.environ.get("BOINC_TRAIN_APP", "gradient")
TINY_JOB = Path(__file__).parent / "data" / "tiny_job"
PATIENCE_S = 600.0
FAILED = (Outcome.CLIENT_ERROR, Outcome.NO_REPLY, Outcome.VALIDATE_ERROR)

#: Why these tests are skipped, or "".
MISSING = (
    ""
    if os.environ.get(VARIABLE)
    else f"{VARIABLE} names no live project of a standard BOINC server (see docs/standard_server.md)"
)


@dataclass(frozen=True)
class LiveProject:
    """The project and its database."""

    tree: ProjectTree
    db: Database

    @classmethod
    def open(cls) -> LiveProject:
        """Raises AssertionError with what to do where the tests cannot run in this project."""
        folder = Path(os.environ[VARIABLE]).resolve()
        owner = (folder / "config.xml").stat().st_uid
        assert owner == os.geteuid(), f"run these tests as the owner of {folder} (user id {owner})"
        tree = ProjectTree(folder, ProjectConfig.load(folder))
        return cls(tree, tree.database())

    @property
    def folder(self) -> Path:
        return self.tree.project_dir

    @property
    def appid(self) -> int:
        found = store.app_id(self.db, APP)
        assert found is not None, f"the app {APP!r} is not installed; run boinc-train install {self.folder}"
        return found

    @property
    def size_classes(self) -> int:
        """How many size classes our app has."""
        (row,) = self.rows(database.app, database.app.c.name == APP)
        return int(row["n_size_classes"])

    @property
    def daemon_environment(self) -> dict[str, str]:
        """As bin/start leaves it: the project's programs first, the project found from the working directory."""
        environment = {name: value for name, value in os.environ.items() if name not in (VARIABLE, "PYTHONPATH")}
        return {**environment, "PATH": f"{self.folder / 'bin'}:{environment['PATH']}"}

    def run_program(self, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """One of the project's programs, ours or BOINC's, run as bin/start would."""
        return subprocess.run(
            [name, *arguments],
            cwd=self.temporary_folder,
            env=self.daemon_environment,
            capture_output=True,
            text=True,
            timeout=60.0,
        )

    @property
    def temporary_folder(self) -> Path:
        """The working directory of daemons, tmp_HOST."""
        return self.folder / f"tmp_{self.tree.config.elements['host'].partition('.')[0]}"

    def entries(self) -> list[Daemon]:
        """The daemons of config.xml."""
        return daemons((self.folder / "config.xml").read_text())

    def rows(self, table: sa.Table, *conditions: sa.ColumnElement[bool]) -> list[dict[str, Any]]:
        with self.db.read() as connection:
            return [dict(row) for row in connection.execute(sa.select(table).where(*conditions)).mappings()]

    def boinc_table_definitions(self) -> dict[str, str]:
        """What the server says of BOINC's tables, without the next id."""
        names = [table.name for table in database.metadata.sorted_tables]
        with self.db.read() as connection:
            there = set(sa.inspect(connection).get_table_names())
            made = {
                name: str(connection.execute(sa.text(f"SHOW CREATE TABLE `{name}`")).one()[1])
                for name in names
                if name in there
            }
        return {name: re.sub(r" AUTO_INCREMENT=\d+", "", text) for name, text in made.items()}


def command(*arguments: str, cwd: Path | None = None) -> str:
    """Run `boinc-train ARGUMENTS` of this environment; its output."""
    done = subprocess.run(
        [sys.executable, "-m", "boinc_project.cli", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(TINY_JOB.parents[2]), "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@dataclass(frozen=True)
class Trained:
    """A tiny job that was trained in the project by two users of one team, and what they have by now."""

    project: LiveProject
    mark: str  # in the names of everything that was made
    users: tuple[int, ...]
    team: int
    definitions_before: dict[str, str]

    @property
    def job(self) -> JobRow:
        with self.project.db.read() as connection:
            found = store.job_named(connection, self.mark)
        assert found is not None, self.mark
        return found

    def workunits(self) -> list[dict[str, Any]]:
        names = database.workunit.c.name.startswith(f"gt_{self.mark}_", autoescape=True)
        return self.project.rows(database.workunit, names)

    def results(self) -> list[dict[str, Any]]:
        units = [int(unit["id"]) for unit in self.workunits()]
        return self.project.rows(database.result, database.result.c.workunitid.in_(units))

    def hosts(self) -> list[dict[str, Any]]:
        return self.project.rows(database.host, database.host.c.userid.in_(self.users))

    def files(self) -> list[dict[str, Any]]:
        return self.project.rows(gt_file, gt_file.c.job_id == self.job.id)


@contextlib.contextmanager
def trained_job(project: LiveProject, scratch: Path, changes: Sequence[tuple[str, str]] = ()) -> Iterator[Trained]:
    """Train the tiny job, with these changes of its job.toml, to its end with two scripted volunteers that run the
    published app; then remove it."""
    mark = f"livetest{secrets.token_hex(4)}"
    before = project.boinc_table_definitions()
    keys = {f"{mark}-{name}": secrets.token_hex(16) for name in ("ann", "ben")}
    team, users = add_users(project.db, mark, keys)
    trained = Trained(project, mark, users, team, before)
    try:
        source = scratch / "job"
        shutil.copytree(TINY_JOB, source)
        toml = source / "job.toml"
        text = toml.read_text()
        for old, new in (('name = "tiny"', f'name = "{mark}"'), *changes):
            assert old in text
            text = text.replace(old, new)
        toml.write_text(text)
        command("job", "create", str(toml), "--project", str(project.folder))
        with _volunteers(project, scratch, keys):
            wait_for(lambda: _finished(trained), "the job to be finished")
        assert trained.job.state == JobState.FINISHED, trained.job.note
        wait_for(lambda: _cleaned_up(trained), "BOINC's file deleter to be done with the job")
        yield trained
    finally:
        remove(trained)


def wait_for(done: Callable[[], bool], what: str, *, patience_s: float = PATIENCE_S, pause_s: float = 1.0) -> None:
    """Ask again and again; AssertionError when the patience is at its end."""
    deadline = time.monotonic() + patience_s
    while not done():
        assert time.monotonic() < deadline, f"waited in vain for {what}; do all daemons run (boinc-train doctor)?"
        time.sleep(pause_s)


def _finished(trained: Trained) -> bool:
    """Whether the job's end is reached; AssertionError where results fail, since two users have one try each."""
    bad = [result for result in trained.results() if result["outcome"] in FAILED]
    assert not bad, (
        f"{bad[0]['name']} failed ({Outcome(bad[0]['outcome']).name}): {bad[0]['stderr_out']} (see the logs)"
    )
    return trained.job.state != JobState.RUNNING


def _cleaned_up(trained: Trained) -> bool:
    return all(int(unit["file_delete_state"]) == FileDeleteState.DONE for unit in trained.workunits())


def add_users(db: Database, mark: str, keys: dict[str, str]) -> tuple[int, tuple[int, ...]]:
    """A team called `mark`, and members of it with these names and account keys; returns their ids."""
    now = int(time.time())
    with db.transaction() as connection:
        row = database.new_row(database.team, create_time=now, name=mark, name_lc=mark, nusers=len(keys), type=1)
        made = connection.execute(sa.insert(database.team), row).inserted_primary_key
        assert made is not None
        team, users = int(made[0]), []
        for name, key in keys.items():
            row = database.new_row(
                database.user, create_time=now, email_addr=f"{name}@example.org", name=name, authenticator=key,
                teamid=team, cross_project_id=secrets.token_hex(16),
            )  # fmt: skip
            made = connection.execute(sa.insert(database.user), row).inserted_primary_key
            assert made is not None
            users.append(int(made[0]))
    return team, tuple(users)


@contextlib.contextmanager
def _volunteers(project: LiveProject, scratch: Path, keys: dict[str, str]) -> Iterator[None]:
    ended = threading.Event()

    def work(name: str, key: str) -> None:
        volunteer = ScriptedVolunteer(project.tree.config.master_url, key, scratch / name, name=name)
        while not ended.is_set():
            with contextlib.suppress(requests.RequestException, ProtocolError):
                volunteer.run_once()
            ended.wait(project.tree.config.min_sendwork_interval + 1.0)

    threads = [threading.Thread(target=work, args=item, name=item[0], daemon=True) for item in keys.items()]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join(60)


def remove(trained: Trained) -> None:
    """Rows and files of the job, its users and their hosts."""
    project = trained.project
    units, results, hosts = trained.workunits(), trained.results(), trained.hosts()
    job = next(iter(project.rows(gt_job, gt_job.c.name == trained.mark)), None)
    host_ids = [int(host["id"]) for host in hosts]
    with project.db.transaction() as connection:
        for table, identifiers in (
            (database.workunit, [int(unit["id"]) for unit in units]),
            (database.result, [int(result["id"]) for result in results]),
            (database.host, host_ids),
            (database.user, list(trained.users)),
            (database.team, [trained.team]),
        ):
            connection.execute(sa.delete(table).where(table.c.id.in_(identifiers)))
        versions = database.host_app_version
        connection.execute(sa.delete(versions).where(versions.c.host_id.in_(host_ids)))
        names = [] if job is None else [r[0] for r in connection.execute(
            sa.select(gt_file.c.name).where(gt_file.c.job_id == job["id"]))]  # fmt: skip
        for table in gt_metadata.sorted_tables:
            if job is not None and "job_id" in table.c:
                connection.execute(sa.delete(table).where(table.c.job_id == job["id"]))
            if "host_id" in table.c:
                connection.execute(sa.delete(table).where(table.c.host_id.in_(host_ids)))
        if job is not None:
            connection.execute(sa.delete(gt_job).where(gt_job.c.id == job["id"]))
    for name in names:
        project.tree.delete_published(str(name))
    for template in (project.folder / "templates").glob(f"gt_{trained.mark}_*"):
        template.unlink()
    for upload in project.tree.config.upload_dir.glob(f"*/gt_{trained.mark}_*"):
        upload.unlink()
    if job is not None:
        shutil.rmtree(str(job["folder"]), ignore_errors=True)
