"""Which faults of a database mean "do it again", which mean "it is away", and which are neither."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pymysql
import pytest
from sqlalchemy.exc import DBAPIError

from boinc_project.database import Database, is_conflict, is_lost


def wrapped(original: Exception, *, invalidated: bool = False) -> DBAPIError:
    return DBAPIError("UPDATE t", {}, original, connection_invalidated=invalidated)


@pytest.mark.parametrize("number", [1020, 1205, 1213])
def test_a_transaction_that_gave_way_to_another_one_is_a_conflict_and_no_loss(number: int) -> None:
    error = wrapped(pymysql.err.OperationalError(number, "text"))
    assert is_conflict(error) and not is_lost(error)


@pytest.mark.parametrize("number", [1040, 1053, 1203, 1317, 1927, 2002, 2003, 2006, 2013, 2055, 4031])
def test_a_server_that_is_away_or_a_connection_that_is_gone_is_a_loss_and_no_conflict(number: int) -> None:
    error = wrapped(pymysql.err.OperationalError(number, "text"))
    assert is_lost(error) and not is_conflict(error)


def test_a_connection_that_the_driver_found_closed_is_a_loss() -> None:
    assert is_lost(wrapped(pymysql.err.InterfaceError(0, "")))
    assert is_lost(wrapped(pymysql.err.OperationalError(9999, "text"), invalidated=True))


@pytest.mark.parametrize(
    "original",
    [
        pymysql.err.IntegrityError(1062, "Duplicate entry"),
        pymysql.err.OperationalError(1045, "Access denied"),
        pymysql.err.OperationalError(1049, "Unknown database"),
        pymysql.err.ProgrammingError(1146, "Table doesn't exist"),
        pymysql.err.DataError(1406, "Data too long"),
        pymysql.err.ProgrammingError("nan can not be used with MySQL"),
        sqlite3.IntegrityError("UNIQUE constraint failed"),
    ],
)
def test_a_mistake_is_neither_a_conflict_nor_a_loss(original: Exception) -> None:
    assert not is_conflict(wrapped(original)) and not is_lost(wrapped(original))


def test_a_locked_sqlite_database_is_a_conflict(tmp_path: Path) -> None:
    path = tmp_path / "locked.sqlite"
    first, second = sqlite3.connect(path), sqlite3.connect(path, timeout=0)
    try:
        first.execute("BEGIN IMMEDIATE")
        with pytest.raises(sqlite3.OperationalError) as caught:
            second.execute("BEGIN IMMEDIATE")
    finally:
        first.close()
        second.close()
    assert is_conflict(wrapped(caught.value)) and not is_lost(wrapped(caught.value))


def test_a_missing_place_for_a_sqlite_database_is_a_loss(tmp_path: Path) -> None:
    with (
        Database(f"sqlite:///{tmp_path / 'nowhere' / 'x.sqlite'}") as db,
        pytest.raises(DBAPIError) as caught,
        db.read(),
    ):
        pass
    assert is_lost(caught.value) and not is_conflict(caught.value)
