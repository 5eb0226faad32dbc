"""A training through two stock BOINC clients on a MariaDB server, which is killed and started again on the way."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from apps.packaging.build import CACHE, build_app
from assimilator.replay import replay
from boinc_project import database, report, store
from boinc_project.app_versions import update_versions
from boinc_project.cli.project import port_of, prepare_project, project_processes, wait_until_listening
from boinc_project.gt_tables import JobState
from boinc_project.scripted_volunteer import create_account
from boinc_project.server.run import free_port
from boinc_project.states import Outcome, ServerState, ValidateState
from boinc_project.stock_client import StockClient, stock_client_available
from tests import databases, mariadb
from tests.server_project import rows
from tests.tiny_project import exported
from tests.training import logs
from work_generator.publish import publish_job

PATIENCE_S = 400.0
AWAY_S = 3.0

pytestmark = [
    pytest.mark.client,
    databases.needs_mariadb,
    pytest.mark.skipif(not stock_client_available(), reason="the stock BOINC client (boinc-client) is not installed"),
    pytest.mark.timeout(int(PATIENCE_S) + 200),
]


def test_stock_clients_train_over_mariadb_although_it_dies_on_the_way(tmp_path: Path) -> None:
    folder = tmp_path / "db"
    folder.mkdir()
    server = mariadb.private_server(folder)
    options: dict[str, str | int | float] = {
        "gt_dry_rpc_delay": 2,
        "gt_database_url": server.new_database().render_as_string(hide_password=False),
    }
    tree = prepare_project(tmp_path / "project", free_port(), "test", options)
    build_app(tree.project_dir, cache_dir=CACHE)
    job, made = exported()
    with tree.database() as db:
        assert not db.is_sqlite
        store.create_own_tables(db)
        update_versions(tree, db)
        publish_job(tree, db, job, made, "gradient", lambda text: None)
    processes = project_processes(tree.project_dir, 0.2, "user")
    clients = [StockClient(tmp_path / f"client {number}", ncpus=2) for number in (1, 2)]
    deadline, killed = time.monotonic() + PATIENCE_S, False
    try:
        processes.start()
        wait_until_listening("127.0.0.1", port_of(tree), processes)
        started = {child.name: processes.pid(child.name) for child in processes.children}
        for number, client in enumerate(clients):
            key = create_account(tree.config.master_url, f"v{number}@example.org", "secret!", f"v{number}")
            client.start()
            client.attach(tree.config.master_url, key)
        with tree.database() as db:
            while (row := report.job_of(db, "tiny")).state != JobState.FINISHED:
                assert row.state == JobState.RUNNING, row.note
                assert time.monotonic() < deadline, (row.current_version, logs(processes))
                if row.current_version == 1 and not killed:
                    server.stop(signal.SIGKILL)
                    time.sleep(AWAY_S)
                    server.start()
                    killed = True
                processes.watch()
                time.sleep(0.25)
            assert killed
            assert {child.name: processes.pid(child.name) for child in processes.children} == started, "none had to end"
            digests = [str(version["state_sha256"]) for version in versions(db, row.id)]
            assert list(replay(db, row).values()) == digests and len(digests) == job.config.train.max_versions + 1
            valid = [r for r in rows(db, database.result) if r["validate_state"] == ValidateState.VALID]
            over = rows(db, database.result, server_state=int(ServerState.OVER))
            assert {r["outcome"] for r in over} <= {Outcome.SUCCESS, Outcome.DIDNT_NEED}
            granted = sum(r["granted_credit"] for r in valid)
            assert granted > 0
            for table in (database.user, database.host):
                assert sum(r["total_credit"] for r in rows(db, table)) == pytest.approx(granted)
    finally:
        for client in clients:
            client.quit()
        processes.stop()
        server.stop()


def versions(db: database.Database, job_id: int) -> list[store.Row]:
    with db.read() as connection:
        return store.versions(connection, job_id)
