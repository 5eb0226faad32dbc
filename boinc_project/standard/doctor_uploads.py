"""Doctor's checks of the upload directory: daemons must be able to read and remove there, the web server to write.

BOINC's `sched/file_upload_handler.cpp` takes a directory that it may not write to for one whose file is complete and
read-only: it answers "success" and drops the bytes. Nobody notices before the validator misses the file.
"""

from __future__ import annotations

import grp
import os
import pwd
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from boinc_project.standard.findings import Finding, Patient, error, listed, warning

LOOKED_AT = 50  # fan-out directories and files of them that are tried for reading, at most
_WRITE_AND_ENTER = 0o3
#: Logs in log_HOST that BOINC's CGI programs make themselves (get_log_path), so that their owner runs these programs.
CGI_LOGS = ("file_upload_handler.log", "scheduler.log")


@dataclass(frozen=True, kw_only=True)
class Account:
    """A user of this machine and all groups that it belongs to."""

    name: str
    uid: int
    gids: frozenset[int]


def check_readable(patient: Patient) -> Iterator[Finding]:
    """Whether this user, who runs the daemons, can read and remove what was uploaded."""
    root = patient.config.upload_dir
    if not root.is_dir() or not os.access(root, os.R_OK | os.X_OK):
        return
    for folder in sorted(path for path in root.iterdir() if path.is_dir())[:LOOKED_AT]:
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            yield error(
                f"{folder} cannot be read and written by this user, so results cannot be validated and removed",
                "put web server and daemons into one group and make the directory writable for it (chmod g+rwxs)",
            )
            return
        for path in sorted(folder.iterdir())[:LOOKED_AT]:
            if not os.access(path, os.R_OK):
                yield error(f"{path} cannot be read by this user", "make uploads readable for the daemons' group")
                return


def check_writable(patient: Patient) -> Iterator[Finding]:
    """Whether the web server can write into the upload directory and those in it that BOINC would use."""
    root = patient.config.upload_dir
    if not root.is_dir() or not os.access(root, os.R_OK | os.X_OK):
        return
    account = web_account(patient)
    group = root.stat().st_gid
    names = [format(number, "x") for number in range(patient.config.uldl_dir_fanout)]
    shut = [path for path in (root, *(root / name for name in names)) if _is_shut(path, account, group)]
    if not shut:
        return
    which = listed([str(path) for path in shut], 3)
    effect = "the upload handler tells clients that all is well and loses their files"
    if account is None:
        yield warning(
            f"{which} cannot be written by the group {_group_name(group)} of {root.name}, and if the web server is"
            f" in that group, {effect}",
            _open(root, group),
        )
    else:
        join = f"usermod -aG {_group_name(group)} {account.name}, restart the web server, then "
        yield error(
            f"{which} cannot be written by {account.name}, who runs BOINC's CGI programs: {effect}",
            f"as root: {'' if group in account.gids else join}{_open(root, group)}",
        )


def web_account(patient: Patient) -> Account | None:
    """Who runs BOINC's CGI programs: the owner of the logs that they have made; None if there are none yet."""
    for path in (path for name in CGI_LOGS for path in sorted(patient.folder.glob(f"log_*/{name}"))):
        owner = path.stat().st_uid
        if owner != 0:  # an admin has tried the program by hand
            return account_of(owner)
    return None


def account_of(uid: int) -> Account:
    """The user with this id; one that has no name has no groups."""
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        return Account(name=f"user {uid}", uid=uid, gids=frozenset())
    return Account(name=entry.pw_name, uid=uid, gids=frozenset(os.getgrouplist(entry.pw_name, entry.pw_gid)))


def may_write(status: os.stat_result, account: Account) -> bool:
    """Whether a directory's owner, group and mode let the account make files in it."""
    return may(status, account, _WRITE_AND_ENTER)


def may(status: os.stat_result, account: Account, wanted: int) -> bool:
    """Whether owner, group and mode grant the account these of the bits 4 (read), 2 (write), 1 (execute, enter)."""
    if account.uid == 0:
        return True
    shift = 6 if account.uid == status.st_uid else 3 if status.st_gid in account.gids else 0
    return status.st_mode >> shift & wanted == wanted


def told_by_mode(path: Path) -> os.stat_result | None:
    """What is known of a path whose owner, group and mode say who may do what; None if they do not say it all."""
    try:
        return None if "system.posix_acl_access" in os.listxattr(path) else path.stat()
    except OSError:
        return None


def _is_shut(path: Path, account: Account | None, group: int) -> bool:
    """Whether the account, or where it is not known somebody of the group, may not write into a directory."""
    status = told_by_mode(path)
    return status is not None and not may_write(status, account or Account(name="", uid=-1, gids=frozenset([group])))


def _open(root: Path, group: int) -> str:
    """The command that gives every directory the group and mode that make_project gives the upload directory."""
    places = f"find {shlex.quote(str(root))} -type d"
    return f"{places} -exec chgrp {_group_name(group)} {{}} + -exec chmod g+rwxs {{}} +"


def _group_name(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)
