"""How a daemon of ours starts: options, project, database, log, signals, in BOINC's order.

start(...)         -> Started, or the exit status of a usage error
run(...)           passes with a heartbeat until asked to stop
outside_faults()   a lost database or disk means "try the pass again later", not the end
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy.exc import DBAPIError

from boinc_project import store
from boinc_project.config import ConfigError, ProjectConfig, find_project_dir
from boinc_project.daemon import (
    EXIT_CONFIGURATION,
    Options,
    RetryLater,
    Stopper,
    UsageError,
    parse_options,
    run_passes,
    set_up_log,
)
from boinc_project.database import Database, is_lost
from boinc_project.leftovers import Leftovers
from boinc_project.project_tree import ProjectTree

HEARTBEAT_S = 10.0


@dataclass(frozen=True)
class Started:
    """What every daemon works with. `appid` is the id of the app named by `--app`."""

    options: Options
    tree: ProjectTree
    database: Database
    appid: int
    stopper: Stopper


def start(
    arguments: Sequence[str] | None,
    *,
    program: str,
    about: str,
    default_sleep: float,
    own: Mapping[str, str] | None = None,
    flags: Mapping[str, str] | None = None,
    check: Callable[[Options], None] = lambda options: None,
) -> Started | int:
    """Read the command line and open the project; `check` may raise UsageError about the program's own options.

    A mistake in options or configuration is one sentence on stderr and BOINC's exit status 1.
    """
    try:
        options = parse_options(
            sys.argv[1:] if arguments is None else arguments,
            program=program,
            about=about,
            default_sleep=default_sleep,
            own=own,
            flags=flags,
        )
        check(options)
        project_dir = find_project_dir()
        tree = ProjectTree(project_dir, ProjectConfig.load(project_dir))
        database = tree.database()
        appid = store.app_id(database, options.app)
        if appid is None:
            raise UsageError(f"{program}: the project has no app {options.app!r}; see --app")
        store.create_own_tables(database)
    except (UsageError, ConfigError) as error:
        print(error, file=sys.stderr)
        return EXIT_CONFIGURATION
    except DBAPIError as error:
        print(f"{program}: the database cannot be opened ({error.orig})", file=sys.stderr)
        return EXIT_CONFIGURATION
    set_up_log(options.debug_level)
    stopper = Stopper(project_dir)
    stopper.install()
    logging.getLogger(program.removeprefix("gt_")).info("Starting; project %s", project_dir)
    return Started(options, tree, database, appid, stopper)


def heartbeat_name(daemon: str, options: Options) -> str:
    """The key of gt_heartbeat: the daemon, and what tells instances of it apart, as in `validator gradient 1/2`."""
    share = "" if options.mod is None else f" {options.mod[1]}/{options.mod[0]}"
    app = f" {options.app}" if share or options.app != Options().app else ""
    return f"{daemon}{app}{share}"[:64]


class Heart:
    """Tells `status` and `doctor`, every ten seconds and no oftener, that this daemon makes its passes."""

    def __init__(self, database: Database, daemon: str) -> None:
        self._database = database
        self._daemon = daemon
        self._last: float | None = None

    def beat(self) -> None:
        if self._last is None:
            self._database.repeated(store.forget_silent)
        if self._last is None or time.monotonic() - self._last >= HEARTBEAT_S:
            self._database.repeated(lambda connection: store.beat(connection, self._daemon, os.getpid()))
            self._last = time.monotonic()


@contextlib.contextmanager
def outside_faults() -> Iterator[None]:
    """A database or storage that is away means: try the pass again later. Transactions under way were rolled back."""
    try:
        yield
    except DBAPIError as error:
        what = "does not answer" if is_lost(error) else "refuses a statement"
        raise RetryLater(f"the database {what} ({' '.join(str(error.orig).split())})") from error
    except OSError as error:
        raise RetryLater(f"storage does not answer ({error})") from error


def run(started: Started, name: str, one_pass: Callable[[], bool], owned: Iterable[Path] = ()) -> int:
    """Make passes until asked to stop, with a heartbeat; returns the exit status.

    `owned`: folders in which this daemon removes what killed writers left (leftovers.py).
    """
    heart = Heart(started.database, heartbeat_name(name, started.options))
    leftovers = Leftovers(owned)

    def beating_pass() -> bool:
        if not started.options.dry_run:
            leftovers.sweep()
        worked = one_pass()
        if not started.options.dry_run:
            with outside_faults():
                heart.beat()
        return worked

    try:
        return run_passes(started.options, started.stopper, beating_pass)
    finally:
        started.database.close()
