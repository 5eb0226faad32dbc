"""`status`: jobs, versions, losses, the queue, hosts and daemons at a glance."""

from __future__ import annotations

import json
import shlex
import time
from collections import Counter
from pathlib import Path
from typing import Any

import click
import sqlalchemy as sa
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from boinc_project import store
from boinc_project.cli.project import open_project, project_option
from boinc_project.cli.tables import table
from boinc_project.database import Database, app, host, result
from boinc_project.gt_tables import (
    Disposition,
    gt_blocked,
    gt_drift,
    gt_job,
    gt_ledger,
    gt_recheck,
    gt_trust,
    gt_version,
)
from boinc_project.states import Outcome, ServerState, ValidateState
from validator.rechecks import summary
from validator.traces import accepted_alone

DAEMON_LATE_S = 60.0
HOSTS_SHOWN = 20
ERRORS_SHOWN = 5
RECENT_RESULTS = 500  # in which errors are looked for
RECENT_GRADIENTS = 100  # over which their age is averaged
QUEUE_COLUMNS = ("unsent", "sent", "waiting", "valid", "invalid", "error", "late")


@click.command()
@project_option
@click.option("--watch", is_flag=True, help="Refresh every two seconds until Ctrl-C.")
def status(project_dir: Path | None, watch: bool) -> None:
    """Show jobs, model versions, losses, work in progress, hosts and daemons."""
    tree = open_project(project_dir)
    with tree.database() as database:
        if not watch:
            Console().print(render(database))
            return
        with Live(render(database), refresh_per_second=2, console=Console()) as live:
            while True:
                time.sleep(2)
                live.update(render(database))


def render(database: Database) -> Group:
    """The whole picture as tables. Text that came from volunteers is escaped."""
    with database.read() as connection:
        if not sa.inspect(connection).has_table(gt_job.name):
            return Group("The project has no jobs yet; make one with boinc-train job create.")
        jobs = store.jobs(connection)
        return Group(
            *_job_tables(connection, jobs),
            _queue_table(connection, jobs),
            *_error_tables(connection, jobs),
            _host_table(connection, jobs),
            *_refuted_tables(connection),
            *_drift_tables(connection),
            _daemon_table(connection),
        )


def _job_tables(connection: sa.Connection, jobs: list[store.JobRow]) -> tuple[Table, Table]:
    """Where the jobs are, and how their training goes."""
    where = table("job", "state", "version", "last", "note", title="jobs")
    training = table("job", "loss", "held-out", "s/version", "staleness", title="training")
    for job in jobs:
        versions = store.versions(connection, job.id)
        losses = [row["loss"] for row in versions if row["loss"] is not None]
        evaluated = [row["evaluation"] for row in versions if row["evaluation"]]
        times = [float(row["create_time"]) for row in versions]
        pace = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None
        where.add_row(
            job.name,
            job.state,
            f"{job.current_version}/{job.config.train.max_versions}",
            ago(times[-1]) if times else "",
            escape("; ".join(filter(None, (job.note, anchor_note(connection, job))))),
        )
        training.add_row(
            job.name,
            f"{losses[-1]:.4g}" if losses else "",
            escape(metrics_text(evaluated[-1])) if evaluated else "",
            f"{pace:.1f}" if pace else "",
            staleness(connection, job.id),
        )
    return where, training


def anchor_note(connection: sa.Connection, job: store.JobRow) -> str:
    """How far the server's own gradient lags behind, where the policy needs one; '' for other jobs."""
    if job.config.train.policy != "anchored":
        return ""
    newest, section = store.newest_anchor(connection, job), job.config.aggregation
    if newest < 0:
        return "no anchor yet: versions are made without one"
    behind = job.current_version - newest
    if behind > section.anchor_max_age:
        return (
            f"anchor of version {newest} is {behind} versions old, over anchor_max_age ({section.anchor_max_age}):"
            " versions are made without one; the server is too slow for them"
        )
    lags = f", {behind - section.anchor_every} more than anchor_every" if behind > section.anchor_every else ""
    return f"anchor of version {newest}, {behind} behind{lags}"


