"""On which database the tests' projects are made: SQLite, or a MariaDB server of the tests' own.

A module whose tests must hold on both says `pytestmark = pytest.mark.usefixtures("each_database")` (the fixture is
in conftest.py); each of its tests then runs once with each database, and whatever project it makes with
`tiny_project` is made there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pymysql
import pytest
import sqlalchemy as sa

from tests import mariadb

SQLITE, MARIADB, LAX_MARIADB = "sqlite", "mariadb", "lax mariadb"

#: SQL modes of the kinds that are MariaDB; None: the server's own, which is strict.
_SQL_MODES = {MARIADB: None, LAX_MARIADB: ""}

needs_mariadb = pytest.mark.skipif(bool(mariadb.MISSING), reason=mariadb.MISSING)

_chosen = [SQLITE]

Saved = dict[str, list[tuple[Any, ...]]]


def parameters(*kinds: str) -> list[Any]:
    """The kinds as parameters of a fixture or test; MariaDB's are skipped where it is missing."""
    return [pytest.param(kind, marks=[needs_mariadb] if kind in _SQL_MODES else [], id=kind) for kind in kinds]


#: For a claim that other tests make on MariaDB as well: there it is repeated in long runs only
#: (`@pytest.mark.parametrize("each_database", REPEATED, indirect=True)`).
REPEATED = [
    *parameters(SQLITE),
    *(pytest.param(MARIADB, marks=[*each.marks, pytest.mark.long], id=each.id) for each in parameters(MARIADB)),
]


@contextlib.contextmanager
def chosen(kind: str) -> Iterator[None]:
    """Projects made in this block lie on a database of this kind."""
    _chosen.append(kind)
    try:
        yield
    finally:
        _chosen.pop()


def current() -> str:
    return _chosen[-1]


def project_options() -> dict[str, str]:
    """Elements of config.xml that put a new project on an empty database of the current kind."""
    if current() == SQLITE:
        return {}
    return options_of(mariadb.new_database(_SQL_MODES[current()]))


def options_of(url: sa.URL) -> dict[str, str]:
    """Elements of config.xml that put a project on this database."""
    return {"gt_database_url": url.render_as_string(hide_password=False)}


@contextlib.contextmanager
def _administrator(url: sa.URL) -> Iterator[pymysql.cursors.Cursor]:
    with mariadb.server().connect() as connection, connection.cursor() as cursor:
        cursor.execute(f"USE {url.database}")
        cursor.execute("SET sql_mode='NO_AUTO_VALUE_ON_ZERO'")
        yield cursor


def _tables_with_rows(cursor: pymysql.cursors.Cursor) -> list[str]:
    cursor.execute("SHOW TABLES")
    names = [str(name) for (name,) in cursor.fetchall()]
    cursor.execute(
        " UNION ALL ".join(f"SELECT '{name}' FROM DUAL WHERE EXISTS (SELECT 1 FROM {name})" for name in names)
    )
    return [str(name) for (name,) in cursor.fetchall()]


def save(url: sa.URL) -> Saved:
    """All rows of a MariaDB database."""
    saved: Saved = {}
    with _administrator(url) as cursor:
        for name in _tables_with_rows(cursor):
            cursor.execute(f"SELECT * FROM {name}")
            saved[name] = list(cursor.fetchall())
    return saved


def restore(url: sa.URL, saved: Saved) -> None:
    """Give a MariaDB database these rows and no others. Ids go on from them, as in a copy of an SQLite file."""
    with _administrator(url) as cursor:
        present = _tables_with_rows(cursor)
        cursor.execute("BEGIN")
        for name in present:
            cursor.execute(f"DELETE FROM {name}")
        for name, rows in saved.items():
            cursor.executemany(f"INSERT INTO {name} VALUES ({', '.join(['%s'] * len(rows[0]))})", rows)
        cursor.execute("COMMIT")
        for name in present:
            if name not in _WITHOUT_IDS:
                cursor.execute(f"ALTER TABLE {name} AUTO_INCREMENT = 1")  # MariaDB makes the highest id + 1 of it


_WITHOUT_IDS = frozenset({"host_app_version", "credit_user", "credit_team", "credited_job"})
