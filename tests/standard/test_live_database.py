"""The live project's database and our part in it."""

from __future__ import annotations

import os
import shutil

import pytest
import sqlalchemy as sa
from lxml import etree

from boinc_project import database, signing
from boinc_project.gt_tables import gt_metadata
from boinc_project.standard import schema
from boinc_project.standard.steps import DAEMONS
from tests.live_project import APP, LiveProject

TABLES = pytest.mark.parametrize("table", schema.NEEDED, ids=lambda table: table.name)


def test_boinc_s_tables_have_every_column_that_we_use(project: LiveProject) -> None:
    with project.db.read() as connection:
        assert schema.missing(connection) == []
        assert schema.unknown_without_default(connection) == []
        assert schema.not_transactional(connection) == []


@TABLES
def test_columns_hold_what_we_believe_they_hold(project: LiveProject, table: sa.Table) -> None:
    """The kind of value, the number of characters and whether NULL is allowed."""
    with project.db.read() as connection:
        live = {str(column["name"]): column for column in sa.inspect(connection).get_columns(table.name)}
    differences = []
    for column in table.columns:
        found = live[column.name]
        kinds = {getattr(each.type, "_type_affinity", None) for each in (column, sa.Column(type_=found["type"]))}
        if len(kinds) > 1 and {getattr(each, "__name__", "") for each in kinds} not in ALIKE:
            differences.append(f"{column.name} is {found['type']}, not {column.type}")
        expected, length = getattr(column.type, "length", None), getattr(found["type"], "length", None)
        if isinstance(column.type, sa.String) and expected and length and length < expected:
            differences.append(f"{column.name} holds {length} characters, not {expected}")
        if found["nullable"] and not column.nullable and found.get("default") is None:
            differences.append(f"{column.name} may be NULL")
    assert differences == []


#: Kinds that hold the same values: BOINC's blobs are text to us.
ALIKE = ({"Float", "Numeric"}, {"String", "_Binary"}, {"Text", "_Binary"}, {"String", "Text"}, {"Integer", "Boolean"})


@pytest.mark.parametrize("table", [database.workunit, database.result, database.app], ids=lambda table: table.name)
def test_names_are_unique(project: LiveProject, table: sa.Table) -> None:
    with project.db.read() as connection:
        inspector = sa.inspect(connection)
        unique = [index["column_names"] for index in inspector.get_indexes(table.name) if index["unique"]]
    assert ["name"] in unique


def test_our_tables_are_there(project: LiveProject) -> None:
    with project.db.read() as connection:
        assert schema.own_tables(connection)[1] == []
        assert schema.missing(connection, gt_metadata.sorted_tables) == []


def test_our_app_is_active_and_has_a_published_version(project: LiveProject) -> None:
    (row,) = project.rows(database.app, database.app.c.name == APP)
    assert row["deprecated"] == 0
    versions = project.rows(database.app_version, database.app_version.c.appid == row["id"])
    assert [each for each in versions if each["deprecated"] == 0]


def test_the_files_of_our_app_versions_lie_in_the_download_directory_and_are_signed(project: LiveProject) -> None:
    key = project.tree.code_sign_public()
    for version in project.rows(database.app_version, database.app_version.c.appid == project.appid):
        files = signed_files(str(version["xml_doc"]))
        assert files, version["id"]
        for name, signature in files:
            path = project.tree.app_file_path(name)
            assert key.verify_digest(signing.file_md5(path), signature), path


def signed_files(text: str) -> list[tuple[str, str]]:
    """(name, signature) of each file of an app version."""
    root = etree.fromstring(f"<v>{text}</v>")
    pairs = [
        (info.findtext("name") or "", info.findtext("file_signature") or "") for info in root.iterfind("file_info")
    ]
    return [(name.strip(), signature) for name, signature in pairs]


def test_our_daemons_are_entries_of_config_xml_with_files_of_their_own(project: LiveProject) -> None:
    entries = project.entries()
    ours = [each for each in entries if each.program in DAEMONS and each.app == APP]
    assert {each.program for each in ours} == set(DAEMONS)
    for field in ("output", "pid_file", "lock_file"):
        names = [getattr(each, field) for each in entries]
        assert all(names.count(getattr(each, field)) == 1 for each in ours), field


@pytest.mark.parametrize("name", DAEMONS)
def test_bin_holds_a_link_to_each_daemon_that_can_be_run(project: LiveProject, name: str) -> None:
    path = project.folder / "bin" / name
    assert path.is_symlink() and os.access(path, os.X_OK) and shutil.which(str(path))
