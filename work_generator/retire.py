"""Takes back what nobody needs any more: published files of older versions, workunits that nobody works on.

A file is needed while a workunit that names it is not assimilated or one of its results is not over: counted
from BOINC's own rows, never by age. It is marked first and deleted then, under the job's lock, so that a crash
between the two is mended by the next pass, and no other process publishes it meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from boinc_project import store
from boinc_project.database import Database, result, workunit
from boinc_project.gt_tables import FileState, JobState, MicrotaskState, gt_file, gt_microtask
from boinc_project.project_tree import ProjectTree
from boinc_project.rows import read_rows
from boinc_project.states import AssimilateState, ErrorMask, Outcome, ServerState, TransitionerFlags, ValidateState
from boinc_project.store import JobRow

FILES_PER_LOCK = 100
_NOT_SENT = (int(ServerState.INACTIVE), int(ServerState.UNSENT))
#: Outcomes that stay without credit; a late report (of NO_REPLY) may still be found valid.
_IN_VAIN = (
    Outcome.COULDNT_SEND, Outcome.CLIENT_ERROR, Outcome.DIDNT_NEED, Outcome.VALIDATE_ERROR, Outcome.CLIENT_DETACHED,
)  # fmt: skip

log = logging.getLogger("work_generator")


def retire_files(database: Database, tree: ProjectTree, job: JobRow) -> bool:
    """Delete published states and microtasks of older versions that nobody needs.

    Returns whether all are gone but those that lead to the current version.
    """
    with database.read() as connection:
        files = _files_of_versions(connection, job)
        older = sorted({file.version for file in files if file.version < job.current_version})
        needed = versions_in_use(connection, job, older)
    names = sorted(unneeded(files, needed, job.current_version))
    for start in range(0, len(names), FILES_PER_LOCK):
        part = names[start : start + FILES_PER_LOCK]
        # A rollback would make an older version the current one again; then nothing of it may go.
        marked = database.repeated(partial(_begin_to_retire, job=job, names=part))
        if not marked or not database.repeated(partial(_retire, tree=tree, job=job, names=part)):
            return False
        log.debug("[JOB %s] retired %d files", job.name, len(part))
    return not needed


def _begin_to_retire(connection: Connection, job: JobRow, names: Sequence[str]) -> bool:
    if not _is_current(connection, job):
        return False
    _mark(connection, names, FileState.RETIRING)
    return True


def _retire(connection: Connection, tree: ProjectTree, job: JobRow, names: Sequence[str]) -> bool:
    """Delete the files that are marked still. As after a crash, doing it again deletes what is left of them."""
    if not _is_current(connection, job):
        return False
    known = read_rows(connection, gt_file, ("name",), [(name,) for name in names], ("name", "state"))
    still = [str(name) for (name,), row in known.items() if row["state"] == FileState.RETIRING]
    for name in still:
        tree.delete_published(name)
    _mark(connection, still, FileState.DELETED)
    return True


class VersionFile(NamedTuple):
    """A published file of a model version: its state (whole, or as a delta), or a microtask over it."""

    version: int
    kind: str
    name: str


def unneeded(files: Sequence[VersionFile], needed: set[int], current: int) -> list[str]:
    """Names of those that serve neither the current version nor the needed ones: a delta, and a keyframe with deltas
    after it, serve every version that begins with them."""
    keyframes = [file.version for file in files if file.kind == "state"]
    leading = set[int]()
    for version in needed | {current}:
        begins = max((each for each in keyframes if each <= version), default=version)
        leading.update(range(begins, version + 1))
    return [
        file.name
        for file in files
        if file.version < current
        and file.version not in needed
        and (file.kind == "microtask" or file.version not in leading)
    ]


def versions_in_use(connection: Connection, job: JobRow, versions: Sequence[int]) -> set[int]:
    """Those of these versions that a workunit still needs: not assimilated, or with a result that is not over."""
    if not versions:
        return set()
    query = sa.select(gt_microtask.c.workunit_name, gt_microtask.c.version).where(
        gt_microtask.c.job_id == job.id, gt_microtask.c.version.in_(versions)
    )
    version_of = {str(name): int(version) for name, version in connection.execute(query)}
    units = _units(connection, version_of)
    used = {version_of[name] for name, row in units.items() if row["assimilate_state"] != int(AssimilateState.DONE)}
    rest = {int(row["id"]): version_of[name] for name, row in units.items() if version_of[name] not in used}
    busy = _with_results(connection, list(rest), result.c.server_state != int(ServerState.OVER))
    return used | {rest[identifier] for identifier in busy}


def cancel_unsent(database: Database, job: JobRow, settled: set[str]) -> int:
    """Cancel the workunits that no longer serve the job and for which nobody can be credited; returns their number.

    Those are the ones that were withdrawn, those whose results would come too late for any version, and all open ones
    of a job that has finished or failed. While a copy is
    out or may be found valid its workunit is left to end by itself: cancelling it would take its volunteers' credit.
    Where every copy that was sent has failed, it would only be sent to further hosts. Of a job that has failed, the
    others get no further copies either. `settled` remembers the names that need no further look.
    """
    states = [str(MicrotaskState.CANCELLED)]
    if job.state in (JobState.FINISHED, JobState.FAILED):
        states.append(str(MicrotaskState.ISSUED))
    with database.read() as connection:
        too_old = sa.and_(
            gt_microtask.c.state == str(MicrotaskState.ISSUED),
            gt_microtask.c.version < job.config.first_useful_version(job.current_version),
        )
        query = sa.select(gt_microtask.c.workunit_name).where(
            gt_microtask.c.job_id == job.id, gt_microtask.c.state.in_(states) | too_old
        )
        names = {str(name) for name in connection.scalars(query)} - settled
        units = {name: row for name, row in _units(connection, names).items() if not _is_over(row)}
        ids = [int(row["id"]) for row in units.values()]
        sent = _with_results(connection, ids, result.c.server_state.not_in(_NOT_SENT))
        earning = {identifier for identifier in sent if _earns(store.results_of(connection, identifier))}
    settled.update(names - set(units))
    cancelled = 0
    for name, row in sorted(units.items(), key=lambda each: int(each[1]["id"])):
        if int(row["id"]) in earning:
            held = job.state == JobState.FAILED and database.repeated(
                partial(_hold, job=job, identifier=int(row["id"]))
            )
            if held:
                log.info("[WU#%d %s] gets no further copies while the job is stopped", row["id"], name)
            continue
        if database.repeated(partial(_cancel, identifier=int(row["id"]), name=name, why=_why(job))):
            settled.add(name)
            cancelled += 1
            log.info("[WU#%d %s] cancelled: it serves no version, and nobody works on it", row["id"], name)
    return cancelled


def _why(job: JobRow) -> str:
    stopped = job.state in (JobState.FINISHED, JobState.FAILED)
    return f"the job is {job.state}" if stopped else "nothing of it would be applied"


def _hold(connection: Connection, job: JobRow, identifier: int) -> bool:
    """Let no further copy of an open workunit be made or sent, until the job is resumed (store.release)."""
    columns = ("id", "assimilate_state", "error_mask", "canonical_resultid", "transitioner_flags")
    found = read_rows(connection, workunit, ("id",), [(identifier,)], columns, lock=True).get((identifier,))
    if found is None or _is_over(found) or found["transitioner_flags"] != TransitionerFlags.NORMAL:
        return False
    locked = store.lock_job(connection, job.id)
    if locked is None or locked["state"] != JobState.FAILED:
        return False
    flags = {"transitioner_flags": int(TransitionerFlags.NO_NEW_RESULTS)}
    connection.execute(sa.update(workunit).where(workunit.c.id == identifier).values(**flags))
    return True


def _earns(copies: Iterable[store.Row]) -> bool:
    """Whether somebody may yet be credited for one of these results of a workunit without a canonical one."""
    return any(
        row["server_state"] not in _NOT_SENT
        and not (row["server_state"] == ServerState.OVER and row["outcome"] in _IN_VAIN)
        and row["validate_state"] != ValidateState.INVALID
        for row in copies
    )


def _cancel(connection: Connection, identifier: int, name: str, why: str) -> bool:
    """Cancel a workunit as BOINC's own tools do (sched/cancel_jobs), unless it may bring somebody credit."""
    locked = read_rows(
        connection, workunit, ("id",), [(identifier,)], ("id", "assimilate_state", "error_mask", "canonical_resultid"),
        lock=True,
    )  # fmt: skip
    if not locked or _is_over(locked[(identifier,)]):
        return False
    copies = store.results_of(connection, identifier, lock=True)
    if _earns(copies):
        return False
    connection.execute(
        sa.update(result)
        .where(result.c.workunitid == identifier, result.c.server_state.in_(_NOT_SENT))
        .values(server_state=int(ServerState.OVER), outcome=int(Outcome.DIDNT_NEED))
    )
    mask = int(locked[(identifier,)]["error_mask"]) | int(ErrorMask.CANCELLED)
    connection.execute(
        sa.update(workunit).where(workunit.c.id == identifier).values(error_mask=mask, transition_time=store.soon())
    )
    _withdraw(connection, name, why)
    return True


