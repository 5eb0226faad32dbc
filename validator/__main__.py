"""The validator daemon: judges all copies of a workunit together, grants credit, names the canonical result.

    main -> run_passes -> one_pass -> for each workunit: read -> load files -> decide -> write (one transaction)

Files are read before the transaction; in it the workunit's and results' rows are locked and compared with
what was read, and if anything changed meanwhile the workunit is judged afresh. So a crash at any point, a
second validator, or a late report can neither lose nor double a grant.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from boinc_project import store
from boinc_project.contract.errors import InvalidResult, TransientError
from boinc_project.contract.microtask import Microtask
from boinc_project.contract.opset import TensorType
from boinc_project.contract.update import update_types
from boinc_project.credit import credit_of_flops
from boinc_project.daemon import Options, Stopper, UsageError
from boinc_project.daemon_start import outside_faults, run, start
from boinc_project.database import Database, workunit
from boinc_project.gt_tables import gt_microtask
from boinc_project.project_tree import ProjectTree
from boinc_project.store import JobRow
from validator import grants
from validator.agreement import pair_distances
from validator.decision import Decision, Sanity, decide, is_viable, needed
from validator.sanity import Payload, load

ABOUT = "Judges the results of gradient microtasks: sanity, agreement of all copies, credit."
DEFAULT_SLEEP_S = 5.0
WORKUNITS_PER_PASS = 1000
TRANSIENT_RETRY_S = 60.0
MAX_RESTARTS = 5  # of one workunit in one pass, when rows change under our hands
PARK_AFTER = 3  # unexpected exceptions for one workunit; then it is left alone until the daemon restarts

log = logging.getLogger("validator")


@dataclass
class Validator:
    """The daemon's state; `not_before` holds back-off times of workunits by id."""

    options: Options
    tree: ProjectTree
    database: Database
    appid: int
    stopper: Stopper
    one_vote_per_user: bool = True
    clock: Callable[[], float] = time.time
    not_before: dict[int, float] = field(default_factory=dict)
    failures: dict[int, int] = field(default_factory=dict)
    types: dict[tuple[int, str, int], Mapping[str, TensorType]] = field(default_factory=dict)

    def one_pass(self) -> bool:
        """Judge what needs it; returns whether any workunit was decided."""
        worked = False
        with outside_faults():
            with self.database.read() as connection:
                waiting = store.needing_validation(connection, self.appid, WORKUNITS_PER_PASS)
            for identifier in waiting:
                self.stopper.check()
                if self.options.takes(identifier) and self.not_before.get(identifier, 0.0) <= self.clock():
                    worked |= self._guarded(identifier)
        return worked

    def _guarded(self, identifier: int) -> bool:
        """Handle one workunit; an unexpected fault parks it and leaves the others alone."""
        try:
            return self._handle(identifier)
        except DBAPIError:
            raise
        except Exception:
            count = self.failures[identifier] = self.failures.get(identifier, 0) + 1
            parked = count >= PARK_AFTER
            self.not_before[identifier] = float("inf") if parked else self.clock() + TRANSIENT_RETRY_S
            log.critical("[WU#%d] judging failed%s", identifier, "; it is parked" if parked else "", exc_info=True)
            return False

    def _handle(self, identifier: int) -> bool:
        for _ in range(MAX_RESTARTS):
            with self.database.read() as connection:
                row = connection.execute(sa.select(workunit).where(workunit.c.id == identifier)).mappings().first()
                if row is None or row["need_validate"] == 0:
                    return False
                unit = dict(row)
                results = store.results_of(connection, identifier)
                task = store.microtask_of(connection, str(unit["name"]))
                job = None if task is None else store.job_with_id(connection, int(task["job_id"]))
            if task is None or job is None:
                self._once_parked(identifier, f"[WU#{identifier} {unit['name']}] is not one of our microtasks")
                return False
            payloads, decision = self._judge(unit, results, task, job)
            if decision.retry:
                self.not_before[identifier] = self.clock() + TRANSIENT_RETRY_S
                log.warning("[WU#%d %s] %s; later", identifier, unit["name"], decision.note)
                return False
            if self.options.dry_run:
                log.info("[WU#%d %s] would be decided: %s", identifier, unit["name"], decision)
                return False
            if self._write(unit, results, task, decision, payloads):
                self._log(unit, results, decision)
                return True
        log.warning("[WU#%d] changed %d times while it was judged; next pass", identifier, MAX_RESTARTS)
        return False

    def _judge(
        self, unit: store.Row, results: Sequence[store.Row], task: store.Row, job: JobRow
    ) -> tuple[dict[int, Payload], Decision]:
        microtask = Microtask.from_json(str(task["document"]).encode("ascii"))
        types = self._types_of(job, microtask)
        payloads: dict[int, Payload] = {}
        sanity: dict[int, tuple[Sanity, str]] = {}
        by_id = {int(row["id"]): row for row in results}
        for identifier in needed(unit, results):
            try:
                payloads[identifier] = load(self.tree, by_id[identifier], types, microtask.codec, str(task["digest"]))
                sanity[identifier] = (Sanity.GOOD, "")
            except InvalidResult as error:
                sanity[identifier] = (Sanity.INVALID, f"{error} ({error.fault})")
            except TransientError as error:
                sanity[identifier] = (Sanity.TRANSIENT, str(error))
        distances = pair_distances({key: payload.update.tensors for key, payload in payloads.items()})
        voters: dict[int, Hashable] = {
            int(row["id"]): int(row["userid"] if self.one_vote_per_user else row["hostid"])
            for row in results
            if is_viable(row)
        }
        now = int(self.clock())
        decision = decide(unit, results, sanity, distances, job.config.workunit.tolerance, voters, now)
        return payloads, decision

    def _types_of(self, job: JobRow, microtask: Microtask) -> Mapping[str, TensorType]:
        key = (job.id, microtask.mode, microtask.steps)
        if key not in self.types:
            self.types[key] = update_types(job.folder.gradient_graph, microtask.mode, microtask.steps)
        return self.types[key]

    def _write(
        self,
        unit: store.Row,
        results: Sequence[store.Row],
        task: store.Row,
        decision: Decision,
        payloads: Mapping[int, Payload],
    ) -> bool:
        """Write a decision in one transaction; False if the rows are no longer those it was taken from."""
        identifier = int(unit["id"])
        with self.database.transaction() as connection:
            locked = store.lock_workunit(connection, identifier)
            current = store.results_of(connection, identifier, lock=True)
            if locked is None or not _same(unit, locked) or _fingerprint(results) != _fingerprint(current):
                return False
            credit = credit_of_flops(float(task["flops"]))
            granted = credit if not unit["canonical_resultid"] else float(unit["canonical_credit"])
            for row in sorted(results, key=lambda each: int(each["id"])):
                change = decision.results.get(int(row["id"]))
                if change is not None and change.validate_state != row["validate_state"]:
                    grants.judge_result(connection, unit, row, change, granted, self.clock())
            if decision.retire_unsent:
                store.retire_unsent(connection, identifier)
            fields = dict(decision.workunit)
            if decision.canonical is not None:
                fields["canonical_credit"] = credit
                connection.execute(
                    sa.update(gt_microtask)
                    .where(gt_microtask.c.workunit_name == unit["name"])
                    .values(canonical_sha256=payloads[decision.canonical].sha256)
                )
            if fields.get("assimilate_state") and unit["assimilate_state"] != 0:
                del fields["assimilate_state"]
            connection.execute(sa.update(workunit).where(workunit.c.id == identifier).values(**fields))
        return True

    def _log(self, unit: store.Row, results: Sequence[store.Row], decision: Decision) -> None:
        for row in results:
            change = decision.results.get(int(row["id"]))
            if change is not None and change.validate_state != row["validate_state"]:
                why = f": {change.reason}" if change.reason else ""
                log.info("[RESULT#%d %s] %s%s", row["id"], row["name"], change.validate_state.name.lower(), why)
        if decision.canonical is not None:
            log.info("[WU#%d %s] canonical result is [RESULT#%d]", unit["id"], unit["name"], decision.canonical)
        elif decision.note:
            log.info("[WU#%d %s] %s", unit["id"], unit["name"], decision.note)

    def _once_parked(self, identifier: int, text: str) -> None:
        self.not_before[identifier] = float("inf")
        log.warning("%s; it is left alone", text)


