"""A project with a tiny job, and what happens to its workunits without any client: for tests of the daemons.

Real parts: the job of tests/data/tiny_job, exported and published; the generator, transitioner, validator and
assimilator; updates computed by the application's own runner. Made up: the hosts, and how results get there.
"""

from __future__ import annotations

import atexit
import functools
import os
import re
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import sqlalchemy as sa

from apps.gradient.backends import open_backend
from apps.gradient.runner import Run, load
from assimilator.__main__ import Assimilator
from assimilator.anchors import Anchors
from assimilator.apply import Applier
from assimilator.evaluation import Evaluator
from boinc_project import app_versions, database, store, templates
from boinc_project.contract.microtask import MICROTASK_FILE, Microtask
from boinc_project.contract.update import read_update, update_types, write_update
from boinc_project.daemon import Options, Stopper
from boinc_project.database import Database
from boinc_project.project_tree import ProjectTree, create_project
from boinc_project.server.size_regulator import SizeRegulator
from boinc_project.server.transitioner import Transitioner
from boinc_project.states import AssimilateState, Outcome, ServerState
from boinc_project.store import JobRow
from tests import databases
from tests.ports import kept_port
from validator.__main__ import Validator
from work_generator.__main__ import Generator
from work_generator.export import ExportedJob, export_job
from work_generator.job import Job
from work_generator.publish import publish_job

TINY_JOB = Path(__file__).parent / "data" / "tiny_job"
APP = "gradient"
PROGRAM_PEAK_BYTES = 160e6  # resident memory of the packaged application's three processes before it loads a graph
_updates: dict[str, bytes] = {}


#: Texts of a job.toml and what to write in their place.
Changes = tuple[tuple[str, str], ...]

#: Of diloco.toml: the inner optimizer's state goes along.
SHIPPED: Changes = (("[inner_optimizer]", '[inner_optimizer]\nstate = "shipped"'),)


