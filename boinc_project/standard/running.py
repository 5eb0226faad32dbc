"""Which daemons of a project run on this machine, from bin/start's pid and lock files (`sched/start`)."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from boinc_project.standard.steps import DAEMONS, app_named


@dataclass(frozen=True, kw_only=True)
class PidFile:
    """One `pid_HOST/NAME.pid`; `pid` 0 where it holds no number."""

    path: Path
    pid: int
    alive: bool


def pid_files(project_dir: Path, host: str) -> list[PidFile]:
    """The pid files of this machine's daemons."""
    found = []
    for path in sorted((project_dir / f"pid_{host}").glob("*.pid")):
        try:
            pid = int(path.read_text(encoding="ascii", errors="replace").split()[0])
        except (OSError, ValueError, IndexError):
            pid = 0
        found.append(PidFile(path=path, pid=pid, alive=pid > 0 and psutil.pid_exists(pid)))
    return found


def our_processes(project_dir: Path, apps: tuple[str, ...] | list[str]) -> Iterator[PidFile]:
    """Our daemons for these apps that run here, whatever bin/start calls this machine."""
    for folder in sorted(project_dir.glob("pid_*")):
        for each in pid_files(project_dir, folder.name.removeprefix("pid_")):
            if each.alive and _app_of(each.pid) in apps:
                yield each


def _app_of(pid: int) -> str | None:
    """The app that a daemon of ours is for; None if the process is none: its id may have been given away since."""
    try:
        words = psutil.Process(pid).cmdline()
    except psutil.Error:
        return None
    return app_named(words) if any(name in word for word in words[:3] for name in DAEMONS) else None


def may_be(pid: int, program: str) -> bool:
    """Whether a process runs this program, as far as this user can see: its id may have been given away since."""
    try:
        words = psutil.Process(pid).cmdline()
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True
    return not words or any(program in word for word in words)


def lock_holder(path: Path) -> int | None:
    """Id of the process that holds a lock file of bin/start; None if nobody does. Takes no lock itself."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        # struct flock of Linux on 64 bits: type, whence, start, length, pid.
        asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = struct.unpack("hhqqi4x", fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOTSUP):
            return None
        raise
    finally:
        os.close(descriptor)
    return None if kind == fcntl.F_UNLCK else int(pid)