def _same(read: store.Row, locked: store.Row) -> bool:
    names = ("need_validate", "canonical_resultid", "error_mask", "target_nresults", "assimilate_state")
    return all(read[name] == locked[name] for name in names)


def _fingerprint(rows: Sequence[store.Row]) -> list[tuple[Any, ...]]:
    """What a decision depends on, so that a change under our hands is noticed."""
    return [(r["id"], r["server_state"], r["outcome"], r["validate_state"], r["hostid"], r["userid"]) for r in rows]


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry of the daemon; returns the exit status."""
    started = start(
        arguments,
        program="gt_validator",
        about=ABOUT,
        default_sleep=DEFAULT_SLEEP_S,
        own={"votes": "whose copies count apart: user (default), or host for a private lab with one account"},
        check=_check_votes,
    )
    if isinstance(started, int):
        return started
    by_user = started.options.own.get("votes", "user") == "user"
    log.info("%s", "One vote per user" if by_user else "One vote per HOST: copies of one account check each other")
    validator = Validator(started.options, started.tree, started.database, started.appid, started.stopper, by_user)
    return run(started, "validator", validator.one_pass)


def _check_votes(options: Options) -> None:
    if options.own.get("votes", "user") not in ("user", "host"):
        raise UsageError("gt_validator: --votes takes user or host")


if __name__ == "__main__":
    sys.exit(main())
