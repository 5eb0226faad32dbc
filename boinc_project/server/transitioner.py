"""The transitioner: moves workunits and results on whenever something happened to them.

Source: BOINC `sched/transitioner.cpp`, `tools/backend_lib.cpp`. `transition` is the pure decision (rows in,
changes out), step by step as stock BOINC does it; `Transitioner` reads due workunits, applies the changes and
makes new results from the output template. Run it in one place only.
"""

from __future__ import annotations

import functools
import logging
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from boinc_project import clock, database, templates
from boinc_project.config import ProjectConfig
from boinc_project.database import Database
from boinc_project.server.statements import Statement, insert_row, update_row
from boinc_project.signing import PrivateKey
from boinc_project.states import (
    EXIT_ABORTED_VIA_GUI,
    NEVER,
    AssimilateState,
    ErrorMask,
    FileDeleteState,
    Outcome,
    ServerState,
    TransitionerFlags,
    ValidateState,
)

log = logging.getLogger(__name__)

#: A workunit without canonical result or error is looked at again after this time at least (seconds).
IDLE_RECHECK_S = 10 * 86400

#: Bounds of the wait before a workunit whose transition is still due is looked at again (seconds).
RETRY_MIN_S, RETRY_MAX_S = 60, 86400

#: Workunits handled in one database transaction, on SQLite and on MariaDB: there others wait for their rows.
BATCH_SIZE, MYSQL_BATCH_SIZE = 100, 20

Row = Mapping[str, Any]

_SUFFIX = re.compile(r"_(\d+)$")
_UNSENT = (ServerState.INACTIVE, ServerState.UNSENT)


@dataclass(frozen=True)
class TimedOut:
    """A result that passed its deadline: the host's record with this app version is to be penalised."""

    hostid: int
    app_version_id: int


@dataclass(frozen=True, kw_only=True)
class Transition:
    """What one transition changes; only columns whose value differs are listed."""

    workunit: Mapping[str, Any] = field(default_factory=dict)
    results: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)  # by result id
    new_results: int = 0
    first_suffix: int = 0  # number at the end of the first new result's name
    new_priority: int = 0
    timed_out: tuple[TimedOut, ...] = ()


@dataclass
class _Counts:
    """The results of one workunit by kind; a result is counted once."""

    total: int = 0
    unsent: int = 0
    in_progress: int = 0
    no_reply: int = 0
    couldnt_send: int = 0
    success: int = 0
    errors: int = 0
    over: int = 0
    max_suffix: int = -1
    new_to_validate: bool = False
    last_received: int = 0


def transition(workunit: Row, results: Sequence[Row], now: int, config: ProjectConfig) -> Transition:
    """Decide what happens to a workunit and its results at time `now` (seconds since the epoch)."""
    state = _WorkunitState(dict(workunit), [dict(result) for result in results], now, config)
    return state.run()


