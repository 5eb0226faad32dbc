"""`trust`: how far hosts can be relied on, which groups of them drift, and whose copies count as no vote."""

from __future__ import annotations

import time
from pathlib import Path

import click
import sqlalchemy as sa
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from sqlalchemy.engine import Connection

from boinc_project import store
from boinc_project.cli.errors import Mistake
from boinc_project.cli.project import open_project, project_option
from boinc_project.cli.status import ago, blocked_table, refutation
from boinc_project.cli.tables import table
from boinc_project.database import Database
from boinc_project.gt_tables import gt_blocked, gt_trust
from boinc_project.reliability import is_trusted, reliability
from validator.drift import USUAL, Finding, Limits, findings
from validator.records import blocked_groups, judged_pairs, limits_of

SHOWN = 30
DIGEST_SHOWN = 6
SORTS = ("host", "user", "version", "class", "device", "driver", "cpu")
NUMBERED = ("host", "user", "version")  # by their ids in the database


@click.group()
def trust() -> None:
    """Reliability of hosts, groups that drift, and groups whose results count as no vote."""


@trust.command()
@project_option
def show(project_dir: Path | None) -> None:
    """Show hosts with their records, groups with what the test for drift says, and what is blocked."""
    tree = open_project(project_dir)
    with tree.database() as database:
        store.create_own_tables(database)
        Console().print(render(database, time.time(), limits_of(tree.config)))


@trust.command()
@click.argument("group")
@click.option("--note", default="", help="Why, for those who look at it later.")
@project_option
def block(group: str, note: str, project_dir: Path | None) -> None:
    """Make results of GROUP (such as host:12 or class:cuda_gt) count as no vote; further copies are asked for."""
    sort, _, value = group.partition(":")
    if sort not in SORTS or value != value.strip() or not value or (sort in NUMBERED and not value.isdecimal()):
        known = ", ".join(f"{each}:{'NUMBER' if each in NUMBERED else 'NAME'}" for each in SORTS)
        raise Mistake(f"{group!r} is no group; write one of {known}, as trust show does")
    with open_project(project_dir).database() as database:
        store.create_own_tables(database)

        def blocked(connection: Connection) -> bool:
            if group in blocked_groups(connection):
                return False
            connection.execute(gt_blocked.insert(), {"name": group, "create_time": time.time(), "note": note})
            return True

        done = database.repeated(blocked)
    click.echo(f"{group} is blocked" if done else f"{group} was blocked already")


@trust.command()
@click.argument("group")
@project_option
def unblock(group: str, project_dir: Path | None) -> None:
    """Let results of GROUP vote again, also those that wait for others to agree with them."""
    with open_project(project_dir).database() as database:
        store.create_own_tables(database)

        def unblocked(connection: Connection) -> bool:
            delete = gt_blocked.delete().where(gt_blocked.c.name == group)
            found = bool(connection.execute(delete).rowcount)
            if found:
                store.judge_again(connection)
            return found

        if not database.repeated(unblocked):
            raise Mistake(f"{group!r} is not blocked; boinc-train trust show lists what is")
    click.echo(f"{group} votes again")


def render(database: Database, now: float, limits: Limits = USUAL) -> Group:
    """The whole picture as tables. Names of devices came from volunteers and are escaped."""
    with database.read() as connection:
        return Group(
            _host_table(connection, now),
            _group_table(findings(judged_pairs(connection, now), limits)),
            blocked_table(connection),
        )


def _host_table(connection: Connection, now: float) -> Table:
    query = sa.select(gt_trust).order_by(gt_trust.c.failed_check.desc(), gt_trust.c.judge_time.desc()).limit(SHOWN)
    rows = [dict(each) for each in connection.execute(query).mappings()]
    remarks = [escape(refutation(connection, row)) for row in rows]
    names = ["host", "kind", "valid", "differs", "faulty", "reliable", "alone", "judged"]
    found = table(*names, *(["remarks"] if any(remarks) else []), title="hosts")
    for row, remark in zip(rows, remarks, strict=True):
        cells = [
            str(row["host_id"]),
            escape(kind_text(str(row["kind"]))),
            *(str(row[name]) for name in ("valid", "differing", "faulty")),
            f"{reliability(row, now):.2f}" + (" (trusted)" if is_trusted(row, now) else ""),
            str(row["alone"]),
            ago(float(row["judge_time"])),
        ]
        found.add_row(*cells, *([remark] if any(remarks) else []))
    return found


def kind_text(kind: str) -> str:
    """A kind of work for people: its mode and the beginning of its graph's digest, in words that a table can wrap."""
    mode, _, digest = kind.partition(":")
    return f"{mode.replace('-', ' ')} {digest[:DIGEST_SHOWN]}"


def _group_table(made: list[Finding]) -> Table:
    found = table("group", "pairs", "median distance", "times the others'", "p", "verdict", title="groups")
    for one in made[:SHOWN]:
        verdict = "drifts" if one.drifts else ""
        found.add_row(
            escape(one.group), str(one.pairs), f"{one.median:.2g}", f"{one.ratio:.2g}", f"{one.p:.2g}", verdict
        )
    return found
