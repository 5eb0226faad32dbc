"""Apply: a complete round becomes the next model version.

    commit   (short transaction, job's row locked) which contributions, in which order, make the version
    compute  (no transaction) fold them, take the optimizer's step, check that every weight is finite
    publish  write the version's files, stage the state for download
    finish   (short transaction) gt_version row, current_version + 1, ledger rows APPLIED

A crash between any two of these is mended by doing the rest again: a committed round is computed from the
same bytes in the same order, so it gives the same version, under the same file names.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from assimilator.contributions import Contribution, NothingToFold
from assimilator.downlink import as_published, with_own_weights
from assimilator.intake import open_payload
from assimilator.policies import Anchor, NewVersion, Round, age_weight, policy_of
from boinc_project import clock, store
from boinc_project.contract import tensorfile
from boinc_project.contract.downlink import DELTA_METADATA
from boinc_project.contract.errors import ContractError
from boinc_project.contract.microtask import essentials
from boinc_project.contract.update import OpenUpdate
from boinc_project.database import Database
from boinc_project.gt_tables import (
    Disposition,
    JobState,
    MicrotaskState,
    gt_job,
    gt_ledger,
    gt_microtask,
    gt_version,
)
from boinc_project.inner_state import bounded
from boinc_project.job_config import JobConfig
from boinc_project.job_folder import Published, delta_file_name, sha256, state_file_name
from boinc_project.project_tree import ProjectTree
from boinc_project.reliability import kind_of, member_weight
from boinc_project.rows import Key, read_rows, update_rows
from boinc_project.store import JobRow, Member
from boinc_project.supply_limits import MAX_ATTEMPTS

Array = npt.NDArray[Any]
Row = Mapping[str, Any]
Tensors = Mapping[str, Array]
log = logging.getLogger("assimilator")


class VersionNotFinite(Exception):
    """The step would put NaN or infinity into the model."""


def round_to_commit(microtasks: Sequence[Row], entries: Sequence[Row], slots: int) -> list[Row] | None:
    """The ledger rows that make the next version in slot order, or None while the round is open.

    A slot counts as closed when its gradient is in the ledger, or when it has failed so often that its
    samples are skipped. A round in which every slot failed is never closed: there is nothing to apply.
    """
    by_slot = {int(row["slot"]): row for row in entries if row["disposition"] == Disposition.PENDING}
    failures = Counter(int(row["slot"]) for row in microtasks if row["state"] == MicrotaskState.FAILED)
    if any(slot not in by_slot and failures[slot] < MAX_ATTEMPTS for slot in range(slots)):
        return None
    return [by_slot[slot] for slot in sorted(by_slot)] or None


def flow_to_commit(
    config: JobConfig, version: int, entries: Sequence[Row], now: float
) -> tuple[list[Row] | None, list[Row]]:
    """From pending ledger rows: those that make the next version of a flow (None: too few), and those too old for it.

    The first to be taken in are the first to be applied: `microtasks_per_version` of them, or, with a grace window,
    all that are there when it ends. They are applied in the order of base version and slot.
    """
    oldest, count, grace_s = config.first_useful_version(version), config.train.microtasks_per_version, config.grace_s
    waiting = [row for row in entries if row["base_version"] >= oldest]
    late = [row for row in entries if row["base_version"] < oldest]
    waiting.sort(key=lambda row: (row["intake_time"], row["base_version"], row["slot"]))
    if len(waiting) < count or (grace_s is not None and now < waiting[count - 1]["intake_time"] + grace_s):
        return None, late
    chosen = waiting if grace_s is not None else waiting[:count]
    return sorted(chosen, key=lambda row: (row["base_version"], row["slot"])), late


def anchor_to_use(config: JobConfig, version: int, newest: int) -> int:
    """The version whose anchor corrects the step from `version`, given the newest that is there; -1: none."""
    fits = config.train.policy == "anchored" and 0 <= version - newest <= config.aggregation.anchor_max_age
    return newest if fits and newest >= 0 else -1


def host_weights(connection: sa.Connection, config: JobConfig, entries: Sequence[Row]) -> list[float]:
    """Weight of each of these gradients by the reliability of its host; 1 unless the job asks for it."""
    if not config.aggregation.host_weights or not entries:
        return [1.0] * len(entries)
    task = store.microtask_of(connection, str(entries[0]["workunit_name"]))
    assert task is not None, entries[0]["workunit_name"]
    known = essentials(str(task["document"]))
    hosts = [int(row["hostid"]) for row in entries]
    records, now = store.trust_rows(connection, kind_of(known.mode, known.graph_sha256), hosts), clock.now()
    return [member_weight(records.get(host), now) for host in hosts]


def compute(config: JobConfig, round: Round) -> NewVersion:
    """The next version by the job's policy. Contributions that have no weight at all leave the model as it is.

    Raises VersionNotFinite, and what loading raises.
    """
    own = with_own_weights(config, round)
    try:
        made = policy_of(config).advance(own)
    except NothingToFold as error:
        log.warning("[JOB %s] version %d makes no step: %s", config.job.name, round.version + 1, error)
        made = NewVersion(*own.load(), samples=0)
    if config.ships_state and config.inner_optimizer is not None:
        made = dataclasses.replace(made, state=bounded(made.state, config.inner_optimizer))
    _check_finite(round, made)
    published = as_published(config, round, made)
    if published.delta is not None:
        _check_finite(round, published)
    return published


def _check_finite(round: Round, made: NewVersion) -> None:
    for name, array in [*made.state.items(), *made.optimizer.items()]:
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise VersionNotFinite(
                f"{name} of version {round.version + 1} would not be finite; version {round.version} stays current."
                " Take its weights (boinc-train weights) and start a new job from them ([model] pretrained) at a lower"
                " rate"
            )


def read_round(
    connection: sa.Connection, job: JobRow, version: int, members: Sequence[Member]
) -> tuple[list[Row], Round]:
    """Ledger rows of a committed round over `version`, in its order, and what the version is made of.

    It reads nothing more from the database later.
    """
    names = [(member.workunit_name,) for member in members]
    entries = read_rows(connection, gt_ledger, ("workunit_name",), names)
    columns = ("workunit_name", "document", "digest")
    tasks = read_rows(connection, gt_microtask, ("workunit_name",), names, columns)
    chosen: list[Row] = [entries[name] for name in names]
    known = [essentials(str(tasks[name]["document"])) for name in names]
    contributions = [
        Contribution(
            slot=int(row["slot"]),
            samples=int(row["samples"]),
            load=_payload_loader(job, row, tasks[name]),
            base_version=int(row["base_version"]),
            steps=microtask.steps,
            part=microtask.codec.part.index,
            weight=member.weight,
            age_weight=member.age_weight,
        )
        for name, row, member, microtask in zip(names, chosen, members, known, strict=True)
    ]
    wanted = {version, *(each.base_version for each in contributions)}
    digests = {
        each: (str(row["state_sha256"]), str(row["optimizer_sha256"]))
        for each in wanted
        if (row := store.version_row(connection, job.id, each)) is not None
    }
    folder = job.folder

    anchor_row = store.round_anchor(connection, job.id, version + 1)
    anchor = None if anchor_row is None else _anchor(job, anchor_row)

    def load_state(which: int) -> Tensors:
        return folder.read_state(which, digests[which][0])

    def load() -> tuple[dict[str, Array], dict[str, Array]]:
        return folder.read_state(version, digests[version][0]), folder.read_optimizer(version, digests[version][1])

    return chosen, Round(version, contributions, load, load_state, lambda: folder.gradient_graph, anchor)


def _anchor(job: JobRow, row: Row) -> Anchor:
    version, digest = int(row["version"]), str(row["anchor_sha256"])
    return Anchor(version, lambda: job.folder.read_anchor(version, digest))


def _payload_loader(job: JobRow, entry: Row, task: Row) -> Callable[[], OpenUpdate]:
    def load() -> OpenUpdate:
        data = (job.folder.path / str(entry["payload_file"])).read_bytes()
        if hashlib.sha256(data).hexdigest() != entry["payload_sha256"]:
            raise ContractError(f"payload {entry['payload_file']} is damaged", fault="digest")
        return open_payload(job, task, data)

    return load


class Applier:
    """Turns complete rounds of one project's jobs into versions."""

    def __init__(self, database: Database, tree: ProjectTree) -> None:
        self._database = database
        self._tree = tree

    def advance(self, job: JobRow) -> bool:
        """Make the job's next version if its round is complete; returns whether it did."""
        version = job.current_version
        members = self._commit(job, version)
        if members is None:
            return False
        with self._database.read() as connection:
            chosen, round = read_round(connection, job, version, members)
        try:
            made = compute(job.config, round)
        except (VersionNotFinite, ContractError, FileNotFoundError) as error:
            self._hold(job, str(error))
            return False
        self._publish(job, version + 1, made, chosen)
        self._forget(job, version + 1)
        return True

    def _forget(self, job: JobRow, newest: int) -> None:
        """Delete weights and gradients of versions beyond `keep_versions`; the ledger's rows stay.

        Looks at what lies on the disk, so that what a crash left behind goes with the next version.
        """
        keep = job.config.supply.keep_versions
        if not keep:
            return
        oldest = job.config.first_useful_version(newest - keep + 1)
        for version, path in job.folder.version_files():
            if version < oldest:
                path.unlink(missing_ok=True)
        for base_version, path in job.folder.payload_files():
            if base_version < oldest:
                path.unlink(missing_ok=True)
        for version, path in job.folder.anchor_files():  # as long as a round that it corrected can be replayed
            if version < oldest - job.config.aggregation.anchor_max_age:
                path.unlink(missing_ok=True)

    def _commit(self, job: JobRow, version: int) -> list[Member] | None:
        with self._database.read() as connection:
            members = store.round_members(connection, job.id, version + 1)
            if members is not None:
                return members  # committed before a crash: go on from there
            if self._complete(connection, job, version)[0] is None:
                return None
        return self._database.repeated(lambda connection: self._fix_round(connection, job, version))

    def _fix_round(self, connection: sa.Connection, job: JobRow, version: int) -> list[Member] | None:
        """The members of the round over `version`, fixed now unless they are already; None if it is not complete."""
        locked = store.lock_job(connection, job.id)
        if locked is None or locked["current_version"] != version:
            return None
        members = store.round_members(connection, job.id, version + 1)
        if members is None:
            rows, late = self._complete(connection, job, version)
            if rows is None:
                return None
            section, weights = job.config.aggregation, host_weights(connection, job.config, rows)
            members = [
                Member(str(row["workunit_name"]), weight, age_weight(section, version - int(row["base_version"])))
                for row, weight in zip(rows, weights, strict=True)
            ]
            store.set_disposition(connection, [str(row["workunit_name"]) for row in late], Disposition.TOO_OLD)
            anchor = anchor_to_use(job.config, version, store.newest_anchor(connection, job))
            store.commit_round(connection, job.id, version + 1, members, clock.now(), anchor)
        return members

    def _complete(self, connection: sa.Connection, job: JobRow, version: int) -> tuple[list[Row] | None, list[Row]]:
        """The ledger rows that make the next version (None: not yet), and those that have become too old."""
        if job.config.policy.flow:
            return flow_to_commit(job.config, version, store.pending_entries(connection, job.id), clock.now())
        tasks = store.microtasks(connection, job.id, version)
        entries = store.ledger_of_version(connection, job.id, version)
        return round_to_commit(tasks, entries, job.config.train.microtasks_per_version), []

    def _publish(self, job: JobRow, version: int, made: NewVersion, chosen: Sequence[Row]) -> None:
        path, digest, optimizer_digest = job.folder.write_version(version, made.state, made.optimizer)
        published = self._stage(job, version, made, path, digest)
        loss = round_loss(chosen)
        row = {
            "job_id": job.id,
            "version": version,
            "create_time": clock.now(),
            "state_sha256": digest,
            "state_bytes": path.stat().st_size,
            "optimizer_sha256": optimizer_digest,
            "contributions": len(chosen),
            "samples": made.samples,
            "loss": loss,
            "evaluation": "",
        }
        kind = "state" if made.delta is None else "delta"
        if not self._database.repeated(lambda connection: _finish(connection, job, row, kind, published, chosen)):
            return  # another instance finished it: its bytes are the same
        log.info(
            "[JOB %s] version %d published: %d contributions, %d samples, loss %s",
            job.name,
            version,
            len(chosen),
            made.samples,
            "unknown" if loss is None else f"{loss:.5g}",
        )
        skipped = set(range(job.config.train.microtasks_per_version)) - {int(row["slot"]) for row in chosen}
        if skipped and not job.config.policy.flow:
            named = ", ".join(f"slot {slot}" for slot in sorted(skipped))
            log.warning("[JOB %s] version %d lacks %s: every try has failed", job.name, version, named)

    def _stage(self, job: JobRow, version: int, made: NewVersion, path: Path, digest: str) -> Published:
        """Put the version's file where clients download it: the whole state at `path`, or the delta."""
        if made.delta is None:
            staged = self._tree.stage_file(path, state_file_name(job.name, version, digest))
            return Published(staged.name, digest, staged.md5, staged.nbytes)
        with self._database.read() as connection:
            base = store.version_row(connection, job.id, version - 1)
        assert base is not None, (job.name, version)
        data = tensorfile.to_bytes(made.delta, DELTA_METADATA)
        name = delta_file_name(job.name, version, sha256(data), str(base["state_sha256"]), digest)
        staged = self._tree.stage_file(data, name)
        return Published(name, sha256(data), staged.md5, staged.nbytes)

    def _hold(self, job: JobRow, reason: str) -> None:
        """Stop the job with the reason; the last good version stays current."""

        def stop(connection: sa.Connection) -> bool:
            locked = store.lock_job(connection, job.id)
            if locked is None or locked["current_version"] != job.current_version:
                return False  # another instance made the version and may have removed what this one looked for
            store.set_job_state(connection, job.id, JobState.FAILED, reason)
            return True

        if self._database.repeated(stop):
            log.critical("[JOB %s] stopped: %s", job.name, reason)


def _finish(
    connection: sa.Connection, job: JobRow, row: Row, kind: str, published: Published, chosen: Sequence[Row]
) -> bool:
    """Write a version's row and make it the current one; False if it is already."""
    version = int(row["version"])
    locked = store.lock_job(connection, job.id)
    if locked is None or locked["current_version"] != version - 1:
        return False
    connection.execute(sa.insert(gt_version).values(row))
    store.record_file(connection, job.id, kind, published, version=version)
    applied = {"disposition": str(Disposition.APPLIED), "applied_version": version}
    changes: dict[Key, Row] = {(str(each["workunit_name"]),): applied for each in chosen}
    update_rows(connection, gt_ledger, ("workunit_name",), changes)
    connection.execute(sa.update(gt_job).where(gt_job.c.id == job.id).values(current_version=version))
    return True


def round_loss(rows: Sequence[Row]) -> float | None:
    """Mean training loss of a round, weighted by samples."""
    known = [(float(r["loss"]), int(r["samples"])) for r in rows if r["loss"] is not None and math.isfinite(r["loss"])]
    weight = sum(samples for _, samples in known)
    return sum(loss * samples for loss, samples in known) / weight if weight else None
