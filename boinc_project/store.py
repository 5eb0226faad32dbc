"""The queries that our daemons and commands make: BOINC's rows and ours, on SQLite or MariaDB alike.

What it is: the only module that writes SQL for the daemons. Every write is conditional on what was read or
lies in a transaction that re-checks it. What it is not: a decision about anything.
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from boinc_project import clock
from boinc_project.contract.downlink import MAX_DELTAS
from boinc_project.database import Database, app, app_version, host_app_version, platform, result, workunit
from boinc_project.gt_tables import (
    Disposition,
    FileState,
    JobState,
    MicrotaskState,
    gt_file,
    gt_heartbeat,
    gt_job,
    gt_ledger,
    gt_metadata,
    gt_microtask,
    gt_round,
    gt_trust,
    gt_version,
)
from boinc_project.job_config import JobConfig
from boinc_project.job_folder import JobFacts, JobFolder, Published, leads
from boinc_project.reliability import is_distrusted, kind_of
from boinc_project.rows import Key, read_rows, update_rows
from boinc_project.states import (
    EXITS_WITHOUT_FAULT,
    AssimilateState,
    Outcome,
    ServerState,
    TransitionerFlags,
    ValidateState,
    host_version_id,
)
from boinc_project.supply_limits import BROKEN_AFTER

Row = Mapping[str, Any]

FORGOTTEN_S = 7 * 86400.0  # after which a silent daemon's heartbeat is dropped


@dataclass(frozen=True, kw_only=True)
class JobRow:
    """One row of gt_job with its documents parsed."""

    id: int
    name: str
    appid: int
    state: JobState
    note: str
    current_version: int
    create_time: int
    config: JobConfig
    facts: JobFacts
    folder: JobFolder


def create_own_tables(database: Database) -> None:
    """Create the gt_ tables that do not exist yet."""
    database.create_tables(gt_metadata)


def app_id(database: Database, name: str) -> int | None:
    """Id of BOINC's app of this name."""
    with database.read() as connection:
        found = connection.execute(sa.select(app.c.id).where(app.c.name == name)).scalar()
    return None if found is None else int(found)


def deployed_versions(connection: Connection, appid: int) -> list[Row]:
    """The app's versions that are not deprecated."""
    query = sa.select(app_version).where(app_version.c.appid == appid, app_version.c.deprecated == 0)
    return [dict(row) for row in connection.execute(query).mappings()]


def sent_versions(connection: Connection, appid: int) -> list[Row]:
    """The app's versions that volunteers are sent, with the name of their `platform`: of each platform and plan
    class the newest that is not deprecated (sched/sched_shmem.cpp)."""
    names = {int(i): str(name) for i, name in connection.execute(sa.select(platform.c.id, platform.c.name))}
    newest: dict[tuple[int, str], Row] = {}
    for row in deployed_versions(connection, appid):
        key = int(row["platformid"]), str(row["plan_class"])
        if key not in newest or row["version_num"] > newest[key]["version_num"]:
            newest[key] = row
    return [{**row, "platform": names.get(number, "")} for (number, _), row in sorted(newest.items())]


# Jobs

# The documents of a job never change, and every pass of every daemon asks for them.
_parsed_config = functools.lru_cache(maxsize=64)(JobConfig.from_json)
_parsed_facts = functools.lru_cache(maxsize=64)(JobFacts.from_json)


def job_row(row: Row) -> JobRow:
    folder = Path(str(row["folder"]))
    return JobRow(
        id=int(row["id"]),
        name=str(row["name"]),
        appid=int(row["appid"]),
        state=JobState(row["state"]),
        note=str(row["note"]),
        current_version=int(row["current_version"]),
        create_time=int(row["create_time"]),
        config=_parsed_config(str(row["config"]), folder),
        facts=_parsed_facts(str(row["facts"])),
        folder=JobFolder(folder),
    )


def jobs(connection: Connection, *states: JobState, appid: int | None = None) -> list[JobRow]:
    """All jobs in these states (all of them if none is given), of this app (of all if None), by id."""
    query = sa.select(gt_job).order_by(gt_job.c.id)
    if appid is not None:
        query = query.where(gt_job.c.appid == appid)
    if states:
        query = query.where(gt_job.c.state.in_([str(state) for state in states]))
    return [job_row(dict(row)) for row in connection.execute(query).mappings()]