class _WorkunitState:
    """Working copies of the rows of one workunit, compared with the originals at the end."""

    def __init__(self, wu: dict[str, Any], results: list[dict[str, Any]], now: int, config: ProjectConfig):
        self.original = dict(wu)
        self.original_results = [dict(result) for result in results]
        self.wu, self.results = wu, results
        self.now, self.config = now, config
        self.canonical = next((each for each in results if each["id"] == wu["canonical_resultid"]), None)
        self.timed_out: list[TimedOut] = []

    def run(self) -> Transition:
        counts = self._count()
        if counts.new_to_validate and counts.success >= self.wu["min_quorum"]:
            self.wu["need_validate"] = 1
        new_results = self._errors_and_new_results(counts)
        self._assimilate()
        deferred = self._delete_files(counts)
        self.wu["transition_time"] = self._next_time(deferred)
        return Transition(
            workunit=_changed(self.original, self.wu),
            results={
                new["id"]: changes
                for old, new in zip(self.original_results, self.results, strict=True)
                if (changes := _changed(old, new))
            },
            new_results=new_results,
            first_suffix=counts.max_suffix + 1,
            new_priority=self._new_priority(counts),
            timed_out=tuple(self.timed_out),
        )

    # Step 1: look at every result; time out those past their deadline.

    def _count(self) -> _Counts:
        counts = _Counts()
        for result in self.results:
            counts.total += 1
            if suffix := _SUFFIX.search(result["name"]):
                counts.max_suffix = max(counts.max_suffix, int(suffix[1]))
            if result["server_state"] in _UNSENT:
                counts.unsent += 1
            elif result["server_state"] == ServerState.IN_PROGRESS:
                self._count_in_progress(result, counts)
            elif result["server_state"] == ServerState.OVER:
                self._count_over(result, counts)
        return counts

    def _count_in_progress(self, result: dict[str, Any], counts: _Counts) -> None:
        if result["report_deadline"] >= self.now:
            counts.in_progress += 1
            return
        result["server_state"] = int(ServerState.OVER)
        result["outcome"] = int(Outcome.NO_REPLY)
        counts.no_reply += 1
        counts.over += 1
        self.timed_out.append(TimedOut(result["hostid"], result["app_version_id"]))

    def _count_over(self, result: dict[str, Any], counts: _Counts) -> None:
        counts.over += 1
        counts.last_received = max(counts.last_received, result["received_time"])
        outcome = result["outcome"]
        if outcome == Outcome.SUCCESS:
            if result["validate_state"] == ValidateState.INIT:
                if self._canonical_files_deleted():
                    result["validate_state"] = int(ValidateState.TOO_LATE)
                else:
                    counts.new_to_validate = True
            if result["validate_state"] != ValidateState.INVALID:
                counts.success += 1
        elif outcome == Outcome.CLIENT_ERROR:
            if result["exit_status"] == EXIT_ABORTED_VIA_GUI:
                counts.no_reply += 1
            else:
                counts.errors += 1
        elif outcome == Outcome.VALIDATE_ERROR:
            counts.errors += 1
        elif outcome in (Outcome.NO_REPLY, Outcome.CLIENT_DETACHED):
            counts.no_reply += 1
        elif outcome == Outcome.COULDNT_SEND:
            counts.couldnt_send += 1

    def _canonical_files_deleted(self) -> bool:
        return self.canonical is not None and self.canonical["file_delete_state"] == FileDeleteState.DONE

    # Steps 3 to 5: errors, and how many more results are needed.

    def _errors_and_new_results(self, counts: _Counts) -> int:
        wu = self.wu
        if counts.couldnt_send > 0:
            wu["error_mask"] |= int(ErrorMask.COULDNT_SEND_RESULT)
        if counts.errors and not (counts.success or counts.in_progress or counts.no_reply):
            wu["hr_class"], wu["app_version_id"] = 0, 0  # all of that class failed: let any class try
        if counts.errors > wu["max_error_results"]:
            wu["error_mask"] |= int(ErrorMask.TOO_MANY_ERROR_RESULTS)
        needed = max(0, wu["target_nresults"] - counts.unsent - counts.in_progress - counts.success)
        allowed = wu["max_total_results"] - counts.total
        if allowed < 0 or (allowed == 0 and needed > 0):
            wu["error_mask"] |= int(ErrorMask.TOO_MANY_TOTAL_RESULTS)
        if wu["error_mask"]:
            self._give_up()
            return 0
        if wu["canonical_resultid"] or wu["transitioner_flags"] == TransitionerFlags.NO_NEW_RESULTS:
            return 0
        return int(min(needed, allowed))

    def _give_up(self) -> None:
        for result in self.results:
            if result["server_state"] in _UNSENT:
                result["server_state"] = int(ServerState.OVER)
                result["outcome"] = int(Outcome.DIDNT_NEED)
            elif _is_success(result) and result["validate_state"] in (
                ValidateState.INIT,
                ValidateState.INCONCLUSIVE,
            ):
                result["validate_state"] = int(ValidateState.NO_CHECK)
        if self.wu["assimilate_state"] == AssimilateState.INIT:
            self.wu["assimilate_state"] = int(AssimilateState.READY)

    # Step 6: the end of a deferred assimilation.

    def _assimilate(self) -> None:
        all_judged = all(
            result["server_state"] == ServerState.OVER
            and not (_is_success(result) and result["validate_state"] == ValidateState.INIT)
            for result in self.results
        )
        if all_judged and self.canonical and self.wu["assimilate_state"] == AssimilateState.INIT:
            self.wu["assimilate_state"] = int(AssimilateState.READY)

    # Step 7: files that nobody needs any more.

    def _delete_files(self, counts: _Counts) -> int:
        """Mark files for deletion; returns when to look again if that must wait, else NEVER."""
        if self.wu["assimilate_state"] != AssimilateState.DONE:
            return NEVER
        due = counts.last_received + int(self.config.delete_delay)
        if self.now < due:
            return due
        all_over = all(self._is_settled(result) for result in self.results)
        if all_over and self.wu["file_delete_state"] == FileDeleteState.INIT:
            self.wu["file_delete_state"] = int(FileDeleteState.READY)
        for result in self.results:
            if result["file_delete_state"] != FileDeleteState.INIT:
                continue
            if result is self.canonical and not all_over:
                continue  # late results are compared with it
            judged = _is_success(result) and result["validate_state"] != ValidateState.INIT
            failed = result["server_state"] == ServerState.OVER and result["outcome"] == Outcome.CLIENT_ERROR
            if judged or failed:
                result["file_delete_state"] = int(FileDeleteState.READY)
        return NEVER

    def _is_settled(self, result: Row) -> bool:
        """Over, judged if successful, and not to be reported any more."""
        if result["server_state"] != ServerState.OVER:
            return False
        if result["outcome"] == Outcome.SUCCESS:
            return bool(result["validate_state"] != ValidateState.INIT)
        if result["outcome"] == Outcome.NO_REPLY:
            return bool(result["report_deadline"] < self.now)
        return True

    # Steps 8 and 9.

    def _next_time(self, deferred: int) -> int:
        wu, now = self.wu, self.now
        settled = wu["canonical_resultid"] or wu["error_mask"]
        when = NEVER if settled else now + int(max(1.5 * wu["delay_bound"], IDLE_RECHECK_S))
        for result in self.results:
            if result["server_state"] == ServerState.IN_PROGRESS:
                # A deadline counts as missed only when it lies in the past, so look one second later.
                when = min(when, result["report_deadline"] + 1)
        when = min(when, deferred, NEVER)
        if when <= now:
            lag = now - when
            when = now + min(max(2 * lag, RETRY_MIN_S), RETRY_MAX_S)
        return int(when)

    def _new_priority(self, counts: _Counts) -> int:
        bonus = 0
        if counts.over:
            bonus = self.config.reliable_priority_on_over
            if not counts.errors and self.config.reliable_priority_on_over_except_error:
                bonus = self.config.reliable_priority_on_over_except_error
        return int(self.wu["priority"]) + bonus


