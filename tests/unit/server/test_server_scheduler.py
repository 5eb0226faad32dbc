"""The scheduler's decisions: who asks, reports, aborts, lost results, limits, feasibility."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from boinc_project import database
from boinc_project.config import ProjectConfig
from boinc_project.database import new_row
from boinc_project.server import scheduler
from boinc_project.server.messages import Coprocessor, HostInfo, ReportedResult, SchedulerRequest
from boinc_project.server.scheduler import Decision, Snapshot, decide, identify, similar_host
from boinc_project.server.versions import VersionTable
from boinc_project.states import ErrorMask, Outcome, ServerState, ValidateState

NOW = 2_000_000
LINUX = "x86_64-pc-linux-gnu"
CONFIG = replace(
    ProjectConfig.parse(b"<boinc><config><long_name>T</long_name></config></boinc>", Path("/nowhere")),
    master_url="http://127.0.0.1/t/",
    max_wus_in_progress=2,
    max_wus_in_progress_gpu=1,
    max_wus_to_send=50,
    one_result_per_user_per_wu=True,
    resend_lost_results=True,
    send_result_abort=True,
)
USER = {
    "id": 1,
    **new_row(database.user, name="alice", email_addr="a@example.org", authenticator="k" * 32, passwd_hash="p"),
}
HOST = {"id": 3, **new_row(database.host, userid=1, rpc_seqno=4, rpc_time=NOW - 100, domain_name="pc")}
APP = {"id": 1, **new_row(database.app, name="gradient", user_friendly_name="Gradient")}
INFO = HostInfo(domain_name="pc", p_ncpus=2, p_fpops=1e10, m_nbytes=8e9, d_free=1e11)
REQUEST = SchedulerRequest(
    authenticator="k" * 32,
    hostid=3,
    rpc_seqno=5,
    core_client_version=72005,
    platforms=(LINUX,),
    host=INFO,
    other_results_complete=True,
)
WORK = replace(REQUEST, work_req_seconds=100, cpu_req_secs=100, cpu_req_instances=2)


def version(**columns: Any) -> dict[str, Any]:
    return {
        "id": 1,
        "platform": LINUX,
        **new_row(database.app_version, appid=1, version_num=100),
        "xml_doc": "<app_version>\n</app_version>\n",
        **columns,
    }


def joined(number: int, **columns: Any) -> dict[str, Any]:
    """A result with its workunit's columns; each of another workunit unless said."""
    return {
        "id": number,
        "name": f"w_{number}_0",
        "workunitid": number + 1000,
        "appid": 1,
        "app_version_id": 0,
        "server_state": ServerState.UNSENT,
        "outcome": Outcome.INIT,
        "hostid": 0,
        "userid": 0,
        "sent_time": 0,
        "received_time": 0,
        "report_deadline": 0,
        "wu_name": f"w_{number}",
        "wu_rsc_fpops_est": 1e10,
        "wu_rsc_fpops_bound": 1e14,
        "wu_rsc_memory_bound": 1e8,
        "wu_rsc_disk_bound": 1e8,
        "wu_delay_bound": 3600,
        "wu_error_mask": 0,
        "wu_assimilate_state": 0,
        "wu_canonical_resultid": 0,
        "wu_app_version_id": 0,
        "wu_app_version_num": 0,
        **columns,
    }


def on_host(number: int, **columns: Any) -> dict[str, Any]:
    sent: dict[str, Any] = {
        "server_state": ServerState.IN_PROGRESS,
        "hostid": 3,
        "userid": 1,
        "sent_time": NOW - 1000,
        "app_version_id": 1,
    }
    return joined(number, **{**sent, **columns})


SNAPSHOT = Snapshot(
    now=NOW,
    user=USER,
    host=HOST,
    apps={1: APP},
    versions=VersionTable(versions=[version()]),
    code_sign_key="KEY\n",
)


def run(request: SchedulerRequest = REQUEST, config: ProjectConfig = CONFIG, **snapshot: Any) -> Decision:
    return decide(request, replace(SNAPSHOT, **snapshot), config)


def texts(decision: Decision) -> list[str]:
    return [message.text for message in decision.reply.messages]


def sent(decision: Decision) -> list[int]:
    return [assignment.result["id"] for assignment in decision.changes.sent]


# Who asks.


def test_known_host_keeps_its_id_and_is_not_told_it() -> None:
    identity = identify(REQUEST, HOST, USER, None)
    assert identity.user is USER and identity.host is HOST
    reply = run().reply
    assert reply.host is not None and reply.host.id is None