def job_with_id(connection: Connection, job_id: int) -> JobRow | None:
    row = connection.execute(sa.select(gt_job).where(gt_job.c.id == job_id)).mappings().first()
    return None if row is None else job_row(dict(row))


def job_named(connection: Connection, name: str) -> JobRow | None:
    row = connection.execute(sa.select(gt_job).where(gt_job.c.name == name)).mappings().first()
    return None if row is None else job_row(dict(row))


def set_job_state(connection: Connection, job_id: int, state: JobState, note: str = "") -> None:
    connection.execute(sa.update(gt_job).where(gt_job.c.id == job_id).values(state=str(state), note=note))


def stop_job(connection: Connection, job: JobRow, state: JobState, note: str) -> bool:
    """Stop a running job; False if it has stopped, or gone on to another version, since it was read."""
    done = connection.execute(
        sa.update(gt_job)
        .where(
            gt_job.c.id == job.id,
            gt_job.c.state == str(JobState.RUNNING),
            gt_job.c.current_version == job.current_version,
        )
        .values(state=str(state), note=note)
    )
    return bool(done.rowcount)


def begin_afresh(connection: Connection, job: JobRow) -> None:
    """Have slots whose results would be applied tried afresh: those given up, and, after the job has failed, also those
    whose open workunit has met an error, so that these errors are not counted again."""
    rows = useful_microtasks(connection, job)
    names = [str(row["workunit_name"]) for row in rows if row["state"] == MicrotaskState.FAILED]
    if job.state == JobState.FAILED:
        still_open = [str(row["workunit_name"]) for row in rows if row["state"] == MicrotaskState.ISSUED]
        names += _with_errors(connection, still_open)
    for start in range(0, len(names), 500):
        connection.execute(
            sa.update(gt_microtask)
            .where(
                gt_microtask.c.workunit_name.in_(names[start : start + 500]),
                gt_microtask.c.state.in_([str(MicrotaskState.FAILED), str(MicrotaskState.ISSUED)]),
            )
            .values(state=str(MicrotaskState.CANCELLED), note="withdrawn when the job was resumed")
        )


def release(connection: Connection, job: JobRow) -> None:
    """Let further copies be made and sent again of the workunits that were held back when the job failed."""
    query = sa.select(gt_microtask.c.workunit_name).where(
        gt_microtask.c.job_id == job.id, gt_microtask.c.state != str(MicrotaskState.FOLDED)
    )
    names = [str(name) for name in connection.scalars(query)]
    for start in range(0, len(names), 500):
        connection.execute(
            sa.update(workunit)
            .where(
                workunit.c.name.in_(names[start : start + 500]),
                workunit.c.transitioner_flags == int(TransitionerFlags.NO_NEW_RESULTS),
                workunit.c.error_mask == 0,
                workunit.c.canonical_resultid == 0,
            )
            .values(transitioner_flags=int(TransitionerFlags.NORMAL), transition_time=soon())
        )


def _with_errors(connection: Connection, workunit_names: Sequence[str]) -> list[str]:
    """Those of these workunits that have a result which ended in an error."""
    found: set[str] = set()
    for start in range(0, len(workunit_names), 500):
        query = (
            sa.select(workunit.c.name)
            .join(result, workunit.c.id == result.c.workunitid)
            .where(
                workunit.c.name.in_(list(workunit_names[start : start + 500])),
                result.c.outcome.in_([int(Outcome.CLIENT_ERROR), int(Outcome.VALIDATE_ERROR)]),
            )
        )
        found.update(str(name) for name in connection.scalars(query))
    return sorted(found)


def lock_job(connection: Connection, job_id: int) -> Row | None:
    """The job's row, locked until the transaction ends."""
    query = sa.select(gt_job).where(gt_job.c.id == job_id).with_for_update()
    row = connection.execute(query).mappings().first()
    return None if row is None else dict(row)


# Model versions


