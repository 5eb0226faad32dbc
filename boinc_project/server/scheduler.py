"""The scheduler's decisions: a request and what the database says give a reply and changes. Pure.

Sources: BOINC `sched/handle_request.cpp` (who asks), `sched/sched_result.cpp` (reports),
`sched/sched_resend.cpp` (lost results), `sched/sched_send.cpp` (limits, feasibility, sending), `sched/sched_score.cpp`
(size classes). In call order:
`identify` says which account and host a request belongs to, `decide` what happens, `complete_reply` puts the
files' XML in.

One rule differs on purpose: a workunit's FAILED results do not stop its user or host from getting it again
(stock counts them, so that with two hosts one error stalls a workunit for ever).

Not here: SQL (`scheduler_service.py`), XML (`messages.py`), the choice of app versions (`versions.py`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from boinc_project import size_classes
from boinc_project.config import ProjectConfig
from boinc_project.server.messages import (
    AppPart,
    HostInfo,
    HostPart,
    Message,
    MessageFromHost,
    ReportedResult,
    SchedulerReply,
    SchedulerRequest,
    UserPart,
)
from boinc_project.server.versions import UsableVersion, VersionTable
from boinc_project.states import (
    EXIT_ABORTED_BY_PROJECT,
    AssimilateState,
    ClientState,
    ErrorMask,
    Outcome,
    ServerState,
    ValidateState,
)

Row = Mapping[str, Any]

#: Seconds that a client waits after a wrong account key (BOINC `sched/handle_request.cpp`).
BAD_KEY_DELAY_S = 3600.0

#: Smallest request_delay (seconds); the client polls its queue every 5 s anyway.
MIN_REQUEST_DELAY_S = 1.0

#: What a volunteer reads when there is nothing to send.
NO_TASKS = "Project has no tasks available"

#: Results of a workunit with one of these outcomes are failed: they free its user and host for another.
FAILED_OUTCOMES = (
    Outcome.COULDNT_SEND,
    Outcome.CLIENT_ERROR,
    Outcome.NO_REPLY,
    Outcome.DIDNT_NEED,
    Outcome.VALIDATE_ERROR,
    Outcome.CLIENT_DETACHED,
)

_DAY_S = 86400
_IGNORED_AFTER = (Outcome.NO_REPLY, Outcome.CLIENT_DETACHED)  # an OVER result may still be reported then


def md5_text(text: str) -> str:
    return hashlib.md5(text.encode()).hexdigest()


# 1. Who asks.


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Whose request this is. Without a user it is refused; without a host one must be found or made."""

    user: Row | None
    host: Row | None = None


def identify(request: SchedulerRequest, host: Row | None, host_user: Row | None, key_user: Row | None) -> Identity:
    """Decide account and host.

    `host` is the row of the claimed host id (replaced hosts followed to their successor), `host_user` its
    owner, `key_user` the account of the authenticator in the request. A sequence number below the host's
    means that the client's state was copied to another computer: that one becomes a new host.
    """
    if host is not None and host_user is not None and accepts_key(host_user, request.authenticator):
        user: Row | None = host_user
    else:
        user, host = key_user, None
    if host is not None and request.rpc_seqno < host["rpc_seqno"]:
        host = None
    return Identity(user=user, host=host)


def accepts_key(user: Row, authenticator: str) -> bool:
    """Whether this is the user's account key, or the weak form `USERID_MD5(key + passwd_hash)`."""
    if not authenticator:
        return False
    return authenticator in (user["authenticator"], weak_key(user))


def weak_key(user: Row) -> str:
    return f"{user['id']}_{md5_text(str(user['authenticator']) + str(user['passwd_hash']))}"


def stored_cpid(request: SchedulerRequest, user: Row) -> str:
    """What is kept of the client's host identifier: hosts cannot be linked across projects by it."""
    return md5_text(request.host.host_cpid + user["email_addr"])


def similar_host(request: SchedulerRequest, user: Row, hosts: Sequence[Row]) -> Row | None:
    """The host of this user that the request comes from although it names none: newest match, or None."""
    cpid = stored_cpid(request, user)
    newest_first = sorted(hosts, key=lambda host: -host["id"])
    for host in newest_first:
        if request.host.host_cpid and host["host_cpid"] == cpid and _same_machine(host, request.host):
            return host
    if request.allow_multiple_clients:
        return None
    for host in newest_first:
        if request.host.domain_name and _same_machine(host, request.host) and host["m_nbytes"] == request.host.m_nbytes:
            return host
    return None