def test_weak_key_is_as_good() -> None:
    request = replace(REQUEST, authenticator=scheduler.weak_key(USER))
    assert identify(request, HOST, USER, None).host is HOST


@pytest.mark.parametrize("key", ["", "x" * 32, "1_" + "0" * 32])
def test_wrong_key_gets_nothing(key: str) -> None:
    identity = identify(replace(REQUEST, authenticator=key), HOST, USER, None)
    assert identity.user is None and identity.host is None


def test_copied_client_state_becomes_another_host() -> None:
    identity = identify(replace(REQUEST, rpc_seqno=3), HOST, USER, USER)
    assert identity.user is USER and identity.host is None


def test_host_of_another_user_is_not_taken_over() -> None:
    other = {**USER, "id": 2, "authenticator": "o" * 32}
    identity = identify(REQUEST, HOST, other, USER)
    assert identity.user is USER and identity.host is None


def test_reattached_host_is_found_by_its_identifier_or_its_looks() -> None:
    request = replace(REQUEST, host=replace(INFO, host_cpid="c"))
    cpid = scheduler.stored_cpid(request, USER)
    by_cpid = {**HOST, "host_cpid": cpid, "p_vendor": "", "p_model": "", "m_nbytes": 1}
    by_looks = {**HOST, "id": 2, "host_cpid": "", "p_vendor": "", "p_model": "", "m_nbytes": 8e9}
    assert similar_host(request, USER, [by_looks, by_cpid]) is by_cpid
    assert similar_host(request, USER, [by_looks]) is by_looks
    alone = replace(request, allow_multiple_clients=True)
    assert similar_host(alone, USER, [by_looks]) is None
    assert similar_host(alone, USER, [by_cpid]) is by_cpid
    assert scheduler.should_detach(request) and not scheduler.should_detach(alone)
    assert not scheduler.should_detach(replace(request, other_results=frozenset({"w"})))


def test_host_that_is_told_its_id_starts_counting_again() -> None:
    decision = run(new_to_client=True)
    assert decision.reply.host is not None and decision.reply.host.id == 3
    assert decision.changes.host["rpc_seqno"] == 0
    assert run().changes.host["rpc_seqno"] == 5


def test_code_sign_key_is_sent_only_to_clients_without_it() -> None:
    assert run().reply.code_sign_key == "KEY\n"
    assert run(replace(REQUEST, code_sign_key="K EY")).reply.code_sign_key == ""
    assert run(replace(REQUEST, code_sign_key="OTHER")).reply.code_sign_key == "KEY\n"


# Reports.


def reported(name: str, **fields: Any) -> SchedulerRequest:
    values: dict[str, Any] = {"client_state": 5, "elapsed_time": 100.0, "cpu_time": 90.0, **fields}
    return replace(REQUEST, results=(ReportedResult(name=name, **values),))


def test_success_is_over_and_wakes_the_transitioner() -> None:
    decision = run(reported("w_7_0"), reported={"w_7_0": on_host(7)})
    row = decision.changes.results[7]
    assert (row["server_state"], row["outcome"]) == (ServerState.OVER, Outcome.SUCCESS)
    assert "validate_state" not in row
    assert row["received_time"] == NOW
    assert decision.changes.transition_now == {1007}
    assert decision.reply.acks == ("w_7_0",)


@pytest.mark.parametrize("fields", [{"exit_status": 1}, {"client_state": 3}, {"client_state": 7}])
def test_error_is_a_client_error_and_invalid(fields: dict[str, int]) -> None:
    row = run(reported("w_7_0", **fields), reported={"w_7_0": on_host(7)}).changes.results[7]
    assert (row["outcome"], row["validate_state"]) == (Outcome.CLIENT_ERROR, ValidateState.INVALID)


#: Reports that change nothing and are acknowledged all the same.
IGNORED = [
    joined(7),
    on_host(7, server_state=ServerState.OVER, outcome=Outcome.SUCCESS),
    on_host(7, server_state=ServerState.OVER, outcome=Outcome.DIDNT_NEED),
    on_host(7, server_state=ServerState.OVER, outcome=Outcome.CLIENT_DETACHED, received_time=5),
    on_host(7, received_time=5),
    on_host(7, hostid=9, userid=9),
]


