"""The books that a verdict changes: host, host version, app version, user, team, credit by app, trust.

Sources: sched/validator.cpp (handle_wu, is_valid, is_invalid), sched/credit.cpp (grant_credit, get_pfc,
write_modified_app_versions), lib/util.cpp. `Books` holds locked rows; `enter` is the arithmetic of one judged
result and touches no database, `open_books` and `Books.write` are the statements around it. One transaction may
judge many workunits, so that a host with ten results in it is read and written once.

The mark against doubling is the result's own validate_state: nobody enters a result that is VALID already.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from boinc_project.credit import (
    APP_VERSION_SMOOTHING,
    HOST_VERSION_SMOOTHING,
    SANE_RATIO,
    UNKNOWN_FLOPS,
    RecentAverage,
    RunningMean,
    RunningVariance,
    claimed_flops,
    update_average,
)
from boinc_project.database import (
    app_version,
    credit_team,
    credit_user,
    host,
    host_app_version,
    new_row,
    result,
    team,
    user,
)
from boinc_project.gt_tables import gt_trust
from boinc_project.reliability import EVIDENCE, faded, is_distrusted
from boinc_project.rows import Key, read_rows, update_rows
from boinc_project.states import ValidateState, host_version_id
from validator.decision import ResultChange

Row = Mapping[str, Any]

MAX_ELAPSED_S = 90 * 86400.0
TURNAROUND_OLD_SHARE = 0.7  # host.avg_turnaround = 0.7 old + 0.3 new (sched/validator.cpp)
TOTAL_CREDIT = 0  # credit_user.credit_type

log = logging.getLogger("validator")


@dataclass(frozen=True)
class Judged:
    """A result with a new verdict. `unit` and `row` are as read before; `credit` is what a valid one is granted;
    `kind` says what was computed, for the host's trust."""

    unit: Row
    row: Row
    change: ResultChange
    credit: float
    kind: str

    @property
    def host_id(self) -> int:
        return int(self.row["hostid"])

    @property
    def version_key(self) -> Key:
        return self.host_id, generalized_version_id(self.row)


@dataclass(frozen=True)
class Policy:
    """What the project says about credit and quota.

    daily_result_quota   a host's quota does not fall below it by invalid results
    credit_by_app        whether credit_user and credit_team are kept
    replicated_app       whether the app uses adaptive replication (app.target_nresults above 1)
    """

    daily_result_quota: int = 0
    credit_by_app: bool = False
    replicated_app: bool = False


def generalized_version_id(row: Row) -> int:
    """host_app_version.app_version_id of a result."""
    return host_version_id(int(row["appid"]), int(row["app_version_id"]))