def _is_success(result: Row) -> bool:
    return bool(result["server_state"] == ServerState.OVER and result["outcome"] == Outcome.SUCCESS)


def _changed(old: Row, new: Row) -> dict[str, Any]:
    return {name: value for name, value in new.items() if value != old[name]}


# Effects.

_WU = database.workunit
_RESULT = database.result
_HAV = database.host_app_version

#: The columns that a transition reads; results carry large XML that it does not need.
_RESULT_COLUMNS = tuple(
    _RESULT.c[name]
    for name in (
        "id",
        "workunitid",
        "name",
        "server_state",
        "outcome",
        "validate_state",
        "file_delete_state",
        "report_deadline",
        "received_time",
        "exit_status",
        "hostid",
        "app_version_id",
    )
)
_WU_COLUMNS = tuple(column for column in _WU.c if column.name not in ("xml_doc", "mod_time", "keywords"))

# Locked (on MariaDB; SQLite has one writer): what is decided from them must be true when it is written.
_WORKUNIT = Statement(sa.select(*_WU_COLUMNS).where(_WU.c.id == sa.bindparam("id")).with_for_update())
_RESULTS = Statement(
    sa.select(*_RESULT_COLUMNS)
    .where(_RESULT.c.workunitid == sa.bindparam("workunitid"))
    .order_by(_RESULT.c.id)
    .with_for_update()
)
_SET_TIME = Statement(
    _WU.update()
    .where(_WU.c.id == sa.bindparam("workunit_id"))
    .values(
        transition_time=sa.case(
            (_WU.c.transition_time == sa.bindparam("seen"), sa.bindparam("later")), else_=sa.bindparam("now")
        )
    )
)
_DUE = (
    sa.select(_WU.c.id)
    .where(_WU.c.transition_time <= sa.bindparam("now"), _WU.c.transitioner_flags != TransitionerFlags.NONE)
    .order_by(_WU.c.transition_time, _WU.c.id)
    .limit(BATCH_SIZE)
)


