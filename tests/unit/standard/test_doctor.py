"""Doctor: each thing that can be wrong is one line with a remedy, and a healthy project has no error."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from click.testing import CliRunner, Result

from boinc_project import app_versions, database, store
from boinc_project.cli.main import main
from boinc_project.database import Database
from boinc_project.gt_tables import JobState, gt_heartbeat
from boinc_project.project_tree import ProjectTree, create_project
from boinc_project.signing import PrivateKey
from boinc_project.standard import doctor_database, doctor_tree, install
from boinc_project.standard.findings import Patient, Severity
from boinc_project.standard.steps import DAEMONS
from boinc_project.states import Outcome, ServerState
from tests import mariadb
from tests.standard_project import make_programs, make_standard_project
from tests.tiny_project import TinyProject, tiny_project

on_mariadb = pytest.mark.parametrize("project", ["mariadb"], indirect=True)
needs_mariadb = pytest.mark.skipif(bool(mariadb.MISSING), reason=mariadb.MISSING)
HOST = os.uname().nodename.partition(".")[0]


def doctor(folder: Path) -> Result:
    return CliRunner().invoke(main, ["doctor", str(folder)])


def findings(found: Result, severity: str) -> list[str]:
    return [line for line in found.output.splitlines() if line.startswith(f"{severity}: ")]


class Standard:
    """An installed standard project that looks as if everything ran."""

    def __init__(self, folder: Path, db: Database) -> None:
        self.folder, self.db = folder, db

    def edit(self, old: str, new: str, name: str = "config.xml") -> None:
        text = (self.folder / name).read_text()
        assert old in text
        (self.folder / name).write_text(text.replace(old, new))

    def option(self, name: str, value: str) -> None:
        self.edit("    </config>", f"        <{name}>{value}</{name}>\n    </config>")

    def change(self, table: sa.Table, **values: Any) -> None:
        with self.db.transaction() as connection:
            connection.execute(sa.update(table).values(**values))

    def insert(self, table: sa.Table, **values: Any) -> None:
        with self.db.transaction() as connection:
            connection.execute(table.insert(), database.new_row(table, **values))

    def version(self) -> Path:
        return next((self.folder / "download").glob("gradient_stub*"))


@pytest.fixture
def running() -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for a daemon."""
    names = ("feeder", "transitioner", "file_deleter", *DAEMONS)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", *names])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, running: subprocess.Popen[bytes], request: pytest.FixtureRequest
) -> Iterator[Standard]:
    folder = tmp_path / "project"
    monkeypatch.setattr(install, "find_programs", lambda: made)
    made = make_programs(tmp_path / "venv" / "bin")
    kind = getattr(request, "param", "sqlite")
    with make_standard_project(folder, on=kind) as db:
        assert CliRunner().invoke(main, ["install", str(folder)]).exit_code == 0
        leaf = folder / "apps" / "gradient" / "1.0" / "x86_64-pc-linux-gnu"
        leaf.mkdir(parents=True)
        (leaf / "gradient_stub_1.0").write_text("#!/bin/sh\nexit 1\n")
        (leaf / "version.xml").write_text(
            "<version><file><physical_name>gradient_stub_1.0</physical_name><main_program/></file>"
            "<api_version>7.20.5</api_version></version>"
        )
        app_versions.update_versions(ProjectTree(folder), db)
        (folder / "reread_db").unlink()
        for name in ("feeder", "transitioner", "file_deleter", *(f"{d}_gradient" for d in made)):
            (folder / f"pid_{HOST}" / f"{name}.pid").write_text(f"{running.pid}\n")
        with db.transaction() as connection:
            for name in ("work_generator", "validator", "assimilator"):
                store.beat(connection, name, running.pid)
        for key in (folder / "keys").glob("*_private"):
            key.chmod(0o640)
        yield Standard(folder, db)


@needs_mariadb
@on_mariadb
def test_a_healthy_standard_project_has_no_error(project: Standard) -> None:
    found = doctor(project.folder)
    assert findings(found, "error") == [] and found.exit_code == 0, found.output
    assert [line for line in findings(found, "warning") if "0444" in line], "overwritable results are warned of"


def remove_program(project: Standard) -> None:
    (project.folder / "bin" / "gt_validator").unlink()
    (project.folder / "bin" / "gt_validator").symlink_to("/nowhere/gt_validator")


