"""The assimilator daemon: takes validated gradients in and turns complete rounds into model versions.

    main -> run_passes -> one_pass -> intake (workunits in batches) -> apply (each job) -> evaluate, anchors
                         (in the background)

Intake is sharded by workunit (`--mod`), applying by job. Follows sched/assimilator.cpp, except that it is
idempotent: handling a workunit twice changes nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from sqlalchemy.exc import DBAPIError

from assimilator import intake
from assimilator.anchors import Anchors
from assimilator.apply import Applier
from assimilator.evaluation import Evaluator
from assimilator.intake import Case, Outcome
from boinc_project import clock, store
from boinc_project.daemon import Options, Patience, Stopper
from boinc_project.daemon_start import outside_faults, run, start
from boinc_project.database import Database, is_lost
from boinc_project.durable import FileBatch
from boinc_project.gt_tables import JobState
from boinc_project.job_folder import folders_of_jobs
from boinc_project.project_tree import ProjectTree

ABOUT = "Takes validated gradients into the ledger and publishes new model versions."
DEFAULT_SLEEP_S = 5.0
WORKUNITS_PER_BATCH = 200  # they share two waits for the disk and one commit
READERS = 2  # threads that read and check payloads
M_MMAP_THRESHOLD = -3  # mallopt(3)

log = logging.getLogger("assimilator")


@dataclass
class Assimilator:
    """The daemon's state."""

    options: Options
    tree: ProjectTree
    database: Database
    appid: int
    stopper: Stopper
    applier: Applier
    evaluator: Evaluator
    anchors: Anchors
    patience: Patience = field(default_factory=Patience)

    def one_pass(self) -> bool:
        """Take in what is ready, advance every job of the app; returns whether anything was done."""
        with outside_faults():
            worked = self._intake()
            if not self.options.dry_run:
                worked |= self._advance()
        return worked

    def finish_computing(self) -> None:
        """Wait for the evaluation and the anchor under way and those due after them: one pass handles all there is."""
        while self.evaluator.busy or self.anchors.busy:
            time.sleep(0.05)
            self.one_pass()

    def _intake(self) -> bool:
        """Take in every workunit that is ready, a batch at a time; returns whether anything was done."""
        worked, left, seen = False, self.options.limit, max(self.options.min_wu_id, self.options.wu_id or 0) - 1
        with self.database.read() as connection:
            jobs = {job.id: job for job in store.jobs(connection, appid=self.appid)}
        while left is None or left > 0:
            self.stopper.check()
            with self.database.read() as connection:
                units = store.ready_to_assimilate(
                    connection, self.appid, WORKUNITS_PER_BATCH, after=seen, mod=self.options.mod
                )
                if not units:
                    break
                seen = int(units[-1]["id"])
                cases, foreign = intake.look_up(connection, [unit for unit in units if self._takes(unit)][:left], jobs)
            for unit in foreign:
                self.patience.leave(int(unit["id"]))
                log.warning("[WU#%d %s] is not one of our microtasks; it is left alone", unit["id"], unit["name"])
            left = None if left is None else left - len(cases)
            if self.options.dry_run:
                for case in cases:
                    log.info("[WU#%d %s] would be taken in", case.id, case.name)
            elif cases:
                worked |= self._take_in(cases)
        return worked

    def _takes(self, unit: store.Row) -> bool:
        identifier = int(unit["id"])
        return self.options.takes(identifier) and self.patience.allows(identifier)

    def _take_in(self, cases: Sequence[Case]) -> bool:
        """Keep the payloads of a batch, then write its rows, job by job; returns whether anything was done."""
        outcomes: dict[int, list[Outcome]] = {}
        with FileBatch(len(cases)) as files:
            with ThreadPoolExecutor(READERS, thread_name_prefix="intake") as readers:
                for outcome in readers.map(lambda case: self._prepared(case, files), cases):
                    if outcome is not None:
                        outcomes.setdefault(outcome.case.job.id, []).append(outcome)
            files.commit()
        done = [self._recorded(group) for _, group in sorted(outcomes.items())]
        return any(done)

    def _prepared(self, case: Case, files: FileBatch) -> Outcome | None:
        """One workunit's outcome; an unexpected fault parks it and leaves the others alone."""
        try:
            return intake.prepare(self.tree, case, files)
        except OSError as error:
            self.patience.later(case.id)
            log.warning("[WU#%d %s] storage is away (%s); later", case.id, case.name, error)
        except Exception:
            self.patience.failed(case.id, "[WU#%d] intake failed", case.id)
        return None

    def _recorded(self, outcomes: Sequence[Outcome]) -> bool:
        """Write outcomes of one job in one transaction. If that fails, each is tried by itself."""
        job = outcomes[0].case.job
        try:
            lines = self.database.repeated(lambda connection: intake.record(connection, job, outcomes, clock.now()))
        except Exception as error:
            if isinstance(error, DBAPIError) and is_lost(error):
                raise
            if len(outcomes) > 1:
                done = [self._recorded([outcome]) for outcome in outcomes]
                return any(done)
            self.patience.failed(outcomes[0].case.id, "[WU#%d] intake failed", outcomes[0].case.id)
            return False
        for line in lines:
            log.info("%s", line)
        return True

    def _advance(self) -> bool:
        with self.database.read() as connection:
            states = (JobState.RUNNING, JobState.PAUSED, JobState.FINISHED)
            jobs = store.jobs(connection, *states, appid=self.appid)
        mine = [job for job in jobs if self.options.takes_job(job.id)]
        worked = False
        for job in mine:
            self.stopper.check()
            if job.state != JobState.FINISHED:
                worked |= self.applier.advance(job)
        worked |= self.anchors.poll(mine)
        return self.evaluator.poll(mine) or worked


def return_freed_memory() -> None:
    """Have arrays of a megabyte and more given back to the system once they are freed.

    glibc would keep them for later: several times the model's size in a daemon that needs it once per version.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 512 << 10)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry of the daemon; returns the exit status."""
    started = start(arguments, program="gt_assimilator", about=ABOUT, default_sleep=DEFAULT_SLEEP_S)
    if isinstance(started, int):
        return started
    return_freed_memory()
    evaluator = Evaluator(started.database)
    anchors = Anchors(started.database)
    applier = Applier(started.database, started.tree)
    assimilator = Assimilator(
        started.options, started.tree, started.database, started.appid, started.stopper, applier, evaluator, anchors
    )

    def one_pass() -> bool:
        worked = assimilator.one_pass()
        if started.options.one_pass:
            assimilator.finish_computing()
        return worked

    try:
        return run(started, "assimilator", one_pass, folders_of_jobs(started.tree.project_dir))
    finally:
        evaluator.stop()
        anchors.stop()


if __name__ == "__main__":
    sys.exit(main())
