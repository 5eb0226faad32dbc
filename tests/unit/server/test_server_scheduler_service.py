"""The scheduler's service on a real database: which unsent results it looks at."""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from boinc_project import database
from boinc_project.database import Database
from boinc_project.project_tree import ProjectTree
from boinc_project.server.scheduler_service import INDEXES, MAX_CANDIDATES, MIN_CANDIDATES, Posted, SchedulerService
from boinc_project.server.transitioner import Transitioner
from boinc_project.states import ServerState
from tests.server_project import add_user, add_workunits, as_host, make_project, publish_app, rows, wire_body
from validator.devices import gpus_of

FIRST_CONTACT = "scheduler-first-contact.request"
BEYOND_ANY_HOST = 1e15  # bytes of memory


def add_indexes(db: Database) -> None:
    if not db.is_sqlite:
        return
    with db.transaction() as connection:
        for index in INDEXES:
            connection.exec_driver_sql(index)


@pytest.mark.usefixtures("each_database")
def test_task_behind_tasks_that_do_not_fit_the_host_is_found(tmp_path: Path) -> None:
    tree = make_project(tmp_path / "project")
    with tree.database() as db:
        add_indexes(db)
        appid, key = publish_app(tree, db), add_user(db, "alice")
        transitioner = Transitioner(db, tree.config, upload_key=None)
        hidden = MAX_CANDIDATES - 1
        assert hidden > 4 * MIN_CANDIDATES
        add_workunits(tree, db, appid, hidden, prefix="large", rsc_memory_bound=BEYOND_ANY_HOST)
        add_workunits(tree, db, appid, 1, prefix="small")
        transitioner.run_once()
        service = SchedulerService(tree, db, transitioner)
        request = as_host(wire_body(FIRST_CONTACT), key=key, hostid=0)
        reply = service.answer([Posted(request)])[0].reply
        assert b"<name>small_0_0</name>" in reply
        assert b"more memory" not in reply
        assert len(rows(db, database.result, hostid=1)) == 1


SERVERS, ROUNDS = 10, 5


@pytest.mark.usefixtures("each_database")
def test_servers_that_share_a_database_never_give_one_result_twice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tree = make_project(tmp_path / "project", one_result_per_user_per_wu=0)
    with contextlib.ExitStack() as stack:
        dbs = [stack.enter_context(tree.database()) for _ in range(SERVERS)]
        add_indexes(dbs[0])
        appid, key = publish_app(tree, dbs[0]), add_user(dbs[0], "alice")
        services = [SchedulerService(tree, db, Transitioner(db, tree.config, upload_key=None)) for db in dbs]
        pool = stack.enter_context(ThreadPoolExecutor(SERVERS))
        bodies = []
        for number, service in enumerate(services):
            first = as_host(wire_body(FIRST_CONTACT), key=key, hostid=0, cpid=f"{number:032x}")
            first = first.replace(b"<domain_name>", f"<domain_name>h{number}".encode())
            reply = service.answer([Posted(first)])[0].reply
            hostid = int(re.findall(rb"<hostid>(\d+)</hostid>", reply)[0])
            bodies.append(as_host(wire_body("scheduler-reply-ten-tasks.request"), key=key, hostid=hostid))
        assert len(rows(dbs[0], database.host)) == SERVERS
        for each in range(ROUNDS):
            add_workunits(tree, dbs[0], appid, 1, prefix=f"round{each}")
            services[0].transitioner.run_once()
            barrier = threading.Barrier(SERVERS)

            def ask(number: int, barrier: threading.Barrier = barrier) -> bytes:
                barrier.wait()
                return services[number].answer([Posted(bodies[number])])[0].reply

            replies = list(pool.map(ask, range(SERVERS)))
            assert sum(f"<name>round{each}_0_0</name>".encode() in reply for reply in replies) == 1
            assert not any(b"internal error" in reply for reply in replies)
        given = rows(dbs[0], database.result)
        assert [row["server_state"] for row in given] == [ServerState.IN_PROGRESS] * ROUNDS
        assert not [record for record in caplog.records if record.exc_info]


def synchronous(db: Database) -> int:
    """SQLite's setting on a connection that has a synced transaction open: 2 is FULL."""
    with db.transaction() as connection:
        return int(connection.exec_driver_sql("PRAGMA synchronous").scalar_one())


def test_only_replies_that_change_something_lasting_wait_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree: ProjectTree = make_project(tmp_path / "project")
    synced: list[str] = []
    real = os.fdatasync

    def fdatasync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    with tree.database() as db:
        add_indexes(db)
        appid, key = publish_app(tree, db), add_user(db, "alice")
        service = SchedulerService(tree, db, Transitioner(db, tree.config, upload_key=None))
        first = as_host(wire_body(FIRST_CONTACT), key=key, hostid=0)
        assert b"<hostid>1</hostid>" in service.answer([Posted(first)])[0].reply
        log = f"{tree.project_dir}/project.sqlite-wal"
        assert synced == [log], "a new host is durable before the client hears its number"
        request = as_host(wire_body("scheduler-reply-ten-tasks.request"), key=key, hostid=1)
        assert b"no tasks available" in service.answer([Posted(request)])[0].reply
        assert synced == [log], "a reply without work is not"
        add_workunits(tree, db, appid, 1)
        service.transitioner.run_once()
        synced.clear()
        assert b"<report_deadline>" in service.answer([Posted(request)])[0].reply
        assert synced == [log], "a task is"
        assert synchronous(db) == 2, "and so is every other transaction"


