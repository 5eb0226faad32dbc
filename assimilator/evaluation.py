"""Held-out evaluation of published versions, in a process of its own so that no round waits for it.

The held-out data never leave the server. One evaluation runs at a time; if versions come faster than they
can be evaluated, the newest one due is next and older ones are left out.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import sqlalchemy as sa

from boinc_project import local_run, store
from boinc_project.contract.errors import ContractError
from boinc_project.contract.graph import Graph
from boinc_project.contract.microtask import FileRef, Microtask
from boinc_project.contract.opset import TensorType
from boinc_project.contract.update import Update, update_types
from boinc_project.database import Database
from boinc_project.gt_tables import gt_version
from boinc_project.held_out import evaluation_microtask, metric_means
from boinc_project.store import JobRow, Row

log = logging.getLogger("assimilator")


@dataclass
class Running:
    """The evaluation under way."""

    job: JobRow
    version: int
    run: EvaluationRun
    types: Mapping[str, TensorType]


class EvaluationRun(Protocol):
    """The evaluation of one version, under way."""

    folder: Path

    def finished(self) -> bool: ...

    def update(self, types: Mapping[str, TensorType]) -> Update:
        """Wait for the end and read the metrics. Raises local_run.LocalRunFailed."""

    def stop(self) -> None: ...


#: Starts a microtask in a folder, given where its files lie by open name.
Start = Callable[[Path, Microtask, Mapping[str, Path]], EvaluationRun]


class Evaluator:
    """Evaluates versions of a project's jobs, one at a time."""

    def __init__(self, database: Database, start: Start = local_run.start) -> None:
        self._database = database
        self._start_run = start
        self._running: Running | None = None
        self._given_up: set[tuple[int, int]] = set()

    @property
    def busy(self) -> bool:
        return self._running is not None

    def poll(self, jobs: list[JobRow]) -> bool:
        """Collect a finished evaluation and start the next one due; returns whether anything happened."""
        if self._running is not None:
            if not self._running.run.finished():
                return False
            self._collect(self._running)
            self._running = None
            return True
        for job in jobs:
            due = self._due(job)
            if due is not None:
                self._running = self._start(job, due)
                return True
        return False

    def stop(self) -> None:
        """End the evaluation under way; it will be started again."""
        if self._running is not None:
            self._running.run.stop()
            shutil.rmtree(self._running.run.folder, ignore_errors=True)
            self._running = None

    def _due(self, job: JobRow) -> Row | None:
        """The newest version that should have been evaluated and was not."""
        every = job.config.train.evaluate_every
        if not every or not job.facts.test:
            return None
        with self._database.read() as connection:
            rows = store.versions(connection, job.id)
        last = max((int(row["version"]) for row in rows if row["evaluation"]), default=-1)
        for row in reversed(rows):
            version = int(row["version"])
            if version <= last:
                return None
            wanted = version % every == 0 or version == job.config.train.max_versions
            if wanted and not row["evaluation"] and (job.id, version) not in self._given_up:
                return row
        return None

    def _start(self, job: JobRow, row: Row) -> Running:
        version = int(row["version"])
        graph = Graph.from_bytes(job.folder.evaluation_graph_path.read_bytes())
        digest = str(row["state_sha256"])
        state = FileRef(digest, int(row["state_bytes"]))
        microtask, files = evaluation_microtask(job, version, state, job.folder.state_path(version, digest))
        local_run.remove_leftovers(job.folder.path, "evaluation_*_*")
        folder = job.folder.path / f"evaluation_{version}_{os.getpid()}"
        shutil.rmtree(folder, ignore_errors=True)
        run = self._start_run(folder, microtask, files)
        return Running(job, version, run, update_types(graph, "evaluation", microtask.steps))

    def _collect(self, running: Running) -> None:
        job, version = running.job, running.version
        try:
            means = metric_means(running.run.update(running.types))
        except (local_run.LocalRunFailed, ContractError) as error:
            self._given_up.add((job.id, version))
            log.critical("[JOB %s] evaluation of version %d failed: %s", job.name, version, error)
            return
        finally:
            shutil.rmtree(running.run.folder, ignore_errors=True)
        statement = (
            sa.update(gt_version)
            .where(gt_version.c.job_id == job.id, gt_version.c.version == version)
            .values(evaluation=json.dumps(means, sort_keys=True))
        )
        self._database.repeated(lambda connection: connection.execute(statement))
        shown = ", ".join(f"{name} {value:.4g}" for name, value in sorted(means.items()))
        log.info("[JOB %s] version %d on held-out data: %s", job.name, version, shown)
