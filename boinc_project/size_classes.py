"""BOINC's size classes: hosts by speed, workunits by size, and each host prefers those of its own class.

    size_census      now and then: the quantiles of the hosts' speeds, into PROJECT/size_census_APP
    size_regulator   keeps some results of each class UNSENT; all others of a workunit with a class are INACTIVE
    scheduler        a host's class by its speed and the quantiles; results of its own class first

Class 0 is that of the slowest hosts and of the smallest workunits; app.n_size_classes says how many there are.
Sources: BOINC html/ops/size_census.php, sched/{size_regulator,sched_score,sched_send,sched_shmem}.cpp. Pure, but for
the two functions that read. The embedded server's regulator and census are server/size_regulator.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from boinc_project.database import app_version, host, host_app_version
from boinc_project.server.versions import plan_class_by_name

Row = Mapping[str, Any]

#: A host's claim to be on for less than this share of the time is not believed (FRAC_MIN of sched_send.cpp).
LEAST_AVAILABLE = 0.1

#: What the scheduler adds to the score of a result: of the host's own class, of larger ones, of smaller ones.
OWN, TOO_LARGE, TOO_SMALL = 5, -2, -1


def census_path(project_dir: Path, app_name: str) -> Path:
    """Where size_census.php writes an app's quantiles, and the feeder reads them."""
    return project_dir / f"size_census_{app_name}"


def read_census(path: Path, classes: int) -> tuple[float, ...] | None:
    """The quantiles that separate so many classes, ascending; None without a file, or if it holds too few."""
    try:
        lines = path.read_text(encoding="ascii", errors="replace").split()
        found = tuple(float(line) for line in lines[: classes - 1])
    except (OSError, ValueError):
        return None
    return found if len(found) == classes - 1 else None


def quantiles(speeds: Iterable[float], classes: int) -> tuple[float, ...]:
    """The speeds that separate classes of equally many hosts; zeros without any host: then all are of the fastest."""
    ordered = sorted(speeds)
    if not ordered:
        return (0.0,) * (classes - 1)
    return tuple(ordered[number * len(ordered) // classes] for number in range(1, classes))


def size_class(census: Sequence[float], speed: float) -> int:
    """The class of a host with this effective speed."""
    return next((number for number, least in enumerate(census) if speed < least), len(census))


def preference(host_class: int, job_class: int) -> int:
    """What the scheduler adds to the score of a result; -1 is the class of workunits without one."""
    if host_class == job_class:
        return OWN
    return TOO_LARGE if host_class < job_class else TOO_SMALL


def available(row: Any, on_gpu: bool) -> float:
    """Share of the time for which a host computes; `row` has on_frac, active_frac and gpu_active_frac."""
    active = row.gpu_active_frac if on_gpu else row.active_frac
    return min(max(float(row.on_frac) * float(active), LEAST_AVAILABLE), 1.0)


@dataclass(frozen=True)
class Measured:
    """The effective speed (FLOP/s, by the time that it is on) of a host with an app version, as it was measured."""

    host_id: int
    app_version_id: int
    speed: float
    rpc_time: int  # when the host asked last
    expavg_credit: float


def measured_speeds(connection: Connection, appid: int, hosts: Iterable[int] | None = None) -> list[Measured]:
    """Hosts with validated results of an app (all of them, or these), as size_census.php looks for them."""
    query = (
        sa.select(
            host_app_version.c.host_id, host_app_version.c.app_version_id, host_app_version.c.et_avg,
            host.c.on_frac, host.c.active_frac, host.c.gpu_active_frac, host.c.rpc_time, host.c.expavg_credit,
            app_version.c.plan_class,
        )
        .join(app_version, app_version.c.id == host_app_version.c.app_version_id)
        .join(host, host.c.id == host_app_version.c.host_id)
        .where(app_version.c.appid == appid, host_app_version.c.et_n > 0, host_app_version.c.et_avg > 0)
        .order_by(host_app_version.c.host_id, host_app_version.c.app_version_id)
    )  # fmt: skip
    if hosts is not None:
        query = query.where(host_app_version.c.host_id.in_(sorted(set(hosts))))
    return [
        Measured(
            int(row.host_id),
            int(row.app_version_id),
            available(row, bool(plan_class_by_name(row.plan_class).gpu_type)) / float(row.et_avg),
            int(row.rpc_time),
            float(row.expavg_credit),
        )
        for row in connection.execute(query)
    ]
