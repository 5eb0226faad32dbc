"""What volunteers download can be read by the web server, whatever the umask of the command that published it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from boinc_project.contract import whole_file
from boinc_project.durable import FEW, FileBatch
from boinc_project.project_tree import ProjectTree
from boinc_project.standard import doctor_downloads
from boinc_project.standard.doctor import STANDARD_TREE
from boinc_project.standard.doctor_downloads import check_readable
from boinc_project.standard.doctor_uploads import Account
from boinc_project.standard.findings import Finding, Patient, Severity
from tests.standard_project import make_standard_project
from tests.tiny_project import TinyProject

ME, MY_GROUP = os.geteuid(), os.getegid()
STRANGER = Account(name="www-data", uid=ME + 1, gids=frozenset([MY_GROUP + 1]))
MEMBER = Account(name="www-data", uid=ME + 1, gids=frozenset([MY_GROUP + 1, MY_GROUP]))


@pytest.fixture(params=[0o077, 0o022, 0o002], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_job_its_app_version_and_its_versions_are_readable_whatever_the_umask(umask: int, tmp_path: Path) -> None:
    with TinyProject(tmp_path / "project") as project:
        project.tree.config.download_dir.chmod(0o2771)  # as BOINC's make_project has it
        before = set(project.tree.config.download_dir.iterdir())
        project.make_version()
        project.issue()
        root = project.tree.config.download_dir
        files = [path for path in root.rglob("*") if path.is_file()]
        folders = [path for path in root.rglob("*") if path.is_dir()]
        assert len(files) > 10 and len(folders) > 5
        assert {mode(path) for path in files} == {0o644}
        assert {mode(path) for path in folders if path in before} == {0o771}
        assert {mode(path) for path in folders if path not in before} == {0o2771}, "the group is handed down"


@pytest.mark.parametrize("number", [1, FEW + 1])
def test_files_that_are_not_for_the_web_server_keep_what_the_umask_gives(
    umask: int, number: int, tmp_path: Path
) -> None:
    with FileBatch(number) as files:
        for each in range(number):
            files.add(tmp_path / "kept" / str(each), b"x")
        files.commit()
    whole_file.write_bytes(tmp_path / "one", b"x")
    assert mode(tmp_path / "kept") == 0o777 & ~umask
    assert {mode(path) for path in tmp_path.rglob("*") if path.is_file()} == {0o666 & ~umask}


# Doctor.


@pytest.fixture
def patient(tmp_path: Path) -> Iterator[Patient]:
    folder = tmp_path / "project"
    with make_standard_project(folder):
        tree = ProjectTree(folder)
        for number in range(20):
            tree.stage_file(b"x", f"input_{number}")
        tree.stage_app_file(b"x", "program_1.0")
        yield Patient(tree=tree, standard=True, apps=["gradient"], daemons=[])


def found(patient: Patient, account: Account | None, monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    monkeypatch.setattr(doctor_downloads, "web_account", lambda patient: account)
    return list(check_readable(patient))


def test_it_is_one_of_the_checks_of_a_standard_project() -> None:
    assert check_readable in STANDARD_TREE


@pytest.mark.parametrize("account", [STRANGER, MEMBER, None])
def test_what_we_publish_is_right(patient: Patient, account: Account | None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(patient, account, monkeypatch) == []


@pytest.mark.parametrize("account", [STRANGER, MEMBER, None])
@pytest.mark.parametrize("victim", ["file", "companion", "folder", "flat", "root"])
def test_what_nobody_else_can_read_is_one_line_whose_command_mends_it(
    patient: Patient, account: Account | None, victim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = patient.tree.download_path("input_7")
    path = {
        "file": file,
        "companion": file.with_name("input_7.md5"),
        "folder": file.parent,
        "flat": patient.tree.app_file_path("program_1.0"),
        "root": patient.config.download_dir,
    }[victim]
    path.chmod(0o700 if path.is_dir() else 0o600)
    (finding,) = found(patient, account, monkeypatch)
    assert finding.severity == Severity.ERROR and str(path) in finding.what
    assert (account.name if account else "the web server") in finding.what
    assert os.waitstatus_to_exitcode(os.system(finding.remedy)) == 0
    assert found(patient, account, monkeypatch) == []


def test_a_whole_job_published_with_a_strict_umask_is_one_line(
    patient: Patient, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [path for path in patient.config.download_dir.rglob("*") if path.is_file()]
    for path in paths:
        path.chmod(0o600)
    (finding,) = found(patient, None, monkeypatch)
    assert f"and {len(paths) - 1} more files and directories there" in finding.what


def test_what_the_group_may_read_is_enough_for_a_member_only(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    patient.tree.download_path("input_7").chmod(0o640)
    assert [len(found(patient, account, monkeypatch)) for account in (MEMBER, None, STRANGER)] == [0, 0, 1]


def test_files_that_are_still_being_written_and_foreign_directories_do_not_matter(
    patient: Patient, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = patient.tree.download_path("input_7").with_name(whole_file.temporary_name("input_8"))
    hidden.touch()
    hidden.chmod(0o600)
    (patient.config.download_dir / "notes").mkdir(mode=0o700)
    assert found(patient, STRANGER, monkeypatch) == []
