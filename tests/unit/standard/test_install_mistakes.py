"""Mistakes of an admin who installs into a standard project: one sentence, exit status 2, nothing changed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from click.testing import CliRunner, Result

from boinc_project import database
from boinc_project.cli.main import main
from boinc_project.database import Database
from boinc_project.project_tree import create_project
from boinc_project.standard import install
from tests import mariadb
from tests.standard_project import contents, fingerprint, make_programs, make_standard_project

needs_mariadb = pytest.mark.skipif(bool(mariadb.MISSING), reason=mariadb.MISSING)


@pytest.fixture(autouse=True)
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_programs(tmp_path / "venv" / "bin")
    monkeypatch.setattr(install, "find_programs", lambda: made)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "project"


@pytest.fixture
def db(folder: Path) -> Iterator[Database]:
    with make_standard_project(folder) as made:
        yield made


@pytest.fixture
def on_mariadb(folder: Path) -> Iterator[Database]:
    with make_standard_project(folder, on="mariadb") as made:
        yield made


def boinc_train(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(each) for each in arguments])


def mistake(found: Result, *parts: str) -> None:
    assert found.exit_code == 2, (found.output, found.exception)
    lines = [line for line in found.stderr.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("boinc-train: "), found.output
    for part in parts:
        assert part in lines[0]
    assert "Traceback" not in found.output and "secret" not in found.output


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def link_in_the_way(folder: Path) -> None:
    (folder / "bin" / "gt_validator").write_text("#!/bin/sh\n")


MISTAKES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "config.xml is damaged": (lambda f: edit(f / "config.xml", "</boinc>", ""), ["config.xml", "not well-formed"]),
    "no cgi-bin": (lambda f: (f / "cgi-bin").rename(f / "cgi"), ["has no cgi-bin directory"]),
    "download_dir moved": (lambda f: (f / "download").rename(f / "dl"), ["<download_dir>", "create it or correct"]),
    "no keys": (lambda f: (f / "keys" / "upload_private").unlink(), ["upload_private", "crypt_prog -genkey"]),
    "config_aux.xml is damaged": (
        lambda f: (f / "config_aux.xml").write_text("<config><max_jobs"), ["config_aux.xml", "mend it first"],
    ),
    "plan_class_spec.xml is something else": (
        lambda f: (f / "plan_class_spec.xml").write_text("<plan>\n</plan>\n"), ["has no <plan_classes>"],
    ),
    "a program of that name": (link_in_the_way, ["bin/gt_validator", "move it away"]),
    "a daemon uses our log": (
        lambda f: edit(f / "config.xml", "feeder -d 3", "feeder</cmd><output>gt_validator_gradient.log</output><cmd>"),
        ["already uses the name gt_validator_gradient.log"],
    ),
    "a damaged record": (
        lambda f: ((f / "gt_install").mkdir(), (f / "gt_install" / "record.json").write_text("{")),
        ["record.json is damaged", "backups"],
    ),
    "a newer record": (
        lambda f: ((f / "gt_install").mkdir(), (f / "gt_install" / "record.json").write_text('{"format": 99}')),
        ["another version of boinc-train"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", MISTAKES)
def test_what_must_be_mended_first_is_one_sentence_and_nothing_is_changed(
    folder: Path, db: Database, kind: str
) -> None:
    damage, parts = MISTAKES[kind]
    damage(folder)
    before = fingerprint(folder), contents(db)
    mistake(boinc_train("install", folder), *parts)
    assert (fingerprint(folder), contents(db)) == before


def test_a_place_that_is_no_standard_project_is_named(folder: Path, tmp_path: Path) -> None:
    mistake(boinc_train("install", tmp_path / "nowhere"), "there is no folder", "config.xml")
    folder.mkdir()
    mistake(boinc_train("install", folder), "no BOINC project", "make_project")
    create_project(tmp_path / "mine", master_url="http://127.0.0.1:8080/train/", long_name="Mine")
    mistake(boinc_train("install", tmp_path / "mine"), "boinc-train serve, which needs no installing")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--app", "Gradient Training"], "cannot be the app's name"),
        (["--app", "../x"], "cannot be the app's name"),
        (["--app", "a" * 40], "cannot be the app's name"),
        (["--title", "two\nlines"], "without control characters"),
        (["--title", "  "], "without control characters"),
        (["--title", "x" * 300], "254 bytes"),
        (["--title", "&" * 60], "254 bytes"),
    ],
)
def test_names_that_boinc_would_mistreat_are_refused(
    folder: Path, db: Database, arguments: list[str], part: str
) -> None:
    mistake(boinc_train("install", folder, *arguments), part)


def test_another_user_than_the_projects_is_told_which(
    folder: Path, db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = os.geteuid()
    monkeypatch.setattr(install.os, "geteuid", lambda: owner + 4321)
    mistake(boinc_train("install", folder), "belongs to the user", "run this command as")


def test_an_app_with_work_of_its_own_is_not_taken(folder: Path, db: Database) -> None:
    with db.transaction() as connection:
        row = database.new_row(database.app, name="gradient", user_friendly_name="Slopes of hills")
        connection.execute(database.app.insert(), row)
        unit = database.new_row(database.workunit, name="hill_7", appid=2)
        connection.execute(database.workunit.insert(), unit)
    mistake(boinc_train("install", folder), "work of its own (hill_7)", "--app")
    assert boinc_train("install", folder, "--app", "slopes2").exit_code == 0


def test_a_second_installer_waits_for_the_first_to_end(folder: Path, db: Database) -> None:
    with install.open_project(folder):
        mistake(boinc_train("install", folder), "another boinc-train is changing")


def test_an_environment_without_the_daemons_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for name in ("sys.executable", "sysconfig.get_path"):
        value = str(tmp_path / "python") if name == "sys.executable" else lambda *a: str(tmp_path)
        monkeypatch.setattr(f"boinc_project.standard.install.{name}", value)
    mistake(boinc_train("install", tmp_path), "gt_work_generator is not in", "pip")


@needs_mariadb
def test_a_wrong_password_names_the_elements_and_not_the_password(folder: Path, on_mariadb: Database) -> None:
    edit(folder / "config.xml", "secret", "another-s3cret")
    found = boinc_train("install", folder)
    mistake(found, "<db_user>", "Access denied", "correct the <db_...> elements")
    assert "s3cret" not in found.output


@needs_mariadb
def test_a_database_without_boincs_tables_is_refused(folder: Path, on_mariadb: Database) -> None:
    with on_mariadb.transaction() as connection:
        connection.execute(sa.text("ALTER TABLE workunit DROP COLUMN transitioner_flags"))
        connection.execute(sa.text("DROP TABLE team"))
    mistake(boinc_train("install", folder), "lacks team, workunit.transitioner_flags", "upgrade_db.php")


@needs_mariadb
def test_an_account_that_may_not_create_tables_is_told_before_any_file_is_touched(
    folder: Path, on_mariadb: Database
) -> None:
    name = on_mariadb.url.database
    for host in ("127.0.0.1", "localhost"):
        mariadb.server().execute(f"REVOKE ALL ON {name}.* FROM '{name}'@'{host}'")
        mariadb.server().execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {name}.* TO '{name}'@'{host}'")
    before = fingerprint(folder)
    mistake(boinc_train("install", folder), "the rights CREATE")
    assert fingerprint(folder) == before


def test_uninstalling_what_is_not_there_says_so(folder: Path, db: Database) -> None:
    mistake(boinc_train("uninstall", folder), "nothing of boinc-train is installed")
    assert boinc_train("install", folder).exit_code == 0
    mistake(boinc_train("uninstall", folder, "--app", "other"), "'other' is not installed; installed: gradient")


@pytest.mark.parametrize("name", ["gt_validator_gradient", "the second validator"])
def test_running_daemons_must_be_stopped_before_uninstalling(
    folder: Path, db: Database, tmp_path: Path, name: str
) -> None:
    import subprocess

    assert boinc_train("install", folder).exit_code == 0
    program = tmp_path / "gt_validator"
    program.write_text("#!/bin/sh\nread x\n")
    program.chmod(0o755)
    daemon = subprocess.Popen([program, "-app", "gradient"], stdin=subprocess.PIPE)
    pid_file = folder / f"pid_{os.uname().nodename.partition('.')[0]}" / f"{name}.pid"
    try:
        pid_file.write_text(f"{daemon.pid}\n")
        before = fingerprint(folder)
        mistake(boinc_train("uninstall", folder), name, str(daemon.pid), "bin/stop")
        assert fingerprint(folder) == before
    finally:
        daemon.communicate(b"\n")
    assert boinc_train("uninstall", folder).exit_code == 0
