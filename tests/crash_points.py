"""Runs a daemon's real `main` in a forked process that is killed with SIGKILL at a chosen boundary.

Boundaries are the moments just before and just after every statement and every commit of the database, and every
flush, renaming and removal of a file. A fork of the warm test process takes milliseconds, so that every boundary
of a run can be tried. Whoever forks must have closed its own connections to the database.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import sqlalchemy as sa
from sqlalchemy.engine import Engine
from sqlalchemy.engine.default import DefaultDialect

from boinc_project import durable
from tests import databases
from tests.tiny_project import TinyProject

Main = Callable[[Sequence[str]], int]


@dataclass
class Boundaries:
    """Counts the boundaries that a process passes, and kills it at the one chosen (counted from 1)."""

    kill_at: int | None = None
    passed: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def reached(self) -> None:
        with self._lock:
            self.passed += 1
            if self.passed == self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
                threading.Event().wait()  # the signal is on its way: nothing more is done

    def around(self, owner: Any, name: str) -> None:
        """Make the call of a function two boundaries: before it and after it."""
        real = getattr(owner, name)

        def counted(*arguments: Any, **named: Any) -> Any:
            self.reached()
            done = real(*arguments, **named)
            self.reached()
            return done

        setattr(owner, name, counted)

    def install(self) -> None:
        """Watch this process from now on."""
        sa.event.listen(Engine, "before_cursor_execute", lambda *_: self.reached())
        sa.event.listen(Engine, "after_cursor_execute", lambda *_: self.reached())
        self.around(DefaultDialect, "do_commit")
        self.around(durable, "sync_device")
        for name in ("fsync", "replace", "unlink"):
            self.around(os, name)


@dataclass(frozen=True)
class Ended:
    """How a forked daemon ended: `killed`, or with `status` after so many boundaries."""

    killed: bool
    status: int
    boundaries: int


def run_daemon(main: Main, arguments: Sequence[str], project_dir: Path, kill_at: int | None, log: Path) -> Ended:
    """Fork, run `main` in the project's folder, and wait for the end."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _be_daemon(main, arguments, project_dir, kill_at, log, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    return Ended(killed, os.waitstatus_to_exitcode(status), int(text or b"0"))


def _be_daemon(
    main: Main, arguments: Sequence[str], project_dir: Path, kill_at: int | None, log: Path, pipe: int
) -> NoReturn:
    status = 70
    try:
        signal.setitimer(signal.ITIMER_REAL, 0)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = (
            os.fdopen(1, "w", closefd=False),
            os.fdopen(2, "w", closefd=False),
        )  # not those of pytest
        os.chdir(project_dir)
        os.environ["BOINC_PROJECT_DIR"] = str(project_dir)
        boundaries = Boundaries(kill_at)
        boundaries.install()
        status = main(arguments)
        os.write(pipe, str(boundaries.passed).encode())
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


class Scene:
    """A project as it is before a daemon's run, restored again and again, and what an undisturbed run makes of it."""

    def __init__(self, project: TinyProject, main: Main, arguments: Sequence[str], folder: Path) -> None:
        self.project = project
        self.main = main
        self.arguments = arguments
        self.log = folder / "daemon.log"
        self._copy = folder / "copy"
        self._saved: databases.Saved | None = None
        self._url = project.tree.config.database_url
        project.db.close()
        if not project.db.is_sqlite:
            self._saved = databases.save(sa.make_url(self._url))
        shutil.copytree(project.tree.project_dir, self._copy)
        ended = run_daemon(main, arguments, project.tree.project_dir, None, self.log)
        assert (ended.killed, ended.status) == (False, 0), self.log.read_text()
        self.boundaries = ended.boundaries
        self.expected = picture(project)

    def restore(self) -> None:
        self.project.db.close()
        shutil.rmtree(self.project.tree.project_dir)
        shutil.copytree(self._copy, self.project.tree.project_dir)
        if self._saved is not None:
            databases.restore(sa.make_url(self._url), self._saved)

    def crash(self, *places: int) -> None:
        """From the beginning: killed at each place in turn, then run to the end; the end must be the expected one."""
        self.restore()
        self.log.unlink(missing_ok=True)
        folder = self.project.tree.project_dir
        for place in places:
            ended = run_daemon(self.main, self.arguments, folder, place, self.log)
            assert ended.killed or ended.status == 0, (places, self.log.read_text())
        ended = run_daemon(self.main, self.arguments, folder, None, self.log)
        assert (ended.killed, ended.status) == (False, 0), (places, self.log.read_text())
        found = picture(self.project)
        for name, rows in self.expected.items():
            assert found[name] == rows, (places, name, self.log.read_text())


#: Tables that the daemons write, but for heartbeats.
_TABLES = (
    "workunit", "result", "user", "team", "host", "host_app_version", "gt_job", "gt_version", "gt_round",
    "gt_microtask", "gt_ledger", "gt_file", "gt_trust", "gt_fingerprint",
)  # fmt: skip
_NEVER = 2**31 - 1


def picture(project: TinyProject) -> dict[str, Any]:
    """All rows and files, without the moments at which things were done."""
    found: dict[str, Any] = {}
    tables = sa.MetaData()
    tables.reflect(project.db.engine)
    with project.db.read() as connection:
        for name in _TABLES:
            if name in tables.tables:
                rows = connection.execute(sa.select(tables.tables[name])).mappings()
                found[name] = sorted((tuple(_lasting(dict(row))) for row in rows), key=repr)
    project.db.close()
    root = project.tree.project_dir
    for folder in ("gt_jobs", "download"):
        files = (path for path in (root / folder).rglob("*") if path.is_file() and path.suffix != ".tmp")
        found[folder] = {str(path.relative_to(root)): path.read_bytes() for path in files}
    return found


def _lasting(row: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if name == "transition_time":
            yield name, "never" if value == _NEVER else "due"
        elif name.startswith("expavg_credit"):
            yield name, round(float(value), 3)  # it decays with a half-life of a week
        elif name in ("good", "bad", "unlike"):
            yield name, round(float(value), 3)  # within a month
        elif not name.endswith("_time") and name != "id":
            yield name, round(value, 9) if isinstance(value, float) else value
