"""Intake: assimilated workunits become ledger rows and payloads kept by us, or failed slots.

    look_up   what the database says of workunits that are ready (one short read)
    prepare   verify the digest, copy the payload, read its loss (each workunit by itself, no transaction)
    record    one transaction for many workunits of a job: ledger rows, microtask states, workunits DONE

The payloads are durable before `record`. They are copied because BOINC's upload handler may rewrite the same
inode and its file deleter removes it once the workunit is assimilated. A crash before the transaction leaves
payload files that the next try writes again under the same names; after it, nothing is left to do.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from boinc_project import store, templates
from boinc_project.contract.codecs import Array
from boinc_project.contract.microtask import UPDATE_FILE, essentials
from boinc_project.contract.update import OpenUpdate, judged_metrics, open_update
from boinc_project.database import result, workunit
from boinc_project.durable import FileBatch
from boinc_project.gt_tables import Disposition, MicrotaskState, gt_ledger, gt_microtask
from boinc_project.project_tree import ProjectTree
from boinc_project.rows import Key, read_rows, update_rows
from boinc_project.states import AssimilateState, ErrorMask
from boinc_project.store import JobRow

Row = Mapping[str, Any]
log = logging.getLogger("assimilator")


class PayloadChanged(Exception):
    """The canonical file is gone, or is not the one that the validator judged."""


@dataclass(frozen=True)
class Case:
    """A workunit that is ready to assimilate, and what the database says of it."""

    unit: Row
    task: Row
    job: JobRow
    canonical: Row | None  # its canonical result: id, hostid, xml_doc_in
    known: bool  # its gradient is in the ledger already

    @property
    def id(self) -> int:
        return int(self.unit["id"])

    @property
    def name(self) -> str:
        return str(self.unit["name"])


@dataclass(frozen=True)
class Outcome:
    """What intake makes of a workunit: a payload that is kept, or the reason why its slot is released.

    Neither of them: somebody set an assimilated workunit back; its files may be gone, and are not needed.
    """

    case: Case
    payload_file: str = ""  # relative to the job's folder
    loss: float | None = None
    failure: str = ""


def look_up(connection: Connection, units: Sequence[Row], jobs: Mapping[int, JobRow]) -> tuple[list[Case], list[Row]]:
    """The cases of these workunits, and those that are none of our microtasks; both in the given order."""
    names = [(str(unit["name"]),) for unit in units]
    tasks = read_rows(connection, gt_microtask, ("workunit_name",), names)
    known = read_rows(connection, gt_ledger, ("workunit_name",), names, ("workunit_name",))
    ids = [(int(unit["canonical_resultid"]),) for unit in units if unit["canonical_resultid"]]
    canonical = read_rows(connection, result, ("id",), ids, ("id", "hostid", "xml_doc_in"))
    cases, foreign = [], []
    for unit, name in zip(units, names, strict=True):
        task = tasks.get(name)
        job = None if task is None else jobs.get(int(task["job_id"]))
        if task is None or job is None:
            foreign.append(unit)
            continue
        found = canonical.get((int(unit["canonical_resultid"]),))
        cases.append(Case(unit, task, job, found, name in known))
    return cases, foreign


def prepare(tree: ProjectTree, case: Case, files: FileBatch) -> Outcome:
    """Decide about one workunit and hand its payload to `files`. OSError means that storage is away."""
    if not case.unit["canonical_resultid"]:
        return Outcome(case, failure=f"workunit failed: {describe_errors(int(case.unit['error_mask']))}")
    if case.known:
        return Outcome(case)
    digest = str(case.task["canonical_sha256"])
    try:
        data = _judged_bytes(tree, case.canonical, digest)
    except PayloadChanged as error:
        return Outcome(case, failure=f"payload lost after validation: {error}")
    loss = mean_loss(judged_metrics(data, essentials(str(case.task["document"])).codec))
    path = case.job.folder.payload_path(case.name, digest)
    files.add(path, data)
    return Outcome(case, payload_file=str(path.relative_to(case.job.folder.path)), loss=loss)


def record(connection: Connection, job: JobRow, outcomes: Sequence[Outcome], now: float) -> list[str]:
    """Write what became of workunits of one job; returns the lines to log once it is committed.

    Doing it again changes nothing: a workunit that is not READY any more is left alone, and one whose gradient
    is in the ledger is only marked as assimilated.
    """
    ids = [(outcome.case.id,) for outcome in outcomes]
    locked = read_rows(connection, workunit, ("id",), ids, ("id", "assimilate_state"), lock=True)
    ready = {key for key, row in locked.items() if row["assimilate_state"] == AssimilateState.READY}
    mine = [outcome for outcome in outcomes if (outcome.case.id,) in ready]
    locked_job = store.lock_job(connection, job.id)  # one slot of one round at a time, whoever else takes in
    current = job.current_version if locked_job is None else int(locked_job["current_version"])
    names = [(outcome.case.name,) for outcome in mine]
    known = read_rows(connection, gt_ledger, ("workunit_name",), names, ("workunit_name",))
    states = read_rows(connection, gt_microtask, ("workunit_name",), names, ("workunit_name", "state"))
    rounds = _Rounds(connection, job, current, {int(outcome.case.task["version"]) for outcome in mine})
    entries: list[dict[str, Any]] = []
    microtasks: dict[Key, Row] = {}
    lines = []
    for outcome in mine:
        name = outcome.case.name
        withdrawn = (name,) not in states or states[(name,)]["state"] == MicrotaskState.CANCELLED
        shown = f"[WU#{outcome.case.id} {name}]"
        if outcome.failure:
            # The slot is free: the generator issues the same microtask again, a few times.
            if not withdrawn:
                microtasks[(name,)] = {"state": str(MicrotaskState.FAILED), "note": outcome.failure}
            lines.append(f"{shown} {outcome.failure}")
        elif (name,) in known or not outcome.payload_file:
            lines.append(f"{shown} was taken in already; nothing is applied again")
        else:
            disposition = Disposition.DROPPED if withdrawn else rounds.disposition(outcome.case.task)
            entries.append(_entry(outcome, disposition, now))
            if disposition != Disposition.DROPPED:
                microtasks[(name,)] = {"state": str(MicrotaskState.FOLDED), "note": ""}
            loss = "unknown" if outcome.loss is None else f"{outcome.loss:.5g}"
            lines.append(f"{shown} taken in ({disposition}), loss {loss}")
    if entries:
        connection.execute(sa.insert(gt_ledger), entries)
    update_rows(connection, gt_microtask, ("workunit_name",), microtasks)
    done = {"assimilate_state": int(AssimilateState.DONE), "transition_time": store.soon()}
    if ready:
        connection.execute(sa.update(workunit).where(workunit.c.id.in_([key[0] for key in ready])).values(done))
    return lines


class _Rounds:
    """What is over some versions of a job: which slots are filled, and which versions take no more results."""

    def __init__(self, connection: Connection, job: JobRow, current: int, versions: Iterable[int]) -> None:
        wanted = sorted(versions)
        self._filled = store.filled_slots(connection, job.id, wanted)
        if job.config.policy.flow:
            self._closed = {version for version in wanted if version < job.config.first_useful_version(current)}
        else:
            committed = store.committed_versions(connection, job.id, [version + 1 for version in wanted])
            self._closed = {version - 1 for version in committed}

    def disposition(self, task: Row) -> Disposition:
        """What becomes of a gradient for this microtask's slot, which is filled from now on."""
        version, slot = int(task["version"]), int(task["slot"])
        taken = (version, slot) in self._filled
        self._filled.add((version, slot))
        if version in self._closed:
            return Disposition.TOO_OLD  # its round was closed without it, or the flow has gone on too far
        return Disposition.DUPLICATE if taken else Disposition.PENDING


