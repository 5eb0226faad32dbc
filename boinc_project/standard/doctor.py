"""`doctor`: looks a project over and says what is wrong with it and what to do, one line a finding.

    examine -> checks of the tree, of the database -> findings, worst first

Works on projects of a standard server and on those of `boinc-train serve`, whose server needs no bin/start, cron
or cgi-bin. Reads only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError

from boinc_project.config import ConfigError, ProjectConfig
from boinc_project.database import Database, app
from boinc_project.gt_tables import gt_job
from boinc_project.project_tree import ProjectTree
from boinc_project.standard import (
    doctor_database,
    doctor_downloads,
    doctor_heartbeats,
    doctor_sizes,
    doctor_tree,
    doctor_uploads,
    schema,
    steps,
)
from boinc_project.standard.advice import advice
from boinc_project.standard.editing import read
from boinc_project.standard.findings import Finding, Patient, error, note, warning
from boinc_project.standard.install import is_standard, reason
from boinc_project.standard.record import InstallError, Record

TreeCheck = Callable[[Patient], Iterator[Finding]]
DatabaseCheck = Callable[[Patient, Connection], Iterator[Finding]]

TREE: Sequence[TreeCheck] = (
    doctor_tree.check_triggers,
    doctor_tree.check_directories,
    doctor_uploads.check_readable,
    doctor_tree.check_keys,
    doctor_tree.check_config,
)
STANDARD_TREE: Sequence[TreeCheck] = (
    doctor_tree.check_programs,
    doctor_tree.check_daemon_entries,
    doctor_tree.check_processes,
    doctor_tree.check_cron,
    doctor_tree.check_boinc_files,
    doctor_uploads.check_writable,
    doctor_downloads.check_readable,
)
DATABASE: Sequence[DatabaseCheck] = (
    doctor_database.check_clock,
    doctor_heartbeats.check_heartbeats,
    doctor_database.check_apps,
    doctor_sizes.check_sizes,
    doctor_database.check_jobs,
    doctor_database.check_queue,
)


def examine(project_dir: Path) -> list[Finding]:
    """All findings about a project, errors first. The folder must hold a config.xml."""
    try:
        config = ProjectConfig.load(project_dir)
        url = config.database_url
    except ConfigError as problem:
        return [error(str(problem), "mend config.xml")]
    tree = ProjectTree(project_dir, config)
    found: list[Finding] = []
    with Database(url) as database:
        try:
            with database.read() as connection:
                patient = _patient(tree, connection)
                found += tree_findings(patient)
                found += database_findings(patient, connection)
        except DBAPIError as problem:
            found.append(
                error(f"the database does not answer ({reason(problem)})", "start it, or correct the <db_...> elements")
            )
            found += tree_findings(_patient(tree, None))
    return sorted(found, key=lambda finding: finding.severity)


def _patient(tree: ProjectTree, connection: Connection | None) -> Patient:
    text = read((tree.project_dir / "config.xml").read_bytes())
    daemons = steps.daemons(text)
    try:
        apps = set(Record.load(tree.project_dir).apps)
    except InstallError:
        apps = set()
    apps |= {each.app for each in daemons if each.program in steps.DAEMONS}
    if connection is not None and sa.inspect(connection).has_table(gt_job.name):
        query = sa.select(app.c.name).join(gt_job, gt_job.c.appid == app.c.id).distinct()
        apps |= {str(name) for name in connection.execute(query).scalars()}
    standard = is_standard(tree.config)
    return Patient(tree=tree, standard=standard, apps=sorted(apps) or [steps.DEFAULT_APP], daemons=daemons)


def tree_findings(patient: Patient) -> list[Finding]:
    """What the files say."""
    checks = [*TREE, *(STANDARD_TREE if patient.standard else ())]
    found: list[Finding] = []
    for check in checks:
        try:
            found += check(patient)
        except OSError as problem:
            found.append(error(f"{problem.filename} cannot be read ({problem.strerror})", "correct its owner or mode"))
    return found


def database_findings(patient: Patient, connection: Connection) -> list[Finding]:
    """What the database says; without the expected schema only that."""
    found = list(doctor_database.check_schema(patient, connection))
    if schema.missing(connection):
        return found
    for check in DATABASE:
        found += check(patient, connection)
    if patient.standard:
        active = connection.execute(
            sa.select(sa.func.count()).select_from(app).where(app.c.deprecated == 0)
        ).scalar_one()
        for each in advice(patient.config, patient.daemons, int(active)):
            say = warning if each.overwritable else note
            found.append(say(f"not set in config.xml: {each.why}", each.line))
    return found