def version_row(connection: Connection, job_id: int, version: int) -> Row | None:
    query = sa.select(gt_version).where(gt_version.c.job_id == job_id, gt_version.c.version == version)
    row = connection.execute(query).mappings().first()
    return None if row is None else dict(row)


def versions(connection: Connection, job_id: int) -> list[Row]:
    """All versions of a job in order."""
    query = sa.select(gt_version).where(gt_version.c.job_id == job_id).order_by(gt_version.c.version)
    return [dict(row) for row in connection.execute(query).mappings()]


def record_file(connection: Connection, job_id: int, kind: str, file: Published, version: int | None = None) -> None:
    """Note a published file; noting the same file again (after a crash) changes nothing."""
    record_files(connection, job_id, kind, [file], version)


def record_files(
    connection: Connection, job_id: int, kind: str, files: Sequence[Published], version: int | None
) -> None:
    """The same for many files of a version."""
    names = [(file.name,) for file in files]
    known = read_rows(connection, gt_file, ("name",), names, ("name", "state"))
    again: dict[Key, Row] = {
        name: {"state": str(FileState.PUBLISHED)} for name, row in known.items() if row["state"] != FileState.PUBLISHED
    }
    update_rows(connection, gt_file, ("name",), again)
    rows = [
        {
            "name": file.name,
            "job_id": job_id,
            "kind": kind,
            "version": version,
            "sha256": file.sha256,
            "md5": file.md5,
            "bytes": file.size,
            "create_time": int(clock.now()),
            "state": str(FileState.PUBLISHED),
        }
        for file in {file.name: file for file in files}.values()
        if (file.name,) not in known
    ]
    if rows:
        connection.execute(sa.insert(gt_file), rows)


def published_chain(connection: Connection, job_id: int, version: int) -> list[Published] | None:
    """The files that together are a version: a keyframe, and the deltas since, in order; None if one is missing."""
    span = (version - MAX_DELTAS, version)
    rows = connection.execute(
        sa.select(gt_version.c.version, gt_version.c.state_sha256).where(
            gt_version.c.job_id == job_id, gt_version.c.version.between(*span)
        )
    )
    digests = {int(number): str(digest) for number, digest in rows}
    files = connection.execute(
        sa.select(gt_file).where(
            gt_file.c.job_id == job_id,
            gt_file.c.kind.in_(["state", "delta"]),
            gt_file.c.version.between(*span),
            gt_file.c.state == str(FileState.PUBLISHED),
        )
    )
    # After a rollback there can be files of a version that was made again: the digests tell.
    states, deltas = dict[str, Published](), dict[int, list[Published]]()
    for row in files.mappings():
        file = Published(str(row["name"]), str(row["sha256"]), str(row["md5"]), int(row["bytes"]))
        if row["kind"] == "state":
            states[file.sha256] = file
        else:
            deltas.setdefault(int(row["version"]), []).append(file)
    chain: list[Published] = []
    for number in range(version, version - MAX_DELTAS - 1, -1):
        target, base = digests.get(number, ""), digests.get(number - 1, "")
        if target in states:
            return [states[target], *reversed(chain)]
        fitting = [file for file in deltas.get(number, []) if base and leads(file.name, base, target)]
        if not fitting:
            return None
        chain.append(fitting[0])
    return None


# Microtasks


def microtasks(connection: Connection, job_id: int, version: int, oldest: int | None = None) -> list[Row]:
    """All attempts at the slots of a version, or of those since `oldest`, by slot and attempt, without documents."""
    first = version if oldest is None else oldest
    query = (
        sa.select(*(column for column in gt_microtask.c if column.name != "document"))
        .where(gt_microtask.c.job_id == job_id, gt_microtask.c.version.between(first, version))
        .order_by(gt_microtask.c.slot, gt_microtask.c.attempt)
    )
    return [dict(row) for row in connection.execute(query).mappings()]


def useful_microtasks(connection: Connection, job: JobRow) -> list[Row]:
    """The same of all versions whose results are still applied."""
    return microtasks(connection, job.id, job.current_version, job.config.first_useful_version(job.current_version))


