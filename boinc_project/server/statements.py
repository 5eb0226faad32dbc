"""SQL statements compiled once, and run on SQLite's own cursor.

SQLAlchemy builds and checks a statement anew each time it is executed, which costs ten times what SQLite
needs to run it. The scheduler and the transitioner run the same few statements for every request, so they
compile them here once. Only the embedded server does this. On MariaDB the way to the server takes longer than
all that; there the text goes through SQLAlchemy, which knows lost connections.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import mysql, sqlite
from sqlalchemy.engine import Connection

from boinc_project.database import BlobText, Varchar, finite, new_row

_SQLITE = sqlite.dialect(paramstyle="named")
_MYSQL = mysql.dialect(paramstyle="pyformat")


class Statement:
    """One compiled statement; its `bindparam`s are the keyword arguments of `rows`, `first` and `run`.

    `sqlite_index` and `mysql_index` name the index to be used for the first table of a SELECT's join: SQLite's
    planner has no statistics and would often rather sort the whole table, and MariaDB's are out of date while a
    table is small. The index must exist when the statement runs.
    """

    def __init__(
        self, clause: sa.sql.expression.ClauseElement, *, sqlite_index: str = "", mysql_index: str = ""
    ) -> None:
        compiled = clause.compile(dialect=_SQLITE)
        self.sqlite = _with_index(str(compiled), " JOIN ", f"INDEXED BY {sqlite_index}" if sqlite_index else "")
        text = str(clause.compile(dialect=_MYSQL))
        self.mysql = _with_index(text, " INNER JOIN ", f"FORCE INDEX ({mysql_index})" if mysql_index else "")
        self._fixed = {name: value for name, value in compiled.params.items() if value is not None}
        columns = clause.selected_columns if isinstance(clause, sa.Select) else ()
        self._blobs = tuple(column.name for column in columns if isinstance(column.type, BlobText))

    def rows(self, connection: Connection, **parameters: Any) -> list[dict[str, Any]]:
        """All rows, as dicts by column name."""
        if connection.dialect.name == "sqlite":
            cursor = self._execute(connection, parameters)
            names = [column[0] for column in cursor.description]
        else:
            cursor = self._execute(connection, parameters)
            names = list(cursor.keys())
        found = [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
        for name in self._blobs:
            for row in found:
                row[name] = _as_text(row[name])
        return found

    def first(self, connection: Connection, **parameters: Any) -> dict[str, Any] | None:
        """The first row, None if there is none."""
        found = self.rows(connection, **parameters)
        return found[0] if found else None

    def run(self, connection: Connection, **parameters: Any) -> int:
        """Execute; returns the number of matched rows."""
        return int(self._execute(connection, parameters).rowcount)

    def _execute(self, connection: Connection, parameters: Mapping[str, Any]) -> Any:
        """SQLite's cursor, or SQLAlchemy's result."""
        given = {**self._fixed, **parameters} if self._fixed else dict(parameters)
        if connection.dialect.name == "sqlite":
            raw: Any = connection.connection.dbapi_connection
            return raw.execute(self.sqlite, given)
        return connection.exec_driver_sql(self.mysql, given)


def _with_index(sql: str, join: str, hint: str) -> str:
    if not hint:
        return sql
    head, found, tail = sql.partition(join)
    assert found, sql
    return f"{head} {hint}{join}{tail}"


def _as_text(value: Any) -> str | None:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def update_row(connection: Connection, table: sa.Table, row_id: int, columns: Mapping[str, Any]) -> int:
    """UPDATE columns of the row with this id; returns the number of matched rows."""
    statement = _update(table, tuple(columns))
    return statement.run(connection, row_id=row_id, **_stored(table, columns))


def insert_row(connection: Connection, table: sa.Table, columns: Mapping[str, Any]) -> None:
    """INSERT a row; columns that are not given get BOINC's defaults (see `new_row`)."""
    row = new_row(table, **columns)
    _insert(table, tuple(row)).run(connection, **_stored(table, row))


@functools.cache
def _update(table: sa.Table, names: tuple[str, ...]) -> Statement:
    values: dict[str, Any] = {name: sa.bindparam(name) for name in names}
    return Statement(table.update().where(table.c.id == sa.bindparam("row_id")).values(values))


@functools.cache
def _insert(table: sa.Table, names: tuple[str, ...]) -> Statement:
    return Statement(table.insert().values({name: sa.bindparam(name) for name in names}))


def _stored(table: sa.Table, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Values as the database keeps them: text of blob columns as bytes, nothing longer than its column, numbers."""
    stored = dict(columns)
    kinds = _text_columns(table)
    for name, value in stored.items():
        if isinstance(value, float):
            finite(value)
        elif isinstance(value, str) and (kind := kinds.get(name)) is not None:
            if isinstance(kind, Varchar):
                kind.checked(value)
            else:
                stored[name] = kind.process_bind_param(value, _SQLITE)
    return stored


@functools.cache
def _text_columns(table: sa.Table) -> dict[str, BlobText | Varchar]:
    return {column.name: column.type for column in table.c if isinstance(column.type, (BlobText, Varchar))}
