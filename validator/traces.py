"""The rows of gt_fingerprint: written with a verdict, read for late copies and copied work, dropped by age.

What it is: statements. What it is not: a decision, or a reader of fingerprints.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from boinc_project.gt_tables import Judgement, gt_fingerprint, gt_microtask, gt_recheck
from boinc_project.store import Row

KEPT_S = 60 * 86400.0  # longer than any copy may be late, and enough for statistics
RECENT = 4  # fingerprints of one host that new ones are compared with
NAMED = 100  # results that are named at most
_DROPPED_AT_ONCE = 500

#: A result that is judged once more, because somebody has set it back by hand, keeps its first row.
_INSERT = gt_fingerprint.insert().prefix_with("OR IGNORE", dialect="sqlite").prefix_with("IGNORE", dialect="mysql")


def write(connection: Connection, rows: Sequence[Row]) -> None:
    """Store the fingerprints of results that have just been judged."""
    if rows:
        connection.execute(_INSERT, list(rows))


def of_valid(connection: Connection, workunit_name: str) -> dict[int, bytes]:
    """The fingerprints of a workunit's canonical result and of those that were found valid with it, by their ids."""
    valid = [str(word) for word in (Judgement.CANONICAL, Judgement.ALONE, Judgement.VALID)]
    query = sa.select(gt_fingerprint.c.result_id, gt_fingerprint.c.marks).where(
        gt_fingerprint.c.workunit_name == workunit_name, gt_fingerprint.c.verdict.in_(valid)
    )
    return {int(identifier): bytes(marks) for identifier, marks in connection.execute(query)}


def recent(connection: Connection, host_id: int) -> list[tuple[str, str, bytes]]:
    """(workunit name, kind, fingerprint) of a host's last results, the newest first."""
    table = gt_fingerprint.c
    query = sa.select(table.workunit_name, table.kind, table.marks).where(table.host_id == host_id)
    found = connection.execute(query.order_by(table.judge_time.desc(), table.result_id.desc()).limit(RECENT))
    return [(str(name), str(kind), bytes(marks)) for name, kind, marks in found]


def latest(connection: Connection, kind: str, steps: int, fragment: tuple[int, int], count: int) -> list[bytes]:
    """Fingerprints of the last results of a kind, of tasks of so many steps, that were found valid; newest first.

    fragment   (i, n): of versions of which n divides all but i
    """
    table = gt_fingerprint.c
    good = [str(word) for word in (Judgement.CANONICAL, Judgement.VALID, Judgement.ALONE)]
    query = (
        sa.select(table.marks)
        .join(gt_microtask, gt_microtask.c.workunit_name == table.workunit_name)
        .where(table.kind == kind, gt_microtask.c.steps == steps, table.verdict.in_(good))
    )
    if fragment[1] > 1:
        query = query.where(gt_microtask.c.version % fragment[1] == fragment[0])
    return [bytes(marks) for marks in connection.scalars(query.order_by(table.judge_time.desc()).limit(count))]


def accepted_alone(connection: Connection, host_id: int, kind: str) -> list[str]:
    """Workunits whose only copy was this host's, the newest first; NAMED of them."""
    return [str(name) for name in connection.scalars(_alone(host_id, kind).limit(NAMED))]


def never_rechecked(connection: Connection, host_id: int, kind: str, most: int) -> list[str]:
    """Those of them that have not been queued to be computed again, `most` at most."""
    new = gt_fingerprint.c.workunit_name.not_in(sa.select(gt_recheck.c.workunit_name))
    return [str(name) for name in connection.scalars(_alone(host_id, kind).where(new).limit(most))]


def _alone(host_id: int, kind: str) -> sa.Select[tuple[str]]:
    table = gt_fingerprint.c
    mine = (table.host_id == host_id, table.kind == kind, table.verdict == str(Judgement.ALONE))
    return sa.select(table.workunit_name).where(*mine).order_by(table.judge_time.desc())


def drop_old(connection: Connection, now: float) -> int:
    """Drop some of the rows that are too old; returns how many, 0 when there are no more."""
    table = gt_fingerprint.c
    query = sa.select(table.workunit_name, table.result_id).where(table.judge_time < now - KEPT_S)
    old = connection.execute(query.order_by(table.judge_time).limit(_DROPPED_AT_ONCE)).all()
    delete = gt_fingerprint.delete().where(
        table.workunit_name == sa.bindparam("name"), table.result_id == sa.bindparam("result")
    )
    _each(connection, delete, [{"name": name, "result": number} for name, number in old])
    return len(old)


def _each(connection: Connection, statement: sa.Delete, rows: Iterable[Row]) -> None:
    parameters = list(rows)
    if parameters:
        connection.execute(statement, parameters)