def next_slot(connection: Connection, job_id: int) -> int:
    """The first slot that no microtask of a flow has had."""
    query = sa.select(sa.func.max(gt_microtask.c.slot)).where(gt_microtask.c.job_id == job_id)
    newest = connection.execute(query).scalar()
    return 0 if newest is None else int(newest) + 1


def next_batch(connection: Connection, job_id: int) -> int:
    """The first batch that no microtask of a job with speed classes has had."""
    end = gt_microtask.c.first_batch + gt_microtask.c.steps
    newest = connection.execute(sa.select(sa.func.max(end)).where(gt_microtask.c.job_id == job_id)).scalar()
    return 0 if newest is None else int(newest)


def withdrawn(connection: Connection, job_id: int) -> list[Row]:
    """Microtasks that were withdrawn before they were done and whose slot was not issued again, by slot."""
    later = gt_microtask.alias("later")
    again = sa.exists().where(
        later.c.job_id == gt_microtask.c.job_id,
        later.c.slot == gt_microtask.c.slot,
        later.c.attempt > gt_microtask.c.attempt,
    )
    query = (
        sa.select(*(column for column in gt_microtask.c if column.name != "document"))
        .where(gt_microtask.c.job_id == job_id, gt_microtask.c.state == str(MicrotaskState.CANCELLED), sa.not_(again))
        .order_by(gt_microtask.c.slot)
    )
    return [dict(row) for row in connection.execute(query).mappings()]


def tasks_of_hosts(connection: Connection, workunit_names: Sequence[str]) -> list[Row]:
    """Results of these workunits that hosts work on, or have done: hostid, app_version_id, size_class."""
    columns = (result.c.hostid, result.c.app_version_id, result.c.size_class)
    found: list[Row] = []
    for start in range(0, len(workunit_names), 500):
        query = (
            sa.select(*columns)
            .join(workunit, workunit.c.id == result.c.workunitid)
            .where(
                workunit.c.name.in_(list(workunit_names[start : start + 500])),
                (result.c.server_state == int(ServerState.IN_PROGRESS))
                | ((result.c.server_state == int(ServerState.OVER)) & (result.c.outcome == int(Outcome.SUCCESS))),
            )
        )
        found += [dict(row) for row in connection.execute(query).mappings()]
    return found


def microtask_of(connection: Connection, workunit_name: str) -> Row | None:
    query = sa.select(gt_microtask).where(gt_microtask.c.workunit_name == workunit_name)
    row = connection.execute(query).mappings().first()
    return None if row is None else dict(row)


def set_microtask(connection: Connection, workunit_name: str, state: MicrotaskState, note: str = "") -> None:
    connection.execute(
        sa.update(gt_microtask).where(gt_microtask.c.workunit_name == workunit_name).values(state=str(state), note=note)
    )


def insert_workunit(connection: Connection, row: Row) -> bool:
    """Insert a workunit; False if one of that name is there already (an earlier try got this far)."""
    known = connection.execute(sa.select(workunit.c.id).where(workunit.c.name == row["name"])).scalar()
    if known is not None:
        return False
    connection.execute(sa.insert(workunit).values(**row))
    return True


def soon() -> sa.ColumnElement[int]:
    """The transition_time with which the transitioner looks at a workunit next: now, and never what is there already.

    BOINC's transitioner sets its own next time, often ten days away, unless the value has changed since it read the
    workunit (DB_TRANSITIONER_ITEM_SET::update_workunit, db/boinc_db.cpp). It reads values below its clock, so that
    "now" is news to it, but for the second in which somebody else has set the same one and it reads that before this
    transaction ends. One second more is a value that it cannot have read (one less it can).
    """
    now = int(clock.now())
    return sa.case((workunit.c.transition_time == now, now + 1), else_=now)


def transitions_waiting(connection: Connection, appid: int, now: int) -> bool:
    """Whether some workunit of the app still waits for the transitioner."""
    earliest = connection.execute(
        sa.select(sa.func.min(workunit.c.transition_time)).where(workunit.c.appid == appid)
    ).scalar()
    return earliest is not None and int(earliest) <= now