@dataclass
class Table:
    """Rows of one table in memory, and what they were when they were read."""

    table: sa.Table
    key: tuple[str, ...]
    rows: dict[Key, dict[str, Any]]
    before: dict[Key, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.before = {key: dict(row) for key, row in self.rows.items()}

    def get(self, *key: int | str) -> dict[str, Any] | None:
        return self.rows.get(key)

    def add(self, row: dict[str, Any]) -> dict[str, Any]:
        """A row that does not exist yet."""
        return self.rows.setdefault(tuple(row[name] for name in self.key), row)

    def write(self, connection: Connection) -> None:
        """Insert the new rows, update the changed columns of the others."""
        fresh = [row for key, row in sorted(self.rows.items()) if key not in self.before]
        if fresh:
            connection.execute(self.table.insert(), fresh)
        changes = {
            key: {name: value for name, value in self.rows[key].items() if value != old[name]}
            for key, old in self.before.items()
        }
        update_rows(connection, self.table, self.key, changes)


@dataclass
class Books:
    """The rows that a batch of verdicts changes."""

    policy: Policy
    now: float
    hosts: Table
    host_versions: Table
    users: Table
    teams: Table
    by_user: Table
    by_team: Table
    app_versions: Table
    trust: Table
    outliers: set[int] = field(default_factory=set)  # results that entered no runtime statistics

    def enter(self, judged: Judged) -> None:
        """Count one verdict."""
        if judged.change.validate_state == ValidateState.VALID:
            self._valid(judged)
        elif judged.change.validate_state == ValidateState.INVALID:
            self._invalid(judged)

    def write(self, connection: Connection) -> None:
        """Write what changed, always in the same order of tables and rows."""
        for table in (
            self.hosts,
            self.host_versions,
            self.users,
            self.teams,
            self.by_user,
            self.by_team,
            self.app_versions,
            self.trust,
        ):
            table.write(connection)

    # A valid result.

    def _valid(self, judged: Judged) -> None:
        owner = self.hosts.get(judged.host_id)
        if owner is None:
            log.warning("[RESULT#%d] has no host row [HOST#%d]", judged.row["id"], judged.host_id)
        else:
            owner["avg_turnaround"] = _turnaround_average(owner, judged.row)
            self._grant(owner, judged)
        self._count_host_version(judged)
        account = self.users.get(_account_of(owner, judged.row))
        if account is None:
            log.warning("[RESULT#%d] has no user row [USER#%d]", judged.row["id"], _account_of(owner, judged.row))
        else:
            self._grant(account, judged)
            if (members := self.teams.get(int(account["teamid"]))) is not None:
                self._grant(members, judged)
        if self.policy.credit_by_app:
            self._grant_by_app(judged)
        trust = self._trust(judged)
        trust["valid"] += 1
        if judged.change.alone:
            trust["alone"] += 1  # nobody has looked: no reason to trust it more
        else:
            trust["consecutive_valid"] += 1
            trust["good"] += 1.0
            trust["alone"] = 0

    def _grant(self, owner: dict[str, Any], judged: Judged) -> None:
        """Total and decayed recent average of a host, user or team."""
        recent = RecentAverage(float(owner["expavg_credit"]), float(owner["expavg_time"]))
        fresh = update_average(self.now, float(judged.row["sent_time"]), judged.credit, recent)
        owner["total_credit"] = _finite(owner["total_credit"]) + judged.credit
        owner["expavg_credit"], owner["expavg_time"] = fresh.average, fresh.time

    def _grant_by_app(self, judged: Judged) -> None:
        appid = int(judged.row["appid"])
        for table, owner, name in (
            (self.by_user, judged.row["userid"], "userid"),
            (self.by_team, judged.row["teamid"], "teamid"),  # 0, no team, is kept too
        ):
            row = table.get(int(owner), appid, TOTAL_CREDIT)
            if row is None:
                values = {name: int(owner), "appid": appid, "credit_type": TOTAL_CREDIT, "expavg_time": self.now}
                row = table.add(new_row(table.table, **values))
            recent = RecentAverage(float(row["expavg"]), float(row["expavg_time"]))
            fresh = update_average(self.now, float(judged.row["sent_time"]), judged.credit, recent)
            row["njobs"] += 1
            row["total"] += judged.credit
            row["expavg"], row["expavg_time"] = fresh.average, fresh.time

    def _count_host_version(self, judged: Judged) -> None:
        """Quota, consecutive valid results, and what the scheduler estimates runtimes from."""
        row, unit = judged.row, judged.unit
        kept = self._host_version(judged)
        if kept is None:
            return
        kept["max_jobs_per_day"] += 1
        if not judged.change.alone and not (self.policy.replicated_app and unit["target_nresults"] == 1):
            kept["consecutive_valid"] += 1
        elapsed = sane_seconds(row["elapsed_time"]) or sane_seconds(row["cpu_time"])
        speed = float(row["flops_estimate"])
        estimate = float(unit["rsc_fpops_est"])
        if speed <= 0 or speed == UNKNOWN_FLOPS or not math.isfinite(speed) or estimate <= 0 or elapsed <= 0:
            self.outliers.add(int(row["id"]))
            return
        ratio = claimed_flops(speed, elapsed) / estimate
        if SANE_RATIO[0] <= ratio <= SANE_RATIO[1]:
            mean = RunningMean(float(kept["pfc_n"]), float(kept["pfc_avg"])).updated(ratio, HOST_VERSION_SMOOTHING)
            kept["pfc_n"], kept["pfc_avg"] = mean.n, mean.average
        else:
            log.warning("[RESULT#%d] claims %g times the estimated operations; not averaged", row["id"], ratio)
        _take_sample(kept, "et", elapsed / estimate)
        _take_sample(kept, "turnaround", sane_seconds(row["received_time"] - row["sent_time"]))
        self._count_app_version(judged, ratio)

    def _count_app_version(self, judged: Judged, ratio: float) -> None:
        version = self.app_versions.get(int(judged.row["app_version_id"]))
        if version is None:
            return
        if SANE_RATIO[0] <= ratio <= SANE_RATIO[1]:
            mean = RunningMean(float(version["pfc_n"]), float(version["pfc_avg"])).updated(ratio, APP_VERSION_SMOOTHING)
            version["pfc_n"], version["pfc_avg"] = mean.n, mean.average
        recent = RecentAverage(float(version["expavg_credit"]), float(version["expavg_time"]))
        fresh = update_average(self.now, float(judged.row["sent_time"]), judged.credit, recent)
        version["expavg_credit"], version["expavg_time"] = fresh.average, fresh.time

    # An invalid one.

    def _invalid(self, judged: Judged) -> None:
        trust = self._trust(judged)
        if judged.change.differs:
            # Other hardware may round otherwise: no credit, but no honest host is ruined by it. It is not believed
            # alone until many others' copies have been like its own: so small a lie harms where nobody looks.
            trust["differing"] += 1
            trust["unlike"] += 1.0
            trust["consecutive_valid"] = 0
            return
        trust["faulty"] += 1
        trust["consecutive_valid"] = 0
        trust["bad"] += 1.0
        if judged.change.refuted:
            trust["good"], trust["failed_check"] = 0.0, self.now
        kept = self._host_version(judged)
        if kept is not None:
            kept["consecutive_valid"] = 0
            if kept["max_jobs_per_day"] > self.policy.daily_result_quota:
                kept["max_jobs_per_day"] -= 1
            if is_distrusted(trust, self.now):
                # Each of its copies costs somebody else's time: one a day, and one more for each that is good
                # (where the project has a daily_result_quota).
                kept["max_jobs_per_day"] = 1

    # Rows that may be missing.

    def _host_version(self, judged: Judged) -> dict[str, Any] | None:
        kept = self.host_versions.get(*judged.version_key)
        if kept is None and self.hosts.get(judged.host_id) is not None:
            identity = {"host_id": judged.host_id, "app_version_id": judged.version_key[1]}
            kept = self.host_versions.add(new_row(host_app_version, **identity))
        return kept

    def _trust(self, judged: Judged) -> dict[str, Any]:
        row = self.trust.get(judged.host_id, judged.kind)
        if row is None:
            counts = {"valid": 0, "faulty": 0, "differing": 0, "consecutive_valid": 0, "alone": 0}
            evidence = {**dict.fromkeys(EVIDENCE, 0.0), "failed_check": 0.0}
            identity = {"host_id": judged.host_id, "kind": judged.kind}
            row = self.trust.add({**identity, **counts, **evidence, "judge_time": self.now})
        since = float(row["judge_time"])
        row.update({name: faded(float(row[name]), since, self.now) for name in EVIDENCE})
        row["judge_time"] = max(since, self.now)
        return row


def open_books(connection: Connection, judged: Sequence[Judged], policy: Policy, now: float) -> Books:
    """Read and lock every row that these verdicts may change; the results' rows are locked already."""
    counted = [each for each in judged if each.change.validate_state in (ValidateState.VALID, ValidateState.INVALID)]
    valid = [each for each in counted if each.change.validate_state == ValidateState.VALID]
    by_app = valid if policy.credit_by_app else []

    def locked(table: sa.Table, key: tuple[str, ...], keys: Iterable[Key], columns: Sequence[str]) -> Table:
        wanted = set(keys)
        # Which exist is asked first and without a lock: a lock on an absent row would keep others from making it.
        present = read_rows(connection, table, key, wanted, key) if len(key) > 1 else wanted
        rows = read_rows(connection, table, key, present, [*key, *columns], lock=True)
        return Table(table, key, rows)

    credit = ("total_credit", "expavg_credit", "expavg_time")
    hosts = locked(host, ("id",), {(each.host_id,) for each in counted}, ["userid", "avg_turnaround", *credit])
    versions = locked(
        host_app_version,
        ("host_id", "app_version_id"),
        {each.version_key for each in counted},
        [name for name in _names(host_app_version) if name not in ("host_id", "app_version_id", "n_jobs_today")],
    )
    accounts = {(_account_of(hosts.get(each.host_id), each.row),) for each in valid}
    users = locked(user, ("id",), accounts, ["teamid", *credit])
    teams = locked(team, ("id",), {(int(row["teamid"]),) for row in users.rows.values() if row["teamid"]}, credit)

    def of_app(table: sa.Table, owner: Callable[[Row], int], name: str) -> Table:
        keys = {(owner(each.row), int(each.row["appid"]), TOTAL_CREDIT) for each in by_app}
        return locked(table, (name, "appid", "credit_type"), keys, ("njobs", "total", "expavg", "expavg_time"))

    return Books(
        policy=policy,
        now=now,
        hosts=hosts,
        host_versions=versions,
        users=users,
        teams=teams,
        by_user=of_app(credit_user, lambda row: int(row["userid"]), "userid"),
        by_team=of_app(credit_team, lambda row: int(row["teamid"]), "teamid"),
        app_versions=locked(
            app_version,
            ("id",),
            {(int(each.row["app_version_id"]),) for each in valid if int(each.row["app_version_id"]) > 0},
            ("pfc_n", "pfc_avg", "expavg_credit", "expavg_time"),
        ),
        trust=locked(
            gt_trust,
            ("host_id", "kind"),
            {(each.host_id, each.kind) for each in counted},
            [name for name in _names(gt_trust) if name not in ("host_id", "kind")],
        ),
    )


def _names(table: sa.Table) -> list[str]:
    return [column.name for column in table.columns]


def write_results(connection: Connection, judged: Sequence[Judged], outliers: set[int]) -> None:
    """The result rows of these verdicts, in the same transaction as the books."""
    changes: dict[Key, dict[str, Any]] = {}
    for each in judged:
        values: dict[str, Any] = {"validate_state": int(each.change.validate_state)}
        if each.change.validate_state == ValidateState.VALID:
            values["granted_credit"] = each.credit
            values["runtime_outlier"] = int(int(each.row["id"]) in outliers)
        if each.change.outcome is not None:
            values["outcome"] = int(each.change.outcome)
        changes[(int(each.row["id"]),)] = values
    update_rows(connection, result, ("id",), changes)


def _account_of(owner: Row | None, row: Row) -> int:
    """Who is credited: the host's user, as in BOINC; the result's if the host is gone or was merged."""
    return int(owner["userid"] if owner and owner["userid"] else row["userid"])


def _turnaround_average(owner: Row, row: Row) -> float:
    turnaround = sane_seconds(row["received_time"] - row["sent_time"])
    old = sane_seconds(owner["avg_turnaround"])
    return turnaround if old == 0 else TURNAROUND_OLD_SHARE * old + (1 - TURNAROUND_OLD_SHARE) * turnaround


def _take_sample(kept: dict[str, Any], name: str, value: float) -> None:
    columns = [f"{name}_{part}" for part in ("n", "avg", "var", "q")]
    n, average, variance, q = (float(kept[column]) for column in columns)
    fresh = RunningVariance(n, average, variance, q).updated(value, HOST_VERSION_SMOOTHING)
    kept.update(zip(columns, (fresh.n, fresh.average, fresh.variance, fresh.q), strict=True))


def sane_seconds(value: Any) -> float:
    """A duration that a client or a clock claims, as a finite number from 0 to 90 days."""
    number = float(value or 0)
    return min(max(number, 0.0), MAX_ELAPSED_S) if math.isfinite(number) else 0.0


def _finite(value: Any) -> float:
    number = float(value)
    return number if math.isfinite(number) else 0.0
