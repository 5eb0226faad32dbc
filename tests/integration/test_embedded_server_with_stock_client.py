"""The unmodified BOINC client of the distribution works for the embedded server."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from boinc_project import database
from boinc_project.server.run import EmbeddedServer
from boinc_project.states import FileDeleteState, Outcome, ServerState
from boinc_project.stock_client import StockClient, stock_client_available
from tests.server_project import add_user, add_workunits, make_project, publish_app, rows

pytestmark = [
    pytest.mark.client,
    pytest.mark.skipif(not stock_client_available(), reason="the stock BOINC client is not installed"),
]


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        time.sleep(0.5)


def test_two_clients_download_compute_upload_and_report_with_quorum_two(tmp_path: Path) -> None:
    tree = make_project(tmp_path / "project", gt_dry_rpc_delay=5)
    with EmbeddedServer(tree.project_dir) as server:
        db, url = server.db, tree.config.master_url
        appid = publish_app(tree, db)
        names = add_workunits(tree, db, appid, 2, min_quorum=2, target_nresults=2)
        key = add_user(db, "alice")
        with (
            StockClient(tmp_path / "client é one") as one,
            StockClient(tmp_path / "client two") as two,
        ):
            one.attach(url, key)
            # The second volunteer creates the account through the client and attaches with its key.
            second = two.create_account(url, "bob@example.org", "secret", "bob")
            assert two.lookup_account(url, "bob@example.org", "secret") == second
            two.attach(url, second)

            def all_over() -> bool:
                found = rows(db, database.result)
                return len(found) == 4 and all(r["server_state"] == ServerState.OVER for r in found)

            try:
                wait_for(all_over, 150, "the end of all four results")
            except AssertionError:
                print(one.log_path.read_text(), two.log_path.read_text())
                raise
            assert one.project_dir(url).is_dir()
    results = rows(db, database.result)
    assert [result["outcome"] for result in results] == [Outcome.SUCCESS] * 4
    for name in names:
        (workunit,) = rows(db, database.workunit, name=name)
        assert workunit["need_validate"] == 1
        mine = [result for result in results if result["workunitid"] == workunit["id"]]
        assert {result["userid"] for result in mine} == {1, 2}
        for result in mine:
            assert result["file_delete_state"] == FileDeleteState.INIT
            (upload,) = tree.config.upload_dir.glob(f"*/{result['name']}_r*_0")
            assert upload.read_text() == f"INPUT {name[-1]}\n"
    db.close()