def result_counts(connection: Connection, workunit_ids: Sequence[int]) -> dict[int, dict[str, int]]:
    """For each workunit: how many of its results are unsent, in progress, over; and the time the last was sent."""
    counts: dict[int, dict[str, int]] = {
        each: {"unsent": 0, "in_progress": 0, "over": 0, "last_sent": 0} for each in workunit_ids
    }
    if not workunit_ids:
        return counts
    query = (
        sa.select(
            result.c.workunitid,
            result.c.server_state,
            sa.func.count(),
            sa.func.max(result.c.sent_time),
        )
        .where(result.c.workunitid.in_(workunit_ids))
        .group_by(result.c.workunitid, result.c.server_state)
    )
    for identifier, state, number, sent in connection.execute(query):
        entry = counts[int(identifier)]
        name = {ServerState.OVER: "over", ServerState.IN_PROGRESS: "in_progress"}.get(state, "unsent")
        entry[name] += int(number)
        entry["last_sent"] = max(entry["last_sent"], int(sent or 0))
    return counts


def workunits_named(connection: Connection, names: Iterable[str]) -> dict[str, Row]:
    """Workunit rows by name."""
    wanted = list(names)
    found: dict[str, Row] = {}
    for start in range(0, len(wanted), 500):
        query = sa.select(workunit).where(workunit.c.name.in_(wanted[start : start + 500]))
        found.update({str(row["name"]): dict(row) for row in connection.execute(query).mappings()})
    return found


def results_of(connection: Connection, workunit_id: int, lock: bool = False) -> list[Row]:
    """All results of a workunit by id; locked until the transaction ends if asked."""
    query = sa.select(result).where(result.c.workunitid == workunit_id).order_by(result.c.id)
    if lock:
        query = query.with_for_update()
    return [dict(row) for row in connection.execute(query).mappings()]


def ready_to_assimilate(
    connection: Connection, appid: int, limit: int, *, after: int = 0, mod: tuple[int, int] | None = None
) -> list[Row]:
    """Workunits above id `after` that the validator or transitioner handed over, by id: id, name,
    canonical_resultid, error_mask. `mod` (n, r): only those with id % n == r."""
    columns = (workunit.c.id, workunit.c.name, workunit.c.canonical_resultid, workunit.c.error_mask)
    query = sa.select(*columns).where(
        workunit.c.appid == appid,
        workunit.c.assimilate_state == int(AssimilateState.READY),
        workunit.c.id > after,
    )
    if mod is not None:
        query = query.where(workunit.c.id % mod[0] == mod[1])
    return [dict(row) for row in connection.execute(query.order_by(workunit.c.id).limit(limit)).mappings()]


def needing_validation(
    connection: Connection, appid: int, limit: int, *, after: int = 0, mod: tuple[int, int] | None = None
) -> list[int]:
    """Ids above `after` of workunits with something to validate, in ascending order; `mod` (n, r): id % n == r."""
    query = sa.select(workunit.c.id).where(
        workunit.c.appid == appid, workunit.c.need_validate > 0, workunit.c.id > after
    )
    if mod is not None:
        query = query.where(workunit.c.id % mod[0] == mod[1])
    return [int(each) for each in connection.execute(query.order_by(workunit.c.id).limit(limit)).scalars()]


def judge_again(connection: Connection) -> int:
    """Have the validator look again at our workunits whose copies have not agreed so far; returns their number."""
    waiting = sa.select(result.c.workunitid).where(result.c.validate_state == int(ValidateState.INCONCLUSIVE))
    open_ones = (
        workunit.c.canonical_resultid == 0,
        workunit.c.error_mask == 0,
        workunit.c.name.in_(sa.select(gt_microtask.c.workunit_name)),
        workunit.c.id.in_(waiting),
    )
    return connection.execute(sa.update(workunit).where(*open_ones).values(need_validate=1)).rowcount


@dataclass(frozen=True)
class Ended:
    """How many tasks of a slot ended on one host with one app version: in success (whatever the validator says), in
    error; `unreadable` errors were uploads that cannot be judged."""

    host: int
    app_version: int  # negative: the volunteer's own program
    slot: int
    successes: int
    errors: int
    unreadable: int = 0


