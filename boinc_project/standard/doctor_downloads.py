"""Doctor's check of the download directory: the web server must be able to read what is published there.

Files of a command that was run with a strict umask, or copied there by hand, are refused to clients (403), whose tasks
fail then.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

from boinc_project.standard.doctor_uploads import Account, may, told_by_mode, web_account
from boinc_project.standard.findings import Finding, Patient, error

LOOKED_AT = 200_000  # entries at most
_READ, _ENTER = 4, 1


def check_readable(patient: Patient) -> Iterator[Finding]:
    """Whether the web server can read every published file. As long as nobody knows who it is (no CGI program has
    made a log yet), what group or others may read counts as readable."""
    root = patient.config.download_dir
    if not root.is_dir() or not os.access(root, os.R_OK | os.X_OK):
        return
    account = web_account(patient)
    names = [format(number, "x") for number in range(patient.config.uldl_dir_fanout)]
    shut: list[Path] = []
    seen = 0
    for folder in (root, *(root / name for name in names)):
        for path in _entries(folder) if folder.is_dir() else ():
            seen += 1
            if _is_shut(path, account):
                shut.append(path)
        if seen > LOOKED_AT:
            break
    if not shut:
        return
    others = f" and {len(shut) - 1} more files and directories there" if len(shut) > 1 else ""
    place = shlex.quote(str(root))
    yield error(
        f"{shut[0]}{others} cannot be read by {account.name if account else 'the web server'}, so downloads fail",
        f"find {place} -type d -exec chmod a+x {{}} + -o -type f -exec chmod a+r {{}} +",
    )


def _entries(folder: Path) -> Iterator[Path]:
    """The folder itself and the files in it, without hidden ones (which are still being written)."""
    yield folder
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_file() and not entry.name.startswith("."):
                yield Path(entry.path)


def _is_shut(path: Path, account: Account | None) -> bool:
    status = told_by_mode(path)
    if status is None:
        return False
    wanted = _ENTER if stat.S_ISDIR(status.st_mode) else _READ
    if account is not None:
        return not may(status, account, wanted)
    return not status.st_mode & (wanted << 3 | wanted)
