"""What the measurements of daemons share: a project on MariaDB with jobs of a chosen size, and validated workunits.

Jobs are made as an admin makes them (export and publishing), workunits by the work generator's own code, results
by the embedded server's transitioner. Only what volunteers and the validator would do is written in bulk: update
files (made with the application's own writer), rows of results and workunits as the validator leaves them.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import sqlalchemy as sa

from boinc_project import database, store, templates
from boinc_project.contract.microtask import Microtask
from boinc_project.contract.opset import TensorType
from boinc_project.contract.update import write_update
from boinc_project.daemon import Options, Stopper
from boinc_project.daemon_start import heartbeat_name
from boinc_project.database import Database
from boinc_project.gt_tables import JobState, gt_job, gt_microtask
from boinc_project.processes import Processes
from boinc_project.project_tree import ProjectTree, create_project
from boinc_project.rows import Key, update_rows
from boinc_project.server.transitioner import Transitioner
from boinc_project.states import NEVER, AssimilateState, Outcome, ServerState, ValidateState
from boinc_project.store import JobRow
from scripts.benchmarks.common import BenchmarkFailed
from tests import mariadb
from tests.tiny_project import APP, publish_stub_app
from work_generator.__main__ import Generator
from work_generator.export import export_job
from work_generator.job import Job
from work_generator.publish import publish_job

HOSTS = 50
PATIENCE_S = 300.0

_MODEL = """
import numpy as np
import torch.nn.functional as F
from torch import nn

def model():
    return nn.Sequential({layers})