def ended_tasks(connection: Connection, slots: Mapping[str, int]) -> list[Ended]:
    """How the tasks of workunits ended, by host, app version and slot; `slots` has the slot of each by its name.

    Errors are those of the client and files that cannot be judged. Tasks that timed out, were aborted by project or
    user, or were lost with a client's state say nothing about the work and are not counted.
    """
    names = list(slots)
    columns = (result.c.hostid, result.c.app_version_id, workunit.c.name, result.c.outcome)
    counts: dict[tuple[int, int, int], Counter[Outcome]] = {}
    for start in range(0, len(names), 500):
        query = (
            sa.select(*columns, sa.func.count())
            .join(workunit, workunit.c.id == result.c.workunitid)
            .where(
                workunit.c.name.in_(names[start : start + 500]),
                result.c.server_state == int(ServerState.OVER),
                result.c.outcome.in_([int(Outcome.SUCCESS), int(Outcome.CLIENT_ERROR), int(Outcome.VALIDATE_ERROR)]),
                result.c.exit_status.not_in(EXITS_WITHOUT_FAULT),
            )
            .group_by(*columns)
        )
        for host_id, app_version_id, name, outcome, number in connection.execute(query):
            key = int(host_id), int(app_version_id), slots[str(name)]
            counts.setdefault(key, Counter())[Outcome(outcome)] += int(number)
    return [
        Ended(
            *key,
            successes=by[Outcome.SUCCESS],
            errors=by[Outcome.CLIENT_ERROR] + by[Outcome.VALIDATE_ERROR],
            unreadable=by[Outcome.VALIDATE_ERROR],
        )
        for key, by in sorted(counts.items())
    ]


def forgive(connection: Connection, job: JobRow, slots: Mapping[str, int], daily_result_quota: int) -> None:
    """Undo what the errors of these workunits (name -> slot) have cost their hosts, who are not to blame: quota, and
    what unreadable uploads speak against them in gt_trust. Belongs into the transaction that stops the job."""
    errors: Counter[tuple[int, int]] = Counter()
    unreadable: Counter[int] = Counter()
    for each in ended_tasks(connection, slots):
        if each.errors:
            errors[each.host, host_version_id(job.appid, each.app_version)] += each.errors
            unreadable[each.host] += each.unreadable
    freed = _forgive_uploads(connection, kind_of(job.config.mode, job.facts.graph.sha256), +unreadable)
    if daily_result_quota:
        _give_back_quota(connection, errors, freed, daily_result_quota)


def _forgive_uploads(connection: Connection, kind: str, unreadable: Mapping[int, int]) -> set[int]:
    """Take so many faulty results from these hosts' records; returns those that are no longer distrusted."""
    key, now = ("host_id", "kind"), clock.now()
    present = read_rows(connection, gt_trust, key, [(host_id, kind) for host_id in unreadable], key)
    rows = read_rows(connection, gt_trust, key, present, lock=True)
    changes: dict[Key, Row] = {}
    freed = set()
    for identity, row in rows.items():
        number = unreadable[int(row["host_id"])]
        fewer = {"faulty": max(0, row["faulty"] - number), "bad": max(0.0, row["bad"] - number)}
        changes[identity] = fewer
        if is_distrusted(row, now) and not is_distrusted({**row, **fewer}, now):
            freed.add(int(row["host_id"]))
    update_rows(connection, gt_trust, key, changes)
    return freed


def _give_back_quota(
    connection: Connection, errors: Mapping[tuple[int, int], int], freed: set[int], daily_result_quota: int
) -> None:
    """Each error has cost one task a day (sched/sched_result.cpp); ten in a row, or the loss of trust that now ends
    (`freed`), all but one. No host gets more than the project's own quota."""
    key = ("host_id", "app_version_id")
    present = read_rows(connection, host_app_version, key, errors, key)
    rows = read_rows(connection, host_app_version, key, present, [*key, "max_jobs_per_day"], lock=True)
    changes: dict[Key, Row] = {}
    for identity, row in rows.items():
        host_id, version, left = int(row["host_id"]), int(row["app_version_id"]), int(row["max_jobs_per_day"])
        number = errors[host_id, version]
        whole = number >= BROKEN_AFTER or host_id in freed
        if 0 < left < daily_result_quota:  # 0: it has never been set
            more = daily_result_quota if whole else min(left + number, daily_result_quota)
            changes[identity] = {"max_jobs_per_day": more}
    update_rows(connection, host_app_version, key, changes)


