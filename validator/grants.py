"""Writes one result's verdict: host version, host, user, team and result rows, in BOINC's order.

Sources: sched/validator.cpp (handle_wu, is_valid, is_invalid), sched/credit.cpp (grant_credit), lib/util.cpp.
Everything happens inside the caller's transaction. The mark against doubling is the result's own
validate_state: the caller never comes here for a result that is already VALID.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from boinc_project.credit import RecentAverage, RunningMean, update_average
from boinc_project.database import host, host_app_version, result, team, user
from boinc_project.states import ValidateState
from validator.decision import ResultChange

Row = Mapping[str, Any]

MAX_ELAPSED_S = 90 * 86400.0
TURNAROUND_OLD_SHARE = 0.7  # host.avg_turnaround = 0.7 old + 0.3 new (sched/validator.cpp)


def judge_result(connection: Connection, unit: Row, row: Row, change: ResultChange, credit: float, now: float) -> None:
    """Write one result's new state; a VALID one is granted `credit` and counts for its host."""
    granted = credit if change.credited else 0.0
    if change.validate_state == ValidateState.VALID:
        _host_version_valid(connection, unit, row)
        _grant_host(connection, row, granted, now)
        _grant_user(connection, row, granted, now)
    elif change.validate_state == ValidateState.INVALID:
        _host_version_invalid(connection, row)
    values: dict[str, Any] = {"validate_state": int(change.validate_state), "granted_credit": granted}
    if change.outcome is not None:
        values["outcome"] = int(change.outcome)
    connection.execute(sa.update(result).where(result.c.id == row["id"]).values(**values))


def generalized_version_id(row: Row) -> int:
    """host_app_version.app_version_id of a result: its app version, or a number made from app and resource for
    the anonymous platform (sched/sched_version.cpp)."""
    version = int(row["app_version_id"])
    return version if version >= 0 else int(row["appid"]) * 1_000_000 - version


def _locked_host_version(connection: Connection, row: Row) -> Row | None:
    table = host_app_version
    query = (
        sa.select(table)
        .where(table.c.host_id == row["hostid"], table.c.app_version_id == generalized_version_id(row))
        .with_for_update()
    )
    found = connection.execute(query).mappings().first()
    return None if found is None else dict(found)


def _write_host_version(connection: Connection, row: Row, values: Mapping[str, Any]) -> None:
    table = host_app_version
    connection.execute(
        sa.update(table)
        .where(table.c.host_id == row["hostid"], table.c.app_version_id == generalized_version_id(row))
        .values(**values)
    )


def _host_version_valid(connection: Connection, unit: Row, row: Row) -> None:
    version = _locked_host_version(connection, row)
    if version is None:
        return
    elapsed = sane_seconds(row["elapsed_time"])
    turnaround = sane_seconds(row["received_time"] - row["sent_time"])
    per_flop = RunningMean(float(version["et_n"]), float(version["et_avg"]))
    if unit["rsc_fpops_est"] > 0 and elapsed > 0:
        per_flop = per_flop.updated(elapsed / float(unit["rsc_fpops_est"]))
    waited = RunningMean(float(version["turnaround_n"]), float(version["turnaround_avg"])).updated(turnaround)
    _write_host_version(
        connection,
        row,
        {
            "consecutive_valid": int(version["consecutive_valid"]) + 1,
            "max_jobs_per_day": int(version["max_jobs_per_day"]) + 1,
            "et_n": per_flop.n,
            "et_avg": per_flop.average,
            "turnaround_n": waited.n,
            "turnaround_avg": waited.average,
        },
    )


def _host_version_invalid(connection: Connection, row: Row) -> None:
    version = _locked_host_version(connection, row)
    if version is None:
        return
    quota = int(version["max_jobs_per_day"])
    _write_host_version(connection, row, {"consecutive_valid": 0, "max_jobs_per_day": max(1, quota - 1)})


def _grant_host(connection: Connection, row: Row, credit: float, now: float) -> None:
    query = sa.select(host).where(host.c.id == row["hostid"]).with_for_update()
    found = connection.execute(query).mappings().first()
    if found is None:
        return
    turnaround = sane_seconds(row["received_time"] - row["sent_time"])
    old = sane_seconds(found["avg_turnaround"])
    average = turnaround if old == 0 else TURNAROUND_OLD_SHARE * old + (1 - TURNAROUND_OLD_SHARE) * turnaround
    values = _with_credit(found, row, credit, now, host.c.total_credit)
    connection.execute(sa.update(host).where(host.c.id == row["hostid"]).values(avg_turnaround=average, **values))


def _grant_user(connection: Connection, row: Row, credit: float, now: float) -> None:
    query = sa.select(user).where(user.c.id == row["userid"]).with_for_update()
    found = connection.execute(query).mappings().first()
    if found is None:
        return
    values = _with_credit(found, row, credit, now, user.c.total_credit)
    connection.execute(sa.update(user).where(user.c.id == row["userid"]).values(**values))
    if not found["teamid"]:
        return
    members = (
        connection.execute(sa.select(team).where(team.c.id == found["teamid"]).with_for_update()).mappings().first()
    )
    if members is not None:
        values = _with_credit(members, row, credit, now, team.c.total_credit)
        connection.execute(sa.update(team).where(team.c.id == found["teamid"]).values(**values))


def _with_credit(owner: Mapping[Any, Any], row: Row, credit: float, now: float, total: Any) -> dict[str, Any]:
    """Total and decayed recent average of a host, user or team after a grant."""
    recent = RecentAverage(float(owner["expavg_credit"]), float(owner["expavg_time"]))
    fresh = update_average(now, float(row["sent_time"]), credit, recent)
    return {"total_credit": total + credit, "expavg_credit": fresh.average, "expavg_time": fresh.time}


def sane_seconds(value: Any) -> float:
    """A duration that a client or a clock claims, as a finite number from 0 to 90 days."""
    number = float(value)
    return min(max(number, 0.0), MAX_ELAPSED_S) if math.isfinite(number) else 0.0