@pytest.mark.parametrize("row", IGNORED)
def test_report_that_cannot_count_is_acknowledged_and_ignored(row: dict[str, Any]) -> None:
    decision = run(reported("w_7_0"), reported={"w_7_0": row})
    assert not decision.changes.results and not decision.changes.transition_now
    assert decision.reply.acks == ("w_7_0",)


def test_unknown_result_is_acknowledged() -> None:
    assert run(reported("nobody_0")).reply.acks == ("nobody_0",)


def test_late_report_of_a_timed_out_result_still_counts() -> None:
    late = on_host(7, server_state=ServerState.OVER, outcome=Outcome.NO_REPLY)
    assert run(reported("w_7_0"), reported={"w_7_0": late}).changes.results[7]["outcome"] == Outcome.SUCCESS


def test_report_from_a_users_renumbered_host_counts() -> None:
    assert run(reported("w_7_0"), reported={"w_7_0": on_host(7, hostid=9)}).changes.results[7]["hostid"] == 3


def test_result_reported_twice_in_one_request_counts_once() -> None:
    once = reported("w_7_0")
    error = replace(once.results[0], exit_status=1)
    twice = replace(once, results=(once.results[0], error))
    assert run(twice, reported={"w_7_0": on_host(7)}).changes.results[7]["outcome"] == Outcome.SUCCESS


#: (claimed CPU, claimed elapsed, kept CPU, kept elapsed); the task was sent 1000 s ago, the host has 2 CPUs.
TIMES = [
    (90, 100, 90, 100),
    (90, 0, 90, 90),
    (90, 1e9, 90, 1000),
    (1e9, 100, 200, 100),
    (0, 0, 0, 0),
    (1e12, 0, 2000, 1000),
]


@pytest.mark.parametrize(("cpu", "elapsed", "kept_cpu", "kept_elapsed"), TIMES)
def test_absurd_times_are_cut(cpu: float, elapsed: float, kept_cpu: float, kept_elapsed: float) -> None:
    request = reported("w_7_0", cpu_time=cpu, elapsed_time=elapsed)
    row = run(request, reported={"w_7_0": on_host(7)}).changes.results[7]
    assert (row["cpu_time"], row["elapsed_time"]) == (kept_cpu, kept_elapsed)


def speed(**columns: Any) -> dict[int, dict[str, Any]]:
    return {1: new_row(database.host_app_version, host_id=3, app_version_id=1, **columns)}


def test_quota_grows_with_success_and_shrinks_with_errors() -> None:
    config = replace(CONFIG, daily_result_quota=100)
    kept = {"reported": {"w_7_0": on_host(7)}}
    good = run(reported("w_7_0"), config, speeds=speed(max_jobs_per_day=30), **kept)
    assert good.changes.speeds == {1: {"max_jobs_per_day": 60}}
    full = run(reported("w_7_0"), config, speeds=speed(max_jobs_per_day=100), **kept)
    assert full.changes.speeds == {}
    bad = run(reported("w_7_0", exit_status=1), config, speeds=speed(max_jobs_per_day=2), **kept)
    assert bad.changes.speeds == {1: {"consecutive_valid": 0, "max_jobs_per_day": 1}}
    ours = run(reported("w_7_0", exit_status=202), config, speeds=speed(max_jobs_per_day=2), **kept)
    assert ours.changes.speeds == {}


# Aborts.


def test_unneeded_results_are_aborted() -> None:
    names = frozenset({"known", "unknown", "cancelled", "done", "late", "foreign"})
    other = {
        "known": on_host(1),
        "cancelled": on_host(2, wu_error_mask=ErrorMask.CANCELLED),
        "done": on_host(3, wu_assimilate_state=2),
        "late": on_host(4, server_state=ServerState.OVER, outcome=Outcome.NO_REPLY),
        "foreign": on_host(5, hostid=99),
    }
    reply = run(replace(REQUEST, other_results=names), other=other).reply
    assert reply.aborts == ("cancelled", "foreign", "unknown")
    assert reply.aborts_if_not_started == ("done", "late")
    quiet = run(replace(REQUEST, other_results=names), replace(CONFIG, send_result_abort=False), other=other)
    assert not quiet.reply.aborts


# Sending.


def test_request_is_filled_up_to_what_it_asks_for() -> None:
    candidates = [joined(number) for number in range(1, 9)]
    config = replace(CONFIG, max_wus_in_progress=0)
    # One job takes 1 s of one processor here; two instances are wanted as well.
    for seconds, instances, expected in ((1, 0, 1), (0.1, 2, 2), (3.5, 0, 4), (0, 3, 3), (100, 0, 8)):
        request = replace(WORK, cpu_req_secs=seconds, cpu_req_instances=instances)
        assert len(sent(run(request, config, candidates=candidates))) == expected