def dead_daemon(project: Standard) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (project.folder / f"pid_{HOST}" / "transitioner.pid").write_text(f"{ended.pid}\n")


def disabled_feeder(project: Standard) -> None:
    first = "<daemons>\n        <daemon>"
    project.edit(first, f"{first}\n            <disabled>1</disabled>")


def reused_pid(project: Standard) -> None:
    (project.folder / f"pid_{HOST}" / "gt_validator_gradient.pid").write_text(f"{os.getppid()}\n")


def hanging_daemon(project: Standard) -> None:
    pid = int((project.folder / f"pid_{HOST}" / "gt_validator_gradient.pid").read_text())
    project.change(gt_heartbeat, time=time.time() - 7200, pid=pid)


def other_upload_key(project: Standard) -> None:
    (project.folder / "keys" / "upload_private").write_text(PrivateKey.generate().text())


def old_reread(project: Standard) -> None:
    path = project.folder / "reread_db"
    path.touch()
    os.utime(path, (time.time() - 3600,) * 2)


def old_heartbeat(project: Standard) -> None:
    with project.db.transaction() as connection:
        connection.execute(
            sa.update(gt_heartbeat).where(gt_heartbeat.c.daemon == "validator").values(time=time.time() - 7200)
        )


def drop_own_table(project: Standard) -> None:
    with project.db.transaction() as connection:
        connection.execute(sa.text("DROP TABLE gt_ledger"))


def drop_own_column(project: Standard) -> None:
    with project.db.transaction() as connection:
        connection.execute(sa.text("ALTER TABLE gt_round DROP COLUMN anchor_version"))


def drop_needed_column(project: Standard) -> None:
    with project.db.transaction() as connection:
        connection.execute(sa.text("ALTER TABLE gt_round DROP COLUMN members"))


def drop_column(project: Standard) -> None:
    with project.db.transaction() as connection:
        connection.execute(sa.text("ALTER TABLE workunit DROP COLUMN keywords"))


def new_column(project: Standard) -> None:
    with project.db.transaction() as connection:
        connection.execute(sa.text("ALTER TABLE workunit ADD COLUMN flavour integer NOT NULL"))


def old_engine(project: Standard) -> None:
    with project.db.transaction() as connection:
        connection.execute(sa.text("ALTER TABLE result ENGINE=MyISAM"))


def waiting_workunit(project: Standard) -> None:
    appid = store.app_id(project.db, "gradient")
    row = {"name": "gt_a", "appid": appid, "transition_time": int(time.time()) - 7200}
    project.insert(database.workunit, **row, result_template_file="templates/gradient_out")


def lost_template(project: Standard) -> None:
    appid = store.app_id(project.db, "gradient")
    row = {"name": "gt_a", "appid": appid, "transition_time": 2**31 - 1}
    project.insert(database.workunit, **row, result_template_file="templates/gone_out")


def cases(kinds: Iterable[str]) -> list[Any]:
    """On MariaDB where the database server itself matters."""
    server = {"database away", "unknown column", "BOINC's column", "engine", "ids"}
    return [
        pytest.param("mariadb", kind, marks=needs_mariadb) if kind in server else pytest.param("sqlite", kind)
        for kind in kinds
    ]


