"""The scheduler's effects: reads what a request needs, lets `scheduler.py` decide, writes the changes.

Requests that arrive together share one database transaction and so one durable commit (on MariaDB each has its
own, so that it locks no more than its own rows); they are decided one after the other inside it, so that two of
them can never be given the same result. Against other processes, transactions are serializable, and a result is
claimed by an UPDATE that matches only what nobody has taken. A reply is handed out only after the commit.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError

from boinc_project import clock, database
from boinc_project.database import Database, is_lost
from boinc_project.project_tree import ProjectTree
from boinc_project.server import scheduler
from boinc_project.server.messages import (
    RequestError,
    SchedulerReply,
    SchedulerRequest,
    format_reply,
    parse_request,
)
from boinc_project.server.scheduler import Changes, Decision, Documents, Identity, Snapshot
from boinc_project.server.statements import Statement, insert_row, update_row
from boinc_project.server.transitioner import Transitioner
from boinc_project.server.versions import VersionTable, read_plan_classes
from boinc_project.size_classes import census_path, quantiles, read_census
from boinc_project.states import Outcome, ServerState

log = logging.getLogger(__name__)

#: Unsent results looked at for one request; a request is given far fewer.
MAX_CANDIDATES, MIN_CANDIDATES = 60, 4

#: Seconds that a short job takes, to guess how many a request can be given.
TYPICAL_JOB_S = 10.0

#: Seconds for which apps, versions and plan classes are kept before they are read again.
STATIC_TABLES_TTL_S = 1.0

#: Digits of an id; on large projects ids have outgrown 32 bits.
_MAX_ID_DIGITS = 18

#: Longest chain of replaced hosts that is followed.
_MAX_ZOMBIES = 20

#: Indexes of ours beside BOINC's (SQLite only): they hold only the rows that the scheduler looks for, so that
#: a request costs the same however many results the project has seen.
INDEXES = (
    "CREATE INDEX IF NOT EXISTS gt_unsent ON result (priority DESC, workunitid, id) WHERE server_state = 2",
    "CREATE INDEX IF NOT EXISTS gt_in_progress ON result (hostid) WHERE server_state = 4",
    "CREATE INDEX IF NOT EXISTS gt_inactive ON result (appid, size_class) WHERE server_state = 1",
)

_U, _H, _R, _W = database.user, database.host, database.result, database.workunit
_HAV, _AV = database.host_app_version, database.app_version

#: Result and workunit columns of a joined row, without the XML.
_JOINED = (
    *(
        _R.c[name]
        for name in (
            "id",
            "name",
            "workunitid",
            "appid",
            "app_version_id",
            "server_state",
            "outcome",
            "hostid",
            "userid",
            "sent_time",
            "received_time",
            "report_deadline",
            "priority",
        )
    ),
    *(
        _W.c[name].label(f"wu_{name}")
        for name in (
            "name",
            "rsc_fpops_est",
            "rsc_fpops_bound",
            "rsc_memory_bound",
            "rsc_disk_bound",
            "delay_bound",
            "error_mask",
            "assimilate_state",
            "canonical_resultid",
            "app_version_id",
            "app_version_num",
            "size_class",
        )
    ),
)
_JOIN = sa.select(*_JOINED).join_from(_R, _W, _W.c.id == _R.c.workunitid)

# Literals, not parameters: SQLite uses a partial index only if it can see the condition.
_IS_UNSENT = _R.c.server_state == sa.literal_column(str(int(ServerState.UNSENT)))
_IS_IN_PROGRESS = _R.c.server_state == sa.literal_column(str(int(ServerState.IN_PROGRESS)))

_ON_HOST = Statement(
    _JOIN.where(_R.c.hostid == sa.bindparam("hostid"), _IS_IN_PROGRESS),
    sqlite_index="gt_in_progress",
    mysql_index="res_hostid_id",
)
_BY_NAME = Statement(_JOIN.where(_R.c.name == sa.bindparam("name")))
_HOST = Statement(sa.select(_H).where(_H.c.id == sa.bindparam("id")))
_HOSTS_OF_USER = Statement(sa.select(_H).where(_H.c.userid == sa.bindparam("userid")))
_USER = Statement(sa.select(_U).where(_U.c.id == sa.bindparam("id")))
_USER_BY_KEY = Statement(sa.select(_U).where(_U.c.authenticator == sa.bindparam("key")))
_SPEEDS = Statement(sa.select(_HAV).where(_HAV.c.host_id == sa.bindparam("hostid")))
_WORKUNIT_XML = Statement(sa.select(_W.c.xml_doc).where(_W.c.id == sa.bindparam("id")))
_RESULT_XML = Statement(sa.select(_R.c.xml_doc_in).where(_R.c.id == sa.bindparam("id")))

_APPS = Statement(sa.select(database.app).where(database.app.c.deprecated == 0))
_VERSIONS = Statement(
    sa.select(_AV, database.platform.c.name.label("platform")).join_from(
        _AV, database.platform, database.platform.c.id == _AV.c.platformid
    )
)

#: Claims a result; no row matches if somebody else was quicker.
_CLAIM = Statement(
    _R.update()
    .where(_R.c.id == sa.bindparam("result_id"), _R.c.server_state == sa.bindparam("expected_state"))
    .values(
        {
            name: sa.bindparam(name)
            for name in (
                "server_state",
                "hostid",
                "userid",
                "sent_time",
                "report_deadline",
                "flops_estimate",
                "app_version_id",
            )
        }
    )
)
#: Lets the transitioner look at the workunit when the deadline has passed.
_WATCH_DEADLINE = Statement(
    _W.update()
    .where(_W.c.id == sa.bindparam("workunit_id"), _W.c.transition_time > sa.bindparam("due"))
    .values(transition_time=sa.bindparam("due"))
)


@dataclass(frozen=True)
class Posted:
    """A request as it came: its body, and the address that it came from ('' if that is not known)."""

    body: bytes
    address: str = ""


@dataclass(frozen=True)
class Held:
    """A request whose reply, without work, may wait for new results; asked again, it is only for work."""

    request: SchedulerRequest
    reply: SchedulerReply


@dataclass(frozen=True)
class Answer:
    """The reply's bytes; `held` if it brings no work and may wait for some."""

    reply: bytes
    held: Held | None = None