def test_nothing_is_sent_to_who_does_not_ask() -> None:
    assert not sent(run(REQUEST, candidates=[joined(1)]))
    assert not sent(run(replace(WORK, dont_send_work=True), candidates=[joined(1)]))


def test_deadline_speed_and_grace_are_recorded() -> None:
    (assignment,) = run(WORK, candidates=[joined(1)]).changes.sent
    assert assignment.deadline == NOW + 3600
    assert assignment.version.flops == 1e10


def test_one_result_of_a_workunit_per_request() -> None:
    twins = [joined(1, workunitid=5), joined(2, workunitid=5), joined(3)]
    assert sent(run(WORK, candidates=twins)) == [1, 3]
    loose = replace(CONFIG, one_result_per_user_per_wu=False)
    assert sent(run(WORK, loose, candidates=twins)) == [1, 2, 3]


def test_limit_in_progress_counts_what_the_host_has() -> None:
    candidates = [joined(number) for number in range(1, 9)]
    for present, expected in ((0, 4), (3, 1), (4, 0)):
        have = [on_host(number + 50) for number in range(present)]
        request = replace(WORK, other_results=frozenset(row["name"] for row in have))
        decision = run(request, candidates=candidates, on_host=have)
        assert len(sent(decision)) == expected
    assert "This computer has reached a limit on tasks in progress" in texts(decision)
    freed = replace(request, results=(ReportedResult(name="w_50_0", client_state=5),))
    assert len(sent(run(freed, candidates=candidates, on_host=have, reported={"w_50_0": have[0]}))) == 1


INFEASIBLE = [
    (joined(1, wu_rsc_memory_bound=9e9), "memory"),
    (joined(1, wu_rsc_disk_bound=2e11), "disk"),
    (joined(1, wu_rsc_fpops_est=1e15), "deadline"),
    (joined(1, appid=2), "no application"),
]


@pytest.mark.parametrize(("row", "reason"), INFEASIBLE)
def test_infeasible_work_is_not_sent_and_the_reason_is_told(row: dict[str, Any], reason: str) -> None:
    decision = run(WORK, candidates=[row], apps={1: APP, 2: {**APP, "id": 2}})
    assert not sent(decision)
    assert any(reason in text for text in texts(decision))
    assert sent(run(WORK, candidates=[row, joined(2)], apps={1: APP, 2: {**APP, "id": 2}})) == [2]


def test_daily_quota_stops_a_host_that_only_fails() -> None:
    config = replace(CONFIG, daily_result_quota=100, max_wus_in_progress=0)
    candidates = [joined(number) for number in range(1, 9)]
    host = {**HOST, "rpc_time": NOW - 1}
    failing = run(WORK, config, host=host, candidates=candidates, speeds=speed(max_jobs_per_day=1))
    assert len(sent(failing)) == 1
    assert failing.changes.speeds == {1: {"n_jobs_today": 1}}
    over = speed(max_jobs_per_day=1, n_jobs_today=1)
    assert any("quota" in text for text in texts(run(WORK, config, host=host, candidates=candidates, speeds=over)))
    yesterday = {**HOST, "rpc_time": NOW - 86400}
    assert len(sent(run(WORK, config, host=yesterday, candidates=candidates, speeds=over))) == 1
    fresh = run(WORK, config, host=host, candidates=candidates)
    assert fresh.changes.new_speeds == {1: {"max_jobs_per_day": 100, "n_jobs_today": len(sent(fresh))}}


def test_request_too_soon_gets_no_work_but_its_reports_count() -> None:
    config = replace(CONFIG, min_sendwork_interval=6)
    request = replace(WORK, results=reported("w_7_0").results)
    host = {**HOST, "rpc_time": NOW - 2}
    decision = run(request, config, host=host, candidates=[joined(1)], reported={"w_7_0": on_host(7)})
    assert not sent(decision) and 7 in decision.changes.results
    assert "Please wait 4 seconds" in texts(decision)[0]
    assert decision.reply.request_delay == pytest.approx(6.06)
    assert sent(run(WORK, config, host={**HOST, "rpc_time": NOW - 6}, candidates=[joined(1)])) == [1]