def staleness(connection: sa.Connection, job_id: int) -> str:
    """How old the newest gradients were when they were applied: in versions, and in time from base to new version."""
    base, made = gt_version.alias(), gt_version.alias()
    query = (
        sa.select(gt_ledger.c.applied_version - 1 - gt_ledger.c.base_version, made.c.create_time - base.c.create_time)
        .join(base, sa.and_(base.c.job_id == job_id, base.c.version == gt_ledger.c.base_version))
        .join(made, sa.and_(made.c.job_id == job_id, made.c.version == gt_ledger.c.applied_version))
        .where(gt_ledger.c.job_id == job_id, gt_ledger.c.disposition == str(Disposition.APPLIED))
        .order_by(gt_ledger.c.applied_version.desc())
        .limit(RECENT_GRADIENTS)
    )
    found = [(float(versions), float(seconds)) for versions, seconds in connection.execute(query)]
    if not found:
        return ""
    versions, seconds = (sum(column) / len(found) for column in zip(*found, strict=True))
    return f"{versions:.2g} versions, {seconds:.0f} s"


def _error_tables(connection: sa.Connection, jobs: list[store.JobRow]) -> list[Table]:
    """How tasks failed lately, the commonest first; nothing where none did."""
    found = table("errors of", "exit status", "tasks", "hosts", "last words", title=f"last {RECENT_RESULTS} tasks")
    for appid in sorted({job.appid for job in jobs}):
        name = str(connection.execute(sa.select(app.c.name).where(app.c.id == appid)).scalar())
        newest = (
            sa.select(result.c.id, result.c.outcome)
            .where(result.c.appid == appid, result.c.server_state == int(ServerState.OVER))
            .order_by(result.c.id.desc())
            .limit(RECENT_RESULTS)
        )
        failed = [int(i) for i, outcome in connection.execute(newest) if int(outcome) == int(Outcome.CLIENT_ERROR)]
        columns = (result.c.exit_status, result.c.hostid, result.c.stderr_out)
        rows = connection.execute(sa.select(*columns).where(result.c.id.in_(failed)).order_by(result.c.id)).all()
        by_status: dict[int, list[tuple[int, str]]] = {}
        for status, host_id, text in rows:
            by_status.setdefault(int(status), []).append((int(host_id), str(text or "")))
        for status, tasks in sorted(by_status.items(), key=lambda item: -len(item[1]))[:ERRORS_SHOWN]:
            words = store.last_words([text for _, text in tasks])
            found.add_row(escape(name), str(status), str(len(tasks)), _on_hosts([h for h, _ in tasks]), escape(words))
    return [found] if found.row_count else []


def _on_hosts(hosts: list[int]) -> str:
    """How many hosts these are, and which one, by its id, if most are the same: a broken computer."""
    counts = Counter(hosts)
    worst, most = counts.most_common(1)[0]
    if most == 1 or 2 * most <= len(hosts):
        return str(len(counts))
    return f"1: #{worst}" if len(counts) == 1 else f"{len(counts)}, mostly #{worst}"


def _queue_table(connection: sa.Connection, jobs: list[store.JobRow]) -> Table:
    found = table("app", "unsent", "in progress", "to judge", "valid", "invalid", "errors", "no reply", title="work")
    for appid in sorted({job.appid for job in jobs}):
        counts = result_counts(connection, appid)
        name = connection.execute(sa.select(app.c.name).where(app.c.id == appid)).scalar()
        found.add_row(escape(str(name)), *(str(counts[key]) for key in QUEUE_COLUMNS))
    return found


def result_counts(connection: sa.Connection, appid: int) -> dict[str, int]:
    """Numbers of results of the app by what became of them."""
    counts = {"unsent": 0, "sent": 0, "valid": 0, "invalid": 0, "error": 0, "late": 0, "waiting": 0, "unneeded": 0}
    columns = (result.c.server_state, result.c.outcome, result.c.validate_state)
    query = sa.select(*columns, sa.func.count()).where(result.c.appid == appid).group_by(*columns)
    for state, outcome, validated, number in connection.execute(query):
        counts[_kind(int(state), int(outcome), int(validated))] += int(number)
    return counts


def _kind(state: int, outcome: int, validated: int) -> str:
    if state != ServerState.OVER:
        return "sent" if state == ServerState.IN_PROGRESS else "unsent"
    if outcome == Outcome.NO_REPLY:
        return "late"
    if outcome == Outcome.SUCCESS:
        return {ValidateState.VALID: "valid", ValidateState.INVALID: "invalid"}.get(ValidateState(validated), "waiting")
    if outcome == Outcome.VALIDATE_ERROR:
        return "invalid"
    return "unneeded" if outcome == Outcome.DIDNT_NEED else "error"


