"""The scheduler's service on a real database: which unsent results it looks at."""

from __future__ import annotations

from pathlib import Path

from boinc_project import database
from boinc_project.server.scheduler_service import INDEXES, MAX_CANDIDATES, MIN_CANDIDATES, SchedulerService
from boinc_project.server.transitioner import Transitioner
from tests.server_project import add_user, add_workunits, as_host, make_project, publish_app, rows, wire_body

BEYOND_ANY_HOST = 1e15  # bytes of memory


def test_task_behind_tasks_that_do_not_fit_the_host_is_found(tmp_path: Path) -> None:
    tree = make_project(tmp_path / "project")
    with tree.database() as db:
        with db.transaction() as connection:
            for index in INDEXES:
                connection.exec_driver_sql(index)
        appid, key = publish_app(tree, db), add_user(db, "alice")
        transitioner = Transitioner(db, tree.config, upload_key=None)
        hidden = MAX_CANDIDATES - 1
        assert hidden > 4 * MIN_CANDIDATES
        add_workunits(tree, db, appid, hidden, prefix="large", rsc_memory_bound=BEYOND_ANY_HOST)
        add_workunits(tree, db, appid, 1, prefix="small")
        transitioner.run_once()
        service = SchedulerService(tree, db, transitioner)
        request = as_host(wire_body("scheduler-first-contact.request"), key=key, hostid=0)
        reply = service.answer([request])[0].reply
        assert b"<name>small_0_0</name>" in reply
        assert b"more memory" not in reply
        assert len(rows(db, database.result, hostid=1)) == 1