def _candidates(per_user: bool, per_host: bool) -> Statement:
    """Unsent results in the order of BOINC's feeder, without those whose workunit this user or host has."""
    sibling = _R.alias("sibling")
    failed = sa.and_(
        sibling.c.server_state == int(ServerState.OVER),
        sa.or_(*(sibling.c.outcome == int(outcome) for outcome in scheduler.FAILED_OUTCOMES)),
    )
    owners = []
    if per_user:
        owners.append(sibling.c.userid == sa.bindparam("userid"))
    if per_host or per_user:
        owners.append(sibling.c.hostid == sa.bindparam("hostid"))
    query = _JOIN.where(_IS_UNSENT, _W.c.error_mask == 0, _W.c.transitioner_flags == 0)
    if owners:
        taken = sa.exists().where(sibling.c.workunitid == _R.c.workunitid, sa.or_(*owners), sa.not_(failed))
        query = query.where(sa.not_(taken))
    order = (_R.c.priority.desc(), _R.c.workunitid, _R.c.id)
    query = query.order_by(*order).limit(sa.bindparam("limit"))
    return Statement(query, sqlite_index="gt_unsent", mysql_index="ind_res_st")


class SchedulerService:
    """Answers scheduler requests. Use it from one thread at a time."""

    def __init__(
        self,
        tree: ProjectTree,
        db: Database,
        transitioner: Transitioner,
        *,
        clock: Callable[[], float] = clock.now,
    ) -> None:
        self.tree, self.db, self.config = tree, db, tree.config
        self.transitioner = transitioner
        self.clock = clock
        self.code_sign_key = tree.code_sign_public().text()
        self._candidates = _candidates(self.config.one_result_per_user_per_wu, self.config.one_result_per_host_per_wu)
        self._static = _StaticTables(tree)
        self._must_last = False  # whether the transaction in progress changes what must not be lost

    def answer(self, asked: Sequence[Posted | Held]) -> list[Answer]:
        """The answer to each request or held request, in order, after one commit for all.

        The commit is durable, unless it holds nothing but what the hosts say of themselves.
        """
        if self.tree.is_triggered("stop_sched"):
            stopped = format_reply(scheduler.stopped_reply(self.config))
            return [Answer(format_reply(each.reply) if isinstance(each, Held) else stopped) for each in asked]
        if len(asked) > 1 and not self.db.is_sqlite:
            return [answer for each in asked for answer in self.answer([each])]
        requests = [each if isinstance(each, Held) else self._parsed(each) for each in asked]

        def work(connection: Connection) -> list[Answer]:
            self._must_last = False
            return [self._answer_one(connection, request) for request in requests]

        try:
            answers = self.db.serialized(work, synced=False)
            if self._must_last:
                self.db.sync()
            return answers
        except Exception as error:
            # One request must not spoil the others: each gets a transaction of its own.
            if len(asked) > 1:
                return [answer for each in asked for answer in self.answer([each])]
            if isinstance(error, DBAPIError) and is_lost(error):
                log.error("a scheduler request failed: the database does not answer (%s)", error.orig)
            else:
                log.exception("a scheduler request failed")
            if isinstance(asked[0], Held):
                return [Answer(format_reply(asked[0].reply))]
            text = f"Project encountered an internal error ({type(error).__name__}); it will be retried"
            return [Answer(format_reply(scheduler.error_reply(self.config, text)))]

    def reply_to(self, request: SchedulerRequest) -> SchedulerReply:
        """The same for one request that is a record already: what the simulator's hosts ask. Nothing is held."""
        return self.db.serialized(lambda connection: self._handle(connection, request)[0])

    def _parsed(self, posted: Posted) -> SchedulerRequest | RequestError:
        try:
            return replace(parse_request(posted.body), remote_address=posted.address)
        except RequestError as error:
            return error

    def _answer_one(self, connection: Connection, request: SchedulerRequest | RequestError | Held) -> Answer:
        if isinstance(request, Held):
            return self._ask_again(connection, request)
        if isinstance(request, RequestError):
            text = f"Error in request message: {request}"
            return Answer(format_reply(scheduler.error_reply(self.config, text)))
        reply, may_be_held = self._handle(connection, request)
        return Answer(format_reply(reply), Held(request, reply) if may_be_held else None)

    def _handle(self, connection: Connection, request: SchedulerRequest) -> tuple[SchedulerReply, bool]:
        """The reply, what it says being written, and whether it may be held."""
        identity = self._identify(connection, request)
        if identity.user is None:
            return scheduler.refuse(self.config), False
        now = int(self.clock())
        host = identity.host or self._find_or_make_host(connection, request, identity.user, now)
        snapshot = self._snapshot(connection, request, identity.user, host, now, new_to_client=identity.host is None)
        decision = self._decided(connection, request, snapshot)
        reply = self._carried_out(connection, decision, snapshot)
        return reply, scheduler.may_be_held(request, decision)

    def _ask_again(self, connection: Connection, held: Held) -> Answer:
        """Work for a client whose reply is held; without any, nothing is written and the reply stays held."""
        request = scheduler.repeated(held.request)
        identity = self._identify(connection, request)
        if identity.user is None or identity.host is None or identity.host["rpc_seqno"] != request.rpc_seqno:
            return Answer(format_reply(held.reply))  # the client has asked anew meanwhile, or is gone
        snapshot = self._snapshot(
            connection, request, identity.user, identity.host, int(self.clock()), new_to_client=False
        )
        decision = self._decided(connection, request, snapshot)
        if not decision.changes.sent:
            return Answer(format_reply(held.reply), held)
        reply = self._carried_out(connection, decision, snapshot)
        return Answer(format_reply(scheduler.joined(held.reply, reply)))

    def _decided(self, connection: Connection, request: SchedulerRequest, snapshot: Snapshot) -> Decision:
        """The decision; where none of the first candidates suits the host, more of them are looked at."""
        decision = scheduler.decide(request, snapshot, self.config)
        if not decision.searched or decision.changes.sent or not snapshot.more_candidates:
            return decision
        candidates, _ = self._look(connection, snapshot.user["id"], snapshot.host["id"], MAX_CANDIDATES)
        return scheduler.decide(request, replace(snapshot, candidates=candidates), self.config)

    def _carried_out(self, connection: Connection, decision: Decision, snapshot: Snapshot) -> SchedulerReply:
        """Write what was decided; returns the complete reply."""
        self._write(connection, decision.changes, snapshot)
        self._must_last |= decision.changes.must_last or snapshot.new_to_client
        if not decision.changes.sent:
            return decision.reply
        documents = _documents(connection, decision.changes)
        return scheduler.complete_reply(decision, snapshot.apps, documents)

    # Who asks.

    def _identify(self, connection: Connection, request: SchedulerRequest) -> Identity:
        host = self._living_host(connection, request.hostid)
        host_user = _USER.first(connection, id=host["userid"]) if host else None
        key_user = None
        if host_user is None or not scheduler.accepts_key(host_user, request.authenticator):
            key_user = self._user_by_key(connection, request.authenticator)
        identity = scheduler.identify(request, host, host_user, key_user)
        return identity

    def _living_host(self, connection: Connection, hostid: int) -> dict[str, Any] | None:
        for _ in range(_MAX_ZOMBIES):
            host = _HOST.first(connection, id=hostid) if hostid else None
            if host is None or host["userid"]:
                return host
            hostid = host["rpc_seqno"]  # replaced: the successor's id stands here
        return None

    def _user_by_key(self, connection: Connection, key: str) -> dict[str, Any] | None:
        if not key:
            return None
        userid, separator, _ = key.partition("_")
        if separator and userid.isascii() and userid.isdecimal() and len(userid) <= _MAX_ID_DIGITS:
            user = _USER.first(connection, id=int(userid))
            return user if user and scheduler.accepts_key(user, key) else None
        return _USER_BY_KEY.first(connection, key=key)

    def _find_or_make_host(
        self, connection: Connection, request: SchedulerRequest, user: Mapping[str, Any], now: int
    ) -> dict[str, Any]:
        hosts = _HOSTS_OF_USER.rows(connection, userid=user["id"])
        known = scheduler.similar_host(request, user, hosts)
        if known is not None:
            if scheduler.should_detach(request):
                self._detach(connection, int(known["id"]), now)
            return dict(known)
        columns = scheduler.host_columns(request, user, now)
        columns.update(userid=user["id"], create_time=now, rpc_seqno=0, rpc_time=0, expavg_time=now)
        row = database.new_row(_H, **columns)
        outcome = connection.execute(_H.insert(), row)
        key = outcome.inserted_primary_key
        assert key is not None
        log.info("[HOST#%d] new host of [USER#%d]", key[0], user["id"])
        return {**row, "id": int(key[0])}

    def _detach(self, connection: Connection, hostid: int, now: int) -> None:
        """The client lost what it had in progress: those results are over."""
        lost = connection.execute(
            sa.select(_R.c.id, _R.c.workunitid).where(_R.c.hostid == hostid, _IS_IN_PROGRESS)
        ).all()
        if lost:
            connection.execute(
                _R.update()
                .where(_R.c.id.in_([row.id for row in lost]))
                .values(
                    server_state=int(ServerState.OVER),
                    outcome=int(Outcome.CLIENT_DETACHED),
                    received_time=now,
                )
            )
            self._transition(connection, {int(row.workunitid) for row in lost}, now)

    # What the database says.

    def _snapshot(
        self,
        connection: Connection,
        request: SchedulerRequest,
        user: Mapping[str, Any],
        host: Mapping[str, Any],
        now: int,
        *,
        new_to_client: bool,
    ) -> Snapshot:
        static = self._static.current(connection, self.clock())
        hostid = host["id"]
        on_host = _ON_HOST.rows(connection, hostid=hostid)
        known = {row["name"] for row in on_host}
        may_send = request.wants_work and not scheduler.wait_before_work(request, host, now, self.config)
        candidates: list[dict[str, Any]] = []
        more = False
        if may_send:
            left = known.difference(result.name for result in request.results)
            candidates, more = self._look(
                connection, user["id"], hostid, _most_jobs(request, scheduler.room(request, len(left), self.config))
            )
        speeds: list[dict[str, Any]] = []
        if candidates or request.results or on_host:
            speeds = _SPEEDS.rows(connection, hostid=hostid)
        return Snapshot(
            now=now,
            user=user,
            host=host,
            team_name=_team_name(connection, user["teamid"]),
            new_to_client=new_to_client,
            apps=static.apps,
            versions=static.versions,
            reported=_by_name(connection, (result.name for result in request.results)),
            on_host=on_host,
            other=_by_name(connection, request.other_results - known),
            candidates=candidates,
            more_candidates=more,
            speeds={row["app_version_id"]: row for row in speeds},
            code_sign_key=self.code_sign_key,
            census=static.census,
        )

    def _look(self, connection: Connection, userid: int, hostid: int, limit: int) -> tuple[list[dict[str, Any]], bool]:
        """The first unsent results that this host may get, and whether there may be more than these.

        Where hosts prefer results of their size, enough to hold some of each.
        """
        limit = MAX_CANDIDATES if self._static.census else limit
        rows = self._candidates.rows(connection, limit=limit, **self._owner(userid, hostid))
        return [row for row in rows if row["appid"] in self._static.apps], len(rows) == limit

    def _owner(self, userid: int, hostid: int) -> dict[str, int]:
        """The parameters of the candidates' query, which has only those that the project's rules need."""
        owner = {}
        if self.config.one_result_per_user_per_wu:
            owner["userid"] = userid
        if self.config.one_result_per_user_per_wu or self.config.one_result_per_host_per_wu:
            owner["hostid"] = hostid
        return owner

    # What changes.

    def _write(self, connection: Connection, changes: Changes, snapshot: Snapshot) -> None:
        hostid, now = snapshot.host["id"], snapshot.now
        update_row(connection, _H, hostid, changes.host)
        for result_id, columns in changes.results.items():
            update_row(connection, _R, result_id, columns)
        self._send(connection, changes, snapshot)
        for version_id, columns in changes.speeds.items():
            _update_speed(tuple(columns)).run(connection, key_host=hostid, key_version=version_id, **columns)
        for version_id, columns in changes.new_speeds.items():
            insert_row(connection, _HAV, {"host_id": hostid, "app_version_id": version_id, **columns})
        for message in changes.messages:
            xml = f"<result_name>{message.result_name}</result_name>\n<time>{message.time}</time>\n"
            columns = {"create_time": now, "hostid": hostid, "variety": message.variety}
            insert_row(connection, database.msg_from_host, {**columns, "xml": f"{xml}{message.text}\n"})
        self._transition(connection, changes.transition_now, now)

    def _send(self, connection: Connection, changes: Changes, snapshot: Snapshot) -> None:
        grace = self.config.report_grace_period
        for assignment in changes.sent:
            row, deadline = assignment.result, assignment.deadline + grace
            expected = ServerState.IN_PROGRESS if assignment.resend else ServerState.UNSENT
            claimed = _CLAIM.run(
                connection,
                result_id=row["id"],
                expected_state=int(expected),
                server_state=int(ServerState.IN_PROGRESS),
                hostid=snapshot.host["id"],
                userid=snapshot.user["id"],
                sent_time=row["sent_time"] if assignment.resend else snapshot.now,
                report_deadline=deadline,
                flops_estimate=assignment.version.flops,
                app_version_id=assignment.version.id,
            )
            if claimed != 1:
                raise RuntimeError(f"[RESULT#{row['id']} {row['name']}] was taken while it was being sent")
            _WATCH_DEADLINE.run(connection, workunit_id=row["workunitid"], due=deadline + 1)
            if snapshot.apps[row["appid"]]["homogeneous_app_version"] and not row["wu_app_version_id"]:
                update_row(connection, _W, row["workunitid"], {"app_version_id": assignment.version.id})

    def _transition(self, connection: Connection, workunits: Iterable[int], now: int) -> None:
        """What a stock project's transitioner would do some seconds later is done at once."""
        ids = sorted(workunits)
        if ids:
            for workunit_id in ids:
                update_row(connection, _W, workunit_id, {"transition_time": now})
            self.transitioner.transition_workunits(connection, ids)


