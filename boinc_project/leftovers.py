"""Temporary files of writers that were killed, removed by the daemon that owns the folder.

A daemon looks once, when it starts, and removes what nobody has written to for an hour; it remembers what is
younger until that is an hour old, too. Age decides, and not whether a process still lives, because others write
in the same folders, maybe from other machines: further instances of the daemon, boinc-train. Between the last byte
of a file and its renaming lies at most a batch's wait for the disk, minutes. Whoever took longer (a machine that
slept) fails at the renaming, as on a disk that is away, and writes the file again.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from boinc_project.contract.whole_file import TEMPORARY

AGE_S = 3600.0

log = logging.getLogger("daemon")


class Leftovers:
    """What killed writers left in some folders; those that do not exist are empty."""

    def __init__(self, folders: Iterable[Path], clock: Callable[[], float] = time.time) -> None:
        self._folders = folders
        self._clock = clock
        self._found: list[Path] | None = None
        self._due = -math.inf

    def sweep(self) -> int:
        """Remove what is old enough; returns how many files that were. Cheap while there is nothing to do."""
        now = self._clock()
        if now < self._due:
            return 0
        if self._found is None:
            self._found = [path for folder in self._folders for path in _temporary_files(folder)]
        removed, younger = 0, {}
        for path in self._found:
            with _told(path):
                written = path.stat().st_mtime
                if written + AGE_S <= now:
                    path.unlink()
                    removed += 1
                else:
                    younger[path] = written
        self._found = list(younger)
        self._due = min(younger.values(), default=math.inf) + AGE_S
        if removed:
            log.info("removed %d temporary files that killed processes had left", removed)
        return removed


def _temporary_files(folder: Path) -> Iterator[Path]:
    with _told(folder), os.scandir(folder) as entries:
        yield from [Path(entry.path) for entry in entries if TEMPORARY.fullmatch(entry.name)]


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """A place that cannot be tidied keeps nobody from working."""
    try:
        yield
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("%s cannot be tidied (%s)", path, error.strerror)
