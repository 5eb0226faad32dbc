"""The validator daemon: judges all copies of a workunit together, grants credit, names the canonical result.

    main -> run_passes -> one_pass -> for each batch of workunits: read -> judge each -> write (one transaction)

Files are read before the transaction. In it the rows of workunits and results are locked and compared with
what was read; a workunit that changed meanwhile is left out and judged afresh. So a crash at any point, a
second validator, or a late report can neither lose nor double a grant, and no lock is held while computing.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError

from boinc_project import local_run, store
from boinc_project.background_runs import Start
from boinc_project.clock import now
from boinc_project.credit import MAX_GRANTED_CREDIT, claimed_flops, credit_of_flops, credit_of_runtimes
from boinc_project.daemon import Options, Patience, Stopper, UsageError
from boinc_project.daemon_start import Started, outside_faults, run, start
from boinc_project.database import Database, app, is_lost, result, workunit
from boinc_project.gt_tables import JobState, gt_microtask
from boinc_project.job_config import TrustSection
from boinc_project.project_tree import ProjectTree
from boinc_project.rows import Key, read_rows, update_rows
from boinc_project.states import Outcome, ServerState, ValidateState
from boinc_project.store import JobRow
from validator import doubts, rechecks, traces
from validator.books import Judged, Policy, open_books, sane_seconds, write_results
from validator.case import Case, Verdict, make_marks
from validator.decision import SOON
from validator.doubts import NotYet
from validator.drift import findings
from validator.evidence import Judge
from validator.lottery import NoSecret
from validator.rechecks import Rechecks
from validator.records import blocked_groups, judged_pairs, limits_of, read_records, write_drifting
from validator.replays import Replays
from validator.voters import Independence, Records

ABOUT = "Judges the results of gradient microtasks: sanity, agreement of all copies, credit."
DEFAULT_SLEEP_S = 5.0
WORKUNITS_PER_PASS = 1000
SWEEP_S = 3600.0
MAX_RESTARTS = 5  # of one workunit in one pass, when rows change under our hands

#: Workunits written in one transaction, and the seconds after which the first of them waits no longer.
BATCH, BATCH_S = 100, 0.5

#: Columns that are read: all that a decision depends on, without the workunit's XML.
UNIT_COLUMNS = (
    "id", "name", "appid", "need_validate", "canonical_resultid", "canonical_credit", "error_mask", "assimilate_state",
    "min_quorum", "target_nresults", "max_success_results", "max_total_results", "rsc_fpops_est", "rsc_fpops_bound",
    "transition_time",
)  # fmt: skip
RESULT_COLUMNS = (
    "id", "name", "workunitid", "appid", "server_state", "outcome", "validate_state", "hostid", "userid", "teamid",
    "app_version_id", "sent_time", "received_time", "cpu_time", "elapsed_time", "flops_estimate", "granted_credit",
    "xml_doc_in",
)  # fmt: skip
TASK_COLUMNS = ("workunit_name", "job_id", "version", "digest", "document", "flops")
#: Of these, the columns that may not change between reading and writing.
UNIT_MARKS = ("need_validate", "canonical_resultid", "error_mask", "min_quorum", "target_nresults", "assimilate_state")
RESULT_MARKS = ("server_state", "outcome", "validate_state", "hostid", "userid")

log = logging.getLogger("validator")


@dataclass(frozen=True)
class Rules:
    """What the command line and the project say about judging.

    one_vote_per_user    copies of one user are one vote; else those of one host are
    credit_from_runtime  credit by the hosts' own runtimes and speeds instead of the microtask's operations
    max_granted_credit   most credits for one result
    """

    one_vote_per_user: bool = True
    credit_from_runtime: bool = False
    max_granted_credit: float = MAX_GRANTED_CREDIT
    books: Policy = field(default_factory=Policy)


@dataclass
class Validator:
    """The daemon's state."""

    options: Options
    tree: ProjectTree
    database: Database
    appid: int
    stopper: Stopper
    rules: Rules = field(default_factory=Rules)
    clock: Callable[[], float] = now
    start: Start = local_run.start  # what computes something on the server
    jobs: dict[int, JobRow | None] = field(default_factory=dict)
    handled: int = 0
    swept: float = 0.0  # when old fingerprints were last looked for
    tested: float = 0.0  # when groups were last tested for drift
    told: dict[str, float] = field(default_factory=dict)  # when what stops many workunits was last told

    def __post_init__(self) -> None:
        self.judge = Judge(
            self.tree,
            self.database,
            Independence(one_vote_per_user=self.rules.one_vote_per_user),
            clock=self.clock,
            start=self.start,
        )
        self.patience = Patience(self.clock)
        self.rechecks = Rechecks(self.database, self.replays, self.options, self.clock)

    @property
    def replays(self) -> Replays:
        return self.judge.replays

    def one_pass(self) -> bool:
        """Judge what needs it; returns whether any workunit was decided."""
        self.jobs.clear()
        with outside_faults():
            self._sweep()
            self._look_at_groups()
            self.rechecks.wake()
            worked = self.replays.poll()
            worked |= self._look()
            worked |= self.rechecks.poll()
            while self.options.one_pass and (self.replays.busy or self.rechecks.busy):
                self.stopper.sleep(0.05)
                if self.replays.poll():
                    worked |= self._look()
                worked |= self.rechecks.poll()
        return worked

    def _look_at_groups(self) -> None:
        """Which groups have no vote; and at first and once an hour which drift: none of their copies stands alone, and
        where devices must be independent they confirm one another no more."""
        now = self.clock()
        with self.database.read() as connection:
            self.judge.independence = replace(self.judge.independence, blocked=blocked_groups(connection))
            if 0 <= now - self.tested < SWEEP_S:
                return
            self.tested = now
            jobs = store.jobs(connection, JobState.RUNNING, appid=self.appid)
            apart = any(job.config.trust.independent_devices for job in jobs)
            pairs = judged_pairs(connection, now)
        found = [one for one in findings(pairs, limits_of(self.tree.config)) if one.drifts]
        drifting = frozenset(one.group for one in found)
        for group in sorted(drifting - self.judge.drifting):
            log.warning("%s drifts: it is farther from others' copies than others are (boinc-train trust show)", group)
        self.judge.drifting = drifting
        self.judge.independence = replace(self.judge.independence, suspect=drifting if apart else frozenset())
        if not self.options.dry_run:
            self.database.repeated(lambda connection: write_drifting(connection, found, now))

    def _look(self) -> bool:
        """Judge what needs it and does not wait for the server's own computation."""
        worked, again = self._handle(self._waiting())
        for _ in range(MAX_RESTARTS - 1):
            if again:
                more, again = self._handle([again])
                worked |= more
        for identifier in again:
            log.warning("[WU#%d] changed %d times while it was judged; next pass", identifier, MAX_RESTARTS)
        return worked

    def _sweep(self) -> None:
        """Drop fingerprints that are too old, some at a time."""
        now = self.clock()
        if not self.options.dry_run and not 0 <= now - self.swept < SWEEP_S:
            while self.database.repeated(lambda connection: traces.drop_old(connection, now)):
                self.stopper.check()
            self.swept = now

    def _waiting(self) -> Iterator[list[int]]:
        """Pages of the workunits that are ours to judge now; parked ones do not keep others from being seen."""
        page = [0]
        while page:
            with self.database.read() as connection:
                page = store.needing_validation(
                    connection, self.appid, WORKUNITS_PER_PASS, after=page[-1], mod=self.options.mod
                )
            mine = [each for each in page if self.options.takes(each) and self._may_judge(each)]
            if self.options.limit is not None:
                mine = mine[: self.options.limit - self.handled]
                self.handled += len(mine)
            yield mine

    def _may_judge(self, identifier: int) -> bool:
        return self.patience.allows(identifier) and not self.replays.waits(identifier)

    def _handle(self, pages: Iterable[Sequence[int]]) -> tuple[bool, list[int]]:
        """Judge and write these workunits: whether any was decided, and those that changed under our hands.

        While the database works on one batch, the next one is judged.
        """
        worked, again = False, []
        with ThreadPoolExecutor(1, "writer") as writer:
            writing: tuple[int, Future[list[int]]] | None = None
            for verdicts in itertools.chain(self._verdicts(pages), [None]):
                if writing is not None:
                    count, changed = writing[0], writing[1].result()
                    again += changed
                    worked |= len(changed) < count
                    writing = None
                if verdicts:
                    writing = len(verdicts), writer.submit(self._written, verdicts)
        return worked, again

    def _verdicts(self, pages: Iterable[Sequence[int]]) -> Iterator[list[Verdict]]:
        """What is to be written, by batches; a dry run only tells it."""
        for page in pages:
            for first in range(0, len(page), BATCH):
                for verdicts in self._judged(self._read(page[first : first + BATCH])):
                    if not self.options.dry_run:
                        yield verdicts
                        continue
                    for each in verdicts:
                        log.info("%s would be decided: %s", each.case, each.decision)

    # Reading.

    def _read(self, identifiers: Sequence[int]) -> list[Case]:
        """What the database says of these workunits; without those that need no judgement any more."""
        with self.database.read() as connection:
            units = read_rows(connection, workunit, ("id",), [(each,) for each in identifiers], UNIT_COLUMNS)
            waiting = {int(row["id"]): row for row in units.values() if row["need_validate"]}
            results = _results(connection, list(waiting))
            names = [(str(row["name"]),) for row in waiting.values()]
            tasks = read_rows(connection, gt_microtask, ("workunit_name",), names, TASK_COLUMNS)
            for job_id in {int(task["job_id"]) for task in tasks.values()} - set(self.jobs):
                self.jobs[job_id] = store.job_with_id(connection, job_id)
            records = self._records(connection, results.values())
        cases = []
        for identifier, unit in waiting.items():
            task = tasks.get((str(unit["name"]),))
            job = None if task is None else self.jobs[int(task["job_id"])]
            if task is None or job is None:
                self.patience.leave(identifier)
                log.warning("[WU#%d %s] is not one of our microtasks; it is left alone", identifier, str(unit["name"]))
            else:
                cases.append(Case(unit, results.get(identifier, []), task, job, records))
        return cases

    def _records(self, connection: Connection, results: Iterable[Sequence[store.Row]]) -> Records | None:
        """The makers of these results, if anything asks for more than their users and hosts."""
        if not self.judge.independence.blocked and not any(
            job is not None and job.config.trust != TrustSection() for job in self.jobs.values()
        ):
            return None
        return read_records(connection, [row for rows in results for row in rows])

    # Judging.

    def _judged(self, cases: Sequence[Case]) -> Iterator[list[Verdict]]:
        """Verdicts in batches, so that none waits long for the others."""
        batch: list[Verdict] = []
        since = self.clock()
        for case in cases:
            self.stopper.check()
            verdict = self._guarded(case)
            if verdict is not None:
                batch.append(verdict)
            if batch and self.clock() - since > BATCH_S:
                make_marks(batch)
                yield batch
                batch, since = [], self.clock()
        if batch:
            make_marks(batch)
            yield batch

    def _guarded(self, case: Case) -> Verdict | None:
        """The verdict over a case, or None: later. An unexpected fault parks it and leaves the others alone."""
        try:
            verdict = self._judge(case)
        except NotYet:
            return None
        except NoSecret as error:
            self.patience.later(case.id)
            self._tell(str(error))
            return None
        except DBAPIError:
            raise
        except Exception:
            self.patience.failed(case.id, "%s judging failed", case)
            return None
        if verdict.decision.retry:
            self.patience.later(case.id)
            log.warning("%s %s; later", case, verdict.decision.note)
            return None
        if verdict.decision.replay and not self.options.dry_run:
            self.replays.want(case, verdict.decision.replay)
            return None
        return verdict

    def _tell(self, sentence: str) -> None:
        """Tell the admin of something that stops more than one workunit: once an hour."""
        if not 0 <= self.clock() - self.told.get(sentence, -SWEEP_S) < SWEEP_S:
            self.told[sentence] = self.clock()
            log.critical("%s", sentence)

    def _judge(self, case: Case) -> Verdict:
        """Read the copies and decide."""
        return self.judge.verdict(case)

    # Writing.

    def _written(self, verdicts: Sequence[Verdict]) -> list[int]:
        """Write verdicts; returns the ids of the workunits that changed and must be judged afresh.

        What one verdict cannot have written does not stop the others: each is then tried in a transaction of
        its own.
        """
        try:
            changed = self.database.repeated(lambda connection: self._write(connection, verdicts))
        except Exception as error:
            if isinstance(error, DBAPIError) and is_lost(error):
                raise
            if len(verdicts) > 1:
                return [identifier for each in verdicts for identifier in self._written([each])]
            self.patience.failed(verdicts[0].case.id, "%s judging failed", verdicts[0].case)
            return []
        for each in verdicts:
            if each.case.id not in changed:
                _report(each)
                self._name_unchecked(each)
        return sorted(changed)

    def _name_unchecked(self, verdict: Verdict) -> None:
        """Name what was accepted alone from hosts that have just returned something else than their task, or something
        that differs from what others computed."""
        for row in verdict.caught():
            with self.database.read() as connection:
                names = traces.accepted_alone(connection, int(row["hostid"]), verdict.kind)
            change = verdict.decision.results[int(row["id"])]
            if names or change.refuted:
                log.log(
                    logging.WARNING if change.differs else logging.CRITICAL,
                    "[HOST#%d] returned %s; accepted from it without a second copy: %s",
                    row["hostid"],
                    "what differs from others' copies" if change.differs else "something else than the task",
                    ", ".join(names) or "nothing",
                )
            if names:
                log.warning("[HOST#%d] the server computes the last %d of these again", row["hostid"], rechecks.MOST)
                self.rechecks.wake()

    def _write(self, connection: Connection, verdicts: Sequence[Verdict]) -> set[int]:
        """The statements of one transaction, in BOINC's order; returns the workunits that were left out."""
        changed = _changed(connection, [each.case for each in verdicts])
        kept = [each for each in verdicts if each.case.id not in changed]
        judged: list[Judged] = []
        unsent: list[int] = []
        woken: list[int] = []
        units: dict[Key, store.Row] = {}
        digests: dict[Key, store.Row] = {}
        now = self.clock()
        trails: list[store.Row] = []
        for each in kept:
            trails += each.trails(now)
            unit, decision = each.case.unit, each.decision
            credit = self._credit(each)
            for row in each.case.results:
                change = decision.results.get(int(row["id"]))
                if change is not None and change.validate_state != row["validate_state"]:
                    judged.append(Judged(unit, row, change, credit, each.kind))
            fields = dict(decision.workunit)
            if decision.canonical is not None:
                fields["canonical_credit"] = credit
                digests[(str(unit["name"]),)] = {"canonical_sha256": each.digests[decision.canonical]}
            if decision.retire_unsent:
                waiting = (ServerState.INACTIVE, ServerState.UNSENT)
                unsent += [int(row["id"]) for row in each.case.results if row["server_state"] in waiting]
            if fields.get("assimilate_state") and unit["assimilate_state"] != 0:
                del fields["assimilate_state"]
            if fields.get("transition_time") == SOON:
                del fields["transition_time"]
                woken.append(each.case.id)
            units[(each.case.id,)] = fields
        if judged:
            judged.sort(key=lambda one: int(one.row["id"]))
            books = open_books(connection, judged, self.rules.books, now)
            for one in judged:
                books.enter(one)
            books.write(connection)
            write_results(connection, judged, books.outliers)
        update_rows(connection, result, ("id",), {(each,): _NOT_NEEDED for each in unsent})
        traces.write(connection, trails)
        doubts.write(connection, [each.accepted for each in kept if each.accepted is not None], now)
        for each in kept:
            for row in each.caught():
                rechecks.queue(connection, int(row["hostid"]), each.kind, now)
        update_rows(connection, gt_microtask, ("workunit_name",), digests)
        update_rows(connection, workunit, ("id",), units)
        if woken:
            connection.execute(sa.update(workunit).where(workunit.c.id.in_(woken)).values(transition_time=store.soon()))
        return changed

    def _credit(self, verdict: Verdict) -> float:
        """What each valid result of the workunit is granted."""
        unit, most = verdict.case.unit, self.rules.max_granted_credit
        if unit["canonical_resultid"]:
            granted = [r["granted_credit"] for r in verdict.case.results if r["id"] == unit["canonical_resultid"]]
            return float(granted[0] if granted else unit["canonical_credit"])
        if not self.rules.credit_from_runtime:
            return credit_of_flops(float(verdict.case.task["flops"]), most)
        claims = [
            claimed_flops(float(row["flops_estimate"]), sane_seconds(row["elapsed_time"]))
            for row in verdict.case.results
            if int(row["id"]) in verdict.decision.results
            and verdict.decision.results[int(row["id"])].validate_state == ValidateState.VALID
        ]
        return credit_of_runtimes(claims, float(unit["rsc_fpops_bound"]), most)