def _same_machine(host: Row, info: HostInfo) -> bool:
    return bool(
        host["domain_name"] == info.domain_name
        and host["p_vendor"] == info.p_vendor
        and host["p_model"] == info.p_model
    )


def should_detach(request: SchedulerRequest) -> bool:
    """Whether a re-attached client has lost the results that it had in progress."""
    return not request.allow_multiple_clients and not request.other_results


# 2. What happens.


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What the database says, as far as one request needs it. Rows are mappings by column name."""

    now: int
    user: Row
    host: Row  # before this request
    team_name: str = ""
    new_to_client: bool = False  # the reply must tell the client its host id
    apps: Mapping[int, Row] = field(default_factory=dict)
    versions: VersionTable = field(default_factory=VersionTable)
    reported: Mapping[str, Row] = field(default_factory=dict)  # result rows by name
    on_host: Sequence[Row] = ()  # joined rows (see `candidates`) of results in progress on this host
    other: Mapping[str, Row] = field(default_factory=dict)  # joined rows of further results the client has
    #: Unsent results with their workunit's columns prefixed `wu_`, in the order in which to offer them; those
    #: of which the user or host has a not-failed sibling are left out by the query.
    candidates: Sequence[Row] = ()
    more_candidates: bool = False  # whether there may be further ones
    speeds: Mapping[int, Row] = field(default_factory=dict)  # host_app_version rows by app_version_id
    code_sign_key: str = ""
    census: Mapping[int, Sequence[float]] = field(default_factory=dict)  # quantiles by app id, of those with classes


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """A result given to the host, new or again."""

    result: Row
    version: UsableVersion
    deadline: int  # for the client; the database adds the grace period
    resend: bool = False


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What the request changes in the database. Column changes are by id."""

    host: Mapping[str, Any] = field(default_factory=dict)
    results: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    transition_now: frozenset[int] = frozenset()  # workunit ids
    sent: tuple[Assignment, ...] = ()
    speeds: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)  # host_app_version changes
    new_speeds: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)  # ... and new rows
    messages: tuple[MessageFromHost, ...] = ()

    @property
    def must_last(self) -> bool:
        """Whether more changes than what a host says of itself in every request, and will say again."""
        return bool(self.results or self.transition_now or self.sent or self.speeds or self.new_speeds or self.messages)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The reply (still without files' XML) and the changes."""

    reply: SchedulerReply
    changes: Changes
    searched: bool = False  # whether work was looked for: nothing but a lack of it kept it from the client


def refuse(config: ProjectConfig) -> SchedulerReply:
    """The reply to an unknown account key."""
    text = "Invalid or missing account key. To fix, remove and add this project."
    return SchedulerReply(
        project_name=config.long_name,
        master_url=config.master_url,
        request_delay=BAD_KEY_DELAY_S,
        messages=(Message(text=text, priority="notice"),),
    )


def error_reply(config: ProjectConfig, text: str) -> SchedulerReply:
    """The reply to a request that cannot be read, or that failed in the server."""
    return SchedulerReply(
        project_name=config.long_name,
        master_url=config.master_url,
        request_delay=max(request_delay(config), 60.0),
        messages=(Message(text=text),),
    )


def stopped_reply(config: ProjectConfig) -> SchedulerReply:
    """The reply while `stop_sched` lies in the project directory."""
    return SchedulerReply(
        project_name=config.long_name,
        master_url=config.master_url,
        request_delay=config.maintenance_delay,
        messages=(Message(text="Project is temporarily shut down for maintenance"),),
        project_is_down=True,
    )


def request_delay(config: ProjectConfig) -> float:
    return max(1.01 * config.min_sendwork_interval, MIN_REQUEST_DELAY_S)


def decide(request: SchedulerRequest, snapshot: Snapshot, config: ProjectConfig) -> Decision:
    """The whole decision for an identified host."""
    return _Decider(request, snapshot, config).run()


def wait_before_work(request: SchedulerRequest, host: Row, now: int, config: ProjectConfig) -> float:
    """Seconds until this host may ask for work again; 0 when it may now."""
    if request.is_repeat:
        return 0.0
    wait = host["rpc_time"] + config.min_sendwork_interval - now
    return float(wait) if request.wants_work and host["rpc_time"] and wait > 0 else 0.0


def room(request: SchedulerRequest, on_host: int, config: ProjectConfig) -> float:
    """At most so many tasks may a host get that already has some, of whatever kind of processor."""
    cpus = max(1, min(request.host.p_ncpus, config.max_ncpus))
    gpus = sum(coproc.count for coproc in request.coprocs)
    limits = [_room(config.max_wus_in_progress, cpus, 0)]
    if gpus:
        limits.append(_room(config.max_wus_in_progress_gpu, gpus, 0))
    return max(0.0, sum(limits) - on_host)


def may_be_held(request: SchedulerRequest, decision: Decision) -> bool:
    """Whether a reply without work may wait a moment for new results.

    Only a client that reports comes at a moment when a round may close. It must have no other task: waiting
    for this reply, it could not report that one. It must know its host id: what it is not told, it would ask
    for again under another name.
    """
    known = decision.reply.host is not None and decision.reply.host.id is None
    dry = decision.searched and not decision.changes.sent and not request.other_results
    return bool(known and dry and request.results)


def repeated(request: SchedulerRequest) -> SchedulerRequest:
    """The same question for work, without what has been processed already."""
    return replace(request, results=(), messages=(), is_repeat=True)


def joined(first: SchedulerReply, second: SchedulerReply) -> SchedulerReply:
    """One reply of two: `first` said what became of the reports, `second` (to the repeated question) brings work."""
    return replace(
        second,
        acks=first.acks,
        aborts=first.aborts,
        aborts_if_not_started=first.aborts_if_not_started,
        message_ack=first.message_ack,
    )


class _Decider:
    """Collects messages and changes while the steps of one request are taken in order."""

    def __init__(self, request: SchedulerRequest, snapshot: Snapshot, config: ProjectConfig) -> None:
        self.request, self.snapshot, self.config = request, snapshot, config
        self.now = snapshot.now
        self.messages: list[Message] = []
        self.results: dict[int, dict[str, Any]] = {}
        self.transition_now: set[int] = set()
        self.speeds: dict[int, dict[str, Any]] = {}
        self.new_speeds: dict[int, dict[str, Any]] = {}
        self.aborts: list[str] = []
        self.aborts_if_not_started: list[str] = []
        self.delay = request_delay(config)
        self.searched = False

    def run(self) -> Decision:
        self._new_day()
        for reported in self.request.results:
            self._report(reported)
        if self.config.send_result_abort:
            self._abort_unneeded()
        sent = self._work()
        self._count_jobs(sent)
        return Decision(reply=self._reply(sent), changes=self._changes(sent), searched=self.searched)

    # Reports.

    def _report(self, reported: ReportedResult) -> None:
        row = self.snapshot.reported.get(reported.name)
        if row is None or not self._is_acceptable(row) or row["id"] in self.results:
            return
        success = reported.client_state == ClientState.FILES_UPLOADED and reported.exit_status == 0
        cpu_time, elapsed = self._plausible_times(reported, row)
        self.results[row["id"]] = {
            "hostid": self.snapshot.host["id"],
            "teamid": self.snapshot.user["teamid"],
            "received_time": self.now,
            "client_state": reported.client_state,
            "cpu_time": cpu_time,
            "elapsed_time": elapsed,
            "exit_status": reported.exit_status,
            "app_version_num": reported.app_version_num,
            "peak_working_set_size": reported.peak_working_set_size,
            "peak_swap_size": reported.peak_swap_size,
            "peak_disk_usage": reported.peak_disk_usage,
            "stderr_out": reported.stderr_out,
            "xml_doc_out": reported.xml_doc_out,
            "server_state": int(ServerState.OVER),
            "outcome": int(Outcome.SUCCESS if success else Outcome.CLIENT_ERROR),
        }
        if not success:
            self.results[row["id"]]["validate_state"] = int(ValidateState.INVALID)
        self.transition_now.add(row["workunitid"])
        self._adjust_quota(row["app_version_id"], success, reported.exit_status)

    def _is_acceptable(self, row: Row) -> bool:
        """A report is acknowledged in any case; this says whether it changes anything."""
        if row["server_state"] == ServerState.OVER and row["outcome"] not in _IGNORED_AFTER:
            return False
        if row["server_state"] in (ServerState.UNSENT, ServerState.INACTIVE) or row["received_time"]:
            return False
        # A host that was given a new id reports what its user's old one was sent.
        same_host = row["hostid"] == self.snapshot.host["id"]
        return bool(same_host or row["userid"] == self.snapshot.user["id"])

    def _plausible_times(self, reported: ReportedResult, row: Row) -> tuple[float, float]:
        """CPU and elapsed seconds, with claims that cannot be true cut (BOINC `sched/sched_result.cpp`)."""
        turnaround = float(max(0, self.now - row["sent_time"]))
        elapsed = min(reported.elapsed_time or reported.cpu_time, turnaround)
        cpu_time = min(reported.cpu_time, elapsed * max(1, self.request.host.p_ncpus))
        return cpu_time, elapsed

    def _adjust_quota(self, version_id: int, success: bool, exit_status: int) -> None:
        """A good result doubles what the host may get a day, up to the quota; an error costs one."""
        row = self._speed(version_id)
        quota = self.config.daily_result_quota
        if row is None or (not success and exit_status == EXIT_ABORTED_BY_PROJECT):
            return
        changes = self.speeds.setdefault(version_id, {})
        current = row["max_jobs_per_day"] or quota
        if success:
            if current < quota:
                changes["max_jobs_per_day"] = min(2 * current, quota)
        else:
            changes["consecutive_valid"] = 0
            if quota:
                changes["max_jobs_per_day"] = max(1, min(current, quota) - 1)

    # Host and version statistics.

    def _speed(self, version_id: int) -> dict[str, Any] | None:
        """The host_app_version row with the changes made so far."""
        row = self.snapshot.speeds.get(version_id)
        if row is None:
            return self.new_speeds.get(version_id)
        return {**row, **self.speeds.get(version_id, {})}

    def _new_day(self) -> None:
        if self.snapshot.host["rpc_time"] // _DAY_S != self.now // _DAY_S:
            for version_id, row in self.snapshot.speeds.items():
                if row["n_jobs_today"]:
                    self.speeds[version_id] = {"n_jobs_today": 0}

    def _count_jobs(self, sent: Sequence[Assignment]) -> None:
        for assignment in sent:
            if not assignment.resend:
                self._count_job(assignment.version.id)

    def _count_job(self, version_id: int) -> None:
        row = self._speed(version_id)
        if row is None:
            quota = self.config.daily_result_quota
            self.new_speeds[version_id] = {"max_jobs_per_day": quota, "n_jobs_today": 1}
        elif version_id in self.new_speeds:
            self.new_speeds[version_id]["n_jobs_today"] += 1
        else:
            self.speeds.setdefault(version_id, {})["n_jobs_today"] = row["n_jobs_today"] + 1

    # Results that the client should give up.

    def _abort_unneeded(self) -> None:
        known = {row["name"]: row for row in self.snapshot.on_host} | dict(self.snapshot.other)
        for name in sorted(self.request.other_results):
            row = known.get(name)
            unknown = row is None or row["hostid"] != self.snapshot.host["id"]
            if row is None or unknown or row["wu_error_mask"] & ErrorMask.CANCELLED:
                self.aborts.append(name)
            elif row["wu_assimilate_state"] == AssimilateState.DONE or (
                row["server_state"] == ServerState.OVER and row["outcome"] == Outcome.NO_REPLY
            ):
                self.aborts_if_not_started.append(name)

    # Work.

    def _work(self) -> list[Assignment]:
        if not self.request.wants_work:
            return []
        wait = wait_before_work(self.request, self.snapshot.host, self.now, self.config)
        if wait:
            self._say(f"Not sending work. Last request too recent. Please wait {wait:.0f} seconds.")
            return []
        if self.request.core_client_version < self.config.min_core_client_version:
            self._say("Your BOINC client is too old for this project. Please install a newer one.", "notice")
            return []
        if self.snapshot.host["max_results_day"] == -1:
            self._say("This computer is not allowed to get work from this project.")
            return []
        lost = self._lost()
        if not lost and not self.snapshot.candidates:
            self.searched = True
            self._say(NO_TASKS)
            return []
        sender = _Sender(self)
        if lost:
            sender.resend(lost)
        # After a resend nothing new is sent: the client first has to start what it lost.
        if not sender.sent:
            self.searched = True
            sender.send_new()
        return sender.sent

    def _lost(self) -> list[Row]:
        """Results in progress here that the client neither reports nor has."""
        if not self.config.resend_lost_results or not self.request.other_results_complete:
            return []
        present = self.request.other_results | {reported.name for reported in self.request.results}
        return [row for row in self.snapshot.on_host if row["name"] not in present]

    def expire(self, row: Row) -> None:
        """A lost result that is not worth sending again: the transitioner shall time it out at once."""
        self.results[row["id"]] = {"report_deadline": self.now - 1}
        self.transition_now.add(row["workunitid"])
        self._say(f"Didn't resend lost task {row['name']} (expired)")

    def _say(self, text: str, priority: str = "low") -> None:
        self.messages.append(Message(text=text, priority=priority))

    # The reply.

    def _reply(self, sent: Sequence[Assignment]) -> SchedulerReply:
        user, host, config = self.snapshot.user, self.snapshot.host, self.config
        # A client with tasks left comes back to report them anyway; called earlier it would only ask in vain.
        dry = self.request.wants_work and not sent and not self.request.other_results
        client_key, key = "".join(self.request.code_sign_key.split()), self.snapshot.code_sign_key
        return SchedulerReply(
            project_name=config.long_name,
            master_url=config.master_url,
            request_delay=self.delay,
            next_rpc_delay=config.next_rpc_delay or (config.gt_dry_rpc_delay if dry else 0.0),
            messages=tuple(self.messages),
            user=UserPart(
                id=user["id"],
                name=user["name"] or "",
                total_credit=user["total_credit"],
                expavg_credit=user["expavg_credit"],
                create_time=user["create_time"],
                email_hash=md5_text(user["email_addr"]),
                cross_project_id=user["cross_project_id"],
                external_cpid=md5_text(user["cross_project_id"] + user["email_addr"]),
                team_name=self.snapshot.team_name,
            ),
            host=HostPart(
                id=host["id"] if self.snapshot.new_to_client else None,
                total_credit=host["total_credit"],
                expavg_credit=host["expavg_credit"],
                venue=host["venue"],
                create_time=host["create_time"],
            ),
            acks=tuple(reported.name for reported in self.request.results if reported.name),
            aborts=tuple(self.aborts),
            aborts_if_not_started=tuple(self.aborts_if_not_started),
            message_ack=bool(self.request.messages),
            apps=self._apps(sent),
            code_sign_key="" if client_key == "".join(key.split()) else key,
        )

    def _apps(self, sent: Sequence[Assignment]) -> tuple[AppPart, ...]:
        rows = {each.result["appid"]: self.snapshot.apps[each.result["appid"]] for each in sent}
        return tuple(
            AppPart(
                name=row["name"],
                user_friendly_name=row["user_friendly_name"],
                non_cpu_intensive=row["non_cpu_intensive"],
                fraction_done_exact=row["fraction_done_exact"],
            )
            for row in rows.values()
        )

    def _changes(self, sent: Sequence[Assignment]) -> Changes:
        return Changes(
            host=self._host(),
            results=self.results,
            transition_now=frozenset(self.transition_now),
            sent=tuple(sent),
            speeds={key: changes for key, changes in self.speeds.items() if changes},
            new_speeds=self.new_speeds,
            messages=self.request.messages,
        )

    def _host(self) -> dict[str, Any]:
        columns = host_columns(self.request, self.snapshot.user, self.now)
        if self.snapshot.new_to_client:
            columns["rpc_seqno"] = 0  # a client that is told its id starts counting again
        return columns


def host_columns(request: SchedulerRequest, user: Row, now: int) -> dict[str, Any]:
    """The host table's columns that every request updates."""
    info = request.host
    return {
        "rpc_seqno": request.rpc_seqno,
        "rpc_time": now,
        "host_cpid": stored_cpid(request, user),
        "timezone": info.timezone,
        "domain_name": info.domain_name,
        "p_ncpus": info.p_ncpus,
        "p_vendor": info.p_vendor,
        "p_model": info.p_model,
        "p_fpops": info.p_fpops,
        "p_iops": info.p_iops,
        "p_membw": info.p_membw,
        "os_name": info.os_name,
        "os_version": info.os_version,
        "m_nbytes": info.m_nbytes,
        "m_cache": info.m_cache,
        "m_swap": info.m_swap,
        "d_total": info.d_total,
        "d_free": info.d_free,
        "d_boinc_used_total": info.d_boinc_used_total,
        "d_boinc_used_project": info.d_boinc_used_project,
        "d_boinc_max": info.d_boinc_max,
        "on_frac": info.on_frac,
        "connected_frac": info.connected_frac,
        "active_frac": info.active_frac,
        "gpu_active_frac": info.gpu_active_frac,
        "n_bwup": info.n_bwup,
        "n_bwdown": info.n_bwdown,
        "duration_correction_factor": info.duration_correction_factor,
        "product_name": info.product_name,
        "p_ngpus": sum(coproc.count for coproc in request.coprocs),
        "serialnum": " ".join(f"[{c.type}|{c.name}|{c.count}]" for c in request.coprocs)[:254],
        "misc": _misc(request),
        **({"external_ip_addr": request.remote_address} if request.remote_address else {}),
    }


#: BOINC's words for makes of GPUs in host.misc.
_MAKES = {"NVIDIA": "nvidia", "ATI": "amd", "intel_gpu": "intel", "apple_gpu": "apple"}


def _misc(request: SchedulerRequest) -> str:
    """The host's GPUs as BOINC 8.3 keeps them in host.misc (sched/sched_host.cpp), as JSON."""

    def plain(text: str) -> str:
        return text.replace("\\", "").replace('"', "")

    gpus = [
        {
            "type": _MAKES.get(each.type, each.type), "model": plain(each.name), "count": each.count,
            "ram_mb": int(min(each.memory_bytes, 1e15)) >> 20, "driver_version": plain(each.driver),
            "opencl_version": str(each.opencl.version),
        }
        for each in request.coprocs
    ]  # fmt: skip
    return json.dumps({"gpus": gpus}, indent=4) if gpus else ""


@dataclass
class _Wanted:
    """What the client still wants of one kind of processor, and what it may still have."""

    seconds: float
    instances: float
    room: float  # jobs until the limit on tasks in progress

    @property
    def is_open(self) -> bool:
        return self.is_wanted and self.room >= 1

    @property
    def is_wanted(self) -> bool:
        return self.seconds > 0 or self.instances > 0


class _Sender:
    """Chooses results for one work request."""

    def __init__(self, decider: _Decider) -> None:
        self.decider = decider
        self.request, self.snapshot = decider.request, decider.snapshot
        self.config, self.now = decider.config, decider.now
        self.usable = self.snapshot.versions.usable(self.request, self.snapshot.speeds)
        self.wanted = self._wanted()
        self.sent: list[Assignment] = []
        self.reasons: list[str] = []  # in the order in which they were met, without repeats

    def _wanted(self) -> dict[str, _Wanted]:
        host, request = self.request.host, self.request
        in_progress = self._in_progress()
        cpus = max(1, min(host.p_ncpus, self.config.max_ncpus))
        # Old clients only send work_req_seconds; newer ones say more for each kind of processor.
        is_old = not (request.cpu_req_secs or request.cpu_req_instances or request.coprocs)
        seconds = request.work_req_seconds if is_old else request.cpu_req_secs
        wanted = {
            "CPU": _Wanted(
                seconds,
                request.cpu_req_instances,
                _room(self.config.max_wus_in_progress, cpus, in_progress.get("CPU", 0)),
            )
        }
        for coproc in request.coprocs:
            wanted[coproc.type] = _Wanted(
                coproc.request_seconds,
                coproc.request_instances,
                _room(self.config.max_wus_in_progress_gpu, coproc.count, in_progress.get(coproc.type, 0)),
            )
        return wanted

    def _in_progress(self) -> dict[str, int]:
        resources = {version.id: version.resource for each in self.usable.values() for version in each}
        counts: dict[str, int] = {}
        for row in self.snapshot.on_host:
            if row["id"] not in self.decider.results:
                resource = resources.get(row["app_version_id"], "CPU")
                counts[resource] = counts.get(resource, 0) + 1
        return counts

    # Lost results.

    def resend(self, lost: Sequence[Row]) -> None:
        for row in lost:
            version = self._version_for_resend(row)
            if version is None or row["wu_error_mask"] or row["wu_canonical_resultid"]:
                self.decider.expire(row)
                continue
            self.decider._say(f"Resent lost task {row['name']}")
            self.sent.append(self._assignment(row, version, resend=True))

    def _version_for_resend(self, row: Row) -> UsableVersion | None:
        """The version it was sent with if that still runs here, else the fastest one."""
        versions = self.usable.get(row["appid"], [])
        same = [version for version in versions if version.id == row["app_version_id"]]
        return next(iter(same or versions), None)

    # New results.

    def send_new(self) -> None:
        limit = self._limit_per_request()
        if any(each.is_wanted and each.room < 1 for each in self.wanted.values()):
            self._because("This computer has reached a limit on tasks in progress")
        workunits: set[int] = set()
        for row in self._in_order():
            if len(self.sent) >= limit or not any(each.is_open for each in self.wanted.values()):
                break
            if row["workunitid"] in workunits and self._one_per_workunit():
                continue
            version = self._version(row)
            if version is None or not self._is_feasible(row, version):
                continue
            self.sent.append(self._assignment(row, version))
            workunits.add(row["workunitid"])
            self._take(row, version)
        if not self.sent:
            self._explain()

    def _in_order(self) -> Iterator[Row]:
        """The candidates; where an app has size classes, by BOINC's score, those with equal ones as they were.

        The score depends on the processor that would get the next one, so it is taken anew after each.
        """
        if not self.snapshot.census:
            yield from self.snapshot.candidates
            return
        left = list(self.snapshot.candidates)
        while left:
            scores = [self._score(row) for row in left]
            yield left.pop(scores.index(max(scores)))

    def _score(self, row: Row) -> int:
        """Priority, and how well its size fits the host (BOINC `sched/sched_score.cpp`)."""
        census, version = self.snapshot.census.get(row["appid"]), self._best(row)
        if census is None or version is None:
            return int(row["priority"])
        speed = version.flops * size_classes.available(self.request.host, bool(version.gpus))
        fit = size_classes.preference(size_classes.size_class(census, speed), row["wu_size_class"])
        return int(row["priority"]) + fit

    def _best(self, row: Row) -> UsableVersion | None:
        """The fastest version of the result's app for a processor that still wants work, whatever the quota."""
        open_ones = (each for each in self.usable.get(row["appid"], []) if self._is_open(each))
        return next(open_ones, None)

    def _is_open(self, version: UsableVersion) -> bool:
        wanted = self.wanted.get(version.resource)
        return wanted is not None and wanted.is_open

    def _limit_per_request(self) -> float:
        gpus = sum(coproc.count for coproc in self.request.coprocs)
        return self.config.max_wus_to_send * (self.request.host.p_ncpus + self.config.gpu_multiplier * gpus)

    def _one_per_workunit(self) -> bool:
        return self.config.one_result_per_user_per_wu or self.config.one_result_per_host_per_wu

    def _version(self, row: Row) -> UsableVersion | None:
        """The fastest version of the result's app for a processor that still wants work."""
        versions = self.usable.get(row["appid"], [])
        if not versions:
            self._because("This project has no application for your type of computer.")
            return None
        if row["wu_app_version_num"]:
            versions = [each for each in versions if each.row["version_num"] == row["wu_app_version_num"]]
        if self.snapshot.apps[row["appid"]]["homogeneous_app_version"] and row["wu_app_version_id"]:
            versions = [each for each in versions if each.id == row["wu_app_version_id"]]
        for version in versions:
            if not self._is_open(version):
                continue
            if self._over_quota(version):
                self._because("This computer has finished a daily quota of tasks")
            else:
                return version
        return None

    def _over_quota(self, version: UsableVersion) -> bool:
        quota = self.config.daily_result_quota
        if not quota:
            return False
        row = self.decider._speed(version.id)
        limit = (row["max_jobs_per_day"] if row else 0) or quota
        already = row["n_jobs_today"] if row else 0
        already += sum(1 for each in self.sent if each.version.id == version.id and not each.resend)
        if limit > 1:  # a host that only fails stays at one job a day, however many processors it has
            gpus = sum(coproc.count for coproc in self.request.coprocs if coproc.type == version.resource)
            limit *= gpus * self.config.gpu_multiplier if version.gpus else self.request.host.p_ncpus
        return bool(already >= limit)

    def _is_feasible(self, row: Row, version: UsableVersion) -> bool:
        """Memory, disk and deadline (BOINC `sched/sched_send.cpp`, wu_is_infeasible_fast)."""
        host = self.request.host
        memory = host.m_nbytes * self.request.ram_fraction
        disk = min(host.d_free, host.d_boinc_max) if host.d_boinc_max else host.d_free
        if memory and row["wu_rsc_memory_bound"] > memory:
            self._because("Tasks need more memory than this computer allows BOINC to use")
        elif disk and row["wu_rsc_disk_bound"] > disk:
            self._because("Tasks need more disk space than this computer allows BOINC to use")
        elif self._run_time(row, version) > row["wu_delay_bound"]:
            self._because("Tasks would not finish on this computer before their deadline")
        else:
            return True
        return False

    def _run_time(self, row: Row, version: UsableVersion) -> float:
        return float(row["wu_rsc_fpops_est"]) / version.flops

    def _take(self, row: Row, version: UsableVersion) -> None:
        wanted = self.wanted[version.resource]
        wanted.seconds -= self._run_time(row, version) * version.instances
        wanted.instances -= version.instances
        wanted.room -= 1

    def _assignment(self, row: Row, version: UsableVersion, resend: bool = False) -> Assignment:
        deadline = self.now + int(row["wu_delay_bound"])
        return Assignment(result=row, version=version, deadline=deadline, resend=resend)

    def _because(self, reason: str) -> None:
        if reason not in self.reasons:
            self.reasons.append(reason)

    def _explain(self) -> None:
        if not self.snapshot.candidates:
            self.decider._say(NO_TASKS)
            return
        self.decider._say("No tasks sent")
        for reason in self.reasons:
            self.decider._say(reason)


def _room(limit_per_processor: int, processors: int, in_progress: int) -> float:
    if not limit_per_processor:
        return float("inf")
    return float(limit_per_processor * processors - in_progress)


# 3. The files' XML.


@dataclass(frozen=True)
class Documents:
    """The XML of what was assigned: workunit.xml_doc and result.xml_doc_in, by id."""

    workunits: Mapping[int, str]
    results: Mapping[int, str]


def complete_reply(decision: Decision, apps: Mapping[int, Row], documents: Documents) -> SchedulerReply:
    """The reply with app versions, workunits and results put in as stock BOINC formats them."""
    sent = decision.changes.sent
    versions = {assignment.version.id: assignment.version for assignment in sent}
    workunits = {assignment.result["workunitid"]: assignment for assignment in sent}
    values = vars(decision.reply) | {
        "app_versions": tuple(app_version_xml(version) for version in versions.values()),
        "workunits": tuple(
            workunit_xml(documents.workunits[key], each.result, apps[each.result["appid"]]["name"])
            for key, each in workunits.items()
        ),
        "results": tuple(result_xml(documents.results[each.result["id"]], each) for each in sent),
    }
    return SchedulerReply(**values)


def app_version_xml(version: UsableVersion) -> str:
    """app_version.xml_doc with what only the scheduler knows, before `</app_version>`."""
    row = version.row
    lines = [f"    <platform>{row['platform']}</platform>\n"]
    if row["plan_class"]:
        lines.append(f"    <plan_class>{row['plan_class']}</plan_class>\n")
    lines.append(f"    <avg_ncpus>{version.avg_ncpus:f}</avg_ncpus>\n    <flops>{version.flops:f}</flops>\n")
    if version.gpus:
        lines.append(
            f"    <coproc>\n        <type>{version.resource}</type>\n"
            f"        <count>{version.gpus:f}</count>\n    </coproc>\n"
        )
    return _inserted(row["xml_doc"], before="</app_version>", text="".join(lines))


def workunit_xml(xml_doc: str, row: Row, app_name: str) -> str:
    """workunit.xml_doc with resources and names after `<workunit>`."""
    text = (
        f"    <rsc_fpops_est>{row['wu_rsc_fpops_est']:f}</rsc_fpops_est>\n"
        f"    <rsc_fpops_bound>{row['wu_rsc_fpops_bound']:f}</rsc_fpops_bound>\n"
        f"    <rsc_memory_bound>{row['wu_rsc_memory_bound']:f}</rsc_memory_bound>\n"
        f"    <rsc_disk_bound>{row['wu_rsc_disk_bound']:f}</rsc_disk_bound>\n"
        f"    <name>{row['wu_name']}</name>\n"
        f"    <app_name>{app_name}</app_name>\n"
    )
    return _inserted(xml_doc, after="<workunit>\n", text=text)


def result_xml(xml_doc_in: str, assignment: Assignment) -> str:
    """result.xml_doc_in with deadline and names after `<result>` and the version before `</result>`."""
    row, version = assignment.result, assignment.version.row
    head = (
        f"<report_deadline>{assignment.deadline}</report_deadline>\n"
        f"<wu_name>{row['wu_name']}</wu_name>\n<name>{row['name']}</name>\n"
    )
    tail = (
        f"    <platform>{version['platform']}</platform>\n"
        f"    <version_num>{version['version_num']}</version_num>\n"
        f"    <plan_class>{version['plan_class']}</plan_class>\n"
    )
    if assignment.resend:
        tail += "    <resend/>\n"
    return _inserted(_inserted(xml_doc_in, after="<result>\n", text=head), before="</result>", text=tail)


def _inserted(document: str, *, text: str, after: str = "", before: str = "") -> str:
    """`text` put after or before a literal, at its last occurrence; a document without it is our bug."""
    literal = after or before
    position = document.rfind(literal)
    if position < 0:
        raise ValueError(f"a stored XML document lacks {literal.strip()!r}")
    if after:
        position += len(after)
    return document[:position] + text + document[position:]