def _withdraw(connection: Connection, name: str, why: str) -> None:
    connection.execute(
        sa.update(gt_microtask)
        .where(gt_microtask.c.workunit_name == name, gt_microtask.c.state == str(MicrotaskState.ISSUED))
        .values(state=str(MicrotaskState.CANCELLED), note=why)
    )


def _is_over(row: store.Row) -> bool:
    return bool(row["assimilate_state"] != int(AssimilateState.INIT) or row["error_mask"] or row["canonical_resultid"])


def _units(connection: Connection, names: Iterable[str]) -> dict[str, store.Row]:
    columns = ("id", "name", "assimilate_state", "error_mask", "canonical_resultid")
    found = read_rows(connection, workunit, ("name",), [(name,) for name in names], columns)
    return {str(row["name"]): row for row in found.values()}


def _with_results(connection: Connection, ids: Sequence[int], condition: sa.ColumnElement[bool]) -> set[int]:
    """Those of these workunits that have a result for which the condition holds."""
    found: set[int] = set()
    for start in range(0, len(ids), 500):
        query = sa.select(result.c.workunitid).where(result.c.workunitid.in_(ids[start : start + 500]), condition)
        found.update(int(identifier) for identifier in connection.scalars(query))
    return found


def _is_current(connection: Connection, job: JobRow) -> bool:
    locked = store.lock_job(connection, job.id)
    return locked is not None and locked["current_version"] == job.current_version


def _files_of_versions(connection: Connection, job: JobRow) -> list[VersionFile]:
    """What is published of the current version and of older ones."""
    query = sa.select(gt_file.c.version, gt_file.c.kind, gt_file.c.name).where(
        gt_file.c.job_id == job.id,
        gt_file.c.state.in_([str(FileState.PUBLISHED), str(FileState.RETIRING)]),
        gt_file.c.kind.in_(["state", "delta", "microtask"]),
        gt_file.c.version <= job.current_version,
    )
    return [VersionFile(int(row[0]), str(row[1]), str(row[2])) for row in connection.execute(query)]


def _mark(connection: Connection, names: Sequence[str], state: FileState) -> None:
    connection.execute(
        sa.update(gt_file)
        .where(gt_file.c.name.in_(names), gt_file.c.state != str(FileState.DELETED))
        .values(state=str(state))
    )
