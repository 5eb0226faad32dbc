"""Doctor on heartbeats: daemons that config.xml names and that are silent, and rows of daemons given up."""

from __future__ import annotations

import contextlib
import os
import shlex
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from boinc_project import store
from boinc_project.daemon_start import Heart
from boinc_project.database import Database
from boinc_project.gt_tables import gt_heartbeat
from boinc_project.project_tree import ProjectTree
from boinc_project.standard import steps
from boinc_project.standard.doctor_heartbeats import check_heartbeats
from boinc_project.standard.findings import Finding, Patient, Severity
from tests import databases
from tests.standard_project import make_standard_project

ENTRY = "<daemon><cmd>{cmd}</cmd><output>{n}.log</output><pid_file>{n}.pid</pid_file></daemon>"
BOTH = ("gt_work_generator -d 3", "gt_assimilator --app gradient")


@pytest.fixture(params=databases.parameters(databases.SQLITE, databases.MARIADB))
def project(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Path, Database]]:
    folder = tmp_path / "project"
    with make_standard_project(folder, on=request.param) as db:
        store.create_own_tables(db)
        yield folder, db


def examined(project: tuple[Path, Database], validators: list[str], beats: dict[str, float]) -> list[Finding]:
    """Findings where config.xml has these validators, and daemons ended their last passes so many seconds ago."""
    folder, db = project
    cmds = [*BOTH, *(f"gt_validator -d 3 {options}" for options in validators)]
    text = "".join(ENTRY.format(cmd=cmd, n=number) for number, cmd in enumerate(cmds))
    daemons = steps.daemons(f"<boinc><daemons>{text}</daemons></boinc>")
    patient = Patient(tree=ProjectTree(folder), standard=True, apps=["gradient"], daemons=daemons)
    with db.transaction() as connection:
        for daemon, seconds in {"work_generator": 1, "assimilator": 1, **beats}.items():
            row = {"daemon": daemon, "pid": 77, "time": patient.now - seconds, "note": ""}
            connection.execute(sa.insert(gt_heartbeat), row)
    with db.read() as connection:
        return list(check_heartbeats(patient, connection))


def test_daemons_that_make_their_passes_are_no_findings(project: tuple[Path, Database]) -> None:
    shares = ["--mod 2 0", "-mod 2 1", "--app other --votes host"]
    beats = {"validator gradient 0/2": 5.0, "validator gradient 1/2": 5.0, "validator other": 5.0}
    assert examined(project, shares, beats) == []


def test_a_silent_share_is_an_error_although_the_other_shares_live(project: tuple[Path, Database]) -> None:
    beats = {"validator gradient 0/2": 5.0, "validator gradient 1/2": 7200.0}
    (finding,) = examined(project, ["--mod 2 0", "--mod 2 1"], beats)
    assert finding.severity == Severity.ERROR
    assert finding.what.startswith("gt_validator gradient 1/2 (process 77) ended its last pass 2 h ago")


def test_a_share_that_never_ended_a_pass_is_an_error(project: tuple[Path, Database]) -> None:
    (finding,) = examined(project, ["--mod 2 0", "--mod 2 1"], {"validator gradient 0/2": 5.0})
    assert finding.severity == Severity.ERROR and finding.what.startswith("gt_validator gradient 1/2 has never")


def test_rows_of_instances_that_config_xml_no_longer_names_are_notes_whose_command_removes_them(
    project: tuple[Path, Database],
) -> None:
    _, db = project
    old = {"validator gradient 0/2": 8000.0, "validator gradient 1/2": 8000.0, "validator other": 9e5}
    notes = examined(project, [""], {"validator": 5.0, **old})
    assert [finding.severity for finding in notes] == [Severity.NOTE] * 3
    for finding, daemon in zip(notes, old, strict=True):
        assert f"gt_{daemon} (process 77)" in finding.what and "does not name it" in finding.what
        command = shlex.split(finding.remedy.removeprefix("forget it: "))
        if db.is_sqlite:
            assert command[0] == "sqlite3"
            with contextlib.closing(sqlite3.connect(command[1], isolation_level=None)) as other:
                other.execute(command[2])
        else:
            assert command[0] == "mariadb" and {"-u", "-p", str(db.url.database)} <= set(command)
            with db.transaction() as connected:
                connected.exec_driver_sql(command[-1])
    with db.read() as connection:
        left = {str(row["daemon"]) for row in store.heartbeats(connection)}
    assert left == {"validator", "work_generator", "assimilator"}


def test_an_instance_that_runs_although_config_xml_does_not_name_it_is_a_note(project: tuple[Path, Database]) -> None:
    (finding,) = examined(project, [""], {"validator": 5.0, "validator other": 5.0})
    assert finding.severity == Severity.NOTE and finding.remedy.startswith("if process 77 is still that daemon")


def test_a_daemon_that_starts_forgets_those_that_were_silent_for_a_week(project: tuple[Path, Database]) -> None:
    _, db = project
    now = time.time()
    with db.transaction() as connection:
        for daemon, days in (("validator", 9), ("validator gradient 0/2", 8), ("assimilator", 6)):
            row = {"daemon": daemon, "pid": 1, "time": now - days * 86400, "note": ""}
            connection.execute(sa.insert(gt_heartbeat), row)
    Heart(db, "validator").beat()
    with db.read() as connection:
        left = {str(row["daemon"]): int(row["pid"]) for row in store.heartbeats(connection)}
    assert left == {"validator": os.getpid(), "assimilator": 1}