ERRORS: dict[str, tuple[Callable[[Standard], None], str]] = {
    "config.xml": (lambda p: p.edit("</boinc>", ""), "not well-formed"),
    "database away": (lambda p: p.edit("secret", "wrong"), "the database does not answer"),
    "stop file": (lambda p: (p.folder / "stop_daemons").touch(), "so no daemon runs"),
    "stop_upload": (lambda p: (p.folder / "stop_upload").touch(), "uploads are refused"),
    "no feeder": (lambda p: p.edit("feeder -d 3", "db_purge"), "feeder is not in <daemons>"),
    "feeder disabled": (disabled_feeder, "the scheduler: take <disabled> out"),
    "no daemon": (lambda p: p.edit("gt_validator -d", "echo -d"), "gt_validator for gradient is not in <daemons>"),
    "disabled": (
        lambda p: p.edit("<cmd>gt_assimilator", "<disabled>1</disabled><cmd>gt_assimilator"),
        "gt_assimilator for gradient is disabled",
    ),
    "shared pid file": (
        lambda p: p.edit("gt_validator_gradient.pid", "gt_assimilator_gradient.pid"),
        "share the pid_file gt_assimilator_gradient.pid",
    ),
    "link leads nowhere": (remove_program, "/nowhere/gt_validator, which is no program"),
    "dead daemon": (dead_daemon, "transitioner -d 3 does not run"),
    "pid file of another program": (reused_pid, "is another program now"),
    "never started": (
        lambda p: (p.folder / f"pid_{HOST}" / "gt_validator_gradient.pid").unlink(), "was never started",
    ),
    "keys": (other_upload_key, "are no pair"),
    "upload key gone": (lambda p: (p.folder / "keys" / "upload_private").unlink(), "the transitioner ends"),
    "download directory": (lambda p: (p.folder / "download").rename(p.folder / "elsewhere"), "does not exist"),
    "reread_db": (old_reread, "no feeder is running"),
    "cgi": (lambda p: (p.folder / "cgi-bin" / "cgi").unlink(), "cgi-bin/cgi is missing"),
    "config_aux.xml": (lambda p: p.edit("</config>", "", "config_aux.xml"), "config_aux.xml is not well-formed"),
    "certificates": (
        lambda p: p.edit("dont_generate_upload_certificates", "x"), "only one of <dont_generate_upload_certificates>",
    ),
    "upload url": (lambda p: p.edit("_cgi/file_upload_handler", "_cgi/fuh"), "does not contain file_upload_handler"),
    "heartbeat": (old_heartbeat, "ended its last pass 2 h ago"),
    "own table": (drop_own_table, "our tables gt_ledger are missing"),
    "own column": (drop_own_column, "lack gt_round.anchor_version: boinc-train install"),
    "own column without default": (drop_needed_column, "lack gt_round.members: they are of another version"),
    "BOINC's column": (drop_column, "lacks workunit.keywords"),
    "unknown column": (new_column, "no default: workunit.flavour"),
    "engine": (old_engine, "result have no transactions"),
    "deprecated": (lambda p: p.change(database.app, deprecated=1), "is deprecated"),
    "weight": (lambda p: p.change(database.app, weight=0), "the weight of the app gradient is 0"),
    "app gone": (lambda p: p.change(database.app, name="x" + database.app.c.name), "has no app gradient"),
    "no version": (lambda p: p.change(database.app_version, deprecated=1), "no app version that volunteers could run"),
    "version's XML": (lambda p: p.change(database.app_version, xml_doc="<file_info>"), "cannot be parsed"),
    "version's file": (lambda p: p.version().unlink(), "is missing, so every download fails"),
    "version's bytes": (lambda p: p.version().write_text("#!/bin/sh\nexit 2\n"), "the signature of gradient_stub_1.0"),
    "transitioner's backlog": (waiting_workunit, "have waited for the transitioner for 2 h"),
    "template": (lost_template, "templates/gone_out is missing"),
}  # fmt: skip


@pytest.mark.parametrize(("project", "kind"), cases(ERRORS), indirect=["project"])
def test_what_stops_work_is_one_error_line_with_a_remedy(project: Standard, kind: str) -> None:
    damage, text = ERRORS[kind]
    damage(project)
    found = doctor(project.folder)
    lines = [line for line in findings(found, "error") if text in line]
    assert len(lines) == 1, found.output
    assert found.exit_code == 1 and lines[0].count(": ") >= 2
    assert "Traceback" not in found.output and "secret" not in found.output


def test_a_daemon_that_hangs_must_be_ended_before_bin_start_starts_it_again(project: Standard) -> None:
    hanging_daemon(project)
    (line,) = [each for each in findings(doctor(project.folder), "error") if "gt_validator" in each]
    assert "end process" in line


