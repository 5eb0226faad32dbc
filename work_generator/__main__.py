"""The work generator daemon: keeps each running job supplied with workunits and its old files retired.

    main -> run_passes -> one_pass -> for each job: finished or failing? -> issue -> help stragglers -> retire
                                   -> then: hosts that fail everything get one task a day

It follows sched/sample_work_generator.cpp: stage the files, insert the workunit last, then wait until the
transitioner has made the results before counting again.
"""

from __future__ import annotations

import logging
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from boinc_project import clock, size_classes, store
from boinc_project.daemon import Options, Stopper
from boinc_project.daemon_start import outside_faults, run, start
from boinc_project.database import Database, app, result, workunit
from boinc_project.gt_tables import JobState, MicrotaskState
from boinc_project.project_tree import ProjectTree
from boinc_project.rows import read_rows
from boinc_project.standard.install import is_standard
from boinc_project.states import NEVER, ServerState
from boinc_project.store import JobRow
from boinc_project.supply_limits import BROKEN_AFTER, MAX_ATTEMPTS, download_advice
from boinc_project.templates import TemplateError
from work_generator import broken_hosts, issue, retire, speed_classes, supply, workunits

ABOUT = "Issues the microtasks of all running jobs as workunits and retires published files nobody needs."
DEFAULT_SLEEP_S = 5.0
TRANSITIONER_PATIENCE_S = 60.0
WORKUNITS_PER_BATCH = 1000  # their files share two waits for the disk
WORKUNITS_PER_COMMIT = 200
CENSUS_SETTLED_S = 30.0
MOST_COUNTED = 500  # newest microtasks whose hosts show how much work each speed class wants
LEAST_FREE_BYTES = 200 << 20
NO_ROOM = "the disk is almost full"
STRAGGLER_COLUMNS = (
    "id", "name", "canonical_resultid", "error_mask", "need_validate", "transition_time", "target_nresults",
    "max_success_results", "max_total_results",
)  # fmt: skip

log = logging.getLogger("work_generator")


