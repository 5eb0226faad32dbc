"""Evidence beside agreement: that an update depends on the data at all; and for jobs that want it ([trust] of
job.toml) the norm bound and the loss probe.

Doubts.considered(...)   a decision that names a canonical result -> the same, or one that leaves it open
write(...)               what was measured of the updates that became canonical
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from boinc_project import local_run, store
from boinc_project.background_runs import Start
from boinc_project.contract.codecs import Array
from boinc_project.database import Database
from boinc_project.gt_tables import gt_accepted, gt_microtask
from boinc_project.store import Row
from validator import degenerate, loss_probe, norm_bound
from validator.case import Case
from validator.decision import Decision, Evidence, doubted
from validator.prober import NotYet, Prober

__all__ = ["Doubts", "NotYet", "write"]


class Doubts:
    """Looks at every update that is about to become canonical. Not thread-safe."""

    def __init__(self, database: Database, start: Start = local_run.start) -> None:
        self._database = database
        self.prober = Prober(start)

    def considered(
        self,
        case: Case,
        evidence: Evidence,
        decision: Decision,
        tensors: Mapping[int, Mapping[str, Array]],
        digests: Mapping[int, str],
    ) -> tuple[Decision, Row | None]:
        """The decision, and the row of gt_accepted to write with it. Raises NotYet while the update is being tried."""
        wanted = case.job.config.trust
        if decision.canonical is None:
            return decision, None
        is_part = bool(case.job.config.policy.parts_by)
        if evidence.replayed is None and (why := degenerate.objection(tensors[decision.canonical], is_part)):
            return doubted(evidence, decision, why) if evidence.hopeless else Decision(replay=why), None
        if not (wanted.norm_bound or wanted.loss_probe):
            return decision, None
        update, version = tensors[decision.canonical], int(case.task["version"])
        with self._database.read() as connection:
            accepted = _accepted(connection, case)
            state = store.version_row(connection, case.job.id, version)
        norm = norm_bound.norm(update)
        gain: float | None = None
        row = {"workunit_name": case.name, "job_id": case.job.id, "version": version, "norm": norm, "gain": gain}
        if evidence.replayed is not None:  # the server has computed the same
            return decision, row
        why = ""
        if wanted.norm_bound:
            why = norm_bound.objection(norm, [n for _, n, _ in accepted[: norm_bound.KEPT]], wanted.norm_bound)
        if wanted.loss_probe and not why and state is not None:
            digest = digests[decision.canonical]
            try:
                gain = self.prober.gain(case.job, version, str(state["state_sha256"]), digest, update)
            except FileNotFoundError:
                gain = None  # a version that is not kept any more; nothing computed from it is applied
            else:
                gains = [(of, each) for of, _, each in accepted if each is not None]
                why = loss_probe.objection(gain, version, gains, wanted.loss_probe)
        if why:
            return doubted(evidence, decision, why), None
        return decision, {**row, "gain": gain}


def _accepted(connection: Connection, case: Case) -> list[tuple[int, float, float | None]]:
    """(version, norm, gain) of a job's last canonical updates, the newest first; where hosts have speed classes, of
    those with as many steps, and where versions take turns in the model's fragments, of those of the same one."""
    table, task = gt_accepted.c, gt_microtask.c
    query = sa.select(table.version, table.norm, table.gain).where(table.job_id == case.job.id)
    fragments = case.job.config.fragments
    if fragments > 1:
        query = query.where(table.version % fragments == int(case.task["version"]) % fragments)
    if case.job.config.class_steps:
        steps = sa.select(task.steps).where(task.workunit_name == case.name).scalar_subquery()
        query = query.join(gt_microtask, task.workunit_name == table.workunit_name).where(task.steps == steps)
    found = connection.execute(query.order_by(table.judge_time.desc(), table.workunit_name).limit(loss_probe.KEPT))
    return [(int(version), float(norm), None if gain is None else float(gain)) for version, norm, gain in found]


#: A workunit that is judged once more, because somebody has set it back by hand, keeps its first row.
_INSERT = gt_accepted.insert().prefix_with("OR IGNORE", dialect="sqlite").prefix_with("IGNORE", dialect="mysql")


def write(connection: Connection, rows: Sequence[Row], now: float) -> None:
    """Store what was measured of updates that have just become canonical."""
    if rows:
        connection.execute(_INSERT, [{**row, "judge_time": now} for row in rows])