#: A result that nobody was sent and nobody needs any more; its row is locked and still unsent.
_NOT_NEEDED = {"server_state": int(ServerState.OVER), "outcome": int(Outcome.DIDNT_NEED)}


def _results(connection: Connection, units: Sequence[int]) -> dict[int, list[store.Row]]:
    """The results of these workunits by workunit, in ascending order of their ids."""
    columns = [result.c[name] for name in RESULT_COLUMNS]
    query = sa.select(*columns).where(result.c.workunitid.in_(units)).order_by(result.c.workunitid, result.c.id)
    found: dict[int, list[store.Row]] = {}
    for values in connection.execute(query):
        row = dict(zip(RESULT_COLUMNS, values, strict=True))
        found.setdefault(int(row["workunitid"]), []).append(row)
    return found


def _changed(connection: Connection, cases: Sequence[Case]) -> set[int]:
    """Lock the rows of these cases; returns the workunits for which they are not what was read any more."""
    units = read_rows(connection, workunit, ("id",), [(case.id,) for case in cases], ["id", *UNIT_MARKS], lock=True)
    keys = [(int(row["id"]),) for case in cases for row in case.results]
    rows = read_rows(connection, result, ("id",), keys, ["id", *RESULT_MARKS], lock=True)
    query = sa.select(result.c.workunitid, sa.func.count()).where(result.c.workunitid.in_([case.id for case in cases]))
    counts = {int(unit): int(count) for unit, count in connection.execute(query.group_by(result.c.workunitid))}

    def same(read: store.Row, now: store.Row | None, marks: Sequence[str]) -> bool:
        return now is not None and all(read[name] == now[name] for name in marks)

    return {
        case.id
        for case in cases
        if not same(case.unit, units.get((case.id,)), UNIT_MARKS)
        or counts.get(case.id, 0) != len(case.results)
        or not all(same(row, rows.get((int(row["id"]),)), RESULT_MARKS) for row in case.results)
    }


