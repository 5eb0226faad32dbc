"""SQL statements compiled once and run on SQLite's own cursor.

SQLAlchemy builds and checks a statement anew each time it is executed, which costs ten times what SQLite
needs to run it. The scheduler and the transitioner run the same few statements for every request, so they
compile them here once. Only the embedded server does this, so only SQLite is meant.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import sqlite
from sqlalchemy.engine import Connection

from boinc_project.database import BlobText, new_row

_DIALECT = sqlite.dialect(paramstyle="named")


class Statement:
    """One compiled statement; its `bindparam`s are the keyword arguments of `rows`, `first` and `run`.

    `index` names the index that SQLite must use for the first table of a SELECT's join: its planner has no
    statistics and would often rather sort the whole table. The index must exist when the statement runs.
    """

    def __init__(self, clause: sa.sql.expression.ClauseElement, *, index: str = "") -> None:
        compiled = clause.compile(dialect=_DIALECT)
        self.sql = str(compiled)
        if index:
            head, join, tail = self.sql.partition(" JOIN ")
            assert join, self.sql
            self.sql = f"{head} INDEXED BY {index}{join}{tail}"
        self._fixed = {name: value for name, value in compiled.params.items() if value is not None}
        columns = clause.selected_columns if isinstance(clause, sa.Select) else ()
        self._blobs = tuple(column.name for column in columns if isinstance(column.type, BlobText))

    def rows(self, connection: Connection, **parameters: Any) -> list[dict[str, Any]]:
        """All rows, as dicts by column name."""
        cursor = self._execute(connection, parameters)
        names = [column[0] for column in cursor.description]
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
        raw: Any = connection.connection.dbapi_connection
        return raw.execute(self.sql, {**self._fixed, **parameters} if self._fixed else parameters)


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
    """Values as the database keeps them: text of blob columns as bytes, within the column's limit."""
    stored = dict(columns)
    for name in _blob_columns(table):
        if isinstance(stored.get(name), str):
            stored[name] = _blob_type(table, name).process_bind_param(stored[name], _DIALECT)
    return stored


def _blob_type(table: sa.Table, name: str) -> BlobText:
    kind = table.c[name].type
    assert isinstance(kind, BlobText)
    return kind


@functools.cache
def _blob_columns(table: sa.Table) -> tuple[str, ...]:
    return tuple(column.name for column in table.c if isinstance(column.type, BlobText))
