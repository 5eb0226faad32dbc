"""The work generator daemon: keeps each running job supplied with workunits and its old files retired.

    main -> run_passes -> one_pass -> for each job: finish? -> issue -> help stragglers -> retire

It follows sched/sample_work_generator.cpp: stage the files, insert the workunit last, then wait until the
transitioner has made the results before counting again.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from boinc_project import store
from boinc_project.daemon import Options, Stopper
from boinc_project.daemon_start import outside_faults, run, start
from boinc_project.database import Database, workunit
from boinc_project.gt_tables import FileState, JobState, MicrotaskState, gt_file, gt_microtask
from boinc_project.job_folder import Published, sha256
from boinc_project.project_tree import ProjectTree, PublishedFile
from boinc_project.states import NEVER, AssimilateState
from boinc_project.store import JobRow
from boinc_project.supply_limits import MAX_ATTEMPTS, least_seconds_per_task
from work_generator import supply, workunits

ABOUT = "Issues the microtasks of all running jobs as workunits and retires published files nobody needs."
DEFAULT_SLEEP_S = 5.0
TRANSITIONER_PATIENCE_S = 60.0

log = logging.getLogger("work_generator")


@dataclass
class Generator:
    """The daemon's state: where the project is, and which (job, version) it has last looked at for retiring."""

    options: Options
    tree: ProjectTree
    database: Database
    stopper: Stopper
    retired: dict[int, int] = field(default_factory=dict)
    reported: set[str] = field(default_factory=set)
    advised: set[int] = field(default_factory=set)  # ids of jobs whose advice has been logged
    verified: dict[str, tuple[int, int]] = field(default_factory=dict)  # file name -> size and mtime when checked

    def one_pass(self) -> bool:
        """Look at every job once; returns whether anything was done."""
        worked = False
        with outside_faults():
            with self.database.read() as connection:
                found = store.jobs(connection, JobState.RUNNING)
                finished = store.jobs(connection, JobState.FINISHED, JobState.PAUSED)
            for job in found:
                self.stopper.check()
                if self.options.takes_job(job.id):
                    worked |= self._supply(job)
            for job in [*found, *finished]:
                if self.options.takes_job(job.id):
                    self._retire(job)
        return worked

    def _supply(self, job: JobRow) -> bool:
        now = time.time()
        with self.database.read() as connection:
            reason = supply.stop_reason(job.config, store.versions(connection, job.id), job.create_time, now)
        if reason:
            log.info("[JOB %s] finished: %s", job.name, reason)
            if not self.options.dry_run:
                with self.database.transaction() as connection:
                    store.set_job_state(connection, job.id, JobState.FINISHED, reason)
            return True
        with self.database.read() as connection:
            rows = store.microtasks(connection, job.id, job.current_version)
        slots = job.config.train.microtasks_per_version
        given_up = supply.skipped_slots(rows, slots)
        self._advise(job)
        for slot in given_up:
            self._once(
                f"[JOB {job.name}] version {job.current_version}, slot {slot} failed on every try; it is skipped"
            )
        if len(given_up) == slots:
            with self.database.read() as connection:
                cause = store.commonest_error(connection, [str(row["workunit_name"]) for row in rows])
            self._fail(job, f"every microtask of version {job.current_version} failed {MAX_ATTEMPTS} times{cause}")
            return True
        wanted = supply.slots_to_issue(rows, slots)
        for issue in wanted:
            self.stopper.check()
            self._issue(job, issue)
        if wanted and not self.options.dry_run:
            self._wait_for_transitioner(job.appid)
        return bool(wanted) or self._help_stragglers(job)

    def _issue(self, job: JobRow, issue: supply.Issue) -> None:
        version = job.current_version
        with self.database.read() as connection:
            state = _published_state(connection, job, version)
        if state is None:
            self._once(f"[JOB {job.name}] version {version} is not published yet")
            return
        content = workunits.make_content(job.config, job.facts, version, issue.slot, state)
        text = content.microtask.to_json()
        digest = content.microtask.digest()
        name = workunits.workunit_name(content.microtask, digest, issue.attempt)
        if self.options.dry_run:
            log.info("[WU %s] would be created", name)
            return
        if not self._check_inputs(job, content):
            return
        document = self.tree.stage_file(text, workunits.microtask_file_name(content.microtask, digest))
        row = workunits.workunit_row(
            self.tree, job.config, job.facts, content, document, name=name, appid=job.appid, now=int(time.time())
        )
        with self.database.transaction() as connection:
            self._insert(connection, job, issue, name, digest, text, content, document, row)
        log.info(
            "[WU %s] created: version %d, slot %d, attempt %d, %d samples, %d steps",
            name,
            version,
            issue.slot,
            issue.attempt,
            content.microtask.samples,
            content.microtask.steps,
        )

    def _insert(
        self,
        connection: Connection,
        job: JobRow,
        issue: supply.Issue,
        name: str,
        digest: str,
        text: bytes,
        content: workunits.Content,
        document: PublishedFile,
        row: store.Row,
    ) -> None:
        """Our rows and BOINC's in one transaction, the workunit last. Nothing if another instance was first."""
        locked = store.lock_job(connection, job.id)
        if locked is None or locked["current_version"] != job.current_version or locked["state"] != JobState.RUNNING:
            return
        if store.microtask_of(connection, name) is not None:
            return
        connection.execute(
            sa.insert(gt_microtask).values(
                job_id=job.id,
                version=job.current_version,
                slot=issue.slot,
                attempt=issue.attempt,
                workunit_name=name,
                digest=digest,
                document=text.decode("ascii"),
                samples=content.microtask.samples,
                flops=float(job.facts.step_flops * content.microtask.steps),
                state=str(MicrotaskState.ISSUED),
                create_time=int(time.time()),
                canonical_sha256="",
                note="",
            )
        )
        published = Published(document.name, digest, document.md5, document.nbytes)
        store.record_file(connection, job.id, "microtask", published, version=job.current_version)
        store.insert_workunit(connection, row)

    def _advise(self, job: JobRow) -> None:
        """Say once how long a task should last on the lines that the job's settings describe."""
        if job.id in self.advised:
            return
        with self.database.read() as connection:
            state = _published_state(connection, job, job.current_version)
        if state is None:
            return
        self.advised.add(job.id)
        hosts, lines = job.config.train.microtasks_per_version * job.config.workunit.min_quorum, job.config.supply
        seconds = least_seconds_per_task(state.size, lines.host_bandwidth, hosts, lines.server_bandwidth)
        log.info("[JOB %s] a version is %d bytes: a task should last at least %.2g s", job.name, state.size, seconds)

    def _fail(self, job: JobRow, reason: str) -> None:
        """Stop the job with the reason, until an admin resumes it."""
        log.critical("[JOB %s] stopped: %s", job.name, reason)
        if not self.options.dry_run:
            with self.database.transaction() as connection:
                store.set_job_state(connection, job.id, JobState.FAILED, reason)

    def _check_inputs(self, job: JobRow, content: workunits.Content) -> bool:
        """A workunit whose input is missing fails on every host and costs them quota: never make one."""
        for file in content.files.values():
            path = self.tree.download_path(file.name)
            if not self._is_published(path, file):
                note = f"the published file {path} is missing or changed; restore it, then resume the job"
                self._fail(job, note)
                return False
        return True

    def _is_published(self, path: Path, file: Published) -> bool:
        """Whether the file is there with the recorded bytes; read again only when its size or time has changed."""
        try:
            status = path.stat()
        except FileNotFoundError:
            return False
        seen = (status.st_size, status.st_mtime_ns)
        if self.verified.get(file.name) != seen:
            if status.st_size != file.size or sha256(path.read_bytes()) != file.sha256:
                return False
            self.verified[file.name] = seen
        return True

    def _wait_for_transitioner(self, appid: int) -> None:
        """Count again only when the results of what was issued exist."""
        deadline = time.monotonic() + TRANSITIONER_PATIENCE_S
        while time.monotonic() < deadline:
            with self.database.read() as connection:
                if not store.transitions_waiting(connection, appid, int(time.time())):
                    return
            self.stopper.sleep(min(0.2, self.options.sleep_interval))
        self._once("the transitioner has not looked at new workunits for a minute; is it running?")

    def _help_stragglers(self, job: JobRow) -> bool:
        """Raise target_nresults of workunits whose copies take too long (BOINC makes one more result)."""
        now = int(time.time())
        with self.database.read() as connection:
            open_names = [
                str(row["workunit_name"])
                for row in store.microtasks(connection, job.id, job.current_version)
                if row["state"] == MicrotaskState.ISSUED
            ]
            rows = store.workunits_named(connection, open_names)
            counts = store.result_counts(connection, [int(row["id"]) for row in rows.values()])
        slow = [row for row in rows.values() if supply.straggling(job.config, row, counts[int(row["id"])], now)]
        for row in slow:
            if self.options.dry_run:
                log.info("[WU#%d %s] would get another copy", row["id"], row["name"])
                continue
            with self.database.transaction() as connection:
                changed = connection.execute(
                    sa.update(workunit)
                    .where(
                        workunit.c.id == row["id"],
                        workunit.c.target_nresults == row["target_nresults"],
                        workunit.c.canonical_resultid == 0,
                        workunit.c.error_mask == 0,
                        workunit.c.transition_time < NEVER,
                    )
                    .values(target_nresults=row["target_nresults"] + 1, transition_time=now)
                )
            if changed.rowcount:
                log.info("[WU#%d %s] is slow: one more copy is asked for", row["id"], row["name"])
        return bool(slow) and not self.options.dry_run

    def _retire(self, job: JobRow) -> None:
        """Delete published states and microtasks of older versions once nobody can still ask for them."""
        if self.options.dry_run or self.retired.get(job.id) == job.current_version:
            return
        with self.database.read() as connection:
            files = _retirable(connection, job)
            open_versions = _versions_in_use(connection, job)
        complete = True
        for row in files:
            if int(row["version"]) in open_versions:
                complete = False
                continue
            with self.database.transaction() as connection:
                connection.execute(
                    sa.update(gt_file).where(gt_file.c.name == row["name"]).values(state=str(FileState.DELETED))
                )
            # The row first: a file that is gone though its row says published would stop the job.
            if self.tree.delete_published(str(row["name"])):
                log.debug("[JOB %s] retired %s", job.name, row["name"])
        if complete:
            self.retired[job.id] = job.current_version

    def _once(self, text: str) -> None:
        if text not in self.reported:
            self.reported.add(text)
            log.warning("%s", text)


