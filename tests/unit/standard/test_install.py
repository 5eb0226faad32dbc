"""Installing into a project as make_project leaves it, and taking it out again: fresh, repeated, half done, undone."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from click.testing import CliRunner, Result
from lxml import etree

from boinc_project import database, store
from boinc_project.cli.main import main
from boinc_project.config import ProjectConfig
from boinc_project.database import Database
from boinc_project.gt_tables import gt_metadata
from boinc_project.standard import editing, install, plan_classes, schema, steps
from boinc_project.standard.record import Record
from tests import mariadb
from tests.crash_points import Main, run_daemon
from tests.standard_project import SHAPES, contents, fingerprint, make_programs, make_standard_project

needs_mariadb = pytest.mark.skipif(bool(mariadb.MISSING), reason=mariadb.MISSING)


@dataclass
class Project:
    folder: Path
    db: Database

    def run(self, command: str, *arguments: Any, **options: Any) -> Result:
        return CliRunner().invoke(main, [command, str(self.folder), *(str(each) for each in arguments)], **options)

    def install(self, *arguments: Any) -> Result:
        found = self.run("install", *arguments)
        assert found.exit_code == 0, (found.output, found.exception)
        return found

    def text(self, name: str) -> str:
        return (self.folder / name).read_bytes().decode()

    def app(self, name: str = "gradient") -> dict[str, Any] | None:
        with self.db.read() as connection:
            row = connection.execute(sa.select(database.app).where(database.app.c.name == name)).mappings().first()
        return None if row is None else dict(row)


@pytest.fixture(autouse=True)
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    made = make_programs(tmp_path / "venv" / "bin")
    monkeypatch.setattr(install, "find_programs", lambda: made)
    return made


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    with make_standard_project(tmp_path / "project") as db:
        yield Project(tmp_path / "project", db)


@pytest.fixture(params=[pytest.param("mariadb", marks=needs_mariadb), "sqlite"])
def either(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Project]:
    with make_standard_project(tmp_path / "project", on=request.param) as db:
        yield Project(tmp_path / "project", db)


@pytest.fixture(params=SHAPES)
def shaped(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Project]:
    with make_standard_project(tmp_path / "project", shape=request.param) as db:
        yield Project(tmp_path / "project", db)


def test_a_fresh_installation_makes_everything_that_the_daemons_need(
    either: Project, programs: dict[str, Path]
) -> None:
    project = either
    project.install()
    config = etree.fromstring((project.folder / "config.xml").read_bytes())
    daemons = config.findall("daemons/daemon")
    ours = [each for each in daemons if (each.findtext("cmd") or "").strip().startswith("gt_")]
    assert [each.findtext("cmd") for each in ours] == [f"{d} -d 3 --app gradient" for d in steps.DAEMONS]
    for tag in ("output", "pid_file", "lock_file"):
        names = [each.findtext(tag) for each in ours]
        assert len(set(names)) == 3 and None not in names
    for name, target in programs.items():
        assert (project.folder / "bin" / name).readlink() == target
    classes = etree.parse(project.folder / "plan_class_spec.xml").getroot().findall("plan_class/name")
    assert [each.text for each in classes] == [each.name for each in plan_classes.CLASSES]
    limit = etree.parse(project.folder / "config_aux.xml").getroot().find("max_jobs_in_progress/app")
    assert limit is not None and limit.findtext("app_name") == "gradient"
    assert limit.findtext("cpu_limit/jobs") == "2" and limit.find("cpu_limit/per_proc") is not None
    assert etree.parse(project.folder / "project.xml").getroot().findtext("app[name='gradient']/user_friendly_name")
    row = project.app()
    assert row is not None and row["deprecated"] == 0 and row["user_friendly_name"] == "Gradient training"
    with project.db.read() as connection:
        assert schema.own_tables(connection)[1] == []
        assert schema.missing(connection) == []


def test_installing_inserts_lines_and_leaves_every_other_byte(shaped: Project) -> None:
    before = {name: shaped.text(name) for name in ("config.xml", "project.xml")}
    shaped.install()
    for name, old in before.items():
        new = shaped.text(name)
        for change in Record.load(shaped.folder).changes:
            if change.path == name and change.piece is not None and not change.piece.old:
                assert new.count(change.piece.new) == 1 or change.piece.wraps
        remaining = iter(new)
        assert all(character in remaining for character in old if not old.count("<daemons/>")), "old text is kept"
        newlines = {line[-1:] for line in new.split("\n")[:-1]}
        if "\r\n" in old:
            assert newlines == {"\r"}
        etree.fromstring(new.encode())
    assert len(steps.daemons(shaped.text("config.xml"))) == len(steps.daemons(before["config.xml"])) + 3


def test_installing_twice_changes_nothing(shaped: Project) -> None:
    shaped.install()
    before = fingerprint(shaped.folder), contents(shaped.db), Record.load(shaped.folder)
    again = shaped.install()
    assert "nothing is changed" in again.output
    assert (fingerprint(shaped.folder), contents(shaped.db), Record.load(shaped.folder)) == before


def test_a_dry_run_shows_the_lines_and_changes_nothing(shaped: Project) -> None:
    before = fingerprint(shaped.folder), contents(shaped.db)
    shown = shaped.install("--dry-run").output
    assert "+     <cmd>gt_validator -d 3 --app gradient</cmd>" in shown and "Nothing was changed" in shown
    assert (fingerprint(shaped.folder), contents(shaped.db)) == before
    assert not (shaped.folder / "gt_install").exists()


def test_uninstalling_restores_every_byte_and_row(shaped: Project) -> None:
    before = fingerprint(shaped.folder), contents(shaped.db)
    shaped.install()
    found = shaped.run("uninstall", "--drop-tables", "--yes")
    assert found.exit_code == 0, (found.output, found.exception)
    assert (fingerprint(shaped.folder), contents(shaped.db)) == before
    assert shaped.run("uninstall").exit_code == 2


def number_of_steps(project: Project) -> int:
    with install.open_project(project.folder) as opened:
        wanted = steps.Wanted(app="gradient", title="Gradient training", programs=install.find_programs())
        return len(steps.plan(install.snapshot(opened, "gradient"), wanted))


class Killed(Exception):
    """Stands for a process that ends here."""


@pytest.mark.parametrize("done", [True, False], ids=["after the step", "between record and step"])
def test_an_installation_interrupted_at_any_step_is_finished_by_the_next_and_undone_whole(
    project: Project, monkeypatch: pytest.MonkeyPatch, done: bool
) -> None:
    untouched = fingerprint(project.folder), contents(project.db)
    total = number_of_steps(project)
    assert total > 10
    apply = install._apply
    whole: Any = None
    for stop in range(total):
        calls = 0

        def interrupted(*arguments: Any, at: int = stop) -> None:
            nonlocal calls
            if calls == at and not done:
                raise Killed
            apply(*arguments)
            calls += 1
            if calls == at + 1 and done:
                raise Killed

        monkeypatch.setattr(install, "_apply", interrupted)
        assert isinstance(project.run("install").exception, Killed)
        monkeypatch.setattr(install, "_apply", apply)
        if stop % 2:
            project.install()
            state = fingerprint(project.folder)
            whole = whole or state
            assert state == whole
        assert project.run("uninstall", "--drop-tables", "--yes").exit_code == 0
        assert (fingerprint(project.folder), contents(project.db)) == untouched


def test_an_uninstallation_interrupted_at_any_change_is_finished_by_the_next(
    either: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = either
    untouched = fingerprint(project.folder), contents(project.db)
    undo = install._undo
    for stop in (0, 1, 3, 7, 12, 20):
        project.install()
        calls = 0

        def interrupted(*arguments: Any, at: int = stop) -> str:
            nonlocal calls
            answer = undo(*arguments)
            calls += 1
            if calls == at + 1:
                raise Killed
            return answer

        monkeypatch.setattr(install, "_undo", interrupted)
        assert isinstance(project.run("uninstall", "--drop-tables", "--yes").exception, Killed)
        monkeypatch.setattr(install, "_undo", undo)
        assert project.run("uninstall", "--drop-tables", "--yes").exit_code == 0
        assert (fingerprint(project.folder), contents(project.db)) == untouched


@pytest.mark.parametrize("command", ["install", "uninstall"])
def test_a_command_that_was_killed_leaves_nothing_once_it_is_given_again(
    project: Project, command: str, tmp_path: Path
) -> None:
    """Killed by SIGKILL before each renaming in turn: half-made files go with the next run."""
    folder, log = project.folder, tmp_path / "log"
    bare = fingerprint(folder)
    project.install()
    states = {"install": fingerprint(folder), "uninstall": bare}
    left, place = [], itertools.count(1)
    while True:
        if command == "install":
            assert project.run("uninstall").exit_code == 0
        project.db.close()
        killed = run_daemon(killed_at_renaming(next(place)), [command, str(folder)], folder, None, log).killed
        left += half_made(folder)
        if not killed:
            break
        assert project.run(command).exit_code == 0
        assert fingerprint(folder) == states[command] and half_made(folder) == []
        if command == "uninstall":
            project.install()
    assert fingerprint(folder) == states[command]
    assert {"record.json", "config.xml"} <= {path.name.split(".boinc")[0][1:] for path in left}


def half_made(folder: Path) -> list[Path]:
    return list(folder.rglob(".*.tmp"))


def killed_at_renaming(number: int) -> Main:
    """A `boinc-train` that dies just before it renames a file for the so many-th time."""

    def run(arguments: Sequence[str]) -> int:
        real, count = os.replace, itertools.count(1)

        def replace(*names: Any) -> None:
            if next(count) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            real(*names)

        os.replace = replace  # type: ignore[assignment]
        return CliRunner().invoke(main, list(arguments)).exit_code

    return run


def test_what_the_admin_changed_since_survives_uninstalling(project: Project) -> None:
    project.install()
    config = project.folder / "config.xml"
    text = config.read_text()
    text = text.replace("    </daemons>", "        <daemon><cmd>db_purge</cmd></daemon>\n    </daemons>")
    text = text.replace("<cmd>gt_validator -d 3 --app gradient</cmd>", "<cmd>gt_validator -d 4 --app gradient</cmd>")
    config.write_text(text)
    spec = project.folder / "plan_class_spec.xml"
    mine = "<!-- mine --><plan_class><name>mt</name></plan_class>"
    spec.write_text(spec.read_text().replace("</plan_classes>", f"{mine}\n</plan_classes>"))
    found = project.run("uninstall")
    assert found.exit_code == 0
    assert "db_purge" in config.read_text() and "gt_assimilator" not in config.read_text()
    assert "<cmd>gt_" not in config.read_text(), "an entry of ours that was tuned is still ours"
    assert "plan_class_spec.xml: it was changed since" in found.output
    assert mine in spec.read_text() and "_gt<" not in spec.read_text()
    etree.fromstring(config.read_bytes())


@pytest.mark.parametrize("share", ["", " --mod 2 0"])
def test_copies_of_a_daemon_s_entry_are_taken_out_with_it(project: Project, share: str) -> None:
    project.install()
    config = project.folder / "config.xml"
    text = config.read_text()
    cmd = "gt_validator -d 3 --app gradient"
    copy = f"<daemon><cmd>{cmd} --mod 2 1</cmd><output>b.log</output><pid_file>b.pid</pid_file></daemon>"
    other = "<daemon><cmd>gt_validator --app other</cmd><output>o.log</output></daemon>"
    text = text.replace("    </daemons>", f"        {copy}{other}\n    </daemons>")
    config.write_text(text.replace(f"{cmd}</cmd>", f"{cmd}{share}</cmd>"))
    found = project.run("uninstall")
    assert found.exit_code == 0 and "by hand" not in found.output
    left = [each.cmd for each in steps.daemons(config.read_text()) if each.program.startswith("gt_")]
    assert left == ["gt_validator --app other"]


def test_uninstalling_recognises_its_entries_in_a_config_that_boinc_wrote_anew(project: Project) -> None:
    project.install()
    config = project.folder / "config.xml"
    from xml.dom import minidom

    document = minidom.parse(str(config))
    config.write_text(document.toprettyxml(indent=" "))
    found = project.run("uninstall")
    assert found.exit_code == 0 and "by hand" not in found.output
    assert not [each for each in steps.daemons(config.read_text()) if each.program.startswith("gt_")]
    assert [each.program for each in steps.daemons(config.read_text())][:3] == [
        "feeder",
        "transitioner",
        "file_deleter",
    ]


def test_entries_of_the_admin_s_own_are_kept_and_not_added_again(project: Project) -> None:
    aux = project.folder / "config_aux.xml"
    mine = (
        "<config> <!-- limits -->\n  <max_jobs_in_progress>\n    <project><total_limit><jobs>50</jobs></total_limit>"
        "</project>\n    <app><app_name>gradient</app_name><cpu_limit><jobs>1</jobs></cpu_limit></app>\n"
        "  </max_jobs_in_progress>\n</config>\n"
    )
    aux.write_text(mine)
    spec = project.folder / "plan_class_spec.xml"
    # As BOINC's own sample has it: the parser of the server survives the broken end tag.
    broken = (
        "<plan_classes>\n    <plan_class>\n        <name>  opencl_nvidia_101  </name>\n"
        "        <min_opencl_version> 101 <min_opencl_version>\n    </plan_class>\n    <plan_class>\n"
        "        <name> cuda_gt </name>\n        <cuda/>\n    </plan_class>\n</plan_classes>\n"
    )
    spec.write_text(broken)
    config = project.folder / "config.xml"
    entry = "<daemon><cmd>gt_validator -app gradient --votes host</cmd></daemon>\n    </daemons>"
    config.write_text(config.read_text().replace("</daemons>", entry))
    project.install()
    assert aux.read_text() == mine
    text = spec.read_text()
    assert text.startswith(broken.removesuffix("\n</plan_classes>\n")) and text.count("cuda_gt") == 1
    assert text.count("opencl_ati_gt") == 1 and text.index("opencl_ati_gt") < text.index("</plan_classes>")
    assert [each.cmd for each in steps.daemons(config.read_text()) if each.program == "gt_validator"] == [
        "gt_validator -app gradient --votes host"
    ]


def test_another_environment_takes_over_the_links_and_gives_them_back(
    project: Project, tmp_path: Path, programs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    project.install()
    newer = make_programs(tmp_path / "venv2" / "bin")
    monkeypatch.setattr(install, "find_programs", lambda: newer)
    assert "instead of" in project.install().output
    for name, target in newer.items():
        assert (project.folder / "bin" / name).readlink() == target
    assert project.run("uninstall").exit_code == 0
    assert not any((project.folder / "bin" / name).is_symlink() for name in newer)


def test_two_apps_share_what_they_share_until_the_last_is_gone(project: Project) -> None:
    before = fingerprint(project.folder)
    project.install()
    project.install("--app", "second", "--title", "The second")
    assert len([d for d in steps.daemons(project.text("config.xml")) if d.program.startswith("gt_")]) == 6
    found = project.run("uninstall", "--app", "gradient")
    assert found.exit_code == 0 and "second still uses them" in found.output
    assert (project.folder / "bin" / "gt_validator").is_symlink() and "cuda_gt" in project.text("plan_class_spec.xml")
    assert {d.app for d in steps.daemons(project.text("config.xml")) if d.program.startswith("gt_")} == {"second"}
    assert project.app() is None and project.app("second") is not None
    assert project.run("uninstall").exit_code == 0
    assert fingerprint(project.folder) == before


def test_an_app_with_results_is_deprecated_and_comes_back_when_installed_again(either: Project) -> None:
    project = either
    project.install()
    row = project.app()
    assert row is not None
    with project.db.transaction() as connection:
        unit = database.new_row(database.workunit, name="gt_a", appid=row["id"])
        connection.execute(database.workunit.insert(), unit)
        made = database.new_row(database.result, name="gt_a_0", appid=row["id"], workunitid=1)
        connection.execute(database.result.insert(), made)
    found = project.run("uninstall")
    assert "Stays: the row of the app gradient, deprecated: 1 rows of result refer to it" in found.output
    assert project.app() == {**row, "deprecated": 1}
    assert "make the app gradient active again" in project.install().output
    assert project.app() == row


def test_a_template_that_workunits_name_stays(project: Project) -> None:
    project.install()
    with project.db.transaction() as connection:
        row = database.new_row(database.workunit, name="by_hand", result_template_file="templates/gradient_out")
        connection.execute(database.workunit.insert(), row)
    found = project.run("uninstall")
    assert "transitioner ends for the whole project" in found.output
    assert [line for line in found.output.splitlines() if line.lower().count("stays") > 1] == []
    assert (project.folder / "templates" / "gradient_out").exists()
    assert not (project.folder / "templates" / "gradient_in").exists()


def test_tables_are_dropped_only_when_asked_and_confirmed(project: Project) -> None:
    project.install()
    refused = project.run("uninstall", "--drop-tables", input="n\n")
    assert refused.exit_code == 2 and "nothing was changed" in refused.stderr
    assert "gt_validator" in project.text("config.xml")
    assert "gt_job" in project.run("uninstall").output
    assert "gt_job" in contents(project.db)
    project.install()
    assert project.run("uninstall", "--drop-tables", input="y\n").exit_code == 0


def test_tables_that_a_daemon_added_since_are_dropped_with_the_others(project: Project) -> None:
    project.install()
    with project.db.transaction() as connection:
        connection.execute(sa.text("DROP TABLE gt_ledger"))
    record = Record.load(project.folder)
    record.changes = [change for change in record.changes if change.path != "gt_ledger"]
    record.save()
    store.create_own_tables(project.db)
    assert project.run("uninstall", "--drop-tables", "--yes").exit_code == 0
    assert not [name for name in contents(project.db) if name.startswith("gt_")]


def test_an_upgrade_adds_the_columns_that_came_since_and_says_so(either: Project) -> None:
    either.install()
    with either.db.read() as connection:
        before = {table.name: sa.inspect(connection).get_columns(table.name) for table in gt_metadata.sorted_tables}
    with either.db.transaction() as connection:
        connection.execute(sa.text("ALTER TABLE gt_round DROP COLUMN anchor_version"))
        connection.execute(sa.text("DROP TABLE gt_recheck"))
    shown = either.run("install", "--dry-run").output
    assert "create the tables gt_recheck" in shown and "add the columns gt_round.anchor_version" in shown
    either.install()
    with either.db.read() as connection:
        for table, columns in before.items():
            after = sa.inspect(connection).get_columns(table)
            assert {each["name"] for each in after} == {each["name"] for each in columns}
    assert "nothing is changed" in either.install().output
    assert either.run("uninstall", "--drop-tables", "--yes").exit_code == 0
    assert not [name for name in contents(either.db) if name.startswith("gt_")]


def test_files_are_backed_up_as_they_were_and_hidden_from_others(project: Project) -> None:
    before = (project.folder / "config.xml").read_bytes()
    (project.folder / "config.xml").chmod(0o640)
    project.install()
    (copy,) = (project.folder / "gt_install" / "backups").glob("*/config.xml")
    assert copy.read_bytes() == before
    assert (project.folder / "config.xml").stat().st_mode & 0o777 == 0o640
    assert (project.folder / "gt_install").stat().st_mode & 0o777 == 0o700


def test_a_config_behind_a_link_is_changed_behind_the_link(project: Project, tmp_path: Path) -> None:
    real = tmp_path / "etc.xml"
    (project.folder / "config.xml").rename(real)
    (project.folder / "config.xml").symlink_to(real)
    project.install()
    assert (project.folder / "config.xml").is_symlink() and "gt_validator" in real.read_text()


def test_project_wide_settings_are_recommended_and_not_touched(project: Project) -> None:
    before = ProjectConfig.load(project.folder).elements
    shown = project.install().output
    for line in (
        "<one_result_per_host_per_wu>1</one_result_per_host_per_wu>",
        "<fuh_set_completed_permission>0444</fuh_set_completed_permission>",
        "<next_rpc_delay>300</next_rpc_delay>",
        "<cmd>feeder -d 3 -allapps</cmd>",
    ):
        assert line in shown
    assert ProjectConfig.load(project.folder).elements == before


TITLES = ['R&D <v2> "x"', "L'école 模型", "a &amp; b"]


@pytest.mark.parametrize("title", TITLES)
def test_titles_reach_volunteers_whole_although_boinc_sends_them_raw(project: Project, title: str) -> None:
    project.install("--title", title)
    row = project.app()
    assert row is not None
    # sched/sched_types.cpp puts the column into the reply as it is.
    reply = etree.fromstring(f"<app><user_friendly_name>{row['user_friendly_name']}</user_friendly_name></app>")
    assert reply.findtext("user_friendly_name") == title
    listed = etree.parse(project.folder / "project.xml").getroot().findtext("app[name='gradient']/user_friendly_name")
    assert listed == row["user_friendly_name"], "bin/xadd finds nothing to change"


def test_own_tables_are_created_in_the_database_of_the_project(project: Project) -> None:
    project.install()
    with project.db.read() as connection:
        assert store.jobs(connection) == []


def test_editing_an_empty_element_is_undone_byte_for_byte() -> None:
    text = "<a>\n  <b x='1' />\n</a>"
    parent = editing.parse(text).find("a", "b")
    assert parent is not None
    changed, pieces = editing.insert_child(text, parent, ["<c>", "    1", "</c>"])
    assert etree.fromstring(changed).findtext("b/c") is not None
    for piece in reversed(pieces):
        undone = editing.undo(changed, piece)
        assert undone is not None
        changed = undone
    assert changed == text