def _host_table(connection: sa.Connection, jobs: list[store.JobRow]) -> Table:
    found = table("host", "user", "name", "CPUs", "credit", "in progress", "last contact", title="hosts")
    in_progress = (
        sa.select(result.c.hostid, sa.func.count())
        .where(
            result.c.server_state == int(ServerState.IN_PROGRESS),
            result.c.appid.in_(sorted({job.appid for job in jobs})),
        )
        .group_by(result.c.hostid)
    )
    busy = {int(host_id): int(number) for host_id, number in connection.execute(in_progress)}
    query = sa.select(host).where(host.c.userid != 0).order_by(host.c.rpc_time.desc()).limit(HOSTS_SHOWN)
    for row in connection.execute(query).mappings():
        found.add_row(
            str(row["id"]),
            str(row["userid"]),
            escape(str(row["domain_name"] or "")),
            str(row["p_ncpus"]),
            f"{row['total_credit']:.3g}",
            str(busy.get(row["id"], 0)),
            ago(float(row["rpc_time"])),
        )
    return found


def _refuted_tables(connection: sa.Connection) -> list[Table]:
    """Hosts that returned something else than their task; nothing where there are none."""
    found = table("host", "kind", "what", title="caught with wrong results")
    if not sa.inspect(connection).has_table(gt_recheck.name):  # no validator of this release has run yet
        return []
    looked_at = sa.select(gt_recheck.c.host_id).where(gt_recheck.c.kind == gt_trust.c.kind)
    query = sa.select(gt_trust).where((gt_trust.c.failed_check > 0) | gt_trust.c.host_id.in_(looked_at))
    query = query.order_by(gt_trust.c.failed_check.desc(), gt_trust.c.judge_time.desc())
    for row in connection.execute(query.limit(HOSTS_SHOWN)).mappings():
        found.add_row(str(row["host_id"]), escape(str(row["kind"])), escape(refutation(connection, dict(row))))
    return [found] if found.row_count else []


def _drift_tables(connection: sa.Connection) -> list[Table]:
    """Groups of hosts that drifted when the validator last looked, and those whose results are no vote; nothing where
    there are none."""
    found = table(
        "group", "pairs", "median distance", "times the others'", "tested", "command", title="groups that drift"
    )
    if not sa.inspect(connection).has_table(gt_drift.name):  # no validator of this release has run yet
        return []
    blocked = set(connection.scalars(sa.select(gt_blocked.c.name)))
    for row in connection.execute(sa.select(gt_drift).order_by(gt_drift.c.ratio.desc())).mappings():
        name = str(row["name"])
        advice = "blocked" if name in blocked else f"boinc-train trust block {shlex.quote(name)}"
        numbers = (str(row["pairs"]), f"{row['median']:.2g}", f"{row['ratio']:.2g}", ago(float(row["test_time"])))
        found.add_row(escape(name), *numbers, escape(advice))
    return [each for each in (found, blocked_table(connection)) if each.row_count]


def blocked_table(connection: sa.Connection) -> Table:
    """Groups whose results are no vote, with the command that lets each vote again."""
    found = table("blocked group", "since", "note", "command", title="blocked")
    for row in connection.execute(sa.select(gt_blocked).order_by(gt_blocked.c.name)).mappings():
        name, since = str(row["name"]), ago(float(row["create_time"]))
        command = f"boinc-train trust unblock {shlex.quote(name)}"
        found.add_row(escape(name), since, escape(str(row["note"])), escape(command))
    return found


def refutation(connection: sa.Connection, row: store.Row) -> str:
    """When the server refuted a host, and what had been accepted from it alone before; '' if it never has."""
    again = str(summary(connection, int(row["host_id"]), str(row["kind"])))
    if not row["failed_check"]:
        return f"failed an audit; {again}" if again else ""
    names = accepted_alone(connection, int(row["host_id"]), str(row["kind"]))
    unchecked = f"; accepted without a second copy before: {', '.join(names)}" if names else ""
    return f"refuted {ago(float(row['failed_check']))}{unchecked}" + (f"; {again}" if again else "")


def _daemon_table(connection: sa.Connection) -> Table:
    found = table("daemon", "process", "last pass", title="daemons")
    for row in store.heartbeats(connection):
        late = time.time() - float(row["time"]) > DAEMON_LATE_S
        found.add_row(str(row["daemon"]), str(row["pid"]), ago(float(row["time"])) + (" (late)" if late else ""))
    return found


def metrics_text(evaluation: str) -> str:
    """`accuracy 0.953, loss 0.1234` from a version's evaluation."""
    found: dict[str, Any] = json.loads(evaluation)
    return ", ".join(f"{name} {value:.4g}" for name, value in sorted(found.items()))


def ago(moment: float) -> str:
    """How long ago, in words as short as can be."""
    if not moment:
        return "never"
    seconds = max(0.0, time.time() - moment)
    for limit, unit, size in ((120, "s", 1), (7200, "min", 60), (172800, "h", 3600)):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds / 86400:.0f} d ago"