def _published_state(connection: Connection, job: JobRow, version: int) -> Published | None:
    """The published state of a version, if it is there."""
    query = sa.select(gt_file).where(
        gt_file.c.job_id == job.id,
        gt_file.c.kind == "state",
        gt_file.c.version == version,
        gt_file.c.state == str(FileState.PUBLISHED),
    )
    row = connection.execute(query).mappings().first()
    if row is None:
        return None
    return Published(str(row["name"]), str(row["sha256"]), str(row["md5"]), int(row["bytes"]))


def _retirable(connection: Connection, job: JobRow) -> list[store.Row]:
    """Published states and microtasks of versions before the current one."""
    query = sa.select(gt_file).where(
        gt_file.c.job_id == job.id,
        gt_file.c.state == str(FileState.PUBLISHED),
        gt_file.c.kind.in_(["state", "microtask"]),
        gt_file.c.version < job.current_version,
    )
    return [dict(row) for row in connection.execute(query).mappings()]


def _versions_in_use(connection: Connection, job: JobRow) -> set[int]:
    """Versions that a workunit still needs: not assimilated, or with a result that is not over."""
    used: set[int] = set()
    query = sa.select(gt_microtask.c.version, gt_microtask.c.workunit_name).where(
        gt_microtask.c.job_id == job.id, gt_microtask.c.version < job.current_version
    )
    version_of = {str(name): int(version) for version, name in connection.execute(query)}
    recent = set(sorted(set(version_of.values()))[-50:])
    names = [name for name, version in version_of.items() if version in recent]
    rows = store.workunits_named(connection, names)
    counts = store.result_counts(connection, [int(row["id"]) for row in rows.values()])
    for name, row in rows.items():
        entry = counts[int(row["id"])]
        if row["assimilate_state"] != int(AssimilateState.DONE) or entry["unsent"] or entry["in_progress"]:
            used.add(version_of[name])
    return used


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry of the daemon; returns the exit status."""
    started = start(arguments, program="gt_work_generator", about=ABOUT, default_sleep=DEFAULT_SLEEP_S)
    if isinstance(started, int):
        return started
    generator = Generator(started.options, started.tree, started.database, started.stopper)
    return run(started, "work_generator", generator.one_pass)


if __name__ == "__main__":
    sys.exit(main())
