"""Reads what the database knows of the makers of results: hosts, users, app versions, gt_trust, blocked groups; and the
judged pairs from which drift is told."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from boinc_project.config import ProjectConfig
from boinc_project.database import app_version, host, user
from boinc_project.gt_tables import gt_blocked, gt_drift, gt_fingerprint, gt_trust
from boinc_project.rows import read_rows
from boinc_project.store import Row
from validator.drift import Finding, Limits, Pair, pairs_of
from validator.voters import Records, groups_of, recorded_device

_HOST = ("id", "create_time", "serialnum", "external_ip_addr", "p_vendor", "p_model")
_AT_ONCE = 500
_LARGEST_RATIO = 1e9  # that a database holds; it is infinite where the others do not differ at all
WINDOW_S, MOST_ROWS = 14 * 86400.0, 20_000  # judged results that the test for drift looks at


def blocked_groups(connection: Connection) -> frozenset[str]:
    """Names of the groups whose results count as no vote."""
    return frozenset(str(name) for name in connection.scalars(sa.select(gt_blocked.c.name)))


def limits_of(config: ProjectConfig) -> Limits:
    """When a group drifts, by the project's config.xml."""
    return Limits(config.gt_drift_false_discoveries, config.gt_drift_ratio)


def write_drifting(connection: Connection, found: Sequence[Finding], now: float) -> None:
    """Keep which groups drift, for `boinc-train status`, in the place of what was found before."""
    connection.execute(gt_drift.delete())
    rows = [
        {
            "name": one.group[:191],
            "pairs": one.pairs,
            "median": one.median,
            "ratio": min(one.ratio, _LARGEST_RATIO),
            "test_time": now,
        }
        for one in found
    ]
    if rows:
        connection.execute(gt_drift.insert(), rows)


def read_records(connection: Connection, results: Sequence[Row]) -> Records:
    """The makers of these results."""
    hosts = sorted({int(row["hostid"]) for row in results if row["hostid"]})
    users = {(int(row["userid"]),) for row in results if row["userid"]}
    versions = {(int(row["app_version_id"]),) for row in results if int(row["app_version_id"]) > 0}
    trust: dict[tuple[int, str], Row] = {}
    for start in range(0, len(hosts), _AT_ONCE):
        query = sa.select(gt_trust).where(gt_trust.c.host_id.in_(hosts[start : start + _AT_ONCE]))
        for row in connection.execute(query).mappings():
            trust[int(row["host_id"]), str(row["kind"])] = dict(row)
    host_rows = read_rows(connection, host, ("id",), [(each,) for each in hosts], _host_columns(connection))
    user_rows = read_rows(connection, user, ("id",), users, ("id", "create_time"))
    version_rows = read_rows(connection, app_version, ("id",), versions, ("id", "plan_class"))
    return Records(
        hosts={int(row["id"]): row for row in host_rows.values()},
        users={int(row["id"]): row for row in user_rows.values()},
        versions={int(row["id"]): row for row in version_rows.values()},
        trust=trust,
    )


def _host_columns(connection: Connection) -> tuple[str, ...]:
    """What is read of hosts: `misc`, too, which databases of older BOINC servers have not."""
    if connection.dialect.name == "sqlite":
        return (*_HOST, "misc")
    there = {column["name"] for column in sa.inspect(connection).get_columns(host.name)}
    return (*_HOST, "misc") if "misc" in there else _HOST


def judged_pairs(connection: Connection, now: float) -> list[Pair]:
    """The pairs of the results that were judged lately, with the groups of their makers."""
    columns = [column for column in gt_fingerprint.c if column.name != "marks"]
    query = sa.select(*columns).where(gt_fingerprint.c.judge_time > now - WINDOW_S)
    newest = query.order_by(gt_fingerprint.c.judge_time.desc()).limit(MOST_ROWS)
    rows = [dict(row) for row in connection.execute(newest).mappings()]
    names = {"result_id": "id", "host_id": "hostid", "user_id": "userid", "app_version_id": "app_version_id"}
    results = [{name: row[column] for column, name in names.items()} for row in rows]
    records = read_records(connection, results)
    groups = {}
    for row, result in zip(rows, results, strict=True):
        version = int(result["app_version_id"])
        plan_class = str(records.versions.get(version, {}).get("plan_class") or "")
        maker = records.hosts.get(int(result["hostid"]), {})
        named = groups_of(result, plan_class, recorded_device(result, plan_class, maker), maker)
        groups[str(row["workunit_name"]), int(row["result_id"])] = named
    return pairs_of(rows, groups)