@dataclass
class Generator:
    """The daemon's state: where the project is, and which (job, version) it has last looked at for retiring."""

    options: Options
    tree: ProjectTree
    database: Database
    appid: int
    stopper: Stopper
    wait: Callable[[float], None] | None = None  # lets others work for some seconds; None: sleep meanwhile
    retired: dict[int, int] = field(default_factory=dict)
    reported: set[str] = field(default_factory=set)
    advised: set[int] = field(default_factory=set)  # ids of jobs whose advice has been logged
    census_read: dict[Path, float] = field(default_factory=dict)  # when it was written that the feeder was told of
    settled: set[str] = field(default_factory=set)  # workunits that need not be cancelled any more

    def __post_init__(self) -> None:
        self.inputs = issue.Inputs(self.tree)

    def one_pass(self) -> bool:
        """Look at every job of the app once; returns whether anything was done."""
        worked = False
        with outside_faults():
            with self.database.read() as connection:
                running = store.jobs(connection, JobState.RUNNING, appid=self.appid)
            for job in running:
                self.stopper.check()
                if self.options.takes_job(job.id):
                    worked |= self._supply(job)
            with self.database.read() as connection:
                every_job = store.jobs(connection, appid=self.appid)
            for job in every_job:
                if self.options.takes_job(job.id):
                    self._take_back(job)
            self._limit_broken_hosts()
        return worked

    def _supply(self, job: JobRow) -> bool:
        now = clock.now()
        with self.database.read() as connection:
            reason = supply.stop_reason(job.config, store.versions(connection, job.id), job.create_time, now)
        if reason:
            log.info("[JOB %s] finished: %s", job.name, reason)
            if not self.options.dry_run:
                self._stop(job, JobState.FINISHED, reason)
            return True
        with self.database.read() as connection:
            rows = store.useful_microtasks(connection, job)
            next_slot = store.next_slot(connection, job.id) if job.config.policy.flow else 0
            withdrawn = store.withdrawn(connection, job.id) if job.config.policy.flow else []
        self._advise(job)
        for slot in supply.skipped_slots(rows):
            self._once(
                f"[JOB {job.name}] version {job.current_version}, slot {slot} failed on every try; it is skipped"
            )
        if supply.hopeless(job.config, rows):
            slots = supply.slots_of(rows)
            with self.database.read() as connection:
                cause = store.commonest_error(connection, list(slots))
            reason = f"every microtask of version {job.current_version} failed {MAX_ATTEMPTS} times{cause}"
            self._fail(job, reason, slots)
            return True
        if self._is_failing(job, rows):
            return True
        if job.config.policy.flow:
            rows = list({int(row["id"]): row for row in (*rows, *withdrawn)}.values())
            wanted = supply.flow_to_issue(rows, next_slot, job.config.aggregation.in_flight)
        else:
            wanted = supply.slots_to_issue(rows, job.config.train.microtasks_per_version)
        if job.config.class_steps and wanted:
            wanted = self._placed(job, wanted, rows)
        issued = False
        for first in range(0, len(wanted), WORKUNITS_PER_BATCH):
            self.stopper.check()
            issued |= self._issue(job, wanted[first : first + WORKUNITS_PER_BATCH])
        if issued:
            self._wait_for_transitioner(job.appid)
        return issued or self._help_stragglers(job)

    def _placed(self, job: JobRow, wanted: Sequence[supply.Issue], rows: Sequence[store.Row]) -> list[supply.Issue]:
        """The slots with the batches and classes that they are for; none while the app lacks the classes."""
        steps, before = job.config.class_steps, job.current_version - 1
        with self.database.read() as connection:
            kept = connection.execute(sa.select(app.c.name, app.c.n_size_classes).where(app.c.id == job.appid)).one()
            if kept.n_size_classes != len(steps):
                self._once(
                    f"[JOB {job.name}] waits: n_size_classes of app {kept.name} is {kept.n_size_classes}, and its"
                    f" speed_classes are {len(steps)}; see boinc-train doctor"
                )
                return []
            round_before = [] if job.config.policy.flow or before < 0 else store.microtasks(connection, job.id, before)
            recent = sorted([*rows, *round_before], key=lambda row: int(row["id"]))[-MOST_COUNTED:]
            tasks = store.tasks_of_hosts(connection, [str(row["workunit_name"]) for row in recent])
            hosts = {int(task["hostid"]) for task in tasks}
            measured = size_classes.measured_speeds(connection, job.appid, hosts)
            first = store.next_batch(connection, job.id)
        path = size_classes.census_path(self.tree.project_dir, str(kept.name))
        census = size_classes.read_census(path, len(steps))
        if census is not None and is_standard(self.tree.config):
            self._tell_feeder(path)
        demand = speed_classes.demand_of(len(steps), census, tasks, measured)
        places = speed_classes.placed(job.config, [each.slot for each in wanted], rows, demand, first)
        return [replace(each, place=place) for each, place in zip(wanted, places, strict=True)]

    def _tell_feeder(self, census: Path) -> None:
        """Have BOINC's feeder read a new census, once it is surely complete: it reads it at its start only, and ends
        on half of one."""
        changed = census.stat().st_mtime
        if changed > clock.now() - CENSUS_SETTLED_S or self.options.dry_run:
            return
        if self.census_read.get(census) != changed:  # a feeder older than this daemon may not have read it either
            self.census_read[census] = changed
            (self.tree.project_dir / "reread_db").touch()

    def _is_failing(self, job: JobRow, rows: Sequence[store.Row]) -> bool:
        """Stop the job if most tasks of its current version fail; returns whether it was so."""
        slots = supply.slots_of(rows)
        with self.database.read() as connection:
            found = supply.failing(store.ended_tasks(connection, slots), job.config.supply)
            if found is None:
                return False
            cause = store.commonest_error(connection, list(slots))
            which = "" if found.app_version is None else store.app_version_text(connection, found.app_version)
        reason = (
            f"{found.errors} of {found.tasks} tasks of version {job.current_version} failed on {found.hosts} hosts"
            f"{', all of them with ' if which else ''}{which}{cause}"
        )
        self._fail(job, reason, slots)
        return True

    def _issue(self, job: JobRow, issues: Sequence[supply.Issue]) -> bool:
        """Make workunits of slots over the current version; returns whether any was made."""
        version = job.current_version
        with self.database.read() as connection:
            state = store.published_chain(connection, job.id, version)
        if state is None:
            self._once(f"[JOB {job.name}] version {version} is not published yet")
            return False
        drafts = issue.make(job, issues, state)
        if self.options.dry_run:
            for draft in drafts:
                log.info("[WU %s] would be created", draft.name)
            return False
        if not self._has_room(state[0].size):
            return False
        try:
            self.inputs.check(file for draft in drafts for file in draft.content.files.values())
        except issue.InputMissing as error:
            self._fail(job, str(error))
            return False
        now, made = int(clock.now()), list[issue.Draft]()
        forms = workunits.Forms(self.tree, job.config, job.facts, job.appid)
        try:  # before anything is published: a row that cannot be leaves no file behind
            rows = [
                forms.row(d.content, self.tree.described(d.file_name, d.text), name=d.name, now=now) for d in drafts
            ]
        except TemplateError as error:
            self._fail(job, str(error))
            return False
        documents = self.tree.stage_files({draft.file_name: draft.text for draft in drafts})
        for first in range(0, len(drafts), WORKUNITS_PER_COMMIT):
            part = slice(first, first + WORKUNITS_PER_COMMIT)
            made += issue.insert(self.database, job, drafts[part], documents, rows[part])
        for draft in made:
            log.info(
                "[WU %s] created: version %d, slot %d, attempt %d, %d samples, %d steps",
                draft.name,
                version,
                draft.issue.slot,
                draft.issue.attempt,
                draft.content.microtask.samples,
                draft.content.microtask.steps,
            )
        return bool(made)

    def _has_room(self, state_bytes: int) -> bool:
        """Whether the disk holds enough for this batch and for the versions to come. Nothing is deleted for room."""
        folder = self.tree.config.download_dir
        free = shutil.disk_usage(folder).free
        if free >= LEAST_FREE_BYTES + 4 * state_bytes:
            self.reported.discard(NO_ROOM)
            return True
        if NO_ROOM not in self.reported:
            self.reported.add(NO_ROOM)
            log.critical("%s in %s: %d bytes are free; no workunit is made until there are more", NO_ROOM, folder, free)
        return False

    def _advise(self, job: JobRow) -> None:
        """Say once what a version costs to download."""
        if job.id in self.advised:
            return
        with self.database.read() as connection:
            state = store.published_chain(connection, job.id, job.current_version)
        if state is None:
            return
        self.advised.add(job.id)
        log.info("[JOB %s] %s", job.name, download_advice(job.config, state[0].size))

    def _fail(self, job: JobRow, reason: str, forgiven: Mapping[str, int] | None = None) -> None:
        """Stop the job with the reason, until an admin resumes it, unless it has stopped or gone on by itself. Hosts
        are not to blame for the errors of the `forgiven` workunits (name -> slot)."""
        if self.options.dry_run or self._stop(job, JobState.FAILED, reason, forgiven):
            log.critical("[JOB %s] stopped: %s", job.name, reason)

    def _stop(self, job: JobRow, state: JobState, note: str, forgiven: Mapping[str, int] | None = None) -> bool:
        def stop(connection: Connection) -> bool:
            stopped = store.stop_job(connection, job, state, note)
            if stopped and forgiven:
                store.forgive(connection, job, forgiven, self.tree.config.daily_result_quota)
            return stopped

        return self.database.repeated(stop)

    def _wait_for_transitioner(self, appid: int) -> None:
        """Count again only when the results of what was issued exist."""
        deadline = time.monotonic() + TRANSITIONER_PATIENCE_S
        while time.monotonic() < deadline:
            with self.database.read() as connection:
                if not store.transitions_waiting(connection, appid, int(clock.now())):
                    return
            (self.wait or self.stopper.sleep)(min(0.2, self.options.sleep_interval))
        self._once("the transitioner has not looked at new workunits for a minute; is it running?")

    def _help_stragglers(self, job: JobRow) -> bool:
        """Raise target_nresults of workunits whose copies take too long (BOINC makes one more result), and have the
        transitioner look at those that it overlooked."""
        now = int(clock.now())
        with self.database.read() as connection:
            open_names = [
                str(row["workunit_name"])
                for row in store.useful_microtasks(connection, job)
                if row["state"] == MicrotaskState.ISSUED
            ]
            keys = [(name,) for name in open_names]
            rows = list(read_rows(connection, workunit, ("name",), keys, STRAGGLER_COLUMNS).values())
            counts = store.result_counts(connection, [int(row["id"]) for row in rows])
        for row in rows:
            if supply.overlooked(row, counts[int(row["id"])], now) and not self.options.dry_run:
                self._wake(row)
        for row in rows:
            if supply.waits_for_its_class(job.config, counts[int(row["id"])], now) and not self.options.dry_run:
                self._offer_to_all(job, row)
        slow = [row for row in rows if supply.straggling(job.config, row, counts[int(row["id"])], now)]
        for row in slow:
            if self.options.dry_run:
                log.info("[WU#%d %s] would get another copy", row["id"], row["name"])
                continue
            one_more = (
                sa.update(workunit)
                .where(
                    workunit.c.id == row["id"],
                    workunit.c.target_nresults == row["target_nresults"],
                    workunit.c.canonical_resultid == 0,
                    workunit.c.error_mask == 0,
                    workunit.c.transition_time < NEVER,
                )
                .values(target_nresults=row["target_nresults"] + 1, transition_time=store.soon())
            )
            if self._changes(one_more):
                log.info("[WU#%d %s] is slow: one more copy is asked for", row["id"], row["name"])
        return bool(slow) and not self.options.dry_run

    def _offer_to_all(self, job: JobRow, row: store.Row) -> None:
        """Raise the priority of a workunit's copies that wait above what hosts prefer their own class by."""
        priority = job.config.workunit.priority + size_classes.OWN - size_classes.TOO_LARGE + 1
        waiting = result.c.server_state.in_([int(ServerState.INACTIVE), int(ServerState.UNSENT)])
        where = (result.c.workunitid == row["id"], waiting, result.c.priority < priority)
        if self._changes(sa.update(result).where(*where).values(priority=priority)):
            log.info("[WU#%d %s] waits for a host of its speed class: it is offered to all now", row["id"], row["name"])

    def _wake(self, row: store.Row) -> None:
        """Have the transitioner look at a workunit now, if it is still as it was read."""
        read = [workunit.c[name] == row[name] for name in ("id", "transition_time", "need_validate")]
        if self._changes(sa.update(workunit).where(*read).values(transition_time=store.soon())):
            log.warning(
                "[WU#%d %s] was overlooked by the transitioner; it is asked to look again", row["id"], row["name"]
            )

    def _changes(self, statement: sa.Update) -> bool:
        """Whether an UPDATE in a transaction of its own finds a row."""
        return bool(self.database.repeated(lambda connection: connection.execute(statement).rowcount))

    def _take_back(self, job: JobRow) -> None:
        """Cancel what nobody was sent and that serves nobody; delete files of older versions that nobody needs."""
        if self.options.dry_run:
            return
        retire.cancel_unsent(self.database, job, self.settled)
        if self.retired.get(job.id) != job.current_version and retire.retire_files(self.database, self.tree, job):
            self.retired[job.id] = job.current_version

    def _limit_broken_hosts(self) -> None:
        """Give hosts that fail everything one task a day (broken_hosts.py)."""
        with self.database.read() as connection:
            found = broken_hosts.find(connection, self.appid, self.tree.config.daily_result_quota)
            named = {v: store.app_version_text(connection, v) for v in {each.app_version for each in found}}
        for each in found:
            why = f"[HOST#{each.host}] its newest {BROKEN_AFTER} tasks with {named[each.app_version]} all failed"
            if self.options.dry_run:
                self._once(f"{why}; it would get one task a day")
            elif self.database.repeated(partial(broken_hosts.demote, appid=self.appid, each=each)):
                log.warning("%s; it gets one task a day until one succeeds", why)

    def _once(self, text: str) -> None:
        if text not in self.reported:
            self.reported.add(text)
            log.warning("%s", text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry of the daemon; returns the exit status."""
    started = start(arguments, program="gt_work_generator", about=ABOUT, default_sleep=DEFAULT_SLEEP_S)
    if isinstance(started, int):
        return started
    generator = Generator(started.options, started.tree, started.database, started.appid, started.stopper)
    owned = [*started.tree.published_folders(), started.tree.project_dir / "templates", started.tree.project_dir]
    return run(started, "work_generator", generator.one_pass, owned)


if __name__ == "__main__":
    sys.exit(main())
