"""A private project in virtual time: the real daemons' objects over a database and a tree that nobody else sees."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import sqlalchemy as sa

from assimilator.__main__ import Assimilator
from assimilator.anchors import Anchors
from assimilator.apply import Applier
from assimilator.evaluation import Evaluator
from boinc_project import app_versions, clock, database, store
from boinc_project.contract.microtask import MICROTASK_FILE
from boinc_project.daemon import Options, Stopper
from boinc_project.database import Database
from boinc_project.gt_tables import gt_microtask
from boinc_project.project_tree import ProjectTree, create_project
from boinc_project.server.file_deleter import FileDeleter
from boinc_project.server.messages import SchedulerReply, SchedulerRequest
from boinc_project.server.scheduler_service import INDEXES, SchedulerService
from boinc_project.server.size_regulator import SizeRegulator
from boinc_project.server.transitioner import Transitioner
from boinc_project.server.uploads import COMPLETED_MODE, UploadStore
from boinc_project.simulator.client import read_workunit
from boinc_project.simulator.computing import Evaluation
from boinc_project.store import JobRow
from validator.__main__ import Validator
from validator.lottery import Lottery
from work_generator.__main__ import Generator
from work_generator.export import ExportedJob
from work_generator.job import Job
from work_generator.publish import publish_job

APP = "gradient"
PREFIX = "boinc-train-simulation-"
MEMORY = Path("/dev/shm")  # a project on a disk waits for it several times for each result

#: What a simulated project has unlike one that `boinc-train serve` makes: nothing listens, nobody signs uploads.
OPTIONS: Mapping[str, Any] = {
    "dont_generate_upload_certificates": 1,
    "ignore_upload_certificates": 1,
    "daily_result_quota": 0,
    "gt_upload_min_free_mb": 0,
}


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """An empty folder, in memory where there is such a place, removed at the end; so are those of killed processes."""
    parent = MEMORY if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    for left in parent.glob(f"{PREFIX}*-*"):
        pid = left.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class PrivateProject:
    """The project with its one job. Make and use it while boinc_project.clock is virtual. `seed`: what audits and spot
    checks are drawn with; the project's own key is another one each time."""

    def __init__(
        self, folder: Path, job: Job, exported: ExportedJob, options: Mapping[str, Any] | None = None, seed: int = 0
    ) -> None:
        self.tree = create_project(
            folder / "project", master_url="http://127.0.0.1:9/simulated/", long_name="Simulated",
            options={**OPTIONS, **(options or {})},
        )  # fmt: skip
        self.db: Database = self.tree.database()
        with self.db.transaction() as connection:
            for index in INDEXES:
                connection.exec_driver_sql(index)
        store.create_own_tables(self.db)
        self.appid = _publish_app(self.tree, self.db)
        self.job_id = publish_job(self.tree, self.db, job, exported, APP, lambda text: None)
        # The disk of all hosts: whatever any of them was sent, also when the project has deleted it.
        self._disk = folder / "disk"
        self._disk.mkdir()
        self.transitioner = Transitioner(self.db, self.tree.config, upload_key=None, clock=clock.now)
        self._has_classes = bool(job.config.class_steps)
        self.regulator = SizeRegulator(self.tree, self.db, clock=clock.now)
        self.scheduler = SchedulerService(self.tree, self.db, self.transitioner, clock=clock.now)
        self.uploads = UploadStore(self.tree)
        self.file_deleter = FileDeleter(self.tree, self.db, self.uploads, clock=clock.now)
        stopper, passes = Stopper(self.tree.project_dir), Options(one_pass=True)
        self.generator = Generator(
            passes, self.tree, self.db, self.appid, stopper, wait=lambda seconds: self.transition()
        )
        self.validator = Validator(passes, self.tree, self.db, self.appid, stopper, clock=clock.now, start=Evaluation)
        self.validator.judge.draws.lottery = Lottery(f"simulated/{seed}".encode())
        self.assimilator = Assimilator(
            passes, self.tree, self.db, self.appid, stopper, Applier(self.db, self.tree),
            Evaluator(self.db, Evaluation), Anchors(self.db, Evaluation),
        )  # fmt: skip

    def close(self) -> None:
        self.db.close()

    def transition(self) -> None:
        """What the embedded server does several times a second."""
        self.transitioner.run_once()
        self._regulate()

    def _regulate(self) -> None:
        if self._has_classes:
            self.regulator.run_once()

    @property
    def job(self) -> JobRow:
        with self.db.read() as connection:
            found = store.job_with_id(connection, self.job_id)
        assert found is not None
        return found

    # What hosts meet.

    def add_account(self, name: str) -> str:
        """A user of this name; returns the account key."""
        key = hashlib.md5(name.encode()).hexdigest()
        row = database.new_row(
            database.user, create_time=int(clock.now()), email_addr=f"{name}@example.org", name=name, authenticator=key,
            cross_project_id=key,
        )  # fmt: skip
        with self.db.transaction() as connection:
            connection.execute(database.user.insert(), row)
        return key

    def ask(self, request: SchedulerRequest) -> SchedulerReply:
        """A scheduler RPC; the files that its reply names stay on the hosts' disk."""
        reply = self.scheduler.reply_to(request)
        if reply.results or request.results:
            self._regulate()
        for text in reply.workunits:
            for file in read_workunit(text).files:
                self._fetch(file.name)
        return reply

    def upload(self, name: str, data: bytes) -> None:
        """A file of a client's, complete, as the upload handler leaves it: one that is there is never written again."""
        path = self.tree.upload_path(name)
        path.parent.mkdir(exist_ok=True)
        with contextlib.suppress(FileExistsError), open(path, "xb") as stream:
            stream.write(data)
        path.chmod(COMPLETED_MODE)

    def places(self, opened: Mapping[str, str]) -> dict[str, Path]:
        """Where the files of a workunit are, by open name. FileNotFoundError if one was never sent and is gone."""
        return {open_name: self._fetch(name) for open_name, name in opened.items()}

    def _fetch(self, name: str) -> Path:
        place = self._disk / name
        if not place.exists():
            os.link(self.tree.download_path(name), place)
        return place

    def round(self, version: int) -> list[dict[str, str]]:
        """Open name -> physical name of the files of each microtask over this version, in the order of the slots."""
        query = (
            sa.select(database.workunit.c.xml_doc)
            .join(gt_microtask, gt_microtask.c.workunit_name == database.workunit.c.name)
            .where(gt_microtask.c.job_id == self.job_id, gt_microtask.c.version == version, gt_microtask.c.attempt == 0)
            .order_by(gt_microtask.c.slot)
        )
        with self.db.read() as connection:
            documents = [str(text) for text in connection.scalars(query)]
        return [read_workunit(text).opened for text in documents]

    # What came of it.

    def rows(self, table: sa.Table, *columns: str) -> list[dict[str, Any]]:
        """All rows of a table by primary key, with these columns (all if none is named)."""
        query = sa.select(*(table.c[name] for name in columns or table.c.keys()))
        with self.db.read() as connection:
            found = connection.execute(query.order_by(*table.primary_key.columns)).mappings()
            return [dict(row) for row in found]


def key_of(opened: Mapping[str, str]) -> str:
    """What names a microtask for ever: the physical name of its document holds the document's digest."""
    return opened[MICROTASK_FILE]


def _publish_app(tree: ProjectTree, db: Database) -> int:
    """An app version that nobody runs: its runner computes in this process. Returns the app's id."""
    leaf = tree.project_dir / "apps" / APP / "1.0" / "x86_64-pc-linux-gnu"
    leaf.mkdir(parents=True)
    (leaf / "gradient_simulated_1.0").write_text("#!/bin/sh\nexit 1\n")
    (leaf / "version.xml").write_text(
        "<version><file><physical_name>gradient_simulated_1.0</physical_name><main_program/></file>"
        "<api_version>7.20.5</api_version></version>"
    )
    now = int(clock.now())
    appid = app_versions.add_app(db, APP, "Gradient training", now=now)
    app_versions.update_versions(tree, db, now=now)
    return appid
