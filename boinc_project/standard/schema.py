"""The live database against the schema that our code was written for."""

from __future__ import annotations

from collections.abc import Iterable

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from boinc_project import database
from boinc_project.gt_tables import gt_metadata

#: BOINC's tables that our daemons and commands read or write.
NEEDED = (
    database.platform,
    database.app,
    database.app_version,
    database.user,
    database.team,
    database.host,
    database.host_app_version,
    database.workunit,
    database.result,
)
#: Those of them into which we insert rows, so that a column that we do not know must have a default.
INSERTED = (database.app, database.workunit)


def missing(connection: Connection, tables: Iterable[sa.Table] = NEEDED) -> list[str]:
    """`table` or `table.column` for everything that we need and the database lacks."""
    inspector = sa.inspect(connection)
    there = set(inspector.get_table_names())
    lacking: list[str] = []
    for table in tables:
        if table.name not in there:
            lacking.append(table.name)
            continue
        columns = {str(column["name"]) for column in inspector.get_columns(table.name)}
        lacking += [f"{table.name}.{column}" for column in map(str, table.c.keys()) if column not in columns]
    return lacking


def unknown_without_default(connection: Connection) -> list[str]:
    """Columns of a newer or changed server that every INSERT must give, and ours does not."""
    inspector = sa.inspect(connection)
    there = set(inspector.get_table_names())
    return [
        f"{table.name}.{column['name']}"
        for table in INSERTED
        if table.name in there
        for column in inspector.get_columns(table.name)
        if column["name"] not in table.c
        and not column["nullable"]
        and column.get("default") is None
        and column.get("autoincrement") is not True
        and not column.get("computed")
    ]


def not_transactional(connection: Connection) -> list[str]:
    """Tables whose engine knows no transactions (MySQL's MyISAM), which would lose or double credit after a crash."""
    if connection.dialect.name == "sqlite":
        return []
    names = [table.name for table in (*NEEDED, *gt_metadata.sorted_tables)]
    query = sa.text(
        "SELECT table_name, engine FROM information_schema.tables"
        " WHERE table_schema = DATABASE() AND table_name IN :names"
    ).bindparams(sa.bindparam("names", expanding=True))
    return sorted(str(name) for name, engine in connection.execute(query, {"names": names}) if engine != "InnoDB")


def addable(connection: Connection) -> list[str]:
    """`table.column` of our tables that are there and lack it, where installing and starting a daemon add it."""
    there = [gt_metadata.tables[name] for name in own_tables(connection)[0]]
    columns = {f"{table.name}.{column.name}": column for table in there for column in table.columns}
    return [name for name in missing(connection, there) if columns[name].server_default is not None]


def own_tables(connection: Connection) -> tuple[list[str], list[str]]:
    """(ours that exist, ours that do not)."""
    there = set(sa.inspect(connection).get_table_names())
    names = [table.name for table in gt_metadata.sorted_tables]
    return [name for name in names if name in there], [name for name in names if name not in there]
