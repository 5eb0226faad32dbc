"""`status`: jobs, versions, losses, the queue, hosts and daemons at a glance."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click
import sqlalchemy as sa
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Column, Table

from boinc_project import store
from boinc_project.cli.project import open_project, project_option
from boinc_project.database import Database, app, host, result
from boinc_project.gt_tables import gt_job
from boinc_project.states import Outcome, ServerState, ValidateState

DAEMON_LATE_S = 60.0
HOSTS_SHOWN = 20
QUEUE_COLUMNS = ("unsent", "sent", "valid", "invalid", "error", "late")


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
            _job_table(connection, jobs),
            _queue_table(connection, jobs),
            _host_table(connection),
            _daemon_table(connection),
        )


def column(title: str) -> Column:
    """A column that is never cut, for names that one copies into the next command."""
    return Column(title, overflow="fold", no_wrap=False, min_width=12)


def _job_table(connection: sa.Connection, jobs: list[store.JobRow]) -> Table:
    table = Table(column("job"), "state", "version", "loss", "held-out", "s/version", "last", "note", title="jobs")
    for job in jobs:
        versions = store.versions(connection, job.id)
        losses = [row["loss"] for row in versions if row["loss"] is not None]
        evaluated = [row["evaluation"] for row in versions if row["evaluation"]]
        times = [float(row["create_time"]) for row in versions]
        pace = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None
        table.add_row(
            job.name,
            job.state,
            f"{job.current_version}/{job.config.train.max_versions}",
            f"{losses[-1]:.4g}" if losses else "",
            metrics_text(evaluated[-1]) if evaluated else "",
            f"{pace:.1f}" if pace else "",
            ago(times[-1]) if times else "",
            escape(job.note),
        )
    return table


def _queue_table(connection: sa.Connection, jobs: list[store.JobRow]) -> Table:
    table = Table("results of", "unsent", "in progress", "valid", "invalid", "errors", "no reply", title="work")
    for appid in sorted({job.appid for job in jobs}):
        counts = result_counts(connection, appid)
        name = connection.execute(sa.select(app.c.name).where(app.c.id == appid)).scalar()
        table.add_row(escape(str(name)), *(str(counts[key]) for key in QUEUE_COLUMNS))
    return table


def result_counts(connection: sa.Connection, appid: int) -> dict[str, int]:
    """Numbers of results of the app by what became of them."""
    counts = {"unsent": 0, "sent": 0, "valid": 0, "invalid": 0, "error": 0, "late": 0, "waiting": 0}
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
    return "waiting" if outcome == Outcome.DIDNT_NEED else "error"


def _host_table(connection: sa.Connection) -> Table:
    table = Table("host", "user", "name", "processors", "credit", "in progress", "last contact", title="hosts")
    in_progress = (
        sa.select(result.c.hostid, sa.func.count())
        .where(result.c.server_state == int(ServerState.IN_PROGRESS))
        .group_by(result.c.hostid)
    )
    busy = {int(host_id): int(number) for host_id, number in connection.execute(in_progress)}
    query = sa.select(host).where(host.c.userid != 0).order_by(host.c.rpc_time.desc()).limit(HOSTS_SHOWN)
    for row in connection.execute(query).mappings():
        table.add_row(
            str(row["id"]),
            str(row["userid"]),
            escape(str(row["domain_name"] or "")),
            str(row["p_ncpus"]),
            f"{row['total_credit']:.3g}",
            str(busy.get(row["id"], 0)),
            ago(float(row["rpc_time"])),
        )
    return table


def _daemon_table(connection: sa.Connection) -> Table:
    table = Table("daemon", "process", "last pass", title="daemons")
    for row in store.heartbeats(connection):
        late = time.time() - float(row["time"]) > DAEMON_LATE_S
        table.add_row(str(row["daemon"]), str(row["pid"]), ago(float(row["time"])) + (" (late)" if late else ""))
    return table


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
