"""Looks again at what a host had accepted alone, once one of its results was found bad (field case of many projects: a
host behaves until it is trusted, and then lies now and then).

    queue     with the bad or differing verdict, and with each result that then turns out not to be within the
              tolerance: its newest results that nobody has confirmed, until MOST of them wait (gt_recheck). So looking
              goes on until MOST in a row are right
    Rechecks  the server computes these microtasks itself, when no spot check and no dispute waits, and compares their
              fingerprints with those of what was accepted
    settle    right: confirmed from now on. Not within the tolerance and not yet part of a version: left out, and the
              slot is issued again. Wrong and applied: nothing is taken back, the log and `boinc-train status` name the
              version to go back to. Near and applied: so little that it is only told.

The files of those results may be gone, the fingerprints are kept; so what is compared is estimated, with the limits
that late copies have (validator/decision.py). Credit stays granted. Every queue is bounded, and so is the work.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from boinc_project import store
from boinc_project.contract.codecs import Array
from boinc_project.contract.microtask import essentials
from boinc_project.daemon import Options
from boinc_project.database import Database
from boinc_project.gt_tables import (
    Disposition,
    Judgement,
    MicrotaskState,
    RecheckState,
    gt_fingerprint,
    gt_job,
    gt_ledger,
    gt_microtask,
    gt_recheck,
    gt_trust,
)
from boinc_project.store import Row
from validator import traces
from validator.case import Case
from validator.decision import HONEST_DISTANCE
from validator.fingerprint import estimate, fingerprints, layout_of, read
from validator.replays import Replays

MOST = 50  # results of a host that wait to be computed again, the newest first
_LOOKED_AT = 100  # waiting rows, of which other instances of the daemon take some

_LEVELS = {RecheckState.WRONG: logging.CRITICAL, RecheckState.NEAR: logging.WARNING}

log = logging.getLogger("validator")


def queue(connection: Connection, host_id: int, kind: str, now: float) -> list[str]:
    """Have the host's unconfirmed results of this kind computed again; returns their workunits, newest first."""
    waiting = {"host_id": host_id, "kind": kind, "state": str(RecheckState.WAITING)}
    already = sa.select(sa.func.count()).select_from(gt_recheck).filter_by(**waiting)
    room = MOST - int(connection.scalar(already) or 0)
    wanted = traces.never_rechecked(connection, host_id, kind, room) if room > 0 else []
    if wanted:
        waiting["create_time"] = now
        connection.execute(gt_recheck.insert(), [{"workunit_name": name, **waiting} for name in wanted])
    return wanted


@dataclass
class Rechecks:
    """Works off the queue, one after the other, while nothing more urgent is to be computed. Not thread-safe."""

    database: Database
    replays: Replays
    options: Options
    clock: Callable[[], float]
    current: tuple[Row, Case] | None = None
    is_empty: bool = field(default=False)  # nothing was waiting when it was looked last; `wake` ends that

    @property
    def busy(self) -> bool:
        return self.current is not None or not self.is_empty

    def wake(self) -> None:
        """There may be something to do."""
        self.is_empty = False

    def poll(self) -> bool:
        """Settle what has been computed, ask for the next; returns whether anything happened."""
        if self.options.dry_run:
            self.is_empty = True
            return False
        happened = False
        if self.current is not None:
            row, case = self.current
            done, tensors = self.replays.of(case.name)
            if not done:
                return False
            self._settle(row, case, tensors)
            self.current, happened = None, True
        if not self.is_empty and not self.replays.busy:
            self.current = self._next()
            self.is_empty = self.current is None
            if self.current is not None:
                row, case = self.current
                self.replays.want(case, f"host {row['host_id']} had it accepted alone before a result of it was bad")
                happened = True
        return happened

    def _next(self) -> tuple[Row, Case] | None:
        query = (
            sa.select(gt_recheck, gt_microtask.c.id, gt_microtask.c.job_id, gt_microtask.c.document)
            .join_from(gt_recheck, gt_microtask, gt_microtask.c.workunit_name == gt_recheck.c.workunit_name)
            .where(gt_recheck.c.state == str(RecheckState.WAITING))
            .order_by(gt_recheck.c.create_time, gt_microtask.c.id.desc())
            .limit(_LOOKED_AT)
        )
        with self.database.read() as connection:
            for row in connection.execute(query).mappings():
                job = store.job_with_id(connection, int(row["job_id"]))
                if job is not None and self.options.takes_job(int(row["id"])):
                    # BOINC may have purged the workunit: no id of a living one.
                    unit = {"id": -int(row["id"]), "name": str(row["workunit_name"])}
                    return dict(row), Case(unit, [], dict(row), job)
        return None

    def _settle(self, row: Row, case: Case, tensors: Mapping[str, Array] | None) -> None:
        """Compare and write."""
        microtask = essentials(str(row["document"]))
        layout = layout_of(case.job.folder.update_types(microtask.mode, microtask.steps))
        distance: float | None = None
        if tensors is not None and layout is not None:
            with self.database.read() as connection:
                kept = read(_marks(connection, row), layout)
            mine = read(fingerprints([tensors], layout)[0], layout)
            if kept is not None and mine is not None:
                distance = estimate(kept, mine, layout)
        state = judgement(distance, case.job.config.workunit.tolerance)
        now = self.clock()
        line = self.database.repeated(lambda connection: settle(connection, row, case, state, distance, now))
        log.log(_LEVELS.get(state, logging.INFO), "%s", line)


def judgement(distance: float | None, tolerance: float) -> RecheckState:
    """What an estimated distance to the server's own computation says of a result; None: there is none."""
    if distance is None:
        return RecheckState.LOST
    if distance <= tolerance:
        return RecheckState.RIGHT
    return RecheckState.WRONG if not distance <= HONEST_DISTANCE else RecheckState.NEAR