@functools.cache
def exported(toml: str = "job.toml", changes: Changes = ()) -> tuple[Job, ExportedJob]:
    """A tiny job, traced once for all tests of the process."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(TINY_JOB, folder, dirs_exist_ok=True)
        path = Path(folder) / toml
        text = path.read_text()
        for old, new in changes:
            assert old in text, old
            text = text.replace(old, new)
        path.write_text(text)
        job = Job.load(path)
        return job, export_job(job)


def publish_stub_app(tree: ProjectTree, db: Database) -> int:
    """An app version that nobody runs: scripted volunteers run the application from the repository instead."""
    leaf = tree.project_dir / "apps" / APP / "1.0" / "x86_64-pc-linux-gnu"
    leaf.mkdir(parents=True)
    (leaf / "gradient_stub_1.0").write_text("#!/bin/sh\nexit 1\n")
    (leaf / "version.xml").write_text(
        "<version><file><physical_name>gradient_stub_1.0</physical_name><main_program/></file>"
        "<api_version>7.20.5</api_version></version>"
    )
    appid = app_versions.add_app(db, APP, "Gradient training")
    app_versions.update_versions(tree, db)
    return appid


class TinyProject:
    """The project, its database and its job; made in `folder` unless it is there already.

    It is made on the database that the test runs with (tests/databases.py), or on the empty one at `on`.
    """

    appid = 1
    job_id = 1

    def __init__(
        self, folder: Path, toml: str = "job.toml", *, on: sa.URL | None = None, changes: Changes = ()
    ) -> None:
        if (folder / "config.xml").exists():
            self.tree = ProjectTree(folder)
            self.db = self.tree.database()
        else:
            url = f"http://127.0.0.1:{kept_port()}/tiny/"
            options: Mapping[str, Any] = {
                "min_sendwork_interval": 0,
                "gt_dry_rpc_delay": 1,
                **(databases.project_options() if on is None else databases.options_of(on)),
            }
            self.tree = create_project(folder, master_url=url, long_name="Tiny", options=options)
            self.db = self.tree.database()
            store.create_own_tables(self.db)
            assert publish_stub_app(self.tree, self.db) == self.appid
            job, made = exported(toml, changes)
            assert publish_job(self.tree, self.db, job, made, APP, lambda text: None) == self.job_id
        self.stopper = Stopper(folder)
        self.transitioner = Transitioner(self.db, self.tree.config, upload_key=self.tree.upload_private())

    def __enter__(self) -> TinyProject:
        return self

    def __exit__(self, *exception: object) -> None:
        self.db.close()

    # The daemons, as objects.

    def generator(self, **options: Any) -> Generator:
        given = Options(one_pass=True, sleep_interval=0.01, **options)
        made = Generator(given, self.tree, self.db, self.appid, self.stopper)
        made._wait_for_transitioner = lambda appid: None  # type: ignore[method-assign]
        return made

    def validator(self, **fields: Any) -> Validator:
        options = fields.pop("options", Options(one_pass=True))
        return Validator(options, self.tree, self.db, self.appid, self.stopper, **fields)

    def assimilator(self, options: Options | None = None, db: Database | None = None) -> Assimilator:
        db = db or self.db
        chosen = options or Options(one_pass=True)
        applier = Applier(db, self.tree)
        return Assimilator(chosen, self.tree, db, self.appid, self.stopper, applier, Evaluator(db), Anchors(db))

    def issue(self) -> list[dict[str, Any]]:
        """Let the generator and the transitioner work; returns the unsent results."""
        self.generator().one_pass()
        self.transitioner.run_once()
        SizeRegulator(self.tree, self.db).run_once()
        return self.rows(database.result, server_state=int(ServerState.UNSENT))

    def validate_round(self) -> list[dict[str, Any]]:
        """Honest copies of every slot, validated and not yet assimilated; returns the workunits."""
        for result in self.issue():
            self.answer(result)
        self.transitioner.run_once()
        self.validator().one_pass()
        return self.rows(database.workunit, assimilate_state=int(AssimilateState.READY))

    def make_version(self) -> None:
        """One honest round, from issuing to the next version."""
        before = self.job.current_version
        self.validate_round()
        self.assimilator().one_pass()
        self.transitioner.run_once()
        assert self.job.current_version == before + 1

    # What is there.

    @property
    def job(self) -> JobRow:
        with self.db.read() as connection:
            (found,) = [job for job in store.jobs(connection) if job.id == self.job_id]
        return found

    def rows(self, table: sa.Table, **columns: Any) -> list[dict[str, Any]]:
        """Rows with these values, by primary key."""
        query = sa.select(table).where(*(table.c[name] == value for name, value in columns.items()))
        with self.db.read() as connection:
            return [dict(r) for r in connection.execute(query.order_by(*table.primary_key.columns)).mappings()]

    def change(self, table: sa.Table, identifier: int, **values: Any) -> None:
        with self.db.transaction() as connection:
            connection.execute(sa.update(table).where(table.c.id == identifier).values(**values))

    def versions(self) -> list[dict[str, Any]]:
        """Rows of gt_version in order."""
        with self.db.read() as connection:
            return [dict(row) for row in store.versions(connection, self.job_id)]

    def version_digests(self) -> list[str]:
        return [str(row["state_sha256"]) for row in self.versions()]

    # What hosts do.

    def add_host(self, user: int, host: int) -> None:
        """Rows of a user and a host with these ids."""
        now = int(time.time())
        with self.db.transaction() as connection:
            if connection.execute(sa.select(database.user.c.id).where(database.user.c.id == user)).scalar() is None:
                row = database.new_row(
                    database.user, id=user, create_time=now, email_addr=f"u{user}@example.org", name=f"u{user}",
                    authenticator=f"{user:032x}",
                )  # fmt: skip
                connection.execute(database.user.insert(), row)
            row = database.new_row(database.host, id=host, create_time=now, userid=user, domain_name=f"h{host}")
            connection.execute(database.host.insert(), row)
            row = database.new_row(
                database.host_app_version, host_id=host, app_version_id=1, max_jobs_per_day=50, consecutive_valid=3
            )
            connection.execute(database.host_app_version.insert(), row)

    def microtask_of(self, unit_name: str) -> Microtask:
        with self.db.read() as connection:
            task = store.microtask_of(connection, unit_name)
        assert task is not None
        return Microtask.from_json(str(task["document"]).encode())

    def honest_update(self, unit: Mapping[str, Any]) -> bytes:
        """What the application gives back for a workunit, computed in this process."""
        name = str(unit["name"])
        if name not in _updates:  # the name holds a digest of everything that decides
            microtask = self.microtask_of(name)
            files = re.findall(r"<file_name>(.*?)</file_name>\s*<open_name>(.*?)</open_name>", str(unit["xml_doc"]))
            where = {open_name: self.tree.download_path(physical) for physical, open_name in files}
            assert MICROTASK_FILE in where
            loaded = load(lambda open_name: where[open_name])
            run = Run(loaded, open_backend("numpy", 1))
            while not run.done:
                run.step()
            metadata = {"microtask": loaded.digest, "workunit": name}
            _updates[name] = write_update(run.update(), loaded.types, metadata, microtask.codec)
        return _updates[name]

    def changed_update(self, unit: Mapping[str, Any], change: Any) -> bytes:
        """The honest update with `change` applied to its gradients or deltas."""
        microtask = self.microtask_of(str(unit["name"]))
        types = update_types(self.job.folder.gradient_graph, microtask.mode, microtask.steps)
        found = read_update(self.honest_update(unit), types, microtask.codec, microtask.digest())
        tensors = {
            n: change(a).astype(np.float32) if n.startswith(("gradient/", "delta/")) else a
            for n, a in found.tensors.items()
        }
        return write_update(tensors, types, found.metadata, microtask.codec)

    def unit_of(self, result: Mapping[str, Any]) -> dict[str, Any]:
        (unit,) = self.rows(database.workunit, id=result["workunitid"])
        return unit

    def upload_path(self, result: Mapping[str, Any]) -> Path:
        (file,) = templates.output_files(str(result["xml_doc_in"]))
        return self.tree.upload_path(file.name)

    def answer(
        self, result: Mapping[str, Any], data: bytes | str | None = "honest", *, user: int | None = None,
        host: int | None = None, **columns: Any,
    ) -> None:  # fmt: skip
        """Report a result as a success, with this upload (None: nothing is uploaded)."""
        number = int(re.search(r"_(\d+)$", str(result["name"]))[1]) + 1  # type: ignore[index]
        user = number if user is None else user
        host = user if host is None else host
        if not self.rows(database.host, id=host):
            self.add_host(user, host)
        path = self.upload_path(result)
        if data is not None:
            content = self.honest_update(self.unit_of(result)) if isinstance(data, str) else data
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            path.write_bytes(content)
        now = int(time.time())
        values = {
            "server_state": int(ServerState.OVER), "outcome": int(Outcome.SUCCESS), "hostid": host, "userid": user,
            "sent_time": now - 60, "received_time": now, "elapsed_time": 30.0, "flops_estimate": 2e9,
            "app_version_id": 1, **columns,
        }  # fmt: skip
        self.change(database.result, int(result["id"]), **values)
        self.change(database.workunit, int(result["workunitid"]), transition_time=now - 1)


@functools.cache
def _template(toml: str, changes: Changes, validated: bool, kind: str) -> tuple[Path, Path, sa.URL, databases.Saved]:
    """Where a project was made (paths in it are absolute), a copy of it as it was then, and its MariaDB's rows."""
    base = Path(tempfile.mkdtemp(prefix="boinc-train-tiny-"))
    atexit.register(shutil.rmtree, base, ignore_errors=True)
    with databases.chosen(kind), TinyProject(base / "project", toml, changes=changes) as project:
        if validated:
            project.validate_round()
        url = project.db.url
        saved = {} if project.db.is_sqlite else databases.save(url)
    shutil.copytree(base / "project", base / "copy")
    return base / "project", base / "copy", url, saved


def tiny_project(toml: str = "job.toml", *, changes: Changes = (), validated: bool = False) -> TinyProject:
    """A fresh project; `validated`: with one round of honest copies already validated.

    It is made once and then copied back, always to the same place: close the project before the next one.
    """
    place, copy, url, saved = _template(toml, changes, validated, databases.current())
    shutil.rmtree(place)
    shutil.copytree(copy, place)
    if saved:
        databases.restore(url, saved)
    return TinyProject(place, toml)


def volunteer_environment() -> dict[str, str]:
    """Environment for processes that run the repository's own modules from another folder."""
    root = str(Path(__file__).resolve().parents[1])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}
