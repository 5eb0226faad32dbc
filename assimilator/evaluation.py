"""Held-out evaluation of published versions, in the background so that no round waits for it.

The held-out data never leave the server. One evaluation runs at a time; if versions come faster than they
can be evaluated, the newest one due is next and older ones are left out.
"""

from __future__ import annotations

import json
import logging

import sqlalchemy as sa

from boinc_project import local_run, store
from boinc_project.background_runs import BackgroundRuns, Ended, Start
from boinc_project.contract.graph import Graph
from boinc_project.contract.microtask import FileRef
from boinc_project.contract.update import update_types
from boinc_project.database import Database
from boinc_project.gt_tables import gt_version
from boinc_project.held_out import evaluation_microtask, metric_means
from boinc_project.store import JobRow, Row

log = logging.getLogger("assimilator")


class Evaluator:
    """Evaluates versions of a project's jobs, one at a time."""

    def __init__(self, database: Database, start: Start = local_run.start) -> None:
        self._database = database
        self._runs: BackgroundRuns[tuple[int, int]] = BackgroundRuns("evaluation", start=start)  # by job and version
        self._given_up: set[tuple[int, int]] = set()

    @property
    def busy(self) -> bool:
        return self._runs.busy

    def poll(self, jobs: list[JobRow]) -> bool:
        """Collect a finished evaluation and start the next one due; returns whether anything happened."""
        if self._runs.busy:
            ended = self._runs.ended()
            for each in ended:
                self._collect(each)
            return bool(ended)
        for job in jobs:
            due = self._due(job)
            if due is not None:
                self._start(job, due)
                return True
        return False

    def stop(self) -> None:
        """End the evaluation under way; it will be started again."""
        self._runs.stop()

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

    def _start(self, job: JobRow, row: Row) -> None:
        version = int(row["version"])
        graph = Graph.from_bytes(job.folder.evaluation_graph_path.read_bytes())
        digest = str(row["state_sha256"])
        state = FileRef(digest, int(row["state_bytes"]))
        microtask, files = evaluation_microtask(job, version, state, job.folder.state_path(version, digest))
        folder = self._runs.folder(job.folder.path, str(version))
        types = update_types(graph, "evaluation", microtask.steps)
        self._runs.begin((job.id, version), folder, microtask, files, types)

    def _collect(self, ended: Ended[tuple[int, int]]) -> None:
        (job_id, version), name = ended.key, ended.microtask.job
        if ended.update is None:
            self._given_up.add(ended.key)
            log.critical("[JOB %s] evaluation of version %d failed: %s", name, version, ended.why)
            return
        means = metric_means(ended.update)
        statement = (
            sa.update(gt_version)
            .where(gt_version.c.job_id == job_id, gt_version.c.version == version)
            .values(evaluation=json.dumps(means, sort_keys=True))
        )
        self._database.repeated(lambda connection: connection.execute(statement))
        shown = ", ".join(f"{name} {value:.4g}" for name, value in sorted(means.items()))
        log.info("[JOB %s] version %d on held-out data: %s", name, version, shown)