class _StaticTables:
    """Apps, app versions, plan classes and censuses, read again when they are older than STATIC_TABLES_TTL_S."""

    def __init__(self, tree: ProjectTree) -> None:
        self._project_dir = tree.project_dir
        self._plan_class_file = tree.project_dir / "plan_class_spec.xml"
        self._read_at = float("-inf")
        self.apps: dict[int, dict[str, Any]] = {}
        self.versions = VersionTable()
        self.census: dict[int, tuple[float, ...]] = {}

    def current(self, connection: Connection, now: float) -> _StaticTables:
        if not 0 <= now - self._read_at < STATIC_TABLES_TTL_S:
            self.apps = {row["id"]: row for row in _APPS.rows(connection)}
            self.versions = VersionTable(
                versions=_VERSIONS.rows(connection),
                plan_classes=read_plan_classes(self._plan_class_file),
            )
            self.census = {
                row["id"]: self._census(row["name"], row["n_size_classes"])
                for row in self.apps.values()
                if row["n_size_classes"] > 1
            }
            self._read_at = now
        return self

    def _census(self, app_name: str, classes: int) -> tuple[float, ...]:
        """The quantiles; before the first census all hosts are of the fastest class."""
        found = read_census(census_path(self._project_dir, app_name), classes)
        return quantiles((), classes) if found is None else found