def test_a_key_that_may_not_be_read_is_not_said_to_be_lost(project: Standard, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> PrivateKey:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(doctor_tree.signing, "read_private_key", refused)
    (line, _) = [each for each in findings(doctor(project.folder), "error") if "_private" in each]
    assert "owner or mode" in line and "restore" not in line


def failures(project: Standard) -> None:
    appid = store.app_id(project.db, "gradient")
    for number in range(10):
        project.insert(
            database.result, name=f"gt_a_{number}", appid=appid, workunitid=1, server_state=int(ServerState.OVER),
            outcome=int(Outcome.CLIENT_ERROR if number < 6 else Outcome.SUCCESS), exit_status=195 if number < 6 else 0,
        )  # fmt: skip


def many_ids(project: Standard) -> None:
    with project.db.transaction() as connection:
        connection.execute(sa.text("ALTER TABLE result AUTO_INCREMENT = 2100000000"))


def sized(project: Standard) -> None:
    project.change(database.app, n_size_classes=3)
    (project.folder / "size_census_gradient").write_text("1e9\n2e9\n")


WARNINGS: dict[str, tuple[Callable[[Standard], None], str]] = {
    "overwritable": (lambda p: None, "<fuh_set_completed_permission>0444"),
    "still overwritable": (lambda p: p.option("fuh_set_completed_permission", "0664"), "0444"),
    "quota": (lambda p: p.edit("            500", "            3"), "<daily_result_quota> is 3"),
    "host": (lambda p: p.option("host", "elsewhere"), "<host> of config.xml is elsewhere"),
    "size classes": (lambda p: sized(p), "n_size_classes of gradient is 3, but no job has speed_classes"),
    "adaptive": (lambda p: p.change(database.app, target_nresults=2), "adaptive replication"),
    "hr": (lambda p: p.change(database.app, homogeneous_redundancy=1), "homogeneous redundancy"),
    "private key": (lambda p: (p.folder / "keys" / "upload_private").chmod(0o644), "everybody on this machine"),
    "no limit": (lambda p: (p.folder / "config_aux.xml").unlink(), "no limit for gradient"),
    "plan class": (lambda p: p.change(database.app_version, plan_class="cuda_new"), "plan_class_spec.xml lacks"),
    "name of a plan class": (
        lambda p: p.change(database.app_version, plan_class="simulation"), "for a class of amd because of its name",
    ),
    "failures": (failures, "6 of the last 10 tasks of gradient failed, 6 with exit status 195"),
    "ids": (many_ids, "the ids of result are at 2100000000"),
    "cron": (lambda p: None, "no cron entry"),
}  # fmt: skip


@pytest.mark.parametrize(("project", "kind"), cases(WARNINGS), indirect=["project"])
def test_what_makes_work_worse_is_a_warning_and_no_error(
    project: Standard, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_tree, "_crontab", lambda: "# nothing\n")
    damage, text = WARNINGS[kind]
    damage(project)
    found = doctor(project.folder)
    assert [line for line in findings(found, "warning") if text in line], found.output
    assert found.exit_code == 0


def test_daemons_of_another_machine_are_not_looked_for_here(project: Standard) -> None:
    project.option("host", "elsewhere")
    for path in (project.folder / f"pid_{HOST}").glob("*.pid"):
        path.unlink()
    found = doctor(project.folder)
    assert "never started" not in found.output and f"write {HOST}" in found.output


def test_a_cron_entry_of_the_project_is_recognised(project: Standard, monkeypatch: pytest.MonkeyPatch) -> None:
    line = f"*/5 * * * * cd {project.folder} ; {project.folder}/bin/start --cron\n"
    monkeypatch.setattr(doctor_tree, "_crontab", lambda: line)
    assert "no cron entry" not in doctor(project.folder).output
    monkeypatch.setattr(doctor_tree, "_crontab", lambda: "#" + line)
    assert "no cron entry" in doctor(project.folder).output


def test_a_lock_that_another_process_holds_is_named_and_left_alone(project: Standard) -> None:
    dead_daemon(project)
    lock = project.folder / f"pid_{HOST}" / "transitioner.lock"
    code = (
        "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB);"
        " print('held', flush=True); time.sleep(600)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(lock)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == b"held\n"
        found = doctor(project.folder)
        assert [line for line in findings(found, "error") if f"held by process {holder.pid}" in line], found.output
        with lock.open("a") as stream, pytest.raises(OSError):
            fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        holder.kill()
        holder.communicate()


@needs_mariadb
@on_mariadb
def test_the_clocks_of_database_and_machine_are_compared(project: Standard) -> None:
    tree = ProjectTree(project.folder)
    for skew, severities in ((0.0, []), (-20.0, [Severity.WARNING]), (90.0, [Severity.ERROR])):
        patient = Patient(tree=tree, standard=True, apps=["gradient"], daemons=[], now=time.time() + skew)
        with project.db.read() as connection:
            found = list(doctor_database.check_clock(patient, connection))
        assert [finding.severity for finding in found] == severities


@needs_mariadb
@on_mariadb
def test_looking_changes_nothing(project: Standard) -> None:
    from tests.standard_project import contents, fingerprint

    before = fingerprint(project.folder), contents(project.db)
    doctor(project.folder)
    assert (fingerprint(project.folder), contents(project.db)) == before


# Projects of boinc-train serve.


@pytest.fixture
def tiny() -> Iterator[TinyProject]:
    with tiny_project() as made:
        yield made


def test_an_embedded_project_is_looked_over_without_what_only_a_standard_server_has(tiny: TinyProject) -> None:
    with tiny.db.transaction() as connection:
        for name in ("work_generator", "validator", "assimilator"):
            store.beat(connection, name, os.getpid())
    found = doctor(tiny.tree.project_dir)
    assert found.exit_code == 0, found.output
    for word in ("cgi-bin", "bin/start", "cron", "<daemons>", "feeder", "next_rpc_delay"):
        assert word not in found.output


def test_a_project_that_is_not_served_says_so(tiny: TinyProject) -> None:
    found = doctor(tiny.tree.project_dir)
    assert found.exit_code == 1 and "boinc-train serve" in found.output


def volunteers(tiny: TinyProject, hosts_of_users: list[int], **options: int) -> list[str]:
    """What doctor says of a running job with quorum 2 where users have so many computers each."""
    path = tiny.tree.project_dir / "config.xml"
    for name, value in options.items():
        text, number = re.subn(f"<{name}>1<", f"<{name}>{value}<", path.read_text())
        assert number == 1
        path.write_text(text)
    owners = [user for user, hosts in enumerate(hosts_of_users, 1) for _ in range(hosts)]
    for number, user in enumerate(owners, 1):
        tiny.add_host(user, number)
        tiny.change(database.host, number, rpc_time=int(time.time()))
    return [line for line in doctor(tiny.tree.project_dir).output.splitlines() if "in the last 7 days" in line]


@pytest.mark.parametrize(
    ("hosts_of_users", "severity"), [([], "warning"), ([3], "error"), ([2, 2], "warning"), ([1, 1, 1], "")]
)
def test_too_few_users_for_quorum_and_retries_are_told_with_both_numbers(
    tiny: TinyProject, hosts_of_users: list[int], severity: str
) -> None:
    lines = volunteers(tiny, hosts_of_users)
    assert [line.partition(":")[0] for line in lines] == ([severity] if severity else [])
    for line in lines:
        assert not hosts_of_users or (f" of {len(hosts_of_users)} user" in line and "needs 2 users" in line)
        assert ("can never be replaced" in line) == (len(hosts_of_users) == 2)


@pytest.mark.parametrize(
    ("hosts_of_users", "each_host_once", "severity"),
    [([1], 1, "error"), ([2], 1, "warning"), ([3], 1, ""), ([2], 0, "")],
)
def test_where_computers_vote_they_are_counted_instead_of_users(
    tiny: TinyProject, hosts_of_users: list[int], each_host_once: int, severity: str
) -> None:
    options = {"one_result_per_user_per_wu": 0, "one_result_per_host_per_wu": each_host_once}
    lines = volunteers(tiny, hosts_of_users, **options)
    assert [line.partition(":")[0] for line in lines] == ([severity] if severity else [])
    assert all("needs 2 computers" in line for line in lines)


def test_a_failed_job_is_an_error_with_its_note(tiny: TinyProject) -> None:
    with tiny.db.transaction() as connection:
        store.set_job_state(connection, tiny.job_id, JobState.FAILED, "the disk is full")
    found = doctor(tiny.tree.project_dir)
    assert [line for line in findings(found, "error") if "tiny stopped: the disk is full" in line]


def test_a_folder_without_a_project_is_a_mistake_of_the_command_line(tmp_path: Path) -> None:
    found = doctor(tmp_path)
    assert found.exit_code == 2 and "no BOINC project" in found.stderr
    assert CliRunner().invoke(main, ["doctor", "--no-such-option"]).exit_code == 2


def test_a_fresh_embedded_project_has_findings_and_no_traceback(tmp_path: Path) -> None:
    tree = create_project(tmp_path / "project", master_url="http://127.0.0.1:8080/train/", long_name="Empty")
    found = doctor(tree.project_dir)
    assert (found.exit_code == 1 and found.exception is None) or isinstance(found.exception, SystemExit)
