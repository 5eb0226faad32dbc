"""Doctor on the upload directory: where the web server cannot write, BOINC's handler loses files without a word.

Also: no code of ours makes a directory there, since it would belong to the daemons' user.
"""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from boinc_project.project_tree import ProjectTree
from boinc_project.standard import doctor_uploads
from boinc_project.standard.doctor_uploads import Account, account_of, check_writable, may_write, web_account
from boinc_project.standard.findings import Finding, Patient, Severity
from tests.standard_project import make_standard_project
from tests.tiny_project import TinyProject, tiny_project

ME, MY_GROUP = os.geteuid(), os.getegid()
STRANGER = Account(name="www-data", uid=ME + 1, gids=frozenset([MY_GROUP + 1]))
MEMBER = Account(name="www-data", uid=ME + 1, gids=frozenset([MY_GROUP + 1, MY_GROUP]))


@pytest.fixture
def patient(tmp_path: Path) -> Iterator[Patient]:
    folder = tmp_path / "project"
    with make_standard_project(folder):
        (folder / "upload" / "3ec").mkdir()
        (folder / "upload" / "3ec").chmod(0o2771)  # as the upload handler makes it
        yield Patient(tree=ProjectTree(folder), standard=True, apps=["gradient"], daemons=[])


def found(patient: Patient, account: Account | None, monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    monkeypatch.setattr(doctor_uploads, "web_account", lambda patient: account)
    return list(check_writable(patient))


def make(patient: Patient, name: str, mode: int) -> Path:
    path = patient.config.upload_dir / name
    path.mkdir()
    path.chmod(mode)
    return path


@pytest.mark.parametrize("account", [MEMBER, None], ids=["known", "unknown"])
def test_directories_as_boinc_makes_them_are_right(
    patient: Patient, account: Account | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert found(patient, account, monkeypatch) == []


@pytest.mark.parametrize(("account", "severity"), [(MEMBER, Severity.ERROR), (None, Severity.WARNING)])
@pytest.mark.parametrize("mode", [0o755, 0o2755, 0o700, 0o2720, 0o2710])
def test_a_directory_that_the_group_cannot_write_is_named_with_the_command_that_opens_it(
    patient: Patient, account: Account | None, severity: Severity, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shut = make(patient, "2a", mode)
    (finding,) = found(patient, account, monkeypatch)
    assert finding.severity == severity and str(shut) in finding.what and "3ec" not in finding.what
    assert "loses their files" in finding.what
    assert f"find {patient.config.upload_dir} -type d" in finding.remedy and "usermod" not in finding.remedy
    command = finding.remedy.removeprefix("as root: ")
    assert os.waitstatus_to_exitcode(os.system(command)) == 0
    assert found(patient, account, monkeypatch) == []
    assert shut.stat().st_mode & 0o2070 == 0o2070


def test_the_upload_directory_itself_counts_too(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    patient.config.upload_dir.chmod(0o755)
    (finding,) = found(patient, MEMBER, monkeypatch)
    assert str(patient.config.upload_dir) in finding.what and finding.severity == Severity.ERROR


def test_a_web_server_outside_of_the_group_is_to_be_put_into_it(
    patient: Patient, monkeypatch: pytest.MonkeyPatch
) -> None:
    (finding,) = found(patient, STRANGER, monkeypatch)
    assert f"usermod -aG {doctor_uploads._group_name(MY_GROUP)} www-data, restart the web server" in finding.remedy


def test_directories_that_boinc_would_not_use_do_not_matter(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("old", "400", "00"):
        make(patient, name, 0o700)
    assert found(patient, MEMBER, monkeypatch) == []


def test_many_directories_are_one_finding(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(10):
        make(patient, format(number, "x"), 0o755)
    (finding,) = found(patient, MEMBER, monkeypatch)
    assert "and 7 more" in finding.what


@pytest.mark.parametrize("log", doctor_uploads.CGI_LOGS)
def test_the_web_servers_user_is_the_owner_of_the_logs_that_boincs_cgi_programs_make(
    patient: Patient, log: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert web_account(patient) is None, "nothing was uploaded yet"
    path = patient.folder / f"log_{patient.host}" / log
    path.touch()
    account = web_account(patient)
    if ME == 0:
        assert account is None, "an admin's own try says nothing"
        os.chown(path, 1, -1)
        account = web_account(patient)
    assert account is not None and account.uid == (ME or 1)


def test_an_account_has_its_own_and_its_further_groups() -> None:
    account = account_of(ME)
    assert account.name == pwd.getpwuid(ME).pw_name and pwd.getpwuid(ME).pw_gid in account.gids
    assert account_of(2**31 - 5).gids == frozenset()


@pytest.mark.parametrize(
    ("mode", "uid", "gid", "allowed"),
    [
        (0o2771, 7, 9, True),
        (0o2771, 8, 9, True),
        (0o2771, 8, 8, False),  # enter only
        (0o2751, 8, 9, False),
        (0o0573, 7, 9, False),  # the owner's bits count for the owner, however much others may
        (0o0753, 8, 9, False),
        (0o1777, 8, 8, True),
        (0o0000, 0, 0, True),
    ],
)
def test_owner_group_and_others_are_judged_as_the_kernel_does(mode: int, uid: int, gid: int, allowed: bool) -> None:
    status = os.stat_result((stat.S_IFDIR | mode, 0, 0, 1, 7, 9, 0, 0, 0, 0))
    assert may_write(status, Account(name="x", uid=uid, gids=frozenset([gid]))) == allowed


# Our own code.


@pytest.fixture
def tiny() -> Iterator[TinyProject]:
    with tiny_project() as made:
        yield made


def test_no_daemon_of_ours_makes_a_directory_in_upload(tiny: TinyProject, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    results = tiny.issue()
    for result in results:
        tiny.answer(result)
    for result in results[:2]:  # one task's files are gone, and their directories with them
        tiny.upload_path(result).unlink()
        tiny.upload_path(result).parent.rmdir()
    tiny.transitioner.run_once()
    real = os.mkdir

    def mkdir(path: Any, *arguments: Any, **named: Any) -> None:
        made.append(os.fspath(path))
        real(path, *arguments, **named)

    monkeypatch.setattr(os, "mkdir", mkdir)
    tiny.validator().one_pass()
    tiny.assimilator().one_pass()
    tiny.generator().one_pass()
    assert [path for path in made if path.startswith(str(tiny.tree.config.upload_dir))] == []