class Transitioner:
    """Reads due workunits, decides and writes.

    Raises OSError or templates.TemplateError for an output template that is missing or wrong, after logging
    which workunit needs it; other workunits are handled first.
    """

    def __init__(
        self,
        db: Database,
        config: ProjectConfig,
        *,
        upload_key: PrivateKey | None,
        clock: Callable[[], float] = clock.now,
    ) -> None:
        self.db = db
        self.config = config
        self.upload_key = None if config.dont_generate_upload_certificates else upload_key
        self.clock = clock
        self.results_made = 0  # so far, counted shortly before they are committed

    def run_once(self) -> int:
        """Handle everything that is due; returns the number of transitions."""
        handled = 0
        while True:
            now = int(self.clock())
            with self.db.read() as connection:
                due = [int(row) for row in connection.scalars(_DUE, {"now": now})]
            if not due:
                return handled
            size = BATCH_SIZE if self.db.is_sqlite else MYSQL_BATCH_SIZE
            due_by_id = sorted(due)  # the order in which all daemons lock workunits
            for start in range(0, len(due), size):
                part = due_by_id[start : start + size]
                handled += self.db.serialized(functools.partial(self.transition_workunits, ids=part))
            if len(due) < BATCH_SIZE:
                return handled

    def transition_workunits(self, connection: Connection, ids: Sequence[int]) -> int:
        """Handle these workunits inside the caller's transaction."""
        now = int(self.clock())
        handled = 0
        for workunit_id in ids:
            wu = _WORKUNIT.first(connection, id=workunit_id)
            if wu is not None:
                results = _RESULTS.rows(connection, workunitid=workunit_id)
                self._apply(connection, wu, transition(wu, results, now, self.config), now)
                handled += 1
        return handled

    def _apply(self, connection: Connection, wu: Row, change: Transition, now: int) -> None:
        label = f"[WU#{wu['id']} {wu['name']}]"
        if change.new_results:
            try:
                rows = self._new_results(wu, change, now)
            except (OSError, templates.TemplateError) as error:
                # Stock BOINC stops the whole project here; one bad workunit must not do that.
                log.error("%s cannot make results, tried again in %d s: %s", label, RETRY_MIN_S, error)
                update_row(connection, _WU, wu["id"], {"transition_time": now + RETRY_MIN_S})
                return
            for row in rows:
                insert_row(connection, _RESULT, row)
            self.results_made += len(rows)
            log.info("%s made %d results", label, len(rows))
        for result_id, columns in change.results.items():
            update_row(connection, _RESULT, result_id, columns)
        for late in change.timed_out:
            penalise_time_out(connection, late, int(wu["delay_bound"]), self.config.daily_result_quota)
        if change.workunit:
            self._write_workunit(connection, wu, change.workunit, now)

    def _write_workunit(self, connection: Connection, wu: Row, columns: Row, now: int) -> None:
        """Only changed columns; if somebody set transition_time meanwhile, the workunit is handled again.

        The row is locked, so nobody can; BOINC's rule is kept for whoever runs this elsewhere.
        """
        values = dict(columns)
        when = values.pop("transition_time", None)
        if values:
            update_row(connection, _WU, wu["id"], values)
        if when is not None:
            _SET_TIME.run(connection, workunit_id=wu["id"], seen=wu["transition_time"], later=when, now=now)

    def _new_results(self, wu: Row, change: Transition, now: int) -> list[dict[str, Any]]:
        template = self._template(str(wu["result_template_file"]))
        rows = []
        for number in range(change.first_suffix, change.first_suffix + change.new_results):
            name, random = f"{wu['name']}_{number}", secrets.randbelow(1 << 31)
            xml = templates.result_document(
                template,
                result_name=name,
                random=random,
                upload_url=self.config.upload_url,
                key=self.upload_key,
            )
            row = templates.unfinished_result(wu, name=name, now=now, random=random, xml_doc_in=xml)
            row["priority"] = change.new_priority
            rows.append(row)
        return rows

    def _template(self, relative: str) -> str:
        path = (self.config.project_dir / relative).resolve()
        if not path.is_relative_to(self.config.project_dir):
            raise templates.TemplateError(f"output template {relative!r} lies outside the project")
        return _read_template(path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _read_template(path: Path, _mtime_ns: int) -> str:
    text = path.read_text()
    templates.check_output_template(text)
    return text


def penalise_time_out(connection: Connection, late: TimedOut, delay_bound: int, quota: int) -> None:
    """What a missed deadline costs the host's record with the app version: quota and trust."""
    where = (_HAV.c.host_id == late.hostid) & (_HAV.c.app_version_id == late.app_version_id)
    row = connection.execute(sa.select(_HAV).where(where).with_for_update()).mappings().first()
    if row is None:
        return
    current = row["max_jobs_per_day"] or quota
    turnaround = updated_average(dict(row), "turnaround", float(delay_bound))
    values = {"consecutive_valid": 0, "max_jobs_per_day": max(1, min(quota or current, current) - 1)}
    connection.execute(_HAV.update().where(where).values(**values, **turnaround))


def updated_average(row: Row, name: str, sample: float) -> dict[str, float]:
    """BOINC's AVERAGE_VAR with one more sample (`sched/average.h`): columns NAME_n, _avg, _var, _q."""
    n = row[f"{name}_n"] + 1
    delta = sample - row[f"{name}_avg"]
    average = row[f"{name}_avg"] + delta / n
    q = row[f"{name}_q"] + delta * (sample - average)
    return {f"{name}_n": n, f"{name}_avg": average, f"{name}_q": q, f"{name}_var": q / n}