def _most_jobs(request: SchedulerRequest, room: float) -> int:
    """How many candidates to look at first: where little is wanted, or little may be given, few are enough."""
    seconds = request.cpu_req_secs + sum(coproc.request_seconds for coproc in request.coprocs)
    instances = request.cpu_req_instances + sum(coproc.request_instances for coproc in request.coprocs)
    return int(min(MAX_CANDIDATES, MIN_CANDIDATES + min(instances + seconds / TYPICAL_JOB_S, room)))


@functools.cache
def _update_speed(names: tuple[str, ...]) -> Statement:
    values: dict[str, Any] = {name: sa.bindparam(name) for name in names}
    key = (_HAV.c.host_id == sa.bindparam("key_host")) & (_HAV.c.app_version_id == sa.bindparam("key_version"))
    return Statement(_HAV.update().where(key).values(values))


def _by_name(connection: Connection, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    rows = (_BY_NAME.first(connection, name=name) for name in sorted(set(names)) if name)
    return {row["name"]: row for row in rows if row is not None}


def _team_name(connection: Connection, teamid: int) -> str:
    if not teamid:
        return ""
    return connection.scalar(sa.select(database.team.c.name).where(database.team.c.id == teamid)) or ""


def _documents(connection: Connection, changes: Changes) -> Documents:
    workunits, results = {}, {}
    for assignment in changes.sent:
        result_id, workunit_id = assignment.result["id"], assignment.result["workunitid"]
        if workunit_id not in workunits:
            workunits[workunit_id] = _text(_WORKUNIT_XML.first(connection, id=workunit_id), "xml_doc")
        results[result_id] = _text(_RESULT_XML.first(connection, id=result_id), "xml_doc_in")
    return Documents(workunits=workunits, results=results)


def _text(row: Mapping[str, Any] | None, name: str) -> str:
    return "" if row is None else row[name] or ""
