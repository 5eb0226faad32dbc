"""Intake: one assimilated workunit becomes one ledger row and one payload kept by us, or a failed slot.

    take_in(...)   verify digest -> keep the payload (copied, fsynced) -> one transaction: ledger row,
                   microtask state, workunit DONE

The payload is copied because BOINC's upload handler may rewrite the same inode and its file deleter removes
it once the workunit is assimilated. A crash before the transaction leaves a payload file that the next try
writes again under the same name; after it, nothing is left to do.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from boinc_project import store, templates
from boinc_project.contract import tensorfile
from boinc_project.contract.codecs import Codec
from boinc_project.contract.microtask import UPDATE_FILE, Microtask
from boinc_project.contract.update import Update, read_update, update_types
from boinc_project.database import Database
from boinc_project.gt_tables import Disposition, MicrotaskState, gt_ledger
from boinc_project.project_tree import ProjectTree
from boinc_project.states import ErrorMask
from boinc_project.store import JobRow

Row = Mapping[str, Any]
log = logging.getLogger("assimilator")


class PayloadChanged(Exception):
    """The canonical file is gone, or is not the one that the validator judged."""


def take_in(database: Database, tree: ProjectTree, unit: Row, task: Row, job: JobRow, now: float) -> None:
    """Handle one workunit that is ready to assimilate; doing it again changes nothing."""
    if not unit["canonical_resultid"]:
        _fail(database, unit, f"workunit failed: {describe_errors(int(unit['error_mask']))}", now)
        return
    with database.read() as connection:
        known = store.ledger_entry(connection, str(unit["name"]))
        results = store.results_of(connection, int(unit["id"]))
    if known is not None:  # somebody set the workunit back: its files may be gone by now, and are not needed
        _mark_again(database, unit, now)
        return
    canonical = next((row for row in results if row["id"] == unit["canonical_resultid"]), None)
    try:
        if canonical is None:
            raise PayloadChanged("its canonical result is not in the database")
        data = _judged_bytes(tree, canonical, str(task["canonical_sha256"]))
    except PayloadChanged as error:
        _fail(database, unit, f"payload lost after validation: {error}", now)
        return
    digest = str(task["canonical_sha256"])
    path = job.folder.payload_path(str(unit["name"]), digest)
    if not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
        tensorfile.write_bytes(path, data)
    loss = mean_loss(decode(job, task, data))
    with database.transaction() as connection:
        store.lock_job(connection, job.id)  # one slot of one round at a time, whoever else takes in
        if store.ledger_entry(connection, str(unit["name"])) is None:
            rivals = store.ledger_of_version(connection, job.id, int(task["version"]))
            taken = any(row["slot"] == task["slot"] and row["disposition"] != Disposition.DROPPED for row in rivals)
            disposition = Disposition.DUPLICATE if taken else Disposition.PENDING
            if store.round_members(connection, job.id, int(task["version"]) + 1) is not None:
                disposition = Disposition.TOO_OLD  # its round was closed without it
            if _is_cancelled(connection, unit):  # its version was rolled back meanwhile
                disposition = Disposition.DROPPED
            connection.execute(
                sa.insert(gt_ledger).values(
                    workunit_name=unit["name"],
                    job_id=job.id,
                    base_version=task["version"],
                    slot=task["slot"],
                    payload_sha256=digest,
                    payload_file=str(path.relative_to(job.folder.path)),
                    samples=task["samples"],
                    loss=loss,
                    hostid=canonical["hostid"] if canonical else 0,
                    intake_time=now,
                    disposition=str(disposition),
                    applied_version=None,
                    weight=None,
                )
            )
            if disposition != Disposition.DROPPED:
                store.set_microtask(connection, str(unit["name"]), MicrotaskState.FOLDED)
            shown = "unknown" if loss is None else f"{loss:.5g}"
            log.info("[WU#%d %s] taken in (%s), loss %s", unit["id"], unit["name"], disposition, shown)
        store.mark_assimilated(connection, int(unit["id"]), int(now))


def describe_errors(mask: int) -> str:
    """The set bits of workunit.error_mask in words."""
    names = [flag.name.lower().replace("_", " ") for flag in ErrorMask if mask & flag and flag.name]
    return ", ".join(names) or "no canonical result"


def decode(job: JobRow, task: Row, data: bytes) -> Update:
    """The update in a payload, by the microtask's own codec and types."""
    microtask = Microtask.from_json(str(task["document"]).encode("ascii"))
    types = update_types(job.folder.gradient_graph, microtask.mode, microtask.steps)
    codec: Codec = microtask.codec
    return read_update(data, types, codec, str(task["digest"]))


def mean_loss(update: Update) -> float | None:
    """Loss per sample over all steps, as the replicas agreed on it; None if they claim to have seen no sample."""
    total = float(update.tensors["metric/loss"].astype("float64").sum())
    weight = float(update.tensors["metric/weight"].astype("float64").sum())
    return total / weight if weight > 0 else None


def _judged_bytes(tree: ProjectTree, result: Row, digest: str) -> bytes:
    """The canonical file, if it still is the one the validator judged."""
    names = [f.name for f in templates.output_files(str(result["xml_doc_in"] or "")) if f.open_name == UPDATE_FILE]
    if not names:
        raise PayloadChanged("its result names no output file")
    try:
        data = tree.upload_path(names[0]).read_bytes()
    except FileNotFoundError as error:
        raise PayloadChanged(f"{names[0]} is gone") from error
    if hashlib.sha256(data).hexdigest() != digest:
        raise PayloadChanged(f"{names[0]} was overwritten after validation")
    return data


def _is_cancelled(connection: sa.Connection, unit: Row) -> bool:
    """Whether the microtask was withdrawn (rolled back) meanwhile."""
    task = store.microtask_of(connection, str(unit["name"]))
    return task is None or task["state"] == MicrotaskState.CANCELLED


def _mark_again(database: Database, unit: Row, now: float) -> None:
    with database.transaction() as connection:
        store.mark_assimilated(connection, int(unit["id"]), int(now))
    log.info("[WU#%d %s] was taken in already; nothing is applied again", unit["id"], unit["name"])


def _fail(database: Database, unit: Row, reason: str, now: float) -> None:
    """Release the slot: the generator issues the same microtask again, a few times."""
    with database.transaction() as connection:
        if not _is_cancelled(connection, unit):
            store.set_microtask(connection, str(unit["name"]), MicrotaskState.FAILED, reason)
        store.mark_assimilated(connection, int(unit["id"]), int(now))
    log.warning("[WU#%d %s] %s", unit["id"], unit["name"], reason)
