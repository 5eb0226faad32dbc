"""Replies without work that wait for new results: which ones, how long, and what they bring."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests

from boinc_project import database
from boinc_project.database import Database
from boinc_project.server import scheduler
from boinc_project.server.held_replies import MAX_HELD, HeldReplies
from boinc_project.server.messages import MessageFromHost, ReportedResult, SchedulerReply, SchedulerRequest
from boinc_project.server.run import EmbeddedServer
from boinc_project.server.scheduler import Changes, Decision
from boinc_project.server.scheduler_service import Answer, Held, Posted, SchedulerService
from boinc_project.server.transitioner import Transitioner
from boinc_project.states import ServerState
from tests.server_project import add_user, add_workunits, make_project, publish_app, rows

# Which replies are held.

REPORT = SchedulerRequest(
    hostid=3,
    rpc_seqno=7,
    work_req_seconds=10,
    cpu_req_secs=10,
    results=(ReportedResult(name="w_1_0", client_state=5, exit_status=0),),
    messages=(MessageFromHost(result_name="w_1_0", time=1, variety="v", text="t"),),
    other_results_complete=True,
)


def reply_of(**parts: Any) -> SchedulerReply:
    return SchedulerReply(project_name="T", master_url="http://127.0.0.1/t/", request_delay=1, **parts)


def dry(hostid: int | None = None, searched: bool = True) -> Decision:
    """A decision that gave no work; `hostid` is that of a host that is told its id."""
    host = scheduler.HostPart(id=hostid, total_credit=0, expavg_credit=0, venue="", create_time=0)
    return Decision(reply=reply_of(host=host), changes=Changes(), searched=searched)


def test_reply_to_a_report_without_other_tasks_may_be_held() -> None:
    assert scheduler.may_be_held(REPORT, dry())


def test_reply_to_a_client_that_reports_nothing_is_given_at_once() -> None:
    assert not scheduler.may_be_held(replace(REPORT, results=()), dry())


def test_client_with_another_task_is_not_kept_from_reporting_it() -> None:
    assert not scheduler.may_be_held(replace(REPORT, other_results=frozenset({"w_2_0"})), dry())


def test_first_contact_is_never_held() -> None:
    assert not scheduler.may_be_held(REPORT, dry(hostid=3))


def test_refusal_for_another_reason_than_a_lack_of_work_is_not_held() -> None:
    assert not scheduler.may_be_held(REPORT, dry(searched=False))


def test_repeated_question_carries_no_report_and_is_never_too_soon() -> None:
    again = scheduler.repeated(REPORT)
    assert again.results == () and again.messages == () and again.wants_work
    host = {"rpc_time": 1000}
    config: Any = type("Config", (), {"min_sendwork_interval": 60})
    assert scheduler.wait_before_work(REPORT, host, 1000, config) == 60
    assert scheduler.wait_before_work(again, host, 1000, config) == 0


def test_joined_reply_acknowledges_the_report_and_brings_the_work() -> None:
    first = reply_of(acks=("w_1_0",), aborts=("a",), aborts_if_not_started=("b",), message_ack=True)
    second = reply_of(results=("<result/>",))
    both = scheduler.joined(first, second)
    assert both.acks == ("w_1_0",) and both.message_ack and both.aborts == ("a",)
    assert both.aborts_if_not_started == ("b",) and both.results == ("<result/>",)


# How long.

HELD = Held(REPORT, reply_of())


class Source:
    """Stands for the scheduler: without work until `works`, and counts what it is asked."""

    def __init__(self) -> None:
        self.asked: list[Posted | Held] = []
        self.results = 0
        self.works = False
        self.stopping = False

    async def answer(self, asked: Posted | Held) -> Answer:
        self.asked.append(asked)
        if self.works and isinstance(asked, Held):
            return Answer(b"work")
        return Answer(b"dry", HELD)

    def holding(self, seconds: float = 30.0) -> HeldReplies:
        return HeldReplies(
            self.answer,
            results_made=lambda: self.results,
            hold_s=seconds,
            is_stopping=lambda: self.stopping,
        )


def here() -> bool:
    """A client that waits for its reply."""
    return False


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


def test_held_reply_brings_work_as_soon_as_there_are_new_results() -> None:
    async def scenario() -> None:
        source = Source()
        waiting = asyncio.create_task(source.holding().answer(Posted(b"report"), here))
        await eventually(lambda: len(source.asked) == 1)
        source.results += 1  # of no use to this host
        await eventually(lambda: len(source.asked) == 2)
        source.works = True
        source.results += 1
        async with asyncio.timeout(20):
            assert await waiting == b"work"
        assert source.asked == [Posted(b"report"), HELD, HELD]

    asyncio.run(scenario())


def test_held_reply_is_given_after_its_time() -> None:
    source = Source()
    assert asyncio.run(source.holding(0.3).answer(Posted(b"report"), here)) == b"dry"
    assert source.asked == [Posted(b"report")]


def test_nothing_is_held_when_the_time_is_zero() -> None:
    source = Source()
    source.results = 1
    assert asyncio.run(source.holding(0).answer(Posted(b"report"), here)) == b"dry"
    assert source.asked == [Posted(b"report")]


def test_stopping_server_ends_every_wait() -> None:
    async def scenario() -> None:
        source = Source()
        waiting = asyncio.create_task(source.holding(3600).answer(Posted(b"report"), here))
        await eventually(lambda: len(source.asked) == 1)
        source.stopping = True
        async with asyncio.timeout(20):
            assert await waiting == b"dry"

    asyncio.run(scenario())


def test_client_that_hung_up_is_given_no_work() -> None:
    async def scenario() -> None:
        source = Source()
        source.works = True
        gone = False
        waiting = asyncio.create_task(source.holding(3600).answer(Posted(b"report"), lambda: gone))
        await eventually(lambda: len(source.asked) == 1)
        gone = True
        source.results += 1
        async with asyncio.timeout(20):
            await waiting
        assert source.asked == [Posted(b"report")]

    asyncio.run(scenario())


def test_more_replies_than_the_limit_are_given_at_once() -> None:
    async def scenario() -> None:
        source = Source()
        holding = source.holding(3600)
        waiting = [asyncio.create_task(holding.answer(Posted(b"report"), here)) for _ in range(MAX_HELD)]
        await eventually(lambda: len(source.asked) == MAX_HELD)
        await asyncio.sleep(0)
        async with asyncio.timeout(20):
            assert await holding.answer(Posted(b"one more"), here) == b"dry"
        source.stopping = True
        await asyncio.gather(*waiting)

    asyncio.run(scenario())


# What they bring: the service on a real database.


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    tree = make_project(tmp_path / "project", min_sendwork_interval=60)
    with EmbeddedServer(tree.project_dir) as server:
        appid = publish_app(tree, server.db)
        key = add_user(server.db, "alice")
        project = Project(server, appid, key)
        project.first_task()
        project.now += 1000
        yield project


class Project:
    """A served project with one host that has one task; requests go to a service of our own."""

    def __init__(self, server: EmbeddedServer, appid: int, key: str) -> None:
        self.server, self.appid, self.key = server, appid, key
        self.now = time.time()
        tree, db = server.tree, server.db
        self.transitioner = Transitioner(db, tree.config, upload_key=None, clock=lambda: self.now)
        self.service = SchedulerService(tree, db, self.transitioner, clock=lambda: self.now)
        self.seqno = 0

    @property
    def db(self) -> Database:
        return self.server.db

    def first_task(self) -> None:
        self.make_work("first")
        reply = self.ask(self.body(hostid=0)).reply
        assert b"<result>" in reply and b"<hostid>1</hostid>" in reply
        self.seqno = 0

    def make_work(self, prefix: str) -> None:
        add_workunits(self.server.tree, self.db, self.appid, 1, prefix=prefix)
        self.now = max(self.now, time.time())  # the workunit is due from the real time on
        self.transitioner.run_once()

    def body(self, *, hostid: int = 1, report: str = "") -> bytes:
        self.seqno += 1
        reported = f"<result><name>{report}</name><state>5</state></result>" if report else ""
        return (
            f"<scheduler_request><authenticator>{self.key}</authenticator><hostid>{hostid}</hostid>"
            f"<rpc_seqno>{self.seqno}</rpc_seqno><core_client_major_version>7</core_client_major_version>"
            "<work_req_seconds>1</work_req_seconds><cpu_req_secs>1</cpu_req_secs>"
            "<platform_name>x86_64-pc-linux-gnu</platform_name>"
            "<host_info><p_ncpus>1</p_ncpus><p_fpops>1e9</p_fpops><d_free>1e11</d_free></host_info>"
            f"{reported}<other_results></other_results></scheduler_request>"
        ).encode()

    def ask(self, asked: bytes | Held) -> Answer:
        return self.service.answer([asked if isinstance(asked, Held) else Posted(asked)])[0]

    def report(self) -> Held:
        answer = self.ask(self.body(report="first_0_0"))
        assert b"<name>first_0_0</name>" in answer.reply and b"<report_deadline>" not in answer.reply
        assert answer.held is not None
        return answer.held


@pytest.mark.usefixtures("each_database")
def test_report_is_processed_once_and_the_work_comes_within_the_interval(project: Project) -> None:
    held = project.report()
    reported = rows(project.db, database.result, name="first_0_0")
    assert reported[0]["server_state"] == ServerState.OVER
    project.make_work("second")
    answer = project.ask(held)
    assert answer.held is None
    assert re.search(rb"<result_ack>\s*<name>first_0_0</name>", answer.reply)
    assert b"<name>second_0_0</name>" in answer.reply and b"too recent" not in answer.reply
    assert rows(project.db, database.result, name="first_0_0") == reported


@pytest.mark.usefixtures("each_database")
def test_question_repeated_in_vain_changes_nothing(project: Project) -> None:
    held = project.report()
    before = rows(project.db, database.host)
    project.now += 1
    answer = project.ask(held)
    assert answer.held is held
    assert rows(project.db, database.host) == before


@pytest.mark.usefixtures("each_database")
def test_client_that_asked_anew_meanwhile_is_answered_there(project: Project) -> None:
    held = project.report()
    project.now += 100
    project.ask(project.body())
    project.make_work("second")
    answer = project.ask(held)
    assert answer.held is None and b"second_0_0" not in answer.reply
    assert len(rows(project.db, database.host)) == 1
    assert rows(project.db, database.result, name="second_0_0")[0]["server_state"] == ServerState.UNSENT


def test_held_reply_survives_a_stopped_scheduler(project: Project) -> None:
    held = project.report()
    (project.server.tree.project_dir / "stop_sched").touch()
    answer = project.ask(held)
    assert answer.held is None and b"first_0_0" in answer.reply and b"maintenance" not in answer.reply


# Over HTTP.


def test_reply_over_http_waits_for_work_and_ends_with_the_server(tmp_path: Path) -> None:
    tree = make_project(tmp_path / "project", gt_hold_dry_reply=3600)
    server = EmbeddedServer(tree.project_dir)
    server.start()
    try:
        appid = publish_app(tree, server.db)
        project = Project(server, appid, add_user(server.db, "alice"))
        project.first_task()
        replies: list[bytes] = []

        def post(body: bytes) -> threading.Thread:
            def send() -> None:
                with requests.Session() as session:
                    session.trust_env = False
                    reply = session.post(tree.config.scheduler_url, data=body, timeout=60)
                    replies.append(reply.content)

            thread = threading.Thread(target=send)
            thread.start()
            return thread

        def is_over(name: str) -> bool:
            return bool(rows(server.db, database.result, name=name, server_state=int(ServerState.OVER)))

        def wait_until_over(name: str) -> None:
            deadline = time.monotonic() + 20
            while not is_over(name):
                assert time.monotonic() < deadline
                time.sleep(0.02)

        first = post(project.body(report="first_0_0"))
        wait_until_over("first_0_0")
        assert first.is_alive()
        add_workunits(tree, server.db, appid, 1, prefix="second")
        first.join(20)
        assert b"<name>second_0_0</name>" in replies[0] and b"<name>first_0_0</name>" in replies[0]
        second = post(project.body(report="second_0_0"))
        wait_until_over("second_0_0")
        assert second.is_alive()
    finally:
        server.stop()
    second.join(20)
    assert b"<name>second_0_0</name>" in replies[1] and b"<report_deadline>" not in replies[1]