def app_version_text(connection: Connection, identifier: int) -> str:
    """`app version 1.02 for windows_x86_64 (opencl_nvidia_gt)`, as an admin finds it on the project's pages."""
    query = (
        sa.select(app_version.c.version_num, app_version.c.plan_class, platform.c.name)
        .join(platform, platform.c.id == app_version.c.platformid)
        .where(app_version.c.id == identifier)
    )
    found = connection.execute(query).first()
    if found is None:
        return "programs of the volunteers' own" if identifier < 0 else f"app version #{identifier}"
    return f"app version {version_text(found.version_num, found.name, found.plan_class)}"


def version_text(version_num: int, platform_name: str, plan_class: str) -> str:
    """`1.02 for windows_x86_64 (opencl_nvidia_gt)`"""
    hosts = f" ({plan_class})" if plan_class else ""
    return f"{version_num // 100}.{version_num % 100:02d} for {platform_name}{hosts}"


def commonest_error(connection: Connection, workunit_names: Sequence[str]) -> str:
    """`: 6 of 6 failed tasks ended with exit status 12 (last words)`, or '' if no task of these failed."""
    query = (
        sa.select(result.c.exit_status, result.c.stderr_out)
        .join(workunit, workunit.c.id == result.c.workunitid)
        .where(workunit.c.name.in_(list(workunit_names)), result.c.outcome == int(Outcome.CLIENT_ERROR))
        .order_by(result.c.id)
    )
    failed = [(int(status), str(text or "")) for status, text in connection.execute(query)]
    if not failed:
        return ""
    status, number = Counter(status for status, _ in failed).most_common(1)[0]
    words = last_words([text for found, text in failed if found == status])
    shown = f" ({words})" if words else ""
    return f": {number} of {len(failed)} failed tasks ended with exit status {status}{shown}"


def last_words(texts: Sequence[str]) -> str:
    """The last telling line of the last text that says anything, printable; '' for none. It is a volunteer's words."""
    text = next((text for text in reversed(texts) if text), "")
    lines = [re.sub(r"<[^>]*>|\]\]>", "", line).strip() for line in text.splitlines()]
    telling = [line for line in lines if line and "boinc_finish" not in line and not line.startswith("<")]
    return "".join(c for c in (telling[-1] if telling else "") if c.isprintable())[:200]


# Ledger and rounds


def ledger_of_version(connection: Connection, job_id: int, base_version: int) -> list[Row]:
    query = (
        sa.select(gt_ledger)
        .where(gt_ledger.c.job_id == job_id, gt_ledger.c.base_version == base_version)
        .order_by(gt_ledger.c.slot, gt_ledger.c.workunit_name)
    )
    return [dict(row) for row in connection.execute(query).mappings()]


def pending_entries(connection: Connection, job_id: int) -> list[Row]:
    """Gradients that wait for a round, oldest base version first, then slot."""
    query = (
        sa.select(gt_ledger)
        .where(gt_ledger.c.job_id == job_id, gt_ledger.c.disposition == str(Disposition.PENDING))
        .order_by(gt_ledger.c.base_version, gt_ledger.c.slot, gt_ledger.c.workunit_name)
    )
    return [dict(row) for row in connection.execute(query).mappings()]


@dataclass(frozen=True)
class Member:
    """One contribution of a committed round, its weight (validation x reliability) and its weight by age."""

    workunit_name: str
    weight: float = 1.0
    age_weight: float = 1.0


def round_members(connection: Connection, job_id: int, version: int) -> list[Member] | None:
    """The committed round that makes this version, or None."""
    text = connection.execute(
        sa.select(gt_round.c.members).where(gt_round.c.job_id == job_id, gt_round.c.version == version)
    ).scalar()
    return None if text is None else [Member(str(name), *map(float, weights)) for name, *weights in json.loads(text)]


