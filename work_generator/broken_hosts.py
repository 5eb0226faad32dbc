"""Hosts that fail everything: one task a day until one succeeds.

BOINC's scheduler takes one from host_app_version.max_jobs_per_day for each error and doubles it with each success
(sched/sched_result.cpp), so that with a daily_result_quota of thousands a broken host drains work for ever. The rule
here: when the newest ten results that a host ended with an app version are all errors, its quota with that version
becomes 1. From there on BOINC's own rules hold: an error leaves it at 1, each success doubles it.

    counts as ended   success, client error, validate error; not what was not begun in time or aborted
    does not count    what was withdrawn, and tasks of a job that has failed: its hosts are not to blame
    looked at         only quotas that lie ten or more below the full one, as ten errors leave them

So a second look at the same results changes nothing, an admin who gives a host its whole quota is not overruled, and
where daily_result_quota is no more than ten the scheduler reaches 1 by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from boinc_project.database import app_version, host_app_version, result, workunit
from boinc_project.gt_tables import JobState, MicrotaskState, gt_job, gt_microtask
from boinc_project.states import ANONYMOUS_SPAN, EXITS_WITHOUT_FAULT, Outcome, ServerState, host_version_id
from boinc_project.supply_limits import BROKEN_AFTER

_ENDED = (int(Outcome.SUCCESS), int(Outcome.CLIENT_ERROR), int(Outcome.VALIDATE_ERROR))
_RESOURCES = 100  # more than BOINC has kinds of processors for which volunteers may have programs of their own


@dataclass(frozen=True)
class Broken:
    """A host all of whose newest results with an app version were errors, and its quota as it was read."""

    host: int
    app_version: int  # negative: the volunteer's own program
    quota: int


def is_broken(outcomes: Sequence[int]) -> bool:
    """Whether the newest results of a host with an app version say that it fails everything."""
    return len(outcomes) >= BROKEN_AFTER and Outcome.SUCCESS not in outcomes[:BROKEN_AFTER]


def find(connection: Connection, appid: int, daily_result_quota: int) -> list[Broken]:
    """The hosts whose quota with a version of the app is to become 1."""
    if daily_result_quota <= BROKEN_AFTER:
        return []
    kept = host_app_version.c
    programs = connection.scalars(sa.select(app_version.c.id).where(app_version.c.appid == appid))
    versions = {int(identifier): int(identifier) for identifier in programs}
    own = range(-1, -1 - min(_RESOURCES, ANONYMOUS_SPAN), -1)
    versions |= {host_version_id(appid, number): number for number in own}
    query = sa.select(kept.host_id, kept.app_version_id, kept.max_jobs_per_day).where(
        kept.app_version_id.in_(sorted(versions)),
        kept.max_jobs_per_day > 1,
        kept.max_jobs_per_day <= daily_result_quota - BROKEN_AFTER,
    )
    suspects = [Broken(int(row[0]), versions[int(row[1])], int(row[2])) for row in connection.execute(query)]
    return [each for each in suspects if is_broken(_newest(connection, appid, each))]


def demote(connection: Connection, appid: int, each: Broken) -> bool:
    """Give the host one task a day; False if its quota has changed since it was read."""
    kept = host_app_version.c
    changed = connection.execute(
        sa.update(host_app_version)
        .where(
            kept.host_id == each.host,
            kept.app_version_id == host_version_id(appid, each.app_version),
            kept.max_jobs_per_day == each.quota,
        )
        .values(max_jobs_per_day=1)
    )
    return bool(changed.rowcount)


def _newest(connection: Connection, appid: int, each: Broken) -> list[int]:
    """The outcomes of its newest results."""
    query = (
        sa.select(result.c.outcome)
        .join(workunit, workunit.c.id == result.c.workunitid)
        .join(gt_microtask, gt_microtask.c.workunit_name == workunit.c.name)
        .join(gt_job, gt_job.c.id == gt_microtask.c.job_id)
        .where(
            result.c.hostid == each.host,
            result.c.appid == appid,
            result.c.app_version_id == each.app_version,
            result.c.server_state == int(ServerState.OVER),
            result.c.outcome.in_(_ENDED),
            result.c.exit_status.not_in(EXITS_WITHOUT_FAULT),
            gt_microtask.c.state != str(MicrotaskState.CANCELLED),
            gt_job.c.state != str(JobState.FAILED),
        )
        .order_by(result.c.id.desc())
        .limit(BROKEN_AFTER)
    )
    return [int(outcome) for outcome in connection.scalars(query)]