def _entry(outcome: Outcome, disposition: Disposition, now: float) -> dict[str, Any]:
    case = outcome.case
    return {
        "workunit_name": case.name,
        "job_id": case.job.id,
        "base_version": case.task["version"],
        "slot": case.task["slot"],
        "payload_sha256": case.task["canonical_sha256"],
        "payload_file": outcome.payload_file,
        "samples": case.task["samples"],
        "loss": outcome.loss,
        "hostid": case.canonical["hostid"] if case.canonical else 0,
        "intake_time": now,
        "disposition": str(disposition),
        "applied_version": None,
        "weight": None,
    }


def describe_errors(mask: int) -> str:
    """The set bits of workunit.error_mask in words."""
    names = [flag.name.lower().replace("_", " ") for flag in ErrorMask if mask & flag and flag.name]
    return ", ".join(names) or "no canonical result"


def open_payload(job: JobRow, task: Row, data: bytes) -> OpenUpdate:
    """The update in a payload, by the microtask's own codec and types."""
    microtask = essentials(str(task["document"]))
    types = job.folder.update_types(microtask.mode, microtask.steps, microtask.ships_state)
    return open_update(data, types, microtask.codec, str(task["digest"]))


def mean_loss(metrics: Mapping[str, Array]) -> float | None:
    """Loss per sample over all steps, as the replicas agreed on it; None if they claim to have seen no sample."""
    total = float(metrics["metric/loss"].astype("float64").sum())
    weight = float(metrics["metric/weight"].astype("float64").sum())
    return total / weight if weight > 0 else None


def _judged_bytes(tree: ProjectTree, canonical: Row | None, digest: str) -> bytes:
    """The canonical file, if it still is the one the validator judged."""
    if canonical is None:
        raise PayloadChanged("its canonical result is not in the database")
    name = templates.output_name(str(canonical["xml_doc_in"] or ""), UPDATE_FILE)
    if not name:
        raise PayloadChanged("its result names no output file")
    path = tree.upload_path(name)
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        if not tree.has_uploads():
            raise OSError(f"the upload directory {tree.config.upload_dir} is missing or empty") from error
        raise PayloadChanged(f"{name} is gone") from error
    if hashlib.sha256(data).hexdigest() != digest:
        raise PayloadChanged(f"{name} was overwritten after validation")
    return data