def newest_anchor(connection: Connection, job: JobRow) -> int:
    """The newest version of a job at which the server's own gradient is there (policy anchored); -1: none."""
    query = sa.select(sa.func.max(gt_version.c.version)).where(
        gt_version.c.job_id == job.id, gt_version.c.anchor_sha256 != ""
    )
    found = connection.scalar(query)
    return -1 if found is None else int(found)


def round_anchor(connection: Connection, job_id: int, version: int) -> Row | None:
    """The row of the version whose anchor corrects the committed round that makes this version; None: of none."""
    query = sa.select(gt_round.c.anchor_version).where(gt_round.c.job_id == job_id, gt_round.c.version == version)
    found = connection.scalar(query)
    return None if found is None or found < 0 else version_row(connection, job_id, int(found))


def commit_round(
    connection: Connection, job_id: int, version: int, members: Sequence[Member], now: float, anchor: int = -1
) -> None:
    """Fix which contributions, in which order, make this version, and the version whose anchor corrects them. The
    job's row must be locked."""
    connection.execute(
        sa.insert(gt_round).values(
            job_id=job_id,
            version=version,
            commit_time=now,
            anchor_version=anchor,
            members=json.dumps([[member.workunit_name, member.weight, member.age_weight] for member in members]),
        )
    )
    committed = str(Disposition.COMMITTED)
    changes: dict[Key, Row] = {
        (member.workunit_name,): {"disposition": committed, "weight": member.weight * member.age_weight}
        for member in members
    }
    update_rows(connection, gt_ledger, ("workunit_name",), changes)


def set_disposition(connection: Connection, workunit_names: Sequence[str], disposition: Disposition) -> None:
    """What became of these gradients."""
    changes: dict[Key, Row] = {(name,): {"disposition": str(disposition)} for name in workunit_names}
    update_rows(connection, gt_ledger, ("workunit_name",), changes)


def filled_slots(connection: Connection, job_id: int, base_versions: Sequence[int]) -> set[tuple[int, int]]:
    """(base version, slot) of every gradient in the ledger that was not dropped."""
    query = sa.select(gt_ledger.c.base_version, gt_ledger.c.slot).where(
        gt_ledger.c.job_id == job_id,
        gt_ledger.c.base_version.in_(base_versions),
        gt_ledger.c.disposition != str(Disposition.DROPPED),
    )
    return {(int(version), int(slot)) for version, slot in connection.execute(query)}


def committed_versions(connection: Connection, job_id: int, versions: Sequence[int]) -> set[int]:
    """Those of these versions whose round has been committed."""
    query = sa.select(gt_round.c.version).where(gt_round.c.job_id == job_id, gt_round.c.version.in_(versions))
    return {int(version) for version in connection.scalars(query)}


# Trust


def trust_rows(connection: Connection, kind: str, hosts: Iterable[int]) -> dict[int, Row]:
    """The rows of gt_trust of these hosts for one kind of work (boinc_project/reliability.py), by host."""
    found = read_rows(connection, gt_trust, ("host_id", "kind"), {(host, kind) for host in hosts})
    return {int(row["host_id"]): row for row in found.values()}


# Heartbeats


def beat(connection: Connection, daemon: str, pid: int, note: str = "") -> None:
    """Tell `status` and `doctor` that this daemon is alive."""
    values = {"pid": pid, "time": clock.now(), "note": note}
    changed = connection.execute(sa.update(gt_heartbeat).where(gt_heartbeat.c.daemon == daemon).values(**values))
    if changed.rowcount == 0:
        connection.execute(sa.insert(gt_heartbeat).values(daemon=daemon, **values))


def forget_silent(connection: Connection) -> None:
    """Drop the heartbeats of daemons that have made no pass for a week: they have been given up."""
    connection.execute(sa.delete(gt_heartbeat).where(gt_heartbeat.c.time < clock.now() - FORGOTTEN_S))


def heartbeats(connection: Connection) -> list[Row]:
    query = sa.select(gt_heartbeat).order_by(gt_heartbeat.c.daemon)
    return [dict(row) for row in connection.execute(query).mappings()]