def settle(
    connection: Connection, row: Row, case: Case, state: RecheckState, distance: float | None, now: float
) -> str:
    """Write what came out, in one transaction; returns the sentence for the log."""
    store.lock_job(connection, case.job.id)  # before its ledger, as everybody does
    shown = f"[HOST#{row['host_id']}] [WU {case.name}], accepted from it alone,"
    found = gt_recheck.c.workunit_name == case.name
    values = {"state": str(state), "distance": None if distance is None else min(distance, 1e9), "judge_time": now}
    connection.execute(sa.update(gt_recheck).where(found).values(values))
    if state == RecheckState.LOST:
        return f"{shown} cannot be computed again"
    if state == RecheckState.RIGHT:
        alone = (gt_fingerprint.c.workunit_name == case.name) & (gt_fingerprint.c.verdict == str(Judgement.ALONE))
        connection.execute(sa.update(gt_fingerprint).where(alone).values(verdict=str(Judgement.CANONICAL)))
        return f"{shown} is right"
    queue(connection, int(row["host_id"]), str(row["kind"]), now)
    apart = f"{distance:.2g} from the server's own computation"
    if state == RecheckState.NEAR:  # its host has lost what trust it had with the verdict that asked for this
        wrong = f"{shown} differs: it is {apart}"
    else:
        host = (gt_trust.c.host_id == row["host_id"]) & (gt_trust.c.kind == row["kind"])
        connection.execute(sa.update(gt_trust).where(host).values(good=0.0, failed_check=now, consecutive_valid=0))
        wrong = f"{shown} is wrong (it is {apart})"
    entry = connection.execute(sa.select(gt_ledger).where(gt_ledger.c.workunit_name == case.name)).mappings().first()
    if entry is not None and entry["disposition"] in (str(Disposition.COMMITTED), str(Disposition.APPLIED)):
        version = _version_with(connection, entry)
        if state == RecheckState.NEAR:
            return f"{wrong}, and is part of version {version} of job {case.job.name}"
        advice = f"boinc-train job rollback {case.job.name} {version - 1}"
        return f"{wrong} and is part of version {version} of job {case.job.name}; {advice} takes that back"
    if entry is None or entry["disposition"] == str(Disposition.PENDING):
        # Intake drops what was withdrawn, and the generator issues the slot again.
        store.set_disposition(connection, [case.name], Disposition.DROPPED)
        withdrawn = {"state": str(MicrotaskState.CANCELLED), "note": "found otherwise when it was computed again"}
        mine = gt_microtask.c.workunit_name == case.name
        living = gt_microtask.c.state.in_([str(MicrotaskState.ISSUED), str(MicrotaskState.FOLDED)])
        connection.execute(sa.update(gt_microtask).where(mine, living).values(withdrawn))
        return f"{wrong}; it is left out, and its samples are issued again"
    return f"{wrong}; it was never applied"


def _marks(connection: Connection, row: Row) -> bytes:
    """The fingerprint of what was accepted."""
    query = sa.select(gt_fingerprint.c.marks).where(
        gt_fingerprint.c.workunit_name == row["workunit_name"],
        gt_fingerprint.c.host_id == row["host_id"],
        gt_fingerprint.c.verdict == str(Judgement.ALONE),
    )
    return bytes(connection.scalar(query) or b"")


def _version_with(connection: Connection, entry: sa.RowMapping) -> int:
    """The version that a contribution is part of, or of the round that is being applied."""
    if entry["applied_version"] is not None:
        return int(entry["applied_version"])
    current = connection.scalar(sa.select(gt_job.c.current_version).where(gt_job.c.id == entry["job_id"]))
    return int(current or 0) + 1


# What the admin sees.


@dataclass(frozen=True)
class Summary:
    """Of a host's results that were looked at again: how many are in which state, and for each job with a version that
    holds a wrong one the version before the first of these."""

    counts: Mapping[str, int]
    rollbacks: Mapping[str, int]

    def __str__(self) -> str:
        if not self.counts:
            return ""
        words = ", ".join(f"{count} {_WORDS[RecheckState(state)]}" for state, count in sorted(self.counts.items()))
        advice = "".join(
            f"; boinc-train job rollback {job} {version}" for job, version in sorted(self.rollbacks.items())
        )
        return f"computed again: {words}{advice}"


_WORDS = {
    RecheckState.WAITING: "waiting",
    RecheckState.RIGHT: "right",
    RecheckState.NEAR: "near",
    RecheckState.WRONG: "wrong",
    RecheckState.LOST: "impossible",
}


def summary(connection: Connection, host_id: int, kind: str) -> Summary:
    """What looking again at a host's results of this kind has shown so far."""
    mine = (gt_recheck.c.host_id == host_id) & (gt_recheck.c.kind == kind)
    counts = connection.execute(
        sa.select(gt_recheck.c.state, sa.func.count()).where(mine).group_by(gt_recheck.c.state)
    ).all()
    applied = (
        sa.select(gt_job.c.name, gt_ledger)
        .join_from(gt_recheck, gt_ledger, gt_ledger.c.workunit_name == gt_recheck.c.workunit_name)
        .join(gt_job, gt_job.c.id == gt_ledger.c.job_id)
        .where(
            mine,
            gt_recheck.c.state == str(RecheckState.WRONG),
            gt_ledger.c.disposition.in_([str(Disposition.COMMITTED), str(Disposition.APPLIED)]),
        )
    )
    rollbacks: dict[str, int] = {}
    for row in connection.execute(applied).mappings():
        before = _version_with(connection, row) - 1
        rollbacks[str(row["name"])] = min(before, rollbacks.get(str(row["name"]), before))
    return Summary({str(state): int(count) for state, count in counts}, rollbacks)
