"""Issues microtasks as workunits, a batch at a time: the files first, the rows last.

    make     microtasks and their published inputs, checked against what was recorded
    stage    one small file per microtask, all of them durable after two waits for the disk
    insert   one transaction: our rows, then BOINC's workunits

A crash before the transaction leaves files that the next try publishes again under the same names; nothing
names them yet. After it, the workunits exist and their slots are taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from boinc_project import clock, store
from boinc_project.contract.microtask import is_state
from boinc_project.database import Database, workunit
from boinc_project.gt_tables import FileState, JobState, MicrotaskState, gt_file, gt_microtask
from boinc_project.job_folder import Published, file_sha256
from boinc_project.project_tree import ProjectTree, PublishedFile
from boinc_project.rows import read_rows
from boinc_project.store import JobRow
from work_generator import workunits
from work_generator.supply import Issue


@dataclass(frozen=True)
class Draft:
    """A microtask that is to become a workunit."""

    issue: Issue
    content: workunits.Content
    name: str  # of the workunit
    digest: str
    text: bytes  # the document
    file_name: str  # under which the document is published


class InputMissing(Exception):
    """A published file is gone or is not the recorded one: its workunits would fail on every host."""


@dataclass
class Inputs:
    """Knows which published inputs hold the recorded bytes; reads one again only when its size or time has changed."""

    tree: ProjectTree
    verified: dict[str, tuple[int, int]] = field(default_factory=dict)  # file name -> size and mtime when checked

    def check(self, files: Iterable[Published]) -> None:
        """Raise InputMissing unless every file is there with the recorded bytes."""
        for file in {file.name: file for file in files}.values():
            path = self.tree.download_path(file.name)
            if not self._is_published(path, file):
                raise InputMissing(f"the published file {path} is missing or changed; restore it, then resume the job")

    def _is_published(self, path: Path, file: Published) -> bool:
        try:
            status = path.stat()
        except FileNotFoundError:
            return False
        seen = (status.st_size, status.st_mtime_ns)
        if self.verified.get(file.name) != seen:
            if status.st_size != file.size or file_sha256(path) != file.sha256:
                return False
            self.verified[file.name] = seen
        return True


def make(job: JobRow, issues: Sequence[Issue], state: Sequence[Published]) -> list[Draft]:
    """The microtasks of these slots of the current version, whose published state is `state`: a keyframe and deltas."""
    drafts = []
    for issue in issues:
        content = workunits.make_content(
            job.config, job.facts, job.current_version, issue.slot, *state, place=issue.place
        )
        text, digest = content.microtask.to_json(), content.microtask.digest()
        name = workunits.workunit_name(content.microtask, digest, issue.attempt)
        file_name = workunits.microtask_file_name(content.microtask, digest)
        drafts.append(Draft(issue, content, name, digest, text, file_name))
    return drafts


def insert(
    database: Database, job: JobRow, drafts: Sequence[Draft], documents: Mapping[str, PublishedFile],
    rows: Sequence[store.Row],
) -> list[Draft]:  # fmt: skip
    """Insert our rows and BOINC's in one transaction, the workunits last; returns the drafts that were not there.

    Nothing is inserted if the job went on or stopped meanwhile, or if a file that the workunits name has been
    retired by another instance: the next pass looks again.
    """
    return database.repeated(lambda connection: _insert(connection, job, drafts, documents, rows))


def _insert(
    connection: Connection, job: JobRow, drafts: Sequence[Draft], documents: Mapping[str, PublishedFile],
    rows: Sequence[store.Row],
) -> list[Draft]:  # fmt: skip
    locked = store.lock_job(connection, job.id)
    if locked is None or locked["current_version"] != job.current_version or locked["state"] != JobState.RUNNING:
        return []
    states = {file.name for draft in drafts for name, file in draft.content.files.items() if is_state(name)}
    published = read_rows(connection, gt_file, ("name",), [(name,) for name in states], ("name", "state"))
    if any(row["state"] != FileState.PUBLISHED for row in published.values()) or len(published) != len(states):
        return []
    if not all(documents[draft.file_name].path.exists() for draft in drafts):
        return []
    names = [(draft.name,) for draft in drafts]
    known = read_rows(connection, gt_microtask, ("workunit_name",), names, ("workunit_name",))
    new = [(draft, row) for draft, row in zip(drafts, rows, strict=True) if (draft.name,) not in known]
    if not new or (job.config.class_steps and _is_dealt_out(connection, job, [draft for draft, _ in new])):
        return []
    connection.execute(sa.insert(gt_microtask), [_microtask_row(job, draft) for draft, _ in new])
    files = []
    for draft, _ in new:
        document = documents[draft.file_name]
        files.append(Published(document.name, draft.digest, document.md5, document.nbytes))
    store.record_files(connection, job.id, "microtask", files, job.current_version)
    there = read_rows(connection, workunit, ("name",), [(draft.name,) for draft, _ in new], ("name",))
    units = [dict(row) for draft, row in new if (draft.name,) not in there]
    if units:
        connection.execute(sa.insert(workunit), units)
    return [draft for draft, _ in new]


def _is_dealt_out(connection: Connection, job: JobRow, drafts: Sequence[Draft]) -> bool:
    """Whether another instance has dealt out batches since these were chosen."""
    fresh = [draft.content.microtask.first_step for draft in drafts if not draft.issue.attempt]
    return bool(fresh) and min(fresh) < store.next_batch(connection, job.id)


def _microtask_row(job: JobRow, draft: Draft) -> store.Row:
    return {
        "job_id": job.id,
        "version": job.current_version,
        "slot": draft.issue.slot,
        "attempt": draft.issue.attempt,
        "workunit_name": draft.name,
        "digest": draft.digest,
        "document": draft.text.decode("ascii"),
        "samples": draft.content.microtask.samples,
        "first_batch": draft.content.microtask.first_step,
        "steps": draft.content.microtask.steps,
        "size_class": draft.content.size_class,
        "flops": float(job.facts.step_flops * draft.content.microtask.steps),
        "state": str(MicrotaskState.ISSUED),
        "create_time": int(clock.now()),
        "canonical_sha256": "",
        "note": "",
    }
