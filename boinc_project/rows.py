"""Many rows in one statement: read and locked by key, or updated each with values of its own.

Rows are locked by their primary or unique key only. On MariaDB that takes no locks on gaps between rows, so
that BOINC's own daemons, which write single rows and exit when a write fails, wait for milliseconds at most
and are never made the victim of a deadlock.
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
    chosen = [table.c[name] for name in (columns or table.c.keys())]
    found: dict[Key, dict[str, Any]] = {}
    wanted = sorted(set(keys))
    for start in range(0, len(wanted), _CHUNK):
        query = sa.select(*chosen).where(_is_one_of(table, key, wanted[start : start + _CHUNK]))
        query = query.order_by(*(table.c[name] for name in key))
        if lock:
            query = query.with_for_update()
            if len(key) == 1 and table.c[key[0]].primary_key:
                for dialect in ("mysql", "mariadb"):  # a small table would be scanned, and locked, as a whole
                    query = query.with_hint(table, "FORCE INDEX (PRIMARY)", dialect)
        for row in connection.execute(query).mappings():
            found[tuple(row[name] for name in key)] = dict(row)
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
            part = identifiers[start : start + _CHUNK]
            values = {
                name: _each_its_own(table, key, part, [changes[each][name] for each in part], name) for name in names
            }
            done = connection.execute(sa.update(table).where(_is_one_of(table, key, part)).values(values))
            matched += done.rowcount
    return matched


def _is_one_of(table: sa.Table, key: Sequence[str], keys: Sequence[Key]) -> sa.ColumnElement[bool]:
    if len(key) == 1:
        return table.c[key[0]].in_([each[0] for each in keys])
    return sa.or_(*(_is(table, key, each) for each in keys))


def _is(table: sa.Table, key: Sequence[str], identifier: Key) -> sa.ColumnElement[bool]:
    return sa.and_(*(table.c[name] == value for name, value in zip(key, identifier, strict=True)))


def _each_its_own(table: sa.Table, key: Sequence[str], keys: Sequence[Key], values: Sequence[Any], name: str) -> Any:
    """An expression that is the row's own value; plainly the value where all rows get the same."""
    if all(type(value) is type(values[0]) and value == values[0] for value in values):
        return values[0]
    column = table.c[name]
    bound = [sa.bindparam(None, value, type_=column.type) for value in values]
    if len(key) == 1:
        pairs = dict(zip((each[0] for each in keys), bound, strict=True))
        return sa.case(pairs, value=table.c[key[0]], else_=column)
    return sa.case(*((_is(table, key, each), value) for each, value in zip(keys, bound, strict=True)), else_=column)
