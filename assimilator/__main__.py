"""The assimilator daemon: takes validated gradients in and turns complete rounds into model versions.

    main -> run_passes -> one_pass -> intake (each workunit) -> apply (each job) -> evaluate (in the background)

Intake is sharded by workunit (`--mod`), applying by job. Follows sched/assimilator.cpp, except that it is
idempotent: handling a workunit twice changes nothing.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from sqlalchemy.exc import DBAPIError

from assimilator.apply import Applier
from assimilator.evaluation import Evaluator
from assimilator.intake import take_in
from boinc_project import store
from boinc_project.daemon import Options, Stopper
from boinc_project.daemon_start import outside_faults, run, start
from boinc_project.database import Database
from boinc_project.gt_tables import JobState
from boinc_project.project_tree import ProjectTree

ABOUT = "Takes validated gradients into the ledger and publishes new model versions."
DEFAULT_SLEEP_S = 5.0
WORKUNITS_PER_PASS = 1000
PARK_AFTER = 3  # unexpected exceptions for one workunit
RETRY_S = 60.0

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
    not_before: dict[int, float] = field(default_factory=dict)
    failures: dict[int, int] = field(default_factory=dict)

    def one_pass(self) -> bool:
        """Take in what is ready, advance every job; returns whether anything was done."""
        with outside_faults():
            worked = self._intake()
            if not self.options.dry_run:
                worked |= self._advance()
        return worked

    def finish_evaluation(self) -> None:
        """Wait for the evaluation under way and those due after it: one pass handles all that is there."""
        while self.evaluator.busy:
            time.sleep(0.05)
            self.one_pass()

    def _intake(self) -> bool:
        with self.database.read() as connection:
            units = store.ready_to_assimilate(connection, self.appid, WORKUNITS_PER_PASS)
            known = {job.id: job for job in store.jobs(connection)}
        worked = False
        for unit in units:
            self.stopper.check()
            identifier = int(unit["id"])
            if not self.options.takes(identifier) or self.not_before.get(identifier, 0.0) > time.time():
                continue
            with self.database.read() as connection:
                task = store.microtask_of(connection, str(unit["name"]))
            if task is None:
                self.not_before[identifier] = float("inf")
                log.warning("[WU#%d %s] is not one of our microtasks; it is left alone", identifier, unit["name"])
                continue
            if self.options.dry_run:
                log.info("[WU#%d %s] would be taken in", identifier, unit["name"])
                continue
            worked |= self._guarded(unit, task, known[int(task["job_id"])])
        return worked

    def _guarded(self, unit: store.Row, task: store.Row, job: store.JobRow) -> bool:
        """Take one workunit in; an unexpected fault parks it and leaves the others alone."""
        identifier = int(unit["id"])
        try:
            take_in(self.database, self.tree, unit, task, job, time.time())
        except DBAPIError:
            raise
        except OSError as error:
            self.not_before[identifier] = time.time() + RETRY_S
            log.warning("[WU#%d %s] storage is away (%s); later", identifier, unit["name"], error)
            return False
        except Exception:
            count = self.failures[identifier] = self.failures.get(identifier, 0) + 1
            parked = count >= PARK_AFTER
            self.not_before[identifier] = float("inf") if parked else time.time() + RETRY_S
            log.critical("[WU#%d] intake failed%s", identifier, "; it is parked" if parked else "", exc_info=True)
            return False
        return True

    def _advance(self) -> bool:
        with self.database.read() as connection:
            jobs = store.jobs(connection, JobState.RUNNING, JobState.PAUSED, JobState.FINISHED)
        mine = [job for job in jobs if self.options.takes_job(job.id)]
        worked = False
        for job in mine:
            self.stopper.check()
            if job.state != JobState.FINISHED:
                worked |= self.applier.advance(job)
        return self.evaluator.poll(mine) or worked


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry of the daemon; returns the exit status."""
    started = start(arguments, program="gt_assimilator", about=ABOUT, default_sleep=DEFAULT_SLEEP_S)
    if isinstance(started, int):
        return started
    evaluator = Evaluator(started.database)
    applier = Applier(started.database, started.tree)
    assimilator = Assimilator(
        started.options, started.tree, started.database, started.appid, started.stopper, applier, evaluator
    )

    def one_pass() -> bool:
        worked = assimilator.one_pass()
        if started.options.one_pass:
            assimilator.finish_evaluation()
        return worked

    try:
        return run(started, "assimilator", one_pass)
    finally:
        evaluator.stop()


if __name__ == "__main__":
    sys.exit(main())
