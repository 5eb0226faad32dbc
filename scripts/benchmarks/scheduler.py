"""Scheduler replies per second of the embedded server.

A work reply gives a task out; the server commits that durably (SQLite, WAL, synchronous=FULL) before it
answers. Requests that wait together share a commit, as many as there are connections at most. Every request
updates its host's row, as in stock BOINC, so that a reply without work needs a commit as well.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import time
from collections.abc import Sequence

import psutil
import sqlalchemy as sa

from boinc_project import database, templates
from boinc_project.database import Database
from boinc_project.project_tree import ProjectTree
from boinc_project.states import ServerState
from scripts.benchmarks.common import BenchmarkFailed, commit_latency, scratch, serving, shown
from scripts.benchmarks.load import Asking, Load, generate
from tests.server_project import WIRE, add_user, make_project, publish_app

USERS = 40
WORK_REQUEST = "scheduler-reply-ten-tasks.request"  # the recorded request was answered with tasks
NOWORK_REQUEST = "scheduler-no-work.request"  # and this one was not

#: Seconds that a task takes on the recorded host: more than it asks for, so that a reply gives one task.
TASK_S = 3600

_PATIENCE_S = 120.0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=1500, help="most requests of one repeat (default 1500)")
    parser.add_argument("--seconds", type=float, default=10.0, help="longest time of one repeat (default 10)")
    parser.add_argument("--repeats", type=int, default=3, help="repeats of each measurement (default 3)")
    parser.add_argument("--connections", type=int, default=4, help="connections at once (default 4)")


def measure(options: argparse.Namespace) -> dict[str, float]:
    """work_replies_per_s and nowork_replies_per_s, medians over the repeats."""
    count = options.requests * options.repeats
    with scratch("scheduler") as folder:
        print(f"one durable 4 KB write takes {1000 * commit_latency(folder):.2f} ms here (median)")
        tree = make_project(folder / "project", min_sendwork_interval=1)
        with tree.database() as db, serving(tree) as server:
            appid = publish_app(tree, db)
            hosts = _attach_hosts(tree, db, appid, count)
            print(
                f"{count} hosts of {USERS} users, each with a task; real requests of the stock client, 7 kB each;"
                f" {options.connections} connections at once, a new one for every request, from another process"
            )
            nowork = _repeat(server, tree, hosts, options, NOWORK_REQUEST, 1, r"no tasks available.*</scheduler_reply>")
            print(f"replies without work: {shown(nowork, 'per second')}", flush=True)
            _add_workunits(tree, db, appid, count // 2 + USERS, "new")
            _wait_for_results(db, count + 2 * USERS)
            work = _repeat(
                server, tree, hosts, options, WORK_REQUEST, 2, r"<result>\n<report_deadline>.*</scheduler_reply>"
            )
            print(f"replies with one task each: {shown(work, 'per second')}")
    return {
        "work_replies_per_s": statistics.median(work),
        "nowork_replies_per_s": statistics.median(nowork),
    }


def _repeat(
    server: psutil.Process,
    tree: ProjectTree,
    hosts: Sequence[Asking],
    options: argparse.Namespace,
    template: str,
    seqno: int,
    expected: str,
) -> list[float]:
    """Replies per second of each repeat; every repeat has hosts of its own."""
    rates, replies, before = [], 0, server.cpu_times()
    for repeat in range(options.repeats):
        mine = hosts[repeat * options.requests : (repeat + 1) * options.requests]
        load = Load(
            url=tree.config.scheduler_url,
            template=str(WIRE / template),
            code_sign_key=tree.code_sign_public().text(),
            requests=[Asking(**{**vars(host), "rpc_seqno": seqno}) for host in mine],
            connections=options.connections,
            seconds=options.seconds,
            expected=expected,
        )
        outcome = generate(load)
        rates.append(outcome.per_second)
        replies += outcome.replies
    after = server.cpu_times()
    cpu = after.user + after.system - before.user - before.system
    print(f"the server's processor time: {1000 * cpu / replies:.2f} ms a reply")
    return rates


def _attach_hosts(tree: ProjectTree, db: Database, appid: int, count: int) -> list[Asking]:
    """Hosts as they are after some time: attached, each with one task in progress."""
    keys = [add_user(db, f"user{number}") for number in range(USERS)]
    _add_workunits(tree, db, appid, (count + 1) // 2, "held")
    _wait_for_results(db, count)
    now = int(time.time())
    table, result = database.host, database.result
    cpids = [hashlib.md5(f"host {number}".encode()).hexdigest() for number in range(count)]
    with db.transaction() as connection:
        versionid = connection.scalar(sa.select(database.app_version.c.id))
        held = connection.execute(sa.select(result.c.id, result.c.name).order_by(result.c.id).limit(count)).all()
        rows = [
            database.new_row(
                table, id=number + 1, userid=number % USERS + 1, create_time=now, host_cpid=cpid, domain_name="host-a"
            )
            for number, cpid in enumerate(cpids)
        ]
        connection.execute(table.insert(), rows)
        connection.execute(
            result.update().where(result.c.id == sa.bindparam("key")),
            [
                {
                    "key": row.id,
                    "server_state": int(ServerState.IN_PROGRESS),
                    "hostid": number + 1,
                    "userid": number % USERS + 1,
                    "app_version_id": versionid,
                    "sent_time": now,
                    "report_deadline": now + 86400,
                }
                for number, row in enumerate(held)
            ],
        )
    return [
        Asking(
            key=keys[number % USERS], hostid=number + 1, cpid=cpids[number], rpc_seqno=0, other_result=held[number].name
        )
        for number in range(count)
    ]


def _add_workunits(tree: ProjectTree, db: Database, appid: int, count: int, prefix: str) -> None:
    """Workunits of two results each on one shared input file."""
    columns = {
        "rsc_fpops_est": TASK_S * 1e9,
        "rsc_fpops_bound": TASK_S * 1e15,
        "rsc_memory_bound": 1e7,
        "rsc_disk_bound": 1e7,
        "delay_bound": 86400,
        "min_quorum": 2,
        "target_nresults": 2,
        "max_error_results": 3,
        "max_total_results": 6,
        "max_success_results": 4,
    }
    document = templates.workunit_document(
        templates.input_template([templates.InputReference(open_name="in")], **columns),
        [tree.stage_file(b"input\n", "in_shared")],
    )
    now = int(time.time())
    rows = [
        templates.new_workunit(
            document,
            name=f"{prefix}_{number}",
            appid=appid,
            result_template_file="templates/uppercase_out",
            now=now,
        )
        for number in range(count)
    ]
    with db.transaction() as connection:
        connection.execute(database.workunit.insert(), rows)


def _wait_for_results(db: Database, count: int) -> None:
    """Until the server's transitioner has made so many unsent results."""
    query = (
        sa.select(sa.func.count())
        .select_from(database.result)
        .where(database.result.c.server_state == int(ServerState.UNSENT))
    )
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        with db.read() as connection:
            if (connection.scalar(query) or 0) >= count:
                return
        time.sleep(0.2)
    raise BenchmarkFailed(f"the server did not make {count} results in {_PATIENCE_S:.0f} s")