def test_dry_reply_says_when_to_come_again() -> None:
    dry = run(WORK)
    assert texts(dry) == ["Project has no tasks available"] and dry.reply.next_rpc_delay == 10
    assert run(WORK, candidates=[joined(1)]).reply.next_rpc_delay == 0
    assert run(WORK, replace(CONFIG, next_rpc_delay=30), candidates=[joined(1)]).reply.next_rpc_delay == 30
    assert run(REQUEST).reply.next_rpc_delay == 0


def test_blacklisted_host_and_old_client_get_no_work() -> None:
    assert not sent(run(WORK, host={**HOST, "max_results_day": -1}, candidates=[joined(1)]))
    old = replace(CONFIG, min_core_client_version=80000)
    assert not sent(run(WORK, old, candidates=[joined(1)]))


# Lost results.


def test_lost_result_is_resent_and_nothing_new_with_it() -> None:
    decision = run(WORK, on_host=[on_host(50)], candidates=[joined(1)])
    (assignment,) = decision.changes.sent
    assert (assignment.result["id"], assignment.resend) == (50, True)
    assert decision.changes.new_speeds == {}, "a resent job is not counted twice"


@pytest.mark.parametrize("columns", [{"wu_error_mask": 2}, {"wu_canonical_resultid": 9}, {"appid": 2}])
def test_lost_result_that_is_not_worth_it_times_out_at_once(columns: dict[str, int]) -> None:
    decision = run(WORK, on_host=[on_host(50, **columns)], candidates=[joined(1)])
    assert decision.changes.results == {50: {"report_deadline": NOW - 1}}
    assert decision.changes.transition_now == {1050}
    assert sent(decision) == [1]


def test_nothing_counts_as_lost_without_a_complete_list() -> None:
    decision = run(replace(WORK, other_results_complete=False), on_host=[on_host(50)], candidates=[joined(1)])
    assert sent(decision) == [1]
    assert not run(REQUEST, on_host=[on_host(50)]).changes.sent
    present = replace(WORK, other_results=frozenset({"w_50_0"}))
    assert sent(run(present, on_host=[on_host(50)], candidates=[joined(1)])) == [1]


# Processors.


def test_gpu_work_goes_to_gpu_requests_only() -> None:
    table = VersionTable(
        versions=[version(), version(id=2, plan_class="opencl_ati_101"), version(id=3, plan_class="cuda_12")]
    )
    radeon = Coprocessor(type="ATI", count=1, request_instances=1, peak_flops=2.7e12, has_opencl=True)
    request = replace(REQUEST, coprocs=(radeon,))
    decision = run(request, versions=table, candidates=[joined(1), joined(2)])
    (assignment,) = decision.changes.sent
    assert (assignment.version.id, assignment.version.resource) == (2, "ATI")
    both = replace(request, cpu_req_secs=0.5, work_req_seconds=1)
    used = [each.version.id for each in run(both, versions=table, candidates=[joined(1), joined(2)]).changes.sent]
    assert used == [2, 1]
    blind = replace(request, coprocs=(replace(radeon, has_opencl=False),))
    assert not sent(run(blind, versions=table, candidates=[joined(1)]))


# XML.


def test_documents_get_what_only_the_scheduler_knows() -> None:
    decision = run(WORK, candidates=[joined(1)])
    documents = scheduler.Documents(
        workunits={1001: "<file_info>\n</file_info>\n<workunit>\n<file_ref>\n</file_ref>\n</workunit>"},
        results={1: "<result>\n    <file_ref>\n    </file_ref>\n</result>"},
    )
    reply = scheduler.complete_reply(decision, {1: APP}, documents)
    assert "<workunit>\n    <rsc_fpops_est>10000000000.000000</rsc_fpops_est>\n" in reply.workunits[0]
    assert "    <name>w_1</name>\n    <app_name>gradient</app_name>\n" in reply.workunits[0]
    assert reply.results[0].startswith(
        f"<result>\n<report_deadline>{NOW + 3600}</report_deadline>\n<wu_name>w_1</wu_name>\n<name>w_1_0</name>\n"
    )
    assert reply.results[0].endswith(
        f"    <platform>{LINUX}</platform>\n    <version_num>100</version_num>\n"
        "    <plan_class></plan_class>\n</result>"
    )
    assert reply.app_versions[0] == (
        f"<app_version>\n    <platform>{LINUX}</platform>\n    <avg_ncpus>1.000000</avg_ncpus>\n"
        "    <flops>10000000000.000000</flops>\n</app_version>\n"
    )
