"""The address of a host: the connection's, or what a proxy in front has seen; never what only a volunteer says."""

from __future__ import annotations

from pathlib import Path

import pytest
import requests

from boinc_project import database
from boinc_project.server.remote import MOST_CHARACTERS, remote_address
from boinc_project.server.run import EmbeddedServer
from tests.server_project import add_user, as_host, make_project, rows, wire_body

PLAIN, PROXIED = "http://volunteer.example.org/", "https://volunteer.example.org/"


@pytest.mark.parametrize(
    ("peer", "forwarded", "url", "kept"),
    [
        ("203.0.114.9", [], PLAIN, "203.0.114.9"),
        ("2a00:1450::5", [], PLAIN, "2a00:1450::5"),
        ("203.0.114.9", ["8.8.8.8"], PLAIN, "203.0.114.9"),  # nobody is in front: the volunteer's own word
        ("203.0.114.9", ["8.8.8.8"], PROXIED, "8.8.8.8"),
        ("127.0.0.1", ["8.8.8.8"], PLAIN, "8.8.8.8"),
        ("10.0.0.7", ["8.8.8.8, 9.9.9.9"], PLAIN, "8.8.8.8, 9.9.9.9"),
        ("127.0.0.1", ["8.8.8.8", "9.9.9.9"], PLAIN, "8.8.8.8, 9.9.9.9"),
        ("127.0.0.1", ["unknown, <script>, 9.9.9.9"], PLAIN, "9.9.9.9"),
        ("127.0.0.1", ["unknown"], PLAIN, "127.0.0.1"),
        ("127.0.0.1", [], PLAIN, "127.0.0.1"),
        (None, [], PLAIN, "?.?.?.?"),
        (None, ["8.8.8.8"], PLAIN, "?.?.?.?"),
    ],
)
def test_the_header_counts_behind_a_proxy_only_and_addresses_alone_are_kept(
    peer: str | None, forwarded: list[str], url: str, kept: str
) -> None:
    assert remote_address(peer, forwarded, url) == kept


def test_of_a_list_that_is_too_long_the_end_is_kept_which_the_proxy_has_written() -> None:
    found = remote_address("127.0.0.1", [", ".join(["8.8.8.8"] * 200), "203.0.114.9"], PLAIN)
    assert len(found) <= MOST_CHARACTERS and found.startswith("8.8.8.8, ") and found.endswith(", 203.0.114.9")


def test_the_embedded_server_records_it_of_every_request(tmp_path: Path) -> None:
    tree = make_project(tmp_path / "project")
    with EmbeddedServer(tree.project_dir) as server:
        key = add_user(server.db, "alice")
        asked: tuple[tuple[int, dict[str, str], str], ...] = (
            (0, {}, "127.0.0.1"),
            (1, {"X-Forwarded-For": "203.0.114.9"}, "203.0.114.9"),
        )
        for hostid, headers, kept in asked:
            body = as_host(wire_body("scheduler-first-contact.request"), key=key, hostid=hostid)
            assert requests.post(server.config.scheduler_url, data=body, headers=headers, timeout=60).ok
            (row,) = rows(server.db, database.host)
            assert row["external_ip_addr"] == kept