def _report(verdict: Verdict) -> None:
    """Say in the log what was written."""
    for identifier, why in verdict.suspicions.items():
        log.warning("%s [RESULT#%d] looks copied: %s", verdict.case, identifier, why)
    for row in verdict.case.results:
        change = verdict.decision.results.get(int(row["id"]))
        if change is not None and change.validate_state != row["validate_state"]:
            why = f": {change.reason}" if change.reason else ""
            log.info("[RESULT#%d %s] %s%s", row["id"], row["name"], change.validate_state.name.lower(), why)
    if verdict.decision.canonical is not None:
        log.info("%s canonical result is [RESULT#%d]", verdict.case, verdict.decision.canonical)
    elif verdict.decision.note:
        log.info("%s %s", verdict.case, verdict.decision.note)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry of the daemon; returns the exit status."""
    started = start(
        arguments,
        program="gt_validator",
        about=ABOUT,
        default_sleep=DEFAULT_SLEEP_S,
        own={
            "votes": "whose copies count apart: user (default), or host for a private lab with one account",
            "max_granted_credit": f"most credits for one result (default {MAX_GRANTED_CREDIT:.0f})",
        },
        flags={"credit_from_runtime": "credit by runtime and host speed, not by the microtask's operations"},
        check=_check,
    )
    if isinstance(started, int):
        return started
    rules = rules_of(started)
    voters = (
        "One vote per user" if rules.one_vote_per_user else "One vote per HOST: copies of one account check each other"
    )
    log.info("%s", voters)
    validator = Validator(started.options, started.tree, started.database, started.appid, started.stopper, rules)
    try:
        return run(started, "validator", validator.one_pass)
    finally:
        validator.judge.doubts.prober.stop()
        validator.replays.stop()


def rules_of(started: Started) -> Rules:
    """The rules that options, config.xml and the app's row make."""
    own, config = started.options.own, started.tree.config
    with started.database.read() as connection:
        replicas = connection.scalar(sa.select(app.c.target_nresults).where(app.c.id == started.appid))
    return Rules(
        one_vote_per_user=own.get("votes", "user") == "user",
        credit_from_runtime="credit_from_runtime" in own,
        max_granted_credit=float(own.get("max_granted_credit", MAX_GRANTED_CREDIT)),
        books=Policy(config.daily_result_quota, config.credit_by_app, int(replicas or 0) > 1),
    )


def _check(options: Options) -> None:
    if options.own.get("votes", "user") not in ("user", "host"):
        raise UsageError("gt_validator: --votes takes user or host")
    try:
        most = float(options.own.get("max_granted_credit", MAX_GRANTED_CREDIT))
    except ValueError:
        most = 0.0
    if not 0 < most < 1e12:
        raise UsageError("gt_validator: --max_granted_credit takes a positive number of credits")


if __name__ == "__main__":
    sys.exit(main())
