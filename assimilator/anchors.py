"""Anchors: gradients of some versions that the server computes itself, for the policy `anchored`.

    poll   collect a finished one, start the next one due

One runs at a time, in a process of its own, so that no version waits for it: a version is corrected by the newest one
that is there. It is a microtask of the job's own kind (gradients, or local steps) over batches that no volunteer is
asked for, drawn by a seed of their own. Its matrices' singular vectors are kept beside the version that it is of; the
row of that version names them, and the row of a round names the version, so that a round is computed from the same
bytes however often.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path

import sqlalchemy as sa

from assimilator.policies.anchored import factors
from boinc_project import local_run, store
from boinc_project.background_runs import ONE_THREAD, BackgroundRuns, Ended, Start
from boinc_project.contract.codecs import Codec
from boinc_project.contract.microtask import (
    CONSTANTS_FILE,
    GRAPH_FILE,
    OPTIMIZER_FILE,
    STATE_FILE,
    FileRef,
    Microtask,
    shard_file,
)
from boinc_project.database import Database
from boinc_project.gt_tables import JobState, gt_version
from boinc_project.job_folder import Published
from boinc_project.plan import DataPlan, batches_of_microtask
from boinc_project.store import JobRow, Row

log = logging.getLogger("assimilator")


class Anchors:
    """Computes anchors of a project's jobs, one at a time."""

    def __init__(self, database: Database, start: Start = local_run.start) -> None:
        self._database = database
        self._runs: BackgroundRuns[tuple[int, int]] = BackgroundRuns("anchor", start=start)  # by job and version
        self._given_up: set[tuple[int, int]] = set()

    @property
    def busy(self) -> bool:
        return self._runs.busy

    def poll(self, jobs: list[JobRow]) -> bool:
        """Collect a finished anchor and start the next one due; returns whether anything happened."""
        happened = False
        if self._runs.busy:
            ended = self._runs.ended()
            if not ended:
                return False
            by_id = {job.id: job for job in jobs}
            for each in ended:
                if each.key[0] in by_id:
                    self._collect(by_id[each.key[0]], each)
            happened = True
        for job in jobs:
            if job.config.train.policy == "anchored" and job.state in (JobState.RUNNING, JobState.PAUSED):
                row = self._due(job)
                if row is not None:
                    self._start(job, row)
                    return True
        return happened

    def stop(self) -> None:
        """End the one under way; it will be started again."""
        self._runs.stop()

    def _due(self, job: JobRow) -> Row | None:
        """The current version, if the newest anchor is `anchor_every` versions behind it."""
        with self._database.read() as connection:
            newest = store.newest_anchor(connection, job)
            if newest >= 0 and job.current_version < newest + job.config.aggregation.anchor_every:
                return None
            row = store.version_row(connection, job.id, job.current_version)
        return None if (job.id, job.current_version) in self._given_up else row

    def _start(self, job: JobRow, row: Row) -> None:
        version = int(row["version"])
        state = FileRef(str(row["state_sha256"]), int(row["state_bytes"]))
        microtask, files = anchor_microtask(job, version, state)
        folder = self._runs.folder(job.folder.path, str(version))
        types = job.folder.update_types(microtask.mode, microtask.steps, microtask.ships_state)
        arguments = (*ONE_THREAD, "--backend", job.config.trust.replay_backend)
        self._runs.begin((job.id, version), folder, microtask, files, types, arguments)

    def _collect(self, job: JobRow, ended: Ended[tuple[int, int]]) -> None:
        version = ended.key[1]
        if ended.update is None:
            self._given_up.add(ended.key)
            log.critical("[JOB %s] the anchor of version %d failed: %s", job.name, version, ended.why)
            return
        tensors = ended.update.tensors
        moving = {n.partition("/")[2]: a for n, a in tensors.items() if n.startswith(("gradient/", "delta/"))}
        digest = job.folder.write_anchor(version, factors(moving, job.folder.gradient_graph))
        statement = (
            sa.update(gt_version)
            .where(
                gt_version.c.job_id == job.id,
                gt_version.c.version == version,
                gt_version.c.state_sha256
                == ended.microtask.files[STATE_FILE].sha256,  # or a rollback has made it again
                gt_version.c.anchor_sha256 == "",
            )
            .values(anchor_sha256=digest)
        )
        if self._database.repeated(lambda connection: connection.execute(statement).rowcount):
            log.info("[JOB %s] the anchor of version %d is there", job.name, version)


def anchor_seed(seed: int) -> int:
    """The seed of an anchor's batches and dropout: none of the job's own draws have it."""
    return int.from_bytes(hashlib.sha256(f"anchor {seed}".encode()).digest()[:7], "little")


def anchor_microtask(job: JobRow, version: int, state: FileRef) -> tuple[Microtask, dict[str, Path]]:
    """The microtask that computes the anchor of a version, and where its files lie by open name."""
    config, facts, folder = job.config, job.facts, job.folder
    steps = config.aggregation.anchor_batches or config.steps
    seed = anchor_seed(config.job.seed)
    plan = DataPlan(seed, tuple(shard.rows for shard in facts.train), config.data.batch_size, facts.full_batches)
    batches, used = batches_of_microtask(plan, version, steps)
    found: list[tuple[str, Published | None, Path]] = [
        (GRAPH_FILE, facts.graph, folder.gradient_graph_path),
        (OPTIMIZER_FILE, facts.optimizer, folder.optimizer_graph_path),
        (CONSTANTS_FILE, facts.constants, folder.constants_path),
        *(
            (shard_file(number), facts.train[shard].file, folder.shard_path("train", shard))
            for number, shard in enumerate(used)
        ),
    ]
    refs: Mapping[str, FileRef] = {name: FileRef(file.sha256, file.size) for name, file, _ in found if file is not None}
    microtask = Microtask(
        job=job.name,
        mode=config.mode,
        base_version=version,
        slot=0,
        files={**refs, STATE_FILE: state},
        batch_size=config.data.batch_size,
        batches=batches,
        learning_rates=(config.learning_rate(version),) * steps,
        seed=seed,
        first_step=version * steps,
        codec=Codec("dense", 256, "none"),
        inner_step=config.inner_step(version),
    )
    paths = {name: path for name, file, path in found if file is not None}
    return microtask, {**paths, STATE_FILE: folder.state_path(version, state.sha256)}
