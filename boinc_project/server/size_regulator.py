"""The embedded server's size_regulator and size_census (boinc_project/size_classes.py), for apps with size classes.

Source: BOINC sched/size_regulator.cpp, html/ops/size_census.php. Unlike there, the census is made every minute, and of
all hosts that asked in the last days: a project that has just begun has none with an average credit above 10.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from boinc_project import clock, database, size_classes
from boinc_project.contract import whole_file
from boinc_project.database import Database
from boinc_project.project_tree import ProjectTree
from boinc_project.states import ServerState

log = logging.getLogger(__name__)

#: Results of all classes together that are UNSENT: no more than the scheduler looks at for one request.
MOST_UNSENT = 60

#: Seconds between two censuses; hosts that have not asked for so long are not counted.
CENSUS_INTERVAL_S = 60.0
ACTIVE_S = 14 * 86400.0

_A, _R = database.app, database.result


class SizeRegulator:
    """Run it in one place only, after the transitioner."""

    def __init__(self, tree: ProjectTree, db: Database, *, clock: Callable[[], float] = clock.now) -> None:
        self._tree, self._db, self._clock = tree, db, clock
        self._census_at = float("-inf")
        self.released = 0  # results so far, counted shortly before they are committed

    def run_once(self) -> int:
        """Release what may be sent, and count the hosts if it is time; returns the number of results released."""
        with self._db.read() as connection:
            query = sa.select(_A.c.id, _A.c.name, _A.c.n_size_classes).where(_A.c.deprecated == 0)
            apps = connection.execute(query.where(_A.c.n_size_classes > 1)).all()
        if not apps:
            return 0
        if self._clock() >= self._census_at:
            self._census_at = self._clock() + CENSUS_INTERVAL_S
            for appid, name, classes in apps:
                self._count(int(appid), str(name), int(classes))
        found = 0
        for appid, _, classes in apps:
            with self._db.read() as connection:
                wanted = _lacking(connection, int(appid), int(classes))
            if wanted:
                found += self._db.serialized(functools.partial(self._release, appid=int(appid), wanted=wanted))
        return found

    def _count(self, appid: int, name: str, classes: int) -> None:
        with self._db.read() as connection:
            measured = size_classes.measured_speeds(connection, appid)
        since = self._clock() - ACTIVE_S
        found = size_classes.quantiles((each.speed for each in measured if each.rpc_time > since), classes)
        path, text = size_classes.census_path(self._tree.project_dir, name), "".join(f"{each:e}\n" for each in found)
        if not path.exists() or path.read_text() != text:
            whole_file.write_bytes(path, text.encode())

    def _release(self, connection: Connection, *, appid: int, wanted: dict[int, int]) -> int:
        found = 0
        for number, most in wanted.items():
            order = (_R.c.priority.desc(), _R.c.workunitid, _R.c.id)
            ids = list(connection.scalars(_waiting(appid, number).order_by(*order).limit(most)))
            if ids:
                unsent = {"server_state": int(ServerState.UNSENT)}
                where = (_R.c.id.in_(ids), _R.c.server_state == int(ServerState.INACTIVE))
                found += connection.execute(sa.update(_R).where(*where).values(unsent)).rowcount
        self.released += found
        if found:
            log.debug("[APP#%d] %d results may be sent now", appid, found)
        return found


def _waiting(appid: int, number: int) -> sa.Select[tuple[int]]:
    inactive = _R.c.server_state == sa.literal_column(str(int(ServerState.INACTIVE)))
    return sa.select(_R.c.id).where(inactive, _R.c.appid == appid, _R.c.size_class == number)


def _lacking(connection: Connection, appid: int, classes: int) -> dict[int, int]:
    """How many further results of each class may become UNSENT, where fewer than half of what there may be are and
    some are waiting."""
    most = MOST_UNSENT // classes
    unsent = _R.c.server_state == sa.literal_column(str(int(ServerState.UNSENT)))
    counted = sa.select(_R.c.size_class, sa.func.count()).where(unsent, _R.c.appid == appid).group_by(_R.c.size_class)
    there = {int(number): int(count) for number, count in connection.execute(counted)}
    lacking = {number: most - there.get(number, 0) for number in range(classes) if there.get(number, 0) < most / 2}
    return {n: count for n, count in lacking.items() if connection.execute(_waiting(appid, n).limit(1)).first()}
