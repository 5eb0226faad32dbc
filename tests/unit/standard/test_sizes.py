"""What jobs with speed_classes need of a standard server: installed in a safe order, checked, and taken out again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from click.testing import CliRunner, Result
from lxml import etree

from boinc_project import database
from boinc_project.cli.main import main
from boinc_project.database import Database, new_row
from boinc_project.standard import doctor_sizes, install, size_steps, steps
from boinc_project.standard.findings import Finding, Patient, Severity
from boinc_project.standard.record import InstallError
from boinc_project.states import ServerState
from tests.standard_project import contents, fingerprint, make_programs, make_standard_project
from tests.tiny_project import Changes, tiny_project
from work_generator.job import JobError
from work_generator.publish import set_up_classes

SIZES = ("--size-classes", "3")


class Project:
    def __init__(self, folder: Path, db: Database) -> None:
        self.folder, self.db = folder, db

    def run(self, command: str, *arguments: str) -> Result:
        found = CliRunner().invoke(main, [command, str(self.folder), *arguments])
        assert found.exit_code == 0, (found.output, found.exception)
        return found

    @property
    def classes(self) -> int:
        ours = database.app.c.name == "gradient"
        with self.db.read() as connection:
            return int(connection.execute(sa.select(database.app.c.n_size_classes).where(ours)).scalar_one())

    def config(self) -> Any:
        return etree.fromstring((self.folder / "config.xml").read_bytes())


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    made = make_programs(tmp_path / "venv" / "bin")
    monkeypatch.setattr(install, "find_programs", lambda: made)
    with make_standard_project(tmp_path / "project") as db:
        yield Project(tmp_path / "project", db)


def test_installing_adds_what_boinc_needs_and_a_second_time_nothing(project: Project) -> None:
    assert "reread_db" in project.run("install", *SIZES).output
    assert project.classes == 3
    assert (project.folder / "size_census_gradient").read_text() == "0.000000e+00\n" * 2
    config = project.config()
    assert config.findtext("config/size_classes") == "1"
    cmds = [(each.findtext("cmd") or "").split() for each in config.findall("daemons/daemon")]
    (regulator,) = [cmd for cmd in cmds if cmd[0] == "size_regulator"]
    options = "--app_name gradient --lo 15 --hi 30 --sleep_time 5 --priority_order_create_time"
    assert " ".join(regulator[1:]) == options
    (census,) = [e for e in config.findall("tasks/task") if "size_census" in (e.findtext("cmd") or "")]
    assert (census.findtext("cmd"), census.findtext("period")) == ("run_in_ops ./size_census.php", "1 hour")
    before = fingerprint(project.folder), contents(project.db)
    assert "nothing is changed" in project.run("install", *SIZES).output
    assert "nothing is changed" in project.run("install").output
    assert (fingerprint(project.folder), contents(project.db)) == before


def test_the_census_is_there_before_the_classes_or_the_feeder_would_end(project: Project) -> None:
    with install.open_project(project.folder) as opened:
        there = install.snapshot(opened, "gradient")
        wanted = steps.Wanted(app="gradient", title="G", programs=install.find_programs(), size_classes=3)
        kinds = [step.changes[0].path for step in size_steps.plan(there, wanted, steps.plan(there, wanted))]
    assert kinds == ["size_census_gradient", "gradient", "config.xml", "config.xml", "config.xml"]


@pytest.mark.parametrize("counted", [False, True])
def test_uninstalling_takes_it_out_again_also_when_boinc_has_counted_hosts_since(
    project: Project, counted: bool
) -> None:
    before = fingerprint(project.folder), contents(project.db)
    project.run("install", *SIZES)
    if counted:
        (project.folder / "size_census_gradient").write_text("3.317408e+09\n3.468828e+09\n")
    project.run("uninstall", "--drop-tables", "--yes")
    assert (fingerprint(project.folder), contents(project.db)) == before


def test_uninstalling_says_what_nobody_would_send_any_more(project: Project) -> None:
    project.run("install", *SIZES)
    with project.db.transaction() as connection:
        ours = connection.execute(sa.select(database.app.c.id).where(database.app.c.name == "gradient")).scalar_one()
        for name, state in (("a", ServerState.INACTIVE), ("b", ServerState.INACTIVE), ("c", ServerState.OVER)):
            row = new_row(database.result, name=name, appid=ours, server_state=int(state))
            connection.execute(sa.insert(database.result).values(**row))
    found = project.run("uninstall", "--yes").output
    assert "2 unsent results of gradient wait for size_regulator" in " ".join(found.split())


def test_the_regulator_of_somebody_else_s_app_and_other_tasks_stay(project: Project) -> None:
    project.run("install", *SIZES)
    path = project.folder / "config.xml"
    theirs = "<daemon><cmd>size_regulator --app_name theirs --lo 1 --hi 2 --sleep_time 9</cmd></daemon>"
    text = path.read_text().replace("</daemons>", f"{theirs}</daemons>").replace("1 hour", "2 hours")
    path.write_text(text)
    tasks = len(project.config().findall("tasks/task"))
    project.run("uninstall")
    found = project.config()
    regulators = [e for e in found.findall("daemons/daemon/cmd") if (e.text or "").strip().startswith("size_regulator")]
    assert [each.text for each in regulators] == ["size_regulator --app_name theirs --lo 1 --hi 2 --sleep_time 9"]
    assert len(found.findall("tasks/task")) == tasks - 1


def test_batch_accel_is_in_the_way(project: Project) -> None:
    path = project.folder / "config.xml"
    path.write_text(path.read_text().replace("    </config>", "        <batch_accel/>\n    </config>"))
    found = CliRunner().invoke(main, ["install", str(project.folder), *SIZES])
    assert found.exit_code == 2 and "batch_accel" in found.output
    assert project.folder.joinpath("size_census_gradient").exists() is False


# Doctor, and creating a job.

CLASSED: Changes = (("local_steps = 5", "local_steps = 8\nspeed_classes = [1.0, 0.5, 0.25]"),)


@pytest.mark.parametrize(
    ("damage", "text", "severity"),
    [
        ("none", "", None),
        ("classes", "n_size_classes of gradient is 0, and speed_classes of tiny-diloco are 3", Severity.ERROR),
        ("census", "so BOINC's feeder ends when it starts", Severity.ERROR),
        ("old census", "is older than two days", Severity.WARNING),
        ("regulator", "no size_regulator for gradient is in <daemons>", Severity.ERROR),
        ("task", "size_census.php is not in <tasks>", Severity.WARNING),
        ("flag", "<size_classes> is not in config.xml", Severity.WARNING),
        ("speeds", "median speeds of [1, 0.9, 0.8]", Severity.WARNING),
    ],
)
def test_doctor_says_what_speed_classes_lack(damage: str, text: str, severity: Severity | None) -> None:
    config = "<config><size_classes>1</size_classes></config>"
    daemons = "<daemons><daemon><cmd>size_regulator --app_name gradient --lo 5</cmd></daemon></daemons>"
    tasks = "<tasks><task><cmd>run_in_ops ./size_census.php</cmd></task></tasks>"
    parts = {"flag": (config, ""), "regulator": (daemons, ""), "task": (tasks, "")}
    old, new = parts.get(damage, ("", ""))
    xml = (
        f"<boinc>{config}{daemons}{tasks}</boinc>".replace(old, new)
        if old
        else f"<boinc>{config}{daemons}{tasks}</boinc>"
    )
    with tiny_project("diloco.toml", changes=CLASSED) as project:
        census = project.tree.project_dir / "size_census_gradient"
        census.write_text("8.5e8\n9.5e8\n")
        if damage == "census":
            census.write_text("8.5e8\n")
        elif damage == "old census":
            os.utime(census, (1e9, 1e9))
        elif damage == "classes":
            project.change(database.app, 1, n_size_classes=0)
        elif damage == "speeds":
            add_hosts(project.db)
        elements = {"size_classes": "1"} if damage != "flag" else {}
        object.__setattr__(project.tree.config, "elements", elements)
        patient = Patient(tree=project.tree, standard=True, apps=["gradient"], daemons=steps.daemons(xml))
        with project.db.read() as connection:
            found: list[Finding] = list(doctor_sizes.check_sizes(patient, connection))
    if severity is None:
        assert found == []
    else:
        assert [each.severity for each in found if text in str(each)] == [severity], [str(each) for each in found]


def add_hosts(db: Database) -> None:
    """Six of each class, of speeds 10, 9 and 8."""
    with db.transaction() as connection:
        for number in range(18):
            speed = (1e9, 9e8, 8e8)[number % 3]
            host = database.new_row(database.host, id=100 + number, userid=1, on_frac=1.0, active_frac=1.0)
            connection.execute(database.host.insert(), host)
            row = database.new_row(
                database.host_app_version, host_id=100 + number, app_version_id=1, et_n=3, et_avg=1 / speed
            )
            connection.execute(database.host_app_version.insert(), row)


def test_on_a_standard_server_a_job_waits_for_the_administrator_and_two_jobs_must_agree() -> None:
    with tiny_project("diloco.toml", changes=CLASSED) as project:
        set_up_classes(project.tree, project.db, "gradient", 3)
        with pytest.raises(JobError, match="are 2, and the job 'tiny-diloco' of the same app has 3; write as many"):
            set_up_classes(project.tree, project.db, "gradient", 2)
    with tiny_project("diloco.toml") as project:
        object.__setattr__(project.tree.config, "db_name", "boinc")
        with pytest.raises(JobError, match=r"run boinc-train install .* --app gradient --size-classes 3"):
            set_up_classes(project.tree, project.db, "gradient", 3)


def test_a_plan_for_a_project_without_app_row_is_made_too(project: Project) -> None:
    with install.open_project(project.folder) as opened:
        there = install.snapshot(opened, "gradient")
        assert there.app_row is None
        wanted = steps.Wanted(app="gradient", title="G", programs={}, size_classes=2)
        accelerated = steps.Snapshot(
            files={**there.files, "config.xml": b"<boinc><config><batch_accel>1</batch_accel></config></boinc>"},
            links=there.links, app_row=None, tables_missing=(),
        )  # fmt: skip
        with pytest.raises(InstallError):
            size_steps.plan(accelerated, wanted, [])