NONSENSE = ("x" * 5000, "模🎉" * 400, "1e400", "-1e400", "nan", "9" * 30, "-9" * 30, "0x10", "1_0", "é' \\ \" %s %(x)s")


@pytest.mark.usefixtures("each_database")
@pytest.mark.parametrize("value", NONSENSE, ids=[ascii(value)[:12] for value in NONSENSE])
def test_whatever_a_client_says_of_itself_is_stored_within_the_columns(
    tmp_path: Path, value: str, caplog: pytest.LogCaptureFixture
) -> None:
    tree = make_project(tmp_path / "project")
    with tree.database() as db:
        add_indexes(db)
        appid, key = publish_app(tree, db), add_user(db, "alice")
        add_workunits(tree, db, appid, 1)
        service = SchedulerService(tree, db, Transitioner(db, tree.config, upload_key=None))
        service.transitioner.run_once()
        kept = ("authenticator", "platform_name", "hostid", "rpc_seqno", "core_client_", "work_req", "cpu_req", "name")
        text = re.sub(
            r"<(\w+)>[^<>]*</\1>",
            lambda m: m[0] if m[1].startswith(kept) else f"<{m[1]}>{value}</{m[1]}>",
            wire_body(FIRST_CONTACT).decode(),
        )
        reply = service.answer([Posted(as_host(text.encode(), key=key, hostid=0))])[0].reply
        assert b"internal error" not in reply and len(rows(db, database.host)) == 1
        report = (
            f"<result><name>w_0_0</name><final_cpu_time>{value}</final_cpu_time>"
            f"<final_elapsed_time>{value}</final_elapsed_time><exit_status>{value}</exit_status><state>5</state>"
            f"<app_version_num>{value}</app_version_num><final_peak_disk_usage>{value}</final_peak_disk_usage>"
            f"<stderr_out>{value * 40}</stderr_out><file_info><name>{value}</name></file_info></result>"
            f"<result><name>{value}</name></result></scheduler_request>"
        )
        with db.transaction() as connection:
            sent = {"server_state": int(ServerState.IN_PROGRESS), "hostid": 1, "userid": 1, "sent_time": 1}
            connection.execute(database.result.update().values(sent))
        text = text.replace("</scheduler_request>", report)
        reply = service.answer([Posted(as_host(text.encode(), key=key, hostid=1))])[0].reply
        assert b"internal error" not in reply
        assert [row["server_state"] for row in rows(db, database.result, name="w_0_0")] == [ServerState.OVER]
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.usefixtures("each_database")
def test_the_address_that_a_host_asks_from_is_kept_and_follows_it_when_it_moves(tmp_path: Path) -> None:
    tree = make_project(tmp_path / "project")
    with tree.database() as db:
        add_indexes(db)
        key = add_user(db, "alice")
        service = SchedulerService(tree, db, Transitioner(db, tree.config, upload_key=None))
        for hostid, address, kept in (
            (0, "203.0.114.9", "203.0.114.9"),
            (1, "198.51.101.1, 203.0.114.10", "198.51.101.1, 203.0.114.10"),
            (1, "", "198.51.101.1, 203.0.114.10"),
        ):
            service.answer([Posted(as_host(wire_body(FIRST_CONTACT), key=key, hostid=hostid), address)])
            (row,) = rows(db, database.host)
            assert row["external_ip_addr"] == kept


def test_a_host_s_cards_and_their_drivers_are_kept_as_boinc_keeps_them(tmp_path: Path) -> None:
    tree = make_project(tmp_path / "project")
    cards = (
        b'<coproc_cuda><count>1</count><name>NVIDIA "GTX" 1080</name><drvVersion>53512</drvVersion>'
        b"<totalGlobalMem>8589934592</totalGlobalMem></coproc_cuda>"
        b"<coproc_ati><count>1</count><name>Cypress</name><CALVersion>1.4.1848</CALVersion></coproc_ati>"
        b"<coproc_intel_gpu><count>1</count><name>UHD 620</name><coproc_opencl>"
        b"<opencl_driver_version>23.1</opencl_driver_version></coproc_opencl></coproc_intel_gpu>"
    )
    with tree.database() as db:
        add_indexes(db)
        key = add_user(db, "alice")
        service = SchedulerService(tree, db, Transitioner(db, tree.config, upload_key=None))
        body = as_host(wire_body(FIRST_CONTACT), key=key, hostid=0)
        body = re.sub(rb"<coprocs>.*?</coprocs>|<coprocs/>", b"", body, flags=re.S)
        service.answer([Posted(body.replace(b"<host_info>", b"<coprocs>" + cards + b"</coprocs><host_info>", 1))])
        (row,) = rows(db, database.host)
    assert gpus_of("", row["misc"]) == [
        ("nvidia", "NVIDIA GTX 1080", "53512"), ("amd", "Cypress", "1.4.1848"), ("intel_gpu", "UHD 620", "23.1"),
    ]  # fmt: skip
    assert json.loads(row["misc"])["gpus"][0]["ram_mb"] == 8192