def loss(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"], reduction="none").mean(1)

def metrics(model, batch):
    return {{"near": (model(batch["x"]) - batch["y"]).abs().mean(1) < 0.1}}

def data():
    x = np.random.default_rng(1).standard_normal((4096, {width})).astype(np.float32)
    return {{"train": {{"x": x[:4064], "y": x[:4064]}}, "test": {{"x": x[4064:], "y": x[4064:]}}}}
"""

_JOB = """
[job]
name = "{name}"
description = "A measurement."
seed = 1

[model]
factory = "bench:model"
loss = "bench:loss"
metrics = "bench:metrics"

[data]
source = "bench:data"
license = "CC0-1.0"
batch_size = 16

[train]
policy = "sync"
microtasks_per_version = {slots}
batches_per_microtask = 2
max_versions = 1000
evaluate_every = 0

[optimizer]
kind = "adamw"
lr = 0.001

[codec]
kind = "int8"

[workunit]
min_quorum = 2
"""


@dataclass(frozen=True)
class OpenWorkunit:
    """A workunit that waits for results: its microtask's row, and its results (id, workunitid, xml_doc_in) by id."""

    id: int
    task: store.Row
    results: list[store.Row]


def reported(unit_id: int, copy: int, now: int) -> dict[str, Any]:
    """Columns of a result that one of the HOSTS reported as a success; the copies of a workunit have unlike hosts."""
    host = (unit_id + copy * HOSTS // 2) % HOSTS + 1
    return {
        "server_state": int(ServerState.OVER), "outcome": int(Outcome.SUCCESS), "hostid": host, "userid": host,
        "sent_time": now - 60, "received_time": now, "app_version_id": 1,
    }  # fmt: skip


@dataclass
class BenchProject:
    """A project on MariaDB in a scratch folder."""

    tree: ProjectTree
    db: Database
    appid: int

    def add_job(self, folder: Path, name: str, *, width: int, layers: int, slots: int, running: bool = True) -> int:
        """Publish a job whose model has `layers` linear layers of width x width (and biases); its id."""
        folder.mkdir(parents=True)
        modules = ", ".join([f"nn.Linear({width}, {width})"] * layers)
        (folder / "bench.py").write_text(_MODEL.format(layers=modules, width=width))
        (folder / "job.toml").write_text(_JOB.format(name=name, slots=slots))
        job = Job.load(folder / "job.toml")
        made = publish_job(self.tree, self.db, job, export_job(job), APP, lambda text: None)
        if not running:
            self.set_state(made, JobState.PAUSED)
        return made

    def set_state(self, job_id: int, state: JobState) -> None:
        with self.db.transaction() as connection:
            store.set_job_state(connection, job_id, state)

    def job(self, job_id: int) -> JobRow:
        with self.db.read() as connection:
            found = store.job_with_id(connection, job_id)
        assert found is not None
        return found

    def issue(self) -> None:
        """The open rounds of all running jobs as workunits, with their results."""
        options = Options(app=APP, one_pass=True, sleep_interval=0.01)
        generator = Generator(options, self.tree, self.db, self.appid, Stopper(self.tree.project_dir))
        generator._wait_for_transitioner = lambda appid: None  # type: ignore[method-assign]
        generator.one_pass()
        Transitioner(self.db, self.tree.config, upload_key=self.tree.upload_private()).run_once()

    def open_workunits(self, job_id: int) -> list[OpenWorkunit]:
        """The issued and unanswered workunits of a job, each with its two results, by id."""
        open_tasks = sa.select(gt_microtask).where(gt_microtask.c.job_id == job_id, gt_microtask.c.state == "issued")
        columns = (database.result.c.id, database.result.c.workunitid, database.result.c.xml_doc_in)
        with self.db.read() as connection:
            tasks = {str(row["workunit_name"]): dict(row) for row in connection.execute(open_tasks).mappings()}
            units = {int(row["id"]): tasks[name] for name, row in store.workunits_named(connection, tasks).items()}
            results: dict[int, list[store.Row]] = {identifier: [] for identifier in units}
            for row in connection.execute(sa.select(*columns).order_by(database.result.c.id)).mappings():
                if row["workunitid"] in results:
                    results[int(row["workunitid"])].append(dict(row))
        for identifier, copies in results.items():
            if len(copies) != 2:
                raise BenchmarkFailed(f"workunit {identifier} has {len(copies)} results, not 2")
        return [OpenWorkunit(identifier, units[identifier], results[identifier]) for identifier in sorted(units)]

    def upload(self, row: store.Row, data: bytes) -> None:
        """The output file of a result, where a client's upload would be."""
        (file,) = templates.output_files(str(row["xml_doc_in"]))
        path = self.tree.upload_path(file.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def answer(self, job_id: int) -> list[int]:
        """Validated results for all open workunits of a job, not yet handed to the assimilator; their ids."""
        job = self.job(job_id)
        draws = np.random.default_rng(2)
        now = int(time.time())
        opened = self.open_workunits(job_id)
        result_rows: dict[Key, store.Row] = {}
        unit_rows: dict[Key, store.Row] = {}
        task_rows: dict[Key, store.Row] = {}
        for unit in opened:
            data = synthetic_update(job, unit.task, draws)
            for number, row in enumerate(unit.results):
                self.upload(row, data)
                judged = {"validate_state": int(ValidateState.VALID), "granted_credit": 1.0}
                result_rows[(int(row["id"]),)] = {**reported(unit.id, number, now), **judged}
            canonical = int(unit.results[0]["id"])
            unit_rows[(unit.id,)] = {
                "canonical_resultid": canonical, "canonical_credit": 1.0, "transition_time": NEVER,
            }  # fmt: skip
            task_rows[(str(unit.task["workunit_name"]),)] = {"canonical_sha256": hashlib.sha256(data).hexdigest()}
        with self.db.transaction() as connection:
            update_rows(connection, database.result, ("id",), result_rows)
            update_rows(connection, database.workunit, ("id",), unit_rows)
            update_rows(connection, gt_microtask, ("workunit_name",), task_rows)
        return [unit.id for unit in opened]

    def hand_over(self, ids: list[int]) -> None:
        """Make these workunits ready to assimilate, as the validator does, all at once."""
        with self.db.transaction() as connection:
            ready = {"assimilate_state": int(AssimilateState.READY)}
            update_rows(connection, database.workunit, ("id",), {(identifier,): ready for identifier in ids})

    def highest_workunit(self) -> int:
        """The newest workunit's id, which is also their number: a question that costs the database next to nothing."""
        with self.db.read() as connection:
            return int(connection.scalar(sa.select(sa.func.max(database.workunit.c.id))) or 0)

    def some_ready(self) -> bool:
        """Whether a workunit waits for the assimilator."""
        table = database.workunit
        waiting = table.c.appid == self.appid, table.c.assimilate_state == int(AssimilateState.READY)
        with self.db.read() as connection:
            return connection.scalar(sa.select(table.c.id).where(*waiting).limit(1)) is not None

    def current_version(self, job_id: int) -> int:
        with self.db.read() as connection:
            return int(connection.scalar(sa.select(gt_job.c.current_version).where(gt_job.c.id == job_id)) or 0)


def synthetic_update(job: JobRow, task: store.Row, draws: np.random.Generator) -> bytes:
    """An update with random gradients of the microtask's own form."""
    microtask = Microtask.from_json(str(task["document"]).encode())
    types: Mapping[str, TensorType] = job.folder.update_types(microtask.mode, microtask.steps, microtask.ships_state)
    tensors = {}
    for name, kind in types.items():
        values = np.asarray(draws.standard_normal(kind.shape, dtype=np.float32), np.float32)
        tensors[name] = np.full(kind.shape, 16.0, np.float32) if name.startswith("metric/") else values
    metadata = {"microtask": str(task["digest"]), "workunit": str(task["workunit_name"]), "backend": "numpy"}
    return write_update(tensors, types, metadata, microtask.codec)


@contextlib.contextmanager
def project_on_mariadb(folder: Path) -> Iterator[BenchProject]:
    """A new project on a private MariaDB server whose files lie in `folder`, durable at every commit."""
    if mariadb.MISSING:
        raise BenchmarkFailed(mariadb.MISSING)
    server = mariadb.private_server(folder / "mariadb")
    try:
        url = server.new_database()
        options = {"gt_database_url": url.render_as_string(hide_password=False)}
        address = "http://127.0.0.1:8080/bench/"
        tree = create_project(folder / "project", master_url=address, long_name="Bench", options=options)
        with tree.database() as db:
            store.create_own_tables(db)
            yield BenchProject(tree, db, publish_stub_app(tree, db))
    finally:
        server.stop()


@contextlib.contextmanager
def daemon(
    project: BenchProject, module: str, sleep_interval: float = 0.02, instances: int = 1
) -> Iterator[psutil.Process]:
    """One of our daemons as a process of its own, after a first pass that found nothing to do; the first process of
    several, which share the work by `--mod`."""
    processes = Processes(project.tree.project_dir)
    command = [sys.executable, "-m", module, "--app", APP, "-d", "2", "--sleep_interval", str(sleep_interval)]
    names = [module, *(f"{module}_{number}" for number in range(1, instances))]
    hearts = []
    for number, name in enumerate(names):
        mod = (instances, number) if instances > 1 else None
        processes.add(name, [*command, "--mod", *map(str, mod)] if mod else command)
        hearts.append(heartbeat_name(module, Options(app=APP, mod=mod)))
    start = time.time()
    processes.start()
    try:
        for name, heart in zip(names, hearts, strict=True):
            _wait_for_beat(project, heart, start, f"{name} does not start: see {processes.log_path(name)}")
        pid = processes.pid(module)
        assert pid is not None
        yield psutil.Process(pid)
    finally:
        processes.stop()


def _wait_for_beat(project: BenchProject, heart: str, start: float, complaint: str) -> None:
    def beats() -> bool:
        with project.db.read() as connection:
            return any(row["daemon"] == heart and row["time"] > start for row in store.heartbeats(connection))

    wait_until(beats, complaint)


def wait_until(condition: Callable[[], bool], complaint: str, patience_s: float = PATIENCE_S) -> None:
    """Ask again every 20 ms until the condition holds."""
    deadline = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > deadline:
            raise BenchmarkFailed(complaint)
        time.sleep(0.02)


def peak_bytes(process: psutil.Process) -> int:
    """The largest resident set since `reset_peak`, or since the process began (VmHWM, proc(5))."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    raise BenchmarkFailed("the kernel does not tell the largest resident set")


def reset_peak(process: psutil.Process) -> None:
    Path(f"/proc/{process.pid}/clear_refs").write_text("5\n")
