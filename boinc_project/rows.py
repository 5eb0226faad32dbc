"""Many rows in one statement: read and locked by key, or updated each with values of its own.

Rows are locked by their primary or unique key only. On MariaDB that takes no locks on gaps between rows, so
that BOINC's own daemons, which write single rows and exit when a write fails, wait for milliseconds at most
and are never made the victim of a deadlock.

The statements are written out here rather than built by SQLAlchemy: with a value of its own for every row they
are long, and building them took longer than executing them. Names come from the tables' definitions, values go
as parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

Key = tuple[int | str, ...]
Values = Mapping[str, Any]

_CHUNK = 200  # rows of one statement


def read_rows(
    connection: Connection,
    table: sa.Table,
    key: Sequence[str],
    keys: Iterable[Key],
    columns: Sequence[str] | None = None,
    *,
    lock: bool = False,
) -> dict[Key, dict[str, Any]]:
    """The rows whose `key` columns have one of these values, by that key, in ascending order of it.

    `lock` keeps them locked until the transaction ends, and reads their newest committed values. The key must
    be a primary or unique one, and a locked row should be known to exist: looking for an absent one with a
    lock would bar others from inserting there.
    """
    names = list(columns or table.c.keys())
    dialect = connection.dialect
    processors = [
        (name, process)
        for name in names
        if (process := table.c[name].type.dialect_impl(dialect).result_processor(dialect, None)) is not None
    ]
    hint, locking = "", ""
    if lock and dialect.name != "sqlite":
        locking = " FOR UPDATE"
        if len(key) == 1 and table.c[key[0]].primary_key:
            hint = " FORCE INDEX (PRIMARY)"  # a small table would be scanned, and locked, as a whole
    found: dict[Key, dict[str, Any]] = {}
    wanted = sorted(set(keys))
    for start in range(0, len(wanted), _CHUNK):
        part = wanted[start : start + _CHUNK]
        condition, parameters = _is_one_of(connection, key, part)
        order = ", ".join(key)
        query = f"SELECT {', '.join(names)} FROM {_quoted(connection, table)}{hint} WHERE {condition} ORDER BY {order}"
        for values in connection.exec_driver_sql(query + locking, parameters):
            row = dict(zip(names, values, strict=True))
            for name, process in processors:
                row[name] = process(row[name])
            found[tuple(row[name] for name in key)] = row
    return found


def update_rows(connection: Connection, table: sa.Table, key: Sequence[str], changes: Mapping[Key, Values]) -> int:
    """Give each row the values of its own; returns the number of rows found. Rows with the same columns share
    a statement."""
    by_columns: dict[tuple[str, ...], list[Key]] = {}
    for identifier, values in sorted(changes.items()):
        if values:
            by_columns.setdefault(tuple(sorted(values)), []).append(identifier)
    matched = 0
    for names, identifiers in by_columns.items():
        for start in range(0, len(identifiers), _CHUNK):
            matched += _update(connection, table, key, identifiers[start : start + _CHUNK], names, changes)
    return matched


def _update(
    connection: Connection,
    table: sa.Table,
    key: Sequence[str],
    keys: Sequence[Key],
    names: Sequence[str],
    changes: Mapping[Key, Values],
) -> int:
    mark = _mark(connection)
    assignments: list[str] = []
    parameters: list[Any] = []
    for name in names:
        process = table.c[name].type.dialect_impl(connection.dialect).bind_processor(connection.dialect)
        values = [changes[each][name] if process is None else process(changes[each][name]) for each in keys]
        if all(type(value) is type(values[0]) and value == values[0] for value in values):
            assignments.append(f"{name} = {mark}")
            parameters.append(values[0])
        elif len(key) == 1:
            assignments.append(f"{name} = CASE {key[0]}{f' WHEN {mark} THEN {mark}' * len(keys)} END")
            for each, value in zip(keys, values, strict=True):
                parameters += (each[0], value)
        else:
            this = " AND ".join(f"{part} = {mark}" for part in key)
            assignments.append(f"{name} = CASE{f' WHEN {this} THEN {mark}' * len(keys)} END")
            for each, value in zip(keys, values, strict=True):
                parameters += (*each, value)
    condition, more = _is_one_of(connection, key, keys)
    statement = f"UPDATE {_quoted(connection, table)} SET {', '.join(assignments)} WHERE {condition}"
    return int(connection.exec_driver_sql(statement, (*parameters, *more)).rowcount)


def _is_one_of(connection: Connection, key: Sequence[str], keys: Sequence[Key]) -> tuple[str, tuple[Any, ...]]:
    """A condition, and its parameters."""
    mark = _mark(connection)
    if len(key) == 1:
        return f"{key[0]} IN ({', '.join([mark] * len(keys))})", tuple(each[0] for each in keys)
    this = "(" + " AND ".join(f"{part} = {mark}" for part in key) + ")"
    return " OR ".join([this] * len(keys)), tuple(value for each in keys for value in each)


def _mark(connection: Connection) -> str:
    """How the driver writes a parameter."""
    return {"qmark": "?", "format": "%s", "pyformat": "%s"}[connection.dialect.paramstyle]


def _quoted(connection: Connection, table: sa.Table) -> str:
    return connection.dialect.identifier_preparer.format_table(table)
