"""What our code asks of a database, on a real MariaDB: strict and not, with BOINC's tables and with wide ids."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, StatementError

from assimilator.replay import replay
from boinc_project import database as tables
from boinc_project import templates
from boinc_project.config import ProjectConfig
from boinc_project.database import Database, is_conflict, is_lost, new_row
from boinc_project.gt_tables import JobState, gt_ledger, gt_metadata
from boinc_project.server.statements import insert_row
from tests import databases, mariadb
from tests.server_project import rows
from tests.tiny_project import TinyProject, tiny_project

pytestmark = databases.needs_mariadb

ALL_BYTES = bytes(range(256)) * 200
BEYOND_32_BITS = 2147483650
MODES = [pytest.param(None, id="strict"), pytest.param("", id="not strict")]


@pytest.fixture(params=MODES)
def db(request: pytest.FixtureRequest) -> Iterator[Database]:
    with Database(mariadb.new_database(request.param)) as made:
        made.create_tables(tables.metadata)
        yield made


def test_an_update_that_changes_nothing_counts_the_rows_it_found(db: Database) -> None:
    with db.transaction() as connection:
        insert_row(connection, tables.result, {"name": "r"})
    with db.transaction() as connection:
        change = sa.update(tables.app).values(weight=1.0)
        connection.execute(sa.insert(tables.app), new_row(tables.app, name="a", weight=1.0))
        assert connection.execute(change).rowcount == 1
        assert connection.execute(sa.text("UPDATE app SET weight = 1")).rowcount == 1


def test_blobs_hold_any_bytes_and_texts_any_character(db: Database) -> None:
    with db.transaction() as connection:
        connection.execute(sa.insert(tables.result), new_row(tables.result, name="a", stderr_out=ALL_BYTES))
        insert_row(connection, tables.result, {"name": "b", "xml_doc_in": "<é模🎉%s\\'\">", "stderr_out": "100 %"})
        row = new_row(tables.host, domain_name="Žofia 模型 🎉", p_model="%(x)s \\' \"")
        connection.execute(sa.insert(tables.host), row)
    with db.read() as connection:
        raw = connection.execute(sa.text("SELECT stderr_out FROM result WHERE name = 'a'")).scalar_one()
    assert raw == ALL_BYTES
    assert rows(db, tables.result, name="b")[0]["xml_doc_in"] == "<é模🎉%s\\'\">"
    (host,) = rows(db, tables.host)
    assert (host["domain_name"], host["p_model"]) == ("Žofia 模型 🎉", "%(x)s \\' \"")


def test_the_server_itself_renews_mod_time_whoever_changes_a_row(db: Database) -> None:
    with db.transaction() as connection:
        for table in (tables.workunit, tables.result, tables.team):
            connection.execute(sa.insert(table), new_row(table, name="x"))
            connection.execute(sa.text(f"UPDATE {table.name} SET mod_time = '2001-01-01 00:00:00'"))
    with db.transaction() as connection:
        connection.execute(sa.text("UPDATE workunit SET priority = 7"))
        connection.execute(sa.text("UPDATE result SET priority = 7"))
        connection.execute(sa.text("UPDATE team SET nusers = 7"))
    for table in (tables.workunit, tables.result, tables.team):
        assert rows(db, table)[0]["mod_time"].year > 2001


LONG = [
    (tables.workunit, "name", "w" * 191, "w" * 192),
    (tables.result, "name", "r" * 191, "r" * 192),
    (tables.workunit, "result_template_file", "t" * 63, "t" * 64),
    (tables.host, "domain_name", "模" * 254, "模" * 255),
    (tables.workunit, "xml_doc", "x" * 65535, "x" * 65536),
    (tables.result, "xml_doc_in", "é" * 32767, "é" * 32768),
]


@pytest.mark.parametrize(("table", "column", "longest", "too_long"), LONG, ids=lambda each: str(each)[:12])
def test_what_fits_is_kept_whole_and_what_does_not_is_refused_before_the_server_could_cut_it(
    db: Database, table: sa.Table, column: str, longest: str, too_long: str
) -> None:
    with db.transaction() as connection:
        connection.execute(sa.insert(table), new_row(table, **{column: longest}))
    for insert in (lambda c, row: c.execute(sa.insert(table), row), lambda c, row: insert_row(c, table, row)):
        with pytest.raises((StatementError, ValueError), match="does not fit"), db.transaction() as connection:
            insert(connection, new_row(table, **{column: too_long}))
    with pytest.raises(StatementError, match="does not fit"), db.transaction() as connection:
        connection.execute(sa.update(table).values({column: too_long}))
    (row,) = rows(db, table)
    assert row[column] == longest
    with db.read() as connection:
        if column == "name":  # any text may be looked for
            assert connection.execute(sa.select(table.c.id).where(table.c.name == too_long)).first() is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_never_reaches_the_server(db: Database, value: float) -> None:
    with pytest.raises(StatementError, match="not a number"), db.transaction() as connection:
        connection.execute(sa.insert(tables.result), new_row(tables.result, elapsed_time=value))
    with pytest.raises(ValueError, match="not a number"), db.transaction() as connection:
        insert_row(connection, tables.result, {"elapsed_time": value})
    assert not rows(db, tables.result)


def test_our_own_tables_refuse_the_same(db: Database) -> None:
    db.create_tables(gt_metadata)
    row = {
        "workunit_name": "w", "job_id": 1, "base_version": 0, "slot": 0, "payload_sha256": "", "payload_file": "",
        "samples": 1, "hostid": 1, "intake_time": 1.0, "disposition": "pending",
    }  # fmt: skip
    for wrong in ({"loss": float("nan")}, {"workunit_name": "w" * 192}):
        with pytest.raises(StatementError), db.transaction() as connection:
            connection.execute(sa.insert(gt_ledger), {**row, **wrong})
    with db.transaction() as connection:
        connection.execute(sa.insert(gt_ledger), {**row, "loss": None})


def test_tables_are_made_once_by_processes_that_start_together() -> None:
    url, faults = mariadb.new_database(), []

    def create() -> None:
        try:
            with Database(url) as db:
                db.create_tables(gt_metadata)
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=create) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


# Conflicts and losses as the server reports them.


def test_deadlock_is_a_conflict_and_serialized_work_is_done_again(db: Database) -> None:
    with db.transaction() as connection:
        for name in ("a", "b"):
            connection.execute(sa.insert(tables.app), new_row(tables.app, name=name, weight=0.0))
    barrier = threading.Barrier(2, timeout=30)
    calls: list[str] = []

    def work(order: tuple[str, str]) -> None:
        def both(connection: sa.Connection) -> None:
            calls.append(order[0])
            for number, name in enumerate(order):
                change = sa.update(tables.app).where(tables.app.c.name == name)
                connection.execute(change.values(weight=tables.app.c.weight + 1))
                if number == 0 and len(calls) <= 2:
                    barrier.wait()

        db.serialized(both)

    threads = [threading.Thread(target=work, args=(order,)) for order in (("a", "b"), ("b", "a"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 3, "one of the two was the victim"
    assert [row["weight"] for row in rows(db, tables.app)] == [2.0, 2.0]


def test_lock_wait_timeout_is_a_conflict(db: Database) -> None:
    with db.transaction() as connection:
        connection.execute(sa.insert(tables.app), new_row(tables.app, name="a"))
    with db.transaction() as holder:
        holder.execute(sa.update(tables.app).values(weight=2.0))
        with pytest.raises(DBAPIError) as caught, db.transaction() as connection:
            connection.exec_driver_sql("SET SESSION innodb_lock_wait_timeout = 1")
            connection.execute(sa.update(tables.app).values(weight=3.0))
    assert is_conflict(caught.value) and not is_lost(caught.value)


def test_row_that_changed_since_the_snapshot_is_a_conflict_where_the_server_says_so(db: Database) -> None:
    """innodb_snapshot_isolation, the default of MariaDB 11.6 and later."""
    with db.transaction() as connection:
        connection.execute(sa.insert(tables.app), new_row(tables.app, name="a"))
    with pytest.raises(DBAPIError) as caught, db.transaction() as connection:
        connection.exec_driver_sql("SET SESSION innodb_snapshot_isolation = ON")
        connection.execute(sa.select(tables.app)).all()
        with db.transaction() as other:
            other.execute(sa.update(tables.app).values(weight=2.0))
        connection.execute(sa.select(tables.app).with_for_update()).all()
    assert is_conflict(caught.value)


def test_killed_connection_and_silent_server_are_losses() -> None:
    url = mariadb.new_database().update_query_dict({"read_timeout": "1"})
    with Database(url) as db:
        with pytest.raises(DBAPIError) as killed, db.transaction() as connection:
            number = connection.exec_driver_sql("SELECT CONNECTION_ID()").scalar_one()
            mariadb.server().execute(f"KILL {number}")
            connection.exec_driver_sql("SELECT 1")
        with pytest.raises(DBAPIError) as silent, db.transaction() as connection:
            connection.exec_driver_sql("SELECT SLEEP(5)")
        assert is_lost(killed.value) and is_lost(silent.value)
        with db.read() as connection:
            assert connection.exec_driver_sql("SELECT 1").scalar_one() == 1
    with Database(url.set(port=1)) as nobody, pytest.raises(DBAPIError) as refused, nobody.read():
        pass
    assert is_lost(refused.value)


# Where the server is.


@pytest.mark.parametrize("host", ["", "localhost", "localhost:1", os.uname().nodename])
def test_localhost_means_the_servers_socket_as_in_boincs_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    url, server = mariadb.new_database(), mariadb.server()
    config = ProjectConfig.parse(
        f"<boinc><config><db_name>{url.database}</db_name><db_user>{url.username}</db_user>"
        f"<db_passwd>{url.password}</db_passwd><db_host>{host}</db_host></config></boinc>".encode(),
        tmp_path,
    )
    monkeypatch.setenv("MYSQL_UNIX_PORT", str(server.socket))
    with Database(config.database_url) as db, db.read() as connection:
        port, account = connection.exec_driver_sql("SELECT @@port, CURRENT_USER()").one()
        assert port == server.port and str(account).endswith("@localhost")
    monkeypatch.setenv("MYSQL_UNIX_PORT", str(tmp_path / "nothing here"))
    monkeypatch.setattr(tables, "MYSQL_SOCKETS", ())
    with Database(url.set(host="localhost")) as db, db.read() as connection:
        assert str(connection.exec_driver_sql("SELECT CURRENT_USER()").scalar_one()).endswith("@127.0.0.1")


# Large projects: an admin has widened the ids.

WIDE = {
    "workunit": ["id", "canonical_resultid"],
    "result": ["id", "workunitid"],
    "host": ["id", "userid"],
    "user": ["id"],
    "host_app_version": ["host_id"],
}


def widen(db: Database) -> None:
    with db.transaction() as connection:
        for table, names in WIDE.items():
            for name in names:
                automatic = " AUTO_INCREMENT" if name == "id" else ""
                connection.exec_driver_sql(f"ALTER TABLE {table} MODIFY {name} BIGINT NOT NULL{automatic}")
            if "id" in names:
                connection.exec_driver_sql(f"ALTER TABLE {table} AUTO_INCREMENT = {BEYOND_32_BITS}")
        connection.exec_driver_sql("ALTER TABLE result MODIFY hostid BIGINT NOT NULL, MODIFY userid BIGINT NOT NULL")


def test_ids_beyond_32_bits_go_through_generator_validator_and_assimilator(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with TinyProject(tmp_path / "project", on=mariadb.new_database()) as project:
        widen(project.db)
        results = project.issue()
        for number, result in enumerate(results):
            project.answer(result, user=BEYOND_32_BITS + number, host=BEYOND_32_BITS + 10 + number)
        project.transitioner.run_once()
        project.validator().one_pass()
        project.assimilator().one_pass()
        assert project.job.current_version == 1
        units = project.rows(tables.workunit)
        assert min(row["id"] for row in units) >= BEYOND_32_BITS <= min(row["canonical_resultid"] for row in units)
        assert all(row["hostid"] > BEYOND_32_BITS for row in project.rows(gt_ledger))
        assert all(row["total_credit"] > 0 for row in project.rows(tables.user))
        assert list(replay(project.db, project.job).values()) == project.version_digests()
    logged = {int(number) for number in re.findall(r"\[(?:WU|RESULT)#(\d+)", caplog.text)}
    assert logged and min(logged) >= BEYOND_32_BITS


@pytest.mark.parametrize("kind", databases.parameters(databases.SQLITE, databases.LAX_MARIADB))
def test_workunit_whose_xml_is_too_long_is_refused_before_anything_is_published_or_inserted(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = templates.workunit_document

    def too_long(*given: Any) -> templates.WorkunitDocument:
        made = real(*given)
        filler = "x" * (templates.XML_LIMIT + 1 - len(made.xml_doc.encode()))
        return templates.WorkunitDocument(made.xml_doc + filler, made.columns)

    with databases.chosen(kind), tiny_project() as project:
        published = sorted(project.tree.config.download_dir.rglob("*"))
        monkeypatch.setattr(templates, "workunit_document", too_long)
        project.generator().one_pass()
        assert not project.rows(tables.workunit)
        assert sorted(each for each in project.tree.config.download_dir.rglob("*") if each.is_file()) == [
            each for each in published if each.is_file()
        ]
        assert project.job.state == JobState.FAILED
        assert str(templates.XML_LIMIT) in project.job.note and "bytes" in project.job.note


@pytest.mark.parametrize("kind", databases.parameters(databases.SQLITE, databases.MARIADB, databases.LAX_MARIADB))
def test_a_training_has_the_same_bytes_on_every_database_and_in_every_mode(kind: str) -> None:
    with tiny_project() as project:
        project.make_version()
        project.make_version()
        expected = project.version_digests()
    with databases.chosen(kind), tiny_project() as project:
        project.make_version()
        project.make_version()
        assert project.version_digests() == expected
